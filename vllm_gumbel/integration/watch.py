"""Which rows of a step under runner V1 are looked at, and what is seen there."""

import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace

import numpy as np
import torch

from vllm_gumbel.integration.drawn import Drawn
from vllm_gumbel.integration.keys import Place
from vllm_gumbel.integration.rows import Rows
from vllm_gumbel.kernels.contract import GREEDY_TEMPERATURE, Logits, RowParams
from vllm_gumbel.kernels.dispatch import Backend
from vllm_gumbel.kernels.slots import as_array
from vllm_gumbel.metrics.recorder import Recorder
from vllm_gumbel.metrics.step import Watched
from vllm_gumbel.settings import SamplerSettings


class Watch:
    """Looks at the distribution of a share of the rows.

    The choice comes from a generator of its own, so it knows nothing of what is drawn, and statistics over the chosen
    rows are those of all rows.

    Args:
        settings: server-wide settings.
        backend: computes the statistics.
        usable_vocab: number of ids the tokenizer knows; None if that is unknown.
    """

    def __init__(self, settings: SamplerSettings, backend: Backend, usable_vocab: int | None) -> None:
        self._share = settings.watch
        self._improbable_below = settings.improbable_below
        self._backend = backend
        self._usable_vocab = usable_vocab
        self._generator = np.random.default_rng()

    def choose(self, rows: int) -> np.ndarray:
        """Return, int64 [n], ascending, which of so many rows are looked at."""
        return np.flatnonzero(self._generator.random(rows) < self._share)

    def look(
        self,
        recorder: Recorder | None,
        drawn: Drawn,
        logits: torch.Tensor,
        params: RowParams,
        rows: Rows | None,
        request: np.ndarray,
        where: Sequence[Place] = (),
        skip: Sequence[int] = (),
    ) -> None:
        """Add to `drawn` what is seen in some of its rows; never raises.

        Args:
            recorder: counts an error in here; without one, or without a batch, there is nothing to do.
            drawn: the final tokens of the rows.
            logits: [n, vocab], what they were drawn from.
            params: of these rows.
            rows: of the batch.
            request: int [n]; the row of the batch that each row of the draw belongs to.
            where: places of the draw whose requests set keys.
            skip: rows that are not to be looked at.
        """
        if recorder is None or rows is None or self._share == 0:
            return
        try:
            index = self.choose(len(request))
            if len(skip):
                index = index[~np.isin(index, skip)]
            if len(index):
                found = self._seen(drawn.draw.tokens, as_array(logits), params, rows.seeded[request], where, index)
                drawn.watched.append(found)
            for i, beside in enumerate(drawn.beside):
                chosen = self.choose(len(beside.rows))
                if len(chosen):
                    tokens = drawn.draw.tokens.copy()
                    tokens[beside.rows] = beside.draw.tokens
                    mine = beside.rows[chosen]
                    found = self._seen(tokens, as_array(logits), params, rows.seeded[request], where, mine, shadow=True)
                    drawn.beside[i] = replace(beside, watched=replace(found, index=chosen))
        except Exception as error:  # whatever it is, the tokens must flow
            recorder.fault("exactness", error)

    def _seen(
        self,
        tokens: np.ndarray,
        logits: Logits,
        params: RowParams,
        seeded: np.ndarray,
        where: Sequence[Place],
        index: np.ndarray,
        shadow: bool = False,
    ) -> Watched:
        """Return what is seen in the rows `index`, int64 [m]; `tokens` are int64 [n], `seeded` bool [n].

        With `shadow`, the tokens are ours, also in rows that vLLM's own sampler draws.
        """
        statistics = self._backend.statistics(
            logits,
            params,
            tokens,
            index,
            usable_vocab=self._usable_vocab,
            improbable_below=self._improbable_below,
        )
        tested = ~seeded[index] & (params.temperature[index] >= GREEDY_TEMPERATURE)
        other = [place.index for place in where if _has_other_law(place, logits.shape[1], params, shadow)]
        return Watched(index, statistics, tested & ~np.isin(index, other) if other else tested)


@contextmanager
def timed(recorder: Recorder | None) -> Iterator[None]:
    """Count the time that is spent inside."""
    began = time.perf_counter()
    yield
    if recorder is not None:
        recorder.seconds(time.perf_counter() - began)


def _has_other_law(place: Place, vocab: int, params: RowParams, shadow: bool) -> bool:
    """Return whether a row is drawn otherwise than by the race that the statistics speak of.

    vLLM's own sampler keeps more than k ids where the k-th is tied.
    """
    if place.request.is_stocks and not shadow:
        return 0 < params.top_k[place.index] < vocab
    keys = place.request.keys
    return keys.gumbel_noise_scale < 1 or place.generated < keys.gumbel_hybrid_steps
