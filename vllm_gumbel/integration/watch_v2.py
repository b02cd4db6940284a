"""Which rows of a step under runner V2 are looked at, and what the recorder is told of a step."""

from collections.abc import Callable
from itertools import accumulate
from typing import NamedTuple

import numpy as np
import torch
from vllm.v1.worker.gpu.input_batch import InputBatch
from vllm.v1.worker.gpu.sample.output import SamplerOutput

from vllm_gumbel.integration.slots import SlotStates, requests_of_rows
from vllm_gumbel.integration.tally import Finish
from vllm_gumbel.kernels import statistics_torch
from vllm_gumbel.kernels.contract import GREEDY_TEMPERATURE
from vllm_gumbel.kernels.dispatch import SlotBackend
from vllm_gumbel.kernels.slots import Noise
from vllm_gumbel.metrics.step import Admission, Step, Watched
from vllm_gumbel.settings import SamplerSettings


class Seen(NamedTuple):
    """What was seen in some rows of a part of a step.

    Attributes:
        rows: int64 [n]; which rows of the part, on the host.
        columns: tensors [n] on the device.
    """

    rows: np.ndarray
    columns: dict[str, torch.Tensor]


class Beside(NamedTuple):
    """What was drawn in a part of a step some of whose rows are shadowed.

    Attributes:
        tokens: int64 [rows], drawn by ours, on the device.
        seen: in shadowed rows, None for nothing.
    """

    tokens: torch.Tensor
    seen: Seen | None


class DeviceWatch:
    """Looks at the distribution of a share of the rows, on the device that holds their logits.

    The choice comes from a generator of its own, so it knows nothing of what is drawn.

    Args:
        settings: server-wide settings.
        states: parameters by slot.
        backend: draws.
        noise: which noise it draws with.
        usable_vocab: number of ids the tokenizer knows; None if that is unknown.
    """

    def __init__(
        self,
        settings: SamplerSettings,
        states: SlotStates,
        backend: SlotBackend,
        noise: Noise,
        usable_vocab: int | None,
    ) -> None:
        self._share, self._improbable_below = settings.watch, settings.improbable_below
        self._states, self._backend, self._noise, self._usable_vocab = states, backend, noise, usable_vocab
        self._generator = np.random.default_rng()

    def look(
        self,
        logits: torch.Tensor,
        tokens: torch.Tensor,
        slots: torch.Tensor,
        positions: torch.Tensor,
        slots_np: np.ndarray,
        only: np.ndarray | None = None,
    ) -> Seen | None:
        """Return what is seen in some rows, None if no row was chosen.

        Args:
            logits: [rows, vocab], what was drawn from.
            tokens: int64 [rows], what was drawn.
            slots: integers [rows]; the slot of each row.
            positions: int64 [rows].
            slots_np: the slots of the batch, on the host.
            only: bool [rows], rows that may be chosen; None means all.
        """
        drawn = self._generator.random(len(tokens)) < self._share
        chosen = np.flatnonzero(drawn if only is None else drawn & only)
        if not len(chosen):
            return None
        index = torch.from_numpy(chosen).to(logits.device, non_blocking=True)
        part, slot, position, token = logits[index], slots[index].to(torch.int32), positions[index], tokens[index]
        kept = torch.empty(part.shape, dtype=torch.float32, device=part.device)
        self._backend.draw(
            part,
            self._states.params(),
            slot,
            position,
            self._states.filters(slots_np),
            usable_vocab=self._usable_vocab,
            noise=self._noise,
            processed=kept,
        )
        greedy = self._states.temperature.gpu[slot] < GREEDY_TEMPERATURE
        found = statistics_torch.statistics(
            kept, part, token, greedy, usable_vocab=self._usable_vocab, improbable_below=self._improbable_below
        )
        columns = {**found._asdict(), "greedy": greedy, "position": position, "token": token}
        return Seen(chosen, columns)

    def report(
        self,
        flags: list[torch.Tensor],
        seen: list[Seen | None],
        beside: list[Beside | None],
        output: SamplerOutput,
        batch: InputBatch,
        admitted: list[Admission],
    ) -> tuple[dict[str, torch.Tensor], Finish]:
        """Return what the recorder is told of a step, as `Tally.add` takes it.

        Args:
            flags: uint8 [rows], in parts.
            seen: one for each part.
            beside: one for each part, None where no row is shadowed.
            output: the step's result.
            batch: the step's requests.
            admitted: requests that got a slot since the last step.
        """
        arrays = {"flags": torch.cat(flags), **rows_of(output, batch)}
        slots = np.repeat(batch.idx_mapping_np, np.diff(batch.cu_num_logits_np)).astype(np.int64)
        starts = [0, *accumulate(len(part) for part in flags)]
        # Read now: by the time the arrays arrive another request may have the slot.
        by_stock, shadowed = self._states.by_stock.np[slots] > 0, self._states.shadowed[slots]
        watched = self._watched("", seen, starts, slots, arrays)
        shadow_watched = None
        is_shadowed = any(each is not None for each in beside)
        if is_shadowed:
            parts = zip(beside, flags, strict=True)
            arrays["ours"] = torch.cat(
                [torch.zeros_like(part) if each is None else each.tokens for each, part in parts]
            )
            seen_beside = [None if each is None else each.seen for each in beside]
            shadow_watched = self._watched("shadow ", seen_beside, starts, slots, arrays)
        tied = by_stock & (
            self._states.top_k.np[slots] < self._states.vocab_size
        )  # vLLM keeps all that tie with the k-th

        def finish(found: dict[str, np.ndarray]) -> tuple[Step, np.ndarray, list[tuple[Step, np.ndarray]]]:
            step = Step(
                tokens=found["tokens"],
                flags=found["flags"],
                slots=slots,
                by_stock=by_stock,
                watched=None if watched is None else watched(found, tied),
                admitted=admitted,
            )
            if not is_shadowed:
                return step, found["sent"], []
            mine = found["sent"] & shadowed
            drawn = Step(
                tokens=found["ours"],
                flags=found["flags"],
                slots=slots,
                by_stock=np.zeros(len(slots), bool),
                watched=None if shadow_watched is None else shadow_watched(found, np.zeros_like(tied)),
                shadow=True,
            )
            return step, found["sent"], [(drawn.only(mine), (found["ours"] == found["tokens"])[mine])]

        return arrays, finish

    def _watched(
        self,
        name: str,
        seen: list[Seen | None],
        starts: list[int],
        slots: np.ndarray,
        arrays: dict[str, torch.Tensor],
    ) -> Callable[[dict[str, np.ndarray], np.ndarray], Watched] | None:
        """Put what was seen into `arrays`, and return what makes it of their copies; None if nothing was seen.

        Args:
            name: before the names of its arrays.
            seen: one for each part.
            starts: the first row of each part.
            slots: int64 [rows]; the slot of each row.
            arrays: what is copied to the host.
        """
        there = [each for each in seen if each is not None]
        if not there:
            return None
        names = list(there[0].columns)
        for column in names:
            arrays[name + column] = torch.cat([each.columns[column] for each in there])
        rows = np.concatenate([e.rows + at for e, at in zip(seen, starts, strict=False) if e is not None])
        states, own, mine = self._states, self._noise == Noise.OWN, slots[rows]
        seed, salt, seeded = (each[mine].copy() for each in (states.seeds.np, states.salt.np, states.seeded))

        def made(found: dict[str, np.ndarray], other_law: np.ndarray) -> Watched:
            columns = {column: found[name + column] for column in names}
            statistics = statistics_torch.finish(columns, seed.view(np.uint64), salt.view(np.uint64), own_noise=own)
            return Watched(rows, statistics, ~seeded & ~columns["greedy"] & ~other_law[rows])

        return made


def rows_of(output: SamplerOutput, batch: InputBatch) -> dict[str, torch.Tensor]:
    """Return `tokens`, int64 [rows], and `sent`, bool [rows]: which rows of a step gave a token that is sent.

    With drafts a request has several rows, of which it gets the first `num_sampled`; none for an unfinished prompt.
    """
    if not batch.num_draft_tokens:
        return {"tokens": output.sampled_token_ids.flatten(), "sent": output.num_sampled > 0}
    offsets = batch.expanded_local_pos.long()
    request = requests_of_rows(batch.cu_num_logits, len(offsets))
    return {
        "tokens": output.sampled_token_ids[request, offsets].long(),
        "sent": offsets < output.num_sampled[request],
    }
