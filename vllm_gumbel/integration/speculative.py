"""Exact-match verification of draft tokens, for vLLM's model runner V1.

Which token comes at a position is determined by its logits, the seed and the position before any draft is looked at. So
a draft is accepted exactly when it is that token, and the output equals the output without speculation, token for
token, for any drafter (Daliri, Musco, Musco 2024, "Coupling without communication and drafter-invariant speculative
decoding"). Rejection sampling, vLLM's way, keeps the law of the output but not the output.

A request that vLLM's own sampler draws (`gumbel_sampler` `default`) accepts no drafts: its noise is that of a generator
which moves on with every draw.

The rows of a step are drawn as if each were a request of its own, whose output ends with the drafts before that row.
(With speculative decoding vLLM refuses min_p and a logit bias at admission, whoever verifies.)
"""

from dataclasses import replace
from itertools import accumulate, pairwise

import numpy as np
import torch
from vllm.v1.outputs import LogprobsTensors, SamplerOutput
from vllm.v1.sample.metadata import SamplingMetadata
from vllm.v1.sample.rejection_sampler import RejectionSampler
from vllm.v1.spec_decode.metadata import SpecDecodeMetadata

from vllm_gumbel.integration import keys
from vllm_gumbel.integration.edits import edit
from vllm_gumbel.integration.rows import Rows, detached_params
from vllm_gumbel.integration.watch import timed
from vllm_gumbel.kernels.contract import RowParams

#: Fills the places of tokens that were not accepted.
NOT_ACCEPTED = -1


class Verifier(RejectionSampler):
    """Draws every row of a step, and accepts drafts while they equal what was drawn.

    It takes the place of vLLM's `RejectionSampler`; `self.sampler` is a `GumbelSampler`.
    """

    def forward(
        self,
        metadata: SpecDecodeMetadata,
        draft_probs: torch.Tensor | None,
        logits: torch.Tensor,
        sampling_metadata: SamplingMetadata,
    ) -> SamplerOutput:
        """Return the tokens of a step; see `verify`, which needs no `draft_probs`. The time it takes is counted."""
        with timed(self.sampler.recorder):
            return self.verify(metadata, logits, sampling_metadata)

    def verify(
        self, metadata: SpecDecodeMetadata, logits: torch.Tensor, sampling_metadata: SamplingMetadata
    ) -> SamplerOutput:
        """Return the accepted tokens of a step, and the first of each request that differs from its draft.

        Args:
            metadata: vLLM's; the drafts, and how many each request has.
            logits: [drafts + requests, vocab]; for each request a row per draft, then one more.
            sampling_metadata: vLLM's; its `rows` give seed and position.

        Returns:
            int32 [requests, longest draft + 1] token ids, `NOT_ACCEPTED` after the last one; and their logprobs.
        """
        drafts = split(metadata.draft_token_ids.tolist(), metadata.num_draft_tokens)
        lengths = np.array([len(draft) + 1 for draft in drafts])
        request = np.repeat(np.arange(len(drafts)), lengths)
        offset = np.concatenate([np.arange(length) for length in lengths])
        rows: Rows | None = getattr(sampling_metadata, "rows", None)
        seeds, vocab = self.sampler.seeds, logits.shape[1]
        base = rows.params() if rows else detached_params(sampling_metadata, len(drafts), seeds, vocab)
        params = expand(base, request, offset)
        raw = logits
        logits = raw.to("cpu", torch.float32, copy=True)  # the draw of this runner is on the host
        spoilt = edit(logits, request, drafts, sampling_metadata, rows, params)
        where = keys.places(rows, request) if rows and rows.keyed else ()
        wanted = sampling_metadata.max_num_logprobs
        processed = wanted is not None and self.is_processed_logprobs_mode
        drawn = self.sampler.draw_rows(logits, params, processed=processed, where=where, spoilt=spoilt)
        self.sampler.draw_stock(drawn, logits, sampling_metadata, where)
        self.sampler.watch.look(self.sampler.recorder, drawn, logits, params, rows, request, where)
        tokens = self.sampler.replace_bad_rows(drawn.draw, rows, request)

        shape = (len(drafts), int(lengths.max()))
        accepted = np.full(shape, NOT_ACCEPTED, np.int64)
        source = np.zeros(shape, np.int64)  # the row that each place of the output was drawn from
        sent = np.zeros(len(tokens), bool)
        for r, (start, draft) in enumerate(zip(accumulate(lengths, initial=0), drafts, strict=False)):
            count = 1
            while start not in drawn.by_stock and count <= len(draft) and tokens[start + count - 1] == draft[count - 1]:
                count += 1
            accepted[r, :count] = tokens[start : start + count]
            source[r, :count] = np.arange(start, start + count)
            sent[start : start + count] = True
        if rows:
            self.sampler.count(drawn, rows, sent, request)
        result = torch.from_numpy(accepted)
        output = None
        if wanted is not None:
            shown = drawn.processed if drawn.processed is not None else raw
            output = self._logprobs(shown[source.flatten()], result.flatten(), wanted)
        return SamplerOutput(sampled_token_ids=result.to(torch.int32).to(raw.device), logprobs_tensors=output)

    def _logprobs(self, logits: torch.Tensor, tokens: torch.Tensor, wanted: int) -> LogprobsTensors:
        """Return the logprobs of the output's places in order, as vLLM's runner filters them."""
        tokens = tokens.clamp(min=0).to(logits.device)
        if not self.is_logits_logprobs_mode:
            return self.sampler.raw_logprobs(logits, tokens, wanted)
        return self.sampler.finite(self.sampler.gather_logprobs(logits.float(), wanted, tokens))


def split(flat: list[int], counts: list[int]) -> list[list[int]]:
    """Return `flat` cut into pieces of the given lengths."""
    ends = list(accumulate(counts, initial=0))
    return [flat[start:end] for start, end in pairwise(ends)]


def expand(params: RowParams, request: np.ndarray, offset: np.ndarray) -> RowParams:
    """Return parameters of the rows of a step: those of their request, at a position `offset` further on."""
    taken = params.take(request)
    return replace(taken, position=taken.position + offset)
