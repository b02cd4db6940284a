"""The real engine with the real model under runner V2, in Triton's interpreter: the tokens of runner V1."""

import json

import pytest

from tests.interpreted import run
from tests.v2 import features
from tests.v2.engine import REQUESTS, RUNS, SEEDED


@pytest.fixture(scope="module")
def outputs(model_path, tmp_path_factory):
    """What `tests/v2/engine.py` wrote."""
    path = tmp_path_factory.mktemp("v2") / "outputs.json"
    run("-m", "tests.v2.engine", model_path, path, *RUNS)
    return json.loads(path.read_text())


def tokens_v1(engine, requests, count):
    """Return the tokens of the same requests, and their summed logprobs, under runner V1."""
    from vllm import SamplingParams

    params = [SamplingParams(max_tokens=count, **request) for _, request in requests]
    choices = [each.outputs[0] for each in engine.generate([prompt for prompt, _ in requests], params, use_tqdm=False)]
    return [list(each.token_ids) for each in choices], [each.cumulative_logprob for each in choices]


def test_tokens_and_logprobs_are_those_of_runner_v1(outputs, engine):
    """Greedy and seeded requests, with filters, penalties, a salt, logprobs; seeds past 2^63 and below 0. Float32."""
    tokens, logprobs = tokens_v1(engine, REQUESTS, 6)
    assert outputs["gumbel"]["tokens"] == tokens
    for found, expected in zip(outputs["gumbel"]["logprobs"], logprobs, strict=True):
        assert found == expected or found == pytest.approx(expected, abs=1e-3)
    assert tokens[2] != tokens[3], "the salt gives other noise"


@pytest.fixture(scope="module")
def features_v1(engine):
    """What runner V1 answers, as JSON gives it back."""
    return json.loads(json.dumps(features.answers(engine)))


@pytest.mark.parametrize("name", features.FEATURES)
def test_feature_acts_as_under_runner_v1(name, outputs, features_v1):
    """Texts, tokens and endings are equal, ids and ranks of logprobs too, and their values but for rounding."""
    found, expected = outputs["features"][name], features_v1[name]
    assert {choice[2] for choice in found["choices"]} == {features.FEATURES[name][2]}
    assert [choice[:4] for choice in found["choices"]] == [choice[:4] for choice in expected["choices"]]
    shown = [(choice[4], other[4]) for choice, other in zip(found["choices"], expected["choices"], strict=True)]
    for logprobs, others in [*shown, (found["prompt"], expected["prompt"])]:
        assert (logprobs is None) == (others is None)
        for at, other in zip(logprobs or (), others or (), strict=True):
            assert (at is None) == (other is None)
            for ours, theirs in zip(at or (), other or (), strict=True):
                assert ours == [*theirs[:2], pytest.approx(theirs[2], abs=1e-3)]


def test_tokens_do_not_depend_on_backend_or_schedule(outputs):
    """By Triton, with prompts that take several steps, in another engine: the first tokens of the run above."""
    assert outputs["in pieces"]["tokens"] == [each[:3] for each in outputs["gumbel"]["tokens"]]


def test_stocks_noise_gives_stocks_tokens(outputs):
    """Seeded requests as vLLM's own sampler draws them; and other tokens than our noise."""
    assert outputs["stock's noise"]["tokens"] == outputs["stock"]["tokens"]
    assert outputs["stock's noise"]["tokens"] != outputs["drafts"]["tokens"]


@pytest.mark.parametrize("name", ["drafts", "rejection"])
def test_drafts_are_accepted_and_rejected(name, outputs):
    """A drafter that samples with noise of its own, so that what follows can fail."""
    metrics = outputs[name]["metrics"]
    accepted = metrics["vllm:spec_decode_num_accepted_tokens_total"]
    assert 0 < accepted < metrics["vllm:spec_decode_num_draft_tokens_total"]


def test_drafts_change_no_token(outputs, engine):
    """Asynchronous scheduling is on, as always under runner V2."""
    assert outputs["drafts"]["tokens"] == tokens_v1(engine, SEEDED, 4)[0]


def test_rejection_changes_nothing_where_nothing_is_drawn(outputs):
    assert SEEDED[-1][1]["temperature"] == 0
    assert outputs["rejection"]["tokens"][-1] == outputs["stock"]["tokens"][-1]


def test_bad_parameter_is_refused_at_admission_by_our_sampler_alone(outputs):
    assert outputs["stock"]["refusal"] is None
    assert outputs["gumbel"]["refusal"].startswith("gumbel_salt must be an integer from -2^63 to 2^64 - 1, got 0.5")


def test_tokens_are_counted_with_labels_that_say_what_drew_them(outputs):
    metrics, (labels,) = outputs["gumbel"]["metrics"], outputs["gumbel"]["labels"]
    assert metrics["vllm_gumbel_sampled_tokens_total"] == 6 * len(REQUESTS)
    assert (labels["runner"], labels["backend"], labels["noise_version"]) == ("v2", "numba", "1")
    labels = outputs["stock's noise"]["labels"]
    assert ("v2", "triton", "stock") in {(each["runner"], each["backend"], each["noise_version"]) for each in labels}
