"""What the keys of requests do to the rows of a step, under vLLM's model runner V1.

Keys that only set parameters, preset, temperature rule, top_n, are settled when a request enters the batch (`rows.py`).
The others concern single rows of a draw, its `Place`s: before the draw their logits are changed (`edit`), after it
their tokens are drawn again in the way that they ask for (`redraw`) or by vLLM's own sampler (`stock.py`). A batch in
which no request sets such a key has no places, and nothing here is called.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch
from vllm.sampling_params import SamplingParams

from vllm_gumbel.integration.rows import RequestRow, Rows
from vllm_gumbel.kernels import keyed_draws, loops, tail_noise
from vllm_gumbel.kernels.contract import GREEDY_TEMPERATURE, NO_TOKEN, Draw, Logits, RowParams, is_sound, widen
from vllm_gumbel.metrics.refusals import count_refusal
from vllm_gumbel.params import NO_RULES, GumbelParams, ParamsError, check_seed
from vllm_gumbel.settings import SamplerSettings


@dataclass(frozen=True)
class Place:
    """A row of a draw whose request sets keys.

    Attributes:
        index: of the row in the draw.
        row: of the request in the batch.
        drafted: how many drafts come before it.
        generated: how many tokens the request has generated before it, drafts included.
        request: what is known of the request.
    """

    index: int
    row: int
    drafted: int
    generated: int
    request: RequestRow


def validate(params: SamplingParams, settings: SamplerSettings | None) -> GumbelParams:
    """Return the keys of a request; raise `ParamsError`, counted by key, if they or its seed are refused."""
    rules = NO_RULES if settings is None else settings.rules
    try:
        keys = GumbelParams.from_extra_args(params.extra_args, params.temperature, rules)
        check_seed(params.seed)
        return keys
    except ParamsError as error:
        count_refusal(error.key, known=("seed", *GumbelParams.model_fields))
        raise


def places(rows: Rows, request: npt.NDArray[np.int64]) -> list[Place]:
    """Return the places of a draw.

    Args:
        rows: of the batch.
        request: int [n], ascending; the row of the batch that each row of the draw belongs to.
    """
    found = []
    for row, keyed in rows.keyed:
        first, end = (int(np.searchsorted(request, row, side)) for side in ("left", "right"))
        for drafted, index in enumerate(range(first, end)):
            found.append(Place(index, row, drafted, rows.generated(row) + drafted, keyed))
    return found


def edit(
    logits: torch.Tensor, params: RowParams, where: Sequence[Place], output: Callable[[int, int], list[int]]
) -> list[int]:
    """Change in place the logits of rows whose keys ask for that: the repetition offset, then the tail.

    Args:
        logits: float32 [n, vocab], after everything else that comes before the draw.
        params: of these rows.
        where: places of the draw.
        output: (row of the batch, number of drafts) -> the tokens generated so far, those drafts included.

    Returns:
        The rows that could be drawn from before and cannot after: there should be none.
    """
    spoilt = []
    for place in where:
        keys = place.request.keys
        if keys.gumbel_repetition_offset == 0 == keys.gumbel_tail_boost:
            continue
        sound = is_sound(_read(logits, place.index))
        if keys.gumbel_repetition_offset > 0:
            tokens = output(place.row, place.drafted)
            row = _read(logits, place.index)
            _write(logits, place.index, loops.discourage(row, tokens, keys.gumbel_repetition_offset))
        if keys.gumbel_tail_boost > 0:
            noise = tail_noise.boost(_read(logits, place.index), keys.gumbel_tail_boost, *_key(params, place.index))
            _write(logits, place.index, noise)
        if sound and not is_sound(_read(logits, place.index)):
            spoilt.append(place.index)
    return spoilt


def redraw(
    draw: Draw,
    params: RowParams,
    where: Sequence[Place],
    kept_rows: Callable[[npt.NDArray[np.int64]], npt.NDArray[np.float32]],
) -> None:
    """Replace the tokens of rows that are drawn in another way than by the plain race.

    Args:
        draw: of all rows; changed. A row without any candidate stays so.
        params: of all rows.
        where: places of the draw.
        kept_rows: indices -> float32 [indices, vocab], those rows after the filters.
    """
    wanted = [place for place in where if _is_redrawn(place) and draw.tokens[place.index] != NO_TOKEN]
    if not wanted:
        return
    for place, x in zip(wanted, kept_rows(np.array([place.index for place in wanted])), strict=True):
        keys, key = place.request.keys, _key(params, place.index)
        if place.generated < keys.gumbel_hybrid_steps:
            token = keyed_draws.inverse_cdf(x, keyed_draws.uniform(*key), keys.gumbel_noise_scale)
        else:
            token = keyed_draws.scaled_race(x, *key, keys.gumbel_noise_scale)
        draw.tokens[place.index] = token


def given_up(logits: Logits, params: RowParams, where: Sequence[Place]) -> list[tuple[int, float]]:
    """Return the mass that `gumbel_top_n` gives up, for each row that sets it and is not greedy: (index, share)."""
    return [
        (place.index, keyed_draws.mass_given_up(widen(logits[place.index]), params.temperature[place.index], top_n))
        for place in where
        if (top_n := place.request.keys.gumbel_top_n) is not None
        and params.temperature[place.index] >= GREEDY_TEMPERATURE
    ]


def _is_redrawn(place: Place) -> bool:
    keys = place.request.keys
    return keys.gumbel_noise_scale < 1 or place.generated < keys.gumbel_hybrid_steps


def _key(params: RowParams, index: int) -> tuple[int, int, int]:
    """Return seed, position and salt of a row."""
    return int(params.seed[index]), int(params.position[index]), int(params.salt[index])


def _read(logits: torch.Tensor, index: int) -> npt.NDArray[np.float32]:
    return logits[index].cpu().numpy()


def _write(logits: torch.Tensor, index: int, values: npt.NDArray[np.float32]) -> None:
    logits[index] = torch.from_numpy(values).to(logits.device)
