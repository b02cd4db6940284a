"""The draw in Numba: the tokens, flags and kept sets of `sample_reference`, at about the price of reading the row.

One call draws the whole batch, whatever mix of parameters its rows have. Logits are read where they lie, in their own
dtype, through any row stride; only if their columns do not lie side by side is a copy made. Nothing is allocated but
the results: scratch memory (16 bytes an id and thread) is kept between calls.

A row that only the reference's own order of operations can decide is drawn by it (`row_numba` says which), and counted.
"""

from collections.abc import Callable
from typing import Any

import numpy as np
import numpy.typing as npt
from numba import prange, types

from vllm_gumbel.kernels import sample_reference
from vllm_gumbel.kernels.contract import Draw, Logits, RowParams, Stream, check
from vllm_gumbel.kernels.jit_numba import jit, row_of, take_next
from vllm_gumbel.kernels.launch_numba import (
    PARAM_TYPES,
    SERIAL_IDS,
    WORKSPACE_TYPES,
    Kernels,
    read_only,
    set_threads,
    side_by_side,
)
from vllm_gumbel.kernels.row_numba import UNDECIDED_ROW, draw_row

__all__ = ["draw", "reference_rows", "set_threads", "warm_up"]

_NOT_WANTED = np.empty((0, 0), np.float32)
_reference_rows = 0


@jit
def draw_serially(
    logits: Any,
    temperature: Any,
    top_k: Any,
    top_p: Any,
    min_p: Any,
    seed: Any,
    position: Any,
    salt: Any,
    stream: Any,
    limit: Any,
    processed: Any,
    tokens: Any,
    flags: Any,
    workspaces: Any,
    counter: Any,
) -> Any:
    """Draw every row in the calling thread; return how many the reference has to draw. Arguments as `draw_row`."""
    workspace = row_of(workspaces, 0)
    undecided = 0
    for r in range(len(tokens)):
        tokens[r], flags[r] = draw_row(
            logits, r, temperature[r], top_k[r], top_p[r], min_p[r], seed[r], position[r], salt[r], stream, limit,
            processed, workspace,
        )  # fmt: skip
        undecided += flags[r] == UNDECIDED_ROW
    return undecided


@jit(parallel=True)
def draw_in_parallel(
    logits: Any,
    temperature: Any,
    top_k: Any,
    top_p: Any,
    min_p: Any,
    seed: Any,
    position: Any,
    salt: Any,
    stream: Any,
    limit: Any,
    processed: Any,
    tokens: Any,
    flags: Any,
    workspaces: Any,
    counter: Any,
) -> Any:
    """Do what `draw_serially` does by as many threads as there are workspaces, each taking the next row when free."""
    rows = len(tokens)
    counter[0] = 0
    for thread in prange(len(workspaces)):
        workspace = row_of(workspaces, thread)
        r = take_next(counter)
        while r < rows:
            tokens[r], flags[r] = draw_row(
                logits, r, temperature[r], top_k[r], top_p[r], min_p[r], seed[r], position[r], salt[r], stream, limit,
                processed, workspace,
            )  # fmt: skip
            r = take_next(counter)
    undecided = 0
    for r in range(rows):
        undecided += flags[r] == UNDECIDED_ROW
    return undecided


def _signature(element: types.Type) -> tuple[types.Type, ...]:
    """Return the argument types of the kernels for logits of one element type: any strides, read-only where read."""
    return (
        read_only(element, 2),
        *PARAM_TYPES,
        types.int64,
        types.int64,
        types.Array(types.float32, 2, "A"),
        types.Array(types.int64, 1, "C"),
        types.Array(types.uint8, 1, "C"),
        *WORKSPACE_TYPES,
    )


KERNELS = Kernels(draw_serially, draw_in_parallel, _signature)


def draw(
    logits: Logits,
    params: RowParams,
    *,
    usable_vocab: int | None = None,
    stream: Stream = Stream.TARGET,
    processed: npt.NDArray[np.float32] | None = None,
) -> Draw:
    """Draw one token per row.

    Args:
        logits: float32, float16 or uint16 (bits of bfloat16) [rows, vocab]; not changed. Copied if its columns do not
            lie side by side.
        params: temperature, filters, seed, position and salt, one entry a row.
        usable_vocab: ids from here on are unknown to the tokenizer and never drawn; None means that all are known.
        stream: family of noise.
        processed: float32 [rows, vocab] to receive x after the filters, -inf where not kept; None if not wanted. May be
            `logits` itself if that is float32, but no other view of its memory.

    Returns:
        The tokens and what was noticed about each row.

    Raises:
        TypeError, ValueError: arguments break the contract (`contract.check`).
    """
    limit = check(logits, params, usable_vocab)
    rows, vocab = logits.shape
    if not rows or not vocab:
        return sample_reference.draw(logits, params, usable_vocab=usable_vocab, stream=stream, processed=processed)
    out = _NOT_WANTED if processed is None else side_by_side(processed)
    tokens, flags = np.empty(rows, np.int64), np.empty(rows, np.uint8)
    undecided = KERNELS(
        logits,
        params.temperature,
        params.top_k,
        params.top_p,
        params.min_p,
        params.seed,
        params.position,
        params.salt,
        int(stream),
        limit,
        out,
        tokens,
        flags,
    )
    drawn = Draw(tokens, flags)
    if undecided:
        _draw_by_reference(drawn, logits, params, usable_vocab, stream, None if processed is None else out)
    if processed is not None and out is not processed:
        processed[...] = out
    return drawn


def reference_rows() -> int:
    """Return how many rows of this process were given to the reference."""
    return _reference_rows


def warm_up(vocab: int, dtype: npt.DTypeLike = np.float32, on_progress: Callable[[str], None] | None = None) -> float:
    """Compile, or load from the cache, all that `draw` needs for logits of a dtype, and make room for `vocab` ids.

    Args:
        vocab: vocabulary size.
        dtype: dtype of the logits as `draw` gets them.
        on_progress: called with one line before and after.

    Returns:
        The seconds it took.
    """
    dtype = np.dtype(dtype)

    def trial(rows: int) -> None:
        draw(np.zeros((rows, max(vocab, SERIAL_IDS)), dtype), RowParams.uniform(rows))

    return KERNELS.warm_up(dtype, "draw", trial, on_progress)


def _draw_by_reference(
    drawn: Draw,
    logits: Logits,
    params: RowParams,
    usable_vocab: int | None,
    stream: Stream,
    processed: npt.NDArray[np.float32] | None,
) -> None:
    """Replace the rows of `drawn` that the kernels left open."""
    global _reference_rows
    for r in np.flatnonzero(drawn.flags == UNDECIDED_ROW):
        one = slice(r, r + 1)
        row = params.take(np.array([r]))
        out = None if processed is None else processed[one]
        result = sample_reference.draw(logits[one], row, usable_vocab=usable_vocab, stream=stream, processed=out)
        drawn.tokens[r], drawn.flags[r] = result.tokens[0], result.flags[0]
        _reference_rows += 1
