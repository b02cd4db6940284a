"""A second draw, written from the specification in plain Python: integers for the noise, `sorted` for the filters.

It shares no code with the library and no NumPy, so that a fault in one does not hide in the other.
"""

import math
import struct
from collections.abc import Sequence
from typing import NamedTuple

ALL = 2**64 - 1
GOLDEN = 11400714819323198485  # floor(2^64 / 1.618...), made odd
PAIR = 2654435769


class Parameters(NamedTuple):
    """Parameters of one row."""

    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    seed: int = 0
    position: int = 0
    salt: int = 0


def mix(z: int) -> int:
    """Return the finaliser of SplitMix64."""
    z = ((z ^ (z >> 30)) * 13787848793156543929) & ALL
    z = ((z ^ (z >> 27)) * 10723151780598845931) & ALL
    return z ^ (z >> 31)


def keys(seed: int, position: int, stream: int = 0, salt: int = 0) -> tuple[int, int, int]:
    """Return the three key words of a row."""
    h = 0
    for word in (seed, position, stream, salt):
        h = mix(((h ^ (word & ALL)) + GOLDEN) & ALL)
    a = mix((h + GOLDEN) & ALL)
    return a % 2**32, a // 2**32, mix((h + 2 * GOLDEN) & ALL)


def upper(k0: int, k1: int, token: int) -> int:
    """Return the 16 bits that every token gets."""
    x = ((token // 2) * PAIR + k0) % 2**32
    x = ((x ^ (x >> 16)) * 2146121005) % 2**32
    x = ((x ^ (x >> 15) ^ k1) * 2221713035) % 2**32
    x ^= x >> 15
    return x >> 16 if token % 2 else x % 2**16


def lower(k2: int, token: int) -> int:
    """Return the 48 bits below them."""
    return mix((k2 + (token + 1) * GOLDEN) & ALL) >> 16


def word(seed: int, position: int, token: int, stream: int = 0, salt: int = 0) -> int:
    """Return the 64-bit word of one token."""
    k0, k1, k2 = keys(seed, position, stream, salt)
    return upper(k0, k1, token) * 2**48 + lower(k2, token)


def gumbel(noise_word: int) -> float:
    """Return G of a 64-bit word; the fractions are exact integers, divided once."""
    if noise_word < 2**63:
        return -math.log(-math.log1p(-(2 * noise_word + 1) / 2**65))
    return -math.log(-math.log((2 * (2**64 - noise_word) - 1) / 2**65))


def single(value: float) -> float:
    """Return the nearest float32; an infinity where it overflows."""
    try:
        return struct.unpack("f", struct.pack("f", value))[0]
    except OverflowError:
        return math.copysign(math.inf, value)


def tempered(logits: Sequence[float], temperature: float) -> list[float]:
    """Return the row in float32 without NaN, divided by the temperature unless that is greedy."""
    clean = [-math.inf if math.isnan(x) else single(x) for x in logits]
    t = single(temperature)
    # A quotient of two float32, rounded to float64 and then to float32, is the correctly rounded one (Figueroa 1995).
    return clean if t < single(1e-5) else [single(x / t) for x in clean]


def kept(x: Sequence[float], row: Parameters) -> list[int]:
    """Return the ids that the filters leave of a tempered row, in ascending order.

    The prefix of top-p is found by bisection on exactly rounded sums.
    """
    ranking = sorted((-value, token) for token, value in enumerate(x) if value > -math.inf)
    if not ranking or single(row.temperature) < single(1e-5):
        return sorted(token for _, token in ranking)
    largest = -ranking[0][0]
    if largest == math.inf:
        return sorted(token for value, token in ranking if value == -math.inf)
    if single(row.min_p) > 0:
        ranking = [entry for entry in ranking if -entry[0] - largest >= math.log(single(row.min_p))]
    if 0 < row.top_k < len(x):
        ranking = ranking[: row.top_k]
    share = single(row.top_p)
    if share < 1:
        masses = [math.exp(-value - largest) for value, _ in ranking]
        target = share * math.fsum(masses)
        few, enough = 0, len(masses)
        while enough - few > 1:
            middle = (few + enough) // 2
            if math.fsum(masses[:middle]) >= target:
                enough = middle
            else:
                few = middle
        ranking = ranking[:enough]
    return sorted(token for _, token in ranking)


def draw(logits: Sequence[float], row: Parameters, usable: int | None = None, stream: int = 0) -> tuple[int, list[int]]:
    """Return the drawn id, -1 if there is none, and the kept ids."""
    x = tempered(logits, row.temperature)
    x = [value if usable is None or token < usable else -math.inf for token, value in enumerate(x)]
    keep = kept(x, row)
    best, best_score = -1, None
    k0, k1, k2 = keys(row.seed, row.position, stream, row.salt)
    for token in keep:
        score = x[token]
        if single(row.temperature) >= single(1e-5):
            score += gumbel(upper(k0, k1, token) * 2**48 + lower(k2, token))
        if best_score is None or score > best_score:
            best, best_score = token, score
    return best, keep
