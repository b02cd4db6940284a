"""Row statistics in NumPy, float64: the definition for every other backend; `RowStatistics` says what each means.

The kept set is the one that `sample_reference` draws from, by the same functions.
"""

import math

import numpy as np
import numpy.typing as npt

from vllm_gumbel.kernels import noise_reference as noise
from vllm_gumbel.kernels.contract import GREEDY_TEMPERATURE, Logits, RowParams, Stream, widen
from vllm_gumbel.kernels.sample_reference import Row, clean, kept, scale
from vllm_gumbel.kernels.statistics import IMPROBABLE_BELOW, RowStatistics, check, log_threshold


def statistics(
    logits: Logits,
    params: RowParams,
    tokens: npt.NDArray[np.int64],
    rows: npt.NDArray[np.int64],
    *,
    usable_vocab: int | None = None,
    stream: Stream = Stream.TARGET,
    improbable_below: float = IMPROBABLE_BELOW,
) -> RowStatistics:
    """Return the statistics of some rows of a batch.

    Args:
        logits: float32, float16 or uint16 (bits of bfloat16) [batch, vocab], as they were drawn from; not changed.
        params: temperature, filters, seed, position and salt, one entry a row of the batch.
        tokens: int64 [batch]; the drawn ids. One that is no id of the row, such as `NO_TOKEN`, is not a kept id.
        rows: int64 [n]; indices of the rows that are looked at.
        usable_vocab: ids from here on are unknown to the tokenizer and never drawn; None means that all are known.
        stream: family of noise that the draw had.
        improbable_below: threshold of `improbable_mass`, a probability.

    Returns:
        n entries, in the order of `rows`.

    Raises:
        TypeError, ValueError: arguments break the contract (`statistics.check`).
    """
    limit = check(logits, params, tokens, rows, usable_vocab, improbable_below)
    found, threshold = RowStatistics.unknown(len(rows)), log_threshold(improbable_below)
    for i, r in enumerate(rows):
        logit, _ = clean(widen(logits[r]))
        logit[limit:] = -np.inf
        greedy = not params.temperature[r] >= GREEDY_TEMPERATURE
        x = logit if greedy else scale(logit, params.temperature[r])
        keep = x == x.max(initial=-np.inf) if greedy else kept(x, params.top_k[r], params.top_p[r], params.min_p[r])
        ids = np.flatnonzero(keep)[: 1 if greedy else None]
        if not len(ids) or not np.isfinite(x[ids]).all():
            continue
        # Differences from the largest first: sums of large logits would lose what matters.
        below, total = from_largest(x[ids])
        log_p = below - total
        p = np.exp(log_p)
        place = np.flatnonzero(ids == tokens[r])
        below_1, total_1 = from_largest(logit)
        found.kept[i] = len(ids)
        found.log_total[i] = x[ids].max().astype(np.float64) + total
        found.surprisal[i] = -log_p[place[0]] if len(place) else np.inf
        found.entropy[i] = entropy = 0.0 - p @ log_p
        found.variance[i] = p @ (-log_p - entropy) ** 2
        if not greedy:
            keys = int(params.position[r]), tokens[r : r + 1], int(stream), int(params.salt[r])
            g = noise.gumbel(int(params.seed[r]), *keys)[0]
            found.score[i] = g - found.surprisal[i]
        found.log_probability[i] = below_1[tokens[r]] - total_1 if 0 <= tokens[r] < len(below_1) else -np.inf
        found.improbable_mass[i] = p[below_1[ids] - total_1 < threshold].sum()
    return found


def from_largest(x: Row) -> tuple[npt.NDArray[np.float64], float]:
    """Return x less the largest of them, and the logsumexp of that; float64."""
    below = x.astype(np.float64)
    below -= below.max()
    return below, math.log(np.exp(below).sum())
