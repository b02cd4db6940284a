"""top-k in Numba: a lower bound from block maxima, a list of what reaches it, the exact cut within the list.

The k-th largest block maximum is at most the k-th largest logit, since each of those k blocks holds a logit at least as
large; so every id that top-k keeps reaches it, and whatever k block maxima reach.
"""

import math
from typing import Any

from vllm_gumbel.kernels.blocks_numba import BLOCK, blocks_in, largest_of
from vllm_gumbel.kernels.floats_numba import (
    LARGEST_FINITE,
    MINUS_INFINITY,
    float_of_key,
    key_of_float,
    least_logit,
    next_above,
    widen,
)
from vllm_gumbel.kernels.jit_numba import F32, F64, I32, I64, U8, U64, jit, row_of, use_widest_vectors


@jit
def collect(logits: Any, stop: Any, bound: Any, temperature: Any, scratch: Any) -> Any:
    """List the ids below `stop` whose logit is at least `bound`, ascending, with their tempered values.

    Args:
        logits: one row, no NaN.
        stop: one past the last id.
        bound: float32.
        temperature: float32.
        scratch: `Scratch`; `largest` is read, `ids` and `xs` are written.

    Returns:
        How many there are.
    """
    use_widest_vectors()
    n = 0
    largest, ids, xs, marks = scratch.largest, scratch.ids, scratch.xs, scratch.marks
    groups = marks.view(U64)
    for b in range(blocks_in(0, stop)):
        if largest[b] < bound:
            continue
        first = b * BLOCK
        last = min(first + BLOCK, stop)
        block = logits[first:last]
        for j in range(len(block)):
            marks[j] = U8(widen(block[j]) >= bound)
        for j in range(len(block), (len(block) + 7) & ~7):
            marks[j] = U8(0)
        for g in range((len(block) + 7) >> 3):
            if groups[g] == U64(0):
                continue
            for j in range(8 * g, 8 * g + 8):
                if marks[j] != 0:
                    ids[n] = I32(first + j)
                    xs[n] = F32(widen(block[j]) / temperature)
                    n += 1
    return n


@jit
def bound_of_nth(values: Any, n: Any) -> Any:
    """Return a float32 that at least n of the values reach, and seldom many more: up to n / 4 are not worth a search.

    Bisection over order keys, each step one vector pass.

    Args:
        values: float32 [at least n], no NaN.
        n: from 1.
    """
    low, high = I64(key_of_float(MINUS_INFINITY)), I64(key_of_float(largest_of(values))) + 1
    while high - low > 1:
        middle = (low + high) >> 1
        count = count_reaching(values, float_of_key(middle))
        if count >= n:
            low = middle
            if count <= n + (n >> 2):
                break
        else:
            high = middle
    return float_of_key(low)


@jit(inline=True)
def count_reaching(values: Any, bound: Any) -> Any:
    """Return how many of at most 2^31 - 1 values are at least `bound`."""
    use_widest_vectors()
    count = I32(0)
    for j in range(len(values)):
        count = I32(count + I32(values[j] >= bound))
    return I64(count)


@jit
def nth_largest(values: Any, n: Any) -> Any:
    """Return the n-th largest, n from 1, of float32 values without NaN; reorders them.

    Source: Hoare 1961, "Algorithm 65: Find".
    """
    low, high, place = 0, len(values) - 1, n - 1
    while low < high:
        a, b, c = values[low], values[(low + high) >> 1], values[high]
        pivot = max(min(a, b), min(max(a, b), c))  # the median of three
        i, j = low, high
        while i <= j:
            while values[i] > pivot:
                i += 1
            while values[j] < pivot:
                j -= 1
            if i <= j:
                values[i], values[j] = values[j], values[i]
                i += 1
                j -= 1
        if place <= j:
            high = j
        elif place >= i:
            low = i
        else:
            break
    return values[place]


@jit
def cut_of_top_k(ids: Any, xs: Any, k: Any, values: Any) -> Any:
    """Return the cut (x, id) that leaves exactly k of more than k candidates: ties by lowest id.

    Args:
        ids: int32 [n], ascending.
        xs: float32 [n].
        k: how many to leave.
        values: float32 [n], scratch.
    """
    n = len(ids)
    for j in range(n):
        values[j] = xs[j]
    x = nth_largest(values[:n], k)
    ties = k
    for j in range(n):
        ties -= xs[j] > x
    for j in range(n):
        if xs[j] == x:
            ties -= 1
            if ties == 0:
                return x, I64(ids[j]) + I64(1)
    return x, I64(ids[n - 1]) + I64(1)


@jit
def keep_cut(ids: Any, xs: Any, cut_x: Any, cut_id: Any) -> Any:
    """Move the candidates that the cut leaves to the front of the list, in order; return how many there are."""
    n = 0
    for j in range(len(ids)):
        if xs[j] > cut_x or (xs[j] == cut_x and ids[j] < cut_id):
            ids[n], xs[n] = ids[j], xs[j]
            n += 1
    return n


@jit
def list_top_k(row: Any, limit: Any, temperature: Any, top_k: Any, lowest: Any, bound: Any, scratch: Any) -> Any:
    """List the ids that top-k leaves, in `ids` and `xs` of the scratch memory.

    Args:
        row: logits, no NaN.
        limit: number of ids that may be drawn.
        temperature, top_k: parameters, 0 < top_k, int64.
        lowest, bound: float32; smallest tempered value and smallest logit that min_p left.
        scratch: `Scratch`, summarised.

    Returns:
        (n, lowest, bound, cut_x, cut_id): how many ids are listed, and the set that they are.
    """
    ids, xs, blocks = scratch.ids, scratch.xs, blocks_in(I64(0), limit)
    if top_k <= blocks:
        x = F32(bound_of_nth(scratch.largest[:blocks], top_k) / temperature)
        if x > lowest:
            lowest, bound = x, least_logit(x, temperature)
    n = collect(row, limit, bound, temperature, scratch)
    cut_x, cut_id = MINUS_INFINITY, I64(-1)
    if n > top_k:
        cut_x, cut_id = cut_of_top_k(ids[:n], xs[:n], top_k, scratch.values)
        n = keep_cut(ids[:n], xs[:n], cut_x, cut_id)
    return n, lowest, bound, cut_x, cut_id


@jit(inline=True)
def least_float(value: Any) -> Any:
    """Return the smallest float32 that is at least a float64, and no less than the lowest finite one."""
    if value <= -F64(LARGEST_FINITE):
        return F32(-LARGEST_FINITE)
    x = F32(value)
    return next_above(x) if F64(x) < value else x


@jit(inline=True)
def bound_of_min_p(x_max: Any, min_p: Any) -> Any:
    """Return the smallest float32 that is at least x_max + ln(min_p), and whether every machine finds the same.

    A logarithm may be off in its last place; that matters only if it moves the bound past a float32.
    """
    if not min_p > 0:
        return F32(-LARGEST_FINITE), True
    if min_p == F32(1):
        return x_max, True
    log = math.log(F64(min_p))
    bound = F64(x_max) + log
    slack = 2.0**-51 * (abs(log) + abs(bound))
    low = least_float(bound - slack)
    return low, low == least_float(bound + slack)


@jit
def write_kept(
    logits: Any, r: Any, limit: Any, divisor: Any, bound: Any, cut_x: Any, cut_id: Any, processed: Any
) -> None:
    """Write the tempered values of the kept ids to row `r` of `processed`, -inf elsewhere; nothing if it has no rows.

    Args:
        logits: one row, no NaN; may be the memory that is written.
        r: index of the row in `processed`.
        limit: number of ids that may be kept.
        divisor: float32; the temperature, or 1 for a greedy row.
        bound: float32; smallest logit that is kept.
        cut_x, cut_id: cut of the ranking, of divided values.
        processed: float32 [rows, vocab] or [0, 0].
    """
    use_widest_vectors()
    if processed.shape[0] == 0:
        return
    out = row_of(processed, r)
    for i in range(len(out)):
        logit = widen(logits[i])
        x = F32(logit / divisor)
        keep = i < limit and logit >= bound and (x > cut_x or (x == cut_x and i < cut_id))
        out[i] = x if keep else MINUS_INFINITY
