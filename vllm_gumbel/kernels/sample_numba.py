"""The draw in Numba: the tokens, flags and kept sets of `sample_reference`, at about the price of reading the row.

One call draws the whole batch, whatever mix of parameters its rows have. Rows are handed out one at a time to Numba's
threads; a batch that takes less than about 50 microseconds is drawn by the calling thread alone, since waking the
others costs as much. A single row is never split: that did not pay up to a vocabulary of 262,144.

Logits are read where they lie, in their own dtype, through any row stride. Only if the column stride is not one element
is a contiguous copy made. Scratch memory (16 bytes an id and thread) is kept between calls, one set per calling thread.

A row that only the reference's own order of operations can decide is drawn by it (`row_numba` says which) and counted in
`reference_rows`.
"""

import os
import threading
import time
from collections.abc import Callable
from dataclasses import fields

import numba
import numpy as np
import numpy.typing as npt
from numba import prange, types

from vllm_gumbel.kernels import sample_reference
from vllm_gumbel.kernels.contract import Draw, Logits, RowParams, Stream, check
from vllm_gumbel.kernels.jit_numba import WITHOUT_JIT, jit, take_next
from vllm_gumbel.kernels.row_numba import UNDECIDED_ROW, bytes_of_workspace, draw_row

#: Batches of fewer ids than this are drawn by the calling thread: about 50 microseconds.
SERIAL_IDS = 200_000

_NOT_WANTED = np.empty((0, 0), np.float32)
_FLOAT32 = np.dtype(np.float32)
_FLOAT16 = np.dtype(np.float16)


@jit
def draw_serially(
    logits, temperature, top_k, top_p, min_p, seed, position, salt, stream, limit, processed, tokens, flags, workspaces, counter
):  # type: ignore[no-untyped-def]
    """Draw every row in the calling thread; return how many are left to the reference. Arguments as `draw_row`, in bulk."""
    undecided = 0
    for r in range(len(tokens)):
        tokens[r], flags[r] = draw_row(
            logits, r, temperature[r], top_k[r], top_p[r], min_p[r], seed[r], position[r], salt[r], stream, limit,
            processed, workspaces[0],
        )
        undecided += flags[r] == UNDECIDED_ROW
    return undecided


@jit(parallel=True)
def draw_in_parallel(
    logits, temperature, top_k, top_p, min_p, seed, position, salt, stream, limit, processed, tokens, flags, workspaces, counter
):  # type: ignore[no-untyped-def]
    """Draw rows by as many threads as there are workspaces, each taking the next row when it is free."""
    rows = len(tokens)
    counter[0] = 0
    for thread in prange(len(workspaces)):
        r = take_next(counter)
        while r < rows:
            tokens[r], flags[r] = draw_row(
                logits, r, temperature[r], top_k[r], top_p[r], min_p[r], seed[r], position[r], salt[r], stream, limit,
                processed, workspaces[thread],
            )
            r = take_next(counter)
    undecided = 0
    for r in range(rows):
        undecided += flags[r] == UNDECIDED_ROW
    return undecided


class _State(threading.local):
    """What one calling thread keeps between calls: scratch memory for every thread that draws for it."""

    def __init__(self) -> None:
        self.vocab = -1
        self.parallel = np.empty((0, 0), np.uint8)
        self.serial = self.parallel
        self.counter = np.zeros(1, np.int64)

    def fit(self, vocab: int) -> None:
        """Make room for rows of `vocab` ids on every thread."""
        self.parallel = np.empty((_threads, bytes_of_workspace(vocab)), np.uint8)
        self.serial = self.parallel[:1]
        self.vocab = vocab


_state = _State()
_compiled: set[np.dtype] = set()
_threads = 1
_reference_rows = 0


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
    dtype = logits.dtype
    if dtype not in _compiled:
        warm_up(vocab, dtype)
    values = _side_by_side(logits)
    if dtype is not _FLOAT32 and dtype == _FLOAT16:
        values = values.view(np.int16)
    out = _NOT_WANTED if processed is None else _side_by_side(processed)
    tokens = np.empty(rows, np.int64)
    flags = np.empty(rows, np.uint8)
    state = _state
    if state.vocab < vocab:
        state.fit(vocab)
    alone = rows == 1 or _threads == 1 or rows * vocab < SERIAL_IDS
    undecided = (draw_serially if alone else draw_in_parallel)(
        values,
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
        state.serial if alone else state.parallel,
        state.counter,
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


def set_threads(threads: int | None = None) -> int:
    """Set how many threads draw a batch, and return that number.

    Args:
        threads: at least 1; None means as many as the process has CPUs. Never more than `NUMBA_NUM_THREADS`, which Numba
            reads once, when it is first imported.

    Raises:
        ValueError: `threads` is below 1.
    """
    global _threads
    if threads is not None and threads < 1:
        raise ValueError(f"threads must be at least 1, got {threads}")
    wanted = len(os.sched_getaffinity(0)) if threads is None else threads
    _threads = 1 if WITHOUT_JIT else min(wanted, numba.config.NUMBA_NUM_THREADS)
    _state.__init__()  # type: ignore[misc]
    return _threads


def warm_up(vocab: int, dtype: npt.DTypeLike = np.float32, on_progress: Callable[[str], None] | None = None) -> float:
    """Compile, or load from the cache, all that `draw` needs for logits of a dtype, and make room for `vocab` ids.

    Args:
        vocab: vocabulary size.
        dtype: dtype of the logits as `draw` gets them.
        on_progress: called with one line before and after.

    Returns:
        The seconds it took.
    """
    began = time.perf_counter()
    dtype = np.dtype(dtype)
    say = on_progress or (lambda line: None)
    if dtype not in _compiled:
        say(f"compiling the sampler's kernels for {dtype.name} logits, or loading them from the cache")
        if not WITHOUT_JIT:
            _load_threads()
            for kernel in (draw_serially, draw_in_parallel):
                kernel.disable_compile(False)
                kernel.compile(_signature(dtype))
                kernel.disable_compile()
        _compiled.add(dtype)
        params = RowParams.uniform(_threads, temperature=1.0)
        logits = np.zeros((_threads, max(vocab, SERIAL_IDS)), dtype)  # large enough to start the threads
        draw(logits, params)
    if _state.vocab < vocab:
        _state.fit(vocab)
    seconds = time.perf_counter() - began
    say(f"kernels for {dtype.name} logits are ready after {seconds:.1f} s")
    return seconds


def _signature(dtype: np.dtype) -> tuple[types.Type, ...]:
    """Return the argument types of the kernels; any strides, and read-only where nothing is written."""

    def read(scalar: types.Type, dimensions: int = 1) -> types.Type:
        return types.Array(scalar, dimensions, "A", readonly=True)

    element = {"float32": types.float32, "uint16": types.uint16, "float16": types.int16}[dtype.name]
    return (
        read(element, 2),
        read(types.float32),
        read(types.int32),
        read(types.float32),
        read(types.float32),
        read(types.uint64),
        read(types.int64),
        read(types.uint64),
        types.int64,
        types.int64,
        types.Array(types.float32, 2, "A"),
        types.Array(types.int64, 1, "C"),
        types.Array(types.uint8, 1, "C"),
        types.Array(types.uint8, 2, "C"),
        types.Array(types.int64, 1, "C"),
    )


def _side_by_side(matrix: npt.NDArray) -> npt.NDArray:
    """Return a matrix whose columns lie side by side, aligned: itself or a copy."""
    if matrix.strides[1] == matrix.itemsize and matrix.flags.aligned:
        return matrix
    return np.ascontiguousarray(matrix) if matrix.flags.aligned else matrix.copy()


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
        row = RowParams(**{field.name: getattr(params, field.name)[one] for field in fields(params)})
        out = None if processed is None else processed[one]
        result = sample_reference.draw(logits[one], row, usable_vocab=usable_vocab, stream=stream, processed=out)
        drawn.tokens[r], drawn.flags[r] = result.tokens[0], result.flags[0]
        _reference_rows += 1


def _load_threads() -> None:
    """Let torch load its OpenMP first, so that Numba's threads are the same runtime's and not a second pool beside it."""
    try:
        import torch  # noqa: F401
    except ImportError:
        pass


set_threads()
