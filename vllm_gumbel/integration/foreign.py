"""Processors of other packages that act after the temperature, which the draw then must not apply again."""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from vllm.v1.sample.logits_processor import MinPLogitsProcessor

from vllm_gumbel.kernels.contract import GREEDY_TEMPERATURE, RowParams


def apply(logits: torch.Tensor, params: RowParams, processors: Sequence[Any]) -> tuple[torch.Tensor, RowParams]:
    """Return logits tempered and after all argmax-invariant processors, and what is left for the draw to do.

    That is everything if vLLM's own min_p is the only one. Another package's acts after it and may depend on it.

    Args:
        logits: [rows, vocab].
        params: of these rows.
        processors: argmax-invariant ones.
    """
    if all(isinstance(processor, MinPLogitsProcessor) for processor in processors):
        return logits, params
    temperature = params.temperature
    divisor = torch.from_numpy(np.where(temperature < GREEDY_TEMPERATURE, np.float32(1), temperature))
    tempered = logits.float() / divisor.to(logits.device).unsqueeze(1)
    for processor in processors:
        tempered = processor.apply(tempered)
    greedy = torch.from_numpy(temperature < GREEDY_TEMPERATURE).to(logits.device)
    return torch.where(greedy.unsqueeze(1), logits, tempered), _with_temperature_and_min_p_applied(params)


def _with_temperature_and_min_p_applied(params: RowParams) -> RowParams:
    """Return `params` for logits that are tempered already: temperature 1 for every row that is not greedy."""
    greedy = params.temperature < GREEDY_TEMPERATURE
    temperature = np.where(greedy, np.float32(0), np.float32(1))
    return replace(params, temperature=temperature, min_p=np.zeros_like(params.min_p))
