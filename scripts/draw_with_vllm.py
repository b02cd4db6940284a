#!/usr/bin/env python
"""Draws on CPU tensors with the classes of whatever vLLM is imported here; `scripts/check_vllm --run` runs it.

    .venv/bin/python scripts/draw_with_vllm.py V1

Runner V1: vLLM's batch and sampler around ours. Greedy, unseeded, seeded, filtered and penalised requests are drawn for
some steps; each token must be that of the definition (`sample_reference`) on the logits that vLLM's own sampler has
after penalties, and greedy ones that of vLLM's own sampler. Runner V2: vLLM's parameters by slot, drawn by the
reference; what comes before the draw there is Triton's, and not run.

The last line says what happened. Ends with 0 if all is as it should be, 1 if a token is another, 3 if the classes
cannot be imported here, which the last line names with the reason.
"""

import sys
from inspect import signature
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import numpy as np
import torch

from vllm_gumbel.kernels import dispatch, sample_reference
from vllm_gumbel.kernels.contract import RowParams
from vllm_gumbel.kernels.slots import Noise
from vllm_gumbel.settings import SamplerSettings

ROWS, VOCABULARY, STEPS, LENGTH = 5, 100, 20, 128
#: Parameters of one request each.
REQUESTS: tuple[dict[str, Any], ...] = (
    {"temperature": 0.0},
    {"temperature": 0.8},
    {"temperature": 1.0, "seed": 11},
    {"temperature": 0.7, "seed": 12, "top_k": 40, "top_p": 0.9, "min_p": 0.01},
    {"temperature": 1.2, "seed": 13, "repetition_penalty": 1.3, "frequency_penalty": 0.5, "presence_penalty": -2.0},
)


def draw_v1() -> str:
    """Draw under runner V1; return what was compared."""
    from vllm.sampling_params import SamplingParams
    from vllm.v1.sample.logits_processor import LogitsProcessors
    from vllm.v1.sample.sampler import Sampler
    from vllm.v1.worker.gpu_input_batch import CachedRequestState, InputBatch

    from vllm_gumbel.integration.rows import RowBatch, SeedSource
    from vllm_gumbel.integration.v1 import GumbelSampler

    def filled(kind: Any, **keywords: Any) -> Any:
        if "kernel_block_sizes" in signature(InputBatch.__init__).parameters:  # up to 0.31
            keywords["kernel_block_sizes"] = [16]
        batch = kind(
            max_num_reqs=ROWS,
            max_model_len=LENGTH,
            max_num_batched_tokens=ROWS * LENGTH,
            device=torch.device("cpu"),
            vocab_size=VOCABULARY,
            block_sizes=[16],
            max_num_blocks_per_req=[LENGTH // 16],
            logitsprocs=LogitsProcessors(),
            **keywords,
        )
        for i, given in enumerate(REQUESTS):
            request = CachedRequestState(
                req_id=str(i),
                prompt_token_ids=list(range(40)),
                mm_features=[],
                sampling_params=SamplingParams(**given),
                generator=None,
                block_ids=([0],),
                num_computed_tokens=0,
                output_token_ids=[*range(20, 60), i],
            )
            batch.add_request(request)
        batch.refresh_metadata()
        return batch

    ours, theirs = filled(RowBatch, seeds=SeedSource(0, 0), default_salt=0), filled(InputBatch)
    unrun = ""
    sampler, stock = GumbelSampler(settings=SamplerSettings(backend="reference")), Sampler()
    for step in range(STEPS):
        logits = random_logits(step)
        drawn = sampler(logits.clone(), ours.sampling_metadata).sampled_token_ids.flatten().tolist()
        metadata = theirs.sampling_metadata
        edited = stock.apply_logits_processors(logits.clone(), metadata, False)
        expected = sample_reference.draw(edited.numpy(), ours.sampling_metadata.rows.params()).tokens.tolist()
        compare(drawn, expected, "the definition's", step)
        try:
            greedy = stock(logits.clone(), metadata).sampled_token_ids.flatten().tolist()[:1]
            compare(drawn[:1], greedy, "that of vLLM's own sampler for a greedy request", step)
        except (AttributeError, NotImplementedError) as error:
            unrun = f"; vLLM's own sampler cannot be run here ({error})"
        for batch in (ours, theirs):
            for row, token in enumerate(drawn):
                end = batch.num_tokens_no_spec[row]
                batch.token_ids_cpu[row, end] = token
                batch.num_tokens_no_spec[row] = end + 1
                batch.req_output_token_ids[row].append(token)
    what = "greedy, unseeded, seeded, filtered and penalised requests"
    return f"{STEPS * ROWS} tokens are the definition's, of {what}{unrun}"


def draw_v2() -> str:
    """Draw under runner V2; return what was compared."""
    from vllm.sampling_params import SamplingParams

    from vllm_gumbel.integration import speculative_v2, stock_v2, v2, watch_v2  # noqa: F401  all classes are made
    from vllm_gumbel.integration.rows import SeedSource
    from vllm_gumbel.integration.slots import SlotStates

    settings = SamplerSettings(backend="reference")
    states = SlotStates(ROWS, VOCABULARY, seeds=SeedSource(0, 0), settings=settings, default_stop=2)
    for i, given in enumerate(REQUESTS):
        states.add_request(i, SamplingParams(**given))
    states.apply_staged_writes()
    seeds, slots = SeedSource(0, 0), torch.arange(ROWS, dtype=torch.int32)
    seed = np.array([each["seed"] if "seed" in each else seeds.next() for each in REQUESTS], np.uint64)
    draw = dispatch.choose_for_slots("reference", device="cpu", noise=Noise.OWN).draw
    for step in range(STEPS):
        logits, positions = random_logits(step), torch.full((ROWS,), step)
        filters = states.filters(slots.numpy())
        drawn = draw(
            logits, states.params(), slots, positions, filters, usable_vocab=None, noise=Noise.OWN, processed=None
        )
        params = RowParams.uniform(ROWS)
        params.seed[:], params.position[:] = seed, step
        for row, given in enumerate(REQUESTS):
            for name in ("temperature", "top_k", "top_p", "min_p"):
                getattr(params, name)[row] = given.get(name, getattr(params, name)[row])
        compare(
            drawn.tokens.tolist(),
            sample_reference.draw(logits.numpy(), params).tokens.tolist(),
            "the definition's",
            step,
        )
    return f"{STEPS * ROWS} tokens are the definition's; what is Triton's was not run"


def on_the_cpu() -> None:
    """Let vLLM take this machine for a CPU, whatever it was built for, and load what its workers there load first."""
    import vllm.platforms
    from vllm.platforms.cpu import CpuPlatform

    vllm.platforms.current_platform = CpuPlatform()
    import vllm.v1.worker.cpu.shm  # in place of pinned memory and streams


def random_logits(step: int) -> torch.Tensor:
    """Return float32 logits [rows, vocabulary]."""
    return torch.randn(ROWS, VOCABULARY, generator=torch.Generator().manual_seed(step)) * 3


def compare(drawn: list[int], expected: list[int], whose: str, step: int) -> None:
    """End with 1 if a token is not the expected one."""
    for row, (token, right) in enumerate(zip(drawn, expected, strict=True)):
        if token != right:
            print(f"request {REQUESTS[row]} got token {token} in step {step}, {whose} is {right}")
            sys.exit(1)


def main() -> None:
    """Draw under the runner that is named."""
    draw = {"V1": draw_v1, "V2": draw_v2}[sys.argv[1]]
    try:
        on_the_cpu()
        print(draw())
    except (ImportError, AttributeError, OSError) as error:
        print(f"cannot be run with this machine's packages: {type(error).__name__}: {error}")
        sys.exit(3)


if __name__ == "__main__":
    main()
