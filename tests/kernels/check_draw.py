"""The draw of the Triton kernels is the reference's: every size, dtype, layout, parameter and bad row."""

import numpy as np
import pytest
import torch

from tests.kernels.drawing import assert_draws_equal, draw_in_slots, small_tiles, spoil  # noqa: F401
from tests.rows import random_params, take
from vllm_gumbel.kernels import sample_reference
from vllm_gumbel.kernels.contract import NO_TOKEN, RowParams, Stream
from vllm_gumbel.kernels.slots import Filters

SIZES = [1, 7, 999, 1023, 1024, 1025, 4097]


def random_logits(rng: np.random.Generator, rows: int, vocab: int, dtype: torch.dtype) -> torch.Tensor:
    """Return rows of different spread, some spoilt."""
    logits = rng.normal(size=(rows, vocab)) * rng.choice([0.1, 1, 5], (rows, 1))
    return torch.from_numpy(spoil(logits.astype(np.float32), rng)).to(dtype)


def without_filters(params: RowParams) -> RowParams:
    """Return parameters whose filters are off."""
    params.top_k[:], params.top_p[:], params.min_p[:] = 0, 1, 0
    return params


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("vocab", SIZES)
def test_draw_without_filters_is_the_reference(vocab, dtype):
    """21 batches of 16 rows, padded ids in every other one."""
    rng = np.random.default_rng(vocab)
    usable = [None, max(1, vocab - 9)][vocab % 2]
    params = without_filters(random_params(rng, 16, vocab))
    assert_draws_equal(
        random_logits(rng, 16, vocab, dtype), params, filters=Filters(), usable_vocab=usable, wants_kept=False
    )


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("vocab", SIZES)
def test_every_filter_in_one_batch_is_the_reference(vocab, dtype):
    """21 batches of 16 rows, kept sets too."""
    rng = np.random.default_rng(100 + vocab)
    usable = [max(1, vocab - 9), None][vocab % 2]
    assert_draws_equal(random_logits(rng, 16, vocab, dtype), random_params(rng, 16, vocab), usable_vocab=usable)


@pytest.mark.usefixtures("small_tiles")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("vocab", [1, 257, 1025])
@pytest.mark.parametrize("usable", [None, 256, 40])
def test_rows_in_many_parts_are_the_reference(vocab, dtype, usable):
    """18 batches of 10 rows, five parts to the longest, the boundary of padded ids at and within a part."""
    rng = np.random.default_rng(200 + vocab)
    assert_draws_equal(random_logits(rng, 10, vocab, dtype), random_params(rng, 10, vocab), usable_vocab=usable)


def test_finalists_that_share_their_upper_word_are_told_apart():
    """60 rows of 65,536 equal logits: about every other has several ids with the smallest 16 upper bits."""
    params = RowParams.uniform(60)
    params.seed[:] = range(60)
    assert_draws_equal(torch.zeros(1, 65_536).expand(60, -1), params, filters=Filters(), wants_kept=False)


def test_full_size_vocabulary_is_the_reference():
    rng = np.random.default_rng(4)
    assert_draws_equal(random_logits(rng, 12, 49_152, torch.bfloat16), random_params(rng, 12, 49_152))


@pytest.mark.parametrize("used", ["top_k", "top_p", "min_p", "top_k top_p", "top_p min_p", "top_k min_p"])
@pytest.mark.parametrize("tiles", ["wide", "small"])
def test_batches_that_use_some_filters_are_the_reference(used, tiles, request):
    """12 batches of 12 rows; the host says which filters are used, and no others are."""
    if tiles == "small":
        request.getfixturevalue("small_tiles")
    rng = np.random.default_rng(len(used))
    params = random_params(rng, 12, 700)
    for name, off in {"top_k": 0, "top_p": 1, "min_p": 0}.items():
        if name not in used:
            getattr(params, name)[:] = off
    params.temperature[params.temperature < 1e-5] = 1
    filters = Filters(**dict.fromkeys(used.split(), True))
    assert_draws_equal(random_logits(rng, 12, 700, torch.float32), params, filters=filters)


@pytest.mark.parametrize("tiles", ["wide", "small"])
def test_top_k_of_flat_rows_is_the_reference(tiles, request):
    """2 batches of 50 rows, k above and below the number of groups, none of them empty; any of the k may win."""
    if tiles == "small":
        request.getfixturevalue("small_tiles")
    rng = np.random.default_rng(18)
    params = without_filters(random_params(rng, 50, 1024))
    params.temperature[:] = 1
    params.top_k[:] = rng.integers(1, 1024, 50) // rng.choice([1, 10, 100], 50) + 1
    logits = torch.from_numpy(rng.normal(0, 0.1, (50, 1024)).astype(np.float32)).to(torch.bfloat16)
    assert_draws_equal(logits, params, filters=Filters(top_k=True), wants_kept=False)


@pytest.mark.usefixtures("small_tiles")
def test_ties_are_the_reference():
    """40 rows of few distinct values, so that every cut falls inside a tie and lists of a top-k overflow."""
    rng = np.random.default_rng(8)
    logits = torch.from_numpy(rng.integers(0, 4, (40, 600)).astype(np.float32))
    assert_draws_equal(logits, random_params(rng, 40, 600))


def test_zeros_of_either_sign_are_ties():
    rng = np.random.default_rng(15)
    logits = rng.choice(np.float32([-0.0, 0.0, -1.0, 1.0]), (20, 100))
    assert_draws_equal(torch.from_numpy(logits), random_params(rng, 20, 100))


@pytest.mark.parametrize("tiles", ["wide", "small"])
def test_masses_within_float32_rounding_of_their_share_are_the_reference(tiles, request):
    """80 rows whose top_p is the float32 next above or below the share of mass ranked before the winner.

    That leaves a gap of about 3e-8, where float32 masses are off by 1e-7 and more, and float64 ones by 1e-15.
    """
    if tiles == "small":
        request.getfixturevalue("small_tiles")
    rng = np.random.default_rng(16)
    logits = rng.normal(size=(40, 700)).astype(np.float32) * 2
    params = RowParams.uniform(40)
    params.seed[:] = range(40)
    winners = sample_reference.draw(logits, params).tokens
    x = logits.astype(np.float64)
    before = x > np.take_along_axis(x, winners[:, None], axis=1)
    shares = (np.exp(x) * before).sum(axis=1) / np.exp(x).sum(axis=1)
    for end in (np.float32(0), np.float32(1)):
        params.top_p[:] = np.nextafter(shares.astype(np.float32), end)
        assert_draws_equal(torch.from_numpy(logits), params, filters=Filters(top_p=True), wants_kept=False)


def test_floats_next_to_the_bound_of_min_p_are_the_reference():
    """60 rows of the three float32 around max + ln(min_p), which lies between two of them."""
    rng = np.random.default_rng(17)
    params = RowParams.uniform(60)
    params.min_p[:] = rng.uniform(0, 1, 60)
    largest = rng.normal(size=60).astype(np.float32) * 10
    nearest = (largest + np.log(params.min_p.astype(np.float64))).astype(np.float32)
    around = [np.nextafter(nearest, np.float32(end)) for end in (-np.inf, np.inf)]
    assert_draws_equal(torch.from_numpy(np.stack([largest, nearest, *around], axis=1)), params)


@pytest.mark.parametrize("stream", Stream)
def test_streams_are_the_reference(stream):
    rng = np.random.default_rng(9)
    params = without_filters(random_params(rng, 20, 300))
    assert_draws_equal(random_logits(rng, 20, 300, torch.float32), params, stream=stream, filters=Filters())


def test_layout_of_logits_changes_nothing():
    """Rows with a stride, from an offset, every other row, columns apart, one row for all; `processed` likewise."""
    rng = np.random.default_rng(10)
    wide = random_logits(rng, 24, 512, torch.bfloat16)
    params = random_params(rng, 12, 500)
    for logits in (wide[:12, :500], wide[3:15, 7:507], wide[::2, :500], wide.repeat(1, 2)[:12, :1000:2]):
        assert not logits.is_contiguous()
        drawn = assert_draws_equal(logits, params)
        apart = torch.empty(12, 1000)[:, ::2]
        assert torch.equal(draw_in_slots(logits, params, processed=apart).tokens, drawn.tokens)
        together = torch.empty(12, 500)
        draw_in_slots(logits.contiguous(), params, processed=together)
        assert torch.equal(apart, together)
    assert_draws_equal(wide[:1, :500].expand(12, -1), params)


def test_processed_may_be_the_logits_themselves():
    rng = np.random.default_rng(11)
    logits, params = random_logits(rng, 12, 300, torch.float32), random_params(rng, 12, 300)
    processed = torch.empty_like(logits)
    drawn = draw_in_slots(logits, params, processed=processed)
    again = draw_in_slots(logits, params, processed=logits)
    assert torch.equal(again.tokens, drawn.tokens)
    assert torch.equal(logits, processed)


@pytest.mark.usefixtures("small_tiles")
def test_row_without_a_slot_yields_no_token_and_disturbs_nobody():
    rng = np.random.default_rng(12)
    logits, params = random_logits(rng, 16, 300, torch.float32), random_params(rng, 16, 300)
    alone = assert_draws_equal(logits, params)
    slots = np.where(np.arange(16) % 3 == 0, -1 - np.arange(16), np.arange(16)[::-1])
    processed = torch.full((16, 300), 7.0)
    drawn = draw_in_slots(logits, params, slot_of_row=slots, processed=processed)
    nobody = torch.from_numpy(slots < 0)
    assert (drawn.tokens[nobody] == NO_TOKEN).all()
    assert (drawn.flags[nobody] == 0).all()
    assert (processed[nobody] == 7).all()
    assert torch.equal(drawn.tokens[~nobody], alone.tokens[~nobody])
    assert torch.equal(drawn.flags[~nobody], alone.flags[~nobody])


@pytest.mark.usefixtures("small_tiles")
def test_token_of_a_row_depends_on_nothing_else_in_the_batch():
    """vllm#51226, tt-metal#53802, flashinfer#2402: alone, in any row, beside NaN rows and other parameters."""
    rng = np.random.default_rng(13)
    logits, params = random_logits(rng, 20, 300, torch.bfloat16), random_params(rng, 20, 300)
    together = draw_in_slots(logits, params).tokens
    order = rng.permutation(20)
    assert torch.equal(draw_in_slots(logits[order], take(params, order)).tokens, together[order])
    for row in range(0, 20, 4):
        one = slice(row, row + 1)
        assert draw_in_slots(logits[one], take(params, one)).tokens == together[row]


def test_tiles_change_nothing(request):
    rng = np.random.default_rng(14)
    logits, params = random_logits(rng, 30, 900, torch.float32), random_params(rng, 30, 900)
    wide = draw_in_slots(logits, params)
    request.getfixturevalue("small_tiles")
    assert torch.equal(draw_in_slots(logits, params).tokens, wide.tokens)
