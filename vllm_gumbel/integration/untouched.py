"""A batch in which nothing is ours goes through vLLM's own sampler as it is; here it is only looked at."""

from dataclasses import replace
from typing import TYPE_CHECKING

import numpy as np
import torch
from vllm.v1.outputs import SamplerOutput
from vllm.v1.sample.metadata import SamplingMetadata

from vllm_gumbel.integration import keys
from vllm_gumbel.integration.drawn import Drawn
from vllm_gumbel.integration.edits import edited_by_vllm
from vllm_gumbel.integration.rows import Rows
from vllm_gumbel.kernels.contract import OF_LOGITS, Draw, RowParams
from vllm_gumbel.kernels.slots import as_array

if TYPE_CHECKING:
    from vllm_gumbel.integration.v1 import GumbelSampler


def forward(
    sampler: "GumbelSampler",
    logits: torch.Tensor,
    metadata: SamplingMetadata,
    rows: Rows,
    mode: str | None,
) -> SamplerOutput:
    """Return what vLLM's own sampler makes of a batch, every request of which is its.

    Args:
        sampler: ours; counts.
        logits: [rows, vocab], as they came.
        metadata: of the batch.
        rows: of the batch.
        mode: vLLM's `logprobs_mode_override`.
    """
    counted = sampler.recorder is not None
    seen = logits.clone() if counted and sampler.settings.watch and logits.dtype == torch.float32 else logits
    where = keys.places(rows, np.arange(len(logits)))
    discarded = sampler.discarded(len(logits))
    generators = {
        place.row: place.request.generator for place in where if place.request.generator and not discarded[place.row]
    }
    output = sampler.stock.forward(logits, replace(metadata, generators=generators), False, mode)
    if counted:
        tokens = output.sampled_token_ids.flatten().cpu().numpy().astype(np.int64)
        drawn = Drawn(Draw(tokens, _flags(sampler, seen)), by_stock=list(range(len(tokens))))
        edited = edited_by_vllm(metadata, rows)
        if edited is not None:
            sampler.watch.look(
                sampler.recorder, drawn, seen, rows.params(), rows, np.arange(len(tokens)), where, skip=sorted(edited)
            )
        sampler.count(drawn, rows)
    else:
        rows.take_admitted()
    return output


def _flags(sampler: "GumbelSampler", logits: torch.Tensor) -> np.ndarray:
    """Return, uint8 [rows], what there is to say of the logits themselves; never raises."""
    count, vocab = logits.shape
    greedy = RowParams(
        temperature=np.zeros(count, np.float32),
        top_k=np.full(count, vocab, np.int32),
        top_p=np.ones(count, np.float32),
        min_p=np.zeros(count, np.float32),
        seed=np.zeros(count, np.uint64),
        position=np.zeros(count, np.int64),
        salt=np.zeros(count, np.uint64),
    )
    try:
        flags = sampler.backend.draw(as_array(logits), greedy, usable_vocab=None, processed=None).flags
        return flags & OF_LOGITS
    except Exception as error:  # whatever it is, the tokens must flow
        if sampler.recorder is not None:
            sampler.recorder.fault("recorder", error)
        return np.zeros(count, np.uint8)
