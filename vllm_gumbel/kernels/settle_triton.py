"""The third launch: the rows that filters still hold open, one program a row.

top-k. The k-th largest group maximum is a lower bound of the k-th value, since each of those k groups holds a logit at
least as large. The ids that reach it, after the division, are listed; if they fit into one tile, the cut is found there
by bisection on rank keys, and all that follows happens in registers. If not (k above the number of groups, or ties
without end) the cut is found by counting over the row, and what follows runs over the row.

top-p. While the winner lies outside: race among the ids ranked above it, and ask again. Expected rounds: at most
1 + ln(1/p).
"""

# mypy: allow-untyped-defs, disable-error-code="import-untyped"
# ruff: noqa: N803

import triton
import triton.language as tl

from vllm_gumbel.kernels.floats_triton import (
    NO_CUT,
    cut_of_min_p,
    load_logits,
    order,
    quotient,
    rank_key,
    value_of,
    without_nan,
)
from vllm_gumbel.kernels.nucleus_triton import SLACK, exact_masses, masses, side_of
from vllm_gumbel.kernels.race_triton import OWN, search, search_stock, upper_bound, upper_words
from vllm_gumbel.kernels.rows_triton import ABOVE, DONE, RESTART, UNSURE, finish, keys_of

BEST = tl.constexpr(0xFFFFFFFFFFFFFFFF)  #: above every rank key


@triton.jit
def race_of_tile(x, ids, keys, cut, row_logits, divisor, seed, position, k0, k1, k2, score, token, NOISE: tl.constexpr):
    """Return the best of (score, token) and of the ids of a tile whose key reaches `cut`."""
    takes_part = keys >= cut
    if NOISE == OWN:
        u = tl.where(takes_part, upper_bound(x, upper_words(k0, k1, ids)), float("-inf"))
        score, token = search(u, ids, row_logits, divisor, k0, k1, k2, score, token)
    else:
        logits = tl.load(row_logits + ids, mask=takes_part, other=float("-inf")).to(tl.float32)
        score, token = search_stock(logits, ids, takes_part, seed, position, divisor, score, token, NOISE)
    return score, token


@triton.jit
def nth_largest(keys, n):
    """Return the n-th largest of a tile of uint64, by bisection between numbers that are there; n at most their number.

    Every step halves the interval and then draws its ends in to the next keys, so that steps end when one is left.
    """
    low, high = tl.min(keys), tl.max(keys)
    while low < high:
        middle = low + ((high - low) >> 1)
        larger = keys > middle
        if tl.sum(larger.to(tl.int32)) < n:
            high = tl.max(tl.where(larger, tl.zeros_like(keys), keys))
        else:
            low = tl.min(tl.where(larger, keys, tl.zeros_like(keys) + BEST))
    return low


@triton.jit
def tile_of_row(row_logits, tile, limit, divisor, TILE: tl.constexpr):
    """Return values, ids and rank keys of tile number `tile` of a row."""
    ids = tile * TILE + tl.arange(0, TILE)
    x = quotient(without_nan(load_logits(row_logits, ids, limit)), divisor)
    return x, ids, rank_key(x, ids)


@triton.jit
def parted_row(row_logits, limit, divisor, cut, key, x_max, TILE: tl.constexpr, BY_MASS: tl.constexpr):
    """Return (weight, next_key, last_key): of the ids of a row that `cut` keeps, those ranked before `key` weigh
    `weight`, float64, their mass if BY_MASS, else their number; the lowest of their rank keys, `BEST` if there is none;
    the highest rank key of the others, 0 if there is none.
    """
    weight = tl.full((), 0.0, tl.float64)
    next_key, last_key = tl.full((), BEST, tl.uint64), tl.full((), 0, tl.uint64)
    for tile in range(tl.cdiv(limit, TILE)):
        x, _, keys = tile_of_row(row_logits, tile, limit, divisor, TILE)
        before = (keys > key) & (keys >= cut)
        weights = before.to(tl.float64)
        if BY_MASS:
            weights = tl.where(before, tl.exp(x.to(tl.float64) - x_max.to(tl.float64)), 0.0)
        weight += tl.sum(weights)
        next_key = tl.minimum(next_key, tl.min(tl.where(before, keys, tl.zeros_like(keys) + BEST)))
        last_key = tl.maximum(last_key, tl.max(tl.where(before | (keys < cut), tl.zeros_like(keys), keys)))
    return weight, next_key, last_key


@triton.jit
def cut_of_row(row_logits, limit, divisor, cut, share, x_max, TILE: tl.constexpr, BY_MASS: tl.constexpr):
    """Return the cut, uint64, of the shortest prefix of what `cut` keeps that weighs `share`, of at least one id.

    Args:
        row_logits, limit, divisor: the row.
        cut: uint64.
        share: float32, a share of the mass, if BY_MASS; else int32, a number of ids.
        x_max: float32, the largest value.
        TILE: ids held at a time.
        BY_MASS: what weighs.

    Returns:
        The rank key of the last id of the prefix; of the last id that `cut` keeps, or `BEST` if it keeps none, if all
        of them do not weigh that much.
    """
    total, low, _ = parted_row(row_logits, limit, divisor, cut, cut - 1, x_max, TILE, BY_MASS)
    _, _, high = parted_row(row_logits, limit, divisor, cut, tl.full((), BEST, tl.uint64), x_max, TILE, BY_MASS)
    target = share.to(tl.float64)
    if BY_MASS:
        target = target * total
    while low < high:
        # An id is in the prefix if what is ranked before it weighs less than the target.
        middle = low + ((high - low) >> 1)
        weight, next_key, last_key = parted_row(row_logits, limit, divisor, cut, middle, x_max, TILE, BY_MASS)
        if weight < target:
            high = last_key
        else:
            low = next_key
    return low


@triton.jit
def masses_of_row(row_logits, limit, divisor, cut, winner, x_max, TILE: tl.constexpr, EXACT: tl.constexpr):
    """Return the float64 masses of the ids that `cut` keeps, ranked before `winner` and of all; exact or nearly."""
    before, total = tl.full((), 0.0, tl.float64), tl.full((), 0.0, tl.float64)
    for tile in range(tl.cdiv(limit, TILE)):
        x, _, keys = tile_of_row(row_logits, tile, limit, divisor, TILE)
        if EXACT:
            more_before, more = exact_masses(x, keys, cut, winner, x_max)
        else:
            more_before, more = masses(x, keys, cut, winner, x_max)
        before += more_before.to(tl.float64)
        total += more.to(tl.float64)
    return before, total


@triton.jit
def nth_largest_group(group_largest, groups, n, GROUPS_TILE: tl.constexpr):
    """Return the n-th largest of a row's group maxima, float32; -inf if there are fewer."""
    group = tl.arange(0, GROUPS_TILE)
    largest = tl.load(group_largest + group, mask=group < groups, other=float("-inf"))
    ordered = nth_largest(order(largest).to(tl.uint64), tl.minimum(n, groups))
    return tl.where(n > groups, float("-inf"), value_of(ordered.to(tl.uint32)))


@triton.jit
def list_of_row(row_logits, limit, divisor, cut, list_ids, TILE: tl.constexpr, LIST: tl.constexpr):
    """List the ids of a row whose rank key reaches `cut`, the first LIST of them; return how many there are."""
    n = tl.full((), 0, tl.int32)
    for tile in range(tl.cdiv(limit, TILE)):
        _, ids, keys = tile_of_row(row_logits, tile, limit, divisor, TILE)
        reaches = (keys >= cut).to(tl.int32)
        place = n + tl.cumsum(reaches, 0) - 1
        tl.store(list_ids + place, ids, mask=(keys >= cut) & (place < LIST))
        n += tl.sum(reaches)
    tl.debug_barrier()  # other threads of this program read the list
    return n


@triton.jit
def draw_of_list(
    n, list_ids, cut, k, p, x_max, row_logits, divisor, seed, position, k0, k1, k2, LIST: tl.constexpr,
    NOISE: tl.constexpr,
):  # fmt: skip
    """Return (score, token) of the draw among the k best of n listed ids, as far as `cut` and top_p keep them."""
    place = tl.arange(0, LIST)
    ids = tl.load(list_ids + place, mask=place < n, other=0)
    x = quotient(tl.load(row_logits + ids, mask=place < n, other=float("-inf")).to(tl.float32), divisor)
    keys = tl.where(place < n, rank_key(x, ids), tl.zeros([LIST], tl.uint64))
    if n > k:
        cut = tl.maximum(cut, nth_largest(keys, k))
    score, token = tl.full((), float("-inf"), tl.float64), tl.full((), -1, tl.int32)
    race_cut = cut
    state = tl.full((), ABOVE, tl.int32)
    while state != DONE:
        score, token = race_of_tile(
            x, ids, keys, race_cut, row_logits, divisor, seed, position, k0, k1, k2,
            tl.full((), float("-inf"), tl.float64), tl.full((), -1, tl.int32), NOISE,
        )  # fmt: skip
        state = tl.full((), DONE, tl.int32)
        if (token >= 0) & (p < 1.0):
            winner = key_of(token, row_logits, divisor)
            before, total = exact_masses(x, keys, cut, winner, x_max)
            state = side_of(before, total, p, 0.0)
            race_cut = winner + 1
    return score, token


@triton.jit
def draw_of_row(
    state, score, token, cut, p, x_max, limit, row_logits, divisor, seed, position, k0, k1, k2, TILE: tl.constexpr,
    NOISE: tl.constexpr,
):  # fmt: skip
    """Return (score, token) of the draw among the ids of a row that `cut` and top_p keep, from what `state` says."""
    while state != DONE:
        if state != UNSURE:
            race_cut = cut
            if state == ABOVE:
                race_cut = tl.maximum(cut, key_of(token, row_logits, divisor) + 1)
            score, token = tl.full((), float("-inf"), tl.float64), tl.full((), -1, tl.int32)
            for tile in range(tl.cdiv(limit, TILE)):
                x, ids, keys = tile_of_row(row_logits, tile, limit, divisor, TILE)
                score, token = race_of_tile(
                    x, ids, keys, race_cut, row_logits, divisor, seed, position, k0, k1, k2, score, token, NOISE
                )
        state = tl.full((), DONE, tl.int32)
        if (token >= 0) & (p < 1.0):
            winner = key_of(token, row_logits, divisor)
            before, total = masses_of_row(row_logits, limit, divisor, cut, winner, x_max, TILE, False)
            state = side_of(before, total, p, SLACK)
            if state == UNSURE:
                before, total = masses_of_row(row_logits, limit, divisor, cut, winner, x_max, TILE, True)
                state = side_of(before, total, p, 0.0)
    return score, token


@triton.jit
def key_of(token, row_logits, divisor):
    """Return the rank key, uint64, of one id."""
    return rank_key(quotient(tl.load(row_logits + token).to(tl.float32), divisor), token)


@triton.jit(do_not_specialize=["stream"], do_not_specialize_on_alignment=["slots", "positions"])
def settle_kernel(
    logits,
    stride,
    vocab,
    limit,
    slots,
    positions,
    temperature,
    top_k,
    top_p,
    min_p,
    seed,
    salt,
    stream,
    tokens,
    flags,
    group_largest,
    groups,
    lists,
    row_scores,
    row_largest,
    row_states,
    TILE: tl.constexpr,
    GROUPS_TILE: tl.constexpr,
    LIST: tl.constexpr,
    HAS_TOP_K: tl.constexpr,
    NOISE: tl.constexpr,
):
    """Finish every row that is not DONE; grid (rows,).

    Args:
        groups: number of group maxima of a row.
        lists: int32 [rows, LIST] if HAS_TOP_K, scratch.
        others: as in `rows_triton.rows_kernel`; tokens, flags and row_* are read.
    """
    row = tl.program_id(0).to(tl.int64)
    state = tl.load(row_states + row)
    if state == DONE:
        return
    slot = tl.load(slots + row)
    divisor = tl.load(temperature + slot)
    seed_bits, position = tl.load(seed + slot), tl.load(positions + row)
    k0, k1, k2 = keys_of(row, slot, positions, seed, salt, stream)
    row_logits = logits + row * stride
    k, p = tl.load(top_k + slot), tl.load(top_p + slot)
    x_max = quotient(tl.load(row_largest + row), divisor)
    cut = tl.maximum(cut_of_min_p(x_max, tl.load(min_p + slot)), tl.full((), NO_CUT, tl.uint64))
    token = tl.load(tokens + row).to(tl.int32)
    score = tl.load(row_scores + row)
    if HAS_TOP_K:
        n = tl.full((), LIST + 1, tl.int32)
        list_ids = lists + row * LIST
        if state == RESTART:
            least = nth_largest_group(group_largest + row * groups, groups, k, GROUPS_TILE)
            cut = tl.maximum(cut, order(quotient(least, divisor)).to(tl.uint64) << 32)
            n = list_of_row(row_logits, limit, divisor, cut, list_ids, TILE, LIST)
        if n <= LIST:
            score, token = draw_of_list(
                n, list_ids, cut, k, p, x_max, row_logits, divisor, seed_bits, position, k0, k1, k2, LIST, NOISE
            )
        else:
            if state == RESTART:
                cut = cut_of_row(row_logits, limit, divisor, cut, k, x_max, TILE, False)
            score, token = draw_of_row(
                state, score, token, cut, p, x_max, limit, row_logits, divisor, seed_bits, position, k0, k1, k2, TILE,
                NOISE,
            )  # fmt: skip
    else:
        score, token = draw_of_row(
            state, score, token, cut, p, x_max, limit, row_logits, divisor, seed_bits, position, k0, k1, k2, TILE, NOISE
        )
    noticed = tl.load(flags + row).to(tl.int32)
    padded_score = tl.load(row_scores + tl.num_programs(0) + row)
    finish(row, token, score, padded_score, noticed, tokens, flags)
