"""Public failures of samplers' noise, as tests of the noise functions; each docstring names its case.

The races here are evaluated through the noise functions for many rows at once, and a few rows through the draw itself,
which shows that it is the same race.
"""

import numpy as np
import pytest

from tests.statistics import assert_frequency, assert_goodness_of_fit, assert_poisson, assert_uniform, poisson_interval
from vllm_gumbel.kernels import noise_reference as noise
from vllm_gumbel.kernels import sample_reference
from vllm_gumbel.kernels.contract import RowParams, Stream

#: The smallest E of a token whose upper 16 bits are not all 0.
FINE_END = 2.0**-16


def words_of_rows(seed, position, tokens, stream=Stream.TARGET, salt=0):
    """Return words [rows, tokens] of rows given by arrays of seeds and positions."""
    k0, k1, k2 = noise.row_keys(seed, position, stream, salt)
    upper = noise.upper_words(k0[:, None], k1[:, None], tokens[None])
    return upper.astype(np.uint64) << np.uint64(48) | noise.lower_words(k2[:, None], tokens[None])


def tail_words(*, seed, draws, tails):
    """Return E of token 0 [draws], and (row, word) of every token 1..tails whose upper 16 bits are 0.

    A tail at a gap of 16 nats or more can only win with E < E_0 exp(-16). That is below `FINE_END`, so all others lose.
    """
    tokens = np.arange(1, tails + 1, dtype=np.int32)
    k0, k1, k2 = noise.row_keys(seed, np.arange(draws))
    rows, words = [], []
    chunk = max(1, 2**18 // tails)
    for start in range(0, draws, chunk):
        these = slice(start, start + chunk)
        row, column = np.nonzero(noise.upper_words(k0[these, None], k1[these, None], tokens[None]) == 0)
        rows.append(row + start)
        words.append(noise.lower_words(k2[row + start], tokens[column]))
    heads = noise.exponential(words_of_rows(seed, np.arange(draws), np.zeros(1, np.int64))[:, 0])
    assert heads.max() * np.exp(-16) < FINE_END
    return heads, np.concatenate(rows), np.concatenate(words)


def rows_won_by_the_tail(heads, rows, exponentials, gap):
    """Return the rows in which a token `gap` nats below token 0 wins."""
    return np.unique(rows[exponentials < heads[rows] * np.exp(-gap)])


@pytest.fixture(scope="module")
def cheap_form():
    """One logit 0 and 65,536 tails, 10,000 draws."""
    return tail_words(seed=43150, draws=10_000, tails=65_536)


@pytest.mark.parametrize("gap", [16, 17, 18, 20])
def test_tail_is_hit_as_often_as_its_mass_says(cheap_form, gap):
    """vllm#43150, cheap form: 73.2, 27, 9.9 and 1.3 hits in 10,000 draws.

    False alarm 1e-6 each. Caught with power 0.99: at gap 16 a tail mass below 0.31 or above 2.0 of the right one, at 17
    below 0.066 or above 2.8, at 18 above 4.4, at 20 above 15.
    """
    heads, rows, words = cheap_form
    mass = 65_536 * np.exp(-gap)
    hits = len(rows_won_by_the_tail(heads, rows, noise.exponential(words), gap))
    assert_poisson(count=hits, mean=10_000 * mass / (1 + mass), claim=f"hits of a tail at gap {gap}")


def test_draw_agrees_with_the_cheap_form(cheap_form):
    """vllm#43150: the rows that the tail wins, and as many others, give the same winners through `draw`."""
    heads, rows, words = cheap_form
    won = rows_won_by_the_tail(heads, rows, noise.exponential(words), 16)
    logits = np.full((1, 65_537), -16, np.float32)
    logits[0, 0] = 0
    for row in [*won[:8], *(won[:8] + 1)]:
        token = sample_reference.draw(logits, RowParams.uniform(1, seed=43150, position=int(row))).tokens[0]
        assert (token > 0) == (row in won)


@pytest.mark.long
@pytest.mark.timeout(7200)
def test_tail_of_262144_tokens_is_hit_as_often_as_its_mass_says():
    """vllm#43150, full form: 262,144 tails at gap 20.5, 100,000 draws, 32.8 hits. Some minutes.

    False alarm 1e-6. Caught with power 0.99: a tail mass below 0.11 or above 2.6 of the right one.
    """
    heads, rows, words = tail_words(seed=43151, draws=100_000, tails=262_144)
    mass = 262_144 * np.exp(-20.5)
    hits = len(rows_won_by_the_tail(heads, rows, noise.exponential(words), 20.5))
    assert_poisson(count=hits, mean=100_000 * mass / (1 + mass), claim="hits of the tail")


def test_only_the_form_with_its_fine_end_at_the_winner_is_exact_in_the_tail(cheap_form):
    """vllm#45996, #34854, #37798, #41775: the same words through -ln(-ln u), u = 1 - v in float32, break #43150.

    u rounds to 1 for the 19.5 smallest words in expectation. With E = 0 there, gap 20 is hit about 19.5 times instead
    of 1.3; with u kept below 1 instead, no E at all falls below 2^-25. False alarm 1e-6 for the library's form. Caught
    with power 0.99: a density of E below 2^-25 under 0.008 or above 3.2 of the right one.
    """
    heads, rows, words = cheap_form
    v = (words.astype(np.float64) + 0.5) * 2.0**-64
    mean_tail = 10_000 * 65_536 * np.exp(-20)
    mean_fine = 10_000 * 65_536 * 2.0**-25

    fine = noise.exponential(words)
    assert_poisson(count=int((fine < 2.0**-25).sum()), mean=mean_fine, claim="words with E below 2^-25")

    u = (1 - v).astype(np.float32)
    rounded = -np.log(u)
    hits = len(rows_won_by_the_tail(heads, rows, rounded, 20))
    assert hits > poisson_interval(mean=mean_tail)[1], "the rounded form should have been refused"
    below_one = -np.log(np.minimum(u, np.float32(1 - 2.0**-24)))
    assert (below_one < 2.0**-25).sum() < poisson_interval(mean=mean_fine)[0], "so should the clipped one"


@pytest.fixture(scope="module")
def small_words():
    """Words of upper half 0 among 2^26: 64 rows of 2^20 ids."""
    return tail_words(seed=47524, draws=64, tails=2**20)[2]


def test_tail_of_the_noise_reaches_as_far_as_its_law(small_words):
    """vllm#47524 over 2^26 words: the largest G minus ln(2^26) is a standard Gumbel variate.

    False alarm 1e-6: accepted from -2.67 to 14.5. Caught: noise that ends below 15.3, or passes 32.5.
    """
    largest = -np.log(noise.exponential(small_words).min()) - 26 * np.log(2)
    assert -np.log(-np.log(5e-7)) < largest < -np.log(-np.log1p(-5e-7))


def test_tail_of_the_noise_has_no_coarse_steps(small_words):
    """vllm#47524: 1,024 words in expectation have G above 11.09; their E are distinct and uniform below 2^-16.

    False alarm 1e-6 for the count and for the uniformity. Caught with power 0.99: a mass below 0.79 or above 1.24 of
    the right one, a root mean square relative error of 0.36 over 64 bins; 24-bit noise has at most 257 values there.
    """
    e = noise.exponential(small_words)
    assert_poisson(count=len(e), mean=1024, claim="words below 2^-16")
    assert len(np.unique(e)) == len(e)
    assert_uniform(values=e / -np.log1p(-FINE_END), bins=64, claim="E below 2^-16")


def test_second_winner_is_independent_of_the_first():
    """vllm#59786: V = 257, equal logits, 60,000 seeds; mask the winner and draw again with the same seed.

    (second - first) mod V is uniform over 1..256: |z| within about 5 (a sliding table of noise gives 20,000). False
    alarm 1e-6. Caught with power 0.99: a root mean square relative error of 0.060, a total variation of 0.030.
    """
    vocabulary, tokens = 257, np.arange(257)
    words = np.concatenate([words_of_rows(np.arange(s, s + 4000), 0, tokens) for s in range(0, 60_000, 4000)])
    every = np.arange(len(words))
    first = words.argmin(1)
    without = words.copy()
    without[every, first] = 2**64 - 1
    second = without.argmin(1)
    counts = np.bincount((second - first) % vocabulary, minlength=vocabulary)[1:]
    assert_goodness_of_fit(
        observed=counts, probabilities=np.ones(256), two_sided=True, claim="second minus first winner"
    )
    assert_goodness_of_fit(
        observed=np.bincount(first, minlength=vocabulary), probabilities=np.ones(vocabulary), claim="first winner"
    )
    rows = 100  # the same two winners through the draw
    params = RowParams.uniform(rows)
    params.seed[:] = np.arange(rows)
    logits = np.zeros((rows, vocabulary), np.float32)
    assert (sample_reference.draw(logits, params).tokens == first[:rows]).all()
    logits[np.arange(rows), first[:rows]] = -np.inf
    assert (sample_reference.draw(logits, params).tokens == second[:rows]).all()


def undo_xorshift(x, shift):
    """Return y with y ^ (y >> shift) = x, for 32-bit words and shift of at least 11."""
    return x ^ (x >> np.uint32(shift)) ^ (x >> np.uint32(2 * shift) if 2 * shift < 32 else np.uint32(0))


def test_every_id_of_a_large_vocabulary_can_have_the_smallest_upper_word():
    """vllm#59786: for each of 152,064 ids there is a key under which its h16 is 0, computed by running h16 backwards.

    Together with the draw below it shows that no id is out of reach; nothing is random here.
    """
    tokens = np.arange(152_064)
    k1 = np.uint32(0x9ABCDEF1)
    x = np.where(tokens & 1, 0x1234, 0x12340000).astype(np.uint32)  # the id's own half is 0
    x = undo_xorshift(x, 15) * np.uint32(pow(noise.M2, -1, 2**32))
    x = undo_xorshift(x ^ k1, 15) * np.uint32(pow(noise.M1, -1, 2**32))
    x = undo_xorshift(x, 16)
    k0 = x - (tokens >> 1).astype(np.uint32) * np.uint32(noise.PAIR)
    assert (noise.upper_words(k0, k1, tokens) == 0).all()


def test_chosen_ids_of_a_large_vocabulary_are_drawn():
    """vllm#59786: 48 ids, the ends and powers of two among them, each win a real race of 152,064 equal logits.

    Of 2^20 seeds the ones with the id's smallest words are tried; each wins with probability about 0.87, and an id is
    given 12 of them: false alarm below 48 * 0.2^12 = 2e-7. Catches an id that never wins.
    """
    vocabulary, seeds = 152_064, 2**20
    rng = np.random.default_rng(59786)
    chosen = [0, 1, 2, 32_767, 32_768, 65_535, 65_536, 131_071, 131_072, vocabulary - 2, vocabulary - 1]
    chosen += rng.integers(vocabulary, size=48 - len(chosen)).tolist()
    k0, k1, k2 = noise.row_keys(np.arange(seeds), 0)
    logits = np.zeros((1, vocabulary), np.float32)
    for token in chosen:
        upper = noise.upper_words(k0, k1, np.array([token]))
        candidates = np.flatnonzero(upper == 0)
        best = candidates[np.argsort(noise.lower_words(k2[candidates], np.array([token])))][:12]
        assert any(
            sample_reference.draw(logits, RowParams.uniform(1, seed=int(seed))).tokens[0] == token for seed in best
        ), token


def test_winners_of_a_large_vocabulary_are_spread_evenly():
    """vllm#59786: the winner among 152,064 equal logits falls in each sixteenth of the ids equally often, 1,320 seeds.

    False alarm 1e-6. Caught with power 0.99: a root mean square relative error of 0.256; a dead sixteenth is 0.258.
    """
    tokens = np.arange(152_064, dtype=np.int32)
    winners = []
    for seed in range(1320):
        k0, k1, k2 = noise.row_keys(seed, 17)
        upper = noise.upper_words(k0, k1, tokens)
        smallest = np.flatnonzero(upper == upper.min())
        winners.append(smallest[noise.lower_words(k2, smallest).argmin()])
    counts = np.bincount(np.array(winners) * 16 // len(tokens), minlength=16)
    assert_goodness_of_fit(observed=counts, probabilities=np.ones(16), claim="sixteenth of the winner")


@pytest.mark.parametrize("layout", ["random", "grid"])
def test_four_million_rows_share_no_key(layout):
    """Hash collisions: among 4 million (seed, position) no two have the same key; a 32-bit state repeats 1,860 times.

    False alarm 4.3e-7 (n^2 / 2^65). Each 32-bit part repeats as often as the birthday law says, 1,862.6 pairs: false
    alarm 1e-6 each. Caught with power 0.99: 1.17 times as many, a part of 31.8 bits; or 0.84 times, a counter.
    """
    rng = np.random.default_rng(4)
    if layout == "random":
        seed, position = rng.integers(0, 2**64, 4_000_000, dtype=np.uint64), rng.integers(0, 2**20, 4_000_000)
    else:
        seed, position = (a.ravel() for a in np.meshgrid(np.arange(2000), np.arange(2000)))
    k0, k1, k2 = noise.row_keys(seed, position)
    pair = k0.astype(np.uint64) << np.uint64(32) | k1
    for name, key in (("k0 and k1", pair), ("k2", k2)):
        assert np.diff(np.sort(key)).all(), name
    halves = {"k0": k0, "k1": k1, "k2 low": k2.astype(np.uint32), "k2 high": (k2 >> np.uint64(32)).astype(np.uint32)}
    for name, part in halves.items():
        ends = np.flatnonzero(np.diff(np.sort(part)))  # runs of equal words end here
        repeats = np.diff(ends, prepend=-1, append=len(part) - 1)
        pairs = int((repeats * (repeats - 1) // 2).sum())
        assert_poisson(count=pairs, mean=len(part) * (len(part) - 1) / 2**33, claim=f"equal pairs of {name}")


def test_tokens_over_positions_are_not_constant():
    """vllm-metal#50: equal logits, one seed, 1,000 positions: 8 ids are drawn equally often.

    False alarm 1e-6. Caught with power 0.99: a root mean square relative error of 0.27, a total variation of 0.14.
    """
    params = RowParams.uniform(1000, seed=50)
    params.position[:] = np.arange(1000)
    tokens = sample_reference.draw(np.zeros((1000, 8), np.float32), params).tokens
    assert_goodness_of_fit(observed=np.bincount(tokens, minlength=8), probabilities=np.ones(8), claim="tokens")


def verified_tokens(*, draft_stream, trials=131_072):
    """Return tokens sent by draft, acceptance and recovery, all three at the same (seed, position).

    Rejection sampling (Leviathan et al. 2023, algorithm 1): a draft from q is accepted with probability min(1, p / q),
    else the token is drawn from max(p - q, 0), with noise of the target's stream.
    """
    tokens, positions = np.arange(3), np.arange(trials)
    uniform = words_of_rows(54282, positions, np.zeros(1, np.int64), Stream.INVERSE_CDF)[:, 0] * 2.0**-64
    residual = np.maximum(TARGET_LAW - DRAFT_LAW, 0)
    draft = (noise.exponential(words_of_rows(54282, positions, tokens, draft_stream)) / DRAFT_LAW).argmin(1)
    with np.errstate(divide="ignore"):
        recovered = (noise.exponential(words_of_rows(54282, positions, tokens)) / residual).argmin(1)
    return np.where(uniform < TARGET_LAW[draft] / DRAFT_LAW[draft], draft, recovered)


TARGET_LAW = np.array([0.60, 0.30, 0.10])
DRAFT_LAW = np.array([0.30, 0.23, 0.47])


def test_draft_stream_keeps_the_law_of_what_is_sent():
    """vllm#54282, #47386: an intended 60.0% stays 60.0% over 131,072 trials; sharing the target's stream shifts it.

    False alarm 1e-6. Caught with power 0.99: a shift of 1.0 percentage points.
    """
    sent = verified_tokens(draft_stream=Stream.DRAFT)
    assert_frequency(count=int((sent == 0).sum()), trials=len(sent), probability=0.6, claim="share of token 0")
    assert_goodness_of_fit(observed=np.bincount(sent, minlength=3), probabilities=TARGET_LAW, claim="tokens sent")
    shared = (verified_tokens(draft_stream=Stream.TARGET) == 0).mean()
    assert shared > 0.62, f"a shared stream should have shown its bias, gave {shared:.4f}"
