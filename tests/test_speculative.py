"""Speculative decoding changes no token: the real engine with an n-gram drafter against the engine without drafts."""

import numpy as np
import pytest

from vllm_gumbel.integration.speculative import split
from vllm_gumbel.kernels import sample_numba
from vllm_gumbel.kernels.contract import RowParams

PROMPTS = [
    "one two three four one two three four one two three four one two",
    "The cat sat on the mat. The dog sat on the mat. The cat sat on the",
    "1 1 2 1 1 2 1 1 2 1 1 2 1 1 2 1 1",
    "def add(a, b):\n    return a + b\n\ndef sub(a, b):\n    return a - b\n\ndef mul(a, b):\n",
    "Once upon a time",
]
SETTINGS = [
    {"temperature": 0.0},
    {"temperature": 0.7, "seed": 1},
    {"temperature": 1.0, "seed": 2, "top_p": 0.9},
    {"temperature": 0.8, "seed": 3, "top_k": 30},
    {"temperature": 0.6, "seed": 4, "repetition_penalty": 1.1, "presence_penalty": 0.2},
    {"temperature": 0.6, "seed": 5, "frequency_penalty": 0.3, "bad_words": ["dog"]},
    {"temperature": 1.0, "seed": 6, "min_tokens": 20, "stop_token_ids": [198, 28]},
    {"temperature": 0.7, "seed": 7, "logprobs": 2},
    {"temperature": 0.7, "seed": 8, "extra_args": {"gumbel_hybrid_steps": 12, "gumbel_salt": 5}},
    {"temperature": 1.0, "seed": 9, "top_p": 0.9, "extra_args": {"gumbel_noise_scale": 0.5, "gumbel_top_n": 100}},
    {"temperature": 0.5, "seed": 10, "extra_args": {"gumbel_tail_boost": 0.1}},
    {"temperature": 0.0, "extra_args": {"gumbel_repetition_offset": 2.0}},
    {"temperature": 0.7, "seed": 11, "top_k": 50, "extra_args": {"gumbel_sampler": "default"}},
]


@pytest.fixture(scope="module")
def drafting(model_path):
    """The default model with drafts from n-grams of its own text."""
    from vllm import LLM

    llm = LLM(
        str(model_path),
        dtype="float32",
        enforce_eager=True,
        max_model_len=512,
        disable_log_stats=False,
        speculative_config={"method": "ngram", "num_speculative_tokens": 4, "prompt_lookup_max": 3},
        additional_config={"sampler": "gumbel"},
    )
    yield llm
    llm.llm_engine.engine_core.shutdown()


def run(llm):
    """Return every combination's output."""
    from vllm import SamplingParams

    each = [(prompt, SamplingParams(**setting, max_tokens=48)) for prompt in PROMPTS for setting in SETTINGS]
    return [out.outputs[0] for out in llm.generate([p for p, _ in each], [s for _, s in each], use_tqdm=False)]


def counter(llm, name):
    return sum(metric.value for metric in llm.get_metrics() if metric.name == name)


def test_drafts_change_no_token_and_no_logprob(engine, drafting):
    """vllm#13196, vllm#6038: whatever is asked for, greedy, filters, penalties, bad words, min tokens, keys.

    Seeded requests only, since an unseeded one draws its seed when it is admitted.
    """
    plain, drafted = run(engine), run(drafting)
    accepted = counter(drafting, "vllm:spec_decode_num_accepted_tokens")
    assert accepted > 50, "the case is only hard if drafts are accepted"
    assert accepted < counter(drafting, "vllm:spec_decode_num_draft_tokens"), "and if some are not"
    assert [list(d.token_ids) for d in drafted] == [list(p.token_ids) for p in plain]
    for with_drafts, without in zip(drafted, plain, strict=True):
        if without.logprobs is None:
            assert with_drafts.logprobs is None
            continue
        for a, b in zip(with_drafts.logprobs, without.logprobs, strict=True):
            assert a.keys() == b.keys()
            assert [v.logprob for v in a.values()] == pytest.approx([v.logprob for v in b.values()], abs=1e-3)
            assert [v.rank for v in a.values()] == [v.rank for v in b.values()]


def test_other_seed_gives_other_tokens_with_drafts(drafting):
    """vllm#13196: the seed is honoured, not merely constant."""
    from vllm import SamplingParams

    outputs = drafting.generate(
        [PROMPTS[0]] * 3, [SamplingParams(temperature=1.0, seed=s, max_tokens=24) for s in (1, 1, 2)], use_tqdm=False
    )
    first, again, other = (list(output.outputs[0].token_ids) for output in outputs)
    assert first == again
    assert first != other


@pytest.mark.parametrize("spread", [0.1, 0.5, 1.5])
def test_sampled_drafts_match_as_often_as_the_coupling_promises(spread):
    """A drafter that draws with the target's noise matches it with probability at least (1 - d) / (1 + d).

    d is the total variation between the two laws (Daliri et al. 2024, theorem 1); independent noise matches far less
    often. 40,000 draws: false alarm 1e-6 for a drafter exactly at the bound, caught with power 0.99: 1.8 percentage
    points less. Measured shares: 0.955, 0.771, 0.389, against 0.935, 0.687, 0.288 promised.
    """
    generator = np.random.default_rng(int(10 * spread))
    target = (generator.standard_normal(200) * 2).astype(np.float32)
    draft = (target + spread * generator.standard_normal(200)).astype(np.float32)
    trials = 40_000
    params = RowParams.uniform(trials, seed=7)
    params.position[:] = np.arange(trials)
    drawn = [sample_numba.draw(np.broadcast_to(each, (trials, 200)), params).tokens for each in (target, draft)]
    laws = [np.exp(each - each.max(), dtype=np.float64) for each in (target, draft)]
    p, q = (law / law.sum() for law in laws)
    distance = 0.5 * np.abs(p - q).sum()
    bound = (1 - distance) / (1 + distance)
    matched = (drawn[0] == drawn[1]).mean()
    assert matched > bound - 4.75 * (bound * (1 - bound) / trials) ** 0.5
    assert matched > 2 * (p * q).sum(), "what independent noise gives is far less"


def test_split_cuts_drafts_by_request():
    assert split([1, 2, 3, 4], [2, 0, 1, 1]) == [[1, 2], [], [3], [4]]
