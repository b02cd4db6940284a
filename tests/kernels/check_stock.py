"""With stock's noise the kernels give the token of vLLM's own kernel, both in the interpreter."""

import numpy as np
import pytest
import torch
import triton
import triton.language as tl
from vllm.v1.worker.gpu.sample.gumbel import gumbel_noised_argmax, gumbel_sample

from tests.kernels.drawing import draw_in_slots, small_tiles  # noqa: F401
from vllm_gumbel.kernels import sample_reference
from vllm_gumbel.kernels.contract import RowParams, Stream
from vllm_gumbel.kernels.noise_stock_triton import STOCK_VARIANTS
from vllm_gumbel.kernels.race_triton import search_stock
from vllm_gumbel.kernels.slots import Filters, Noise


def seeded_rows(rng: np.random.Generator, rows: int, vocab: int) -> tuple[torch.Tensor, RowParams]:
    """Return logits, some with most ids masked, and parameters without filters, greedy ones among them."""
    logits = (rng.normal(size=(rows, vocab)) * rng.choice([0, 0.1, 1, 5], (rows, 1))).astype(np.float32)
    masked = (rng.random((rows, vocab)) < rng.choice([0, 0.5, 0.99], (rows, 1))) & (np.arange(vocab) > 0)
    params = RowParams.uniform(rows)
    params.temperature[:] = rng.choice([0, 0.3, 0.7, 1, 1.5, 2.7], rows)
    params.seed[:] = rng.integers(0, 2**64, rows, dtype=np.uint64)
    params.position[:] = rng.integers(0, 2**40, rows) >> rng.integers(0, 40, rows)
    return torch.from_numpy(np.where(masked, np.float32(-np.inf), logits)), params


def by_stock(logits: torch.Tensor, params: RowParams, *, wide: bool) -> torch.Tensor:
    """Return the tokens of vLLM's kernel."""
    slots = torch.arange(len(logits), dtype=torch.int32)
    seeds, positions = torch.from_numpy(params.seed.view(np.int64)), torch.from_numpy(params.position)
    return gumbel_sample(
        logits, slots, torch.from_numpy(params.temperature), seeds, positions, True, False, use_fp64=wide
    )


@triton.jit
def write_winners(logits, seeds, positions, temperature, theirs, ours, TILE: tl.constexpr, NOISE: tl.constexpr):  # noqa: N803
    row = tl.program_id(0)
    ids = tl.arange(0, TILE)
    values = tl.load(logits + row * TILE + ids)
    seed, position, divisor = tl.load(seeds + row), tl.load(positions + row), tl.load(temperature + row)
    score, _ = gumbel_noised_argmax(values, ids, ids >= 0, seed, position, divisor, False, NOISE == 2)
    tl.store(theirs + row, score.to(tl.float64))
    none, nobody = tl.full((), float("-inf"), tl.float64), tl.full((), -1, tl.int32)
    score, _ = search_stock(values, ids, ids >= 0, seed, position, divisor, none, nobody, NOISE)
    tl.store(ours + row, score)


@pytest.mark.parametrize("noise", [Noise.STOCK, Noise.STOCK_FP64])
@pytest.mark.parametrize("tile", [1, 2, 64])
def test_scores_equal_those_of_vllm_bit_for_bit(noise, tile):
    """6 batches of 120 tiles so small that any noise, not only the largest, decides some."""
    rng = np.random.default_rng(tile)
    logits = torch.from_numpy(rng.normal(size=(120, tile)).astype(np.float32))
    seeds, positions = (torch.from_numpy(rng.integers(-(2**63), 2**63, 120) >> shift) for shift in (0, 23))
    temperature = torch.from_numpy(rng.uniform(0.1, 2, 120).astype(np.float32))
    theirs, ours = torch.empty(120, dtype=torch.float64), torch.empty(120, dtype=torch.float64)
    write_winners[(120,)](logits, seeds, positions, temperature, theirs, ours, TILE=tile, NOISE=int(noise))
    assert torch.equal(theirs, ours)


@pytest.mark.parametrize("noise", [Noise.STOCK, Noise.STOCK_FP64])
@pytest.mark.parametrize("vocab", [1000, 1025, 2900])
def test_tokens_equal_those_of_vllm(noise, vocab):
    """6 batches of 40 rows. A longer run of 20,000 rows saw no difference."""
    logits, params = seeded_rows(np.random.default_rng(vocab), 40, vocab)
    got = draw_in_slots(logits, params, noise=noise, filters=Filters())
    assert torch.equal(got.tokens, by_stock(logits, params, wide=noise == Noise.STOCK_FP64))


@pytest.mark.parametrize("tiles", ["wide", "small"])
def test_filters_keep_the_same_sets_whatever_the_noise(tiles, request):
    """40 rows: the token is the one that vLLM's kernel draws from the reference's kept set."""
    if tiles == "small":
        request.getfixturevalue("small_tiles")
    rng = np.random.default_rng(5)
    logits, params = seeded_rows(rng, 40, 500)
    params.top_k[:] = rng.choice([0, 3, 50], 40)
    params.top_p[:] = rng.choice([1, 0.9, 0.3], 40)
    params.min_p[:] = rng.choice([0, 0.05], 40)
    kept = np.empty(logits.shape, np.float32)
    sample_reference.draw(logits.numpy(), params, processed=kept)
    ready = RowParams(**(vars(params) | {"temperature": (params.temperature > 0).astype(np.float32)}))
    got = draw_in_slots(logits, params, noise=Noise.STOCK)
    assert torch.equal(got.tokens, by_stock(torch.from_numpy(kept), ready, wide=False))


def test_other_streams_are_refused():
    logits, params = seeded_rows(np.random.default_rng(6), 2, 100)
    with pytest.raises(ValueError, match="target"):
        draw_in_slots(logits, params, noise=Noise.STOCK, stream=Stream.DRAFT)


def test_every_supported_release_has_a_variant():
    from vllm_gumbel.integration.compat import SUPPORTED

    (_, first), (_, last) = SUPPORTED
    assert [f"0.{minor}" for minor in range(first, last + 1)] == list(STOCK_VARIANTS)
