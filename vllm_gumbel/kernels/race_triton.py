"""The race of one tile of ids in Triton: propose in float32, decide in float64.

No score can exceed its upper bound: with E >= v >= h16 * 2^-16 (`noise_reference`), and log2(h) >= e + f for
h = 2^e (1 + f),

    x - ln(E) <= u = x + ln 2 * (16 - e - f)

where e + f is the bit pattern of float32(h) less 127 * 2^23, over 2^23: no logarithm, and at h = 0 the bound only gets
larger (e + f = -127). The tile is then searched best bound first: the exact score of the id of the largest u, then of
the next, until no u reaches the best score: two or three scores a tile of 4096. A score is float64 and made of the
correctly rounded quotient and all 64 bits of the word; u is float32, from an approximate quotient.

How far u may be off: what can still win has |x| <= |s| + 46 beside a score s, since noise lies between -3.9 and 45.1.
The quotient by a rounded reciprocal, the last sum and the rounding of the bar cost 2^-23 + 2^-24 + 2^-24 of that, the
four roundings of terms up to 99 (bits to float32, product, constant, difference) 2^-24 * 99 each. Together that is
below 2^-22 |s| + 2^-14.8, and `bar_of` grants 2^-20 |s| + 2^-13.6.

So a token equals the reference's unless the scores of two finalists agree to about 1e-12, the error of a float64
logarithm at such sizes.
"""

# mypy: allow-untyped-defs, disable-error-code="import-untyped"
# ruff: noqa: N803

import triton
import triton.language as tl

from vllm_gumbel.kernels.floats_triton import quotient
from vllm_gumbel.kernels.noise_stock_triton import stock_scores
from vllm_gumbel.kernels.noise_triton import gumbel, pair_words
from vllm_gumbel.kernels.slots import Noise

#: `slots.Noise` as kernels know it.
OWN, STOCK, STOCK_FP64 = (tl.constexpr(int(noise)) for noise in Noise)

_LN2_PER_BIT = tl.constexpr(8.262958294867817e-08)  #: ln 2 / 2^23
_LN2_TIMES_143 = tl.constexpr(99.12004852294922)  #: (16 + 127) ln 2, rounded up to a float32
_SLACK = tl.constexpr(2.0**-20)
NOWHERE = tl.constexpr(0x7FFFFFFF)  #: id of no token, larger than every id


@triton.jit
def upper_bound(x, h):
    """Return u, float32, of values x, float32, and upper words h, uint32 below 2^16, of one shape."""
    bits = h.to(tl.int32).to(tl.float32).to(tl.int32, bitcast=True)
    return x + (bits.to(tl.float32) * -_LN2_PER_BIT + _LN2_TIMES_143)


@triton.jit
def upper_words(k0, k1, ids):
    """Return h16, uint32, of int32 `ids`."""
    words = pair_words(k0, k1, ids >> 1)
    return tl.where((ids & 1) == 1, words >> 16, words & 0xFFFF)


@triton.jit
def score_of(token, row, divisor, k0, k1, k2):
    """Return the score, float64, of one id whose logit is no NaN."""
    x = quotient(tl.load(row + token).to(tl.float32), divisor)
    return x.to(tl.float64) + gumbel(k0, k1, k2, token)


@triton.jit
def bar_of(score):
    """Return the float32 that the upper bound of every id reaches whose score is at least `score`, float64."""
    return (score - (tl.abs(score) * _SLACK + 80.0 * _SLACK)).to(tl.float32)


@triton.jit
def search(u, ids, row, divisor, k0, k1, k2, score, token):
    """Return the best of (score, token) and of the ids of a tile, whose upper bounds are `u`.

    Args:
        u: float32 of any shape, -inf where an id does not take part.
        ids: int32 of the same shape.
        row: pointer to the logits of the row.
        divisor: float32, the temperature.
        k0, k1, k2: key words.
        score, token: float64 and int32; the best so far, -inf and -1 if there is none.

    Returns:
        (score, token); of equal scores the lowest id.
    """
    top = tl.max(u)
    bar = bar_of(score)
    while (top >= bar) & (top > float("-inf")):
        rival = tl.min(tl.where(u == top, ids, NOWHERE))
        rival_score = score_of(rival, row, divisor, k0, k1, k2)
        if (rival_score > score) | ((rival_score == score) & (rival < token)):
            score = rival_score
            token = rival
        bar = bar_of(score)
        u = tl.where(ids == rival, float("-inf"), u)
        top = tl.max(u)
    return score, token


@triton.jit
def search_stock(logits, ids, takes_part, seed, position, divisor, score, token, NOISE: tl.constexpr):
    """Do what `search` does with vLLM's own noise and arithmetic, equal scores to the lowest id.

    Args:
        logits: float32; not NaN.
        ids: int32 of the same shape.
        takes_part: int1 of the same shape.
        seed, position: int64.
        divisor: float32, the temperature.
        score, token: float64 and int32; the best so far, -inf and -1 if there is none.
        NOISE: `STOCK` or `STOCK_FP64`.
    """
    x = logits / divisor
    x = tl.where(takes_part, x, float("-inf"))
    scores = stock_scores(seed, position, ids, x, NOISE == STOCK_FP64)
    rival_score = tl.max(scores)
    rival = tl.min(tl.where((scores == rival_score) & takes_part, ids, NOWHERE))
    rival_score = rival_score.to(tl.float64)
    wins = (rival_score > score) | ((rival_score == score) & (rival < token))
    return tl.where(wins, rival_score, score), tl.where(wins, rival, token)
