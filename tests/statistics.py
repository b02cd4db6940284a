"""Statistical assertions that name their false-alarm rate, and the smallest error they would catch.

Every helper takes keyword arguments only, so that observed and expected cannot be exchanged, and fails with the
statistic, its p-value, the threshold and the command that repeats it. Seeds are fixed in the tests: a test that passes
passes always; the rate says how often another seed, or another correct noise function, would fail it.
"""

import os

import numpy as np
import numpy.typing as npt
from scipy import optimize, stats

#: Highest false-alarm rate that an assertion may have.
FALSE_ALARM = 1e-6
#: The laws below are approximate far out (simulated at 1e-5 they are passed up to 2.3 times as often as they say), so
#: chi-square thresholds stand at the rate divided by this.
ALLOWANCE = 5
#: Cells are pooled until each expects at least this many counts (Cochran 1954).
LEAST_EXPECTED = 5.0


def assert_goodness_of_fit(
    *,
    observed: npt.ArrayLike,
    probabilities: npt.ArrayLike,
    claim: str,
    two_sided: bool = False,
    false_alarm: float = FALSE_ALARM,
) -> float:
    """Assert that counts follow a distribution, by Pearson's chi-square, and return the p-value.

    Cells are pooled in the order of their probability until each expects `LEAST_EXPECTED`. The threshold is that of the
    gamma law with the statistic's exact mean and variance (Haldane 1937), since in sparse tables the variance exceeds
    that of the chi-square law.

    Args:
        observed: counts [cells].
        probabilities: what each cell should get [cells]; scaled to sum to one. A cell of probability 0 must be empty.
        claim: what the failure message says was expected.
        two_sided: also refuse counts that are too regular; each side then gets half of the rate.
        false_alarm: rate of failures of a correct sampler, at most `FALSE_ALARM`.

    Raises:
        AssertionError: a count in an impossible cell, or a statistic past the threshold.
    """
    _check_rate(false_alarm)
    counts, p = np.asarray(observed, np.float64), np.asarray(probabilities, np.float64)
    if counts.shape != p.shape or counts.ndim != 1:
        raise ValueError(f"observed {counts.shape} and probabilities {p.shape} must be two equal lists")
    impossible = np.flatnonzero((p == 0) & (counts > 0))
    if len(impossible):
        raise AssertionError(f"{claim}: cells {impossible[:8].tolist()} have probability 0 and were hit; {reproduce()}")
    total = counts.sum()
    counts, p = _pool(counts[p > 0], p[p > 0] / p.sum(), total)
    if len(p) < 2:
        raise ValueError("fewer than two cells are left after pooling: nothing is tested")
    expected = total * p
    statistic = float(((counts - expected) ** 2 / expected).sum())
    law = _pearson_law(p, total)
    upper, lower = float(law.sf(statistic)), float(law.cdf(statistic))
    p_value = min(1.0, 2 * min(upper, lower)) if two_sided else upper
    rate = false_alarm / ALLOWANCE
    if not p_value >= rate:
        low, high = (rate / 2, rate / 2) if two_sided else (0.0, rate)
        raise AssertionError(
            f"{claim}: chi-square {statistic:.6g} with {len(p) - 1} degrees of freedom, z = "
            f"{(statistic - law.mean()) / law.std():.2f}, p = {p_value:.3g} below {rate:.3g} "
            f"(accepted {law.ppf(low):.6g} to {law.isf(high):.6g}, {int(total)} counts); {reproduce()}"
        )
    return p_value


def assert_uniform(*, values: npt.ArrayLike, bins: int, claim: str, false_alarm: float = FALSE_ALARM) -> float:
    """Assert that numbers in [0, 1) are uniform, by equal bins, neither uneven nor too even; return the p-value."""
    v = np.asarray(values, np.float64).ravel()
    if not ((v >= 0) & (v < 1)).all():
        raise AssertionError(f"{claim}: a value outside [0, 1); {reproduce()}")
    counts = np.bincount((v * bins).astype(np.int64), minlength=bins)
    return assert_goodness_of_fit(
        observed=counts, probabilities=np.full(bins, 1 / bins), claim=claim, two_sided=True, false_alarm=false_alarm
    )


def poisson_interval(*, mean: float, false_alarm: float = FALSE_ALARM) -> tuple[int, int]:
    """Return the smallest and the largest count that a Poisson law of this mean is accepted with."""
    _check_rate(false_alarm)
    return int(stats.poisson.ppf(false_alarm / 2, mean)), int(stats.poisson.isf(false_alarm / 2, mean))


def assert_poisson(*, count: int, mean: float, claim: str, false_alarm: float = FALSE_ALARM) -> None:
    """Assert that a count of rare events is plausible under a Poisson law."""
    low, high = poisson_interval(mean=mean, false_alarm=false_alarm)
    if not low <= count <= high:
        p_value = 2 * min(stats.poisson.cdf(count, mean), stats.poisson.sf(count - 1, mean))
        raise AssertionError(
            f"{claim}: count {count}, p = {p_value:.3g} below {false_alarm:.3g} "
            f"(accepted {low} to {high}, mean {mean:.6g}); {reproduce()}"
        )


def assert_frequency(
    *, count: int, trials: int, probability: float, claim: str, false_alarm: float = FALSE_ALARM
) -> None:
    """Assert that a count of successes is plausible under a binomial law."""
    _check_rate(false_alarm)
    law = stats.binom(trials, probability)
    low, high = int(law.ppf(false_alarm / 2)), int(law.isf(false_alarm / 2))
    if not low <= count <= high:
        p_value = 2 * min(law.cdf(count), law.sf(count - 1))
        raise AssertionError(
            f"{claim}: {count} of {trials} = {count / trials:.6f}, p = {p_value:.3g} below {false_alarm:.3g} "
            f"(accepted {low / trials:.6f} to {high / trials:.6f}, law {probability:.6f}); {reproduce()}"
        )


def smallest_relative_error(
    *, cells: int, samples: int, power: float = 0.99, false_alarm: float = FALSE_ALARM, two_sided: bool = False
) -> float:
    """Return the root mean square relative error of the cells that `assert_goodness_of_fit` catches with `power`.

    From the noncentral chi-square law: d = sqrt(lambda / samples), where d^2 is the mean over the true distribution of
    the squared relative error. Half the mass too large by d and half too small is a total variation of d / 2.
    """
    _check_rate(false_alarm)
    threshold = stats.chi2.isf(false_alarm / ALLOWANCE / (2 if two_sided else 1), cells - 1)
    strength = optimize.brentq(lambda n: stats.ncx2.sf(threshold, cells - 1, n) - power, 1e-3, 1e6)
    return float(np.sqrt(strength / samples))


def reproduce() -> str:
    """Return the command that repeats the test that runs now."""
    test = os.environ.get("PYTEST_CURRENT_TEST", "").rsplit(" (", 1)[0]
    return f"repeat with: python -m pytest '{test}'"


def _pool(
    counts: npt.NDArray[np.float64], p: npt.NDArray[np.float64], total: float
) -> tuple[npt.NDArray[np.float64], npt.NDArray[np.float64]]:
    """Join cells, the least probable first, until each expects `LEAST_EXPECTED` counts."""
    order = np.argsort(p, kind="stable")
    edges, mass = [], 0.0
    for i, share in enumerate(p[order]):
        if not mass:
            edges.append(i)
        mass += share
        if mass * total >= LEAST_EXPECTED:
            mass = 0.0
    if mass and len(edges) > 1:  # the last cells do not reach the limit: they join the ones before
        edges.pop()
    return np.add.reduceat(counts[order], edges), np.add.reduceat(p[order], edges)


def _pearson_law(p: npt.NDArray[np.float64], total: float) -> stats.rv_continuous:
    """Return the gamma law with the exact mean and variance of Pearson's statistic."""
    k = len(p)
    mean = k - 1.0
    variance = max(2 * mean + float((1 / p).sum() - k * k - 2 * k + 2) / total, mean / 10)
    return stats.gamma(mean**2 / variance, scale=variance / mean)


def _check_rate(false_alarm: float) -> None:
    """Refuse a rate that would make the suite flaky."""
    if not 0 < false_alarm <= FALSE_ALARM:
        raise ValueError(f"false_alarm must be in (0, {FALSE_ALARM}], got {false_alarm}")
