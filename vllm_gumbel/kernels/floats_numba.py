"""Logits as the kernels read them: three dtypes, their order as integers, and what a division does to that order.

A logit is a float32, a uint16 that holds the bits of a bfloat16, or an int16 that holds those of a float16: Numba has
no arithmetic for either, and knows the two apart by the integer's sign.

Order keys: reading a float's bits as a signed integer orders positive floats; flipping the other bits of the negative
ones orders them too, NaN beyond the infinities of their sign. The largest and the smallest key of a row therefore say
everything about NaN and +inf, and a maximum of integers becomes vector code without promising the compiler that there
is no NaN. (-0 is below +0 here; what compares keys must not care.)

A tempered value is `x = float32(logit / temperature)`, correctly rounded, so x does not decrease as the logit grows.
Hence every filter that is a bound on x is also a bound on the logit, found once a row by bisection, and no token needs
the division.
"""

from typing import Any

from numba import types
from numba.extending import overload

from vllm_gumbel.kernels.jit_numba import F32, I16, I32, I64, U16, U32, jit

KEY_INFINITY = I32(0x7F800000)
MINUS_INFINITY, PLUS_INFINITY = F32("-inf"), F32("inf")
LARGEST_FINITE = F32(3.4028234663852886e38)


@jit(inline=True)
def key_of_float(value: Any) -> Any:
    """Return the order key of a float32, int32."""
    bits = F32(value).view(I32)
    return I32(bits ^ I32(I32(bits >> I32(31)) & I32(0x7FFFFFFF)))


@jit(inline=True)
def float_of_key(key: Any) -> Any:
    """Return the float32 of an order key."""
    bits = I32(key)
    return I32(bits ^ I32(I32(bits >> I32(31)) & I32(0x7FFFFFFF))).view(F32)


@jit(inline=True)
def key_of_half(bits: Any) -> Any:
    """Return the order key of a float of 16 bits, int16."""
    word = I16(bits)
    return I16(word ^ I16(I16(word >> I16(15)) & I16(0x7FFF)))


@jit(inline=True)
def float_of_bfloat16(bits: Any) -> Any:
    """Return the float32 of a bfloat16: its upper half."""
    return U32(U32(bits) << U32(16)).view(F32)


@jit(inline=True)
def float_of_float16(bits: Any) -> Any:
    """Return the float32 of a float16: moved to its place it is 2^112 too small, exactly; infinity and NaN are not."""
    word = U32(U16(bits))
    moved = U32(U32(word & U32(0x7FFF)) << U32(13))
    scaled = F32(moved.view(F32) * F32(2.0**112)).view(U32)
    magnitude = U32(moved | U32(0x7F800000)) if moved >= U32(0x0F800000) else scaled
    return U32(magnitude | U32(U32(word & U32(0x8000)) << U32(16))).view(F32)


def widen(logit: Any) -> Any:
    """Return a logit as float32."""
    if logit.dtype == F32:
        return logit
    return float_of_bfloat16(logit) if logit.dtype == U16 else float_of_float16(logit)


def order_key(logit: Any) -> Any:
    """Return the order key of a logit, int32 or int16."""
    return key_of_float(logit) if logit.dtype == F32 else key_of_half(logit)


def widen_key(key: Any, logit: Any) -> Any:
    """Return the float32 of the order key of a logit; `logit` is any one, for its dtype."""
    if logit.dtype == F32:
        return float_of_key(key)
    return widen(key_of_half(key).view(logit.dtype))


def infinity_key(logit: Any) -> Any:
    """Return the order key of +inf in the dtype of `logit`; that of -inf is its complement."""
    if logit.dtype == F32:
        return KEY_INFINITY
    return I16(0x7F80) if logit.dtype == U16 else I16(0x7C00)


def minus_infinity(logit: Any) -> Any:
    """Return -inf in the dtype of `logit`."""
    if logit.dtype == F32:
        return MINUS_INFINITY
    return U16(0xFF80) if logit.dtype == U16 else I16(0xFC00 - 2**16)


@overload(widen, strict=False)
def _widen(logit: Any) -> Any:
    if logit == types.float32:
        return lambda logit: logit
    if logit == types.uint16:
        return lambda logit: float_of_bfloat16(logit)
    return lambda logit: float_of_float16(logit)


@overload(order_key, strict=False)
def _order_key(logit: Any) -> Any:
    if logit == types.float32:
        return lambda logit: key_of_float(logit)
    return lambda logit: key_of_half(logit)


@overload(widen_key, strict=False)
def _widen_key(key: Any, logit: Any) -> Any:
    if logit == types.float32:
        return lambda key, logit: float_of_key(key)
    if logit == types.uint16:
        return lambda key, logit: float_of_bfloat16(U16(key_of_half(key)))
    return lambda key, logit: float_of_float16(key_of_half(key))


@overload(infinity_key, strict=False)
def _infinity_key(logit: Any) -> Any:
    if logit == types.float32:
        return lambda logit: KEY_INFINITY
    if logit == types.uint16:
        return lambda logit: I16(0x7F80)
    return lambda logit: I16(0x7C00)


@overload(minus_infinity, strict=False)
def _minus_infinity(logit: Any) -> Any:
    if logit == types.float32:
        return lambda logit: MINUS_INFINITY
    if logit == types.uint16:
        return lambda logit: U16(0xFF80)
    return lambda logit: I16(0xFC00 - 2**16)


@jit(inline=True)
def next_above(x: Any) -> Any:
    """Return the smallest float32 above a finite `x`; above either zero it is the smallest subnormal."""
    return float_of_key(I32(key_of_float(x if x != F32(0) else F32(0)) + I32(1)))


@jit
def least_logit(bound: Any, temperature: Any) -> Any:
    """Return the smallest float32 whose rounded quotient by `temperature` is at least `bound`; +inf if none finite is.

    Bisection over order keys; the quotient of the product is a first guess that is nearly always within a few keys.

    Args:
        bound: float32, above -inf.
        temperature: float32, finite and positive.
    """
    guess = I64(key_of_float(F32(bound * temperature)))
    low, high = ~I64(KEY_INFINITY), I64(KEY_INFINITY)  # the quotient of -inf is below the bound, of +inf above
    if guess - 4 > low and guess + 4 < high:
        if F32(float_of_key(guess - 4) / temperature) < bound:
            low = guess - 4
        if F32(float_of_key(guess + 4) / temperature) >= bound:
            high = guess + 4
    while high - low > 1:
        middle = (low + high) >> 1
        if F32(float_of_key(middle) / temperature) >= bound:
            high = middle
        else:
            low = middle
    return float_of_key(high)
