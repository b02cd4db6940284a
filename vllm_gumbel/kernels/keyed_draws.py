"""Other ways to draw from one row after its filters, for requests that ask for them; in NumPy, a row at a time.

All of them see x, the tempered row with -inf for every id that the filters left out, and draw from the law

    P(i) proportional to exp(x[i] / s),   s in (0, 1]: the factor on the noise

`scaled_race` as argmax of x + s G: dividing by s changes no order, so that is the Gumbel race of x / s. `inverse_cdf`
by one uniform number: ids in ascending order own adjacent pieces of the mass, and the one that holds u is drawn
(Devroye 1986, "Non-uniform random variate generation", section III.2). s = 0 is the limit of both: the best id.

Equal scores give the lowest id; where some x are +inf, the lowest of those.
"""

import numpy as np
import numpy.typing as npt

from vllm_gumbel.kernels import noise_reference as noise
from vllm_gumbel.kernels.contract import Stream

Row = npt.NDArray[np.float32]


def uniform(seed: int, position: int, salt: int) -> float:
    """Return the one number of an inverse-CDF draw, in (0, 1]; uniform with 64 bits, of its own stream."""
    word = noise.noise_words(seed, position, np.zeros(1, np.int64), Stream.INVERSE_CDF, salt)
    return float((word[0].astype(np.float64) + 0.5) * 2.0**-64)


def inverse_cdf(x: Row, u: float, scale: float = 1.0) -> int:
    """Return the first id, ascending, whose cumulative mass exceeds u times the total.

    Args:
        x: float32 [vocab], -inf where not kept; something is kept.
        u: in [0, 1].
        scale: s of the law, in [0, 1].
    """
    largest = x.max()
    if scale == 0 or largest == np.inf:
        return int(np.argmax(x))
    ids = np.flatnonzero(x > -np.inf)
    cumulative = np.cumsum(np.exp((x[ids].astype(np.float64) - np.float64(largest)) / scale))
    above = np.flatnonzero(cumulative > u * cumulative[-1])
    if len(above):
        return int(ids[above[0]])
    # u rounded to 1: the last id that owns any mass.
    return int(ids[np.searchsorted(cumulative, cumulative[-1], side="left")])


def scaled_race(x: Row, seed: int, position: int, salt: int, scale: float) -> int:
    """Return the id of the largest x + s G, with the noise that the ordinary draw has.

    Args:
        x: float32 [vocab], -inf where not kept; something is kept.
        seed, position, salt: of the row.
        scale: s, in [0, 1].
    """
    ids = np.flatnonzero(x > -np.inf)
    score = x[ids].astype(np.float64)
    if scale > 0:
        score += scale * noise.gumbel(seed, position, ids, Stream.TARGET, salt)
    return int(ids[np.argmax(score)])


def mass_given_up(logits: Row, temperature: float, n: int) -> float:
    """Return the share of a row's mass, at its temperature, that its n best ids leave out; 0 where that is undefined.

    Args:
        logits: float32 [vocab], before temperature and filters.
        temperature: not greedy.
        n: at least 1.
    """
    values = logits[logits > -np.inf].astype(np.float64)  # a NaN compares as false
    if n >= len(values) or values.max() == np.inf:
        return 0.0
    mass = np.exp((values - values.max()) / np.float64(np.float32(temperature)))
    return float(np.partition(mass, len(mass) - n)[: len(mass) - n].sum() / mass.sum())
