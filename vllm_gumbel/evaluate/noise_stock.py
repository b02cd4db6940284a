"""The noise of vLLM's own Gumbel kernel (runner V2) in NumPy, for records of servers without this package.

The law is described in `kernels/noise_stock_triton.py`, whose function this is, term by term: a 32-bit MurmurHash3 of
seed, position and id; G in float32, or in float64 where the server runs with vLLM's `use_fp64_gumbel`. Logarithms of a
GPU may differ from NumPy's in the last bit or two of a float32, about 1e-6 in G, which the tolerance for precision in
`likelihood.py` covers.
"""

import numpy as np
import numpy.typing as npt

Words = npt.NDArray[np.uint32]
Noise = npt.NDArray[np.float32] | npt.NDArray[np.float64]

_C1 = np.uint32(0xCC9E2D51)
_C2 = np.uint32(0x1B873593)
_C3 = np.uint32(0xE6546B64)
_F1 = np.uint32(0x85EBCA6B)
_F2 = np.uint32(0xC2B2AE35)
_UPPER_HASH = 0x9E3779B9
_KEY_BYTES = np.uint32(16)


def hash32(seed: int, position: int, ids: npt.NDArray[np.integer], initial: int = 0) -> Words:
    """Return MurmurHash3_x86_32 of (lower and upper half of `seed`, lower half of `position`, id), a word an id."""
    halves = (seed & 0xFFFFFFFF, (seed >> 32) & 0xFFFFFFFF, position & 0xFFFFFFFF)
    h = np.full(ids.shape, initial, np.uint32)
    with np.errstate(over="ignore"):  # wrapping is the operation
        for half in halves:
            h = _absorbed(h, np.full(ids.shape, half, np.uint32))
        h = _absorbed(h, ids.astype(np.uint32)) ^ _KEY_BYTES
        h = (h ^ (h >> np.uint32(16))) * _F1
        h = (h ^ (h >> np.uint32(13))) * _F2
        return h ^ (h >> np.uint32(16))


def gumbel(seed: int, position: int, ids: npt.NDArray[np.integer], *, wide: bool = False) -> Noise:
    """Return G of `ids` for one row.

    Args:
        seed: of the request, modulo 2^64.
        position: of the row.
        ids: token ids, any shape.
        wide: float64, as with `use_fp64_gumbel`; float32 otherwise.
    """
    lower = hash32(seed, position, ids)
    if wide:
        upper = hash32(seed, position, ids, _UPPER_HASH)
        bits = ((upper.astype(np.uint64) << np.uint64(32)) | lower.astype(np.uint64)) >> np.uint64(11)
        u = (bits.astype(np.float64) + 0.5) * 2.0**-53
        return -np.log(-np.log(np.where(u == 1.0, u - 2.0**-53, u)))
    high, low = (lower >> np.uint32(16)).astype(np.float32), (lower & np.uint32(0xFFFF)).astype(np.float32)
    u32 = high * np.float32(2.0**-16) + (low + np.float32(0.5)) * np.float32(2.0**-32)
    return -np.log(-_log_of_rest(u32))


def _absorbed(h: Words, word: Words) -> Words:
    """Return the state after one word of the key."""
    return _rotated(h ^ (_rotated(word * _C1, 15) * _C2), 13) * np.uint32(5) + _C3


def _rotated(x: Words, bits: int) -> Words:
    return (x << np.uint32(bits)) | (x >> np.uint32(32 - bits))


def _log_of_rest(u: npt.NDArray[np.float32]) -> npt.NDArray[np.float32]:
    """Return ln(1 - u): a series of degree 8 below 1/4, a logarithm elsewhere; float32 throughout."""
    series = np.full_like(u, 0.125)
    for n in range(7, 0, -1):
        series = np.float32(1.0 / n) + u * series
    direct = np.log(np.maximum(np.float32(1.0) - u, np.float32(5.960464477539063e-08)))
    return np.where(u < np.float32(0.25), -u * series, direct)
