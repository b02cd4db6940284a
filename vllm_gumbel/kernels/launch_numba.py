"""How compiled kernels are called: dtypes, strides, scratch memory, threads.

A batch that takes less than about 50 microseconds is done by the calling thread alone, since waking the others costs as
much; so is a single row, since splitting one did not pay up to a vocabulary of 262,144. Otherwise rows are handed out
one at a time to Numba's threads.

Threads: Numba's pool has `NUMBA_NUM_THREADS` of them, by default one per CPU that the process may use when Numba is
first imported. Its layer is OpenMP where that is there, loaded after torch's so that both use one runtime; the other
layers pin threads to a core or abort when two callers meet. The pool starts at the first parallel call, which has to
come after the last fork: `Kernels.warm_up` makes it.
"""

import os
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from typing import Any

import numpy as np
import numpy.typing as npt
from numba import config, types

from vllm_gumbel.kernels.contract import Logits
from vllm_gumbel.kernels.jit_numba import WITHOUT_JIT
from vllm_gumbel.kernels.scratch_numba import bytes_of_workspace

#: Batches of fewer ids than this are done by the calling thread: about 50 microseconds.
SERIAL_IDS = 200_000

#: Types of the two arguments that `Kernels` adds: uint8 [threads, bytes] scratch memory, int64 [1] next row.
WORKSPACE_TYPES = (types.Array(types.uint8, 2, "C"), types.Array(types.int64, 1, "C"))


def read_only(scalar: types.Type, dimensions: int = 1) -> types.Type:
    """Return the type of an array that a kernel reads, of any strides."""
    return types.Array(scalar, dimensions, "A", readonly=True)


#: Types of the columns of `RowParams`, in their order.
PARAM_TYPES = tuple(
    map(
        read_only,
        (types.float32, types.int32, types.float32, types.float32, types.uint64, types.int64, types.uint64),
    )
)

_FLOAT16 = np.dtype(np.float16)
_ELEMENTS = {"float32": types.float32, "uint16": types.uint16, "float16": types.int16}
_threads = 1


class _Workspace(threading.local):
    """What one calling thread keeps between calls: scratch memory for every thread that works for it."""

    def __init__(self) -> None:
        self.vocab = -1
        self.threads = 0
        self.counter = np.zeros(1, np.int64)
        self.all = self.first = np.empty((0, 0), np.uint8)

    def fit(self, vocab: int) -> None:
        """Make room for rows of `vocab` ids on every thread."""
        self.all = np.empty((_threads, bytes_of_workspace(vocab)), np.uint8)
        self.first = self.all[:1]
        self.vocab, self.threads = vocab, _threads


_workspace = _Workspace()


class Kernels:
    """One operation on the rows of a batch, compiled once per dtype of the logits.

    Args:
        serial, parallel: the kernels; arguments (logits, ..., workspaces, counter).
        signature: returns the argument types for one element type of the logits.
    """

    def __init__(
        self,
        serial: Callable[..., Any],
        parallel: Callable[..., Any],
        signature: Callable[[types.Type], tuple[types.Type, ...]],
    ) -> None:
        self._serial, self._parallel, self._signature = serial, parallel, signature
        self._compiled: set[np.dtype] = set()

    def __call__(self, logits: Logits, *arguments: Any) -> Any:
        """Run on `logits` [rows, vocab], both at least 1; returns what the kernels return."""
        rows, vocab = logits.shape
        dtype = logits.dtype
        if dtype not in self._compiled:
            self._compile(dtype)
        values = side_by_side(logits)
        if dtype == _FLOAT16:
            values = values.view(np.int16)
        workspace = _workspace
        if workspace.vocab < vocab or workspace.threads != _threads:
            workspace.fit(max(vocab, workspace.vocab))
        if rows == 1 or _threads == 1 or rows * vocab < SERIAL_IDS:
            return self._serial(values, *arguments, workspace.first, workspace.counter)
        return self._parallel(values, *arguments, workspace.all, workspace.counter)

    def warm_up(
        self, dtype: np.dtype, name: str, trial: Callable[[int], Any], on_progress: Callable[[str], None] | None
    ) -> float:
        """Compile for a dtype or load from the cache, start the threads, and return the seconds it took.

        Args:
            dtype: of the logits.
            name: of the operation, for the progress lines.
            trial: runs the operation on that many rows of `SERIAL_IDS` ids.
            on_progress: called with one line before and after.
        """
        began = time.perf_counter()
        say = on_progress or (lambda line: None)
        say(f"{name} kernels for {dtype.name} logits: compiling, or loading from the cache")
        self._compile(dtype)
        if _threads > 1:
            trial(2)
        seconds = time.perf_counter() - began
        say(f"{name} kernels for {dtype.name} logits: ready after {seconds:.1f} s")
        return seconds

    def _compile(self, dtype: np.dtype) -> None:
        """Compile both kernels for a dtype, or load them from the cache."""
        if not WITHOUT_JIT:
            _prefer_openmp()
            for kernel in (self._serial, self._parallel):
                kernel.disable_compile(False)  # type: ignore[attr-defined]
                kernel.compile(self._signature(_ELEMENTS[dtype.name]))  # type: ignore[attr-defined]
                kernel.disable_compile()  # type: ignore[attr-defined]
        self._compiled.add(dtype)


def set_threads(threads: int | None = None) -> int:
    """Set how many threads work on a batch, and return that number.

    Args:
        threads: at least 1; None means as many as the process has CPUs. Never more than `NUMBA_NUM_THREADS`.

    Raises:
        ValueError: `threads` is below 1.
    """
    global _threads
    if threads is not None and threads < 1:
        raise ValueError(f"threads must be at least 1, got {threads}")
    wanted = _cpus() if threads is None else threads
    _threads = 1 if WITHOUT_JIT else min(wanted, config.NUMBA_NUM_THREADS)
    return _threads


def threads() -> int:
    """Return how many threads work on a batch."""
    return _threads


def side_by_side(matrix: npt.NDArray) -> npt.NDArray:
    """Return a matrix whose columns lie side by side, aligned: itself or a copy."""
    if matrix.strides[1] == matrix.itemsize and matrix.flags.aligned:
        return matrix
    return matrix.copy(order="C")


def _cpus() -> int:
    """Return the number of CPUs that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def _prefer_openmp() -> None:
    """Choose Numba's OpenMP layer unless the user chose one, and let torch load its own OpenMP first."""
    if config.THREADING_LAYER == "default":
        config.THREADING_LAYER_PRIORITY = ["omp", "tbb", "workqueue"]
    with suppress(ImportError):
        import torch  # noqa: F401


set_threads()
