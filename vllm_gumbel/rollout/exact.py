"""Exact tests of whether events are more frequent in one arm than in another.

Two counts, k_a of n_a tokens and k_b of n_b, of rare events that do not depend on each other are Poisson. Given their
sum k, k_a is Binomial(k, r n_a / (r n_a + n_b)) if the first arm's rate is r times the second's, whatever the rates are
(Przyborowski and Wilenski 1940), and smaller the less it is. So its upper tail is the p-value of the claim that the
rate is at most r times the other one: no normal approximation, good for 0 and 1 events. For events that are not rare
both counts vary less than Poisson ones do, and the test errs on the safe side.
"""

import math
from collections.abc import Callable

from vllm_gumbel.metrics.exactness import POWER, poisson_tails


def binomial_tail(count: int, trials: int, chance: float) -> float:
    """Return the chance of at least `count` successes.

    Args:
        count: from 0 to `trials`.
        trials: at least 0.
        chance: of a success, in [0, 1].
    """
    if count <= 0:
        return 1.0
    if chance <= 0 or chance >= 1:
        return float(chance >= 1)
    odds = chance / (1 - chance)
    if count > trials * chance:  # the tail that is summed is the one whose terms fall, so that it keeps its digits
        return min(1.0, _sum(count, trials, chance, lambda j: (trials - count - j) / (count + j + 1) * odds))
    return max(0.0, 1 - _sum(count - 1, trials, chance, lambda j: (count - 1 - j) / (trials - count + 2 + j) / odds))


def chance_of_first(first: float, second: float, ratio: float) -> float:
    """Return with which chance an event is the first arm's, of so many tokens each, its rate `ratio` times the other's.

    Raises:
        ValueError: there are no tokens.
    """
    if not (first >= 0 and second >= 0 and first + second > 0 and ratio > 0):
        raise ValueError(f"tokens must be there, and the ratio above 0; got {first}, {second}, {ratio}")
    return ratio * first / (ratio * first + second)


def least_count(threshold: float, tail: Callable[[int], float]) -> int:
    """Return the least count whose tail, which falls with it, is below a threshold."""
    high = 1
    while tail(high) >= threshold:
        high *= 2
    low = high // 2
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if tail(middle) >= threshold else (low, middle)
    return high


def mean_that_shows(count: int) -> float:
    """Return the mean at which a Poisson count reaches `count` with chance `POWER`."""
    low, high = 0.0, float(max(1, count))
    while poisson_tails(count, high)[1] < POWER:
        low, high = high, 2 * high
    while high - low > 1e-6 * high:
        middle = (low + high) / 2
        low, high = (middle, high) if poisson_tails(count, middle)[1] < POWER else (low, middle)
    return high


def rate_that_shows(tokens: float, others: int, other_tokens: float, ratio: float, threshold: float) -> float:
    """Return the smallest rate of events in the first arm that the test finds with chance `POWER`.

    Args:
        tokens: of the first arm, above 0.
        others: events of the second arm.
        other_tokens: its tokens, above 0.
        ratio: that is tolerated.
        threshold: p-value below which the test says so.
    """
    chance = chance_of_first(tokens, other_tokens, ratio)
    return mean_that_shows(least_count(threshold, lambda k: binomial_tail(k, k + others, chance))) / tokens


def _sum(count: int, trials: int, chance: float, ratio: Callable[[int], float]) -> float:
    """Return the chance of `count` successes plus the terms that follow it, each `ratio(j)` times the one before."""
    log_choose = math.lgamma(trials + 1) - math.lgamma(count + 1) - math.lgamma(trials - count + 1)
    term = math.exp(log_choose + count * math.log(chance) + (trials - count) * math.log1p(-chance))
    total, j = 0.0, 0
    while term > total * 1e-17:
        total += term
        term *= ratio(j)
        j += 1
    return total
