"""Per-request state beside vLLM's batch: seed, salt, min_p, position, keys.

vLLM's model runner keeps one `InputBatch`: a request enters it when first scheduled, leaves when finished, preempted or
not scheduled, and rows move and swap meanwhile. `RowBatch` adds to it what the draw needs. Nothing is tracked row by
row: whenever the batch changes, vLLM rebuilds its sampling metadata, and `Rows` is then rebuilt from the batch's own
list of requests, so that it cannot fall out of step. Positions are read from the batch at every draw.

What outlives a stay in the batch, the seed of an unseeded request, its arm, and the generator of one that vLLM's own
sampler draws, is kept on the runner's `CachedRequestState`, which lives as long as the request.
"""

import logging
import secrets
from collections import deque
from copy import copy
from dataclasses import dataclass, field, fields, replace
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from vllm.sampling_params import SamplingParams
from vllm.v1.sample.metadata import SamplingMetadata
from vllm.v1.worker.gpu_input_batch import CachedRequestState, InputBatch

from vllm_gumbel.integration.penalties import PenaltyCounts
from vllm_gumbel.kernels.contract import GREEDY_TEMPERATURE, RowParams
from vllm_gumbel.metrics.catalogue import DEFAULT, GUMBEL
from vllm_gumbel.metrics.step import Admission
from vllm_gumbel.params import NO_RULES, GumbelParams, ServerRules
from vllm_gumbel.rollout.arms import identity
from vllm_gumbel.rollout.state import Rollout

logger = logging.getLogger("vllm.gumbel")

#: How many requests with `gumbel_return_info` are remembered, and how long an id, which a client may choose, may be.
MOST_TOLD, LONGEST_NAME = 10_000, 256

#: Most requests that are remembered as having entered the batch since the last draw.
LARGEST_QUEUE = 65_536


class SeedSource:
    """Seeds for unseeded requests: 64 bits each, in the order of admission.

    Every tensor-parallel rank admits the same requests in the same order, so equal arguments give all of them the same
    seeds; the replica's index keeps data-parallel replicas from repeating each other.

    Args:
        seed: the server's `--seed`.
        replica: index of the data-parallel replica.
    """

    def __init__(self, seed: int | None, replica: int) -> None:
        entropy = secrets.randbits(64) if seed is None else seed % 2**64
        self._generator = np.random.Generator(np.random.PCG64DXSM([entropy, replica]))

    def next(self) -> int:
        """Return the next seed, an integer in [0, 2^64)."""
        return int(self._generator.integers(0, 2**64, dtype=np.uint64))


@dataclass(frozen=True)
class RequestRow:
    """What the draw needs to know of one request.

    Attributes:
        seed: in [0, 2^64).
        salt: in [0, 2^64).
        min_p: in [0, 1].
        stop_token: id that ends the request; None if no id does.
        penalties: what the request has seen; None if it has no penalty.
        keys: what it set.
        generator: torch's, if vLLM's own sampler is to draw a seeded request.
        seeded: whether the request brought its seed.
        slot: number of the request in the batch, of no other one while it is there.
        arm: who draws it, `gumbel` or `default`.
        shadowed: whether `gumbel` draws beside `default`.
    """

    seed: int
    salt: int
    min_p: float
    stop_token: int | None
    penalties: PenaltyCounts | None = None
    keys: GumbelParams = field(default_factory=GumbelParams)
    generator: torch.Generator | None = None
    seeded: bool = False
    slot: int = 0
    arm: str = GUMBEL
    shadowed: bool = False

    @property
    def is_stocks(self) -> bool:
        """Whether vLLM's own sampler draws the request."""
        return self.arm == DEFAULT

    @property
    def acts_on_rows(self) -> bool:
        """Whether its rows need work of their own at each draw."""
        return self.is_stocks or self.keys.acts_on_rows

    @property
    def is_untouched(self) -> bool:
        """Whether nothing of ours has to do with what the request gets."""
        return self.is_stocks and not self.shadowed and not self.keys.acts_on_rows

    @property
    def fallback(self) -> str | None:
        """Why it is not drawn as it asked, as `Admission` has it."""
        if self.arm == self.keys.gumbel_sampler or not self.is_stocks:
            return None
        if self.keys.gumbel_sampler is not None:
            return "breaker"
        return "keys" if self.keys.uses_noise else None

    @classmethod
    def of(
        cls,
        request: CachedRequestState,
        seeds: SeedSource,
        default_salt: int,
        rules: ServerRules = NO_RULES,
        rollout: Rollout | None = None,
    ) -> "RequestRow":
        """Return the state of a request; it keeps the seed and the arm that it was first given."""
        params = request.sampling_params
        seed = params.seed
        if seed is None:
            if not hasattr(request, "gumbel_seed"):
                request.gumbel_seed = seeds.next()
            seed = request.gumbel_seed
        keys = GumbelParams.from_extra_args(params.extra_args, params.temperature, rules)
        if not hasattr(request, "gumbel_arm"):
            request.gumbel_arm = (GUMBEL, False) if rollout is None else _arm(request, keys, rollout)
        arm, shadowed = request.gumbel_arm
        salt = (default_salt if keys.gumbel_salt is None else keys.gumbel_salt) % 2**64
        stops = [params.eos_token_id, *sorted(params.stop_token_ids or ())]
        return cls(
            seed=seed % 2**64,
            salt=salt,
            min_p=params.min_p,
            stop_token=next((stop for stop in stops if stop is not None), None),
            penalties=PenaltyCounts.of(request.prompt_token_ids, params),
            keys=keys,
            generator=getattr(request, "gumbel_generator", None),
            seeded=params.seed is not None,
            arm=arm,
            shadowed=shadowed,
        )


class Rows:
    """The rows of a batch as arrays, in the batch's order.

    Args:
        batch: the batch they mirror.
    """

    def __init__(self, batch: InputBatch) -> None:
        self._batch = batch
        self.seed = np.zeros(batch.max_num_reqs, np.uint64)
        self.salt = np.zeros(batch.max_num_reqs, np.uint64)
        self.min_p = np.zeros(batch.max_num_reqs, np.float32)
        self.slot = np.zeros(batch.max_num_reqs, np.int64)
        self.seeded = np.zeros(batch.max_num_reqs, bool)
        self.stop_token: list[int | None] = []
        self.penalties: list[tuple[int, PenaltyCounts]] = []
        self.keyed: list[tuple[int, RequestRow]] = []  # rows whose keys act on every draw
        self.restricted: list[int] = []  # rows with `allowed_token_ids`
        self.untouched = False  # whether vLLM's own sampler alone has to do with the batch

    def rebuild(self, requests: list[RequestRow]) -> None:
        """Take over the requests of the batch, one a row."""
        for i, request in enumerate(requests):
            self.seed[i] = request.seed
            self.salt[i] = request.salt
            self.min_p[i] = request.min_p
            self.slot[i] = request.slot
            self.seeded[i] = request.seeded
        self.stop_token = [request.stop_token for request in requests]
        self.penalties = [(i, request.penalties) for i, request in enumerate(requests) if request.penalties]
        self.keyed = [(i, request) for i, request in enumerate(requests) if request.acts_on_rows]
        self.untouched = bool(requests) and all(request.is_untouched for request in requests)
        self.restricted = [i for i, name in enumerate(self._batch.req_ids) if name in self._batch.has_allowed_token_ids]

    def take_admitted(self) -> list[Admission]:
        """Return the requests that entered the batch since the last call."""
        admitted = list(self._batch.admitted)
        self._batch.admitted.clear()
        return admitted

    def generated(self, row: int) -> int:
        """Return how many tokens the request of a row has generated, without drafts."""
        return int(self._batch.num_tokens_no_spec[row] - self._batch.num_prompt_tokens[row])

    def params(self) -> RowParams:
        """Return the parameters of the draw, one entry a row.

        A row's position is that of the last token fed to the model: its tokens so far, without drafts, less one. For a
        prompt that is not yet complete that is past what was fed, and vLLM discards the draw.
        """
        batch, rows = self._batch, self._batch.num_reqs
        return RowParams(
            temperature=batch.temperature_cpu[:rows],
            top_k=batch.top_k_cpu[:rows],
            top_p=batch.top_p_cpu[:rows],
            min_p=self.min_p[:rows],
            seed=self.seed[:rows],
            position=batch.num_tokens_no_spec[:rows].astype(np.int64) - 1,
            salt=self.salt[:rows],
        )


@dataclass
class RowMetadata(SamplingMetadata):
    """vLLM's sampling metadata with the rows it belongs to."""

    rows: Rows | None = None


class RowBatch(InputBatch):
    """vLLM's batch, whose sampling metadata carries `Rows`.

    Requests enter without their torch generator: the draw needs none, and with one in the batch a seeded request whose
    prompt takes several steps kills the engine on a CPU, where the runner rewinds a generator that has no offset. They
    enter with the parameters that their keys settle.

    Args:
        seeds: source of seeds for unseeded requests.
        default_salt: salt of requests that set none.
        rules: of the server, for the keys of its requests.
        rollout: decides who draws a request.
        arguments, keywords: vLLM's.

    Attributes:
        told: request -> seed and salt, of the last requests with `gumbel_return_info`.
    """

    logitsprocs_need_output_token_ids: bool

    def __init__(
        self,
        *arguments: Any,
        seeds: SeedSource,
        default_salt: int,
        rules: ServerRules = NO_RULES,
        rollout: Rollout | None = None,
        **keywords: Any,
    ) -> None:
        self.rollout = rollout or Rollout()
        self._seeds = seeds
        self._default_salt = default_salt
        self._rules = rules
        self.told: dict[str, tuple[int, int]] = {}
        self._request_rows: dict[str, RequestRow] = {}
        self._free_slots: list[int] = []
        self.admitted: deque[Admission] = deque(maxlen=LARGEST_QUEUE)  # a rank that never draws never takes them
        self._rows: Rows | None = None  # made at the end, since vLLM's constructor already asks for metadata
        super().__init__(*arguments, **keywords)
        self._free_slots = list(reversed(range(self.max_num_reqs)))
        self._rows = Rows(self)

    def add_request(self, request: CachedRequestState) -> int:
        """Add a request to the batch and return its row."""
        if request.generator is not None:
            request.gumbel_generator, request.generator = request.generator, None
        given = request.sampling_params
        if given is None:
            return super().add_request(request)
        row = RequestRow.of(request, self._seeds, self._default_salt, self._rules, self.rollout)
        row = replace(row, slot=self._free_slots.pop())
        self._request_rows[request.req_id] = row
        first, request.gumbel_admitted = not hasattr(request, "gumbel_admitted"), True
        fallback = row.fallback if first else None
        self.admitted.append(Admission(row.slot, tuple(request.output_token_ids), first, row.is_stocks, fallback))
        if row.keys.gumbel_return_info:
            self._tell(request.req_id, row)
        request.sampling_params = settled(given, row.keys, self.vocab_size, self._rules)
        try:
            return super().add_request(request)
        finally:
            request.sampling_params = given

    def remove_request(self, req_id: str) -> int | None:
        """Remove a request from the batch and return the row it had, None if it had none."""
        left = self._request_rows.pop(req_id, None)
        if left is not None:
            self._free_slots.append(left.slot)
        return super().remove_request(req_id)

    def _tell(self, name: str, row: RequestRow) -> None:
        """Note what a request draws with, for whoever wants to draw it again; not of one with an overlong id."""
        name_or_part = name if len(name) <= LONGEST_NAME else f"{name[:LONGEST_NAME]}..."
        logger.debug("vllm-gumbel: request %s draws with seed %d and salt %d", name_or_part, row.seed, row.salt)
        if name_or_part is not name:
            return
        self.told[name] = row.seed, row.salt
        if len(self.told) > MOST_TOLD:
            del self.told[next(iter(self.told))]

    def _make_sampling_metadata(self) -> SamplingMetadata:
        if self._rows is None or self.is_pooling_model:
            return super()._make_sampling_metadata()
        self._rows.rebuild([self._request_rows[req_id] for req_id in self.req_ids])
        needed = self.logitsprocs_need_output_token_ids
        if any(request.keys.gumbel_repetition_offset > 0 for _, request in self._rows.keyed):
            self.logitsprocs_need_output_token_ids = True  # or vLLM leaves out the tokens that were generated
        metadata = super()._make_sampling_metadata()
        self.logitsprocs_need_output_token_ids = needed
        return RowMetadata(**{f.name: getattr(metadata, f.name) for f in fields(metadata)}, rows=self._rows)


def _arm(request: CachedRequestState, keys: GumbelParams, rollout: Rollout) -> tuple[str, bool]:
    """Return the arm of a new request, and whether it is drawn in shadow."""
    who = identity(keys.gumbel_rollout_key, request.req_id)
    arm = rollout.arm(who, keys.gumbel_sampler)
    return arm, arm == DEFAULT and rollout.is_shadowed(who)


def settled(params: SamplingParams, keys: GumbelParams, vocab: int, rules: ServerRules = NO_RULES) -> SamplingParams:
    """Return a request's parameters with the keys that only set parameters applied; the same object if none does."""
    greedy = params.temperature < GREEDY_TEMPERATURE
    temperature = params.temperature if greedy else keys.temperature(params.temperature, vocab, rules)
    top_k = keys.top_k(params.top_k)
    if (temperature, top_k) == (params.temperature, params.top_k):
        return params
    changed = copy(params)
    changed.temperature, changed.top_k = temperature, top_k
    return changed


def detached_params(metadata: SamplingMetadata, rows: int, seeds: SeedSource, vocab: int) -> RowParams:
    """Return parameters for logits that belong to no batch, as in vLLM's profiling run: its values, fresh seeds."""

    def column(values: Any, absent: float, dtype: npt.DTypeLike) -> npt.NDArray[Any]:
        return np.full(rows, absent, dtype) if values is None else values.cpu().numpy().astype(dtype)

    return RowParams(
        temperature=column(metadata.temperature, 0.0, np.float32),
        top_k=column(metadata.top_k, vocab, np.int32),
        top_p=column(metadata.top_p, 1.0, np.float32),
        min_p=np.zeros(rows, np.float32),
        seed=np.array([seeds.next() for _ in range(rows)], np.uint64),
        position=np.zeros(rows, np.int64),
        salt=np.zeros(rows, np.uint64),
    )
