"""The draw for rows whose parameters lie in slots, on whatever device the logits are: its types, and the host's way.

vLLM's model runner V2 keeps one slot per running request, with parameters in tensors on the device, and each row of
logits points into them; nothing may wait for the device. `sample_triton.draw` is made for that. `on_host` gives a
backend that works on NumPy arrays the same signature: straight on the tensors' memory where that is the host's.
"""

from collections.abc import Callable
from dataclasses import dataclass
from enum import IntEnum
from typing import Protocol

import numpy as np
import torch

from vllm_gumbel.kernels.contract import NO_TOKEN, Draw, RowParams, Stream


class Noise(IntEnum):
    """Which noise decides a draw."""

    OWN = 0  #: `noise_reference`
    STOCK = 1  #: what the kernel of vLLM's runner V2 uses, so that a seeded request gives vLLM's token
    STOCK_FP64 = 2  #: the same with vLLM's option `use_fp64_gumbel`


@dataclass(frozen=True)
class SlotParams:
    """Parameters of requests, one entry a slot; tensors on the device of the logits.

    Attributes:
        temperature, top_k, top_p, min_p: float32, int32, float32, float32 [slots]; as in `contract.RowParams`.
        seed, salt: int64 [slots]; the bits of the uint64 of `contract.RowParams`.
    """

    temperature: torch.Tensor
    top_k: torch.Tensor
    top_p: torch.Tensor
    min_p: torch.Tensor
    seed: torch.Tensor
    salt: torch.Tensor


@dataclass(frozen=True)
class Filters:
    """Which filters any row of a batch uses: what the host knows without asking the device."""

    top_k: bool = False
    top_p: bool = False
    min_p: bool = False

    def __bool__(self) -> bool:
        """Return whether any filter is used."""
        return self.top_k or self.top_p or self.min_p


@dataclass(frozen=True)
class SlotDraw:
    """Result of a batch of draws, on the device of the logits.

    Attributes:
        tokens: int64 [rows]; `NO_TOKEN` where a row has no candidate or no slot.
        flags: uint8 [rows]; bits of `contract.Flag`, 0 for a row without a slot.
    """

    tokens: torch.Tensor
    flags: torch.Tensor


class SlotDrawFunction(Protocol):
    """Signature of a draw from slots.

    Args:
        logits: float32, bfloat16 or float16 [rows, vocab]; not changed.
        params: one entry a slot.
        slots: int32 [rows]; the slot of each row, negative for a row that belongs to no request.
        positions: int64 [rows]; index in its sequence of the last token fed to the model.
        filters: which filters the rows use; one that is said to be unused may be passed over.
        usable_vocab: ids from here on are never drawn; None means that all may be.
        stream: family of noise.
        noise: which noise.
        processed: float32 [rows, vocab] to receive x after the filters; None if not wanted.
    """

    def __call__(
        self,
        logits: torch.Tensor,
        params: SlotParams,
        slots: torch.Tensor,
        positions: torch.Tensor,
        filters: Filters,
        *,
        usable_vocab: int | None = None,
        stream: Stream = Stream.TARGET,
        noise: Noise = Noise.OWN,
        processed: torch.Tensor | None = None,
    ) -> SlotDraw: ...


def on_host(draw: Callable[..., Draw]) -> SlotDrawFunction:
    """Return the draw from slots by a backend of the host; `draw` is that backend's function.

    From an accelerator everything is copied to the host first, which waits for the device. `Filters` are ignored, since
    the host sees each row's own; stock's noise raises a ValueError.
    """

    def draw_slots(
        logits: torch.Tensor,
        params: SlotParams,
        slots: torch.Tensor,
        positions: torch.Tensor,
        filters: Filters,
        *,
        usable_vocab: int | None = None,
        stream: Stream = Stream.TARGET,
        noise: Noise = Noise.OWN,
        processed: torch.Tensor | None = None,
    ) -> SlotDraw:
        if noise != Noise.OWN:
            raise ValueError("noise 'stock' is not drawn on the host")
        slot = slots.cpu().numpy()
        nobody = slot < 0
        slot = np.where(nobody, 0, slot)
        columns = {name: values.cpu().numpy()[slot] for name, values in vars(params).items()}
        columns |= {name: columns[name].view(np.uint64) for name in ("seed", "salt")}
        rows = RowParams(**columns, position=positions.cpu().numpy())
        out = None if processed is None else processed.cpu()
        drawn = draw(
            as_array(logits),
            rows,
            usable_vocab=usable_vocab,
            stream=stream,
            processed=None if out is None else out.numpy(),
        )
        drawn.tokens[nobody], drawn.flags[nobody] = NO_TOKEN, 0
        if processed is not None and out is not processed:
            processed.copy_(out)
        return SlotDraw(*(torch.from_numpy(each).to(logits.device) for each in (drawn.tokens, drawn.flags)))

    return draw_slots


def as_array(logits: torch.Tensor) -> np.ndarray:
    """Return logits as the host's backends take them: bfloat16 as its bits; the same memory for logits on a CPU."""
    values = logits.cpu()
    return values.view(torch.uint16).numpy() if values.dtype == torch.bfloat16 else values.numpy()
