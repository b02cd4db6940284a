"""The sampler `gumbel` for vLLM's model runner V2.

Everything before the draw is the parent's: logit bias, penalties, bad words, processors of others, thinking budgets;
and everything after it: trace replay, logprobs, sampling masks. The draw, with its temperature and filters, is ours, on
the device that holds the logits and without waiting for it: what the host has to know, it knows from the requests.

What V2 calls the position of a row, the index of the last token fed to the model, is what V1's rows use too. So with
equal logits a seeded request gets the same token under either runner.
"""

import logging
import time
from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from vllm.config.model import PROCESSED_LOGPROBS_MODES
from vllm.platforms import current_platform
from vllm.v1.worker.gpu.input_batch import InputBatch
from vllm.v1.worker.gpu.sample.output import SamplerOutput
from vllm.v1.worker.gpu.sample.sampler import Sampler
from vllm.v1.worker.gpu.states import RequestState

from vllm_gumbel.integration import choice, compat, keys, stock_v2, worker
from vllm_gumbel.integration.rows import SeedSource
from vllm_gumbel.integration.slots import SlotStates
from vllm_gumbel.integration.tally import Tally
from vllm_gumbel.integration.watch_v2 import Beside, DeviceWatch, Seen
from vllm_gumbel.kernels import dispatch, sample_reference
from vllm_gumbel.kernels.contract import NO_TOKEN, NOISE_VERSION
from vllm_gumbel.kernels.slots import Noise, on_host
from vllm_gumbel.metrics.step import Admission
from vllm_gumbel.params import GumbelParams, ParamsError
from vllm_gumbel.rollout.state import Rollout
from vllm_gumbel.settings import SamplerSettings

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.sampling_params import SamplingParams

logger = logging.getLogger("vllm.gumbel")

#: Keys of a request that act under runner V2: who draws it, and those that are parameters of the draw.
HONOURED = frozenset(
    {
        "gumbel_sampler",
        "gumbel_rollout_key",
        "gumbel_salt",
        "gumbel_preset",
        "gumbel_temperature_rule",
        "gumbel_top_n",
    }
)


class GumbelSampler(Sampler):
    """Draws every token as argmax(logit / temperature + noise(seed, position, token)).

    Args:
        vllm_config: vLLM's configuration, which carries our settings.
        max_num_reqs: number of slots.
        vocab_size: vocabulary size.
        device: device that will hold the logits.
        req_states: the runner's requests, by slot.
        stock: further arguments that vLLM gives its own sampler.
    """

    def __init__(
        self,
        vllm_config: "VllmConfig",
        max_num_reqs: int,
        vocab_size: int,
        device: torch.device,
        req_states: RequestState,
        **stock: Any,
    ) -> None:
        super().__init__(vllm_config, max_num_reqs, vocab_size, device, req_states, **stock)
        self.settings = choice.read(vllm_config.additional_config).settings
        self.rollout = Rollout(self.settings)
        self.sampling_states = SlotStates(
            max_num_reqs,
            vocab_size,
            seeds=SeedSource(vllm_config.model_config.seed, worker.replica(vllm_config)),
            settings=self.settings,
            default_stop=worker.end_of_sequence(vllm_config),
            rollout=self.rollout,
            names=req_states.index_to_req_id,
        )
        self._usable_vocab = worker.usable_vocab(vllm_config)
        self._noise = Noise[self.settings.noise.upper()]
        if self._noise == Noise.STOCK and self.use_fp64_gumbel:
            self._noise = Noise.STOCK_FP64
        self.backend = dispatch.choose_for_slots(self.settings.backend, device=device.type, noise=self._noise)
        if self.backend.host is not None:
            self.backend.host.prepare(
                vocab_size,
                worker.logits_dtypes(vllm_config),
                self.settings.threads or torch.get_num_threads(),
                lambda line: logger.info("vllm-gumbel: %s", line),
            )
        elif device.type != "cpu":
            rows = max_num_reqs * (1 + self.num_speculative_tokens)
            self.compile(vocab_size, device, {vllm_config.model_config.dtype, torch.float32}, rows)
        noise = str(NOISE_VERSION) if self._noise == Noise.OWN else self.settings.noise
        recorder = worker.recorder(vllm_config, self.settings, self.backend.name, noise)
        # With more ranks one might decide otherwise than the others.
        self._decides_alone = vllm_config.parallel_config.tensor_parallel_size == 1
        self._tally = None if recorder is None else Tally(recorder, self.rollout if self._decides_alone else None)
        if recorder is not None:
            self.rollout.listen(recorder.show_rollout)
        self._watch = DeviceWatch(self.settings, self.sampling_states, self.backend, self._noise, self._usable_vocab)
        self._flags: list[torch.Tensor] = []
        self._seen: list[Seen | None] = []
        self._beside: list[Beside | None] = []
        self._admitted: list[Admission] = []
        worker.announce(self.backend, noise)

    @classmethod
    def check_config(cls, config: "VllmConfig") -> None:
        """Raise `UnsupportedError` for a server configuration that the sampler cannot serve; before anything starts."""
        compat.require_supported_features_v2(config, current_platform.device_type)
        settings = choice.read(config.additional_config).settings
        worker.require_profile(config, settings)
        rules = settings.rules
        try:
            refuse_unhonoured(GumbelParams.from_extra_args(None, rules=rules))
        except ParamsError as error:
            raise compat.UnsupportedError(
                f"sampler 'gumbel': request_defaults: {error}: remove it, or set VLLM_USE_V2_MODEL_RUNNER=0"
            ) from None

    @classmethod
    def validate_params(cls, params: "SamplingParams", settings: SamplerSettings | None = None) -> None:
        """Raise `ValueError` for a request that the draw cannot honour; at admission, where it becomes a 400."""
        refuse_unhonoured(keys.validate(params, settings))

    @classmethod
    def verifier(cls) -> type:
        """Return the class that verifies draft tokens."""
        from vllm_gumbel.integration.speculative_v2 import Verifier

        return Verifier

    def add_request(self, req_idx: int, sampling_params: "SamplingParams") -> None:
        """Write a request's parameters into its slot; see the parent."""
        first = not self.sampling_states.has_met(req_idx)  # one that was preempted comes back as if it were new
        super().add_request(req_idx, sampling_params)
        request = self.sampling_states.requests[req_idx]
        fallback = request.fallback if first else None
        self._admitted.append(Admission(req_idx, first=first, by_stock=request.is_stocks, fallback=fallback))

    def __call__(self, logits: torch.Tensor, input_batch: InputBatch) -> SamplerOutput:
        """Return the tokens and logprobs of a step; see the parent."""
        self.begin(logits)
        return self.finish(super().__call__(logits, input_batch), input_batch)

    def sample(
        self,
        logits: torch.Tensor,
        expanded_idx_mapping: torch.Tensor,
        idx_mapping: torch.Tensor,
        idx_mapping_np: np.ndarray,
        pos: torch.Tensor,
        input_ids: torch.Tensor,
        expanded_local_pos: torch.Tensor,
        seq_lens_upper_bound_np: np.ndarray,
        return_logprobs: bool = False,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Draw one token per row; arguments and results are the parent's."""
        layout = (expanded_idx_mapping, idx_mapping, idx_mapping_np, pos, input_ids, expanded_local_pos)
        edited = self.edit(logits, *layout, seq_lens_upper_bound_np)
        return self.draw(logits, edited, expanded_idx_mapping, idx_mapping_np, pos, logprobs=return_logprobs)

    def edit(self, logits: torch.Tensor, *layout: Any) -> torch.Tensor:
        """Return logits after everything that comes before the draw.

        Args:
            logits: [rows, vocab].
            layout: the further arguments of the parent's `apply_sampling_params`.

        Returns:
            `logits` itself if nothing changes it, else a float32 copy.
        """
        return super().apply_sampling_params(logits, *layout, skip_top_k_top_p=True)

    def draw(
        self,
        logits: torch.Tensor,
        edited: torch.Tensor,
        slots: torch.Tensor,
        slots_np: np.ndarray,
        positions: torch.Tensor,
        *,
        logprobs: bool,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Draw one token per row.

        Args:
            logits: float32, bfloat16 or float16 [rows, vocab], as the model gave them. If their logprobs are wanted,
                what JSON cannot carry is replaced in them, after the draw.
            edited: those logits after processors; the same tensor, or float32 of the same shape.
            slots: integers [rows]; the slot of each row, negative for a row that belongs to no request.
            slots_np: the slots of the batch, on the host.
            positions: int64 [rows].
            logprobs: whether logprobs are wanted.

        Returns:
            int64 [rows] token ids, with `on_bad_row` applied; and `edited`, or in its place float32 [rows, vocab]
            logits after the filters if logprobs or a sampling mask need those.
        """
        shows_processed = self.logprobs_mode in PROCESSED_LOGPROBS_MODES
        processed = None
        if self.return_sampling_mask or (logprobs and shows_processed):
            processed = torch.empty(edited.shape, dtype=torch.float32, device=edited.device)
        tokens = self._draw(edited, slots, slots_np, positions, processed)
        tokens = self._share_out(edited, tokens, slots, slots_np, positions)
        self._seen.append(self._look(edited, tokens, slots, slots_np, positions))
        tokens = torch.where(tokens == NO_TOKEN, self.sampling_states.bad_row_token.gpu[slots], tokens)
        if processed is not None:
            make_presentable(processed)
        if logprobs and not shows_processed:
            make_presentable(logits)
        return tokens, edited if processed is None else processed

    def apply_sampling_params(
        self,
        logits: torch.Tensor,
        expanded_idx_mapping: torch.Tensor,
        idx_mapping: torch.Tensor,
        idx_mapping_np: np.ndarray,
        pos: torch.Tensor,
        *layout: Any,
    ) -> torch.Tensor:
        """Return float32 [rows, vocab] logits after processors, temperature and filters: what vLLM's verifier asks for.

        A row without any candidate is left with the token that `on_bad_row` calls for.
        """
        edited = self.edit(logits, expanded_idx_mapping, idx_mapping, idx_mapping_np, pos, *layout)
        processed = torch.empty(edited.shape, dtype=torch.float32, device=edited.device)
        tokens = self._draw(edited, expanded_idx_mapping, idx_mapping_np, pos, processed)
        self._seen.append(None)  # what vLLM's verifier sends is not what was drawn here
        self._beside.append(None)
        instead = self.sampling_states.bad_row_token.gpu[expanded_idx_mapping].unsqueeze(1)
        kept = processed.gather(1, instead).masked_fill((tokens == NO_TOKEN).unsqueeze(1), 0)
        return processed.scatter_(1, instead, kept)

    def compile(self, vocab: int, device: torch.device, dtypes: Iterable[torch.dtype], rows: int) -> None:
        """Draw once in every way that is compiled apart, so that no request waits for a compiler.

        Args:
            vocab: vocabulary size.
            device: where logits will be.
            dtypes: the logits' to come: the model's, and float32 once something has changed them.
            rows: most rows of a step.
        """
        from vllm_gumbel.kernels import sample_triton

        began = time.monotonic()
        logger.info("vllm-gumbel: compiling the draw's kernels, or loading them from Triton's cache")
        for dtype in dtypes:
            sample_triton.warm_up(vocab, dtype, device, usable_vocab=self._usable_vocab, noise=self._noise, rows=rows)
        logger.info("vllm-gumbel: draw kernels ready after %.1f s", time.monotonic() - began)

    def begin(self, logits: torch.Tensor) -> None:
        """Begin with a step."""
        if self._tally is not None:
            self._tally.start(logits.device)

    def finish(self, output: SamplerOutput, input_batch: InputBatch) -> SamplerOutput:
        """Count a step, and return its output with logprobs that JSON can carry."""
        flags, self._flags = self._flags, []
        seen, self._seen = self._seen, []
        beside, self._beside = self._beside, []
        admitted, self._admitted = self._admitted, []
        first = input_batch.req_ids[0]
        if self._tally is not None and first in self.req_states.req_id_to_index and not compat.is_warm_up(first):
            try:
                self._tally.add(*self._watch.report(flags, seen, beside, output, input_batch, admitted))
            except Exception as error:  # whatever it is, the tokens must flow
                self._tally.fault("recorder", error)
        if output.logprobs_tensors is not None:
            make_presentable(output.logprobs_tensors.logprobs)  # a row without any candidate has no logprobs
        return output

    def _draw(
        self,
        logits: torch.Tensor,
        slots: torch.Tensor,
        slots_np: np.ndarray,
        positions: torch.Tensor,
        processed: torch.Tensor | None,
    ) -> torch.Tensor:
        """Return the drawn tokens, `NO_TOKEN` where there is no candidate, and keep the flags for `finish`.

        If the backend fails, the reference draws on the host.
        """
        states = self.sampling_states
        slots = slots.to(torch.int32)  # vLLM's profiling run has int64
        rows = (logits, states.params(), slots, positions, states.filters(slots_np))
        options: dict[str, Any] = {"usable_vocab": self._usable_vocab, "noise": self._noise, "processed": processed}
        try:
            drawn = self.backend.draw(*rows, **options)
        except Exception as error:  # whatever it is, the tokens must flow
            if self._noise != Noise.OWN:
                raise  # the host has no other
            if self._tally is not None:
                self._tally.fallback(error)
            if self._decides_alone:
                self.rollout.count(0, 1, "a draw that failed")
            drawn = on_host(sample_reference.draw)(*rows, **options)
        self._flags.append(drawn.flags)
        return drawn.tokens

    def _share_out(
        self,
        edited: torch.Tensor,
        tokens: torch.Tensor,
        slots: torch.Tensor,
        slots_np: np.ndarray,
        positions: torch.Tensor,
    ) -> torch.Tensor:
        """Return the tokens with those of vLLM's own sampler in its rows, and keep what it is to be compared with.

        Args:
            edited: [rows, vocab].
            tokens: int64 [rows], drawn by ours.
            slots, slots_np, positions: as those of `draw`.
        """
        states = self.sampling_states
        shadowed = states.shadowed[slots_np]
        beside = None
        if self._tally is not None and shadowed.any():
            plain = len(slots_np) == len(tokens)  # with drafts the host does not know whose a row is
            seen = self._look(edited, tokens, slots, slots_np, positions, shadowed) if plain else None
            beside = Beside(tokens, seen)
        self._beside.append(beside)
        if not states.by_stock.np[slots_np].any():
            return tokens
        theirs = stock_v2.draw(states, edited, slots, slots_np, positions, use_fp64=self.use_fp64_gumbel)
        return torch.where(states.by_stock.gpu[slots] > 0, theirs, tokens)

    def _look(
        self,
        edited: torch.Tensor,
        tokens: torch.Tensor,
        slots: torch.Tensor,
        slots_np: np.ndarray,
        positions: torch.Tensor,
        only: np.ndarray | None = None,
    ) -> Seen | None:
        """Return what is seen in some rows, of those in `only`, bool [rows]; other arguments as those of `draw`."""
        if self._tally is None or self.settings.watch == 0:
            return None
        try:
            return self._watch.look(edited, tokens, slots, positions, slots_np, only)
        except Exception as error:  # as in `finish`
            self._tally.fault("exactness", error)
            return None


def refuse_unhonoured(params: GumbelParams) -> None:
    """Raise `ParamsError` for the first key of a request that asks for something and has no effect under runner V2."""
    for key in sorted(params.model_fields_set - HONOURED):
        if getattr(params, key) == type(params).model_fields[key].default:
            continue
        raise ParamsError(key, "has an effect under vLLM's model runner V1 only", getattr(params, key))


def make_presentable(values: torch.Tensor) -> None:
    """Replace in place what JSON cannot carry: NaN by -inf, which vLLM's server floors, +inf by the largest number."""
    values.nan_to_num_(nan=-torch.inf, posinf=torch.finfo(values.dtype).max, neginf=-torch.inf)
