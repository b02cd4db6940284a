"""The mathematics behind the keys: laws by chi-square, loops by their definition, and a published form that cancels."""

import math
import random

import numpy as np
import pytest
from scipy import stats

from tests import naive, naive_keys
from tests.rows import INFINITY, NAN
from tests.statistics import assert_goodness_of_fit, assert_uniform, smallest_relative_error
from vllm_gumbel.kernels import keyed_draws, loops, noise_reference, tail_noise
from vllm_gumbel.kernels.sample_reference import clean, kept, race, scale


def row_of(vocabulary, seed=0, spread=2.0):
    """Return a row of logits."""
    return (np.random.default_rng(seed).standard_normal(vocabulary) * spread).astype(np.float32)


def filtered(x, **filters):
    """Return a tempered row with -inf where the filters keep nothing."""
    keep = kept(x, filters.get("top_k", 0), filters.get("top_p", 1.0), filters.get("min_p", 0.0))
    return np.where(keep, x, np.float32(-np.inf))


def law(x, sharpness=1.0):
    """Return the probabilities of a filtered row, sharpened by a factor on x."""
    mass = np.exp((x.astype(np.float64) - x.max()) * sharpness)
    return mass / mass.sum()


def counts(tokens, vocabulary):
    return np.bincount(tokens, minlength=vocabulary)


@pytest.mark.parametrize("filters", [{}, {"top_k": 12}, {"top_p": 0.9}, {"min_p": 0.05, "top_k": 30}])
@pytest.mark.parametrize("sharpness", [1.0, 2.0])
def test_inverse_cdf_draws_from_the_filtered_law(filters, sharpness):
    """20,000 seeds, V = 60; false alarms 2e-7, caught with power 0.99: relative errors above 8 percent."""
    x = filtered(row_of(60), **filters)
    assert smallest_relative_error(cells=60, samples=20_000) < 0.08
    tokens = [keyed_draws.inverse_cdf(x, keyed_draws.uniform(seed, 5, 0), 1 / sharpness) for seed in range(20_000)]
    claim = f"inverse CDF, {filters}, sharpness {sharpness}"
    assert_goodness_of_fit(observed=counts(tokens, 60), probabilities=law(x, sharpness), claim=claim)


@pytest.mark.parametrize("noise_scale", [0.25, 0.5, 0.9, 1.0])
def test_scaled_noise_is_a_temperature_on_what_the_filters_kept(noise_scale):
    """20,000 positions, V = 60; false alarms 2e-7, caught with power 0.99: relative errors above 8 percent."""
    x = filtered(row_of(60, 1), top_p=0.95)
    tokens = [keyed_draws.scaled_race(x, 9, position, 0, noise_scale) for position in range(20_000)]
    claim = f"noise times {noise_scale}"
    assert_goodness_of_fit(observed=counts(tokens, 60), probabilities=law(x, 1 / noise_scale), claim=claim)


def test_scale_one_is_the_race_and_scale_zero_the_best():
    for seed in range(300):
        x = filtered(np.round(row_of(50, seed)), top_k=20)
        assert keyed_draws.scaled_race(x, seed, 3, 7, 1.0) == race(x, x > -np.inf, (seed, 3, 0, 7))
        assert keyed_draws.scaled_race(x, seed, 3, 7, 0.0) == keyed_draws.inverse_cdf(x, 0.5, 0.0) == np.argmax(x)


def test_scales_of_one_seed_are_coupled():
    """Once a seed gives the best id at some scale, it gives it at every smaller one: the score of another id falls."""
    scales = np.linspace(0, 1, 21)
    x, changes, switches = row_of(50), 0, set()
    for seed in range(200):
        is_best = [keyed_draws.scaled_race(x, seed, 0, 0, each) == np.argmax(x) for each in scales]
        assert is_best == sorted(is_best, reverse=True)
        changes += not is_best[-1]
        switches.add(sum(is_best))
    assert changes > 50, "the case is only one if other ids win too"
    assert len(switches) > 10, "and if they do from many scales on"


def test_inverse_cdf_does_not_predict_the_race():
    """Tokens of the two draws at one seed and position are independent: 20,000 pairs over 6 x 6 cells.

    False alarms 2e-7; a shared stream would put most pairs into few cells.
    """
    x = row_of(6, 3, spread=0.7)
    both = np.zeros((6, 6), np.int64)
    for seed in range(20_000):
        first = keyed_draws.inverse_cdf(x, keyed_draws.uniform(seed, 1, 0))
        both[first, race(x, x > -np.inf, (seed, 1, 0, 0))] += 1
    assert_goodness_of_fit(observed=both.ravel(), probabilities=np.outer(law(x), law(x)).ravel(), claim="independence")


def test_uniform_is_uniform_along_seed_position_and_salt():
    """3 x 20,000 numbers in 100 bins, false alarms 1e-6 each."""
    assert_uniform(values=[keyed_draws.uniform(i, 0, 0) for i in range(20_000)], bins=100, claim="seed")
    assert_uniform(values=[keyed_draws.uniform(1, i, 0) for i in range(20_000)], bins=100, claim="position")
    assert_uniform(values=[keyed_draws.uniform(1, 0, i) for i in range(20_000)], bins=100, claim="salt")


@pytest.mark.parametrize(
    ("u", "token"),
    [(0.0, 1), (0.25 - 1e-6, 1), (0.25 + 1e-6, 3), (0.75 - 1e-6, 3), (0.75 + 1e-6, 4), (1 - 2**-53, 4), (1.0, 4)],
)
def test_ends_of_the_unit_interval_belong_to_kept_ids(u, token):
    """Masses 1/4, 1/2, 1/4 at ids 1, 3, 4; the last id has none in float64 and is never drawn."""
    x = np.log(
        np.array([0, 0.25, 0, 0.5, 0.25, 0, 1e-45], np.float32),
        where=[0, 1, 0, 1, 1, 0, 1],
        out=np.full(7, -np.inf, np.float32),
    )
    x[6] = -800
    assert keyed_draws.inverse_cdf(x, u) == token


def test_plus_infinity_wins_in_every_draw_lowest_id_first():
    x = np.array([0, INFINITY, 5, INFINITY], np.float32)
    x = filtered(x)
    assert keyed_draws.inverse_cdf(x, 0.99) == keyed_draws.scaled_race(x, 0, 0, 0, 0.5) == 1


def test_lone_id_is_drawn_whatever_the_number():
    x = np.full(9, -np.inf, np.float32)
    x[7] = -30
    assert {keyed_draws.inverse_cdf(x, u) for u in (0.0, 0.5, 1.0)} == {keyed_draws.scaled_race(x, 0, 0, 0, 0.5)} == {7}


def test_adding_one_number_to_the_noise_of_a_row_changes_no_token():
    """The published offset against repetition, 0.1 * position on the whole row's noise, does nothing at all."""
    for position in range(2_000):
        x = row_of(40, position)
        score = x.astype(np.float64) + noise_reference.gumbel(7, position, np.arange(40))
        assert np.argmax(score + 0.1 * position) == np.argmax(score) == race(x, x > -np.inf, (7, position, 0, 0))


@pytest.mark.parametrize(
    ("tokens", "found"),
    [
        ([], {}),
        ([5, 5], {}),
        ([5, 5, 5], {5: 3}),
        ([1, 5, 5, 5, 5], {5: 4}),
        ([5, 5, 5, 1], {}),
        ([1, 2, 1, 2, 1, 2], {1: 3}),
        ([2, 1, 2, 1, 2, 1, 2], {1: 3}),
        ([1, 2] * 10, {1: 10}),
        ([1, 2, 1, 2, 1], {}),
        ([8, 7, 7, 7] * 3, {7: 3, 8: 3}),
        (list(range(64)) * 3, {0: 3}),
        (list(range(65)) * 3, {}),
        (list(range(64)) * 3 + [0], {1: 3}),
        ([4, 4, 4, -1], {}),
        ([-1, -1, -1], {}),
        ([-1, 4, 4, 4], {4: 3}),
    ],
)
def test_loops_are_found_with_their_copies(tokens, found):
    assert loops.continuations(tokens) == found


def test_loops_are_those_of_the_plain_definition():
    """2,000 texts over few tokens, half of them ending in repeated pieces."""
    generator = random.Random(4)
    looping = 0
    for _ in range(2_000):
        tokens = generator.choices(range(3), k=generator.randint(0, 40))
        piece = generator.choices(range(3), k=generator.randint(1, 9))
        tokens += piece * generator.randint(0, 5) + piece[: generator.randint(0, len(piece))]
        assert loops.continuations(tokens) == naive_keys.loops(tokens)
        looping += bool(loops.continuations(tokens))
    assert 500 < looping < 1_900


def test_only_the_tokens_that_continue_a_loop_lose_and_by_offset_times_copies():
    x = row_of(10)
    changed = loops.discourage(x, [8, 7, 7, 7] * 4, 1.5)
    lost = {7: 4.5, 8: 6.0}
    assert [float(a - b) for a, b in zip(x, changed, strict=True)] == pytest.approx(
        [lost.get(token, 0) for token in range(10)], abs=1e-6
    )
    assert loops.discourage(x, [1, 2, 3], 1.5) is x


def test_tail_noise_is_normal_and_its_neighbours_are_independent():
    """200,000 values and pairs along tokens and along positions, false alarms 1e-6 each.

    Neighbours 2t and 2t + 1 share two words; their product distribution is tested on a 10 x 10 grid.
    """
    along_tokens = tail_noise.normal(3, 4, 200_000)
    along_positions = np.concatenate([tail_noise.normal(3, position, 2) for position in range(20_000)])
    for name, z in (("tokens", along_tokens), ("positions", along_positions)):
        assert_uniform(values=np.minimum(stats.norm.cdf(z), 1 - 1e-16), bins=200, claim=f"normal along {name}")
        cells = np.floor(stats.norm.cdf(z) * 10).astype(int).clip(0, 9)
        for first, second in ((cells[::2], cells[1::2]), (cells[1:-1:2], cells[2::2])):
            pairs = counts(first * 10 + second, 100)
            assert_goodness_of_fit(observed=pairs, probabilities=np.full(100, 0.01), claim=f"neighbours along {name}")


def test_tail_noise_reaches_far_and_is_finite_at_the_extreme_words():
    assert naive_keys.normal(3, 4, 17, 2) == pytest.approx(tail_noise.normal(3, 4, 18, 2)[17], rel=1e-12)
    assert np.abs(tail_noise.normal(0, 0, 1_000_000)).max() > 4.2
    assert np.isfinite(np.sqrt(2 * noise_reference.exponential(np.array([0, 2**64 - 1], np.uint64)))).all()


@pytest.mark.parametrize("vocabulary", [1, 2, 7, 64])
def test_tail_noise_of_a_token_depends_on_nothing_but_its_key(vocabulary):
    whole = tail_noise.normal(1, 2, 64, 3)
    assert np.array_equal(tail_noise.normal(1, 2, vocabulary, 3), whole[:vocabulary])
    assert not np.array_equal(tail_noise.normal(1, 3, 64, 3), whole)
    assert not np.array_equal(tail_noise.normal(1, 2, 64, 4), whole)


def test_boost_adds_noise_of_the_rows_own_spread_and_leaves_what_is_not_finite():
    x = row_of(1_000)
    x[[3, 5]], x[8], x[9] = -np.inf, NAN, INFINITY
    boosted = tail_noise.boost(x, 0.5, 1, 2, 3)
    finite = np.isfinite(x)
    expected = x[finite] + 0.5 * x[finite].astype(np.float64).std() * tail_noise.normal(1, 2, 1_000, 3)[finite]
    assert np.array_equal(boosted[finite], expected.astype(np.float32))
    assert np.array_equal(boosted[~finite], x[~finite], equal_nan=True)
    assert boosted.dtype == np.float32
    nothing = np.full(5, NAN, np.float32)
    assert np.array_equal(tail_noise.boost(nothing, 0.5, 1, 2), nothing, equal_nan=True)
    lone = np.array([-INFINITY, 2.0], np.float32)
    assert tail_noise.boost(lone, 0.5, 1, 2).tolist() == lone.tolist()


def entropy(p):
    return float(-(p[p > 0] * np.log(p[p > 0])).sum())


def test_boost_flattens_where_few_ids_hold_the_mass():
    """The published claim is compensation of the tail. On peaked rows, as a language model's, it raises the entropy.

    The law of the draw is the mean over noise, here over 2,000 positions. Where mass lies on very many ids the factors
    exp(noise) average out and the law hardly moves.
    """
    for seed in range(10):
        x = row_of(60, seed, spread=4.0)
        mean = np.mean([law(tail_noise.boost(x, 0.5, seed, position)) for position in range(2_000)], axis=0)
        assert entropy(mean) > entropy(law(x)) + 0.1
    flat = row_of(20_000, spread=0.5)
    mean = np.mean([law(tail_noise.boost(flat, 0.5, 0, position)) for position in range(100)], axis=0)
    assert 0.5 * np.abs(mean - law(flat)).sum() < 0.02


@pytest.mark.parametrize("temperature", [0.5, 1.0, 1.7])
def test_mass_given_up_is_what_the_best_leave(temperature):
    for seed in range(50):
        x, _ = clean(
            np.where(np.arange(40) % 9 == seed % 9, NAN if seed % 2 else -INFINITY, row_of(40, seed)).astype("f4")
        )
        mass = np.sort(law(scale(x, np.float32(temperature))))[::-1]
        for n in (1, 5, 39, 40, 10**6):
            expected = mass[n:].sum()
            assert keyed_draws.mass_given_up(x, temperature, n) == pytest.approx(expected, abs=1e-6)
    assert keyed_draws.mass_given_up(np.array([NAN, INFINITY, 0, 1], np.float32), 1.0, 1) == 0
    assert keyed_draws.mass_given_up(np.full(4, NAN, np.float32), 1.0, 1) == 0


def test_naive_tail_noise_is_that_of_the_library():
    for token in range(20):
        assert tail_noise.normal(5, 6, 20, 7)[token] == pytest.approx(naive_keys.normal(5, 6, token, 7), rel=1e-12)
    assert math.isclose(keyed_draws.uniform(5, 6, 7), (naive.word(5, 6, 0, 1, 7) + 0.5) / 2**64)
