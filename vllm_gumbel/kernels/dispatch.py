"""Picks the backend that draws, and says why.

A forced backend that is missing is an error; an automatic choice returns its reason as text, for one log line and for
the label `backend` of `build_info`.
"""

import importlib
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import numpy.typing as npt

from vllm_gumbel.kernels.contract import Draw, Logits, RowParams, Stream

#: Backend name -> module with a function `draw`, best first.
BACKENDS = {
    "numba": "vllm_gumbel.kernels.sample_numba",
    "reference": "vllm_gumbel.kernels.sample_reference",
}


class DrawFunction(Protocol):
    """Signature that every backend's `draw` has; `sample_reference.draw` documents it."""

    def __call__(
        self,
        logits: Logits,
        params: RowParams,
        *,
        usable_vocab: int | None = None,
        stream: Stream = Stream.TARGET,
        processed: npt.NDArray[np.float32] | None = None,
    ) -> Draw: ...


@dataclass(frozen=True)
class Backend:
    """A backend that was chosen: its name, its draw, and why it was chosen."""

    name: str
    draw: DrawFunction
    reason: str

    def prepare(
        self, vocab: int, dtypes: Iterable[npt.DTypeLike], threads: int, on_progress: Callable[[str], None]
    ) -> None:
        """Do now what the first draw would have to wait for: compile, or load what was compiled before.

        Args:
            vocab: vocabulary size.
            dtypes: dtypes of the logits to come.
            threads: how many threads draw a batch.
            on_progress: called with lines that say what is done.
        """
        if self.name != "numba":
            return
        from vllm_gumbel.kernels import launch_numba, logprobs_numba, sample_numba

        launch_numba.set_threads(threads)
        for dtype in dtypes:
            sample_numba.warm_up(vocab, dtype, on_progress)
            logprobs_numba.warm_up(vocab, dtype, on_progress)

    def gather_logprobs(
        self, logits: Logits, tokens: npt.NDArray[np.int64], top_n: int
    ) -> tuple[npt.NDArray[np.int32], npt.NDArray[np.float32], npt.NDArray[np.int64]] | None:
        """Return ids, logprobs and ranks of the drawn tokens and the `top_n` best, as `logprobs_numba.gather` does.

        None if this backend leaves that to vLLM.
        """
        if self.name != "numba":
            return None
        from vllm_gumbel.kernels import logprobs_numba

        return logprobs_numba.gather(logits, tokens, top_n)


def choose(forced: str = "auto") -> Backend:
    """Return the backend named `forced`, or with "auto" the best one that is there.

    Raises:
        ValueError: no backend has that name.
        ImportError: the forced backend cannot be loaded here.
    """
    if forced != "auto":
        if forced not in BACKENDS:
            raise ValueError(f"unknown backend {forced!r}; known: auto, {', '.join(BACKENDS)}")
        return Backend(forced, importlib.import_module(BACKENDS[forced]).draw, "forced by setting")
    missing = []
    for name, module in BACKENDS.items():
        try:
            loaded = importlib.import_module(module)
        except ImportError as error:
            missing.append(f"{name} is missing ({error})")
            continue
        return Backend(name, loaded.draw, "; ".join([*missing, f"{name} is the first backend that loads"]))
    raise ImportError(f"no backend can be loaded: {'; '.join(missing)}")
