"""Per-request state under vLLM's model runner V2: what a slot holds beside vLLM's own parameters.

V2 gives every running request a slot; a request that is preempted leaves its slot and gets another one later. Whatever
is kept per slot is written in `add_request`, completely, so that nothing of the slot's last request is left.
"""

from collections.abc import Mapping
from copy import copy
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from vllm.sampling_params import SamplingParams
from vllm.v1.worker.gpu.buffer_utils import UvaBackedTensor
from vllm.v1.worker.gpu.sample.states import SamplingStates

from vllm_gumbel.integration.rows import RequestRow, SeedSource, settled
from vllm_gumbel.kernels import noise_reference
from vllm_gumbel.kernels.slots import Filters, SlotParams
from vllm_gumbel.rollout.state import Rollout
from vllm_gumbel.settings import SamplerSettings

#: Most requests whose arm is remembered; far more than can wait to come back into a slot.
MOST_REMEMBERED = 65_536


@dataclass
class Admitted:
    """What `RequestRow.of` looks at, of a request that comes without an object of its own."""

    sampling_params: SamplingParams
    req_id: str = ""
    prompt_token_ids: None = None


class SlotStates(SamplingStates):
    """vLLM's parameters by slot, with salt and stop token; nothing here touches logits, since the draw does all that.

    Args:
        max_num_reqs: number of slots.
        vocab_size: vocabulary size.
        seeds: seeds for unseeded requests, in the order in which they get a slot.
        settings: server-wide settings.
        default_stop: id that ends a request which names none; None if the model has none.
        rollout: decides who draws a request.
        names: slot -> id of the request in it.
    """

    def __init__(
        self,
        max_num_reqs: int,
        vocab_size: int,
        *,
        seeds: SeedSource,
        settings: SamplerSettings,
        default_stop: int | None,
        rollout: Rollout | None = None,
        names: Mapping[int, str] | None = None,
    ) -> None:
        super().__init__(max_num_reqs, vocab_size)
        self.by_stock = UvaBackedTensor(max_num_reqs, dtype=torch.int32)  # 1 for the arm `default`
        self.shadowed = np.zeros(max_num_reqs, bool)
        self.requests: dict[int, RequestRow] = {}
        self._rollout, self._names = rollout, {} if names is None else names
        # Of requests, which may leave their slot and come back; by hash, since a client may choose a long id.
        self._arms: dict[int, tuple[str, bool]] = {}
        self.salt = UvaBackedTensor(max_num_reqs, dtype=torch.int64)
        self.bad_row_token = UvaBackedTensor(max_num_reqs, dtype=torch.int64)
        self.seeded = np.zeros(max_num_reqs, bool)
        self._seeds = seeds
        self._settings = settings
        self._default_stop = default_stop

    def has_met(self, req_idx: int) -> bool:
        """Return whether the request that is about to get a slot had one before."""
        return hash(self._names.get(req_idx, "")) in self._arms

    def add_request(self, req_idx: int, sampling_params: SamplingParams) -> bool:
        """Write a request's parameters into its slot; return False: none of them changes logits before the draw."""
        admitted = Admitted(sampling_params, self._names.get(req_idx, ""))
        if hash(admitted.req_id) in self._arms:
            admitted.gumbel_arm = self._arms[hash(admitted.req_id)]  # type: ignore[attr-defined]
        settings = self._settings
        request = RequestRow.of(admitted, self._seeds, settings.salt, settings.rules, self._rollout)
        self._remember(req_idx, admitted.req_id, request)
        seed = request.seed
        if settings.noise == "stock" and request.salt and not request.is_stocks:
            # Stock's noise has no salt, so it goes into the seed.
            seed ^= int(noise_reference.mix64(np.array([request.salt], np.uint64))[0])
        seeded = copy(settled(sampling_params, request.keys, self.vocab_size, self._settings.rules))
        seeded.seed = _as_signed(seed)  # vLLM stores it as int64, and would fail for one of 2^63 and above
        super().add_request(req_idx, seeded)
        self.salt.np[req_idx] = _as_signed(request.salt)
        self.seeded[req_idx] = request.seeded
        stop = self._default_stop if request.stop_token is None else request.stop_token
        self.bad_row_token.np[req_idx] = 0 if stop is None or self._settings.on_bad_row == "lowest" else stop
        return False

    def _remember(self, slot: int, name: str, request: RequestRow) -> None:
        """Keep what a request is, and its arm beyond its stay in the slot."""
        self.requests[slot] = request
        self.by_stock.np[slot] = request.is_stocks
        self.shadowed[slot] = request.shadowed
        if name:
            self._arms[hash(name)] = request.arm, request.shadowed
        if len(self._arms) > MOST_REMEMBERED:
            del self._arms[next(iter(self._arms))]

    def apply_staged_writes(self) -> None:
        """Make what was written visible to the device."""
        super().apply_staged_writes()
        self.salt.copy_to_uva()
        self.by_stock.copy_to_uva()
        self.bad_row_token.copy_to_uva()

    def params(self) -> SlotParams:
        """Return the parameters of the draw, as the device sees them in this step."""
        return SlotParams(
            temperature=self.temperature.gpu,
            top_k=self.top_k.gpu,
            top_p=self.top_p.gpu,
            min_p=self.min_p.gpu,
            seed=self.seeds.gpu,
            salt=self.salt.gpu,
        )

    def filters(self, slots: np.ndarray) -> Filters:
        """Return which filters the requests in some slots use."""
        return Filters(
            top_k=bool((self.top_k.np[slots] < self.vocab_size).any()),
            top_p=bool((self.top_p.np[slots] < 1).any()),
            min_p=bool((self.min_p.np[slots] > 0).any()),
        )

    def apply_temperature(self, logits: torch.Tensor, *rows: Any) -> None:
        """Leave logits as they are."""

    def apply_min_p(self, logits: torch.Tensor, *rows: Any) -> None:
        """Leave logits as they are."""


def requests_of_rows(first_rows: torch.Tensor, rows: int) -> torch.Tensor:
    """Return, int64 [rows], the request that each row of a step belongs to.

    Args:
        first_rows: integers [requests + 1]; the first row of each request, and the number of rows.
        rows: that number, as the host knows it.
    """
    index = torch.arange(rows, dtype=first_rows.dtype, device=first_rows.device)
    return torch.searchsorted(first_rows[1:], index, right=True)


def _as_signed(word: int) -> int:
    """Return the int64 with the bits of a 64-bit word."""
    return word - 2**64 if word >= 2**63 else word
