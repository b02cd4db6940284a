"""Public failures of samplers, as calls of the Triton kernels; each docstring names its case."""

import numpy as np
import pytest
import torch

from tests.kernels.drawing import assert_draws_equal, draw_in_slots, draw_many, draw_one, small_tiles  # noqa: F401
from tests.rows import INFINITY, NAN, bfloat16
from vllm_gumbel.kernels import sample_reference
from vllm_gumbel.kernels.contract import NO_TOKEN, Flag, RowParams
from vllm_gumbel.kernels.slots import Filters

SEEDS = range(64)


@pytest.mark.parametrize("place", [0, 131_000, 163_839])
def test_lone_finite_logit_always_wins(place):
    """A lone finite logit, and vllm#43249: V = 163,840, all others -inf."""
    logits = np.full(163_840, -INFINITY, np.float32)
    logits[place] = -50
    assert set(draw_many(logits, seeds=range(4))) == {place}


@pytest.mark.parametrize("temperature", [1e-4, 1e-5])
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_tiny_temperature_is_greedy(temperature, dtype):
    """vllm#3063, #1623."""
    rng = np.random.default_rng(0)
    logits = torch.from_numpy(rng.permutation(np.linspace(-20, 20, 400)).astype(np.float32))[None].to(dtype)
    logits = torch.where(logits == logits.max(), logits + 1, logits)  # one largest
    drawn = draw_in_slots(logits, RowParams.uniform(1, temperature=temperature))
    assert drawn.tokens[0] == logits.to(torch.float32).argmax()


@pytest.mark.parametrize("place", [0, 4, 7])
def test_nan_is_impossible_and_counted(place):
    """colibri#369."""
    logits = np.zeros(8, np.float32)
    logits[place] = NAN
    assert place not in draw_many(logits, seeds=SEEDS)
    outcome = draw_one(logits)
    assert outcome.flags == Flag.NONFINITE
    assert outcome.kept == [i for i in range(8) if i != place]


@pytest.mark.parametrize("place", [0, 4, 7])
def test_infinity_wins(place):
    """colibri#369: the lowest id of several."""
    logits = np.zeros(8, np.float32)
    logits[[place, 7]] = INFINITY
    assert set(draw_many(logits, seeds=SEEDS)) == {place}
    outcome = draw_one(logits, top_k=3, top_p=0.5, min_p=0.5)
    assert (outcome.token, outcome.flags, outcome.kept) == (place, Flag.NONFINITE, sorted({place, 7}))


@pytest.mark.parametrize(("value", "noticed"), [(NAN, Flag.NONFINITE), (-INFINITY, Flag(0))])
def test_row_without_a_candidate_yields_no_token(value, noticed):
    """colibri#369, vllm#22881: never a silent token 0."""
    assert draw_one(np.full(8, value), top_k=2, top_p=0.9) == (NO_TOKEN, noticed | Flag.NO_CANDIDATE, [])


def test_quotient_that_overflows_wins_as_infinity():
    outcome = draw_one([1e38, 3e38, 2e38, 3e38], temperature=0.5, top_p=0.5)
    assert (outcome.token, outcome.flags, outcome.kept) == (1, Flag(0), [1, 2, 3])


@pytest.mark.parametrize("temperature", [1.0, 0.811])
def test_lowest_finite_values_can_be_drawn(temperature):
    """Beside them noise is nothing, so scores are equal; an approximate quotient must not lose the row to -inf."""
    lowest = np.float32(np.finfo(np.float32).min * temperature)
    params = RowParams.uniform(1, temperature=temperature)
    assert assert_draws_equal(torch.full((1, 8), float(lowest)), params).tokens == 0


@pytest.mark.parametrize(
    ("logits", "params", "kept"),
    [
        pytest.param([3, 2, 2, 2, 1], {"top_k": 2}, [0, 1], id="vllm#50979"),
        pytest.param(np.log([0.4, 0.3, 0.3, 1e-30]), {"top_k": 2}, [0, 1], id="flashinfer#3774"),
        pytest.param([1, 5, 5, 0], {"top_k": 1}, [1], id="mstar#254"),
        pytest.param([2, 2, 2, 2], {"top_p": 1e-6}, [0], id="four equal logits"),
        pytest.param(np.log([0.05, 0.55, 0.10, 0.30]), {"min_p": 0.5}, [1, 3], id="sglang#33695"),
        pytest.param(np.log([0.7, 0.3]) * 2, {"min_p": 0.4, "temperature": 2.0}, [0, 1], id="vllm-metal#728"),
        pytest.param(np.zeros(10), {"top_p": 0.35}, [0, 1, 2, 3], id="vllm-ascend#13847"),
        pytest.param(np.zeros(10), {"top_k": 9_999_999}, list(range(10)), id="sendnn-inference#542"),
        pytest.param(np.log([0.45, 0.25, 0.2, 0.06, 0.04]), {"top_p": 0.9001}, [0, 1, 2, 3], id="vllm#59785"),
    ],
)
def test_kept_set(logits, params, kept):
    assert draw_one(logits, **params).kept == kept
    drawn = draw_many(logits, seeds=SEEDS, **params)
    assert set(drawn) <= set(kept)
    assert len(set(drawn)) == min(len(kept), len(set(kept)))


def test_strided_rows_with_top_p():
    """vllm#42684: a view of shape [.., 100278] with stride [100288, 1]; the issue's 192 rows are 3 here."""
    wide = torch.from_numpy(np.random.default_rng(1).normal(size=(3, 100_288)).astype(np.float32))
    params = RowParams.uniform(3, top_p=0.95)
    params.seed[:] = range(3)
    assert_draws_equal(wide[:, :100_278], params, filters=Filters(top_p=True), wants_kept=False)


def test_wide_bfloat16_nucleus():
    """Megatron#7182: V = 131,072."""
    values = bfloat16(np.random.default_rng(2).normal(0, 2, (2, 131_072)))
    assert_draws_equal(torch.from_numpy(values).to(torch.bfloat16), RowParams.uniform(2, top_p=0.95, temperature=0.8))


def test_padded_ids_are_never_drawn_and_counted():
    """vllm#13175: head of 151,936, tokenizer of 151,665 ids."""
    logits = torch.zeros(2, 151_936)
    logits[0, 151_700] = 60
    params = RowParams.uniform(2)
    drawn = assert_draws_equal(logits, params, usable_vocab=151_665, wants_kept=False)
    assert (drawn.tokens < 151_665).all()
    assert drawn.flags.tolist()[0] == Flag.PADDED


def test_masking_a_winner_gives_an_independent_second_winner():
    """vllm#59786, its neighbourhood of ids: V = 257, equal logits; the reference shows the law on 60,000 seeds."""
    first = draw_many(np.zeros(257), seeds=range(100))
    rows = torch.zeros(100, 257)
    rows[torch.arange(100), torch.from_numpy(first)] = -torch.inf
    params = RowParams.uniform(100)
    params.seed[:] = range(100)
    assert_draws_equal(rows, params)


def test_rows_beyond_2_to_the_31_elements(tmp_path):
    """vllm#46560, #47383, #48055: a file without content is mapped, and only its last two rows are written."""
    rows, stride, vocab = 1027, 2**21, 64
    assert (rows - 2) * stride >= 2**31
    memory = np.memmap(tmp_path / "logits", np.float16, "w+", shape=(rows, stride))
    logits = torch.from_numpy(memory)[:, :vocab]
    last = torch.from_numpy(np.random.default_rng(3).normal(size=(2, vocab))).to(torch.float16)
    logits[-2:] = last
    slots = np.full(rows, -1)
    slots[-2:] = [1, 0]
    drawn = draw_in_slots(logits, RowParams.uniform(rows, top_k=9, top_p=0.9), slot_of_row=slots)
    want = sample_reference.draw(last.numpy(), RowParams.uniform(2, top_k=9, top_p=0.9))
    assert drawn.tokens[-2:].tolist() == want.tokens.tolist()
