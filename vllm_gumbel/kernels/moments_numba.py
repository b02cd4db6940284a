"""Sums over a row in Numba: how many ids are kept, their mass, its first two moments, and how much is improbable.

The kept ids are a prefix of the ranking, said by a bound and a cut as in `race_numba`: those with x >= lowest, and of
these the ones with x > cut_x and those with x = cut_x and id < cut_id.

x is divided as the draw divides it, not multiplied by a reciprocal: at x = 500 that would be off by 3e-5. Differences
from the largest are taken before anything else, in float32, where they are exact or off by 2^-24 of themselves. Masses
are within 4e-6 (`masses_numba`), blocks are added up in float32, across blocks in float64.
"""

import math
from typing import Any

from vllm_gumbel.kernels.blocks_numba import BLOCK, blocks_in
from vllm_gumbel.kernels.floats_numba import next_above, widen
from vllm_gumbel.kernels.jit_numba import F32, F64, I32, I64, add_any_order, jit, use_widest_vectors
from vllm_gumbel.kernels.logprobs_numba import block_total
from vllm_gumbel.kernels.masses_numba import mass

_PER_LN2 = F32(1 / math.log(2.0))

#: x less the largest x counts as no less than this: the mass of 10^9 such ids, times 80^2, is below 1e-21.
FARTHEST = F32(-80.0)


@jit(inline=True)
def block_moments(block: Any, temperature: Any, x_max: Any, lowest: Any, bar: Any) -> Any:
    """Return (count, sum of m, of m d, of m d^2, of m where x < bar) over the ids of a block with x >= lowest.

    d = x - x_max and m = exp(d); int32 and four float32.
    """
    use_widest_vectors()
    count, s0, s1, s2, tail = I32(0), F32(0), F32(0), F32(0), F32(0)
    for j in range(len(block)):
        x = F32(widen(block[j]) / temperature)
        d = F32(x - x_max)
        d = d if d > FARTHEST else FARTHEST
        m = mass(d, _PER_LN2, F32(0)) if x >= lowest else F32(0)
        md = F32(m * d)
        count = I32(count + I32(x >= lowest))
        s0 = add_any_order(s0, m)
        s1 = add_any_order(s1, md)
        s2 = add_any_order(s2, F32(md * d))
        tail = add_any_order(tail, m if x < bar else F32(0))
    return count, s0, s1, s2, tail


@jit
def range_moments(
    row: Any, start: Any, stop: Any, largest: Any, temperature: Any, x_max: Any, lowest: Any, bar: Any
) -> Any:
    """Return what `block_moments` does over ids `start` to `stop` - 1, as int64 and float64.

    Args:
        row: logits, no NaN.
        start, stop: range of ids.
        largest: float32 [blocks]; block maxima of the row.
        temperature: float32.
        x_max: float32, finite; largest tempered value of the row.
        lowest: float32; smallest tempered value that counts.
        bar: float32; tempered values below it are improbable.
    """
    count, s0, s1, s2, tail = I64(0), 0.0, 0.0, 0.0, 0.0
    for b in range(I64(start) // I64(BLOCK), blocks_in(I64(0), stop)):
        if F32(largest[b] / temperature) >= lowest:
            block = row[max(b * BLOCK, start) : min(b * BLOCK + BLOCK, stop)]
            n, m, md, mdd, below = block_moments(block, temperature, x_max, lowest, bar)
            count += I64(n)
            s0, s1, s2, tail = s0 + F64(m), s1 + F64(md), s2 + F64(mdd), tail + F64(below)
    return count, s0, s1, s2, tail


@jit
def kept_moments(
    row: Any, limit: Any, largest: Any, temperature: Any, x_max: Any, lowest: Any, cut_x: Any, cut_id: Any, bar: Any
) -> Any:
    """Return the same over the ids below `limit` that bound and cut leave: ids before the cut's win its tie."""
    before = min(max(I64(cut_id), I64(0)), I64(limit))
    bound = max(lowest, cut_x)
    count, s0, s1, s2, tail = range_moments(row, I64(0), before, largest, temperature, x_max, bound, bar)
    bound = max(lowest, next_above(cut_x)) if cut_x >= lowest else lowest
    n, m, md, mdd, below = range_moments(row, before, limit, largest, temperature, x_max, bound, bar)
    return count + n, s0 + m, s1 + md, s2 + mdd, tail + below


@jit
def log_total_at_1(row: Any, limit: Any, largest: Any, best: Any) -> Any:
    """Return ln of the sum of exp(logit - best) over the ids below `limit`, float64.

    Args:
        row: logits, no NaN.
        limit: number of ids.
        largest: float32 [blocks]; block maxima of the row.
        best: float32, finite; the largest logit.
    """
    total = 0.0
    for b in range(len(largest)):
        total += F64(block_total(row[b * BLOCK : min(b * BLOCK + BLOCK, limit)], best))
    return math.log(max(1.0, total))
