"""The draw in NumPy: obviously slow, obviously right, the definition for every other backend.

Tokens equal `argmax over keep of x[i] + G(seed, position, i)` (`kernels/__init__.py` states the operation as a loop).
Adding Gumbel noise to log-probabilities and taking the largest draws exactly from the distribution (Gumbel 1954;
Yellott 1977; Maddison, Tarlow, Minka 2014, "A* sampling", section 2).

Ranking is one rule everywhere: value descending, then id ascending. Masses are float64.
"""

import numpy as np
import numpy.typing as npt

from vllm_gumbel.kernels import noise_reference as noise
from vllm_gumbel.kernels.contract import (
    GREEDY_TEMPERATURE,
    NO_TOKEN,
    Draw,
    Flag,
    Logits,
    RowParams,
    Stream,
    check,
    widen,
)

Row = npt.NDArray[np.float32]
Mask = npt.NDArray[np.bool_]


def draw(
    logits: Logits,
    params: RowParams,
    *,
    usable_vocab: int | None = None,
    stream: Stream = Stream.TARGET,
    processed: npt.NDArray[np.float32] | None = None,
) -> Draw:
    """Draw one token per row.

    Args:
        logits: float32, float16 or uint16 (bits of bfloat16) [rows, vocab], any strides; not changed. Widened to
            float32 before anything else.
        params: temperature, filters, seed, position and salt, one entry a row.
        usable_vocab: ids from here on are unknown to the tokenizer and never drawn; None means that all are known.
        stream: family of noise.
        processed: float32 [rows, vocab] to receive x after the filters, -inf where not kept; None if not wanted. May be
            `logits` itself if that is float32.

    Returns:
        The tokens and what was noticed about each row.

    Raises:
        TypeError, ValueError: arguments break the contract (`contract.check`).
    """
    limit = check(logits, params, usable_vocab)
    rows = logits.shape[0]
    tokens = np.empty(rows, np.int64)
    flags = np.zeros(rows, np.uint8)
    for r in range(rows):
        x, flags[r] = clean(widen(logits[r]))
        t = params.temperature[r]
        if t >= GREEDY_TEMPERATURE:
            x = scale(x, t)
        padded = x.copy()
        x[limit:] = -np.inf
        keep = kept(x, params.top_k[r], params.top_p[r], params.min_p[r]) if t >= GREEDY_TEMPERATURE else x > -np.inf
        if processed is not None:
            processed[r] = np.where(keep, x, np.float32(-np.inf))
        noisy = t >= GREEDY_TEMPERATURE
        keys = (int(params.seed[r]), int(params.position[r]), int(stream), int(params.salt[r])) if noisy else None
        tokens[r] = race(x, keep, keys)
        if tokens[r] == NO_TOKEN:
            flags[r] |= Flag.NO_CANDIDATE
        if limit < len(x):
            padding = np.arange(len(x)) >= limit
            if race(padded, keep | (padding & (padded > -np.inf)), keys) >= limit:
                flags[r] |= Flag.PADDED
    return Draw(tokens, flags)


def clean(logits: Row) -> tuple[Row, int]:
    """Return a row with every NaN replaced by -inf, and whether it held a NaN or +inf."""
    nan = np.isnan(logits)
    nonfinite = nan.any() or np.isposinf(logits).any()
    return np.where(nan, np.float32(-np.inf), logits), Flag.NONFINITE if nonfinite else 0


def scale(x: Row, temperature: np.float32) -> Row:
    """Return x / temperature, the correctly rounded float32 quotient; an overflow becomes an infinity of its sign."""
    with np.errstate(over="ignore"):
        return x / np.float32(temperature)


def kept(x: Row, top_k: int, top_p: float, min_p: float) -> Mask:
    """Return which ids of a tempered row the filters leave: min_p, then top-k, then top-p on what top-k left.

    top-k keeps exactly k ids, top-p the shortest prefix of the ranking whose share of the remaining mass reaches top_p
    (Holtzman et al. 2020, section 3.1), never none. A row whose largest value is +inf keeps the ids that reach it.
    """
    keep = x > -np.inf
    if not keep.any():
        return keep
    largest = x.max()
    if largest == np.inf:
        return x == np.inf
    if min_p > 0:
        keep &= x.astype(np.float64) >= np.float64(largest) + np.log(np.float64(min_p))
    ranked = None
    if 0 < top_k < len(x):
        ranked = rank(x, keep)[:top_k]
    if top_p < 1 and keep.any():
        ranked = rank(x, keep) if ranked is None else ranked
        mass = np.cumsum(np.exp(x[ranked].astype(np.float64) - np.float64(largest)))
        ranked = ranked[: 1 + np.searchsorted(mass, np.float64(top_p) * mass[-1], side="left")]
    if ranked is not None:
        keep = np.zeros(len(x), bool)
        keep[ranked] = True
    return keep


def rank(x: Row, keep: Mask) -> npt.NDArray[np.intp]:
    """Return the kept ids, best first: value descending, then id ascending."""
    ids = np.flatnonzero(keep)
    return ids[np.argsort(-x[ids], kind="stable")]


def race(x: Row, keep: Mask, keys: tuple[int, int, int, int] | None) -> int:
    """Return the kept id of the largest score, the lowest id of several, `NO_TOKEN` if nothing is kept.

    Args:
        x: tempered row.
        keep: ids that take part.
        keys: (seed, position, stream, salt) of the noise; None means greedy, without noise.
    """
    ids = np.flatnonzero(keep)
    if not len(ids):
        return NO_TOKEN
    score = x[ids].astype(np.float64)
    if keys is not None:
        seed, position, stream, salt = keys
        score += noise.gumbel(seed, position, ids, stream, salt)
    return int(ids[np.argmax(score)])
