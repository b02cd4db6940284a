"""The words of the noise are uniform along every axis, and words that differ in one input are independent.

A small part of what `scripts/noise_battery.py` does, with the inputs that a server really uses next to each other.
"""

import numpy as np
import pytest
from scipy import stats

from tests.statistics import FALSE_ALARM, assert_goodness_of_fit, assert_uniform
from vllm_gumbel.kernels import noise_reference as noise
from vllm_gumbel.kernels.contract import Stream

SIDE = 1024  # pairs of words per test: SIDE^2


def words(seed, position, tokens, stream=0, salt=0):
    """Return the words of arguments broadcast against each other."""
    k0, k1, k2 = noise.row_keys(seed, position, stream, salt)
    upper = noise.upper_words(k0, k1, np.asarray(tokens)).astype(np.uint64)
    return upper << np.uint64(48) | noise.lower_words(k2, np.asarray(tokens))


def neighbours(what):
    """Return two arrays of words, SIDE^2 or so each, whose arguments differ as `what` says."""
    down, tokens = np.arange(SIDE)[:, None], np.arange(SIDE)
    if what == "seeds":
        return words(down, 5, tokens), words(down + 1, 5, tokens)
    if what == "positions":
        return words(5, down, tokens), words(5, down + 1, tokens)
    if what == "salts":
        return words(5, 6, tokens, 0, down), words(5, 6, tokens, 0, down + 1)
    if what == "seed and position exchanged":
        return words(down + 1000, down, tokens), words(down, down + 1000, tokens)
    if what == "seed up, position down":
        return words(down, down + 7, tokens), words(down + 1, down + 6, tokens)
    if what == "next seed, next token":
        return words(down, 8, tokens), words(down + 1, 8, tokens + 1)
    if what == "next position, next pair of tokens":
        return words(9, down, tokens), words(9, down + 1, tokens + 2)
    step = {"two halves of a pair": 1, "end and start of pairs": 1, "same half of the next pair": 2}[what]
    first = np.arange(what == "end and start of pairs", 2 * SIDE, 2)
    return words(down, 10, first), words(down, 10, first + step)


PAIRS = [
    "seeds",
    "positions",
    "salts",
    "seed and position exchanged",
    "seed up, position down",
    "next seed, next token",
    "next position, next pair of tokens",
    "two halves of a pair",
    "end and start of pairs",
    "same half of the next pair",
]


def assert_independent(a, b, claim):
    """Assert that the joint law of 4 bits of each is flat, for the top bits of both halves of the words."""
    for name, shift_a, shift_b in (
        ("h16", 60, 60),
        ("r48", 44, 44),
        ("h16 and r48", 60, 44),
        ("low bits of h16", 48, 48),
    ):
        cells = (a >> np.uint64(shift_a) & np.uint64(15)) * np.uint64(16) + (b >> np.uint64(shift_b) & np.uint64(15))
        counts = np.bincount(cells.ravel().astype(np.int64), minlength=256)
        assert_goodness_of_fit(observed=counts, probabilities=np.ones(256), two_sided=True, claim=f"{claim}, {name}")


@pytest.mark.parametrize("what", PAIRS)
def test_neighbouring_words_are_independent(what):
    """Four 16 by 16 tables of 4 bits each for pairs of words whose arguments are neighbours.

    False alarm 1e-6 a table. Caught with power 0.99: a root mean square relative error of 0.0145 in its cells.
    """
    assert_independent(*neighbours(what), what)


@pytest.mark.parametrize("first", list(Stream))
@pytest.mark.parametrize("second", list(Stream))
def test_streams_are_disjoint(first, second):
    """vllm#54282: words of two streams for equal (seed, position, token) are independent, whichever is first.

    False alarm 1e-6 a table. Caught with power 0.99: a root mean square relative error of 0.0145 in its cells.
    """
    down, tokens = np.arange(SIDE)[:, None], np.arange(SIDE)
    a, b = words(down, 11, tokens, first), words(down, 11, tokens, second)
    if first == second:
        assert (a == b).all()
    else:
        assert_independent(a, b, f"{first.name} and {second.name}")
        assert not (a == b).any()


@pytest.mark.parametrize("axis", ["token", "position", "seed", "salt"])
def test_words_are_uniform_along(axis):
    """h16 over all 65,536 values, the upper 16 bits of r48 likewise, and exp(-E) over 1,024 bins, of 2^21 words.

    False alarm 1e-6 each. Caught with power 0.99: a root mean square relative error of 0.036 over 65,536 cells, of
    0.0137 over 1,024.
    """
    run = np.arange(2**21)
    w = {
        "token": lambda: words(12, 13, run),
        "position": lambda: words(12, run, np.int64(14)),
        "seed": lambda: words(run, 13, np.int64(14)),
        "salt": lambda: words(12, 13, np.int64(14), 0, run),
    }[axis]()
    for name, shift in (("h16", 48), ("r48", 32)):
        counts = np.bincount((w >> np.uint64(shift) & np.uint64(0xFFFF)).astype(np.int64), minlength=65_536)
        # 2^21 ids of one row are a part of a permutation of the 32-bit words: evener than chance is right for them
        assert_goodness_of_fit(observed=counts, probabilities=np.ones(65_536), claim=f"{name} along {axis}")
    assert_uniform(values=np.exp(-noise.exponential(w)), bins=1024, claim=f"exp(-E) along {axis}")


AVALANCHE_BITS = {"seed": 64, "position": 63, "salt": 64, "token": 18, "stream": 2}


@pytest.mark.parametrize("flipped", list(AVALANCHE_BITS))
def test_every_input_bit_flips_every_output_bit_half_of_the_time(flipped):
    """Avalanche over 20,000 random arguments and each of 64 output bits.

    The limit is the binomial one with 1e-6 divided by the 13,504 pairs of bits. Caught with power 0.99: a pair of bits
    that flips with probability outside 0.4687 to 0.5313.
    """
    samples = 20_000
    rng = np.random.default_rng(6)
    arguments = {
        "seed": rng.integers(0, 2**64, samples, dtype=np.uint64),
        "position": rng.integers(0, 2**20, samples, dtype=np.uint64),
        "token": rng.integers(0, 2**18, samples, dtype=np.uint64),
        "stream": rng.integers(0, 4, samples, dtype=np.uint64),
        "salt": rng.integers(0, 2**64, samples, dtype=np.uint64),
    }
    names = ("seed", "position", "token", "stream", "salt")
    before = words(*(arguments[n] if n != "token" else arguments[n].astype(np.int64) for n in names))
    rate = FALSE_ALARM / (64 * sum(AVALANCHE_BITS.values()))
    highest = int(stats.binom.isf(rate / 2, samples, 0.5))
    for bit in range(AVALANCHE_BITS[flipped]):
        changed = arguments | {flipped: arguments[flipped] ^ np.uint64(1 << bit)}
        after = words(*(changed[n] if n != "token" else changed[n].astype(np.int64) for n in names))
        flips = np.unpackbits((before ^ after).view(np.uint8).reshape(samples, 8), axis=1, bitorder="little").sum(0)
        worst = int(np.abs(flips.astype(np.int64) - samples // 2).argmax())
        assert samples - highest <= flips[worst] <= highest, (
            f"{flipped} bit {bit} flips output bit {worst} in {flips[worst]} of {samples}, limit {highest}"
        )
