"""top-p in Numba without a sort: is the winner of the race in the nucleus?

The nucleus is the shortest prefix of the ranking (value descending, id ascending) whose mass reaches top_p of the
total. So id w belongs to it exactly when the mass ranked before it is below top_p of the total, and the first of the
ranking always does. A race over everything therefore needs one question about one token. If the answer is no, the
nucleus lies within what is ranked above w, and the race is run again over that; with u = mass share before the winner
uniform on the ranking, the expected number of races is at most 1 + ln(1 / top_p).

Masses are added in float32 with an error that is known: first roughly, within 1 / 32, which answers nine rows in ten,
then finely, which answers all but about one row in 10,000. For those
`nucleus_numba` finds the boundary in float64; what even that leaves open (a difference of 1e-10, where the order of a
sum decides) goes to the reference.

Error of the float32 masses, relative to the sum: 2^y is a polynomial of degree 4 on [-1/2, 1/2], within 2^-18 after
rounding; y = (x - max) / ln 2 is computed as logit * c - max c with an absolute error below 2^-24 * 1.4427 * (3 |x| + 3
|max|) + 2^-23 |y|, and where it matters (x > max - 64, the rest is below e^-64 of the largest mass each) |x| <= |max| +
64; a block of 256 is added in any order, within 2^-16. Together below 2^-15 + 2^-20 (|max| + 64).
"""

import math
from typing import Any

from vllm_gumbel.kernels.blocks_numba import BLOCK, blocks_in
from vllm_gumbel.kernels.floats_numba import PLUS_INFINITY, least_logit, next_above, widen
from vllm_gumbel.kernels.jit_numba import F32, F64, I32, add_any_order, jit, multiply_add, use_widest_vectors

#: Answers of `side_of_nucleus`.
OUTSIDE, INSIDE, UNDECIDED = 0, 1, 2

_ROUNDING = F32(
    12582912.0
)  # 1.5 * 2^23: adding and subtracting it rounds to an integer, and leaves that in the low bits
_LOWEST = F32(-126.0)
_ROUGH_BIAS, _ONE_BITS, _LEAST_BITS = F32(127 - math.log2(1.0303)), F32(2.0**23), F32(2.0**23)
# 2^f on [-1/2, 1/2], relative error below 2.6e-6
_C0, _C1, _C2 = F32(0.9999992847442627), F32(0.6931217908859253), F32(0.240247443318367)
_C3, _C4 = F32(0.05591785907745361), F32(0.009570101276040077)


@jit(inline=True)
def mass(logit: Any, slope: Any, shift: Any) -> Any:
    """Return about exp(logit / T - max), float32; 2^-126 for anything smaller.

    Args:
        logit: float32.
        slope: float32, 1 / (T ln 2).
        shift: float32, -max / (T ln 2) of the logits.
    """
    y = multiply_add(logit, slope, shift)
    y = y if y > _LOWEST else _LOWEST
    rounded = F32(y + _ROUNDING)
    f = F32(y - F32(rounded - _ROUNDING))
    p = multiply_add(_C4, f, _C3)
    p = multiply_add(p, f, _C2)
    p = multiply_add(p, f, _C1)
    p = F32(multiply_add(p, f, _C0))
    return I32(p.view(I32) + I32(rounded.view(I32) << I32(23))).view(F32)


@jit(inline=True)
def rough_mass(logit: Any, slope: Any, shift: Any) -> Any:
    """Return what `mass` does within 1 / 32 of it.

    2^(n + f) as 2^n (1 + f), which is up to 6.2% too much, less half of that; `slope` and `shift` are of
    `rough_slopes`.
    """
    bits = multiply_add(logit, slope, shift)
    return I32(bits if bits > _LEAST_BITS else _LEAST_BITS).view(F32)


@jit(inline=True)
def rough_slopes(slope: Any, shift: Any) -> Any:
    """Return slope and shift that give, instead of y, the bits of a float32 near 2^y (`blocks_numba` has the trick)."""
    return F32(slope * _ONE_BITS), F32((shift + _ROUGH_BIAS) * _ONE_BITS)


@jit(inline=True)
def block_masses(block: Any, slope: Any, shift: Any, bound: Any, above: Any, rough: Any) -> Any:
    """Return the mass of the logits of a block that reach `above`, and of those that reach `bound`; float32.

    `rough` asks for `rough_mass`.
    """
    use_widest_vectors()
    upper, total = F32(0), F32(0)
    for j in range(len(block)):
        logit = widen(block[j])
        m = rough_mass(logit, slope, shift) if rough else mass(logit, slope, shift)
        upper = add_any_order(upper, m if logit >= above else F32(0))
        total = add_any_order(total, m if logit >= bound else F32(0))
    return upper, total


@jit(inline=True)
def maxima_mass(largest: Any, slope: Any, shift: Any, bound: Any, above: Any) -> Any:
    """Return the mass of the block maxima that reach `bound` but not `above`: at least one id of each block."""
    use_widest_vectors()
    total = F32(0)
    for b in range(len(largest)):
        m = mass(largest[b], slope, shift)
        total = add_any_order(total, m if largest[b] >= bound and largest[b] < above else F32(0))
    return total


@jit
def side_of_nucleus(
    logits: Any, stop: Any, largest: Any, temperature: Any, top_p: Any, bound: Any, x_max: Any, token: Any
) -> Any:
    """Return whether a token is INSIDE or OUTSIDE the nucleus, or UNDECIDED where rounding decides.

    Args:
        logits: one row, no NaN.
        stop: one past the last id.
        largest: float32 [blocks].
        temperature: float32.
        top_p: float32 below 1.
        bound: float32; smallest logit that the filters before left.
        x_max: float32, finite; largest tempered value.
        token: id of the winner.
    """
    use_widest_vectors()
    x = F32(widen(logits[token]) / temperature)
    tied = least_logit(x, temperature)
    above = least_logit(next_above(x), temperature) if x < x_max else PLUS_INFINITY
    per_ln2 = 1.0 / (math.log(2.0) * F64(temperature))
    fine_slope, fine_shift = F32(per_ln2), F32(-F64(x_max) / math.log(2.0))
    fine = 2.0**-15 + 2.0**-20 * (abs(F64(x_max)) + 64.0)
    blocks = blocks_in(0, stop)
    for attempt in range(2):
        rough = attempt == 0
        slack = fine + 2.0**-5 if rough else fine
        slope, shift = rough_slopes(fine_slope, fine_shift) if rough else (fine_slope, fine_shift)
        if slack > 0.25:
            continue
        upper, total = 0.0, 0.0
        for b in range(blocks):
            if largest[b] >= tied:
                u, t = masses_around(logits, b, stop, slope, shift, bound, tied, above, token, rough)
                upper, total = upper + F64(u), total + F64(t)
        # Of the other blocks the maxima will often do; only if not are they added up.
        least = total + F64(maxima_mass(largest[:blocks], fine_slope, fine_shift, bound, tied))
        if upper == 0.0 or upper * (1 + slack) < top_p * least * (1 - slack):
            return INSIDE
        for b in range(blocks):
            if largest[b] >= bound and largest[b] < tied:
                _, t = block_masses(logits[b * BLOCK : min(b * BLOCK + BLOCK, stop)], slope, shift, bound, tied, rough)
                total += F64(t)
        if upper * (1 + slack) < top_p * total * (1 - slack):
            return INSIDE
        if upper * (1 - slack) > top_p * total * (1 + slack):
            return OUTSIDE
    return UNDECIDED


@jit(inline=True)
def masses_around(
    logits: Any, b: Any, stop: Any, slope: Any, shift: Any, bound: Any, tied: Any, above: Any, token: Any, rough: Any
) -> Any:
    """Return the mass of a block that is ranked before `token`, and all of its mass; ids before `token` win ties."""
    first = b * BLOCK
    last = min(first + BLOCK, stop)
    if token >= last:
        return block_masses(logits[first:last], slope, shift, bound, tied, rough)
    if token < first:
        return block_masses(logits[first:last], slope, shift, bound, above, rough)
    upper, total = block_masses(logits[first:token], slope, shift, bound, tied, rough)
    more, rest = block_masses(logits[token:last], slope, shift, bound, above, rough)
    return upper + more, total + rest


@jit
def side_of_list_nucleus(xs: Any, top_p: Any, x_max: Any, place: Any) -> Any:
    """Return what `side_of_nucleus` returns, by exact masses, for one of a short list of candidates.

    Args:
        xs: float32 [n]; tempered values, ids ascending.
        top_p: float32.
        x_max: float32, finite.
        place: index of the winner in the list.
    """
    if not top_p < 1:
        return INSIDE
    upper, total, equal = 0.0, 0.0, True
    x_winner = xs[place]
    for j in range(len(xs)):
        equal = equal and xs[j] == x_max
        m = math.exp(F64(xs[j]) - F64(x_max))
        total += m
        if xs[j] > x_winner or (xs[j] == x_winner and j < place):
            upper += m
    if upper == 0.0:
        return INSIDE
    target = F64(top_p) * total
    slack = summation_slack(total, len(xs), equal)
    if upper < target - slack:
        return INSIDE
    return OUTSIDE if upper >= target + slack else UNDECIDED


@jit(inline=True)
def summation_slack(total: Any, count: Any, equal: Any) -> Any:
    """Return how far two float64 sums of `count` masses up to `total` may lie apart; masses of 1 add up exactly."""
    return 0.0 if equal else (count + 64) * 2.0**-51 * total
