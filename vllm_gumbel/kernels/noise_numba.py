"""The noise of `noise_reference` in Numba: the same words bit for bit, for the kernels to inline.

`word_of_pair` is the cheap half that every token gets, one 32-bit word for two ids; written so that a loop over pairs
becomes vector code. `score` is the expensive, exact half that only finalists see.
"""

import math
from typing import Any, NamedTuple

from vllm_gumbel.kernels.jit_numba import F64, I64, U32, U64, jit
from vllm_gumbel.kernels.noise_reference import GOLDEN, M1, M2, MIX_A, MIX_B, PAIR

_GOLDEN, _GOLDEN2 = U64(GOLDEN), U64(2 * GOLDEN % 2**64)
_MIX_A, _MIX_B = U64(MIX_A), U64(MIX_B)
_PAIR, _M1, _M2 = U32(PAIR), U32(M1), U32(M2)
_HALF_RANGE = U64(2**63)


class Keys(NamedTuple):
    """The key words of a row: uint32, uint32, uint64."""

    k0: Any
    k1: Any
    k2: Any


@jit(inline=True)
def mix64(z: Any) -> Any:
    """Return SplitMix64's finaliser of a uint64."""
    z = U64(U64(z ^ U64(z >> U64(30))) * _MIX_A)
    z = U64(U64(z ^ U64(z >> U64(27))) * _MIX_B)
    return U64(z ^ U64(z >> U64(31)))


@jit(inline=True)
def row_keys(seed: Any, position: Any, stream: Any, salt: Any) -> Any:
    """Return the `Keys` of a row. Arguments are integers of 64 bits."""
    h = mix64(U64(U64(seed) + _GOLDEN))
    h = mix64(U64(U64(h ^ U64(position)) + _GOLDEN))
    h = mix64(U64(U64(h ^ U64(stream)) + _GOLDEN))
    h = mix64(U64(U64(h ^ U64(salt)) + _GOLDEN))
    a = mix64(U64(h + _GOLDEN))
    return Keys(U32(a & U64(0xFFFFFFFF)), U32(a >> U64(32)), mix64(U64(h + _GOLDEN2)))


@jit(inline=True)
def first_pair(k0: Any, pair: Any) -> Any:
    """Return what `word_of_pair` mixes for a pair; the next pair's is this plus `PAIR`."""
    return U32(U32(U32(pair) * _PAIR) + k0)


@jit(inline=True)
def word_of_pair(x: Any, k1: Any) -> Any:
    """Return the 32-bit word of a pair of ids: h16 of the even id in its low half, of the odd one in its high half."""
    x = U32(U32(x ^ U32(x >> U32(16))) * _M1)
    x = U32(U32(U32(x ^ U32(x >> U32(15))) ^ k1) * _M2)
    return U32(x ^ U32(x >> U32(15)))


@jit(inline=True)
def word_of_token(token: Any, keys: Any) -> Any:
    """Return the 64-bit word h16 * 2^48 + r48 of a token."""
    pair = word_of_pair(first_pair(keys.k0, I64(token) >> I64(1)), keys.k1)
    upper = U64(pair >> U32(16)) if I64(token) & I64(1) else U64(pair & U32(0xFFFF))
    lower = U64(mix64(U64(keys.k2 + U64(U64(I64(token) + I64(1)) * _GOLDEN))) >> U64(16))
    return U64(U64(upper << U64(48)) | lower)


@jit(inline=True)
def exponential(word: Any) -> Any:
    """Return E = -ln(1 - (word + 1/2) / 2^64), float64; each half of the range by the form that does not cancel."""
    if word < _HALF_RANGE:
        return -math.log1p(-(F64(word) + 0.5) * 2.0**-64)
    return -math.log((F64(U64(~word)) + 0.5) * 2.0**-64)


@jit(inline=True)
def score(x: Any, token: Any, keys: Any) -> Any:
    """Return x + G of a token, float64: what decides."""
    return F64(x) - math.log(exponential(word_of_token(token, keys)))
