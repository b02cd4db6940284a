"""The Gumbel race in Numba: over a row by blocks, or over a list of candidates; proposed by bounds, decided in float64.

A race returns the winner, its score and the runner-up's. Scores that agree to `tie_tolerance` are decided by nobody
here: another machine's logarithm may round the other way, so such a row goes to the reference.

Who takes part is said by a bound on the logit (`bound`) and by a cut of the ranking (value descending, id ascending):
the ids with x > cut_x, and those with x = cut_x and id < cut_id. Every filter leaves a prefix of that ranking, hence a
cut; (-inf, -1) leaves all that is finite.
"""

from typing import Any, NamedTuple

from vllm_gumbel.kernels.blocks_numba import (
    BLOCK,
    blocks_in,
    bound_offset,
    bound_slope,
    first_at_least,
    first_block_at_least,
    largest_of,
    mark_possible,
    may_win,
    write_words,
)
from vllm_gumbel.kernels.floats_numba import MINUS_INFINITY, widen
from vllm_gumbel.kernels.jit_numba import F32, F64, I32, I64, U16, U32, U64, always_inline, jit, use_widest_vectors
from vllm_gumbel.kernels.noise_numba import first_pair, score, word_of_pair

INFINITY = F64("inf")

#: How many blocks are raced first, best promise first: each takes a look at all promises, and spares about two blocks.
OPENINGS = 4

#: Below every promise; its low bits are those of no block.
TAKEN = I64(-(2**62) - 1)
_BLOCK_BITS = 24  # of 256 ids each: rows of almost 2^32 ids
_LARGEST_PROMISE = F32(2.0**37)


@jit(inline=True)
def tie_tolerance(best: Any) -> Any:
    """Return how far two implementations' scores may lie apart.

    E and its logarithm are each within a few units in the last place, 2^-42 for |G| <= 45.1 with a wide margin; then
    the sum is rounded.
    """
    return 2.0**-42 + 2.0**-50 * abs(best)


@jit(inline=True)
def is_tied(best: Any, second: Any) -> Any:
    """Return whether the runner-up is too close to call."""
    return second > -INFINITY and best - second <= tie_tolerance(best)


@jit(inline=True)
def enter(token: Any, x: Any, winner: Any, best: Any, second: Any, keys: Any) -> Any:
    """Return (winner, best, second) after a token that takes part was scored."""
    if token == winner:
        return winner, best, second
    s = score(x, token, keys)
    if s > best:
        return token, s, best
    return winner, best, max(s, second)


@jit
def race_blocks(
    logits: Any,
    start: Any,
    stop: Any,
    largest: Any,
    words: Any,
    temperature: Any,
    keys: Any,
    bound: Any,
    cut_x: Any,
    cut_id: Any,
    best: Any,
    scratch: Any,
) -> Any:
    """Return (winner, its score, the runner-up's score) of the ids `start` to `stop` - 1; -1 if none beats `best`.

    Args:
        logits: one row, no NaN.
        start, stop: range of ids.
        largest: float32 [blocks], as `summarise_blocks` writes it.
        words: uint16 [blocks]; used where `largest` reaches `bound`.
        temperature: float32.
        keys: key words of the row.
        bound: float32; smallest logit that takes part.
        cut_x, cut_id: float32 and integer; cut of the ranking.
        best: float64; a score to beat, -inf for none.
        scratch: `Scratch`.
    """
    use_widest_vectors()
    winner, second = I64(-1), -INFINITY
    blocks = blocks_in(start, stop)
    slope = bound_slope(temperature)
    rules = Rules(temperature, bound, cut_x, cut_id, slope)
    largest, block_marks, promises = largest[:blocks], scratch.block_marks, scratch.promises[:blocks]
    opened = best == -INFINITY
    if opened:
        # Likely winners first, so that the bounds rule out much from the start: the best logit of all, and the blocks
        # where logit and noise together promise most.
        top = largest_of(largest)
        if top < bound or top == MINUS_INFINITY:
            return winner, best, second
        i = first_at_least(logits, start + BLOCK * first_block_at_least(largest, top), stop, top)
        if takes_part(logits[i], i, rules):
            winner, best, second = enter(i, F32(widen(logits[i]) / temperature), winner, best, second, keys)
        promise_blocks(largest, words, bound, slope, promises)
        for _ in range(OPENINGS):
            b = take_best_promise(promises)
            if b < 0:
                break
            winner, best, second = scan_block(
                logits, start + b * BLOCK, stop, rules, keys, winner, best, second, scratch
            )
    offset = bound_offset(best)
    mark_possible(largest, words, bound, slope, offset, block_marks)
    groups = block_marks.view(U64)
    for g in range((blocks + 7) >> 3):
        if groups[g] == U64(0):
            continue
        for b in range(8 * g, 8 * g + 8):
            if block_marks[b] == 0 or not may_win(largest[b], words[b], slope, offset):
                continue
            if opened and promises[b] == TAKEN:
                continue
            winner, best, second = scan_block(
                logits, start + b * BLOCK, stop, rules, keys, winner, best, second, scratch
            )
            offset = bound_offset(best)
    return winner, best, second


class Rules(NamedTuple):
    """Who takes part in a race over a row, and the slope of the bound that says who may win it."""

    temperature: Any
    bound: Any
    cut_x: Any
    cut_id: Any
    slope: Any


@jit
def scan_block(
    logits: Any,
    first: Any,
    stop: Any,
    rules: Any,
    keys: Any,
    winner: Any,
    best: Any,
    second: Any,
    scratch: Any,
) -> Any:
    """Return (winner, best, second) after a block of ids, `first` and up, was tested and what may win was scored."""
    always_inline()
    pairs, marks = scratch.pairs, scratch.marks
    last = min(first + BLOCK, stop)
    write_words(first, last, keys, pairs)
    words = pairs.view(U16)[first & 1 :]
    if not mark_possible(logits[first:last], words, rules.bound, rules.slope, bound_offset(best), marks):
        return winner, best, second
    groups = marks.view(U64)
    for g in range((last - first + 7) >> 3):
        if groups[g] == U64(0):
            continue
        for i in range(first + 8 * g, first + 8 * g + 8):
            if marks[i - first] != 0 and takes_part(logits[i], i, rules):
                x = F32(widen(logits[i]) / rules.temperature)
                winner, best, second = enter(i, x, winner, best, second, keys)
    return winner, best, second


@jit(inline=True)
def takes_part(logit: Any, token: Any, rules: Any) -> Any:
    """Return whether a token is neither below the bound nor past the cut."""
    if widen(logit) < rules.bound:
        return False
    x = F32(widen(logit) / rules.temperature)
    return x > rules.cut_x or (x == rules.cut_x and token < rules.cut_id)


@jit(inline=True)
def promise_blocks(largest: Any, words: Any, bound: Any, slope: Any, promises: Any) -> None:
    """Write for every block how much its largest logit and smallest h16 together promise; the block in the low bits.

    The bits of a float32 are about 2^23 times its logarithm to base 2, which is all the accuracy a guess needs.

    Args:
        largest: float32 [blocks].
        words: uint16 [blocks].
        bound: float32; a block below it promises nothing.
        slope: of the bound on scores.
        promises: int64 [blocks], written.
    """
    use_widest_vectors()
    for b in range(len(largest)):
        noise = F32(F32(words[b]) + F32(0.5)).view(I32)
        promise = F32(largest[b] * slope) - F32(noise)
        promise = promise if promise < _LARGEST_PROMISE else _LARGEST_PROMISE
        promise = promise if promise > -_LARGEST_PROMISE else -_LARGEST_PROMISE
        promises[b] = (I64(promise) << I64(_BLOCK_BITS)) | I64(b) if largest[b] >= bound else I64(TAKEN)


@jit(inline=True)
def take_best_promise(promises: Any) -> Any:
    """Return the block that promises most, and mark it as taken; -1 if none is left."""
    use_widest_vectors()
    best = I64(TAKEN)
    for b in range(len(promises)):
        best = max(best, promises[b])
    if best == TAKEN:
        return I64(-1)
    block = best & I64((1 << _BLOCK_BITS) - 1)
    promises[block] = TAKEN
    return block


@jit
def race_list(ids: Any, xs: Any, cut_x: Any, cut_id: Any, keys: Any) -> Any:
    """Return (winner's index in the list, its score, the runner-up's score) among candidates; -1 if none takes part.

    Args:
        ids: int32 [n], ascending.
        xs: float32 [n], their tempered values.
        cut_x, cut_id: cut of the ranking.
        keys: key words of the row.
    """
    winner, best, second = I64(-1), -INFINITY, -INFINITY
    slope = bound_slope(F32(1))
    offset = bound_offset(best)
    for j in range(len(ids)):
        x, token = xs[j], I64(ids[j])
        if x > cut_x or (x == cut_x and token < cut_id):
            pair = word_of_pair(first_pair(keys.k0, token >> 1), keys.k1)
            word = U32(pair >> U32(16)) if token & 1 else U32(pair & U32(0xFFFF))
            if may_win(x, word, slope, offset):
                s = score(x, token, keys)
                if s > best:
                    winner, best, second = I64(j), s, best
                    offset = bound_offset(best)
                else:
                    second = max(s, second)
    return winner, best, second
