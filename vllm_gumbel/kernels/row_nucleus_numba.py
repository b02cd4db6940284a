"""The exact boundary of the nucleus of a whole row in Numba, without listing the row.

`nucleus_numba` finds it in a list of all candidates, value by value; of 49,152 that takes a millisecond. Here all but
the last step is vector code:

1. one pass writes the tempered values and their masses in float32;
2. a search over values narrows the boundary down to a window: each step adds up the masses of what reaches three values
   between its ends, and goes on as long as their error (`_SLACK`) leaves no doubt;
3. within the window, a short list, `nucleus_numba` decides; that stands if the boundary lies farther than the error
   from either end of the mass of the id it cuts behind;
4. if not, as where no id has much of the mass, masses are added up in float64. If that leaves a doubt too, the order of
   a sum decides, and so the reference must.
"""

import math
from typing import Any

from vllm_gumbel.kernels.blocks_numba import BLOCK, blocks_in
from vllm_gumbel.kernels.floats_numba import MINUS_INFINITY, next_above, widen
from vllm_gumbel.kernels.jit_numba import (
    F32,
    F64,
    I32,
    I64,
    U8,
    U64,
    add_any_order,
    jit,
    multiply_add,
    use_widest_vectors,
)
from vllm_gumbel.kernels.masses_numba import mass, summation_slack
from vllm_gumbel.kernels.moments_numba import FARTHEST
from vllm_gumbel.kernels.nucleus_numba import cut_of_nucleus, exact_mass

_SLACK = 2.0**-15  # of float32 sums: masses within 4e-6, a block added in any order within 2^-16
_FEW = 256  # ids in a window that are not worth another step
_MOST_STEPS = 7  # of a quarter each: windows of 0.001 nats

_ROUNDING = F64(6755399441055744.0)  # 1.5 * 2^52, the trick of `masses_numba`
_PER_LN2 = F64(1 / math.log(2.0))
_LN2_HIGH, _LN2_LOW = F64(float.fromhex("0x1.62e42fee00000p-1")), F64(1.90821492927058770002e-10)
_FINE_FARTHEST = F64(-700.0)
_I2, _I3, _I4, _I5, _I6, _I7 = (F64(1 / math.factorial(n)) for n in range(2, 8))
_I8, _I9, _I10, _I11, _I12 = (F64(1 / math.factorial(n)) for n in range(8, 13))


@jit(inline=True)
def fine_mass(d: Any) -> Any:
    """Return exp(d) of a float64 d <= 0 within 2^-50 of it, as vector code; e^-700 for anything smaller.

    exp(d) = 2^n e^f with |f| <= ln 2 / 2, and e^f by Taylor's series up to f^12, which leaves out 2^-52. ln 2 in two
    parts: n times the first is exact.
    """
    d = d if d > _FINE_FARTHEST else _FINE_FARTHEST
    rounded = F64(F64(d * _PER_LN2) + _ROUNDING)
    n = F64(rounded - _ROUNDING)
    f = F64(F64(d - F64(n * _LN2_HIGH)) - F64(n * _LN2_LOW))
    p = multiply_add(_I12, f, _I11)
    p = multiply_add(p, f, _I10)
    p = multiply_add(p, f, _I9)
    p = multiply_add(p, f, _I8)
    p = multiply_add(p, f, _I7)
    p = multiply_add(p, f, _I6)
    p = multiply_add(p, f, _I5)
    p = multiply_add(p, f, _I4)
    p = multiply_add(p, f, _I3)
    p = multiply_add(p, f, _I2)
    p = multiply_add(p, f, F64(1))
    p = F64(multiply_add(p, f, F64(1)))
    return I64(p.view(I64) + I64(rounded.view(I64) << I64(52))).view(F64)


@jit(inline=True)
def write_masses(block: Any, temperature: Any, x_max: Any, lowest: Any, xs: Any, masses: Any) -> Any:
    """Write tempered values and masses of a block, -inf and 0 for x below `lowest`; return count and mass."""
    use_widest_vectors()
    count, total = I32(0), F32(0)
    for j in range(len(block)):
        x = F32(widen(block[j]) / temperature)
        d = F32(x - x_max)
        m = mass(d if d > FARTHEST else FARTHEST, F32(_PER_LN2), F32(0)) if x >= lowest else F32(0)
        xs[j] = x if x >= lowest else MINUS_INFINITY
        masses[j] = m
        count = I32(count + I32(x >= lowest))
        total = add_any_order(total, m)
    return count, total


@jit(inline=True)
def block_reaching(xs: Any, masses: Any, a: Any, b: Any, c: Any) -> Any:
    """Return how many values of a block reach each of three bounds, int32, and their masses, float32."""
    use_widest_vectors()
    n_a, n_b, n_c, m_a, m_b, m_c = I32(0), I32(0), I32(0), F32(0), F32(0), F32(0)
    for j in range(len(xs)):
        x, m = xs[j], masses[j]
        n_a, m_a = I32(n_a + I32(x >= a)), add_any_order(m_a, m if x >= a else F32(0))
        n_b, m_b = I32(n_b + I32(x >= b)), add_any_order(m_b, m if x >= b else F32(0))
        n_c, m_c = I32(n_c + I32(x >= c)), add_any_order(m_c, m if x >= c else F32(0))
    return n_a, n_b, n_c, m_a, m_b, m_c


@jit(inline=True)
def fine_mass_of(xs: Any, x_max: Any, bound: Any) -> Any:
    """Return the float64 mass of values, and of those that are at least `bound`; -inf counts as e^-700."""
    use_widest_vectors()
    total, above = F64(0), F64(0)
    for j in range(len(xs)):
        m = fine_mass(F64(F64(xs[j]) - F64(x_max)))
        total = add_any_order(total, m)
        above = add_any_order(above, m if xs[j] >= bound else F64(0))
    return total, above


@jit
def fine_masses(xs: Any, largest: Any, temperature: Any, lowest: Any, x_max: Any, bound: Any) -> Any:
    """Return the float64 mass of the values in blocks that reach `lowest`, and of those that are at least `bound`."""
    total, above = 0.0, 0.0
    for b in range(len(largest)):
        if F32(largest[b] / temperature) >= lowest:
            t, u = fine_mass_of(xs[b * BLOCK : min(b * BLOCK + BLOCK, len(xs))], x_max, bound)
            total, above = total + t, above + u
    return total, above


@jit
def reaching(xs: Any, masses: Any, largest: Any, temperature: Any, a: Any, b: Any, c: Any) -> Any:
    """Return ((a, count, mass), ...): how many values reach each of three ascending bounds, and their masses."""
    n_a, n_b, n_c, m_a, m_b, m_c = I64(0), I64(0), I64(0), 0.0, 0.0, 0.0
    for block in range(blocks_in(I64(0), len(xs))):
        if F32(largest[block] / temperature) >= a:
            first, last = block * BLOCK, min(block * BLOCK + BLOCK, len(xs))
            more = block_reaching(xs[first:last], masses[first:last], a, b, c)
            n_a, n_b, n_c = n_a + I64(more[0]), n_b + I64(more[1]), n_c + I64(more[2])
            m_a, m_b, m_c = m_a + F64(more[3]), m_b + F64(more[4]), m_c + F64(more[5])
    return (a, n_a, m_a), (b, n_b, m_b), (c, n_c, m_c)


@jit
def list_window(xs: Any, largest: Any, temperature: Any, low: Any, high: Any, ids: Any, values: Any, marks: Any) -> Any:
    """List the ids with low <= x < high, ascending, and their x; return how many there are. `values` may be `xs`."""
    use_widest_vectors()
    n, groups = I64(0), marks.view(U64)
    for b in range(blocks_in(I64(0), len(xs))):
        if F32(largest[b] / temperature) < low:
            continue
        first = b * BLOCK
        block = xs[first : min(first + BLOCK, len(xs))]
        for j in range(len(block)):
            marks[j] = U8(block[j] >= low) & U8(block[j] < high)
        for j in range(len(block), (len(block) + 7) & ~7):
            marks[j] = U8(0)
        for g in range((len(block) + 7) >> 3):
            if groups[g] == U64(0):
                continue
            for j in range(8 * g, 8 * g + 8):
                if marks[j] != 0:
                    ids[n], values[n] = I32(first + j), block[j]
                    n += 1
    return n


@jit
def cut_within(ids: Any, xs: Any, missing: Any, slack: Any, x_max: Any, top: Any, values: Any) -> Any:
    """Return the cut (x, id) of the shortest prefix of a list whose mass reaches `missing`, and whether it is certain.

    Args:
        ids, xs: int32 and float32 [n]; the list, ids ascending.
        missing: float64; mass, relative to that of `x_max`.
        slack: float64; error of `missing`. Certain means: the same wherever within it the true number lies.
        x_max: float32; largest tempered value of the row.
        top: whether the list begins with the first of the ranking, which is never left out.
        values: float32 [n], scratch.
    """
    total, _ = fine_mass_of(xs, x_max, x_max)
    cut_x, cut_id, decided = cut_of_nucleus(ids, xs, missing / total, x_max, values)
    _, before = fine_mass_of(xs, x_max, next_above(cut_x))
    ties = 0
    for j in range(len(ids)):
        ties += xs[j] == cut_x and ids[j] < cut_id
    mass_of_last = exact_mass(cut_x, x_max)
    before += (ties - 1) * mass_of_last
    reached = before + mass_of_last - missing > slack
    return cut_x, cut_id, decided and reached and (missing - before > slack or (top and before == 0.0))


@jit
def cut_of_row_nucleus(
    row: Any, limit: Any, largest: Any, temperature: Any, top_p: Any, lowest: Any, x_max: Any, scratch: Any
) -> Any:
    """Return the cut (x, id) of the shortest prefix whose mass reaches top_p of the total, and whether that is certain.

    Args:
        row: logits, no NaN.
        limit: number of ids that may be kept.
        largest: float32 [blocks]; block maxima.
        temperature: float32.
        top_p: float32 below 1.
        lowest: float32; smallest tempered value that the filters before left.
        x_max: float32, finite; largest tempered value.
        scratch: `Scratch`; `ids`, `xs`, `values` and `marks` are written.
    """
    xs, masses = scratch.xs[:limit], scratch.values[:limit]
    count, total = I64(0), 0.0
    for block in range(len(largest)):
        if F32(largest[block] / temperature) >= lowest:
            first, last = block * BLOCK, min(block * BLOCK + BLOCK, limit)
            n, m = write_masses(row[first:last], temperature, x_max, lowest, xs[first:last], masses[first:last])
            count, total = count + I64(n), total + F64(m)

    # What lies more than `depth` below the largest has less than half the mass that top_p leaves out: the search starts
    # there.
    share = F64(top_p)
    depth = math.log(2.0 * count / (1.0 - share))
    low, high, bottom = lowest, next_above(x_max), max(lowest, F32(F64(x_max) - depth))
    at_least_low, at_least_high, below, above = count, I64(0), total, 0.0
    for _ in range(_MOST_STEPS):
        quarter = F32(F32(high - bottom) * F32(0.25))
        a, b, c = F32(bottom + quarter), F32(bottom + F32(2) * quarter), F32(high - quarter)
        if at_least_low - at_least_high <= _FEW or not bottom < a < b < c < high:
            break
        for middle, n, m in reaching(xs, masses, largest, temperature, a, b, c):
            if m * (1 - _SLACK) > share * total * (1 + _SLACK):
                low, bottom, at_least_low, below = middle, middle, n, m
            elif m * (1 + _SLACK) < share * total * (1 - _SLACK):
                high, at_least_high, above = middle, n, m
                break

    ids, window, top = scratch.ids, at_least_low - at_least_high, at_least_high == 0
    slack = 2 * _SLACK * total
    if 2 * window <= limit and below - above > window * slack:
        # Room for the list and a copy beside the values, and masses that such a slack may tell apart.
        n = list_window(xs, largest, temperature, low, high, ids, masses, scratch.marks)
        listed, values = masses[:n], masses[n : 2 * n]
        cut_x, cut_id, decided = cut_within(ids[:n], listed, share * total - above, slack, x_max, top, values)
        if decided:
            return cut_x, cut_id, True
    if window < count:
        total, above = fine_masses(xs, largest, temperature, lowest, x_max, high)
    n = list_window(xs, largest, temperature, low, high, ids, xs, scratch.marks)
    if n == count:
        return cut_of_nucleus(ids[:n], xs[:n], top_p, x_max, masses)
    slack = summation_slack(total, count, False)
    return cut_within(ids[:n], xs[:n], share * total - above, slack, x_max, top, masses)
