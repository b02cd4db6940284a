"""The noise of version 1: known answers, the ends of its range, its accuracy, its arguments.

Words are compared as integers before any float. The known answers stand here as literals and are computed a second time
by `naive.py`; they never change within a version. Independence is in `test_noise_independence.py`.
"""

import math
from decimal import Decimal, localcontext

import numpy as np
import pytest

from tests import naive
from vllm_gumbel.kernels import noise_reference as noise
from vllm_gumbel.kernels.contract import NOISE_VERSION, Stream

LARGEST = 2**64 - 1

#: seed, position, stream, salt, token -> 64-bit word, of version 1.
WORDS = [
    (0, 0, 0, 0, 0, 0xA4F54C3834AF1F91),
    (0, 0, 0, 0, 1, 0x3B4183DAE374BA71),
    (0, 0, 0, 0, 2, 0x136D99AA9265A7EF),
    (1, 0, 0, 0, 0, 0xEA8832B2B275317A),
    (0, 1, 0, 0, 0, 0x3521F9A724E1E6D5),
    (0, 0, 1, 0, 0, 0x9D380B0CE5346ED7),
    (0, 0, 2, 0, 0, 0x2A0970C4905C2E92),
    (0, 0, 3, 0, 0, 0xFA46E44A1EE933A4),
    (0, 0, 0, 1, 0, 0x0916E6EFB8843991),
    (-1, 0, 0, 0, 0, 0x770E49E8F8B16C92),
    (2**64 - 1, 0, 0, 0, 1, 0xEBB1A705C341B307),
    (2**63, 0, 0, 0, 2, 0x5F2DAF228F6EC94B),
    (-(2**63), 5, 0, 0, 3, 0x65C3EEB0EA2CC610),
    (42, 7, 0, 0, 151935, 0x45DFBE9535D070E4),
    (42, 7, 0, 0, 151936, 0xA40B97EE030CD619),
    (42, 7, 3, 0, 262143, 0x52835DA742395719),
    (1234567890123456789, 131071, 0, 2**64 - 1, 49151, 0xA902812140573680),
    (7, 2**31, 0, 0, 65535, 0x42059FB21C73EDA9),
    (7, 2**31 + 1, 0, 0, 65536, 0x5CB495E6B07A943B),
    (7, 2**62, 1, -3, 2**31 - 1, 0x176020096019B9ED),
]

#: seed, position -> key words k0, k1, k2 of the target stream without salt, of version 1.
KEYS = [
    (0, 0, 0x6B5FD45E, 0x78AE5A9A, 0xB9895A2B68592DF1),
    (-1, 0, 0x68EB8265, 0x4ACAF818, 0x67E16A0C98F7A6F9),
    (42, 7, 0xB676C405, 0x454FE73C, 0xC5D6250F51BDC1E3),
]

#: seed, position, stream, salt, token -> G, of version 1.
GUMBELS = [
    (0, 0, 0, 0, 0, -0.03329805475670057),
    (0, 0, 0, 0, 2, 2.5392524831906136),
    (0, 1, 0, 0, 0, 1.4583256256243173),
    (0, 0, 2, 0, 0, 1.7182835691164515),
    (42, 7, 0, 0, 151935, 1.1433369182589728),
    (42, 7, 0, 0, 151936, -0.02360054213259668),
    (42, 7, 3, 0, 262143, 0.943981538540292),
]

EXTREME_WORDS = [0, 1, 2**48 - 1, 2**48, 2**53 - 1, 2**53, 2**63 - 1, 2**63, 2**63 + 1, LARGEST - 2**53, LARGEST]


def test_known_answers_belong_to_this_version():
    """The tables of this file are of version 1; another version needs another table, never an edit of this one."""
    assert NOISE_VERSION == 1
    assert {stream.name: int(stream) for stream in Stream} == {"TARGET": 0, "INVERSE_CDF": 1, "TAIL": 2, "DRAFT": 3}


@pytest.mark.parametrize(("seed", "position", "stream", "salt", "token", "word"), WORDS)
def test_word_is_the_known_answer(seed, position, stream, salt, token, word):
    """Literal, second implementation and library agree as integers."""
    assert naive.word(seed, position, token, stream, salt) == word
    assert int(noise.noise_words(seed, position, np.array([token]), stream, salt)[0]) == word


@pytest.mark.parametrize(("seed", "position", "k0", "k1", "k2"), KEYS)
def test_keys_are_the_known_answer(seed, position, k0, k1, k2):
    """The three key words of a row, each at its place."""
    assert naive.keys(seed, position) == (k0, k1, k2)
    assert tuple(int(k) for k in noise.row_keys(seed, position)) == (k0, k1, k2)


@pytest.mark.parametrize(("seed", "position", "stream", "salt", "token", "value"), GUMBELS)
def test_gumbel_is_the_known_answer(seed, position, stream, salt, token, value):
    """To 1e-15 of its size, and to 4e-16 absolute where G is near 0 and its own relative error has no bound."""
    assert naive.gumbel(naive.word(seed, position, token, stream, salt)) == pytest.approx(value, rel=1e-15, abs=4e-16)
    assert noise.gumbel(seed, position, np.array([token]), stream, salt)[0] == pytest.approx(
        value, rel=1e-15, abs=4e-16
    )


def test_words_equal_the_second_implementation_over_random_arguments():
    """20,000 random arguments of every size and sign."""
    rng = np.random.default_rng(1)
    for _ in range(200):
        seed, salt = (int(s) for s in rng.integers(-(2**63), 2**63, 2))
        position, stream = int(rng.integers(2 ** rng.integers(1, 63))), int(rng.integers(4))
        tokens = rng.integers(0, 2 ** rng.integers(1, 32), 100)
        expected = [naive.word(seed, position, int(t), stream, salt) for t in tokens]
        assert noise.noise_words(seed, position, tokens, stream, salt).tolist() == expected


def test_parts_of_a_word_are_its_two_halves():
    """h16 takes the upper 16 bits and r48 the lower 48, without overlap."""
    tokens = np.arange(5000)
    k0, k1, k2 = noise.row_keys(9, 4)
    words = noise.noise_words(9, 4, tokens)
    assert (words >> np.uint64(48) == noise.upper_words(k0, k1, tokens)).all()
    assert (words & np.uint64(2**48 - 1) == noise.lower_words(k2, tokens)).all()


# --- ends of the range -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("word", EXTREME_WORDS)
def test_extreme_word_gives_finite_noise_within_the_documented_bounds(word):
    """vllm#43249, sglang#25106: no word gives 0, an infinity or a NaN, so -inf plus noise stays -inf."""
    e = noise.exponential(np.array([word], np.uint64))[0]
    g = -np.log(e)
    assert 0 < e < math.inf
    assert -3.82 < g < 45.06
    assert -np.inf + g == -np.inf


def test_bounds_of_the_noise_are_tight():
    """sglang#33423: the smallest word has the largest noise, the largest word (all ones) the smallest."""
    smallest, largest = -np.log(noise.exponential(np.array([0, LARGEST], np.uint64)))
    assert smallest == pytest.approx(65 * math.log(2), rel=1e-15)
    assert largest == pytest.approx(-math.log(65 * math.log(2)), rel=1e-15)


def test_largest_noise_is_far_above_that_of_a_32_bit_word():
    """vllm#47524, the largest word exactly: a 32-bit uniform ends at G = 22.2 or 22.9, this one at 45.05."""
    assert -np.log(noise.exponential(np.array([0], np.uint64)))[0] > 45.05


def test_smallest_words_give_distinct_noise():
    """vllm#47524, vllm#45996: at the winning end neighbouring words differ; through -ln(u), u near 1, they do not."""
    words = np.arange(1024, dtype=np.uint64)
    assert len(np.unique(noise.exponential(words))) == 1024
    u = ((LARGEST - words).astype(np.float64) + 0.5) * 2.0**-64  # the other form: the winning end at 1
    assert (u == 1).all(), "the other form rounds all of them to u = 1, an infinite noise"


def test_noise_falls_as_the_word_grows():
    """Order of words is order of noise, across the seam at 2^63 where the two forms meet."""
    words = np.sort(np.random.default_rng(2).integers(0, 2**64, 100_000, dtype=np.uint64))
    seam = np.arange(2**63 - 2**16, 2**63 + 2**16, 2**6, dtype=np.uint64)
    for run in (words, seam):
        assert (np.diff(noise.exponential(run)) >= 0).all()


def test_exponential_is_accurate_to_4e_16():
    """Against 50-digit decimals at 4,000 words of every size and at the extremes; 2.5e-16 was seen."""
    rng = np.random.default_rng(3)
    sizes = [int(w) >> i % 64 for i, w in enumerate(rng.integers(0, 2**64, 2000, dtype=np.uint64))]
    words = EXTREME_WORDS + sizes + [LARGEST - size for size in sizes]
    with localcontext() as context:
        context.prec = 50
        for word, e in zip(words, noise.exponential(np.array(words, np.uint64)), strict=True):
            exact = -(1 - (Decimal(word) + Decimal("0.5")) / 2**64).ln()
            assert abs(Decimal(float(e)) / exact - 1) <= Decimal("4e-16"), word


# --- arguments ---------------------------------------------------------------------------------------------------


def test_seed_and_salt_wrap_modulo_2_to_64():
    """A seed of -1 is the seed 2^64 - 1, and 2^64 is 0."""
    for value, same in ((-1, LARGEST), (2**64, 0), (-(2**63), 2**63), (2**64 + 5, 5)):
        assert noise.row_keys(value, 3) == noise.row_keys(same, 3)
        assert noise.row_keys(1, 3, 0, value) == noise.row_keys(1, 3, 0, same)


@pytest.mark.parametrize("dtype", [np.int64, np.int32, np.uint64])
def test_arrays_and_python_integers_agree(dtype):
    """A NumPy array, a list, a tuple and single integers give the same keys."""
    seeds = np.array([0, 1, 2**31 - 1] if dtype is np.uint64 else [0, -1, -(2**31)], dtype)
    expected = [tuple(int(k) for k in noise.row_keys(int(s), 11)) for s in seeds]
    for given in (seeds, seeds.tolist(), tuple(seeds.tolist())):
        k0, k1, k2 = noise.row_keys(given, 11)
        assert list(zip(k0.tolist(), k1.tolist(), k2.tolist(), strict=True)) == expected


@pytest.mark.parametrize("dtype", [np.int32, np.int64, np.uint32, np.uint64])
def test_words_do_not_depend_on_the_type_of_the_ids(dtype):
    """Ids of any integer type, in any order and of any shape, give the same words."""
    tokens = np.arange(1000, dtype=dtype)
    expected = noise.noise_words(3, 1, np.arange(1000))
    assert (noise.noise_words(3, 1, tokens) == expected).all()
    assert (noise.noise_words(3, 1, tokens[::-1]) == expected[::-1]).all()
    assert (noise.noise_words(3, 1, tokens.reshape(10, 100)) == expected.reshape(10, 100)).all()


def test_rows_broadcast_as_if_one_by_one():
    """Keys of many rows at once equal the keys of each row."""
    seeds, positions = np.arange(5)[:, None], np.arange(7)
    k0, k1, k2 = noise.row_keys(seeds, positions, Stream.DRAFT, 8)
    for s in range(5):
        for p in range(7):
            assert (k0[s, p], k1[s, p], k2[s, p]) == tuple(noise.row_keys(s, p, Stream.DRAFT, 8))
