"""The draw of a step under runner V1, put together from its parts, and what is counted of it."""

from dataclasses import dataclass, field

import numpy as np
import torch

from vllm_gumbel.kernels.contract import Draw
from vllm_gumbel.metrics.recorder import Recorder


@dataclass(frozen=True)
class Drawn:
    """A draw, with what belongs to it.

    Attributes:
        draw: tokens and flags.
        processed: float32 [rows, vocab] logits after the filters, if they were asked for.
        by_stock: rows that vLLM's own sampler drew.
        given_up: shares of mass that `gumbel_top_n` gave up, by row.
    """

    draw: Draw
    processed: torch.Tensor | None = None
    by_stock: list[int] = field(default_factory=list)
    given_up: list[tuple[int, float]] = field(default_factory=list)

    def put(self, part: "Drawn", rows: np.ndarray) -> None:
        """Put the draw of some rows, int [n], in the place of what is there."""
        self.draw.tokens[rows], self.draw.flags[rows] = part.draw.tokens, part.draw.flags
        self.by_stock.extend(int(rows[index]) for index in part.by_stock)
        self.given_up.extend((int(rows[index]), share) for index, share in part.given_up)

    def put_stock(self, rows: list[int], tokens: torch.Tensor, processed: torch.Tensor | None) -> None:
        """Put what vLLM's own sampler drew in some rows in the place of what is there."""
        self.draw.tokens[rows] = tokens.cpu().numpy()
        self.draw.flags[rows] = 0  # they are about the draw that is replaced
        self.by_stock.extend(rows)
        if self.processed is not None and processed is not None:
            self.processed[rows] = processed

    def count(self, recorder: Recorder, sent: np.ndarray | None) -> None:
        """Count the rows whose token is sent, bool [rows]; None means all are."""
        if self.by_stock or self.given_up:
            sent = np.ones(len(self.draw.flags), bool) if sent is None else sent.copy()
            shares = [share for index, share in self.given_up if sent[index]]
            recorder.keyed(int(sent[self.by_stock].sum()), shares)
            sent[self.by_stock] = False
        recorder.step(self.draw.flags, sent)
