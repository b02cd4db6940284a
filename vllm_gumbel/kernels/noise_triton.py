"""The noise of `noise_reference` in Triton: the same words bit for bit, their exponential in float64.

E = -ln(1 - v) has to be accurate near v = 0, where log1p would be called for; Triton has none that every backend and
the interpreter share. With u = fl(1 - v), the rounding error of u is known exactly, since 1 - u is exact:

    -ln(1 - v) = -ln(u) * v / (1 - u)  (1 + a few 2^-53),   and v itself where u = 1

which is Kahan's log1p (Goldberg 1991, "What every computer scientist should know about floating-point arithmetic",
theorem 4). The tests compare it with `noise_reference.exponential` over the whole range: within 5e-16.

Everything here is a device function. Words are uint32 and uint64 throughout: Triton's literals are int32 unless they do
not fit, and take the type of the tensor they meet.
"""

# mypy: allow-untyped-defs, disable-error-code="import-untyped"

import triton
import triton.language as tl

from vllm_gumbel.kernels import noise_reference

_GOLDEN = tl.constexpr(noise_reference.GOLDEN)
_MIX_A = tl.constexpr(noise_reference.MIX_A)
_MIX_B = tl.constexpr(noise_reference.MIX_B)
_PAIR = tl.constexpr(noise_reference.PAIR)
_M1 = tl.constexpr(noise_reference.M1)
_M2 = tl.constexpr(noise_reference.M2)


@triton.jit
def mix64(z):
    """Return SplitMix64's finaliser of `z`, uint64."""
    z = (z ^ (z >> 30)) * _MIX_A
    z = (z ^ (z >> 27)) * _MIX_B
    return z ^ (z >> 31)


@triton.jit
def row_keys(seed, position, stream, salt):
    """Return the key words k0, k1 (uint32) and k2 (uint64) of a row from four 64-bit scalars, signed or not."""
    h = mix64(seed.to(tl.uint64) + _GOLDEN)
    h = mix64((h ^ position.to(tl.uint64)) + _GOLDEN)
    h = mix64((h ^ stream.to(tl.uint64)) + _GOLDEN)
    h = mix64((h ^ salt.to(tl.uint64)) + _GOLDEN)
    a = mix64(h + _GOLDEN)
    b = mix64(h + _GOLDEN + _GOLDEN)
    return a.to(tl.uint32), (a >> 32).to(tl.uint32), b


@triton.jit
def pair_words(k0, k1, pair):
    """Return the 32 bits, uint32, whose low half is h16 of id 2 * `pair` and whose high half that of the next id."""
    x = pair.to(tl.uint32) * _PAIR + k0
    x = (x ^ (x >> 16)) * _M1
    x = (x ^ (x >> 15) ^ k1) * _M2
    return x ^ (x >> 15)


@triton.jit
def noise_word(k0, k1, k2, token):
    """Return the 64-bit words h16 * 2^48 + r48 of `token`, int32 of any shape."""
    words = pair_words(k0, k1, token >> 1)
    upper = tl.where((token & 1) == 1, words >> 16, words & 0xFFFF)
    lower = mix64(k2 + (token.to(tl.uint64) + 1) * _GOLDEN) >> 16
    return (upper.to(tl.uint64) << 48) | lower


@triton.jit
def exponential(word):
    """Return E = -ln(1 - (word + 1/2) / 2^64), float64, finite and positive for every word."""
    near_one = (word >> 63) != 0
    from_end = tl.where(near_one, ~word, word)
    v = (from_end.to(tl.float64) + 0.5) * 5.421010862427522e-20  # 2^-64, exact in float32 too
    u = tl.where(near_one, v, 1.0 - v)
    log = tl.log(u)
    gap = tl.where(u == 1.0, 1.0, 1.0 - u)  # where u = 1 the logarithm is not used; nor may it divide by 0
    return tl.where(near_one, -log, tl.where(u == 1.0, v, -log * (v / gap)))


@triton.jit
def gumbel(k0, k1, k2, token):
    """Return G = -ln(E), float64, of `token`, int32 of any shape."""
    return -tl.log(exponential(noise_word(k0, k1, k2, token)))
