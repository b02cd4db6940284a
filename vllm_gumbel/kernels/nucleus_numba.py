"""The exact boundary of the nucleus in Numba, by selection instead of a sort.

Needed where the whole kept set is wanted, and for the rows that float32 masses leave open. A weighted quickselect: part
the values by a pivot, add up the masses of the larger ones in float64, go on in the side where top_p of the total is
reached. Expected time is linear in the number of candidates.
"""

import math
from typing import Any

from vllm_gumbel.kernels.floats_numba import MINUS_INFINITY
from vllm_gumbel.kernels.jit_numba import F64, I64, jit
from vllm_gumbel.kernels.masses_numba import summation_slack


@jit(inline=True)
def exact_mass(x: Any, x_max: Any) -> Any:
    """Return exp(x - x_max), float64."""
    return math.exp(F64(x) - F64(x_max))


@jit
def part(values: Any, low: Any, high: Any, pivot: Any) -> Any:
    """Order values `low` to `high` - 1 as larger, equal, smaller than `pivot`; return where the first two parts end."""
    i, larger, smaller = low, low, high
    while i < smaller:
        if values[i] > pivot:
            values[i], values[larger] = values[larger], values[i]
            larger += 1
            i += 1
        elif values[i] < pivot:
            smaller -= 1
            values[i], values[smaller] = values[smaller], values[i]
        else:
            i += 1
    return larger, smaller


@jit
def cut_of_nucleus(ids: Any, xs: Any, top_p: Any, x_max: Any, values: Any) -> Any:
    """Return the cut (x, id) of the shortest prefix whose mass reaches top_p of the total, and whether that is certain.

    Args:
        ids: int32 [n], ascending; n at least 1.
        xs: float32 [n]; tempered values.
        top_p: float32 below 1.
        x_max: float32, finite; the largest of `xs`.
        values: float32 [n], scratch.
    """
    n = len(ids)
    total, equal = 0.0, True
    for j in range(n):
        values[j] = xs[j]
        total += exact_mass(xs[j], x_max)
        equal = equal and xs[j] == x_max
    target, slack = F64(top_p) * total, summation_slack(total, n, equal)
    if target <= 0.0:
        return x_max, nth_tie(ids, xs, x_max, I64(1)), True

    above, low, high = (
        0.0,
        I64(0),
        I64(n),
    )  # the boundary lies in values low to high - 1; `above` is the mass before low
    while low < high:
        pivot = values[(low + high) >> 1]
        larger, smaller = part(values, low, high, pivot)
        before = above
        for j in range(low, larger):
            before += exact_mass(values[j], x_max)
        mass = exact_mass(pivot, x_max)
        upto = before + (smaller - larger) * mass
        if before > 0.0 and abs(before - target) <= slack and slack > 0.0:
            return pivot, I64(-1), False
        if before > 0.0 and before >= target:
            high = larger
        elif upto < target:
            if target - upto <= slack and slack > 0.0:
                return pivot, I64(-1), False
            above, low = upto, smaller
        else:
            count = max(I64(1), I64(math.ceil((target - before) / mass)))
            while count > 1 and before + (count - 1) * mass >= target:
                count -= 1
            while before + count * mass < target:
                count += 1
            reached, missed = before + count * mass - target, target - (before + (count - 1) * mass)
            if slack > 0.0 and (reached <= slack or (missed <= slack and (before > 0.0 or count > 1))):
                return pivot, I64(-1), False
            return pivot, nth_tie(ids, xs, pivot, count), True
    return MINUS_INFINITY, I64(-1), False


@jit(inline=True)
def nth_tie(ids: Any, xs: Any, x: Any, count: Any) -> Any:
    """Return one past the id of candidate number `count`, from 1, among those with value `x`."""
    for j in range(len(ids)):
        if xs[j] == x:
            count -= 1
            if count == 0:
                return I64(ids[j]) + I64(1)
    return I64(-1)
