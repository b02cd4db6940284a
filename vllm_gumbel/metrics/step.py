"""What a worker tells the recorder about one step: arrays, one entry a row of the draw."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, fields, replace

import numpy as np
import numpy.typing as npt

from vllm_gumbel.kernels.contract import Flag
from vllm_gumbel.kernels.statistics import RowStatistics
from vllm_gumbel.metrics.catalogue import DEFAULT, GUMBEL, SHADOW, AnomalyKind

_KIND_OF_FLAG = {
    Flag.NONFINITE: AnomalyKind.NONFINITE_LOGITS,
    Flag.NO_CANDIDATE: AnomalyKind.NO_CANDIDATE,
    Flag.PADDED: AnomalyKind.PADDED_ID,
}


@dataclass(frozen=True)
class Admission:
    """A request that got a slot.

    Attributes:
        slot: number that the batch gives it, of no other request until this one leaves.
        tokens: what it had generated before, if it comes back.
        first: whether it comes for the first time.
        by_stock: whether vLLM's own sampler draws it.
        fallback: why it is not drawn as it asked; a reason of `fallbacks_total`.
    """

    slot: int
    tokens: Sequence[int] = ()
    first: bool = True
    by_stock: bool = False
    fallback: str | None = None


@dataclass(frozen=True)
class Watched:
    """Rows of a step whose distribution was looked at.

    Attributes:
        index: int64 [n], ascending; of the rows.
        statistics: of these rows.
        tested: bool [n]; drawn at random from the law of the statistics, by a request without a seed, whose noise no
            other request shares. Which rows that are must not depend on what was drawn.
    """

    index: npt.NDArray[np.int64]
    statistics: RowStatistics
    tested: npt.NDArray[np.bool_]

    @property
    def outside(self) -> npt.NDArray[np.bool_]:
        """Which tokens, bool [n], lie outside what the filters keep, in rows that keep any."""
        return np.isposinf(self.statistics.surprisal) & (self.statistics.kept > 0)

    def take(self, which: npt.NDArray[np.bool_], index: npt.NDArray[np.int64]) -> "Watched":
        """Return those entries for which `which`, bool [n], is true, with `index` in place of theirs."""
        statistics = RowStatistics(**{f.name: getattr(self.statistics, f.name)[which] for f in fields(RowStatistics)})
        return Watched(index, statistics, self.tested[which])

    @staticmethod
    def join(parts: Sequence["Watched"]) -> "Watched | None":
        """Return one for all of `parts`, in the order of the rows; None for none."""
        if len(parts) < 2:
            return parts[0] if parts else None
        index = np.concatenate([part.index for part in parts])
        order = np.argsort(index, kind="stable")
        columns = {
            f.name: np.concatenate([getattr(part.statistics, f.name) for part in parts])[order]
            for f in fields(RowStatistics)
        }
        return Watched(index[order], RowStatistics(**columns), np.concatenate([part.tested for part in parts])[order])


@dataclass(frozen=True)
class Step:
    """One step.

    Attributes:
        tokens: int64 [rows].
        flags: uint8 [rows]; bits of `contract.Flag`.
        slots: int64 [rows]; of the request that a row belongs to. Rows of one request are in the order of its text.
        by_stock: bool [rows]; drawn by vLLM's own sampler.
        watched: None if no row was looked at.
        given_up: float64 [rows]; share of the mass that `gumbel_top_n` gave up, NaN for a row without it; None if
            there is no such row.
        admitted: requests that got a slot since the last step.
        shadow: whether it is what was drawn beside tokens that were sent.
    """

    tokens: npt.NDArray[np.int64]
    flags: npt.NDArray[np.uint8]
    slots: npt.NDArray[np.int64]
    by_stock: npt.NDArray[np.bool_]
    watched: Watched | None = None
    given_up: npt.NDArray[np.float64] | None = None
    admitted: Sequence[Admission] = field(default_factory=tuple)
    shadow: bool = False

    def by_arm(self) -> list[tuple[str, npt.NDArray[np.bool_]]]:
        """Return (arm, bool [rows]: its rows) for each arm that drew any."""
        if self.shadow:
            return [(SHADOW, np.ones(len(self.tokens), bool))] if len(self.tokens) else []
        arms = ((GUMBEL, ~self.by_stock), (DEFAULT, self.by_stock))
        return [(arm, mine) for arm, mine in arms if mine.any()]

    def only(self, sent: npt.NDArray[np.bool_]) -> "Step":
        """Return the step without the rows whose token is not sent; `sent` is bool [rows].

        Raises:
            ValueError: `sent` is of another length.
        """
        if sent.shape != self.tokens.shape:
            raise ValueError(f"sent must have shape {self.tokens.shape}, got {sent.shape}")
        if sent.all():
            return self
        watched = self.watched
        if watched is not None:
            place = np.cumsum(sent) - 1
            which = sent[watched.index]
            watched = watched.take(which, place[watched.index[which]])
        return replace(
            self,
            tokens=self.tokens[sent],
            flags=self.flags[sent],
            slots=self.slots[sent],
            by_stock=self.by_stock[sent],
            watched=watched,
            given_up=None if self.given_up is None else self.given_up[sent],
        )


def flagged(step: Step) -> Iterator[tuple[str, AnomalyKind, int]]:
    """Yield (arm, kind, number of rows) for what a step's draw flagged."""
    for arm, mine in step.by_arm():
        for flag, kind in _KIND_OF_FLAG.items():
            rows = int(np.count_nonzero(step.flags[mine] & flag))
            if rows:
                yield arm, kind, rows
