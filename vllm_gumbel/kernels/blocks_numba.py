"""What is kept of every block of 256 ids, its largest logit and its smallest noise word, and what they rule out.

A token i can only beat the best score s so far if E_i < exp(x_i - s), and E = -ln(1 - v) >= v >= h16 * 2^-16. So one
with h16 >= 65536 * exp(x - s) is passed over without a logarithm, and a block is when its smallest h16 is at least that
for its largest x. h16 = 0 is never passed over.

An upper bound of that exponential is read off an integer. With y = 16 + (x - s) / ln 2, n = floor(y), f = y - n:

    65536 exp(x - s) = 2^y = 2^n 2^f <= 2^n (1 + f)        2^f is convex and equals 1 + f at 0 and at 1

and 2^n (1 + f) is the float32 whose bits, as an integer, are 2^23 (y + 127): exponent n, fraction f. Computed is

    Y = float32(logit * c) + k,   c = 2^23 / (T ln 2),   k = 2^23 (16 + 127 + margin - s / ln 2)

Proof that Y >= 2^23 (y + 127) wherever it matters, which is y > 0 (else 2^y <= 1, and only h16 = 0 lies below).
Rounding c, the product and k, and using logit / T for the rounded quotient x, errs by at most 2^-24 each, relative to
|x| / ln 2 (three times) and to |s| / ln 2 + 144; rounding the sum errs by at most 2^-24 (y + 144). In units of y:

    error <= 2^-24 (1.4427 (3 |x| + |s|) + 144 + y + 144)

For 0 < y <= 17, |x| <= |s| + 11.1, so the error is below 2^-24 (5.78 |s| + 354) < 2^-21 |s| + 2^-15. For y > 17, |x| <=
|s| + 0.7 y, and the error is below 2^-21 |s| + 2^-15 + 2^-22 y: Y still exceeds the bound that it is clamped to. So

    margin = 2^-12 + 2^-20 |s|

covers it twice, and the conversion to an integer, which cuts off less than 2^-23. The slack never decides anything: it
only lets a few more tokens through to the exact score. Clamping to [2^23, 2^23 (17 + 127)] keeps the bits those of a
positive float32: below y = -126 only h16 = 0 passes, above 17 every word does. NaN, from an infinity of either sign,
is clamped to the upper end.
"""

import math
from typing import Any

from numba import types
from numba.extending import overload

from vllm_gumbel.kernels.floats_numba import (
    MINUS_INFINITY,
    PLUS_INFINITY,
    infinity_key,
    minus_infinity,
    order_key,
    widen,
    widen_key,
)
from vllm_gumbel.kernels.jit_numba import (
    F32,
    F64,
    I32,
    I64,
    U8,
    U16,
    U32,
    always_inline,
    jit,
    larger,
    prefetch,
    use_widest_vectors,
)
from vllm_gumbel.kernels.noise_numba import first_pair, word_of_pair
from vllm_gumbel.kernels.noise_reference import PAIR

BLOCK = 256

_AHEAD = 8 * BLOCK  # how far ahead of the noise's arithmetic the logits are fetched, across pages too
_PER_LN2 = 2.0**23 / math.log(2.0)
_LOWEST, _HIGHEST = F32(2.0**23), F32(2.0**23 * 144)


def block_best(block: Any) -> Any:
    """Return the largest logit of a block, float32, and whether it holds a NaN; if so the first means nothing."""
    return best_of_floats(block) if block.dtype == F32 else best_of_halves(block)


@overload(block_best, strict=False)
def _block_best(block: Any) -> Any:
    if block.dtype == types.float32:
        return lambda block: best_of_floats(block)
    return lambda block: best_of_halves(block)


@jit(inline=True)
def best_of_floats(block: Any) -> Any:
    """Return what `block_best` does, of float32: in pairs, since one comparison tells whether either is a NaN."""
    use_widest_vectors()
    largest, nan = MINUS_INFINITY, False
    half = len(block) >> 1
    for j in range(half):
        a, b = block[j], block[j + half]
        largest = larger(largest, larger(a, b))
        nan |= (a != a) | (b != b)
    if len(block) & 1:
        last = block[2 * half]
        largest = larger(largest, last)
        nan |= last != last
    return largest, nan


@jit(inline=True)
def best_of_halves(block: Any) -> Any:
    """Return what `block_best` does, of 16-bit floats: as order keys, where NaN lie beyond the infinities."""
    use_widest_vectors()
    largest = order_key(block[0])
    smallest = largest
    for j in range(len(block)):
        key = order_key(block[j])
        largest = max(largest, key)
        smallest = min(smallest, key)
    infinity = infinity_key(block[0])
    return widen_key(largest, block[0]), largest > infinity or smallest < ~infinity


@jit(inline=True)
def block_word(start: Any, stop: Any, keys: Any) -> Any:
    """Return the smallest h16 of the pairs that hold ids `start` to `stop` - 1: those ids and at most two more."""
    always_inline()
    use_widest_vectors()
    first = I64(start) >> I64(1)
    x = first_pair(keys.k0, first)
    upper, lower = U32(0xFFFFFFFF), U32(0xFFFFFFFF)
    for _ in range(((I64(stop) + I64(1)) >> I64(1)) - first):
        word = word_of_pair(x, keys.k1)
        upper = min(upper, word)
        lower = min(lower, U32(word << U32(16)))
        x = U32(x + U32(PAIR))
    return U16(min(upper, lower) >> U32(16))


@jit
def summarise_blocks(logits: Any, start: Any, stop: Any, largest: Any, with_words: Any, words: Any, keys: Any) -> Any:
    """Write the largest logit of every block of ids `start` to `stop` - 1, and the smallest h16 if asked for.

    In one loop, since the noise is arithmetic that fits into the time it takes to read the logits.

    Args:
        logits: one row.
        start: first id; blocks are counted from here.
        stop: one past the last id.
        largest: float32 [blocks], written.
        with_words: whether `words` is wanted.
        words: uint16 [blocks], written.
        keys: key words of the row.

    Returns:
        Whether the ids hold a NaN, and whether one of them is +inf; the maxima mean nothing if there is a NaN.
    """
    use_widest_vectors()
    nan, infinite = False, False
    for b in range(blocks_in(start, stop)):
        first = start + b * BLOCK
        last = min(first + BLOCK, stop)
        for i in range(first + _AHEAD, first + _AHEAD + BLOCK, 64 // logits.itemsize):
            prefetch(logits, i)
        largest[b], bad = block_best(logits[first:last])
        nan |= bad
        infinite |= largest[b] == PLUS_INFINITY
        if with_words:
            words[b] = block_word(first, last, keys)
    return nan, infinite


@jit
def words_of_blocks(start: Any, stop: Any, largest: Any, bound: Any, words: Any, keys: Any) -> None:
    """Write the smallest h16 of those blocks whose largest logit is at least `bound`."""
    use_widest_vectors()
    for b in range(blocks_in(start, stop)):
        if largest[b] >= bound:
            first = start + b * BLOCK
            words[b] = block_word(first, min(first + BLOCK, stop), keys)


@jit(inline=True)
def blocks_in(start: Any, stop: Any) -> Any:
    """Return the number of blocks that ids `start` to `stop` - 1 fill, the last one perhaps in part."""
    return (I64(stop) - I64(start) + I64(BLOCK - 1)) // I64(BLOCK)


@jit(inline=True)
def bound_slope(temperature: Any) -> Any:
    """Return c of the module's docstring."""
    return F32(_PER_LN2 / F64(temperature))


@jit(inline=True)
def bound_offset(best: Any) -> Any:
    """Return k of the module's docstring for the best score so far, float64."""
    return F32(2.0**23 * (143.0 + 2.0**-12 + 2.0**-20 * abs(best)) - _PER_LN2 * best)


@jit(inline=True)
def may_win(logit: Any, word: Any, slope: Any, offset: Any) -> Any:
    """Return whether a token (or block) of this logit and h16 may still beat the best score."""
    y = F32(F32(logit * slope) + offset)
    y = y if y < _HIGHEST else _HIGHEST
    y = y if y > _LOWEST else _LOWEST
    return F32(I32(word)) < I32(y).view(F32)


@jit(inline=True)
def mark_possible(logits: Any, words: Any, bound: Any, slope: Any, offset: Any, marks: Any) -> Any:
    """Write for every entry of `logits` (tokens or block maxima) whether it may still win, 0 or 1; return if any may.

    Args:
        logits: [n].
        words: uint16 [n], h16.
        bound: float32; smallest logit that takes part.
        slope, offset: of the bound on scores.
        marks: uint8 [n rounded up to 8], written; the entries past n become 0.
    """
    use_widest_vectors()
    n = len(logits)
    found = U8(0)
    for j in range(n):
        logit = widen(logits[j])
        mark = U8(logit >= bound) & U8(may_win(logit, words[j], slope, offset))
        marks[j] = mark
        found = U8(found | mark)
    for j in range(n, (n + 7) & ~7):
        marks[j] = U8(0)
    return found != 0


@jit(inline=True)
def write_words(start: Any, stop: Any, keys: Any, pairs: Any) -> None:
    """Write the words of the pairs that hold ids `start` to `stop` - 1, uint32 [at most 129]."""
    use_widest_vectors()
    first = I64(start) >> I64(1)
    x = first_pair(keys.k0, first)
    for j in range(((I64(stop) + I64(1)) >> I64(1)) - first):
        pairs[j] = word_of_pair(x, keys.k1)
        x = U32(x + U32(PAIR))


@jit(inline=True)
def largest_of(largest: Any) -> Any:
    """Return the largest of some block maxima, -inf of none."""
    use_widest_vectors()
    best = MINUS_INFINITY
    for b in range(len(largest)):
        best = larger(best, largest[b])
    return best


@jit
def first_at_least(logits: Any, start: Any, stop: Any, bound: Any) -> Any:
    """Return the first of ids `start` to `stop` - 1 whose logit is at least `bound`, -1 if there is none."""
    for i in range(start, stop):
        if widen(logits[i]) >= bound:
            return I64(i)
    return I64(-1)


@jit
def first_block_at_least(largest: Any, bound: Any) -> Any:
    """Return the first block whose largest logit is at least `bound`, 0 if there is none."""
    for b in range(len(largest)):
        if largest[b] >= bound:
            return I64(b)
    return I64(0)


@jit
def without_nan(logits: Any, scratch: Any) -> Any:
    """Return a copy of a row, in `scratch` (bytes), with -inf for every NaN."""
    clean = scratch.view(logits.dtype)[: len(logits)]
    for i in range(len(logits)):
        clean[i] = logits[i]
        if widen(logits[i]) != widen(logits[i]):
            clean[i] = minus_infinity(logits[i])
    return clean
