"""The second launch: whether the winner of a race over everything lies in its nucleus, part by part.

The winner of a superset that lies in the subset is the winner of the subset. It lies in the nucleus exactly when the
mass ranked before it is below top_p of the total (or nothing is). Masses here are float32 exponentials: relative to the
total each sum is off by less than 2^-17 (argument 60 * 2^-24, exponential 2^-21, summation of a part 40 * 2^-24; what
is further than 30 below the largest weighs nothing). A mass nearer to its share than `SLACK` of the total is left open
and added up again in float64, by `settle_triton`.
"""

# mypy: allow-untyped-defs, disable-error-code="import-untyped"
# ruff: noqa: N803

import triton
import triton.language as tl

from vllm_gumbel.kernels.floats_triton import cut_of_min_p, load_logits, quotient, rank_key, without_nan
from vllm_gumbel.kernels.rows_triton import ABOVE, DONE, MASS, UNSURE, finish

SLACK = tl.constexpr(2.0**-15)


@triton.jit
def masses(x, keys, cut, winner, x_max):
    """Return the float32 masses of the values kept by `cut`, of those ranked before `winner` and of all.

    Args:
        x: float32, values.
        keys: uint64, their rank keys.
        cut, winner: uint64 keys.
        x_max: float32, finite.
    """
    mass = tl.where(keys >= cut, tl.exp(x - x_max), 0.0)
    return tl.sum(tl.where(keys > winner, mass, 0.0)), tl.sum(mass)


@triton.jit
def exact_masses(x, keys, cut, winner, x_max):
    """Return what `masses` does in float64."""
    mass = tl.where(keys >= cut, tl.exp(x.to(tl.float64) - x_max.to(tl.float64)), 0.0)
    return tl.sum(tl.where(keys > winner, mass, 0.0)), tl.sum(mass)


@triton.jit
def side_of(before, total, top_p, slack):
    """Return the state of a row: DONE if its winner lies in the nucleus, ABOVE if not, UNSURE if rounding decides.

    Args:
        before, total: float64 masses, ranked before the winner and of all.
        top_p: float32.
        slack: share of the total that the masses may be off together; 0 to decide in any case.
    """
    target = top_p.to(tl.float64) * total
    inside = (before == 0.0) | (before + slack * total < target)
    outside = before - slack * total >= target
    return tl.where(inside, DONE, tl.where(outside, ABOVE, UNSURE))


@triton.jit(do_not_specialize=["stream"], do_not_specialize_on_alignment=["slots", "positions"])
def nucleus_kernel(
    logits,
    stride,
    limit,
    slots,
    temperature,
    top_p,
    min_p,
    tokens,
    flags,
    counters,
    part_masses,
    row_scores,
    row_largest,
    row_states,
    PARTS: tl.constexpr,
    PARTS_TILE: tl.constexpr,
    TILE: tl.constexpr,
):
    """Finish the rows of state MASS whose winner lies in the nucleus; grid (rows * PARTS,).

    Args:
        logits, stride, limit, slots, temperature, top_p, min_p, counters: as in `rows_triton.rows_kernel`.
        tokens, flags: int64 and uint8 [rows]; the winner, and what was noticed.
        part_masses: float32 [2, rows, PARTS]; scratch.
        row_scores, row_largest, row_states: as `rows_triton.rows_kernel` left them; states are read and written.
    """
    row = (tl.program_id(0) // PARTS).to(tl.int64)
    part = tl.program_id(0) % PARTS
    if tl.load(row_states + row) != MASS:
        return
    slot = tl.load(slots + row)
    divisor = tl.load(temperature + slot)
    row_logits = logits + row * stride
    token = tl.load(tokens + row).to(tl.int32)
    x_max = quotient(tl.load(row_largest + row), divisor)
    winner = rank_key(quotient(tl.load(row_logits + token).to(tl.float32), divisor), token)
    ids = part * TILE + tl.arange(0, TILE)
    x = quotient(without_nan(load_logits(row_logits, ids, limit)), divisor)
    before, total = masses(x, rank_key(x, ids), cut_of_min_p(x_max, tl.load(min_p + slot)), winner, x_max)
    mine = tl.program_id(0)
    all_parts = tl.num_programs(0)
    tl.store(part_masses + mine, before)
    tl.store(part_masses + all_parts + mine, total)
    if tl.atomic_add(counters + row, 1, sem="acq_rel") != PARTS - 1:
        return
    tl.store(counters + row, 0)
    each = tl.arange(0, PARTS_TILE)
    there, parts = each < PARTS, part_masses + mine - part + each
    before = tl.sum(tl.load(parts, mask=there, other=0.0, cache_modifier=".cg").to(tl.float64))
    total = tl.sum(tl.load(parts + all_parts, mask=there, other=0.0, cache_modifier=".cg").to(tl.float64))
    state = side_of(before, total, tl.load(top_p + slot), SLACK)
    tl.store(row_states + row, state)
    if state == DONE:
        noticed = tl.load(flags + row).to(tl.int32)
        padded_score = tl.load(row_scores + all_parts // PARTS + row)
        finish(row, token, tl.load(row_scores + row), padded_score, noticed, tokens, flags)
