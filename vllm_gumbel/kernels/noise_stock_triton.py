"""The noise of vLLM's own Gumbel kernel (runner V2), so that a seeded request can get the token that stock gives it.

Facts of vLLM 0.31 to 0.33, `vllm/v1/worker/gpu/sample/gumbel.py`, which differ in nothing that a target token sees:

- A 32-bit hash per id: MurmurHash3_x86_32 (Appleby, public domain) of 16 bytes, whose words are the lower and upper
  half of the seed, the lower half of the position, and the id; initial value 0.
- float32: u = (hash + 1/2) / 2^32, put together from two halves of 16 bits; G = -ln(-ln(1 - u)), where ln(1 - u) is
  the series of degree 8 below 1/4 and a logarithm elsewhere, 1 - u being at least 2^-24 there.
- float64: u = (53 bits + 1/2) / 2^53 of two hashes, the upper one with initial value 0x9E3779B9; G = -ln(-ln(u)).
- The score is x + G in that precision, equal scores go to the lowest id, x = float32(logit) / temperature by Triton's
  own division, which is not correctly rounded on every GPU.

Equal tokens need equal arithmetic: terms are added here in the order that stock adds them.
"""

# mypy: allow-untyped-defs, disable-error-code="import-untyped"

import triton
import triton.language as tl

#: Releases of vLLM whose stock noise this file reproduces -> name of its variant; all share one so far.
STOCK_VARIANTS = {"0.31": "murmur3", "0.32": "murmur3", "0.33": "murmur3"}

_C1 = tl.constexpr(0xCC9E2D51)
_C2 = tl.constexpr(0x1B873593)
_C3 = tl.constexpr(0xE6546B64)
_F1 = tl.constexpr(0x85EBCA6B)
_F2 = tl.constexpr(0xC2B2AE35)
_UPPER_HASH = tl.constexpr(0x9E3779B9)
_KEY_BYTES = tl.constexpr(16)


@triton.jit
def _rotated(x, bits: tl.constexpr):
    return (x << bits) | (x >> (32 - bits))


@triton.jit
def _absorb(h, word):
    """Return the state `h` after one word of the key; uint32 both."""
    return _rotated(h ^ (_rotated(word * _C1, 15) * _C2), 13) * 5 + _C3


@triton.jit
def stock_hash(seed, position, ids, initial: tl.constexpr):
    """Return the uint32 hashes of `ids`, int32 of any shape, for an int64 seed and position."""
    h = _absorb(tl.full((), initial, tl.uint32), seed.to(tl.uint32))
    h = _absorb(h, (seed >> 32).to(tl.uint32))
    h = _absorb(h, position.to(tl.uint32))
    h = _absorb(h, ids.to(tl.uint32)) ^ _KEY_BYTES
    h = (h ^ (h >> 16)) * _F1
    h = (h ^ (h >> 13)) * _F2
    return h ^ (h >> 16)


@triton.jit
def _log_of_rest(u):
    """Return ln(1 - u), float32."""
    series = tl.zeros_like(u) + 0.125
    for n in tl.static_range(7, 0, -1):
        series = 1.0 / n + u * series
    return tl.where(u < 0.25, -u * series, tl.log(tl.maximum(1.0 - u, 5.960464477539063e-08)))


@triton.jit
def stock_scores(seed, position, ids, x, wide: tl.constexpr):
    """Return the scores x + G of `ids`, float32, or float64 if `wide`.

    Args:
        seed, position: int64 scalars.
        ids: int32 of any shape.
        x: float32 of that shape, tempered values.
        wide: whether noise and sum are float64.
    """
    lower = stock_hash(seed, position, ids, 0)
    if wide:
        upper = stock_hash(seed, position, ids, _UPPER_HASH)
        bits = ((upper.to(tl.uint64) << 32) | lower.to(tl.uint64)) >> 11
        u = (bits.to(tl.float64) + 0.5) * 1.1102230246251565e-16  # 2^-53
        u = tl.where(u == 1.0, u - 1.1102230246251565e-16, u)
        scores = x.to(tl.float64) - tl.log(-tl.log(u))
    else:
        high, low = (lower >> 16).to(tl.int32), (lower & 0xFFFF).to(tl.int32)
        u = high.to(tl.float32) * 1.52587890625e-05 + (low.to(tl.float32) + 0.5) * 2.3283064365386963e-10
        scores = x - tl.log(-_log_of_rest(u))
    return scores
