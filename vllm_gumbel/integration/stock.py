"""Rows that vLLM's own sampler draws, those of the arm `default`.

A batch in which nothing is ours goes through vLLM's `Sampler` as it is (`untouched.py`). In a batch of both arms they
get the logits after all edits, which are vLLM's to the last bit, and go through vLLM's `Sampler.sample` as a batch of
their own, each seeded one with the torch generator that vLLM made for it: the same tokens as in a server without this
package. A generator is used once for each token that is sent: rows that the runner discards, and those after a draft,
are left out. So such a request accepts no drafts, and gets one token a step. What vLLM does wrong stays wrong for it:
`on_bad_row` and the tokenizer's size are not looked at.
"""

from collections.abc import Sequence
from copy import copy
from dataclasses import replace

import torch
from vllm.config.model import PROCESSED_LOGPROBS_MODES
from vllm.v1.sample.logits_processor import LogitsProcessors, MinPLogitsProcessor
from vllm.v1.sample.metadata import SamplingMetadata
from vllm.v1.sample.sampler import Sampler

from vllm_gumbel.integration.keys import Place
from vllm_gumbel.kernels.contract import GREEDY_TEMPERATURE


def make(logprobs_mode: str, use_fp64_gumbel: bool) -> Sampler:
    """Return a sampler of vLLM's whose `sample` gives the logits after the filters if the mode needs those."""
    shows_processed = logprobs_mode in PROCESSED_LOGPROBS_MODES
    return Sampler("processed_logits" if shows_processed else logprobs_mode, use_fp64_gumbel)


def draw(
    sampler: Sampler, logits: torch.Tensor, metadata: SamplingMetadata, where: Sequence[Place]
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Return the tokens of some rows, and the rows after the filters if the sampler gives those.

    Args:
        sampler: made by `make`.
        logits: [n, vocab], after all edits; not changed.
        metadata: of the batch.
        where: the rows; at least one.

    Returns:
        int64 [places], and float32 [places, vocab] or None.
    """
    processors = metadata.logitsprocs.argmax_invariant
    if all(isinstance(processor, MinPLogitsProcessor) for processor in processors):
        taken = [place.index for place in where]
        part = _take(metadata, torch.tensor([place.row for place in where], device=logits.device))
        kept = list(range(len(where)))
    else:  # what another package does to a row depends on the row's place in the whole batch
        taken, part, kept = list(range(len(logits))), metadata, [place.index for place in where]
    generators = {at: place.request.generator for at, place in zip(kept, where, strict=True) if place.request.generator}
    changed = logits[taken].to(torch.float32)  # a copy, which vLLM may overwrite
    tokens, processed = sampler.sample(changed, replace(part, generators=generators))
    return tokens.long()[kept], None if processed is None else processed[kept]


def _take(metadata: SamplingMetadata, rows: torch.Tensor) -> SamplingMetadata:
    """Return the metadata of some rows of a batch, as far as `Sampler.sample` reads it."""

    def column(values: torch.Tensor | None) -> torch.Tensor | None:
        return None if values is None else values[rows]

    temperature = column(metadata.temperature)
    greedy = None if temperature is None else temperature < GREEDY_TEMPERATURE
    processors = []
    for processor in metadata.logitsprocs.argmax_invariant:
        if processor.min_p_count:
            mine = copy(processor)
            mine.min_p = processor.min_p[rows]
            processors.append(mine)
    return replace(
        metadata,
        temperature=temperature,
        all_greedy=metadata.all_greedy or bool(greedy is not None and greedy.all()),
        all_random=metadata.all_random or bool(greedy is not None and not greedy.any()),
        top_p=column(metadata.top_p),
        top_k=column(metadata.top_k),
        logitsprocs=LogitsProcessors(processors),
    )
