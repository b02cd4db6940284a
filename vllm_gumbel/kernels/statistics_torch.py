"""Row statistics in PyTorch, on whatever device the logits are: without waiting for it, and all but the score.

The kept set is not found again but taken from the `processed` logits that the draw leaves. The noise of one token is
left to the host (`finish`), where it costs nothing.

Elementwise in float32, added up in float64. Tolerances against `statistics_reference` as those of `statistics_numba`.
"""

import math
from collections.abc import Mapping
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import torch

from vllm_gumbel.kernels import noise_reference as noise
from vllm_gumbel.kernels.contract import Stream
from vllm_gumbel.kernels.statistics import IMPROBABLE_BELOW, RowStatistics, log_threshold

_FARTHEST = -80.0  # as in `moments_numba`: what lies farther below the largest has no mass


class DeviceStatistics(NamedTuple):
    """The fields of `RowStatistics` but the score, as tensors [rows] on the device; int64, then float64."""

    kept: torch.Tensor
    log_total: torch.Tensor
    surprisal: torch.Tensor
    entropy: torch.Tensor
    variance: torch.Tensor
    log_probability: torch.Tensor
    improbable_mass: torch.Tensor


def statistics(
    processed: torch.Tensor,
    logits: torch.Tensor,
    tokens: torch.Tensor,
    greedy: torch.Tensor,
    *,
    usable_vocab: int | None = None,
    improbable_below: float = IMPROBABLE_BELOW,
) -> DeviceStatistics:
    """Return the statistics of drawn rows.

    Args:
        processed: float32 [rows, vocab]; the tempered logits that the filters left, -inf elsewhere, as a draw writes
            them. Not changed.
        logits: float32, float16 or bfloat16 [rows, vocab], as they were drawn from; not changed.
        tokens: int64 [rows]; the drawn ids. One that is no id of the row, such as `NO_TOKEN`, is not a kept id.
        greedy: bool [rows].
        usable_vocab: ids from here on are unknown to the tokenizer and never drawn; None means that all are known.
        improbable_below: threshold of `improbable_mass`, a probability.
    """
    x = processed[:, :usable_vocab]
    logit = logits[:, :usable_vocab].float()
    logit = torch.where(logit.isnan(), -math.inf, logit)
    known = (tokens >= 0) & (tokens < x.shape[1])
    place = torch.where(known, tokens, 0)[:, None]

    best = logit.max(dim=1, keepdim=True).values
    log_total_1 = _total((logit - best).exp_()).log_()
    log_probability = torch.where(known, (logit.gather(1, place).double() - best).squeeze(1) - log_total_1, -math.inf)
    threshold = log_threshold(improbable_below)
    bar = (log_total_1 + threshold).float()[:, None]

    top = x.max(dim=1, keepdim=True)
    d = (x - top.values).clamp_(min=_FARTHEST)
    mass = torch.where(x > -math.inf, d.exp(), 0.0)
    s0, s1, s2 = _total(mass), _total(mass * d), _total(mass * d * d)
    tail = _total(torch.where(logit - best < bar, mass, 0.0))
    largest = top.values.squeeze(1).double()
    x_token = torch.where(known, x.gather(1, place).squeeze(1), -math.inf).double()
    mean = s1 / s0
    surprisal = (largest - x_token) + s0.log()

    first = torch.where(tokens == top.indices.squeeze(1), 0.0, math.inf)
    improbable = (-log_total_1 < threshold).double()
    lawless = (largest.abs() == math.inf) | (best.squeeze(1).abs() == math.inf)

    def choose(of_greedy: torch.Tensor | float, of_noisy: torch.Tensor) -> torch.Tensor:
        return torch.where(lawless, math.nan, torch.where(greedy, of_greedy, of_noisy)).double()

    return DeviceStatistics(
        kept=torch.where(lawless, 0, torch.where(greedy, 1, (x > -math.inf).sum(dim=1))),
        log_total=choose(largest, largest + s0.log()),
        surprisal=choose(first, surprisal.clamp(min=0)),
        entropy=choose(0.0, (s0.log() - mean).clamp(min=0)),
        variance=choose(0.0, (s2 / s0 - mean * mean).clamp(min=0)),
        log_probability=torch.where(lawless, math.nan, log_probability),
        improbable_mass=choose(improbable, tail / s0),
    )


def _total(values: torch.Tensor) -> torch.Tensor:
    """Return the sums of rows, float64."""
    return values.sum(dim=1, dtype=torch.float64)


def finish(
    found: Mapping[str, npt.NDArray],
    seed: npt.NDArray[np.uint64],
    salt: npt.NDArray[np.uint64],
    *,
    stream: Stream = Stream.TARGET,
    own_noise: bool = True,
) -> RowStatistics:
    """Return statistics that were copied to the host, with their scores.

    Args:
        found: the fields of `DeviceStatistics`, and of the same rows `token`, int64, `position`, int64, and `greedy`,
            bool.
        seed, salt: uint64 [rows].
        stream: family of noise that the draw had.
        own_noise: whether the draw's noise was `noise_reference`'s; scores under other noise are NaN.
    """
    k0, k1, k2 = noise.row_keys(seed, found["position"], stream, salt)
    upper, lower = noise.upper_words(k0, k1, found["token"]), noise.lower_words(k2, found["token"])
    g = -np.log(noise.exponential((upper.astype(np.uint64) << np.uint64(48)) | lower))
    score = np.where(found["greedy"] | np.bool_(not own_noise), np.nan, g - found["surprisal"])
    return RowStatistics(**{name: found[name] for name in DeviceStatistics._fields}, score=score)
