"""Normal noise on logits: a pure function of (seed, position, salt, token), in NumPy.

    z[2t]     = sqrt(2 E(2t)) * cos(2 pi v(2t + 1))
    z[2t + 1] = sqrt(2 E(2t)) * sin(2 pi v(2t + 1))

with E and v, the exponential and the uniform number of a token, in the stream `TAIL` (Box and Muller 1958). Half the
square of the radius is exponential, and E resolves both its ends, so the tails are right to 2^-64.

    boosted[i] = logit[i] + c * std(finite logits) * z[i]

Published as compensation for what coarse noise loses in the tail. The noise here loses nothing there, so this changes
the law: it adds randomness to the logits themselves, which flattens the distribution.
"""

import numpy as np
import numpy.typing as npt

from vllm_gumbel.kernels import noise_reference as noise
from vllm_gumbel.kernels.contract import Stream


def normal(seed: int, position: int, vocab: int, salt: int = 0) -> npt.NDArray[np.float64]:
    """Return z, float64 [vocab]: standard normal variates, independent between tokens."""
    words = noise.noise_words(seed, position, np.arange(vocab + vocab % 2), Stream.TAIL, salt)
    radius = np.sqrt(2 * noise.exponential(words[::2]))
    angle = 2 * np.pi * ((words[1::2].astype(np.float64) + 0.5) * 2.0**-64)
    return np.stack([radius * np.cos(angle), radius * np.sin(angle)], axis=1).ravel()[:vocab]


def boost(
    logits: npt.NDArray[np.float32], strength: float, seed: int, position: int, salt: int = 0
) -> npt.NDArray[np.float32]:
    """Return `logits`, float32 [vocab], with noise of `strength` standard deviations; what is not finite stays."""
    finite = np.isfinite(logits)
    if not finite.any():
        return logits
    spread = logits[finite].astype(np.float64).std()
    z = normal(seed, position, len(logits), salt)
    boosted = logits.astype(np.float64) + np.where(finite, strength * spread * z, 0.0)
    with np.errstate(over="ignore"):  # as in the tempered row, an overflow becomes an infinity
        return boosted.astype(np.float32)
