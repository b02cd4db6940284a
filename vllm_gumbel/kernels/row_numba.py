"""The draw of one row in Numba: which filter is decided how. The parts are in the other `*_numba` modules.

What goes to the reference (`UNDECIDED_ROW`), since only its own order of operations can decide it as it does:

- two finalists' scores, or a mass and its share, closer than two machines' logarithms and sums agree;
- a temperature that is infinite or a min_p above 1, which no request may ask for;
- processed values after a top_p over the whole row, whose boundary is wanted and not only one token's side of it.
"""

from typing import Any

from vllm_gumbel.kernels.blocks_numba import (
    BLOCK,
    blocks_in,
    first_at_least,
    largest_of,
    summarise_blocks,
    without_nan,
    words_of_blocks,
)
from vllm_gumbel.kernels.contract import GREEDY_TEMPERATURE, Flag
from vllm_gumbel.kernels.floats_numba import LARGEST_FINITE, MINUS_INFINITY, least_logit, widen
from vllm_gumbel.kernels.jit_numba import F32, I32, I64, U16, U32, jit, row_of
from vllm_gumbel.kernels.masses_numba import INSIDE, UNDECIDED, side_of_list_nucleus, side_of_nucleus
from vllm_gumbel.kernels.noise_numba import row_keys
from vllm_gumbel.kernels.race_numba import INFINITY, is_tied, race_blocks, race_list
from vllm_gumbel.kernels.select_numba import bound_of_min_p, collect, cut_of_top_k, nth_largest, write_kept

#: Bit in a row's flags that says: the reference has to draw it. Never leaves `sample_numba`.
UNDECIDED_ROW = 128

_GREEDY = F32(GREEDY_TEMPERATURE)
_NONFINITE, _NO_CANDIDATE, _PADDED = int(Flag.NONFINITE), int(Flag.NO_CANDIDATE), int(Flag.PADDED)


#: Bytes at the front of a workspace: marks and pairs of one block.
_FIXED = 1024


def bytes_of_workspace(vocab: int) -> int:
    """Return how much scratch memory one thread needs for rows of `vocab` ids: 16 bytes an id."""
    return _FIXED + 7 * _most_blocks(vocab) + 16 * _rounded(vocab)


@jit(inline=True)
def _most_blocks(vocab: Any) -> Any:
    """Return the number of blocks of a row cut in two at any id, rounded up to 64."""
    return ((vocab + BLOCK - 1) // BLOCK + 1 + 63) & ~63


@jit(inline=True)
def _rounded(vocab: Any) -> Any:
    """Return `vocab` rounded up to 64."""
    return (vocab + 63) & ~63


@jit
def draw_row(
    logits: Any,
    r: Any,
    temperature: Any,
    top_k: Any,
    top_p: Any,
    min_p: Any,
    seed: Any,
    position: Any,
    salt: Any,
    stream: Any,
    limit: Any,
    processed: Any,
    workspace: Any,
) -> Any:
    """Return (token, flags) of row `r`; flags is `UNDECIDED_ROW` if the reference has to draw it.

    Args:
        logits: [rows, vocab] of unit column stride.
        r: index of the row.
        temperature, top_k, top_p, min_p, seed, position, salt: the row's parameters.
        stream: family of noise.
        limit: number of ids that may be drawn.
        processed: float32 [rows, vocab] of unit column stride, or [0, 0] if not wanted.
        workspace: uint8 [bytes_of_workspace(vocab)], scratch.
    """
    row = row_of(logits, r)
    vocab = len(row)
    most, size = _most_blocks(vocab), _rounded(vocab)
    marks, pairs = workspace[:BLOCK], workspace[BLOCK:_FIXED].view(U32)
    at = _FIXED
    largest = workspace[at : at + 4 * most].view(F32)
    at += 4 * most
    words = workspace[at : at + 2 * most].view(U16)
    at += 2 * most
    block_marks = workspace[at : at + most]
    at += most
    ids = workspace[at : at + 4 * size].view(I32)
    at += 4 * size
    xs = workspace[at : at + 4 * size].view(F32)
    at += 4 * size
    scratch = workspace[at : at + 4 * size].view(F32)
    at += 4 * size

    noisy = temperature >= _GREEDY
    if noisy and (temperature == INFINITY or min_p > 1):
        return I64(-1), UNDECIDED_ROW
    limited_k = noisy and 0 < top_k < vocab
    k0, k1, k2 = row_keys(seed, position, stream, salt)
    blocks = blocks_in(0, limit)
    padded, padded_words = largest[blocks:], words[blocks:]
    with_words = noisy and not limited_k and not min_p > 0

    flags = 0
    nan, infinite = summarise_blocks(row, I64(0), limit, largest, with_words, words, k0, k1)
    if limit < vocab:
        more_nan, more_infinite = summarise_blocks(row, limit, vocab, padded, noisy, padded_words, k0, k1)
        nan, infinite = nan or more_nan, infinite or more_infinite
    if nan or infinite:
        flags |= _NONFINITE
    if nan:
        row = without_nan(row, workspace[at : at + 4 * size])
        summarise_blocks(row, I64(0), limit, largest, with_words, words, k0, k1)
        if limit < vocab:
            summarise_blocks(row, limit, vocab, padded, noisy, padded_words, k0, k1)

    best_logit = largest_of(largest[:blocks])
    best_padded = largest_of(padded[: blocks_in(limit, vocab)])
    x_max = F32(best_logit / temperature) if noisy else best_logit
    padded_max = F32(best_padded / temperature) if noisy else best_padded

    if x_max == MINUS_INFINITY:
        write_kept(row, r, limit, temperature, noisy, MINUS_INFINITY, MINUS_INFINITY, I64(-1), processed)
        return I64(-1), flags | _NO_CANDIDATE | (_PADDED if padded_max > MINUS_INFINITY else 0)
    if not noisy:
        write_kept(row, r, limit, temperature, noisy, MINUS_INFINITY, MINUS_INFINITY, I64(-1), processed)
        token = first_at_least(row, limit, largest, best_logit)
        return token, flags | (_PADDED if best_padded > best_logit else 0)
    if x_max == INFINITY:
        # Every finite score loses to it, and so do the filters; equal scores: lowest id.
        bound = least_logit(F32(INFINITY), temperature)
        write_kept(row, r, limit, temperature, noisy, bound, MINUS_INFINITY, I64(-1), processed)
        return first_at_least(row, limit, largest, bound), flags

    # What min_p leaves, as a bound on the logit.
    lowest_x = -LARGEST_FINITE
    if min_p > 0:
        lowest_x, decided = bound_of_min_p(x_max, min_p)
        if not decided:
            return I64(-1), UNDECIDED_ROW
    bound = least_logit(lowest_x, temperature)
    cut_x, cut_id = MINUS_INFINITY, I64(-1)

    if limited_k:
        if top_k <= blocks:
            for b in range(blocks):
                scratch[b] = largest[b]
            x = F32(nth_largest(scratch[:blocks], top_k) / temperature)
            if x > lowest_x:
                bound = least_logit(x, temperature)
        n = collect(row, limit, largest, bound, temperature, ids, xs, marks)
        if n > top_k:
            cut_x, cut_id = cut_of_top_k(ids[:n], xs[:n], top_k, scratch)
        ranked_x, ranked_id = cut_x, cut_id
        place, best, second = race_list(ids[:n], xs[:n], cut_x, cut_id, k0, k1, k2)
        while True:
            if is_tied(best, second):
                return I64(-1), UNDECIDED_ROW
            if not top_p < 1:
                break
            side = side_of_list_nucleus(ids[:n], xs[:n], ranked_x, ranked_id, top_p, x_max, place)
            if side == UNDECIDED:
                return I64(-1), UNDECIDED_ROW
            if side == INSIDE:
                break
            cut_x, cut_id = xs[place], I64(ids[place])
            place, best, second = race_list(ids[:n], xs[:n], cut_x, cut_id, k0, k1, k2)
        token = I64(ids[place])
    else:
        if min_p > 0:
            words_of_blocks(I64(0), limit, largest, bound, words, k0, k1)
        while True:
            token, best, second = race_blocks(
                row, I64(0), limit, largest, words, temperature, k0, k1, k2, bound, cut_x, cut_id, -INFINITY,
                marks, block_marks, pairs,
            )
            if is_tied(best, second):
                return I64(-1), UNDECIDED_ROW
            if not top_p < 1:
                break
            side = side_of_nucleus(row, limit, largest, temperature, top_p, bound, x_max, token)
            if side == UNDECIDED:
                return I64(-1), UNDECIDED_ROW
            if side == INSIDE:
                break
            cut_x, cut_id = F32(widen(row[token]) / temperature), token

    if padded_max > MINUS_INFINITY:
        if padded_max == INFINITY:
            flags |= _PADDED
        else:
            rival, rival_score, runner_up = race_blocks(
                row, limit, vocab, padded, padded_words, temperature, k0, k1, k2, MINUS_INFINITY, MINUS_INFINITY, I64(-1), best,
                marks, block_marks, pairs,
            )
            if is_tied(rival_score, runner_up):
                return I64(-1), UNDECIDED_ROW
            if rival >= 0:
                flags |= _PADDED
    if processed.shape[0] > 0:
        if top_p < 1:
            return I64(-1), UNDECIDED_ROW
        write_kept(row, r, limit, temperature, noisy, bound, cut_x, cut_id, processed)
    return token, flags
