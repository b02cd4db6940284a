"""vLLM's real classes of runner V2 around the sampler, on CPU tensors, driven as its model runner drives them."""

from copy import copy
from dataclasses import replace
from itertools import accumulate

import numpy as np
import torch
import vllm.v1.worker.cpu.shm  # noqa: F401  what a worker on a CPU loads first, in place of pinned memory and streams
from vllm import SamplingParams
from vllm.v1.worker.gpu.input_batch import InputBatch, InputBuffers, post_update
from vllm.v1.worker.gpu.states import RequestState

from tests.recording import make_recorder
from vllm_gumbel import SamplerSettings
from vllm_gumbel.integration import choice
from vllm_gumbel.integration.tally import Tally
from vllm_gumbel.integration.v2 import GumbelSampler
from vllm_gumbel.kernels.contract import RowParams

CPU, LENGTH, DRAFTS = torch.device("cpu"), 64, 4


def configured(config, **settings):
    """Return a copy of vLLM's configuration with other settings of ours."""
    config = copy(config)
    choice.carry(choice.Choice("gumbel", SamplerSettings(**settings)), config)
    return config


class Driver:
    """A sampler and the requests in its slots.

    Args:
        config: vLLM's configuration of a real model.
        slots: number of slots.
        vocab: vocabulary size.
        stock: arguments of vLLM's own sampler.
        settings: ours.
    """

    def __init__(self, config, *, slots=8, vocab=300, stock=None, **settings):
        self.states = RequestState(slots, LENGTH, slots * LENGTH, DRAFTS, vocab, CPU)
        self.sampler = GumbelSampler(configured(config, **settings), slots, vocab, CPU, self.states, **(stock or {}))
        self.requests = {}

    def add(self, name, prompt=(1, 2, 3), output=(), *, stop=None, **sampling):
        """Admit a request and return its slot; `stop` is the model's end-of-sequence id, `bad_ids` its bad words."""
        bad_ids = sampling.pop("bad_ids", None)
        params = SamplingParams(**sampling)
        params._bad_words_token_ids = bad_ids
        params.update_from_generation_config({}, stop)
        tokens = [*prompt, *output]
        self.states.add_request(name, len(prompt), tokens, len(tokens) - 1, 1000)
        slot = self.states.req_id_to_index[name]
        self.requests[name] = tokens
        self.sampler.add_request(slot, params)
        self.states.apply_staged_writes()
        self.sampler.apply_staged_writes()
        return slot

    def remove(self, name):
        """Let a request go."""
        del self.requests[name]
        self.states.remove_request(name)

    def batch(self, names=None, drafts=None):
        """Return the batch of a step: these requests in this order, each with its last token and its drafts."""
        names = list(self.requests) if names is None else names
        fed = [[self.requests[name][-1], *(drafts or {}).get(name, [])] for name in names]
        counts = [len(each) for each in fed]
        slots = [self.states.req_id_to_index[name] for name in names]
        rows = sum(counts)
        offsets = np.concatenate([np.arange(count) for count in counts])
        starts = np.repeat([len(self.requests[name]) - 1 for name in names], counts)
        first_rows = [*accumulate(counts, initial=0)]
        lengths = [len(self.requests[name]) + count - 1 for name, count in zip(names, counts, strict=True)]
        return replace(
            InputBatch.make_dummy(len(names), rows, InputBuffers(len(names), rows, CPU)),
            req_ids=names,
            idx_mapping=torch.tensor(slots, dtype=torch.int32),
            idx_mapping_np=np.array(slots),
            expanded_idx_mapping=torch.tensor(np.repeat(slots, counts), dtype=torch.int32),
            expanded_local_pos=torch.tensor(offsets, dtype=torch.int32),
            positions=torch.tensor(starts + offsets),
            input_ids=torch.tensor([token for each in fed for token in each], dtype=torch.int32),
            logits_indices=torch.arange(rows),
            cu_num_logits=torch.tensor(first_rows, dtype=torch.int32),
            cu_num_logits_np=np.array(first_rows, np.int32),
            seq_lens=torch.tensor(lengths, dtype=torch.int32),
            seq_lens_cpu_upper_bound=torch.tensor(lengths, dtype=torch.int32),
            num_draft_tokens=rows - len(names),
        )

    def step(self, logits):
        """Draw for every request, and append its token as the runner does after a step; return the output."""
        batch = self.batch()
        output = self.sampler(logits, batch)
        post_update(
            batch.idx_mapping,
            self.states.num_computed_tokens.gpu,
            self.states.last_sampled_tokens,
            self.sampler.penalties_state.output_bin_counts,
            output.sampled_token_ids,
            output.num_sampled,
            output.num_rejected,
            batch.query_start_loc,
            self.states.all_token_ids.gpu,
            self.states.total_len.gpu,
        )
        for name, (token,) in zip(batch.req_ids, output.sampled_token_ids.tolist(), strict=True):
            self.requests[name].append(token)
        return output

    def draw(self, logits, names=None):
        """Return the step's output for logits [requests, vocab], which it may write into."""
        return self.sampler(logits, self.batch(names))

    def tokens(self, logits, names=None):
        """Return the step's tokens; the logits are not changed."""
        output = self.draw(logits.clone(), names)
        assert output.sampled_token_ids.dtype == torch.int64
        return output.sampled_token_ids.flatten().tolist()

    def params(self, names=None):
        """Return the parameters of the definition for a step's rows, from what the slots hold."""
        states, slots = self.sampler.sampling_states, self.batch(names).idx_mapping_np
        return RowParams(
            temperature=states.temperature.np[slots],
            top_k=states.top_k.np[slots],
            top_p=states.top_p.np[slots],
            min_p=states.min_p.np[slots],
            seed=states.seeds.np[slots].view(np.uint64),
            position=self.batch(names).positions.numpy(),
            salt=states.salt.np[slots].view(np.uint64),
        )


def layout(batch):
    """Return the arguments of vLLM's `apply_sampling_params` that come after the logits."""
    return (
        batch.expanded_idx_mapping,
        batch.idx_mapping,
        batch.idx_mapping_np,
        batch.positions,
        batch.input_ids,
        batch.expanded_local_pos,
        batch.seq_lens_cpu_upper_bound.numpy(),
    )


def count_into(driver, folder):
    """Let a driver's sampler count into a folder."""
    slots, vocab = driver.states.max_num_reqs, driver.states.vocab_size
    recorder = make_recorder(folder, settings=driver.sampler.settings, vocab=vocab, slots=slots)
    driver.sampler._tally = Tally(recorder)


def random_logits(rows, vocab=300, seed=0, dtype=torch.float32):
    """Return logits with ties, in a model's dtype."""
    return (torch.randn(rows, vocab, generator=torch.Generator().manual_seed(seed)) * 3).to(dtype)
