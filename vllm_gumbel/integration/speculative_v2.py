"""Exact-match verification of draft tokens, for vLLM's model runner V2.

`speculative.py` says what it is and why it changes no token. Here it runs on the device that holds the logits, without
waiting for it, from positions that are right there, so with asynchronous scheduling too.

Drafters that sample keep vLLM's own noise for their drafts, which is independent of the target's. With the setting
`verification: rejection` vLLM verifies, with its own noise, from logits after our filters; a `gumbel_salt` has no part
in that.
"""

from typing import Any

import torch
from vllm.v1.worker.gpu.input_batch import InputBatch
from vllm.v1.worker.gpu.sample.output import SamplerOutput
from vllm.v1.worker.gpu.sample.states import NO_LOGPROBS
from vllm.v1.worker.gpu.spec_decode.rejection_sampler import RejectionSampler

from vllm_gumbel.integration.slots import requests_of_rows


class Verifier(RejectionSampler):
    """Draws every row of a step, and accepts drafts while they equal what was drawn.

    It takes the place of vLLM's `RejectionSampler`, whose chunks and logprobs it keeps; `self.sampler` is a
    `v2.GumbelSampler`.
    """

    def __call__(self, logits: torch.Tensor, input_batch: InputBatch, *drafts: Any) -> SamplerOutput:
        """Return the tokens and logprobs of a step; see the parent."""
        self.sampler.begin(logits)
        return self.sampler.finish(super().__call__(logits, input_batch, *drafts), input_batch)

    def _verify(self, *arguments: Any) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Return logits after the filters if they are wanted, and the tokens of a chunk of requests; see the parent.

        Returns:
            [rows, vocab] logits; int64 [requests, drafts + 1] tokens; int32 [requests] how many of them are valid.
        """
        if self.sampler.settings.verification == "rejection":
            return super()._verify(*arguments)
        logits, _, fed, positions, first_rows, slots, slots_np, row_slots, offsets, lengths_np, *further = arguments
        edited = self.sampler.edit(logits, row_slots, slots, slots_np, positions, fed, offsets, lengths_np)
        logprobs = self.sampler.sampling_states.max_num_logprobs(slots_np) != NO_LOGPROBS
        tokens, shown = self.sampler.draw(logits, edited, row_slots, slots_np, positions, logprobs=logprobs)
        drafts = further[0] if further else fed  # since 0.32, with those taken out that a grammar forbids
        return shown, *accept(tokens, drafts, offsets, first_rows, self.num_speculative_steps)


def accept(
    tokens: torch.Tensor, fed: torch.Tensor, offsets: torch.Tensor, first_rows: torch.Tensor, steps: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return each request's tokens up to the first that differs from its draft, that one included.

    Args:
        tokens: int64 [rows]; what was drawn.
        fed: integers [rows]; the token that was fed at each row, so row i + 1 holds the draft for row i; -1 for none.
        offsets: integers [rows]; the place of each row among those of its request.
        first_rows: integers [requests + 1]; the first row of each request, and the number of rows.
        steps: the most drafts that a request may have.

    Returns:
        int64 [requests, steps + 1] tokens, of which the first n are valid; int32 [requests] n.
    """
    requests = len(first_rows) - 1
    matches = torch.zeros_like(tokens, dtype=torch.bool)
    matches[:-1] = (tokens[:-1] == fed[1:]) & (offsets[1:] > 0)  # a next row at offset 0 is another request's
    place = (requests_of_rows(first_rows, len(tokens)), offsets.long())
    drawn = tokens.new_zeros(requests, steps + 1).index_put(place, tokens)
    matched = matches.new_zeros(requests, steps + 1).index_put(place, matches)
    return drawn, (1 + matched.int().cumprod(dim=1).sum(dim=1)).int()
