"""Penalties from sparse counts equal vLLM's, step after step."""

import numpy as np
import pytest
import torch
from vllm import SamplingParams
from vllm.v1.sample.ops.penalties import apply_all_penalties

from vllm_gumbel.integration.penalties import PenaltyCounts

VOCAB = 997


def stock(logits, params, prompt, output):
    """Return what vLLM makes of one row."""
    values = [torch.tensor([getattr(params, f"{kind}_penalty")]) for kind in ("presence", "frequency", "repetition")]
    prompts = torch.tensor([prompt], dtype=torch.int64)
    return apply_all_penalties(torch.from_numpy(logits.copy())[None], prompts, *values, [list(output)])[0].numpy()


@pytest.mark.parametrize(
    "penalties",
    [
        {"repetition_penalty": 1.3},
        {"repetition_penalty": 0.7},
        {"frequency_penalty": 0.8},
        {"presence_penalty": -1.5},
        {"repetition_penalty": 1.1, "frequency_penalty": -0.4, "presence_penalty": 0.6},
    ],
    ids=lambda p: "+".join(p),
)
def test_penalties_equal_vllm_over_a_growing_output(penalties):
    """To the last bit."""
    generator = np.random.default_rng(1)
    params = SamplingParams(**penalties)
    prompt = generator.integers(0, VOCAB, 60).tolist()
    counts = PenaltyCounts.of(prompt, params)
    output = []
    for _ in range(80):
        logits = generator.normal(0, 4, VOCAB).astype(np.float32)
        ours = logits.copy()
        counts.update(output)
        counts.apply(ours)
        expected = stock(logits, params, prompt, output)
        assert np.array_equal(ours, expected)
        assert np.array_equal(ours[~touched(prompt, output)], logits[~touched(prompt, output)])
        output.append(int(generator.choice([3, 5, int(generator.integers(VOCAB))])))


def touched(prompt, output):
    """Return which ids a penalty may concern, bool [vocab]."""
    mask = np.zeros(VOCAB, bool)
    mask[[*prompt, *output]] = True
    return mask


def test_tokens_not_known_yet_are_counted_when_they_are():
    """Asynchronous scheduling shows -1 for the last token until it has arrived."""
    params = SamplingParams(frequency_penalty=1.0)
    counts = PenaltyCounts.of([], params)
    row = np.zeros(8, np.float32)
    for output in ([4, -1], [4, 4, -1], [4, 4, 6]):
        counts.update(output)
    counts.apply(row)
    assert row.tolist() == [0, 0, 0, 0, -2, 0, -1, 0]


def test_tokens_taken_back_are_forgotten():
    params = SamplingParams(frequency_penalty=1.0, repetition_penalty=2.0)
    counts = PenaltyCounts.of([1], params)
    counts.update([4, 4, 6])
    counts.update([4])
    row = np.ones(8, np.float32)
    counts.apply(row)
    assert row.tolist() == [1, 0.5, 1, 1, -0.5, 1, 1, 1]


def test_request_without_penalty_keeps_no_counts():
    assert PenaltyCounts.of([1, 2], SamplingParams(temperature=0.5)) is None
