"""Picks the backend that draws, and says why.

A forced backend that is missing is an error; an automatic choice returns its reason as text, for one log line and for
the label `backend` of `build_info`.

`choose` is for rows in NumPy arrays, `choose_for_slots` for rows of tensors that point into slots (`slots.py`).
"""

import importlib
import os
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

from vllm_gumbel.kernels.contract import Draw, Logits, RowParams, Stream
from vllm_gumbel.kernels.slots import Noise, SlotDrawFunction, on_host
from vllm_gumbel.kernels.statistics import IMPROBABLE_BELOW, RowStatistics

#: Backends of the host: name -> module with a function `draw`, best first.
BACKENDS = {
    "numba": "vllm_gumbel.kernels.sample_numba",
    "reference": "vllm_gumbel.kernels.sample_reference",
}

#: Row statistics of the same backends: name -> module with a function `statistics`.
STATISTICS = {
    "numba": "vllm_gumbel.kernels.statistics_numba",
    "reference": "vllm_gumbel.kernels.statistics_reference",
}

#: Backends that draw where the logits are, from slots only: name -> module with a function `draw`, best first.
DEVICE_BACKENDS = {"triton": "vllm_gumbel.kernels.sample_triton"}


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


class StatisticsFunction(Protocol):
    """Signature that every backend's `statistics` has; `statistics_reference.statistics` documents it."""

    def __call__(
        self,
        logits: Logits,
        params: RowParams,
        tokens: npt.NDArray[np.int64],
        rows: npt.NDArray[np.int64],
        *,
        usable_vocab: int | None = None,
        stream: Stream = Stream.TARGET,
        improbable_below: float = IMPROBABLE_BELOW,
    ) -> RowStatistics: ...


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
        from vllm_gumbel.kernels import launch_numba, logprobs_numba, sample_numba, statistics_numba

        launch_numba.set_threads(threads)
        for dtype in dtypes:
            sample_numba.warm_up(vocab, dtype, on_progress)
            logprobs_numba.warm_up(vocab, dtype, on_progress)
            statistics_numba.warm_up(vocab, dtype, on_progress)

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

    @cached_property
    def statistics(self) -> StatisticsFunction:
        """The statistics of some drawn rows, as `statistics_reference.statistics` has them."""
        found: StatisticsFunction = importlib.import_module(STATISTICS[self.name]).statistics
        return found


@dataclass(frozen=True)
class SlotBackend:
    """A backend that was chosen for draws from slots.

    Attributes:
        name: its name.
        draw: its draw.
        reason: why it was chosen.
        host: the host's backend behind it; None if it draws on the device.
    """

    name: str
    draw: SlotDrawFunction
    reason: str
    host: Backend | None


def choose(forced: str = "auto") -> Backend:
    """Return the backend named `forced`, or with "auto" the best one that is there.

    Raises:
        ValueError: no backend has that name.
        ImportError: the forced backend cannot be loaded here.
    """
    if forced != "auto" and forced not in BACKENDS:
        raise ValueError(f"unknown backend {forced!r}; known: auto, {', '.join(BACKENDS)}")
    return Backend(*_load([forced] if forced != "auto" else list(BACKENDS), BACKENDS, forced))


def choose_for_slots(forced: str = "auto", *, device: str, noise: Noise = Noise.OWN) -> SlotBackend:
    """Return the backend named `forced`, or with "auto" the best one that is there, for draws from slots.

    Args:
        forced: name of a backend, or "auto".
        device: type of the device that holds the logits, as torch names it.
        noise: which noise it has to draw with.

    Raises:
        ValueError: no backend of that name draws with that noise on that device.
        ImportError: the forced backend cannot be loaded here.
    """
    names = candidates(forced, device=device, noise=noise)
    name, draw, reason = _load(names, DEVICE_BACKENDS | BACKENDS, forced)
    if name in DEVICE_BACKENDS:
        return SlotBackend(name, draw, reason, host=None)
    return SlotBackend(name, on_host(draw), reason, host=Backend(name, draw, reason))


def candidates(forced: str, *, device: str, noise: Noise) -> list[str]:
    """Return the names of the backends that may draw from slots, best first, without loading any.

    Arguments and ValueError as those of `choose_for_slots`.
    """
    known = [*DEVICE_BACKENDS, *BACKENDS]
    if forced != "auto" and forced not in known:
        raise ValueError(f"unknown backend {forced!r}; known: auto, {', '.join(known)}")
    if noise != Noise.OWN and forced in BACKENDS:
        raise ValueError(f"noise 'stock' needs backend 'triton', got backend {forced!r}")
    there = device != "cpu" or _interprets_triton()
    if not there and (forced in DEVICE_BACKENDS or noise != Noise.OWN):
        asked = f"backend {forced!r}" if forced in DEVICE_BACKENDS else "noise 'stock'"
        raise ValueError(f"{asked} needs an accelerator; on a CPU, only Triton's interpreter (TRITON_INTERPRET=1) runs")
    if forced != "auto":
        return [forced]
    if noise != Noise.OWN:
        return list(DEVICE_BACKENDS)
    return known if device != "cpu" else list(BACKENDS)


def _load(names: list[str], modules: dict[str, str], forced: str) -> tuple[str, Any, str]:
    """Return name, draw and reason of the first backend that loads."""
    if forced != "auto":
        return forced, importlib.import_module(modules[forced]).draw, "forced by setting"
    missing = []
    for name in names:
        try:
            loaded = importlib.import_module(modules[name])
        except ImportError as error:
            missing.append(f"{name} is missing ({error})")
            continue
        return name, loaded.draw, "; ".join([*missing, f"{name} is the first backend that loads"])
    raise ImportError(f"no backend can be loaded: {'; '.join(missing)}")


def _interprets_triton() -> bool:
    """Return whether Triton runs in its interpreter, by the variable and the values that Triton reads."""
    return os.environ.get("TRITON_INTERPRET", "").lower() in ("1", "true", "yes", "on", "y")
