"""The kept set in Triton, for `processed`: the cut of each row by bisection, then one pass that writes.

Only wanted where a request asks for logprobs after the filters, so it is plain: each cut is found on its own, top-k by
counting and top-p by adding masses up in float64, some 20 to 40 passes over a row each; nothing of the draw is used.
"""

# mypy: allow-untyped-defs, disable-error-code="import-untyped"
# ruff: noqa: N803

import triton
import triton.language as tl

from vllm_gumbel.kernels.contract import GREEDY_TEMPERATURE
from vllm_gumbel.kernels.floats_triton import NO_CUT, cut_of_min_p, order
from vllm_gumbel.kernels.settle_triton import cut_of_row, tile_of_row

_GREEDY = tl.constexpr(GREEDY_TEMPERATURE)


@triton.jit(do_not_specialize=["stream"], do_not_specialize_on_alignment=["slots", "positions"])
def cuts_kernel(
    logits, stride, vocab, limit, slots, temperature, top_k, top_p, min_p, cuts, TILE: tl.constexpr
):  # fmt: skip
    """Write the cut, int64 with the bits of a uint64, of every row that has a slot; grid (rows,)."""
    row = tl.program_id(0).to(tl.int64)
    slot = tl.load(slots + row)
    if slot < 0:
        return
    t = tl.load(temperature + slot)
    divisor = tl.where(t >= _GREEDY, t, 1.0)
    row_logits = logits + row * stride
    x_max = tl.full((), float("-inf"), tl.float32)
    for tile in range(tl.cdiv(limit, TILE)):
        x, _, _ = tile_of_row(row_logits, tile, limit, divisor, TILE)
        x_max = tl.maximum(x_max, tl.max(x))
    cut = tl.full((), NO_CUT, tl.uint64)
    if (t >= _GREEDY) & (x_max == float("inf")):
        cut = order(x_max).to(tl.uint64) << 32
    elif (t >= _GREEDY) & (x_max > float("-inf")):
        k, p = tl.load(top_k + slot), tl.load(top_p + slot)
        cut = tl.maximum(cut, cut_of_min_p(x_max, tl.load(min_p + slot)))
        if (k > 0) & (k < vocab):
            cut = cut_of_row(row_logits, limit, divisor, cut, k, x_max, TILE, False)
        if p < 1.0:
            cut = cut_of_row(row_logits, limit, divisor, cut, p, x_max, TILE, True)
    tl.store(cuts + row, cut.to(tl.int64, bitcast=True))


@triton.jit(do_not_specialize=["stream"], do_not_specialize_on_alignment=["slots", "positions"])
def kept_kernel(
    logits, stride, vocab, limit, slots, temperature, cuts, processed, processed_stride, PARTS: tl.constexpr,
    TILE: tl.constexpr,
):  # fmt: skip
    """Write the values that reach the cut of their row, -inf elsewhere; grid (rows * PARTS,)."""
    row = (tl.program_id(0) // PARTS).to(tl.int64)
    part = tl.program_id(0) % PARTS
    slot = tl.load(slots + row)
    if slot < 0:
        return
    t = tl.load(temperature + slot)
    divisor = tl.where(t >= _GREEDY, t, 1.0)
    x, ids, keys = tile_of_row(logits + row * stride, part, limit, divisor, TILE)
    kept = keys >= tl.load(cuts + row).to(tl.uint64, bitcast=True)
    tl.store(processed + row * processed_stride + ids, tl.where(kept, x, float("-inf")), mask=ids < vocab)
