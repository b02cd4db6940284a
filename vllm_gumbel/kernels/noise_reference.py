"""The noise: a pure function of (seed, position, stream, salt, token id), in NumPy.

This file is the definition. For one token,

    G = -ln(E),   E = -ln(1 - v),   v = (h16 * 2^48 + r48 + 1/2) / 2^64

so G is a standard Gumbel variate when the 64 bits of v are uniform. The winning side of a Gumbel race, small E, lies
where v is near 0 and floating point is finest. The upper 16 bits, h16, are cheap and every token gets them; the lower
48, r48, are computed only for a token that the upper 16 leave in the race.

Key of a row: three words from (seed, position, stream, salt), each mixed in turn with the finaliser of SplitMix64
(Steele, Lea, Flood 2014, "Fast splittable pseudorandom number generators", section 3, variant 13 of Stafford):

    h = 0;  for w in (seed, position, stream, salt):  h = mix64((h xor w) + GOLDEN)
    a = mix64(h + GOLDEN);  b = mix64(h + 2 GOLDEN);  k0 = low half of a;  k1 = high half of a;  k2 = b

h16: one 32-bit word for a pair of ids, t = token >> 1, low half for the even id and high half for the odd one:

    x = t * PAIR + k0;  x ^= x >> 16;  x *= M1;  x ^= (x >> 15) ^ k1;  x *= M2;  x ^= x >> 15

with the multipliers of "lowbias32" (Wellons 2018, "Prospecting for hash functions"). r48: the upper 48 bits of
mix64(k2 + (token + 1) * GOLDEN), that is of SplitMix64's own output at index token.

Quality, shown by `scripts/noise_battery.py`. Avalanche: each of 167 input bits (64 of the seed, 21 of the position, 64
of the salt, 18 of the token) changes each of 64 output bits in half of 10^6 samples; the largest deviation of a share
from 1/2 was 0.0019, where chance exceeds 0.0030 once in 10^5. dieharder 3.31.1, all tests of `-a`, tests that came out
WEAK repeated with more data (`-Y 1`): none FAILED and none left WEAK on

    16-bit words along tokens, positions, seeds, and all three at once    4 streams, 114 results each
    64-bit values along positions, seeds, and all three at once           3 streams, 114 results each
    64-bit values along tokens                                            all but the last 12 tests: lagged sums 28 to
                                                                          32, Kolmogorov-Smirnov, the six of dab_*

Every draw of a token is tested against the exact law besides, in `tests/test_exact_law.py`.

What this file does not do: it is not fast, and it knows nothing of temperatures, filters or vLLM.
"""

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from vllm_gumbel.kernels.contract import Stream

Words64 = npt.NDArray[np.uint64]
Words32 = npt.NDArray[np.uint32]

GOLDEN = 0x9E3779B97F4A7C15  #: 2^64 over the golden ratio, SplitMix64's increment
MIX_A = 0xBF58476D1CE4E5B9
MIX_B = 0x94D049BB133111EB
PAIR = 0x9E3779B9  #: 2^32 over the golden ratio; odd, so pairs of ids stay distinct
M1 = 0x7FEB352D
M2 = 0x846CA68B

_U64 = np.uint64
_U32 = np.uint32


def mix64(z: Words64) -> Words64:
    """Return SplitMix64's finaliser of `z`, uint64 of any shape."""
    z = (z ^ (z >> _U64(30))) * _U64(MIX_A)
    z = (z ^ (z >> _U64(27))) * _U64(MIX_B)
    return z ^ (z >> _U64(31))


def row_keys(
    seed: npt.ArrayLike, position: npt.ArrayLike, stream: npt.ArrayLike = Stream.TARGET, salt: npt.ArrayLike = 0
) -> tuple[Words32, Words32, Words64]:
    """Return the key words (k0, k1, k2) of rows.

    Args:
        seed: integers modulo 2^64, any shape; a row each.
        position: integers >= 0, broadcast against `seed`.
        stream: which independent family of noise.
        salt: integers modulo 2^64.

    Returns:
        uint32, uint32 and uint64 arrays of the broadcast shape.
    """
    words = np.broadcast_arrays(*(_as_words(w) for w in (seed, position, stream, salt)))
    h = np.zeros(words[0].shape, _U64)
    with np.errstate(over="ignore"):  # wrapping is the operation
        for w in words:
            h = mix64((h ^ w) + _U64(GOLDEN))
        a = mix64(h + _U64(GOLDEN))
        b = mix64(h + _U64(2 * GOLDEN % 2**64))
    return (a & _U64(0xFFFFFFFF)).astype(_U32), (a >> _U64(32)).astype(_U32), b


def upper_words(k0: npt.ArrayLike, k1: npt.ArrayLike, tokens: npt.NDArray[np.integer]) -> npt.NDArray[np.uint16]:
    """Return h16 of `tokens` under the keys `k0`, `k1` (uint32, broadcast against `tokens`)."""
    k0, k1 = np.asarray(k0, _U32), np.asarray(k1, _U32)
    with np.errstate(over="ignore"):
        x = (tokens >> 1).astype(_U32) * _U32(PAIR) + k0
        x = (x ^ (x >> _U32(16))) * _U32(M1)
        x = (x ^ (x >> _U32(15)) ^ k1) * _U32(M2)
        x = x ^ (x >> _U32(15))
    return np.where(tokens & 1, x >> _U32(16), x & _U32(0xFFFF)).astype(np.uint16)


def lower_words(k2: npt.ArrayLike, tokens: npt.NDArray[np.integer]) -> Words64:
    """Return r48 of `tokens` under the key `k2` (uint64, broadcast against `tokens`), in the low 48 bits."""
    with np.errstate(over="ignore"):
        z = np.asarray(k2, _U64) + (tokens.astype(_U64) + _U64(1)) * _U64(GOLDEN)
        return mix64(z) >> _U64(16)


def exponential(words: Words64) -> npt.NDArray[np.float64]:
    """Return E = -ln(1 - (word + 1/2) / 2^64), finite and positive for every word.

    Each half of the range uses the form that does not cancel: near 0, log1p of a number that float64 resolves to
    2^-65; near 1, the logarithm of the distance to 1, an integer plus one half.
    """
    words = np.asarray(words, _U64)
    low = -np.log1p(-(words.astype(np.float64) + 0.5) * 2.0**-64, where=words < _U64(2**63), out=np.zeros(words.shape))
    high = -np.log(
        ((~words).astype(np.float64) + 0.5) * 2.0**-64, where=words >= _U64(2**63), out=np.zeros(words.shape)
    )
    return low + high


def noise_words(seed: int, position: int, tokens: npt.NDArray[np.integer], stream: int = 0, salt: int = 0) -> Words64:
    """Return the 64-bit words h16 * 2^48 + r48 of `tokens` for one row."""
    k0, k1, k2 = row_keys(seed, position, stream, salt)
    return (upper_words(k0, k1, tokens).astype(_U64) << _U64(48)) | lower_words(k2, tokens)


def gumbel(seed: int, position: int, tokens: npt.NDArray[np.integer], stream: int = 0, salt: int = 0) -> npt.NDArray:
    """Return G, float64 with the shape of `tokens`, for one row: G[i] = -ln(E(seed, position, stream, salt, i)).

    Values lie between -3.82 and 45.06, the noise of the largest and the smallest word.
    """
    return -np.log(exponential(noise_words(seed, position, tokens, stream, salt)))


def _as_words(values: npt.ArrayLike | int) -> Words64:
    """Return integers of any size or sign as uint64, modulo 2^64."""
    if isinstance(values, np.ndarray) and values.dtype != object:
        return values.astype(_U64)
    flat: Sequence[int] | int = values  # type: ignore[assignment]
    return (
        np.array([int(v) % 2**64 for v in flat], _U64)
        if isinstance(flat, Sequence)
        else np.array(int(flat) % 2**64, _U64)
    )
