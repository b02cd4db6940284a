"""The draw of a step under runner V1, put together from its parts, and what is told to the recorder of it."""

from collections.abc import Sequence
from dataclasses import dataclass, field, replace

import numpy as np
import torch

from vllm_gumbel.kernels.contract import OF_LOGITS, Draw
from vllm_gumbel.metrics.step import Admission, Step, Watched


@dataclass(frozen=True)
class Beside:
    """What was drawn in shadow, in some rows.

    Attributes:
        rows: int64 [n].
        draw: their tokens and flags.
        watched: what was looked at of it, None for nothing.
    """

    rows: np.ndarray
    draw: Draw
    watched: Watched | None = None


@dataclass(frozen=True)
class Drawn:
    """A draw, with what belongs to it.

    Attributes:
        draw: tokens and flags.
        processed: float32 [rows, vocab] logits after the filters, if they were asked for.
        by_stock: rows that vLLM's own sampler drew.
        given_up: shares of mass that `gumbel_top_n` gave up, by row.
        watched: rows whose distribution was looked at, in parts.
        hard: rows whose draw cannot be right, with what is wrong.
        beside: what was drawn in shadow, in parts.
    """

    draw: Draw
    processed: torch.Tensor | None = None
    by_stock: list[int] = field(default_factory=list)
    given_up: list[tuple[int, float]] = field(default_factory=list)
    watched: list[Watched] = field(default_factory=list)
    hard: list[tuple[int, str]] = field(default_factory=list)
    beside: list[Beside] = field(default_factory=list)

    def put(self, part: "Drawn", rows: np.ndarray) -> None:
        """Put the draw of some rows, int [n], in the place of what is there."""
        self.draw.tokens[rows], self.draw.flags[rows] = part.draw.tokens, part.draw.flags
        self.by_stock.extend(int(rows[index]) for index in part.by_stock)
        self.given_up.extend((int(rows[index]), share) for index, share in part.given_up)
        self.watched.extend(Watched(rows[each.index], each.statistics, each.tested) for each in part.watched)
        self.hard.extend((int(rows[index]), kind) for index, kind in part.hard)
        self.beside.extend(replace(each, rows=rows[each.rows]) for each in part.beside)

    def put_stock(self, rows: list[int], tokens: torch.Tensor, processed: torch.Tensor | None) -> None:
        """Put what vLLM's own sampler drew in some rows in the place of what is there."""
        self.draw.tokens[rows] = tokens.cpu().numpy()
        self.draw.flags[rows] &= OF_LOGITS  # the others are about the draw that is replaced
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

    def shadow_steps(self, slots: np.ndarray, sent: np.ndarray | None) -> list[tuple[Step, np.ndarray]]:
        """Return what the recorder is told of the draws in shadow: steps, and bool [rows] whether a token agrees.

        Args:
            slots: int64 [rows]; the slot of each row of the batch's draw.
            sent: bool [rows], rows whose token goes to the client; None means all.
        """
        found = []
        for each in self.beside:
            step = Step(
                tokens=each.draw.tokens,
                flags=each.draw.flags,
                slots=slots[each.rows],
                by_stock=np.zeros(len(each.rows), bool),
                watched=each.watched,
                shadow=True,
            )
            mine = np.ones(len(each.rows), bool) if sent is None else sent[each.rows]
            found.append((step.only(mine), (each.draw.tokens == self.draw.tokens[each.rows])[mine]))
        return found
