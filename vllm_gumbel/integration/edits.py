"""What requests ask to be changed in logits before the draw, row by row: masks, bad words, biases, penalties, keys.

vLLM makes a float32 copy of the whole batch and goes over it; here only the rows concerned are copied, and each change
touches the ids that it names. A row's values are vLLM's own, to the last bit, in vLLM's order; what our keys change
comes last.

What only other code knows how to apply, a processor of another package or a thinking budget, is left to vLLM.
"""

from collections.abc import Sequence

import numpy as np
import torch
from vllm.v1.sample.logits_processor import LogitBiasLogitsProcessor, MinPLogitsProcessor, MinTokensLogitsProcessor
from vllm.v1.sample.metadata import SamplingMetadata
from vllm.v1.sample.ops.bad_words import apply_bad_words

from vllm_gumbel.integration import keys
from vllm_gumbel.integration.rows import Rows
from vllm_gumbel.kernels.contract import RowParams


def edited_rows(metadata: SamplingMetadata, rows: Rows | None) -> list[int] | None:
    """Return the rows of the batch whose logits something changes, ascending; None if that is for vLLM to do.

    A row that keys draw in another way is among them, and one that vLLM's own sampler draws.
    """
    found = edited_by_vllm(metadata, rows)
    if found is None:
        return None
    return sorted(found | {row for row, _ in rows.keyed}) if rows is not None else sorted(found)


def edited_by_vllm(metadata: SamplingMetadata, rows: Rows | None) -> set[int] | None:
    """Return the rows of the batch whose logits vLLM's parameters change; None if only vLLM knows how."""
    holder = metadata.thinking_budget_state_holder
    processors = metadata.logitsprocs
    if (
        (holder is not None and holder.has_tracked_requests())
        or not all(isinstance(each, MinPLogitsProcessor) for each in processors.argmax_invariant)
        or (rows is None and not (metadata.no_penalties and metadata.allowed_token_ids_mask is None))
    ):
        return None
    found = set(metadata.bad_words_token_ids)
    if rows is not None:
        found.update(rows.restricted)
        found.update(row for row, _ in rows.penalties)
    for processor in processors.non_argmax_invariant:
        if isinstance(processor, MinTokensLogitsProcessor):
            found.update(processor.min_toks)
        elif isinstance(processor, LogitBiasLogitsProcessor):
            found.update(processor.biases)
        else:
            return None
    return found


def edit(
    logits: torch.Tensor,
    request: np.ndarray,
    drafts: Sequence[Sequence[int]] | None,
    metadata: SamplingMetadata,
    rows: Rows | None,
    params: RowParams,
) -> list[int]:
    """Change each row in place as vLLM changes the logits of the request that it belongs to.

    Args:
        logits: float32 [n, vocab], on a CPU.
        request: int [n], ascending; the row of the batch that each row of `logits` belongs to. If a request has
            several, they follow one another, each as if the drafts before it had been generated.
        drafts: draft tokens of every request of the batch; None if there are none.
        metadata: vLLM's.
        rows: of the batch.
        params: of the rows of `logits`.

    Returns:
        The rows that our keys spoilt, of `logits`; see `keys.edit`.
    """

    def places(row: int) -> range:
        return range(int(np.searchsorted(request, row)), int(np.searchsorted(request, row, "right")))

    def output(row: int, drafted: int) -> list[int]:
        return [*metadata.output_token_ids[row], *(drafts[row][:drafted] if drafts else ())]

    for row in rows.restricted if rows else ():
        for place in places(row):
            logits[place].masked_fill_(metadata.allowed_token_ids_mask[row].to(logits.device), -torch.inf)
    for row, words in metadata.bad_words_token_ids.items():
        for drafted, place in enumerate(places(row)):
            apply_bad_words(logits[place : place + 1], {0: words}, [output(row, drafted)])
    for processor in metadata.logitsprocs.non_argmax_invariant:
        if isinstance(processor, MinTokensLogitsProcessor):
            for row, (least, generated, stops, structured) in processor.min_toks.items():
                for drafted, place in enumerate(places(row)):
                    if len(generated) + drafted < least:
                        _mask_stops(logits[place], stops, structured)
        elif isinstance(processor, LogitBiasLogitsProcessor):
            for row, biases in processor.biases.items():
                for place in places(row):
                    logits[place, list(biases)] += torch.tensor(list(biases.values()), dtype=torch.float32)
    for row, penalties in rows.penalties if rows else ():
        penalties.update(metadata.output_token_ids[row])
        drafted_tokens = drafts[row] if drafts else ()
        for place, token in zip(places(row), [*drafted_tokens, None], strict=False):
            penalties.apply(logits[place].numpy())
            if token is not None:
                penalties.push(token)
        for token in reversed(drafted_tokens):
            penalties.pop(token)
    return keys.edit(logits, params, keys.places(rows, request), output) if rows and rows.keyed else []


def _mask_stops(logits: torch.Tensor, stops: set[int], structured: bool) -> None:
    """Forbid the stop tokens of a row that is below its `min_tokens`, unless nothing else is left to a grammar."""
    if not stops:
        return
    ids = torch.tensor(sorted(stops), dtype=torch.int64)
    before = logits[ids].clone()
    logits[ids] = -torch.inf
    if structured and logits.isneginf().all():
        logits[ids] = before
