"""Picks the backend that draws, and says why.

A forced backend that is missing is an error; an automatic choice returns its reason as text, for one log line and for
the label `backend` of `build_info`.
"""

import importlib
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import numpy.typing as npt

from vllm_gumbel.kernels.contract import Draw, RowParams, Stream

#: Backend name -> module with a function `draw`, best first.
BACKENDS = {"reference": "vllm_gumbel.kernels.sample_reference"}


class DrawFunction(Protocol):
    """Signature that every backend's `draw` has; `sample_reference.draw` documents it."""

    def __call__(
        self,
        logits: npt.NDArray[np.float32],
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
