"""Per-request state beside vLLM's batch: seed, salt, min_p, position.

vLLM's model runner keeps one `InputBatch`: a request enters it when first scheduled, leaves when finished, preempted or
not scheduled, and rows move and swap meanwhile. `RowBatch` adds to it what the draw needs. Nothing is tracked row by
row: whenever the batch changes, vLLM rebuilds its sampling metadata, and `Rows` is then rebuilt from the batch's own
list of requests, so that it cannot fall out of step. Positions are read from the batch at every draw.

What outlives a stay in the batch, the seed of an unseeded request, is kept on the runner's `CachedRequestState`, which
lives as long as the request.
"""

import secrets
from dataclasses import dataclass, fields
from typing import Any

import numpy as np
import numpy.typing as npt
from vllm.v1.sample.metadata import SamplingMetadata
from vllm.v1.worker.gpu_input_batch import CachedRequestState, InputBatch

from vllm_gumbel.integration.penalties import PenaltyCounts
from vllm_gumbel.kernels.contract import RowParams
from vllm_gumbel.params import GumbelParams


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
    """

    seed: int
    salt: int
    min_p: float
    stop_token: int | None
    penalties: PenaltyCounts | None = None

    @classmethod
    def of(cls, request: CachedRequestState, seeds: SeedSource, default_salt: int) -> "RequestRow":
        """Return the state of a request; an unseeded one keeps the seed that it was first given."""
        params = request.sampling_params
        seed = params.seed
        if seed is None:
            if not hasattr(request, "gumbel_seed"):
                request.gumbel_seed = seeds.next()
            seed = request.gumbel_seed
        salt = GumbelParams.from_extra_args(params.extra_args).gumbel_salt
        stops = [params.eos_token_id, *sorted(params.stop_token_ids or ())]
        return cls(
            seed=seed % 2**64,
            salt=(default_salt if salt is None else salt) % 2**64,
            min_p=params.min_p,
            stop_token=next((stop for stop in stops if stop is not None), None),
            penalties=PenaltyCounts.of(request.prompt_token_ids, params),
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
        self.stop_token: list[int | None] = []
        self.penalties: list[tuple[int, PenaltyCounts]] = []
        self.restricted: list[int] = []  # rows with `allowed_token_ids`

    def rebuild(self, requests: list[RequestRow]) -> None:
        """Take over the requests of the batch, one a row."""
        for i, request in enumerate(requests):
            self.seed[i] = request.seed
            self.salt[i] = request.salt
            self.min_p[i] = request.min_p
        self.stop_token = [request.stop_token for request in requests]
        self.penalties = [(i, request.penalties) for i, request in enumerate(requests) if request.penalties]
        self.restricted = [i for i, name in enumerate(self._batch.req_ids) if name in self._batch.has_allowed_token_ids]

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
    prompt takes several steps kills the engine on a CPU, where the runner rewinds a generator that has no offset.

    Args:
        seeds: source of seeds for unseeded requests.
        default_salt: salt of requests that set none.
        arguments, keywords: vLLM's.
    """

    def __init__(self, *arguments: Any, seeds: SeedSource, default_salt: int, **keywords: Any) -> None:
        self._seeds = seeds
        self._default_salt = default_salt
        self._request_rows: dict[str, RequestRow] = {}
        self._rows: Rows | None = None  # made at the end, since vLLM's constructor already asks for metadata
        super().__init__(*arguments, **keywords)
        self._rows = Rows(self)

    def add_request(self, request: CachedRequestState) -> int:
        """Add a request to the batch and return its row."""
        request.generator = None
        if request.sampling_params is not None:
            self._request_rows[request.req_id] = RequestRow.of(request, self._seeds, self._default_salt)
        return super().add_request(request)

    def remove_request(self, req_id: str) -> int | None:
        """Remove a request from the batch and return the row it had, None if it had none."""
        self._request_rows.pop(req_id, None)
        return super().remove_request(req_id)

    def _make_sampling_metadata(self) -> SamplingMetadata:
        metadata = super()._make_sampling_metadata()
        if self._rows is None or self.is_pooling_model:
            return metadata
        self._rows.rebuild([self._request_rows[req_id] for req_id in self.req_ids])
        return RowMetadata(**{f.name: getattr(metadata, f.name) for f in fields(metadata)}, rows=self._rows)


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
