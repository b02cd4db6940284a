"""The draw of a step under runner V1, put together from its parts, and what is told to the recorder of it."""

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
import torch

from vllm_gumbel.kernels.contract import Draw
from vllm_gumbel.metrics.step import Admission, Step, Watched


@dataclass(frozen=True)
class Drawn:
    """A draw, with what belongs to it.

    Attributes:
        draw: tokens and flags.
        processed: float32 [rows, vocab] logits after the filters, if they were asked for.
        by_stock: rows that vLLM's own sampler drew.
        given_up: shares of mass that `gumbel_top_n` gave up, by row.
        watched: rows whose distribution was looked at, in parts.
    """

    draw: Draw
    processed: torch.Tensor | None = None
    by_stock: list[int] = field(default_factory=list)
    given_up: list[tuple[int, float]] = field(default_factory=list)
    watched: list[Watched] = field(default_factory=list)

    def put(self, part: "Drawn", rows: np.ndarray) -> None:
        """Put the draw of some rows, int [n], in the place of what is there."""
        self.draw.tokens[rows], self.draw.flags[rows] = part.draw.tokens, part.draw.flags
        self.by_stock.extend(int(rows[index]) for index in part.by_stock)
        self.given_up.extend((int(rows[index]), share) for index, share in part.given_up)
        self.watched.extend(Watched(rows[each.index], each.statistics, each.tested) for each in part.watched)

    def put_stock(self, rows: list[int], tokens: torch.Tensor, processed: torch.Tensor | None) -> None:
        """Put what vLLM's own sampler drew in some rows in the place of what is there."""
        self.draw.tokens[rows] = tokens.cpu().numpy()
        self.draw.flags[rows] = 0  # they are about the draw that is replaced
        self.by_stock.extend(rows)
        if self.processed is not None and processed is not None:
            self.processed[rows] = processed

    def as_step(self, slots: np.ndarray, admitted: Sequence[Admission]) -> Step:
        """Return what the recorder is told, with the slot of each row, int64 [rows]."""
        rows = len(slots)
        by_stock = np.zeros(rows, bool)
        by_stock[self.by_stock] = True
        given_up = None
        if self.given_up:
            given_up = np.full(rows, np.nan)
            index, shares = zip(*self.given_up, strict=True)
            given_up[list(index)] = shares
        return Step(
            tokens=self.draw.tokens,
            flags=self.draw.flags,
            slots=slots,
            by_stock=by_stock,
            watched=Watched.join(self.watched),
            given_up=given_up,
            admitted=admitted,
        )
