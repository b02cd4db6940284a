"""Hands what a device noticed about a step to the recorder, without waiting for the device."""

import time
from collections import deque
from collections.abc import Callable
from typing import NamedTuple

import numpy as np
import torch

from vllm_gumbel.integration import soundness
from vllm_gumbel.metrics.recorder import Recorder
from vllm_gumbel.metrics.step import Step
from vllm_gumbel.rollout.state import Rollout

#: Turns the arrays of a step, once they are on the host, into the step, which of its rows were sent, bool [rows], and
#: what was drawn in shadow, as `Recorder.record_shadow` takes it.
Finish = Callable[[dict[str, np.ndarray]], tuple[Step, np.ndarray, list[tuple[Step, np.ndarray]]]]


class _Copying(NamedTuple):
    """A step that is on its way to the host."""

    began: torch.Event | None
    copied: torch.Event
    arrays: dict[str, torch.Tensor]
    finish: Finish


class Tally:
    """Counts steps: those on a CPU at once, those on an accelerator when their copy has arrived, a step or two later.

    Args:
        recorder: what counts.
        rollout: has the breaker to be told; None for a worker that must not decide alone.
    """

    def __init__(self, recorder: Recorder, rollout: Rollout | None = None) -> None:
        self._recorder = recorder
        self._rollout = rollout
        self._on_the_way: deque[_Copying] = deque()
        self._began: torch.Event | float | None = None

    def start(self, device: torch.device) -> None:
        """Note that the sampler begins with a step."""
        if device.type == "cpu":
            self._began = time.perf_counter()
            return
        began = torch.Event(device, enable_timing=True)
        began.record()
        self._began = began

    def add(self, arrays: dict[str, torch.Tensor], finish: Finish) -> None:
        """Count a step; never raises.

        Args:
            arrays: what the device knows of it; at least one.
            finish: see `Finish`; called with the same names.
        """
        began, self._began = self._began, None
        try:
            device = next(iter(arrays.values())).device
            if device.type == "cpu":
                self._record(arrays, finish)
                if isinstance(began, float):
                    self._recorder.seconds(time.perf_counter() - began)
                return
            self._count_arrived()
            self._copy(device, arrays, finish, began if isinstance(began, torch.Event) else None)
        except Exception as error:  # whatever it is, the tokens must flow
            self.fault("recorder", error)

    def fault(self, part: str, error: Exception) -> None:
        """Count an error in the bookkeeping."""
        self._recorder.fault(part, error)

    def fallback(self, error: Exception) -> None:
        """Count a step that the reference has to draw."""
        self._recorder.fallback("kernel", error)

    def _copy(
        self, device: torch.device, arrays: dict[str, torch.Tensor], finish: Finish, began: torch.Event | None
    ) -> None:
        """Start to copy a step to the host."""
        copies = {}
        for name, values in arrays.items():
            copies[name] = torch.empty(values.shape, dtype=values.dtype, pin_memory=True)
            copies[name].copy_(values, non_blocking=True)
        copied = torch.Event(device, enable_timing=True)
        copied.record()
        self._on_the_way.append(_Copying(began, copied, copies, finish))

    def _count_arrived(self) -> None:
        """Count the steps whose copies have arrived, in order."""
        while self._on_the_way and self._on_the_way[0].copied.query():
            began, copied, arrays, finish = self._on_the_way.popleft()
            self._record(arrays, finish)
            if began is not None:
                self._recorder.seconds(began.elapsed_time(copied) / 1000)

    def _record(self, arrays: dict[str, torch.Tensor], finish: Finish) -> None:
        """Tell the recorder of a step that is on the host."""
        step, sent, shadows = finish({name: values.numpy() for name, values in arrays.items()})
        self._recorder.record(step, sent)
        if self._rollout is not None:
            soundness.tell_of_watched(self._rollout, step.only(sent))
        if shadows:
            self._recorder.record_shadow(lambda: shadows)
