"""Hands what a device noticed about a step to the recorder, without waiting for the device."""

from collections import deque

import numpy as np
import torch

from vllm_gumbel.metrics.recorder import Recorder

#: Stands for a row whose token is not sent; no combination of `contract.Flag`.
NOT_SENT = 255


class Tally:
    """Counts steps: those on a CPU at once, those on an accelerator when their copy has arrived, a step or two later.

    Args:
        recorder: what counts.
    """

    def __init__(self, recorder: Recorder) -> None:
        self._recorder = recorder
        self._on_the_way: deque[tuple[torch.Event, torch.Tensor]] = deque()

    def add(self, flags: torch.Tensor, sent: torch.Tensor) -> None:
        """Count a step.

        Args:
            flags: uint8 [rows], bits of `contract.Flag`.
            sent: bool [rows], rows whose token goes to the client.
        """
        if flags.device.type == "cpu":
            self._recorder.step(flags.numpy(), sent.numpy())
            return
        while self._on_the_way and self._on_the_way[0][0].query():
            self._count(self._on_the_way.popleft()[1].numpy())
        step = torch.empty(flags.shape, dtype=torch.uint8, pin_memory=True)
        step.copy_(flags.masked_fill(~sent, NOT_SENT), non_blocking=True)
        copied = torch.Event(flags.device)
        copied.record()
        self._on_the_way.append((copied, step))

    def _count(self, step: np.ndarray) -> None:
        self._recorder.step(step, step != NOT_SENT)
