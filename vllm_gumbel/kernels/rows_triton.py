"""The first launch: one program a part of a row, and the last of a row to finish puts its parts together.

Each program reads its ids once and leaves its winner, the best score past the tokenizer's size, its largest logit,
whether it saw a NaN or +inf, and for a top-k the largest logit of every group of ids. The last one, found by a counter
in device memory that it sets back to 0, writes token and flags if no filter can change them, and else what the next
launches need (`State`).
"""

# mypy: allow-untyped-defs, disable-error-code="import-untyped"
# ruff: noqa: N803

from enum import IntEnum

import triton
import triton.language as tl

from vllm_gumbel.kernels.contract import GREEDY_TEMPERATURE, NO_TOKEN, Flag
from vllm_gumbel.kernels.floats_triton import cut_of_min_p, load_logits, quotient, rank_key, without_nan
from vllm_gumbel.kernels.noise_triton import pair_words, row_keys
from vllm_gumbel.kernels.race_triton import NOWHERE, OWN, search, search_stock, upper_bound

_GREEDY = tl.constexpr(GREEDY_TEMPERATURE)
_NO_TOKEN = tl.constexpr(NO_TOKEN)
_NONFINITE = tl.constexpr(int(Flag.NONFINITE))
_NO_CANDIDATE = tl.constexpr(int(Flag.NO_CANDIDATE))
_PADDED = tl.constexpr(int(Flag.PADDED))
_HUGE = tl.constexpr(1e38)


class State(IntEnum):
    """What a row still needs after a launch."""

    DONE = 0  #: nothing
    MASS = 1  #: the mass ranked before its winner, which passes min_p
    UNSURE = 2  #: that mass in float64
    ABOVE = 3  #: a race among the ids ranked above its winner, which some filter refused
    RESTART = 4  #: everything: a top-k


DONE, MASS, UNSURE, ABOVE, RESTART = (tl.constexpr(int(state)) for state in State)


@triton.jit
def finish(row, token, score, padded_score, flags, tokens_out, flags_out):
    """Write the token, `NO_TOKEN` if it is negative, and the flags of a row.

    Args:
        row: int64, index of the row.
        token, score: int32 and float64 of the winner, -1 and -inf if there is none.
        padded_score: float64, best score of an id past the tokenizer's size.
        flags: int32, what was noticed before.
        tokens_out, flags_out: int64 and uint8 [rows].
    """
    missing = tl.where(token < 0, _NO_CANDIDATE, 0)
    padded = tl.where(padded_score > score, _PADDED, 0)
    tl.store(tokens_out + row, tl.where(token < 0, _NO_TOKEN, token).to(tl.int64))
    tl.store(flags_out + row, (flags | missing | padded).to(tl.uint8))


@triton.jit
def keys_of(row, slot, positions, seed, salt, stream):
    """Return the key words of a row."""
    return row_keys(tl.load(seed + slot), tl.load(positions + row), stream, tl.load(salt + slot))


@triton.jit
def winner_of_tile(
    logits, ids, first_pair, row_logits, divisor, noisy, seed, position, k0, k1, k2, NOISE: tl.constexpr
):
    """Return (score, token) of the winner of a tile, -inf and -1 if it has no candidate.

    Args:
        logits: float32 [pairs, 2], no NaN, -inf where an id does not take part.
        ids: int32 [pairs, 2].
        first_pair: int32, half the first id.
        row_logits: pointer to the row.
        divisor: float32; the temperature, or 1 for a greedy row.
        noisy: int1; False for a greedy row.
        seed, position: int64, for stock's noise.
        k0, k1, k2: key words, for ours.
        NOISE: kind of noise.
    """
    x_max = quotient(tl.max(logits), divisor)
    score = tl.full((), float("-inf"), tl.float64)
    token = tl.full((), -1, tl.int32)
    if noisy & (tl.abs(x_max) < float("inf")):
        if NOISE == OWN:
            x = logits * tl.div_rn(1.0, divisor)
            if tl.abs(x_max) > _HUGE:  # where the approximate quotient could overflow
                x = quotient(logits, divisor)
            words = pair_words(k0, k1, first_pair + tl.arange(0, logits.shape[0]))
            u = upper_bound(x, tl.join(words & 0xFFFF, words >> 16))
            score, token = search(u, ids, row_logits, divisor, k0, k1, k2, score, token)
        else:
            takes_part = logits > float("-inf")
            score, token = search_stock(logits, ids, takes_part, seed, position, divisor, score, token, NOISE)
    elif x_max > float("-inf"):
        # No noise decides: a greedy row, or +inf, which every finite score loses to.
        token = tl.min(tl.where(quotient(logits, divisor) == x_max, ids, NOWHERE))
        score = x_max.to(tl.float64)
    return score, token


@triton.jit(do_not_specialize=["stream"], do_not_specialize_on_alignment=["slots", "positions"])
def rows_kernel(
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
    tokens_out,
    flags_out,
    counters,
    part_scores,
    part_largest,
    part_tokens,
    group_largest,
    row_scores,
    row_largest,
    row_states,
    PARTS: tl.constexpr,
    PARTS_TILE: tl.constexpr,
    TILE: tl.constexpr,
    GROUP: tl.constexpr,
    HAS_PADDING: tl.constexpr,
    FILTERED: tl.constexpr,
    HAS_TOP_K: tl.constexpr,
    NOISE: tl.constexpr,
):
    """Draw rows as if no filter applied; grid (rows * PARTS,).

    Args:
        logits: [rows, vocab], unit column stride; float32, bfloat16 or float16.
        stride: elements from row to row.
        vocab, limit: ids of a row, and how many may be drawn.
        slots: int32 [rows].
        positions: int64 [rows].
        temperature, top_k, top_p, min_p, seed, salt: [slots], as `SlotParams`.
        stream: int32.
        tokens_out, flags_out: int64 and uint8 [rows].
        counters: int32 [rows or more], 0 before and after.
        part_scores: float64 [2, rows, PARTS]; the winner's and the best past the tokenizer's size.
        part_largest: float32 [rows, PARTS], largest logit.
        part_tokens: int32 [2, rows, PARTS]; the winner, and 1 where a NaN or +inf was seen.
        group_largest: float32 [rows, PARTS * TILE / GROUP] if HAS_TOP_K.
        row_scores, row_largest, row_states: float64 [2, rows], float32 [rows], int32 [rows] if FILTERED; the same for
            whole rows, and their `State`.
    """
    row = (tl.program_id(0) // PARTS).to(tl.int64)
    part = tl.program_id(0) % PARTS
    slot = tl.load(slots + row)
    if slot < 0:
        if part == 0:
            tl.store(tokens_out + row, tl.full((), _NO_TOKEN, tl.int64))
            tl.store(flags_out + row, tl.full((), 0, tl.uint8))
            if FILTERED:
                tl.store(row_states + row, DONE)
        return
    t = tl.load(temperature + slot)
    noisy = t >= _GREEDY
    divisor = tl.where(noisy, t, 1.0)
    seed_bits, position = tl.load(seed + slot), tl.load(positions + row)
    k0, k1, k2 = row_keys(seed_bits, position, stream, tl.load(salt + slot))
    row_logits = logits + row * stride

    ids = part * TILE + tl.arange(0, TILE)
    values = load_logits(row_logits, ids, vocab)
    nonfinite = tl.max(tl.where(values < float("inf"), 0, 1))
    values = without_nan(values)
    if HAS_TOP_K:
        usable = tl.where(ids < limit, values, float("-inf"))
        groups: tl.constexpr = TILE // GROUP
        where = (row * PARTS + part) * groups + tl.arange(0, groups)
        tl.store(group_largest + where, tl.max(tl.reshape(usable, [groups, GROUP]), axis=1))
    # Two ids to a row: they share one 32-bit word of noise.
    values = tl.reshape(values, [TILE // 2, 2])
    ids = tl.reshape(ids, [TILE // 2, 2])
    first_pair = part * (TILE // 2)
    padded_score = tl.full((), float("-inf"), tl.float64)
    if HAS_PADDING:
        if (part + 1) * TILE > limit:
            past = tl.where(ids < limit, float("-inf"), values)
            padded_score, _ = winner_of_tile(
                past, ids, first_pair, row_logits, divisor, noisy, seed_bits, position, k0, k1, k2, NOISE
            )
        values = tl.where(ids < limit, values, float("-inf"))
    score, token = winner_of_tile(
        values, ids, first_pair, row_logits, divisor, noisy, seed_bits, position, k0, k1, k2, NOISE
    )
    largest = tl.max(values)

    mine = tl.program_id(0)
    all_parts = tl.num_programs(0)
    tl.store(part_scores + mine, score)
    tl.store(part_scores + all_parts + mine, padded_score)
    tl.store(part_largest + mine, largest)
    tl.store(part_tokens + mine, token)
    tl.store(part_tokens + all_parts + mine, nonfinite)
    if tl.atomic_add(counters + row, 1, sem="acq_rel") != PARTS - 1:
        return
    tl.store(counters + row, 0)
    each = tl.arange(0, PARTS_TILE)
    there, parts = each < PARTS, mine - part + each
    # Written by other programs: read past the first-level cache, which other multiprocessors do not keep coherent.
    scores = tl.load(part_scores + parts, mask=there, other=float("-inf"), cache_modifier=".cg")
    padded = tl.load(part_scores + all_parts + parts, mask=there, other=float("-inf"), cache_modifier=".cg")
    largest = tl.max(tl.load(part_largest + parts, mask=there, other=float("-inf"), cache_modifier=".cg"))
    winners = tl.load(part_tokens + parts, mask=there, other=NOWHERE, cache_modifier=".cg")
    flags = tl.max(tl.load(part_tokens + all_parts + parts, mask=there, other=0, cache_modifier=".cg")) * _NONFINITE
    padded_score = tl.max(padded)
    score = tl.max(scores)
    token = tl.where(score > float("-inf"), tl.min(tl.where(scores == score, winners, NOWHERE)), -1)
    if FILTERED:
        state = first_state(row_logits, token, slot, vocab, largest, divisor, noisy, top_k, top_p, min_p)
        tl.store(row_states + row, state)
        tl.store(row_scores + row, score)
        tl.store(row_scores + all_parts // PARTS + row, padded_score)
        tl.store(row_largest + row, largest)
        if state != DONE:
            tl.store(tokens_out + row, token.to(tl.int64))
            tl.store(flags_out + row, flags.to(tl.uint8))
            return
    finish(row, token, score, padded_score, flags, tokens_out, flags_out)


@triton.jit
def first_state(row_logits, token, slot, vocab, largest, divisor, noisy, top_k, top_p, min_p):
    """Return the state, int32, of a row after the race of all its ids; arguments as in `rows_kernel`."""
    x_max = quotient(largest, divisor)
    state = tl.full((), DONE, tl.int32)
    if noisy & (tl.abs(x_max) < float("inf")):
        k, p, least = tl.load(top_k + slot), tl.load(top_p + slot), tl.load(min_p + slot)
        x = quotient(tl.load(row_logits + token).to(tl.float32), divisor)
        state = tl.where(p < 1.0, MASS, DONE)
        state = tl.where(rank_key(x, token) < cut_of_min_p(x_max, least), ABOVE, state)
        state = tl.where((k > 0) & (k < vocab), RESTART, state)
    return state
