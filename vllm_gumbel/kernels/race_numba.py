"""The Gumbel race in Numba: over a row by blocks, or over a list of candidates; proposed by bounds, decided in float64.

A race returns the winner, its score and the runner-up's. Scores that agree to `tie_tolerance` are decided by nobody
here: another machine's logarithm may round the other way, so such a row goes to the reference.

Who takes part is said by a bound on the logit (`bound`) and by a cut of the ranking (value descending, id ascending):
the ids with x > cut_x, and those with x = cut_x and id < cut_id. Every filter leaves a prefix of that ranking, hence a
cut; (-inf, -1) leaves all that is finite.
"""

from typing import Any

from vllm_gumbel.kernels.blocks_numba import (
    BLOCK,
    blocks_in,
    bound_offset,
    bound_slope,
    mark_possible,
    may_win,
    write_words,
)
from vllm_gumbel.kernels.floats_numba import widen
from vllm_gumbel.kernels.jit_numba import F32, F64, I64, U16, U32, U64, jit, use_widest_vectors
from vllm_gumbel.kernels.noise_numba import first_pair, score, word_of_pair

INFINITY = F64("inf")


@jit(inline=True)
def tie_tolerance(best: Any) -> Any:
    """Return how far two implementations' scores may lie apart.

    E and its logarithm are each within a few units in the last place, 2^-42 for |G| <= 45.1 with a wide margin; then the
    sum is rounded.
    """
    return 2.0**-42 + 2.0**-50 * abs(best)


@jit(inline=True)
def is_tied(best: Any, second: Any) -> Any:
    """Return whether the runner-up is too close to call."""
    return second > -INFINITY and best - second <= tie_tolerance(best)


@jit(inline=True)
def enter(token: Any, x: Any, winner: Any, best: Any, second: Any, k0: Any, k1: Any, k2: Any) -> Any:
    """Return (winner, best, second) after a token that takes part was scored."""
    if token == winner:
        return winner, best, second
    s = score(x, token, k0, k1, k2)
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
    k0: Any,
    k1: Any,
    k2: Any,
    bound: Any,
    cut_x: Any,
    cut_id: Any,
    best: Any,
    marks: Any,
    block_marks: Any,
    pairs: Any,
) -> Any:
    """Return (winner, its score, the runner-up's score) of the ids `start` to `stop` - 1; -1 if none beats `best`.

    Args:
        logits: one row, no NaN.
        start, stop: range of ids.
        largest: float32 [blocks], as `summarise_blocks` writes it.
        words: uint16 [blocks]; used where `largest` reaches `bound`.
        temperature: float32.
        k0, k1, k2: key words of the row.
        bound: float32; smallest logit that takes part.
        cut_x, cut_id: float32 and integer; cut of the ranking.
        best: float64; a score to beat, -inf for none.
        marks: uint8 [256], scratch.
        block_marks: uint8 [blocks rounded up to 8], scratch.
        pairs: uint32 [129], scratch.
    """
    use_widest_vectors()
    winner, second = I64(-1), -INFINITY
    blocks = blocks_in(start, stop)
    slope = bound_slope(temperature)
    halves = pairs.view(U16)
    if best == -INFINITY:
        # Two likely winners first, so that the bounds rule out much from the start: the best logit of a peaked row, the
        # best noise of a flat one.
        top, quiet = opening_blocks(largest[:blocks], words, bound)
        for b in (top, quiet):
            if b < 0:
                continue
            first = start + b * BLOCK
            last = min(first + BLOCK, stop)
            if b == top:
                j = first_of_value(logits[first:last], largest[b])
            else:
                write_words(first, last, k0, k1, pairs)
                j = first_of_word(halves[first & 1 :], last - first, words[b])
            if j >= 0 and takes_part(logits[first + j], first + j, temperature, bound, cut_x, cut_id):
                x = F32(widen(logits[first + j]) / temperature)
                winner, best, second = enter(first + j, x, winner, best, second, k0, k1, k2)
    offset = bound_offset(best)
    mark_possible(largest[:blocks], words, slope, offset, block_marks)
    groups, block_groups = marks.view(U64), block_marks.view(U64)
    for c in range((blocks + 7) >> 3):
        if block_groups[c] == U64(0):
            continue
        for b in range(8 * c, 8 * c + 8):
            if block_marks[b] == 0 or largest[b] < bound or not may_win(largest[b], words[b], slope, offset):
                continue
            first = start + b * BLOCK
            last = min(first + BLOCK, stop)
            write_words(first, last, k0, k1, pairs)
            mark_possible(logits[first:last], halves[first & 1 :], slope, offset, marks)
            for g in range((last - first + 7) >> 3):
                if groups[g] == U64(0):
                    continue
                for j in range(8 * g, 8 * g + 8):
                    if marks[j] != 0 and takes_part(logits[first + j], first + j, temperature, bound, cut_x, cut_id):
                        x = F32(widen(logits[first + j]) / temperature)
                        winner, best, second = enter(first + j, x, winner, best, second, k0, k1, k2)
            offset = bound_offset(best)
    return winner, best, second


@jit(inline=True)
def takes_part(logit: Any, token: Any, temperature: Any, bound: Any, cut_x: Any, cut_id: Any) -> Any:
    """Return whether a token is neither below the bound nor past the cut."""
    if widen(logit) < bound:
        return False
    x = F32(widen(logit) / temperature)
    return x > cut_x or (x == cut_x and token < cut_id)


@jit(inline=True)
def opening_blocks(largest: Any, words: Any, bound: Any) -> Any:
    """Return the first block of the largest logit, and that of the smallest h16 among blocks that reach the bound; or -1."""
    top, quiet = -1, -1
    for b in range(len(largest)):
        if largest[b] >= bound:
            if top < 0 or largest[b] > largest[top]:
                top = b
            if quiet < 0 or words[b] < words[quiet]:
                quiet = b
    return top, quiet


@jit(inline=True)
def first_of_value(logits: Any, value: Any) -> Any:
    """Return the index of the first logit equal to a float32."""
    for j in range(len(logits)):
        if widen(logits[j]) == value:
            return j
    return -1


@jit(inline=True)
def first_of_word(halves: Any, n: Any, word: Any) -> Any:
    """Return the index of the first h16 equal to `word` among n."""
    for j in range(n):
        if halves[j] == word:
            return j
    return -1


@jit
def race_list(
    ids: Any, xs: Any, cut_x: Any, cut_id: Any, k0: Any, k1: Any, k2: Any
) -> Any:
    """Return (winner's index in the list, its score, the runner-up's score) among candidates; -1 if none takes part.

    Args:
        ids: int32 [n], ascending.
        xs: float32 [n], their tempered values.
        cut_x, cut_id: cut of the ranking.
        k0, k1, k2: key words of the row.
    """
    winner, best, second = I64(-1), -INFINITY, -INFINITY
    slope = bound_slope(F32(1))
    offset = bound_offset(best)
    for j in range(len(ids)):
        x, token = xs[j], I64(ids[j])
        if x > cut_x or (x == cut_x and token < cut_id):
            pair = word_of_pair(first_pair(k0, token >> 1), k1)
            word = U32(pair >> U32(16)) if token & 1 else U32(pair & U32(0xFFFF))
            if may_win(x, word, slope, offset):
                s = score(x, token, k0, k1, k2)
                if s > best:
                    winner, best, second = j, s, best
                    offset = bound_offset(best)
                else:
                    second = max(s, second)
    return winner, best, second
