"""The exact tests of frequencies: right tails, at most the stated false alarms, and the smallest rise they name."""

import itertools
import math

import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from scipy import stats

from vllm_gumbel.metrics.exactness import POWER
from vllm_gumbel.rollout.exact import (
    binomial_tail,
    chance_of_first,
    least_count,
    mean_that_shows,
    rate_that_shows,
)


@given(st.data(), st.integers(0, 3000), st.floats(0, 1))
def test_binomial_tail_is_that_of_scipy(data, trials, chance):
    count = data.draw(st.integers(0, trials))
    assert binomial_tail(count, trials, chance) == pytest.approx(stats.binom.sf(count - 1, trials, chance), rel=1e-9)


@pytest.mark.parametrize(
    ("count", "trials", "chance"), [(1000, 200_000, 0.004), (402_000, 1_000_000, 0.4), (12, 30, 1e-9), (5, 5, 1e-12)]
)
def test_binomial_tail_keeps_its_digits_far_out(count, trials, chance):
    assert binomial_tail(count, trials, chance) == pytest.approx(stats.binom.sf(count - 1, trials, chance), rel=1e-6)


def test_binomial_tail_is_the_sum_over_all_outcomes():
    """By brute force: every sequence of 10 trials."""
    chance, trials = 0.3, 10
    for count in range(trials + 1):
        total = math.fsum(
            chance ** sum(each) * (1 - chance) ** (trials - sum(each))
            for each in itertools.product((0, 1), repeat=trials)
            if sum(each) >= count
        )
        assert binomial_tail(count, trials, chance) == pytest.approx(total, rel=1e-12)


@given(st.integers(0, 2000), st.floats(1e-6, 0.9), st.floats(1e-12, 0.1))
@example(0, 0.5, 1e-12)
def test_least_count_is_the_first_that_is_rare_enough(others, chance, threshold):
    found = least_count(threshold, lambda k: binomial_tail(k, k + others, chance))
    assert binomial_tail(found, found + others, chance) < threshold
    assert found == 1 or binomial_tail(found - 1, found - 1 + others, chance) >= threshold


@given(st.integers(1, 5000))
def test_mean_that_shows_reaches_the_count_with_the_power(count):
    assert stats.poisson.sf(count - 1, mean_that_shows(count)) == pytest.approx(POWER, abs=1e-5)


@pytest.mark.parametrize("tokens", [(0.0, 0.0), (-1.0, 5.0), (math.nan, 1.0)])
def test_no_tokens_are_refused(tokens):
    with pytest.raises(ValueError, match="tokens"):
        chance_of_first(*tokens, 1.5)


#: Tokens of both arms, and the rate of both: 1%, 5%, 50% of the requests; rare and not so rare events.
SETTINGS = [(1e4, 99e4, 1e-4), (5e4, 95e4, 1e-3), (5e5, 5e5, 1e-5), (1e3, 1e3, 0.05)]
LEVEL, RUNS = 0.01, 40_000


def rejected(first, second, tokens, others, ratio, level=LEVEL):
    """Return how many of the pairs of counts the test calls worse."""
    pairs, times = np.unique(np.stack([first, second]), axis=1, return_counts=True)
    chance = chance_of_first(tokens, others, ratio)
    return sum(
        int(n) for (k, m), n in zip(pairs.T.tolist(), times, strict=True) if binomial_tail(k, k + m, chance) < level
    )


@pytest.mark.parametrize(("tokens", "others", "rate"), SETTINGS)
def test_arms_at_the_tolerated_ratio_fail_no_more_often_than_stated(tokens, others, rate):
    """40,000 pairs of arms, the first 1.5 times as anomalous, at 1% each.

    The bound is the count that a rate of exactly 1% exceeds with a chance of 1e-6; a true rate of 1.4% would be seen
    with a chance of more than 0.99.
    """
    generator = np.random.default_rng(7)
    first = generator.binomial(int(tokens), 1.5 * rate, RUNS)
    second = generator.binomial(int(others), rate, RUNS)
    limit = stats.binom.isf(1e-6, RUNS, LEVEL)
    assert stats.binom.sf(limit, RUNS, 0.014) > 0.99
    assert rejected(first, second, tokens, others, 1.5) <= limit
    assert rejected(first, second, tokens, others, 0.75) > limit


@pytest.mark.parametrize(("tokens", "others", "rate"), SETTINGS)
def test_rise_that_is_named_is_found(tokens, others, rate):
    """The other arm's count is what it is on average; the share found is 0.99, less 5 sigma at most.

    So is one of a tenth less not always: the figure is no larger than it must be.
    """
    generator, known = np.random.default_rng(8), round(others * rate)
    found = rate_that_shows(tokens, known, others, 1.5, LEVEL)
    chance = chance_of_first(tokens, others, 1.5)
    counts = [generator.poisson(share * found * tokens, RUNS) for share in (1.0, 0.9)]
    hits = [np.mean([binomial_tail(k, k + known, chance) < LEVEL for k in each.tolist()]) for each in counts]
    assert hits[0] >= POWER - 5 * math.sqrt(POWER * (1 - POWER) / RUNS)
    assert hits[1] < POWER
