"""Paired statistics of two deployments: intervals by bootstrap over prompts, and what equal noise saves.

The model behind it: prompts are a sample of prompts, and each is asked with several seeds. What a prompt's texts have
in common moves together, so whole prompts are drawn anew, with all their seeds (a cluster bootstrap; Efron and
Tibshirani 1993, section 8; Field and Welsh 2007). Every prompt weighs the same.

Intervals are BCa (Efron 1987), at percentiles expanded from the normal law to Student's with one degree of freedom less
than there are prompts, times sqrt(n / (n - 1)): without that they are too narrow for few prompts (Hesterberg 2015,
"What teachers should know about the bootstrap").

Notation: for prompt p and seed i, b_pi and c_pi are a measure of the baseline's and the candidate's text, and
d_pi = c_pi - b_pi.
"""

from collections.abc import Callable, Sequence
from functools import lru_cache
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

LEVEL = 0.95
ROUNDS = 4000
#: Rounds for whole curves.
CURVE_ROUNDS = 1000
#: Prompts above which weights are drawn in parts, which saves memory.
MANY = 1000

Floats = npt.NDArray[np.float64]
#: Weights [rounds, prompts], how often each prompt is drawn -> the statistic [rounds].
Statistic = Callable[[Floats], Floats]


class Interval(NamedTuple):
    """An estimate with its interval; NaN where there is none, as with fewer than two prompts."""

    value: float
    low: float
    high: float


NO_INTERVAL = Interval(float("nan"), float("nan"), float("nan"))


class Difference(NamedTuple):
    """What two sides differ by in a measure.

    Attributes:
        baseline: mean over prompts of the mean over seeds.
        candidate: the same.
        difference: candidate - baseline, with its interval.
        independent: the interval that the same number of texts would give with independent seeds; NaN if unknown.
        reduction: by what factor equal noise divides the variance of d for a prompt and a seed drawn at random: how
            many times as many texts independent seeds need for the same interval, with a seed a prompt.
        noise_reduction: the same for given prompts, so of what the noise adds alone.
        texts: pairs that it rests on.
        prompts: of those.
    """

    baseline: float
    candidate: float
    difference: Interval
    independent: Interval
    reduction: Interval
    noise_reduction: Interval
    texts: int
    prompts: int


class Divergence(NamedTuple):
    """Where the two texts of a pair part.

    Attributes:
        equal: tokens that they have in common from the start.
        parted: whether they part then; else both end there.
    """

    equal: int
    parted: bool


class Agreement(NamedTuple):
    """How long texts stay together.

    Attributes:
        tokens: positions at which both sides had the same text before them.
        agree: of those, where they also drew the same token.
        share: agree / tokens.
        median: position at which half of the pairs have parted; None if fewer do.
        curve: position (from 1), share of pairs that have not parted up to it, low, high.
    """

    tokens: int
    agree: int
    share: Interval
    median: int | None
    curve: list[tuple[int, float, float, float]]


def bootstrap(
    statistic: Statistic, prompts: int, *, level: float = LEVEL, rounds: int = ROUNDS, seed: int = 0
) -> Interval:
    """Return a statistic with its BCa interval.

    Args:
        statistic: of weights.
        prompts: how many there are.
        level: of the interval.
        rounds: of the bootstrap.
        seed: of its numbers; equal ones give equal intervals.
    """
    if prompts == 0:
        return NO_INTERVAL
    value = float(statistic(np.ones((1, prompts)))[0])
    if prompts < 2 or not np.isfinite(value):
        return Interval(value, float("nan"), float("nan"))
    draws = _drawn(statistic, prompts, rounds, seed)
    draws = draws[np.isfinite(draws)]
    # With very many prompts each one alone says nothing, and the matrix would be large.
    without = statistic(np.ones((prompts, prompts)) - np.eye(prompts)) if prompts <= MANY else np.zeros(1)
    if len(draws) < rounds / 2 or not np.isfinite(without).all():
        return Interval(value, float("nan"), float("nan"))
    pull = without.mean() - without
    spread = (pull**2).sum() ** 1.5
    acceleration = float((pull**3).sum() / (6 * spread)) if spread > 0 else 0.0
    below = ((draws < value).mean() + (draws <= value).mean()) / 2
    low, high = np.quantile(draws, _percentiles(float(below), acceleration, prompts, level, len(draws)))
    return Interval(value, float(low), float(high))


def difference(
    baseline: Floats, candidate: Floats, *, coupled: bool, level: float = LEVEL, seed: int = 0
) -> Difference:
    """Return what two sides differ by.

    With independent seeds a prompt's difference has the variance Var(b) + Var(c) over seeds, which is what all pairs of
    different seeds give: the mean over i != j of (c_pj - b_pi - mean)^2 is s_b^2 + s_c^2 less s_d^2 / S, and adding
    that, which comes from centring, makes it unbiased. With equal seeds it has s_d^2. A seed a prompt, drawn at random,
    adds the variance between prompts tau^2, which is that of the prompts' means less s_d^2 / S.

    Args:
        baseline: b, float64 [prompts, seeds], NaN where there is no measure.
        candidate: c, the same.
        coupled: whether equal seeds mean equal noise; without, nothing is said about independent seeds.
        level: of intervals.
        seed: of the bootstrap.
    """
    both = np.isfinite(baseline) & np.isfinite(candidate)
    used = both.any(axis=1)
    b, c, seen = (each[used] for each in (baseline, candidate, both))
    count = seen.sum(axis=1)
    if not used.any():
        return Difference(
            float("nan"), float("nan"), NO_INTERVAL, NO_INTERVAL, NO_INTERVAL, NO_INTERVAL, texts=0, prompts=0
        )
    means = _over_seeds(c - b, seen)
    found = bootstrap(_mean(means), len(means), level=level, seed=seed)
    repeated = count > 1
    independent = reduction = noise_reduction = NO_INTERVAL
    if coupled and repeated.sum() > 1:
        several = seen[repeated]
        of_d, of_b, of_c = (_variance(each[repeated], several) for each in (c - b, b, c))
        apart, seeds, center = of_b + of_c, count[repeated], means[repeated]

        def total(weights: Floats) -> Floats:
            between = _spread(weights, center) - _average(weights, of_d / seeds)
            return _ratio(between + _average(weights, apart), between + _average(weights, of_d))

        def of_noise(weights: Floats) -> Floats:
            return _ratio(_average(weights, apart), _average(weights, of_d))

        reduction = bootstrap(total, len(center), level=level, seed=seed)
        noise_reduction = bootstrap(of_noise, len(center), level=level, seed=seed)
        between = float(_spread(np.ones((1, len(center))), center)[0])
        added = float(((apart - of_d) / seeds).mean())
        if between > 0 and between + added > 0:
            stretch = (1 + added / between) ** 0.5
            value, low, high = found
            independent = Interval(value, value - (value - low) * stretch, value + (high - value) * stretch)
    return Difference(
        float(_over_seeds(b, seen).mean()),
        float(_over_seeds(c, seen).mean()),
        found,
        independent,
        reduction,
        noise_reduction,
        int(seen.sum()),
        len(means),
    )


def mean(values: Floats, *, level: float = LEVEL, seed: int = 0) -> Interval:
    """Return the mean over prompts of the mean over seeds, with its interval; values [prompts, seeds], NaN for none."""
    seen = np.isfinite(values)
    used = seen.any(axis=1)
    means = _over_seeds(values[used], seen[used])
    return bootstrap(_mean(means), len(means), level=level, seed=seed)


def first_divergence(baseline: Sequence[object], candidate: Sequence[object], ended_by_length: bool) -> Divergence:
    """Return where two sequences part.

    Args:
        baseline: tokens.
        candidate: tokens.
        ended_by_length: whether the shorter one, if it is how the other begins, was cut off by a limit, so that nobody
            knows how it would have gone on; else it ended there by itself, and the two part.
    """
    shorter = min(len(baseline), len(candidate))
    for at in range(shorter):
        if baseline[at] != candidate[at]:
            return Divergence(at, True)
    return Divergence(shorter, len(baseline) != len(candidate) and not ended_by_length)


def agreement(pairs: Sequence[Sequence[Divergence]], *, level: float = LEVEL, seed: int = 0) -> Agreement:
    """Return how long texts stay together: agreement per token, and the share of pairs that have not parted.

    The curve is that of Kaplan and Meier (1958), since a pair that ends without parting says nothing about later
    positions; its interval, at each position for itself, is that of the bootstrap.

    Args:
        pairs: divergences of each prompt's pairs.
        level: of intervals.
        seed: of the bootstrap.
    """
    pairs = [each for each in pairs if each]
    longest = max((pair.equal + pair.parted for each in pairs for pair in each), default=0)
    if not longest:
        return Agreement(0, 0, NO_INTERVAL, None, [])
    risk, parted = np.zeros((len(pairs), longest)), np.zeros((len(pairs), longest))
    for row, each in enumerate(pairs):
        for pair in each:
            risk[row, : pair.equal + pair.parted] += 1
            if pair.parted:
                parted[row, pair.equal] += 1
    tokens, agree = risk.sum(axis=1), (risk - parted).sum(axis=1)
    share = bootstrap(lambda weights: _ratio(weights @ agree, weights @ tokens), len(pairs), level=level, seed=seed)
    together = _survival(np.ones((1, len(pairs))), risk, parted)[0]
    draws = _drawn(lambda weights: _survival(weights, risk, parted), len(pairs), CURVE_ROUNDS, seed)
    low, high = np.quantile(draws, _percentiles(0.5, 0.0, max(len(pairs), 2), level, CURVE_ROUNDS), axis=0)
    halved = np.flatnonzero(together <= 0.5)
    curve = [(at + 1, float(together[at]), float(low[at]), float(high[at])) for at in range(longest)]
    return Agreement(int(tokens.sum()), int(agree.sum()), share, int(halved[0]) + 1 if len(halved) else None, curve)


def _survival(weights: Floats, risk: Floats, parted: Floats) -> Floats:
    """Return Kaplan and Meier's curve [rounds, positions]; where nobody is left it stays as it was."""
    return np.cumprod(1 - (weights @ parted) / np.maximum(weights @ risk, 1), axis=1)


def _drawn(statistic: Statistic, prompts: int, rounds: int, seed: int) -> Floats:
    """Return the statistic of every round, [rounds] or, of a curve, [rounds, positions]."""
    part = rounds if prompts <= MANY else max(rounds * MANY // prompts, 1)
    numbers = range((rounds + part - 1) // part)
    return np.concatenate([statistic(_weights(prompts, part, seed + (number << 32))) for number in numbers])


@lru_cache(4)
def _weights(prompts: int, rounds: int, seed: int) -> Floats:
    """Return how often each prompt is drawn in each round [rounds, prompts]."""
    rng = np.random.default_rng(seed)
    return rng.multinomial(prompts, np.full(prompts, 1 / prompts), size=rounds).astype(np.float64)


def _percentiles(below: float, acceleration: float, prompts: int, level: float, rounds: int) -> Floats:
    """Return which percentiles of the bootstrap's draws bound the interval, as shares.

    Args:
        below: share of draws below the estimate, of which the bias is corrected.
        acceleration: of BCa.
        prompts: n.
        level: of the interval.
        rounds: draws that there are.
    """
    from scipy.special import ndtr, ndtri, stdtrit

    bias = ndtri(min(max(below, 0.5 / rounds), 1 - 0.5 / rounds))
    reach = np.sqrt(prompts / (prompts - 1)) * stdtrit(prompts - 1, [(1 - level) / 2, (1 + level) / 2])
    moved = bias + reach
    shares: Floats = ndtr(bias + moved / np.maximum(1 - acceleration * moved, 0.05))
    return shares


def _mean(values: Floats) -> Statistic:
    return lambda weights: _average(weights, values)


def _average(weights: Floats, values: Floats) -> Floats:
    return (weights @ values) / weights.sum(axis=1)


def _spread(weights: Floats, values: Floats) -> Floats:
    """Return the variance of values between prompts, unbiased for weights of 1."""
    total = weights.sum(axis=1)
    center = _average(weights, values)
    squares = _average(weights, (values - values.mean()) ** 2) - (center - values.mean()) ** 2
    return np.maximum(squares, 0) * total / np.maximum(total - 1, 1)


def _ratio(above: Floats, below: Floats) -> Floats:
    """Return above / below, NaN where that is nothing."""
    return np.divide(above, below, out=np.full_like(above, np.nan), where=below > 0)


def _over_seeds(values: Floats, seen: npt.NDArray[np.bool_]) -> Floats:
    """Return the mean over the seeds that were seen [prompts]."""
    means: Floats = np.where(seen, values, 0.0).sum(axis=1) / np.maximum(seen.sum(axis=1), 1)
    return means


def _variance(values: Floats, seen: npt.NDArray[np.bool_]) -> Floats:
    """Return the unbiased variance over the seeds that were seen [prompts]."""
    centered = np.where(seen, values - _over_seeds(values, seen)[:, None], 0.0)
    variances: Floats = (centered**2).sum(axis=1) / (seen.sum(axis=1) - 1)
    return variances
