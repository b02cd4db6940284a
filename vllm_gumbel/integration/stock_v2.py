"""What vLLM's own sampler draws under runner V2, for the rows of the arm `default`.

vLLM's parameters by slot are those of ours (`slots.py`), on which vLLM's own methods and its kernel are called, in
vLLM's order. Its fused samplers for devices, which draw from torch's generator, are left out: with a seed vLLM does not
use them either.
"""

import numpy as np
import torch
from vllm.v1.worker.gpu.sample.gumbel import gumbel_sample
from vllm.v1.worker.gpu.sample.states import SamplingStates

from vllm_gumbel.integration.slots import SlotStates


def draw(
    states: SlotStates,
    logits: torch.Tensor,
    slots: torch.Tensor,
    slots_np: np.ndarray,
    positions: torch.Tensor,
    *,
    use_fp64: bool,
) -> torch.Tensor:
    """Return a token per row, int64 [rows].

    Args:
        states: parameters by slot.
        logits: [rows, vocab], after processors; not changed.
        slots: integers [rows]; the slot of each row.
        slots_np: the slots of the batch, on the host.
        positions: int64 [rows].
        use_fp64: vLLM's `use_fp64_gumbel`.
    """
    changed = torch.empty_like(logits, dtype=torch.float32).copy_(logits)
    SamplingStates.apply_temperature(states, changed, slots, slots_np)
    SamplingStates.apply_min_p(states, changed, slots, slots_np)
    kept = SamplingStates.apply_top_k_top_p(states, changed, slots, slots_np)
    seeds, temperature = states.seeds.gpu, states.temperature.gpu
    drawn: torch.Tensor = gumbel_sample(
        kept, slots, temperature, seeds, positions, apply_temperature=False, is_drafting=False, use_fp64=use_fp64
    )
    return drawn
