"""What a draw says about itself: the numbers by which live traffic shows whether draws follow their distribution.

`statistics_reference.py` defines them; the other backends return the same within the tolerances they state.
"""

import math
from dataclasses import dataclass, fields

import numpy as np
import numpy.typing as npt

from vllm_gumbel.kernels import contract
from vllm_gumbel.kernels.contract import Logits, RowParams

#: Below this probability, at temperature 1 without filters, a drawn token is called improbable.
IMPROBABLE_BELOW = 1e-6


@dataclass(frozen=True)
class RowStatistics:
    """Statistics of drawn rows, one entry a row; x is the tempered logit, p the softmax of x over the kept ids.

    NaN throughout, with `kept` 0, where there is no law to speak of: no finite candidate, or an infinite x among the
    ids that may be drawn. A greedy row keeps the first of its largest logits, and its x is the logit.

    Attributes:
        kept: int64 [rows]; ids left after the filters, 1 for a greedy row.
        log_total: float64 [rows]; logsumexp of x over the kept ids.
        surprisal: float64 [rows], nats; -ln p of the drawn token, +inf if it is not a kept id.
        entropy: float64 [rows], nats; the mean of the surprisal.
        variance: float64 [rows], nats^2; the variance of the surprisal.
        score: float64 [rows]; x + noise of the drawn token, less `log_total`, which is noise - surprisal. Gumbel(0, 1)
            whatever the logits, and independent of the token, if the draw is exact (the maximum of independent Gumbels,
            e.g. Maddison, Tarlow, Minka 2014, section 2). -inf if the token is not a kept id, NaN for a greedy row.
        log_probability: float64 [rows]; ln of the drawn token's probability at temperature 1 without filters, among all
            ids that may be drawn; -inf if it is none of them.
        improbable_mass: float64 [rows]; the probability by p of drawing an id whose `log_probability` would lie below
            the threshold.
    """

    kept: npt.NDArray[np.int64]
    log_total: npt.NDArray[np.float64]
    surprisal: npt.NDArray[np.float64]
    entropy: npt.NDArray[np.float64]
    variance: npt.NDArray[np.float64]
    score: npt.NDArray[np.float64]
    log_probability: npt.NDArray[np.float64]
    improbable_mass: npt.NDArray[np.float64]

    @classmethod
    def unknown(cls, rows: int) -> "RowStatistics":
        """Return what rows without a law have, to be filled in."""
        numbers = (np.full(rows, np.nan) for _ in fields(cls)[1:])
        return cls(np.zeros(rows, np.int64), *numbers)


def log_threshold(improbable_below: float) -> float:
    """Return ln of the threshold of `improbable_mass`; -inf for 0, below which no probability lies."""
    return math.log(improbable_below) if improbable_below > 0 else -math.inf


def check(
    logits: Logits,
    params: RowParams,
    tokens: npt.NDArray[np.int64],
    rows: npt.NDArray[np.int64],
    usable_vocab: int | None,
    improbable_below: float,
) -> int:
    """Check the arguments of `statistics` and return the number of ids that may be drawn.

    Args:
        logits, params, usable_vocab: as `contract.check` takes them.
        tokens: int64 [rows of the batch]; the drawn tokens.
        rows: int64 [any number]; indices of the rows that are looked at.
        improbable_below: threshold of `improbable_mass`, in [0, 1].

    Raises:
        TypeError: a dtype differs from the contract.
        ValueError: a shape differs, an index or a number is out of range.
    """
    limit = contract.check(logits, params, usable_vocab)
    for name, values in (("tokens", tokens), ("rows", rows)):
        if values.dtype != np.int64:
            raise TypeError(f"{name} must be int64, got {values.dtype}")
    batch = len(logits)
    if tokens.shape != (batch,):
        raise ValueError(f"tokens must have shape ({batch},), got {tokens.shape}")
    if rows.ndim != 1 or (len(rows) and not 0 <= rows.min() <= rows.max() < batch):
        raise ValueError(f"rows must be a list of indices from 0 to {batch - 1}")
    if not 0 <= improbable_below <= 1:
        raise ValueError(f"improbable_below must be from 0 to 1, got {improbable_below}")
    return limit
