"""Logprobs of the drawn tokens and of the best ones in Numba, without a [rows, vocab] matrix of them.

What vLLM's `Sampler.compute_logprobs` and `gather_logprobs` give, from the logits themselves: one pass for the block
maxima, one for the mass, and a look into the few blocks that hold the best. Where vLLM's answer for a bad row is NaN,
this one is a number or -inf: a NaN counts as -inf, +inf shares the mass, and a row without a finite logit is -inf
throughout.

Tolerance against vLLM on good rows: 1e-5 absolute (vLLM adds up in float32, this in float64 over float32 blocks).

Ties in the top n go to the lowest id; vLLM's `topk` promises no order. The rank is vLLM's, the number of logprobs that
are at least the drawn token's: logprobs, not logits, since close logits may merge in float32 when the logsumexp is
subtracted. (Where they do, the two may differ by a rank or two: the last bit of the logsumexp decides which merge.)
"""

import math
from collections.abc import Callable
from typing import Any

import numpy as np
import numpy.typing as npt
from numba import prange, types

from vllm_gumbel.kernels.blocks_numba import BLOCK, blocks_in, largest_of, summarise_blocks, without_nan
from vllm_gumbel.kernels.contract import Logits, check_logits
from vllm_gumbel.kernels.floats_numba import (
    KEY_INFINITY,
    MINUS_INFINITY,
    PLUS_INFINITY,
    float_of_key,
    key_of_float,
    widen,
)
from vllm_gumbel.kernels.jit_numba import (
    F32,
    F64,
    I32,
    I64,
    U64,
    add_any_order,
    jit,
    row_of,
    take_next,
    use_widest_vectors,
)
from vllm_gumbel.kernels.launch_numba import SERIAL_IDS, WORKSPACE_TYPES, Kernels, read_only
from vllm_gumbel.kernels.masses_numba import mass
from vllm_gumbel.kernels.noise_numba import row_keys
from vllm_gumbel.kernels.scratch_numba import scratch_of
from vllm_gumbel.kernels.select_numba import bound_of_nth, collect, cut_of_top_k, keep_cut

_PER_LN2 = F32(1 / math.log(2.0))
#: Lists up to this length are sorted in place; longer ones a byte at a time, which costs the same for any order.
SHORT = 512


@jit(inline=True)
def logprob(x: Any, largest: Any, log_total: Any) -> Any:
    """Return the logprob of a logit, float32, rounded where vLLM rounds; right for +inf too if that is the largest."""
    if x == largest:
        return F32(-log_total)
    return F32(F32(x - largest) - log_total)


@jit(inline=True)
def block_total(block: Any, largest: Any) -> Any:
    """Return the sum of exp(logit - largest) over a block, float32, within 4e-6 of it."""
    use_widest_vectors()
    total = F32(0)
    for j in range(len(block)):
        total = add_any_order(total, mass(F32(widen(block[j]) - largest), _PER_LN2, F32(0)))
    return total


@jit
def log_total_of(row: Any, maxima: Any, largest: Any) -> Any:
    """Return ln of the sum of exp(logit - largest), float32; `largest` is finite."""
    total = 0.0
    for b in range(blocks_in(I64(0), I64(len(row)))):
        if maxima[b] >= largest - F32(100):  # below that, 300,000 ids add less than 1e-38
            total += F64(block_total(row[b * BLOCK : min(b * BLOCK + BLOCK, len(row))], largest))
    # At least 1, the largest one's own term, which a float32 exponential can miss by a bit: no logprob is above 0.
    return F32(math.log(max(total, 1.0)))


@jit
def least_of_logprob(x: Any, largest: Any, log_total: Any) -> Any:
    """Return the smallest float32 whose logprob is that of `x`, a finite one."""
    value = logprob(x, largest, log_total)
    low, high = ~I64(KEY_INFINITY), I64(key_of_float(x))
    while high - low > 1:
        middle = (low + high) >> 1
        if logprob(float_of_key(middle), largest, log_total) >= value:
            high = middle
        else:
            low = middle
    return float_of_key(high)


@jit
def count_at_least(row: Any, maxima: Any, bound: Any) -> Any:
    """Return how many logits are at least `bound`."""
    use_widest_vectors()
    count = I64(0)
    for b in range(blocks_in(I64(0), I64(len(row)))):
        if maxima[b] >= bound:
            block = row[b * BLOCK : min(b * BLOCK + BLOCK, len(row))]
            here = I32(0)
            for j in range(len(block)):
                here = I32(here + I32(widen(block[j]) >= bound))
            count += I64(here)
    return count


@jit(inline=True)
def byte_of(x: Any, shift: Any) -> Any:
    """Return a byte, int64, of a number that is the smaller the larger `x` is; zeros of either sign are equal."""
    return (I64(0x7FFFFFFF) - I64(key_of_float(x if x != F32(0) else F32(0)))) >> I64(shift) & I64(255)


@jit
def move_by_byte(ids: Any, xs: Any, to_ids: Any, to_xs: Any, starts: Any, shift: Any) -> None:
    """Copy a list ordered by one byte of its values, those with equal bytes as they stood; `starts` is int64 [256]."""
    starts[:] = 0
    for i in range(len(ids)):
        starts[byte_of(xs[i], shift)] += 1
    start = I64(0)
    for byte in range(256):
        start, starts[byte] = start + starts[byte], start
    for i in range(len(ids)):
        byte = byte_of(xs[i], shift)
        to_ids[starts[byte]], to_xs[starts[byte]] = ids[i], xs[i]
        starts[byte] += 1


@jit
def sort_long(ids: Any, xs: Any, spare: Any) -> None:
    """Sort values and their ids, ascending, by value, best first, ties by lowest id; LSD radix sort (TAOCP 5.2.5 R).

    Args:
        ids: int32 [n].
        xs: float32 [n], no NaN.
        spare: float32 [n] or more, written.
    """
    spare_ids, spare_xs, starts = np.empty(len(ids), np.int32), spare[: len(xs)], np.empty(256, np.int64)
    for shift in (0, 16):
        move_by_byte(ids, xs, spare_ids, spare_xs, starts, shift)
        move_by_byte(spare_ids, spare_xs, ids, xs, starts, shift + 8)


@jit
def list_best(row: Any, n: Any, scratch: Any) -> None:
    """Write the n best logits of a row and their ids to the front of the lists, best first, ties by lowest id."""
    vocab, ids, xs = I64(len(row)), scratch.ids, scratch.xs
    blocks = blocks_in(I64(0), vocab)
    bound = MINUS_INFINITY
    if n <= blocks:
        bound = bound_of_nth(scratch.largest[:blocks], n)
    found = collect(row, vocab, bound, F32(1), scratch)
    if found > n:
        cut_x, cut_id = cut_of_top_k(ids[:found], xs[:found], n, scratch.values)
        found = keep_cut(ids[:found], xs[:found], cut_x, cut_id)
    if found > SHORT:
        sort_long(ids[:found], xs[:found], scratch.values)
        return
    gap = I64(1)
    while 3 * gap + 1 < found:
        gap = 3 * gap + 1
    while gap > 0:  # Shell's sort: in place
        for i in range(gap, found):
            x, token, j = xs[i], ids[i], I64(i)
            while j >= gap and (xs[j - gap] < x or (xs[j - gap] == x and ids[j - gap] > token)):
                xs[j], ids[j] = xs[j - gap], ids[j - gap]
                j -= gap
            xs[j], ids[j] = x, token
        gap //= 3


@jit
def gather_row(logits: Any, r: Any, token: Any, ids: Any, logprobs: Any, workspace: Any) -> Any:
    """Write row `r` of `ids` and `logprobs`, and return the rank of `token`; arrays as `gather` returns them."""
    row = row_of(logits, r)
    vocab, n = I64(len(row)), ids.shape[1] - 1
    scratch = scratch_of(workspace, vocab)
    maxima = scratch.largest
    keys = row_keys(U64(0), I64(0), I64(0), U64(0))
    nan, _ = summarise_blocks(row, I64(0), vocab, maxima, False, scratch.words, keys)
    if nan:
        row = without_nan(row, scratch.clean)
        summarise_blocks(row, I64(0), vocab, maxima, False, scratch.words, keys)
    blocks = blocks_in(I64(0), vocab)
    largest = largest_of(maxima[:blocks])
    log_total = F32(0)
    if largest == PLUS_INFINITY:
        log_total = F32(math.log(F64(count_at_least(row, maxima, PLUS_INFINITY))))
    elif largest > MINUS_INFINITY:
        log_total = log_total_of(row, maxima, largest)

    x = widen(row[token]) if 0 <= token < vocab else MINUS_INFINITY
    ids[r, 0] = I32(token)
    logprobs[r, 0] = logprob(x, largest, log_total) if x > MINUS_INFINITY else MINUS_INFINITY
    if n > 0:
        list_best(row, I64(n), scratch)
        for j in range(n):
            best = scratch.xs[j]
            ids[r, j + 1] = scratch.ids[j]
            logprobs[r, j + 1] = logprob(best, largest, log_total) if best > MINUS_INFINITY else MINUS_INFINITY
    if logprobs[r, 0] == MINUS_INFINITY:
        return vocab
    if largest == PLUS_INFINITY:
        return count_at_least(row, maxima, PLUS_INFINITY)
    return count_at_least(row, maxima, least_of_logprob(x, largest, log_total))


@jit
def gather_serially(
    logits: Any, tokens: Any, ids: Any, logprobs: Any, ranks: Any, workspaces: Any, counter: Any
) -> None:
    """Do every row in the calling thread."""
    for r in range(len(tokens)):
        ranks[r] = gather_row(logits, r, tokens[r], ids, logprobs, row_of(workspaces, 0))


@jit(parallel=True)
def gather_in_parallel(
    logits: Any, tokens: Any, ids: Any, logprobs: Any, ranks: Any, workspaces: Any, counter: Any
) -> None:
    """Do rows by as many threads as there are workspaces, each taking the next row when it is free."""
    counter[0] = 0
    for thread in prange(len(workspaces)):
        r = take_next(counter)
        while r < len(tokens):
            ranks[r] = gather_row(logits, r, tokens[r], ids, logprobs, row_of(workspaces, thread))
            r = take_next(counter)


def gather(
    logits: Logits, tokens: npt.NDArray[np.int64], top_n: int
) -> tuple[npt.NDArray[np.int32], npt.NDArray[np.float32], npt.NDArray[np.int64]]:
    """Return the logprobs of the given and of the best tokens of every row.

    Args:
        logits: float32, float16 or uint16 (bits of bfloat16) [rows, vocab]; not changed. Copied if its columns do not
            lie side by side.
        tokens: int64 [rows]; an id outside the row has logprob -inf.
        top_n: how many of the best, 0 to vocab.

    Returns:
        ids, int32 [rows, top_n + 1]: the given token, then the best by value, ties by lowest id. Their logprobs,
        float32 [rows, top_n + 1]. Ranks, int64 [rows]: the number of logprobs that are at least the given token's.

    Raises:
        TypeError: the logits' dtype is none of the three, or `tokens` is not int64.
        ValueError: a shape differs, or `top_n` is out of range.
    """
    check_logits(logits)
    rows, vocab = logits.shape
    if tokens.dtype != np.int64:
        raise TypeError(f"tokens must be int64, got {tokens.dtype}")
    if tokens.shape != (rows,):
        raise ValueError(f"tokens must have shape ({rows},), got {tokens.shape}")
    if not 0 <= top_n <= vocab:
        raise ValueError(f"top_n must be from 0 to {vocab}, got {top_n}")
    ids = np.empty((rows, top_n + 1), np.int32)
    logprobs = np.empty((rows, top_n + 1), np.float32)
    ranks = np.empty(rows, np.int64)
    if rows:
        KERNELS(logits, tokens, ids, logprobs, ranks)
    return ids, logprobs, ranks


def _signature(element: types.Type) -> tuple[types.Type, ...]:
    """Return the argument types of the kernels for logits of one element type."""
    return (
        read_only(element, 2),
        read_only(types.int64),
        types.Array(types.int32, 2, "C"),
        types.Array(types.float32, 2, "C"),
        types.Array(types.int64, 1, "C"),
        *WORKSPACE_TYPES,
    )


KERNELS = Kernels(gather_serially, gather_in_parallel, _signature)


def warm_up(vocab: int, dtype: npt.DTypeLike = np.float32, on_progress: Callable[[str], None] | None = None) -> float:
    """Compile, or load from the cache, all that `gather` needs for logits of a dtype; return the seconds it took."""
    dtype = np.dtype(dtype)

    def trial(rows: int) -> None:
        gather(np.zeros((rows, max(vocab, SERIAL_IDS)), dtype), np.zeros(rows, np.int64), 1)

    return KERNELS.warm_up(dtype, "logprob", trial, on_progress)
