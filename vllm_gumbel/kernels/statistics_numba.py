"""Row statistics in Numba: those of `statistics_reference`, at a few times the price of the draw.

Logits are read where they lie, as by `sample_numba`. One pass finds the block maxima, one the mass at temperature 1,
whatever the filters need finds the cut of the ranking, and one pass adds up what that leaves (`moments_numba`).

Tolerance against the reference: kept is exact; entropy, surprisal, score, `log_total` less the largest x, and
`log_probability` within 3e-5; the variance within 1e-4 (1 + variance). `improbable_mass` is within 1e-3 of itself or
1e-9, but that an id whose probability is within rounding of the threshold may be counted on the other side of it.

A row whose kept set only the reference's own order of operations can decide goes to it.
"""

import math
from collections.abc import Callable
from typing import Any

import numpy as np
import numpy.typing as npt
from numba import prange, types

from vllm_gumbel.kernels import statistics_reference
from vllm_gumbel.kernels.blocks_numba import (
    BLOCK,
    blocks_in,
    first_at_least,
    first_block_at_least,
    largest_of,
    summarise_blocks,
    without_nan,
)
from vllm_gumbel.kernels.contract import GREEDY_TEMPERATURE, Logits, RowParams, Stream
from vllm_gumbel.kernels.floats_numba import MINUS_INFINITY, PLUS_INFINITY, least_logit, widen
from vllm_gumbel.kernels.jit_numba import F32, F64, I64, jit, row_of, take_next
from vllm_gumbel.kernels.launch_numba import PARAM_TYPES, SERIAL_IDS, WORKSPACE_TYPES, Kernels, read_only
from vllm_gumbel.kernels.moments_numba import kept_moments, log_total_at_1
from vllm_gumbel.kernels.noise_numba import row_keys, score
from vllm_gumbel.kernels.nucleus_numba import cut_of_nucleus
from vllm_gumbel.kernels.race_numba import INFINITY
from vllm_gumbel.kernels.row_nucleus_numba import cut_of_row_nucleus
from vllm_gumbel.kernels.scratch_numba import scratch_of
from vllm_gumbel.kernels.select_numba import bound_of_min_p, list_top_k
from vllm_gumbel.kernels.statistics import IMPROBABLE_BELOW, RowStatistics, check, log_threshold

#: In place of a number of kept ids: the reference has to find it.
UNDECIDED_ROW = -1

_GREEDY = F32(GREEDY_TEMPERATURE)
_NAN = F64("nan")
_NO_LAW = (I64(0), _NAN, _NAN, _NAN, _NAN, _NAN, _NAN, _NAN)


@jit
def row_statistics(
    logits: Any,
    r: Any,
    token: Any,
    temperature: Any,
    top_k: Any,
    top_p: Any,
    min_p: Any,
    seed: Any,
    position: Any,
    salt: Any,
    stream: Any,
    limit: Any,
    log_threshold: Any,
    workspace: Any,
) -> Any:
    """Return the fields of `RowStatistics` of row `r`; kept is `UNDECIDED_ROW` if the reference has to find them.

    Args:
        logits: [rows, vocab] of unit column stride.
        r: index of the row.
        token: the drawn id.
        temperature, top_k, top_p, min_p, seed, position, salt: the row's parameters.
        stream: family of noise.
        limit: number of ids that may be drawn.
        log_threshold: float64; ln of the probability below which an id is improbable.
        workspace: uint8 [bytes_of_workspace(vocab)].
    """
    row = row_of(logits, r)
    vocab = len(row)
    scratch = scratch_of(workspace, vocab)
    keys = row_keys(seed, position, stream, salt)
    blocks = blocks_in(I64(0), limit)
    largest = scratch.largest[:blocks]
    nan, _ = summarise_blocks(row, I64(0), limit, largest, False, scratch.words, keys)
    if nan:
        row = without_nan(row, scratch.clean)
        summarise_blocks(row, I64(0), limit, largest, False, scratch.words, keys)
    best = largest_of(largest)
    noisy = temperature >= _GREEDY
    x_max = F32(best / temperature) if noisy else best
    if abs(best) == PLUS_INFINITY or abs(x_max) == PLUS_INFINITY:
        return _NO_LAW
    log_total_1 = log_total_at_1(row, limit, largest, best)
    known = I64(0) <= token < I64(limit)
    logit = widen(row[token]) if known else MINUS_INFINITY
    log_probability = F64(logit) - F64(best) - log_total_1
    if not noisy:
        first = first_at_least(row, BLOCK * first_block_at_least(largest, best), limit, best)
        surprisal = 0.0 if token == first else INFINITY
        improbable = 1.0 if -log_total_1 < log_threshold else 0.0
        return I64(1), F64(best), surprisal, 0.0, 0.0, _NAN, log_probability, improbable

    lowest, cut_x, cut_id, decided = cut_of_filters(
        row, limit, largest, temperature, top_k, top_p, min_p, x_max, scratch
    )
    if not decided:
        return I64(UNDECIDED_ROW), _NAN, _NAN, _NAN, _NAN, _NAN, _NAN, _NAN
    bar = F32((F64(best) + log_total_1 + log_threshold) / F64(temperature))
    kept, s0, s1, s2, tail = kept_moments(row, limit, largest, temperature, x_max, lowest, cut_x, cut_id, bar)
    mean, log_total = s1 / s0, math.log(max(1.0, s0))
    entropy = max(0.0, log_total - mean)
    variance = max(0.0, s2 / s0 - mean * mean)
    x = F32(logit / temperature)
    surprisal = INFINITY
    if x >= lowest and (x > cut_x or (x == cut_x and token < cut_id)):
        surprisal = log_total + (F64(x_max) - F64(x))
    return (
        kept, F64(x_max) + log_total, surprisal, entropy, variance, score(0.0, token, keys) - surprisal,
        log_probability, tail / s0,
    )  # fmt: skip


@jit
def cut_of_filters(
    row: Any,
    limit: Any,
    largest: Any,
    temperature: Any,
    top_k: Any,
    top_p: Any,
    min_p: Any,
    x_max: Any,
    scratch: Any,
) -> Any:
    """Return (smallest tempered value, cut_x, cut_id) of what the filters leave, and whether that is certain.

    Args:
        row: logits, no NaN.
        limit: number of ids that may be kept.
        largest: float32 [blocks]; block maxima.
        temperature, top_k, top_p, min_p: parameters, not greedy.
        x_max: float32, finite; largest tempered value.
        scratch: `Scratch`.
    """
    lowest, decided = bound_of_min_p(x_max, min_p)
    cut_x, cut_id = MINUS_INFINITY, I64(-1)
    if temperature == INFINITY or min_p > 1 or not decided:
        return lowest, cut_x, cut_id, False
    if not 0 < top_k < len(row):
        if top_p < 1:
            cut_x, cut_id, decided = cut_of_row_nucleus(row, limit, largest, temperature, top_p, lowest, x_max, scratch)
        return lowest, cut_x, cut_id, decided

    bound = least_logit(lowest, temperature)
    n, lowest, _, cut_x, cut_id = list_top_k(row, limit, temperature, I64(top_k), lowest, bound, scratch)
    if top_p < 1:
        cut_x, cut_id, decided = cut_of_nucleus(scratch.ids[:n], scratch.xs[:n], top_p, x_max, scratch.values)
    return lowest, cut_x, cut_id, decided


@jit
def fill_serially(
    logits: Any,
    first: Any,
    rows: Any,
    tokens: Any,
    temperature: Any,
    top_k: Any,
    top_p: Any,
    min_p: Any,
    seed: Any,
    position: Any,
    salt: Any,
    stream: Any,
    limit: Any,
    log_threshold: Any,
    kept: Any,
    numbers: Any,
    workspaces: Any,
    counter: Any,
) -> None:
    """Write kept and numbers [7, rows] of every row in the calling thread; `logits` begin with row `first`."""
    for i in range(len(rows)):
        r = rows[i]
        (
            kept[i], numbers[0, i], numbers[1, i], numbers[2, i], numbers[3, i], numbers[4, i], numbers[5, i],
            numbers[6, i],
        ) = row_statistics(
            logits, r - first, tokens[r], temperature[r], top_k[r], top_p[r], min_p[r], seed[r], position[r], salt[r],
            stream, limit, log_threshold, row_of(workspaces, 0),
        )  # fmt: skip


@jit(parallel=True)
def fill_in_parallel(
    logits: Any,
    first: Any,
    rows: Any,
    tokens: Any,
    temperature: Any,
    top_k: Any,
    top_p: Any,
    min_p: Any,
    seed: Any,
    position: Any,
    salt: Any,
    stream: Any,
    limit: Any,
    log_threshold: Any,
    kept: Any,
    numbers: Any,
    workspaces: Any,
    counter: Any,
) -> None:
    """Do what `fill_serially` does by as many threads as there are workspaces, each taking the next row when free."""
    counter[0] = 0
    for thread in prange(len(workspaces)):
        i = take_next(counter)
        while i < len(rows):
            r = rows[i]
            (
                kept[i], numbers[0, i], numbers[1, i], numbers[2, i], numbers[3, i], numbers[4, i], numbers[5, i],
                numbers[6, i],
            ) = row_statistics(
                logits, r - first, tokens[r], temperature[r], top_k[r], top_p[r], min_p[r], seed[r], position[r],
                salt[r], stream, limit, log_threshold, row_of(workspaces, thread),
            )  # fmt: skip
            i = take_next(counter)


def _signature(element: types.Type) -> tuple[types.Type, ...]:
    """Return the argument types of the kernels for logits of one element type: any strides, read-only where read."""
    return (
        read_only(element, 2),
        types.int64,
        read_only(types.int64),
        read_only(types.int64),
        *PARAM_TYPES,
        types.int64,
        types.int64,
        types.float64,
        types.Array(types.int64, 1, "C"),
        types.Array(types.float64, 2, "C"),
        *WORKSPACE_TYPES,
    )


KERNELS = Kernels(fill_serially, fill_in_parallel, _signature)


def statistics(
    logits: Logits,
    params: RowParams,
    tokens: npt.NDArray[np.int64],
    rows: npt.NDArray[np.int64],
    *,
    usable_vocab: int | None = None,
    stream: Stream = Stream.TARGET,
    improbable_below: float = IMPROBABLE_BELOW,
) -> RowStatistics:
    """Return the statistics of some rows of a batch.

    Args:
        logits: float32, float16 or uint16 (bits of bfloat16) [batch, vocab], as they were drawn from; not changed.
            Copied if its columns do not lie side by side.
        params: temperature, filters, seed, position and salt, one entry a row of the batch.
        tokens: int64 [batch]; the drawn ids. One that is no id of the row, such as `NO_TOKEN`, is not a kept id.
        rows: int64 [n]; indices of the rows that are looked at.
        usable_vocab: ids from here on are unknown to the tokenizer and never drawn; None means that all are known.
        stream: family of noise that the draw had.
        improbable_below: threshold of `improbable_mass`, a probability.

    Returns:
        n entries, in the order of `rows`.

    Raises:
        TypeError, ValueError: arguments break the contract (`statistics.check`).
    """
    limit = check(logits, params, tokens, rows, usable_vocab, improbable_below)
    n = len(rows)
    if not n or not logits.shape[1]:
        return RowStatistics.unknown(n)
    kept, numbers = np.empty(n, np.int64), np.empty((7, n), np.float64)
    first, last = int(rows.min()), int(rows.max())
    KERNELS(
        logits[first : last + 1],  # no more rows than needed: a single one is not worth waking a thread
        first,
        rows,
        tokens,
        params.temperature,
        params.top_k,
        params.top_p,
        params.min_p,
        params.seed,
        params.position,
        params.salt,
        int(stream),
        limit,
        log_threshold(improbable_below),
        kept,
        numbers,
    )
    found = RowStatistics(kept, *numbers)
    open_rows = np.flatnonzero(kept == UNDECIDED_ROW)
    if len(open_rows):
        right = statistics_reference.statistics(
            logits,
            params,
            tokens,
            rows[open_rows],
            usable_vocab=usable_vocab,
            stream=stream,
            improbable_below=improbable_below,
        )
        for ours, theirs in zip(vars(found).values(), vars(right).values(), strict=True):
            ours[open_rows] = theirs
    return found


def warm_up(vocab: int, dtype: npt.DTypeLike = np.float32, on_progress: Callable[[str], None] | None = None) -> float:
    """Compile, or load from the cache, all that `statistics` needs for logits of a dtype; return the seconds taken."""
    dtype = np.dtype(dtype)

    def trial(rows: int) -> None:
        logits = np.zeros((rows, max(vocab, SERIAL_IDS)), dtype)
        statistics(logits, RowParams.uniform(rows), np.zeros(rows, np.int64), np.arange(rows))

    return KERNELS.warm_up(dtype, "statistics", trial, on_progress)
