"""The draw of one row in Numba: which filter is decided how. The parts are in the other `*_numba` modules.

What goes to the reference (`UNDECIDED_ROW`), since only its own order of operations can decide it as it does:

- two finalists' scores, or a mass and its share, closer than two machines' logarithms and sums agree;
- a temperature that is infinite or a min_p above 1, which no request may ask for.
"""

from typing import Any

from vllm_gumbel.kernels.blocks_numba import (
    BLOCK,
    blocks_in,
    first_at_least,
    first_block_at_least,
    largest_of,
    summarise_blocks,
    without_nan,
    words_of_blocks,
)
from vllm_gumbel.kernels.contract import GREEDY_TEMPERATURE, Flag
from vllm_gumbel.kernels.floats_numba import MINUS_INFINITY, PLUS_INFINITY, least_logit, widen
from vllm_gumbel.kernels.jit_numba import F32, I64, jit, row_of
from vllm_gumbel.kernels.masses_numba import INSIDE, UNDECIDED, side_of_list_nucleus, side_of_nucleus
from vllm_gumbel.kernels.noise_numba import row_keys
from vllm_gumbel.kernels.nucleus_numba import cut_of_nucleus
from vllm_gumbel.kernels.race_numba import INFINITY, is_tied, race_blocks, race_list
from vllm_gumbel.kernels.scratch_numba import scratch_of
from vllm_gumbel.kernels.select_numba import (
    bound_of_min_p,
    collect,
    list_top_k,
    write_kept,
)

#: Bit in a row's flags that says: the reference has to draw it. Never leaves `sample_numba`.
UNDECIDED_ROW = 128

_GREEDY = F32(GREEDY_TEMPERATURE)
_NONFINITE, _NO_CANDIDATE, _PADDED = int(Flag.NONFINITE), int(Flag.NO_CANDIDATE), int(Flag.PADDED)


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
        workspace: uint8 [bytes_of_workspace(vocab)].
    """
    row = row_of(logits, r)
    vocab = len(row)
    scratch = scratch_of(workspace, vocab)
    largest, words = scratch.largest, scratch.words
    blocks = blocks_in(I64(0), limit)
    padded, padded_words = largest[blocks:], words[blocks:]
    noisy = temperature >= _GREEDY
    top_k = I64(top_k) if noisy and 0 < top_k < vocab else I64(0)
    if noisy and (temperature == INFINITY or min_p > 1):
        return I64(-1), UNDECIDED_ROW
    keys = row_keys(seed, position, stream, salt)
    # A float32 row takes longer to read than the noise to compute; of a shorter one, min_p may spare most of the noise.
    with_words = noisy and top_k == 0 and (row.itemsize > 2 or not min_p > 0)

    flags = 0
    nan, infinite = summarise_blocks(row, I64(0), limit, largest, with_words, words, keys)
    if limit < vocab:
        more_nan, more_infinite = summarise_blocks(row, limit, vocab, padded, noisy, padded_words, keys)
        nan, infinite = nan or more_nan, infinite or more_infinite
    if nan or infinite:
        flags |= _NONFINITE
    if nan:
        row = without_nan(row, scratch.clean)
        summarise_blocks(row, I64(0), limit, largest, with_words, words, keys)
        if limit < vocab:
            summarise_blocks(row, limit, vocab, padded, noisy, padded_words, keys)

    best = largest_of(largest[:blocks])
    best_padded = largest_of(padded[: blocks_in(limit, vocab)])
    divisor = temperature if noisy else F32(1)
    x_max, x_padded = F32(best / divisor), F32(best_padded / divisor)
    bound, cut_x, cut_id = MINUS_INFINITY, MINUS_INFINITY, I64(-1)
    if not noisy or abs(x_max) == PLUS_INFINITY:
        # No noise decides: greedy, no candidate, or infinities, which every finite score and every filter loses to.
        if x_max == PLUS_INFINITY:
            bound = least_logit(PLUS_INFINITY, divisor) if noisy else MINUS_INFINITY
        token = I64(-1)
        if x_max == MINUS_INFINITY:
            flags |= _NO_CANDIDATE
        else:
            bar = bound if noisy else best
            token = first_at_least(row, BLOCK * first_block_at_least(largest[:blocks], bar), limit, bar)
        if x_padded > x_max:
            flags |= _PADDED
        write_kept(row, r, limit, divisor, bound, cut_x, cut_id, processed)
        return token, flags

    lowest_x, decided = bound_of_min_p(x_max, min_p)
    bound = least_logit(lowest_x, temperature)
    if not decided:
        return I64(-1), UNDECIDED_ROW
    wanted = processed.shape[0] > 0
    if top_k > 0:
        token, score, bound, cut_x, cut_id, decided = draw_from_list(
            row, limit, temperature, top_k, top_p, x_max, lowest_x, bound, keys, wanted, scratch
        )
    else:
        if not with_words:
            words_of_blocks(I64(0), limit, largest, bound, words, keys)
        token, score, cut_x, cut_id, decided = draw_from_row(
            row, limit, temperature, top_p, x_max, bound, keys, wanted, scratch
        )
    if not decided:
        return I64(-1), UNDECIDED_ROW

    if x_padded > MINUS_INFINITY:
        rival, rival_score, runner_up = race_blocks(
            row, limit, vocab, padded, padded_words, temperature, keys, MINUS_INFINITY, MINUS_INFINITY, I64(-1), score,
            scratch,
        )  # fmt: skip
        if is_tied(rival_score, runner_up):
            return I64(-1), UNDECIDED_ROW
        if rival >= 0:
            flags |= _PADDED
    if wanted:
        write_kept(row, r, limit, divisor, bound, cut_x, cut_id, processed)
    return token, flags


@jit
def draw_from_list(
    row: Any,
    limit: Any,
    temperature: Any,
    top_k: Any,
    top_p: Any,
    x_max: Any,
    lowest_x: Any,
    bound: Any,
    keys: Any,
    wanted: Any,
    scratch: Any,
) -> Any:
    """Draw with a top-k: among the k candidates, listed.

    Args:
        row: logits, no NaN.
        limit: number of ids that may be drawn.
        temperature, top_k, top_p: parameters, 0 < top_k.
        x_max: float32, finite; largest tempered value.
        lowest_x, bound: float32; smallest tempered value and smallest logit that min_p left.
        keys: key words.
        wanted: whether the kept set is wanted.
        scratch: `Scratch`, summarised.

    Returns:
        (token, score, bound, cut_x, cut_id, decided): the winner; smallest logit and cut of the kept set if wanted;
        False if the reference has to decide.
    """
    n, _, bound, cut_x, cut_id = list_top_k(row, limit, temperature, top_k, lowest_x, bound, scratch)
    ids, xs = scratch.ids[:n], scratch.xs[:n]

    below_x, below_id = MINUS_INFINITY, I64(-1)
    while True:
        place, score, second = race_list(ids, xs, below_x, below_id, keys)
        if is_tied(score, second):
            return I64(-1), score, bound, cut_x, cut_id, False
        side = side_of_list_nucleus(xs, top_p, x_max, place)
        if side == UNDECIDED:
            return I64(-1), score, bound, cut_x, cut_id, False
        if side == INSIDE:
            break
        below_x, below_id = xs[place], I64(ids[place])
    token, decided = I64(ids[place]), True
    if wanted and top_p < 1:
        cut_x, cut_id, decided = cut_of_nucleus(ids, xs, top_p, x_max, scratch.values)
    return token, score, bound, cut_x, cut_id, decided


@jit
def draw_from_row(
    row: Any,
    limit: Any,
    temperature: Any,
    top_p: Any,
    x_max: Any,
    bound: Any,
    keys: Any,
    wanted: Any,
    scratch: Any,
) -> Any:
    """Draw without a top-k: among all logits that reach `bound`. Arguments as `draw_from_list`.

    Returns:
        (token, score, cut_x, cut_id, decided).
    """
    cut_x, cut_id, exact = MINUS_INFINITY, I64(-1), False
    if top_p < 1 and wanted:
        n = collect(row, limit, bound, temperature, scratch)
        cut_x, cut_id, decided = cut_of_nucleus(scratch.ids[:n], scratch.xs[:n], top_p, x_max, scratch.values)
        exact = True
        if not decided:
            return I64(-1), -INFINITY, cut_x, cut_id, False
    while True:
        token, score, second = race_blocks(
            row, I64(0), limit, scratch.largest, scratch.words, temperature, keys, bound, cut_x, cut_id, -INFINITY,
            scratch,
        )  # fmt: skip
        if is_tied(score, second):
            return I64(-1), score, cut_x, cut_id, False
        if exact or not top_p < 1:
            return token, score, cut_x, cut_id, True
        side = side_of_nucleus(row, limit, scratch.largest, temperature, top_p, bound, x_max, token)
        if side == INSIDE:
            return token, score, cut_x, cut_id, True
        if side == UNDECIDED:
            n = collect(row, limit, bound, temperature, scratch)
            cut_x, cut_id, decided = cut_of_nucleus(scratch.ids[:n], scratch.xs[:n], top_p, x_max, scratch.values)
            exact = True
            if not decided:
                return I64(-1), score, cut_x, cut_id, False
        else:
            cut_x, cut_id = F32(widen(row[token]) / temperature), token
