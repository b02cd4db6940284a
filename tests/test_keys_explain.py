"""`vllm-gumbel params` and `vllm-gumbel explain`: numbers that are those of the draw, words and a plot."""

import math

import numpy as np
import pytest

from tests import naive
from tests.statistics import assert_goodness_of_fit
from vllm_gumbel.cli import main
from vllm_gumbel.explain import PROMPTS, SWEEPS, Setting, effect, law, plot, sentences
from vllm_gumbel.kernels import keyed_draws
from vllm_gumbel.kernels.sample_reference import kept, scale
from vllm_gumbel.params import CONTRADICTIONS, GumbelParams, ParamsError


def row_of(vocabulary, seed=0):
    return (np.random.default_rng(seed).standard_normal(vocabulary) * 2).astype(np.float32)


def setting(**given):
    """Return a setting from vLLM's fields and from keys."""
    keys = {name: given.pop(name) for name in list(given) if name.startswith("gumbel_")}
    return Setting(**given, keys=GumbelParams.from_extra_args(keys, given.get("temperature", 1.0)))


@pytest.mark.parametrize(
    "given",
    [
        {},
        {"temperature": 0.7},
        {"temperature": 1.3, "top_k": 20, "top_p": 0.9, "min_p": 0.01},
        {"gumbel_preset": "factual", "gumbel_temperature_rule": "log_vocab", "gumbel_top_n": 30},
        {"temperature": 0.9, "top_p": 0.95, "gumbel_noise_scale": 0.5},
    ],
)
def test_law_is_that_of_the_naive_filters(given):
    """In plain Python; 12 digits."""
    asked, row = setting(**dict(given)), row_of(50)
    keys = asked.keys
    temperature = keys.temperature(asked.temperature, 50)
    x = naive.tempered(row.tolist(), temperature)
    top_k = keys.top_k(asked.top_k)
    keep = naive.kept(x, naive.Parameters(temperature, top_k, asked.top_p, asked.min_p))
    masses = {token: math.exp((x[token] - max(x)) / keys.gumbel_noise_scale) for token in keep}
    expected = [masses.get(token, 0.0) / math.fsum(masses.values()) for token in range(50)]
    assert law(row, asked).tolist() == pytest.approx(expected, rel=1e-12, abs=0)


def test_draws_follow_the_law_that_is_explained():
    """20,000 draws of the library with filters and scaled noise; false alarms 2e-7."""
    asked, row = setting(temperature=0.9, top_p=0.95, gumbel_noise_scale=0.6), row_of(50)
    x = scale(row, np.float32(0.9))
    x = np.where(kept(x, 0, 0.95, 0.0), x, np.float32(-np.inf))
    tokens = [keyed_draws.scaled_race(x, seed, 0, 0, 0.6) for seed in range(20_000)]
    assert_goodness_of_fit(observed=np.bincount(tokens, minlength=50), probabilities=law(row, asked), claim="explained")


@pytest.mark.parametrize("given", [{"temperature": 0.0}, {"gumbel_noise_scale": 0}, {"top_k": 1}, {"gumbel_top_n": 1}])
def test_greedy_settings_give_the_best_id(given):
    row = row_of(50)
    assert law(row, setting(**given)).tolist() == [float(i == row.argmax()) for i in range(50)]


def test_effect_of_a_row_that_can_be_computed_by_hand():
    """Probabilities 1/2, 1/4, 1/8, 1/8; top_k 2 leaves 2/3 and 1/3."""
    row = np.log(np.array([[0.5, 0.25, 0.125, 0.125]], np.float32))
    plain, two = effect(row, setting()), effect(row, setting(top_k=2))
    assert plain.entropy_nats == pytest.approx(1.75 * math.log(2))
    assert (plain.kept_ids, plain.kept_mass, plain.kl_nats) == (4, pytest.approx(1), pytest.approx(0))
    assert two.entropy_nats == pytest.approx(math.log(3) - 2 / 3 * math.log(2))
    assert (two.kept_ids, two.kept_mass, two.best) == (2, pytest.approx(0.75), pytest.approx(2 / 3))
    assert two.kl_nats == pytest.approx(math.log(4 / 3))


def test_tail_boost_flattens_and_is_the_same_each_time():
    rows = np.stack([row_of(50, seed) for seed in range(5)]) * 2
    plain, boosted = (effect(rows, setting(gumbel_tail_boost=c)) for c in (0, 0.5))
    assert boosted == effect(rows, setting(gumbel_tail_boost=0.5))
    assert boosted.entropy_nats > plain.entropy_nats
    assert boosted.kl_nats > 0.01


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"temperature": 0.0, "top_k": 5}, ["Temperature 0: the best id is taken"]),
        ({"temperature": 0.8}, ["divided by the temperature 0.8 (0.8)", "drawn by Gumbel-Max, exactly"]),
        (
            {"gumbel_preset": "factual", "gumbel_temperature_rule": "log_vocab"},
            ["temperature 1.456 (preset factual times 1 + 0.1 ln 49152)"],
        ),
        (
            {"top_k": 9, "gumbel_top_n": 5, "min_p": 0.1, "top_p": 0.9},
            ["0.1 times the best", "the 5 best", "0.9 of their"],
        ),
        ({"gumbel_hybrid_steps": 4}, ["the first 4 by inverse CDF"]),
        ({"gumbel_noise_scale": 0.5}, ["noise times 0.5"]),
        ({"gumbel_noise_scale": 0}, ["noise is scaled to 0"]),
        ({"gumbel_tail_boost": 0.5, "gumbel_repetition_offset": 2}, ["lose 2 for each copy", "0.5 times the row's"]),
        ({"gumbel_sampler": "default"}, ["vLLM's own sampler"]),
    ],
)
def test_sentences_say_what_happens(given, said):
    text = " ".join(sentences(setting(**given), 49_152))
    assert all(part in text for part in said), text


@pytest.mark.parametrize("over", SWEEPS)
def test_plot_has_a_line_per_value_and_bars_that_grow_with_the_numbers(over):
    rows = np.stack([row_of(200, seed) for seed in range(3)])
    lines = plot(rows, setting(), over)
    assert len(lines) == 1 + len(SWEEPS[over])
    for value, line in zip(SWEEPS[over], lines[1:], strict=True):
        each = effect(rows, setting().at(over, value))
        assert f"{each.entropy_nats:6.3f}" in line
        assert line.count("=") == round(24 * each.kept_mass)
    assert max(line.count("#") for line in lines) == 24


def test_setting_refuses_values_that_its_keys_contradict():
    with pytest.raises(ParamsError, match="gumbel_preset contradicts temperature"):
        setting(gumbel_preset="factual").at("temperature", 0.5)
    assert setting(gumbel_preset="factual").at("gumbel_top_n", 5.0).keys.gumbel_top_n == 5


def test_params_prints_every_key_and_every_contradiction(capsys):
    assert main(["params"]) == 0
    printed = capsys.readouterr().out
    for key, *_ in GumbelParams.table():
        assert f"\n{key}\n" in f"\n{printed}"
    for rule in CONTRADICTIONS:
        assert f"{rule.key} and {rule.other}: {rule.reason}" in printed


def test_explain_asks_the_model(model_path, capsys):
    arguments = ["explain", "--temperature", "0.8", "--top-p", "0.9", "--gumbel-top-n", "1000", "--over", "top_p"]
    assert main([*arguments, "--model", str(model_path), "--prompt", PROMPTS[0]]) == 0
    printed = capsys.readouterr().out
    assert "the 1000 best" in printed
    assert "Mean over 1 texts" in printed
    rows = [line.split() for line in printed.splitlines() if line.startswith("kept_ids")]
    ((_, before, after),) = rows
    assert float(before) == 49_152
    assert 1 <= float(after) < 1000
    assert printed.count("=") > 24


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--gumbel-preset", "wild"], "gumbel_preset must be one of creative, factual, got 'wild'"),
        (["--gumbel-noise-scale", "nan"], "gumbel_noise_scale must be a number from 0 to 1, got 'nan'"),
        (["--gumbel-noise-scale", "NaN"], "gumbel_noise_scale must be a number from 0 to 1, got nan"),
        (["--temperature", "0", "--gumbel-hybrid-steps", "3"], "gumbel_hybrid_steps contradicts temperature 0"),
        (["--gumbel-preset", "factual", "--over", "temperature"], "gumbel_preset contradicts temperature"),
    ],
)
def test_explain_refuses_what_a_server_refuses(arguments, said, capsys):
    assert main(["explain", *arguments]) == 1
    captured = capsys.readouterr()
    assert captured.out == ""
    assert said in captured.err
