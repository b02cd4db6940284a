"""The studies of keys and claims: their prompts, what they measure on text, and the baselines they compare with."""

import importlib.util
import json
import math
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from tests.statistics import assert_goodness_of_fit
from vllm_gumbel.kernels.sample_reference import kept
from vllm_gumbel.params import GumbelParams

SCRIPTS = Path(__file__).resolve().parent.parent / "scripts"


def load(name):
    """Return a script as a module."""
    specification = importlib.util.spec_from_file_location(name, SCRIPTS / f"{name}.py")
    module = importlib.util.module_from_spec(specification)
    specification.loader.exec_module(module)
    return module


@pytest.fixture(scope="module")
def knobs():
    """scripts/study_knobs.py as a module."""
    return load("study_knobs")


@pytest.fixture(scope="module")
def claims():
    """scripts/study_claims.py as a module; it sets the number of threads, which is put back."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("OMP_NUM_THREADS", "1")
        yield load("study_claims")


def completion(*tokens, logprob=-1.0):
    return SimpleNamespace(token_ids=tokens, cumulative_logprob=logprob * len(tokens))


def test_prompts_are_many_and_a_part_of_them_is_spread_over_all(knobs):
    assert len(set(knobs.PROMPTS)) == len(knobs.PROMPTS) >= 200
    some = knobs.spread(40)
    assert len(set(some)) == 40
    assert sum(prompt.startswith("Write") for prompt in some) == 2
    assert knobs.spread(10**6) == knobs.PROMPTS


def test_every_key_is_studied_and_every_setting_is_one_that_a_server_takes(knobs):
    studied = set()
    for name, given in knobs.SETTINGS.items():
        keys = {key: value for key, value in given.items() if key != "temperature"}
        GumbelParams.from_extra_args(keys, given["temperature"])
        studied.update(keys)
        assert "temperature" in given, name
    assert studied == set(GumbelParams.model_fields) - {"gumbel_return_info", "gumbel_rollout_key"}, (
        "they change no draw"
    )


def test_measures_of_text_by_hand(knobs):
    measures = knobs.measures_of_text([completion(1, 2, 1, 2, 1, 2, logprob=-2.0), completion(1, 2, 3, 4, 5, 6)])
    assert measures["mean_logprob"] == -1.5
    assert measures["distinct_1"] == pytest.approx((2 / 6 + 1) / 2)
    assert measures["distinct_2"] == pytest.approx((2 / 5 + 1) / 2)
    assert measures["distinct_3"] == pytest.approx((2 / 4 + 1) / 2)
    assert (measures["loop_rate"], measures["loop_share"]) == (0.5, 0)
    left = knobs.measures_of_text([completion(3, 3, 3, 7)])
    assert (left["loop_rate"], left["loop_share"]) == (1, 0), "a loop that was left again counts, its end does not"
    longer = knobs.measures_of_text([completion(3, 3, 3, 3, 3), completion(1, 2, 3, 4, 5)])
    assert longer["loop_share"] == pytest.approx((2 / 4 + 0) / 2), "the fourth and the fifth continue three copies"


def test_throughput_is_the_median_over_that_of_the_plain_setting_and_of_vllms_sampler_at_the_same_temperature(knobs):
    names = ["noise scale 0.5", "greedy"]
    asked = knobs.arms(names)
    assert list(asked) == [
        ("gumbel", "noise scale 0.5"),
        ("gumbel", "greedy"),
        ("gumbel", knobs.PLAIN_NAME),
        ("default", "0"),
        ("default", "1"),
    ]
    assert asked["default", "0"] == {"temperature": 0.0, "gumbel_sampler": "default"}
    rates = dict(zip(asked, ([1, 100, 3], [8, 8, 0], [6, 5, 6], [2, 2, 2], [12, 99, 1]), strict=True))
    found = knobs.ratios(rates, names)
    assert found["noise scale 0.5"] == {"tokens_per_second": 3, "throughput_ratio": 0.5, "stock_ratio": 0.25}
    assert found["greedy"] == {"tokens_per_second": 8, "throughput_ratio": 8 / 6, "stock_ratio": 4}


def test_arms_take_turns_and_every_other_round_runs_backwards(knobs):
    asked = []

    def run(params):
        asked.append((params.temperature, params.max_tokens, params.seed, dict(params.extra_args)))
        return 10

    rates = knobs.throughput(run, 5, 2, ["noise scale 0.5"])
    keys: list[dict] = [{"gumbel_noise_scale": 0.5}, {}, {"gumbel_sampler": "default"}]
    forward = [(1.0, 5, None, each) for each in keys]
    assert asked == forward + forward[::-1]
    assert [len(values) for values in rates.values()] == [2, 2, 2]


def test_table_has_a_row_per_setting(knobs):
    results = {name: dict.fromkeys(knobs.COLUMNS, 0.5) for name in ("a", "b")}
    lines = knobs.table(results).splitlines()
    assert len(lines) == 4
    assert {line.count("|") for line in lines} == {len(knobs.COLUMNS) + 2}
    assert lines[2].startswith("| a | 0.500 |")


def test_multinomial_draws_from_the_filtered_law(claims):
    """The baseline is right, or beating it would mean nothing: 20,000 draws, false alarms 2e-7; no id outside."""
    row = np.random.default_rng(0).standard_normal(50).astype(np.float32) * 2
    tempered = row / np.float32(claims.TEMPERATURE)
    for top_k, top_p in ((0, 1.0), (20, 0.9)):
        mass = np.where(kept(tempered, top_k, top_p, 0.0), np.exp(tempered.astype(np.float64)), 0.0)
        torch.manual_seed(1)
        tokens = claims.multinomial(torch.from_numpy(row).expand(20_000, -1), top_k, top_p).flatten().numpy()
        claim = f"multinomial, top_k {top_k}, top_p {top_p}"
        assert_goodness_of_fit(observed=np.bincount(tokens, minlength=50), probabilities=mass / mass.sum(), claim=claim)


@pytest.mark.parametrize(
    ("ratios", "said"),
    [
        ({"a": 3.0, "b": 2.7}, "supported"),
        ({"a": 3.0, "b": 2.6}, "supported against a only"),
        ({"a": 1.0, "b": 2.6}, "not supported"),
    ],
)
def test_verdict_follows_the_ratios(claims, ratios, said):
    assert claims.verdict("c", "m", ratios, 2.7) == ("c", "m", "a, b", said)


def test_statements_about_law_and_tail_are_computed_from_draws(claims):
    """Small, so that it is quick; the numbers are in the sentence."""
    sensitivity = claims.temperature_sensitivity(20_000)
    assert sensitivity.verdict == "not supported"
    assert sensitivity.measured.count("p = ") == 5
    tail = claims.tail_distortion(200)
    expected = 200 * (1 - 1 / (1 + 65_536 * math.exp(-18)))
    assert f"{expected:.1f} expected" in tail.measured
    assert tail.verdict == "not supported"


def test_speed_is_measured_for_every_arm(claims):
    found = claims.throughput(2, 300, 2)
    assert len(found) == len(claims.MODES)
    assert all("multinomial" in each.measured and "stock" in each.measured for each in found)
    assert claims.memory_work(2, 300, 2).baseline == "our own draw after a copy"
    assert json.loads(json.dumps([each._asdict() for each in found]))[0]["claim"] == "2.7 times the throughput"
