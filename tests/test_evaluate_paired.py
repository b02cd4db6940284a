"""Paired statistics: intervals cover what they should, and what equal noise saves is what it must be.

Tests of coverage simulate many comparisons with a known truth. An interval that covers it with a chance of 0.92 or more
passes but with a chance of 1e-6; each says from which coverage downwards it fails as surely.
"""

import numpy as np
import pytest
from scipy import stats

from vllm_gumbel.evaluate import paired
from vllm_gumbel.evaluate.paired import Divergence

FALSE_ALARM = 1e-6
LEAST_COVERAGE = 0.92


def assert_covered(*, hits, claim):
    """Assert that the share of hits is compatible with a coverage of `LEAST_COVERAGE` or more."""
    needed = int(stats.binom.ppf(FALSE_ALARM, len(hits), LEAST_COVERAGE))
    assert sum(hits) >= needed, f"{claim}: {sum(hits)} of {len(hits)} intervals cover the truth, {needed} are needed"
    assert sum(hits) < len(hits), f"{claim}: every interval covers the truth, so they are too wide"


def sides(rng, prompts, seeds, *, correlation, effect=0.3, between=0.0):
    """Return baseline and candidate [prompts, seeds]: normal noise of variance 1 and skewed levels of prompts."""
    level = rng.exponential(2.0, (prompts, 1))
    shift = effect + between * rng.standard_normal((prompts, 1))
    shared, own, other = rng.standard_normal((3, prompts, seeds))
    noise = [correlation**0.5 * shared + (1 - correlation) ** 0.5 * each for each in (own, other)]
    return level + noise[0], level + shift + noise[1]


def covers(interval, truth):
    return interval.low <= truth <= interval.high


@pytest.mark.parametrize(("prompts", "seeds", "comparisons"), [(8, 2, 8000), (30, 3, 800)])
def test_interval_of_a_difference_covers_it(prompts, seeds, comparisons):
    """A coverage below 0.89 (of 800 comparisons, 0.81) fails with a chance of 1 - 1e-6 too.

    With 8 prompts plain BCa, whose percentiles are the normal law's, covers 0.90 and fails.
    """
    rng = np.random.default_rng(1)
    hits = []
    for _ in range(comparisons):
        baseline, candidate = sides(rng, prompts, seeds, correlation=0.5, between=0.5)
        hits.append(covers(paired.difference(baseline, candidate, coupled=False).difference, 0.3))
    assert_covered(hits=hits, claim=f"difference, {prompts} prompts, {seeds} seeds")


def test_interval_of_a_skewed_share_covers_it():
    """Texts that loop are few: 0 or 1 with 5% and 10%, and 60 prompts."""
    rng = np.random.default_rng(2)
    hits = []
    for _ in range(800):
        luck = rng.random((60, 4))
        found = paired.difference((luck < 0.05).astype(float), (luck < 0.10).astype(float), coupled=True)
        hits.append(covers(found.difference, 0.05))
    assert_covered(hits=hits, claim="difference of shares")


@pytest.mark.parametrize("correlation", [0.0, 0.75])
def test_variance_reduction_of_a_known_law_is_found(correlation):
    """Var(c - b) is 2 with independent seeds and 2 - 2 rho with equal ones; prompts add 0.5 to both."""
    rng = np.random.default_rng(3)
    noise, total = 2 / (2 - 2 * correlation), 2.5 / (2.5 - 2 * correlation)
    hits = {"noise": [], "total": []}
    values = []
    for _ in range(500):
        found = paired.difference(*sides(rng, 40, 4, correlation=correlation, between=0.5**0.5), coupled=True)
        hits["noise"].append(covers(found.noise_reduction, noise))
        hits["total"].append(covers(found.reduction, total))
        values.append((found.noise_reduction.value, found.reduction.value))
    for name, each in hits.items():
        assert_covered(hits=each, claim=f"variance reduction, {name}")
    # The medians of 500 estimates: 4 sigma are 3% of them, so an estimate that is 6% off is caught.
    assert np.median(values, axis=0) == pytest.approx([noise, total], rel=0.04)


def test_independent_interval_is_as_wide_as_that_of_a_comparison_with_independent_seeds():
    """Mean widths over 200 comparisons each, whose ratio has a standard error of about 1%."""
    rng = np.random.default_rng(4)
    foretold, seen, coupled = [], [], []
    for _ in range(200):
        with_noise = paired.difference(*sides(rng, 40, 4, correlation=0.9, between=0.2), coupled=True)
        apart = paired.difference(*sides(rng, 40, 4, correlation=0.0, between=0.2), coupled=False)
        foretold.append(with_noise.independent.high - with_noise.independent.low)
        coupled.append(with_noise.difference.high - with_noise.difference.low)
        seen.append(apart.difference.high - apart.difference.low)
    assert np.mean(foretold) == pytest.approx(np.mean(seen), rel=0.05)
    assert np.mean(coupled) < 0.6 * np.mean(seen)
    assert np.isnan(apart.independent.low)
    assert np.isnan(apart.reduction.value)


def test_variance_with_independent_seeds_is_that_of_all_pairs_of_different_seeds():
    rng = np.random.default_rng(5)
    b, c = sides(rng, 1, 5, correlation=0.6)
    pairs = [(c[0, j] - b[0, i]) for i in range(5) for j in range(5) if i != j]
    center = (c - b).mean()
    of_pairs = np.mean([(pair - center) ** 2 for pair in pairs])
    expected = b.var(ddof=1) + c.var(ddof=1) - (c - b).var(ddof=1) / 5
    assert of_pairs == pytest.approx(expected)


def test_agreement_and_survival_by_hand():
    pairs = [
        [Divergence(0, True), Divergence(2, True)],
        [Divergence(2, False), Divergence(3, False)],
    ]
    found = paired.agreement(pairs)
    # Positions at risk: 1 + 3 + 2 + 3; at two of them the sides drew different tokens.
    assert (found.tokens, found.agree) == (9, 7)
    assert found.share.value == pytest.approx(7 / 9)
    # Position 1: 1 of 4 parts; 2: none of 3; 3: 1 of the 2 that are left.
    assert [(at, share) for at, share, _, _ in found.curve] == [(1, 0.75), (2, 0.75), (3, 0.375)]
    assert found.median == 3
    assert all(low <= share <= high for _, share, low, high in found.curve)


def test_curve_and_share_cover_the_truth_with_censoring():
    """Pairs part at each token with a chance that their prompt shares, and a third of them ends early."""
    rng = np.random.default_rng(6)
    chances = np.array([0.02, 0.1])
    truth = (0.5 * (1 - chances) ** 10).sum()
    hits, shares = [], []
    for _ in range(400):
        pairs = []
        for _prompt in range(40):
            chance = rng.choice(chances)
            ends = rng.geometric(chance, 3) - 1
            limits = np.where(rng.random(3) < 1 / 3, rng.integers(12, 20, 3), 40)
            pairs.append(
                [Divergence(min(e, m), bool(e < m)) for e, m in zip(ends.tolist(), limits.tolist(), strict=True)]
            )
        found = paired.agreement(pairs)
        _, share, low, high = found.curve[9]
        hits.append(low <= truth <= high)
        shares.append(share)
    assert_covered(hits=hits, claim="survival at token 10")
    # Standard error of the mean of 400 shares: 0.0035; five of them.
    assert np.mean(shares) == pytest.approx(truth, abs=0.018)


@pytest.mark.parametrize(
    ("baseline", "candidate", "cut", "expected"),
    [
        ([1, 2, 3], [1, 2, 3], True, Divergence(3, False)),
        ([1, 2, 3], [1, 2, 3], False, Divergence(3, False)),
        ([1, 2, 3], [1, 9, 3], True, Divergence(1, True)),
        ([1, 2], [1, 2, 3], True, Divergence(2, False)),
        ([1, 2], [1, 2, 3], False, Divergence(2, True)),
        ([], [], False, Divergence(0, False)),
        ([], [4], False, Divergence(0, True)),
        ([5], [4], False, Divergence(0, True)),
    ],
)
def test_first_divergence(baseline, candidate, cut, expected):
    assert paired.first_divergence(baseline, candidate, ended_by_length=cut) == expected


def test_missing_texts_are_left_out_of_both_sides():
    baseline = np.array([[1.0, np.nan], [2.0, 3.0], [np.nan, np.nan], [5.0, 5.0]])
    candidate = np.array([[2.0, 9.0], [2.0, np.nan], [1.0, 1.0], [6.0, 7.0]])
    found = paired.difference(baseline, candidate, coupled=True)
    assert (found.texts, found.prompts) == (4, 3)
    assert found.difference.value == pytest.approx((1 + 0 + 1.5) / 3)
    assert (found.baseline, found.candidate) == (pytest.approx(8 / 3), pytest.approx((2 + 2 + 6.5) / 3))
    assert np.isnan(found.reduction.value), "one prompt with two seeds is too few"


def test_nothing_few_and_equal_texts_have_no_interval_or_a_narrow_one():
    nothing = paired.difference(np.full((2, 2), np.nan), np.ones((2, 2)), coupled=True)
    assert nothing.texts == 0
    assert np.isnan(nothing.difference.value)
    one = paired.difference(np.ones((1, 3)), np.full((1, 3), 2.0), coupled=True)
    assert one.difference.value == 1
    assert np.isnan(one.difference.low)
    same = paired.difference(np.arange(12.0).reshape(4, 3), np.arange(12.0).reshape(4, 3), coupled=True)
    assert same.difference == (0, 0, 0)
    assert np.isnan(same.noise_reduction.value)
    empty = paired.agreement([[], []])
    assert (empty.tokens, empty.curve, empty.median) == (0, [], None)


def test_intervals_are_the_same_again_and_for_very_many_prompts_computed_in_parts():
    rng = np.random.default_rng(7)
    baseline, candidate = sides(rng, 30, 2, correlation=0.5)
    first, second = (paired.difference(baseline, candidate, coupled=True) for _ in range(2))
    assert first == second
    many = rng.standard_normal((3000, 1))
    found = paired.mean(many)
    expected = stats.norm.interval(0.95, many.mean(), many.std() / 3000**0.5)
    assert (found.low, found.high) == pytest.approx(expected, abs=0.003)
