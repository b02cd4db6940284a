"""Draws that cannot be right, whatever the model says: what the breaker counts.

A client must not be able to open the breaker, so nothing counts that vLLM's own sampler would do as badly: a row of
NaN, or one that parameters leave without any id, is none of ours.
"""

import numpy as np

from vllm_gumbel.integration.drawn import Drawn
from vllm_gumbel.kernels.contract import NO_TOKEN, OF_LOGITS, Draw, Flag, Logits, is_sound, widen
from vllm_gumbel.metrics.catalogue import AnomalyKind
from vllm_gumbel.metrics.step import Step
from vllm_gumbel.rollout.state import Rollout


def wrong_rows(logits: Logits, draw: Draw) -> list[tuple[int, str]]:
    """Return the rows of a draw from `logits` [rows, vocab] that cannot be right, each with what is wrong.

    That is a row which is flagged although it is sound, and a token that does not exist or is masked.
    """
    count, vocab = logits.shape
    wrong: list[tuple[int, str]] = []
    for row in np.flatnonzero(draw.flags & OF_LOGITS):
        if is_sound(widen(logits[row])):
            flag = draw.flags[row] & Flag.NO_CANDIDATE
            wrong.append((int(row), AnomalyKind.NO_CANDIDATE if flag else AnomalyKind.NONFINITE_LOGITS))
    exists = (draw.tokens >= 0) & (draw.tokens < vocab)
    chosen = widen(logits[np.arange(count), np.where(exists, draw.tokens, 0)])
    missed = ~(exists & (chosen > -np.inf)) & (draw.tokens != NO_TOKEN)
    return wrong + [(int(row), AnomalyKind.OUTSIDE_FILTER) for row in np.flatnonzero(missed)]


def tell(rollout: Rollout, drawn: Drawn, sent: np.ndarray | None, *, watched: bool) -> None:
    """Tell the breaker of a step.

    Args:
        rollout: has the breaker.
        drawn: the step's draw.
        sent: bool [rows], rows whose token goes to the client; None means all.
        watched: whether tokens outside the filters among the watched ones count too.
    """
    ours = np.ones(len(drawn.draw.tokens), bool) if sent is None else sent.copy()
    ours[drawn.by_stock] = False
    tokens = int(np.count_nonzero(ours))
    if not tokens:
        return
    hard = {row: kind for row, kind in drawn.hard if ours[row]}
    for part in drawn.watched if watched else ():
        hard.update((int(row), AnomalyKind.OUTSIDE_FILTER) for row in part.index[part.outside] if ours[row])
    rollout.count(tokens, len(hard), next(iter(hard.values()), ""))


def tell_of_watched(rollout: Rollout, step: Step) -> None:
    """Tell the breaker of a step, all of whose tokens are sent, by its watched rows."""
    tokens = int(np.count_nonzero(~step.by_stock))
    if not tokens:
        return
    outside = 0
    if step.watched is not None:
        outside = int(np.count_nonzero(~step.by_stock[step.watched.index] & step.watched.outside))
    rollout.count(tokens, outside, AnomalyKind.OUTSIDE_FILTER)
