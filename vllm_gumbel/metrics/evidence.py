"""Live evidence that draws follow the model's distribution: sums over watched rows, which `exactness.py` judges.

Only tokens of requests without a seed are summed: two requests with one seed share their noise at equal positions, as
they should, and sums over draws that depend on one another prove nothing.
"""

import math
from statistics import NormalDist

import numpy as np
import numpy.typing as npt

from vllm_gumbel.kernels.statistics import RowStatistics
from vllm_gumbel.metrics import catalogue
from vllm_gumbel.metrics.catalogue import DEFAULT, AnomalyKind
from vllm_gumbel.metrics.series import Series, Total
from vllm_gumbel.metrics.step import Step

#: Number of bins of `score_pit`.
PIT_BINS = 20

_NORMAL = NormalDist()
_LARGEST_BELOW_1 = math.nextafter(1, 0)


class EvidenceSums:
    """Sums of the watched rows, by arm.

    Args:
        series: makes the counters.
        anomalies: counters of anomalous tokens by kind and arm.
        improbable_below: probability below which a token is improbable.
        arms: those that are summed.
    """

    name = "exactness"

    def __init__(
        self,
        series: Series,
        anomalies: dict[tuple[AnomalyKind, str], Total],
        improbable_below: float,
        arms: tuple[str, ...],
    ) -> None:
        self._arms = {arm: _Sums(series, anomalies, arm, math.log(improbable_below)) for arm in arms}

    def record(self, step: Step) -> None:
        """Count a step.

        Raises:
            ValueError: a row has a law, and yet a sum of it is no number; all other rows are counted.
        """
        watched = step.watched
        if watched is None or not len(watched.index):
            return
        dropped = 0
        for arm, rows in step.by_arm():
            mine = rows[watched.index] & (watched.statistics.kept > 0)
            if mine.any():
                dropped += self._arms[arm].add(watched.statistics, mine, watched.tested)
        if dropped:
            raise ValueError(f"the statistics of {dropped} rows are no finite numbers; they are left out of the sums")


class _Sums:
    """The sums of one arm."""

    def __init__(self, series: Series, anomalies: dict[tuple[AnomalyKind, str], Total], arm: str, least: float) -> None:
        self._least = least
        self._improbable = anomalies[AnomalyKind.IMPROBABLE, arm]
        self._outside = anomalies[AnomalyKind.OUTSIDE_FILTER, arm]
        self._watched = series.counter(catalogue.WATCHED_TOKENS, arm)
        self._expected = series.counter(catalogue.EXPECTED_IMPROBABLE, arm)
        self._kept = series.distribution(catalogue.KEPT_TOKENS, arm)
        self._tested = series.counter(catalogue.TESTED_TOKENS, arm)
        self._surprisal = series.counter(catalogue.SURPRISAL, arm)
        self._entropy = series.counter(catalogue.ENTROPY, arm)
        self._variance = series.counter(catalogue.SURPRISAL_VARIANCE, arm)
        if arm != DEFAULT:  # vLLM's own sampler does not say with which score a token won
            self._pit = [series.counter(catalogue.SCORE_PIT, arm, bin=str(bin)) for bin in range(PIT_BINS)]
            self._squares = series.counter(catalogue.SCORE_SQUARES, arm)
            self._step_squares = series.counter(catalogue.SCORE_STEP_SQUARES, arm)
            self._pairs = series.counter(catalogue.SCORE_PAIRS, arm)
        self._has_scores = arm != DEFAULT

    def add(self, rows: RowStatistics, mine: npt.NDArray[np.bool_], tested: npt.NDArray[np.bool_]) -> int:
        """Add the rows `mine`, bool [n], and return how many could not be added; `tested` as in `Watched`."""
        outside = mine & np.isposinf(rows.surprisal)
        self._watched.inc(int(np.count_nonzero(mine)))
        self._outside.inc(int(np.count_nonzero(outside)))
        self._improbable.inc(int(np.count_nonzero(mine & (rows.log_probability < self._least))))
        self._kept.add(rows.kept[mine])
        masses = rows.improbable_mass[mine]
        self._expected.inc(float(masses[np.isfinite(masses)].sum()))
        finite = np.isfinite(rows.surprisal) & np.isfinite(rows.entropy) & np.isfinite(rows.variance)
        chosen = mine & tested & finite
        if chosen.any():
            self._tested.inc(int(np.count_nonzero(chosen)))
            self._surprisal.inc(max(0.0, float(rows.surprisal[chosen].sum())))
            self._entropy.inc(max(0.0, float(rows.entropy[chosen].sum())))
            self._variance.inc(max(0.0, float(rows.variance[chosen].sum())))
            if self._has_scores:
                scores = rows.score[chosen]
                with np.errstate(over="ignore"):  # exp(-inf) is the 0 that a score below -709 should give
                    self._add_scores(np.exp(-np.exp(-scores[np.isfinite(scores)])))
        return int(np.count_nonzero(mine & ~outside & ~(finite & np.isfinite(rows.improbable_mass))))

    def _add_scores(self, shares: npt.NDArray[np.float64]) -> None:
        """Add the scores of those tested rows of a step that have one, as values of the distribution function."""
        for bin, count in enumerate(np.bincount((shares * PIT_BINS).astype(np.int64).clip(0, PIT_BINS - 1))):
            if count:
                self._pit[bin].inc(int(count))
        z = [_NORMAL.inv_cdf(min(max(share, 1e-300), _LARGEST_BELOW_1)) for share in shares.tolist()]
        self._squares.inc(math.fsum(value * value for value in z))
        self._step_squares.inc(math.fsum(z) ** 2)
        self._pairs.inc(len(z) * (len(z) - 1))
