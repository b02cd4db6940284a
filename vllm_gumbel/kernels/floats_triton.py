"""Rows and ranks in Triton: how a logit is read, tempered and put in the one order that every filter follows.

Ranking is one rule, value descending, then id ascending. As a 64-bit key, larger means better ranked:

    key(x, id) = order(x) * 2^32 + (2^32 - 1 - id)

where order(x) is the bits of x, mapped so that as unsigned integers they sort as the values do. No two ids tie,
every filter keeps the ids whose key reaches one number, its cut, and several filters keep the ids that reach the
largest of their cuts.
"""

# mypy: allow-untyped-defs, disable-error-code="import-untyped"

import triton
import triton.language as tl

_SIGN = tl.constexpr(0x80000000)

#: The cut that keeps every value above -inf: the key of the lowest finite float32 at the last id.
NO_CUT = tl.constexpr(0x0080000000000000)


@triton.jit
def load_logits(row, ids, limit):
    """Return float32 logits of a row at int32 `ids`, -inf from `limit` on; a NaN stays one."""
    return tl.load(row + ids, mask=ids < limit, other=float("-inf")).to(tl.float32)


@triton.jit
def without_nan(logits):
    """Return logits with -inf in place of NaN."""
    return tl.where(logits == logits, logits, float("-inf"))


@triton.jit
def quotient(logits, divisor):
    """Return logits / divisor, the correctly rounded float32 quotients."""
    return tl.div_rn(logits, divisor)


@triton.jit
def order(x):
    """Return the uint32 that sorts as x does, float32 without NaN; the two zeros are one value."""
    bits = tl.where(x == 0.0, 0.0, x).to(tl.uint32, bitcast=True)
    return tl.where(bits >= _SIGN, ~bits, bits | _SIGN)


@triton.jit
def value_of(ordered):
    """Return the float32 of an `order`."""
    return tl.where(ordered >= _SIGN, ordered ^ _SIGN, ~ordered).to(tl.float32, bitcast=True)


@triton.jit
def rank_key(x, ids):
    """Return the uint64 keys of values x, float32 without NaN, at int32 `ids`."""
    return (order(x).to(tl.uint64) << 32) | (~ids.to(tl.uint32)).to(tl.uint64)


@triton.jit
def cut_of_value(x):
    """Return the cut, uint64, that keeps every id of value x or more."""
    return order(x).to(tl.uint64) << 32


@triton.jit
def cut_of_min_p(x_max, min_p):
    """Return the cut, uint64, that keeps the values of at least x_max + ln(min_p); `NO_CUT` if min_p does not limit.

    The sum is float64 as in the reference; the smallest float32 that reaches it is one of two neighbours.
    """
    bound = x_max.to(tl.float64) + tl.log(tl.where(min_p > 0, min_p, 1.0).to(tl.float64))
    x = tl.maximum(bound, -3.4028234663852886e38).to(tl.float32)
    ordered = order(x) + (x.to(tl.float64) < bound).to(tl.uint32)
    return tl.where(min_p > 0, ordered.to(tl.uint64) << 32, NO_CUT)
