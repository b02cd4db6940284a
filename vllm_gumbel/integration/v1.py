"""The sampler `gumbel` for vLLM's model runner V1.

Everything before the draw is the parent's: allowed ids, bad words, logits processors, penalties, thinking budgets, and
raw logprobs before them. The draw, with its temperature and filters, is ours.
"""

import logging
from collections.abc import Callable, Sequence
from functools import cached_property, partial
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from vllm.v1.outputs import LogprobsTensors, SamplerOutput
from vllm.v1.sample.metadata import SamplingMetadata
from vllm.v1.sample.sampler import Sampler

from vllm_gumbel.integration import choice, compat, foreign, keys, logprobs, soundness, stock, untouched, worker
from vllm_gumbel.integration.drawn import Beside, Drawn
from vllm_gumbel.integration.edits import edit, edited_rows
from vllm_gumbel.integration.keys import Place
from vllm_gumbel.integration.rows import RowBatch, Rows, SeedSource, detached_params
from vllm_gumbel.integration.watch import Watch, timed
from vllm_gumbel.kernels import dispatch, sample_reference
from vllm_gumbel.kernels.contract import NO_TOKEN, NOISE_VERSION, Draw, Logits, RowParams
from vllm_gumbel.kernels.slots import as_array
from vllm_gumbel.metrics.recorder import Recorder
from vllm_gumbel.rollout.state import Rollout
from vllm_gumbel.settings import SamplerSettings

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.sampling_params import SamplingParams

logger = logging.getLogger("vllm.gumbel")


class GumbelSampler(Sampler):
    """Draws every token as argmax(logit / temperature + noise(seed, position, token)).

    Args:
        settings: server-wide settings.
        usable_vocab: number of ids the tokenizer knows; None if that is unknown.
        default_stop: id that ends a request which names none; None if the model has none.
        seeds: seeds for rows that belong to no request.
        recorder: what counts; None counts nothing.
        logprobs_mode, use_fp64_gumbel: vLLM's; the latter has no effect, since the draw is decided in float64 anyway.
    """

    def __init__(
        self,
        *,
        settings: SamplerSettings | None = None,
        usable_vocab: int | None = None,
        default_stop: int | None = None,
        seeds: SeedSource | None = None,
        recorder: Recorder | None = None,
        logprobs_mode: str = "raw_logprobs",
        use_fp64_gumbel: bool = False,
    ) -> None:
        super().__init__(logprobs_mode=logprobs_mode, use_fp64_gumbel=use_fp64_gumbel)
        self.stock = Sampler(logprobs_mode, use_fp64_gumbel)
        self._stock_rows = stock.make(logprobs_mode, use_fp64_gumbel)
        self.settings = settings or SamplerSettings()
        self.backend = dispatch.choose(self.settings.backend)
        self.recorder = recorder
        self._usable_vocab, self._default_stop = usable_vocab, default_stop
        self.seeds = seeds or SeedSource(seed=0, replica=0)
        self.watch = Watch(self.settings, self.backend, usable_vocab)
        self._decides_alone = True
        self._discarded: Callable[[], np.ndarray] | None = None

    @cached_property
    def rollout(self) -> Rollout:
        """Who draws what; the batch's, once the sampler is bound to a runner."""
        return Rollout(self.settings)

    @classmethod
    def from_vllm_config(cls, config: "VllmConfig", **stock: Any) -> "GumbelSampler":
        """Return the sampler for a worker; `stock` are the arguments that vLLM gives its own."""
        settings = choice.read(config.additional_config).settings
        sampler = cls(
            settings=settings,
            usable_vocab=worker.usable_vocab(config),
            default_stop=worker.end_of_sequence(config),
            seeds=SeedSource(config.model_config.seed, worker.replica(config)),
            **stock,
        )
        sampler.backend.prepare(
            config.model_config.get_vocab_size(),
            worker.logits_dtypes(config),
            settings.threads or torch.get_num_threads(),
            lambda line: logger.info("vllm-gumbel: %s", line),
        )
        sampler.recorder = worker.recorder(config, settings, sampler.backend.name)
        worker.announce(sampler.backend, str(NOISE_VERSION))
        compat.allow_another_engine()
        return sampler

    @classmethod
    def input_batch(cls, config: "VllmConfig") -> Callable[..., RowBatch]:
        """Return what the runner builds in place of vLLM's `InputBatch`."""
        settings = choice.read(config.additional_config).settings
        seeds, rollout = SeedSource(config.model_config.seed, worker.replica(config)), Rollout(settings)
        return partial(RowBatch, seeds=seeds, default_salt=settings.salt, rules=settings.rules, rollout=rollout)

    @classmethod
    def verifier(cls) -> type:
        """Return what the runner builds in place of vLLM's `RejectionSampler`."""
        from vllm_gumbel.integration.speculative import Verifier

        return Verifier

    @classmethod
    def for_runner_v2(cls) -> type:
        """Return the class that draws under vLLM's model runner V2."""
        from vllm_gumbel.integration import v2

        return v2.GumbelSampler

    @classmethod
    def check_config(cls, config: "VllmConfig") -> None:
        """Raise `UnsupportedError` for a server configuration that the sampler cannot serve; before anything starts."""
        compat.require_supported_features(config)
        worker.require_profile(config, choice.read(config.additional_config).settings)

    @classmethod
    def validate_params(cls, params: "SamplingParams", settings: SamplerSettings | None = None) -> None:
        """Raise `ValueError` for a request that the draw cannot honour; at admission, where it becomes a 400."""
        keys.validate(params, settings)

    def bind(self, runner: Any) -> None:
        """Learn from the model runner which draws it discards, so that they are not counted, and who draws what."""
        self._discarded = lambda: runner.discard_request_mask.np[: runner.input_batch.num_reqs]
        # What is seen in one rank only must not make it decide otherwise than the others, which draw the same tokens.
        self._decides_alone = runner.parallel_config.tensor_parallel_size == 1
        self.rollout = runner.input_batch.rollout
        if self.recorder is not None:
            self.rollout.listen(self.recorder.show_rollout)

    def discarded(self, rows: int) -> np.ndarray:
        """Return, bool [rows], which draws of the batch nobody gets: those of prompts that are not complete."""
        return np.zeros(rows, bool) if self._discarded is None else self._discarded()

    def forward(
        self,
        logits: torch.Tensor,
        sampling_metadata: SamplingMetadata,
        predict_bonus_token: bool = False,
        logprobs_mode_override: str | None = None,
    ) -> SamplerOutput:
        """Return the tokens and logprobs of a step; see `compute`. The time it takes is counted."""
        with timed(self.recorder):
            return self.compute(logits, sampling_metadata, predict_bonus_token, logprobs_mode_override)

    def compute(
        self,
        logits: torch.Tensor,
        sampling_metadata: SamplingMetadata,
        predict_bonus_token: bool,
        logprobs_mode_override: str | None,
    ) -> SamplerOutput:
        """Return the tokens and logprobs of a step; see the parent, whose order of steps this keeps.

        Logits are drawn from as they come, in their own dtype; only rows whose request asks for something that changes
        them are copied to float32, while the parent always copies the batch. Logprobs are numbers that JSON can carry
        (`finite`).
        """
        rows: Rows | None = getattr(sampling_metadata, "rows", None)
        if rows is not None and rows.untouched and not predict_bonus_token:
            return untouched.forward(self, logits, sampling_metadata, rows, logprobs_mode_override)
        wanted = sampling_metadata.max_num_logprobs
        mode = logprobs_mode_override or self.logprobs_mode
        if (
            predict_bonus_token
            or logits.device.type != "cpu"
            or sampling_metadata.logprob_token_ids
            or (wanted is not None and (wanted < 0 or mode != "raw_logprobs"))
        ):
            output = super().forward(logits, sampling_metadata, predict_bonus_token, logprobs_mode_override)
            if output.logprobs_tensors is not None:
                self.finite(output.logprobs_tensors)
            return output
        edited = edited_rows(sampling_metadata, rows)
        if edited is None:
            changed = logits.to(torch.float32, copy=wanted is not None)
            tokens, _ = self.sample(self.apply_logits_processors(changed, sampling_metadata, False), sampling_metadata)
        else:
            tokens = self.draw_edited(logits, sampling_metadata, rows, edited)
        found = None if wanted is None else self.raw_logprobs(logits, tokens, wanted)
        return SamplerOutput(sampled_token_ids=tokens.to(torch.int32).unsqueeze(-1), logprobs_tensors=found)

    @staticmethod
    def apply_penalties(
        logits: torch.Tensor, sampling_metadata: SamplingMetadata, output_token_ids: list[list[int]]
    ) -> torch.Tensor:
        """Return float32 `logits` [rows, vocab], changed in place by the rows' penalties."""
        rows: Rows | None = getattr(sampling_metadata, "rows", None)
        if rows is None or logits.device.type != "cpu":
            return Sampler.apply_penalties(logits, sampling_metadata, output_token_ids)
        values = logits.numpy()
        for row, penalties in rows.penalties:
            penalties.update(output_token_ids[row])
            penalties.apply(values[row])
        return logits

    def apply_logits_processors(
        self, logits: torch.Tensor, sampling_metadata: SamplingMetadata, predict_bonus_token: bool
    ) -> torch.Tensor:
        """Return float32 `logits` [rows, vocab] after everything that comes before the draw; see the parent."""
        logits = super().apply_logits_processors(logits, sampling_metadata, predict_bonus_token)
        rows: Rows | None = getattr(sampling_metadata, "rows", None)
        if rows and rows.keyed:
            where, output = keys.places(rows, np.arange(len(logits))), sampling_metadata.output_token_ids
            keys.edit(logits, rows.params(), where, lambda row, drafted: output[row])
        return logits

    def sample(
        self,
        logits: torch.Tensor,
        sampling_metadata: SamplingMetadata,
        logprobs_mode_override: str | None = None,
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Draw one token per row.

        Args:
            logits: float32, bfloat16 or float16 [rows, vocab], after penalties and masks.
            sampling_metadata: vLLM's; its `rows`, if there are any, give seed and position.
            logprobs_mode_override: vLLM's.

        Returns:
            int64 [rows] token ids, and float32 [rows, vocab] processed logits or logprobs if the mode asks for them.
        """
        mode = logprobs_mode_override or self.logprobs_mode
        wanted = sampling_metadata.max_num_logprobs is not None or bool(sampling_metadata.logprob_token_ids)
        rows: Rows | None = getattr(sampling_metadata, "rows", None)
        count, vocab = logits.shape
        params = rows.params() if rows else detached_params(sampling_metadata, count, self.seeds, vocab)
        given, params = foreign.apply(logits, params, sampling_metadata.logitsprocs.argmax_invariant)
        where = keys.places(rows, np.arange(count)) if rows and rows.keyed else ()
        shown = wanted and mode in ("processed_logits", "processed_logprobs")
        drawn = self.draw_rows(given, params, processed=shown, where=where)
        self.draw_stock(drawn, logits, sampling_metadata, where)
        self.watch.look(self.recorder, drawn, given, params, rows, np.arange(count), where)
        tokens = self._finish(drawn, rows).to(logits.device)
        if drawn.processed is None or mode == "processed_logits":
            return tokens, drawn.processed
        return tokens, self.compute_logprobs(drawn.processed)

    def draw_edited(
        self, logits: torch.Tensor, metadata: SamplingMetadata, rows: Rows | None, edited: list[int]
    ) -> torch.Tensor:
        """Return a token per row of `logits` [rows, vocab], int64 [rows], after the edits of the rows `edited`.

        Rows without an edit are drawn from where they lie. If most have one, the batch is copied and drawn at once.
        """
        count, vocab = logits.shape
        params = rows.params() if rows else detached_params(metadata, count, self.seeds, vocab)
        if 2 * len(edited) > count:
            changed = logits.to(torch.float32, copy=True)
            return self._finish(self._draw_changed(changed, np.arange(count), params, metadata, rows), rows)
        drawn = self.draw_rows(logits, params, processed=False)
        self.watch.look(self.recorder, drawn, logits, params, rows, np.arange(count), skip=edited)
        if edited:
            request = np.array(edited)
            changed = logits[request].to(torch.float32)
            part = self._draw_changed(changed, request, params.take(request), metadata, rows)
            drawn.put(part, request)
        return self._finish(drawn, rows)

    def _draw_changed(
        self,
        logits: torch.Tensor,
        request: np.ndarray,
        params: RowParams,
        metadata: SamplingMetadata,
        rows: Rows | None,
    ) -> Drawn:
        """Return the draw of `logits`, float32 [n, vocab], of the batch's rows `request`; edits are made in place."""
        spoilt = edit(logits, request, None, metadata, rows, params)
        where = keys.places(rows, request) if rows and rows.keyed else ()
        drawn = self.draw_rows(logits, params, processed=False, where=where, spoilt=spoilt)
        self.draw_stock(drawn, logits, metadata, where)
        self.watch.look(self.recorder, drawn, logits, params, rows, request, where)
        return drawn

    def _finish(self, drawn: Drawn, rows: Rows | None) -> torch.Tensor:
        """Count what was noticed in a step's rows, and return their tokens, int64 [rows], on the host."""
        tokens = self.replace_bad_rows(drawn.draw, rows)
        if rows:
            self.count(drawn, rows)
        return torch.from_numpy(tokens)

    def draw_rows(
        self,
        logits: torch.Tensor,
        params: RowParams,
        *,
        processed: bool,
        where: Sequence[Place] = (),
        spoilt: Sequence[int] = (),
    ) -> Drawn:
        """Draw one token per row of `logits` [rows, vocab], those of `where` as their keys say.

        With `processed`, also return the rows after the filters. `spoilt` are rows that our keys have spoilt.
        """
        values = as_array(logits)
        out = np.empty(values.shape, np.float32) if processed else None
        draw = self._draw(values, params, out)
        drawn = Drawn(draw, None if out is None else torch.from_numpy(out).to(logits.device))
        if where:

            def kept_rows(index: np.ndarray) -> np.ndarray:
                if out is not None:
                    return out[index]
                kept = np.empty((len(index), values.shape[1]), np.float32)
                self._draw(values[index], params.take(index), kept)
                return kept

            keys.redraw(draw, params, where, kept_rows)
            drawn.given_up.extend(keys.given_up(values, params, where))
        drawn.hard.extend((int(row), "nonfinite_logits") for row in spoilt)
        drawn.hard.extend(soundness.wrong_rows(values, draw))
        return drawn

    def _draw(self, logits: Logits, params: RowParams, processed: np.ndarray | None) -> Draw:
        """Draw one token per row of `logits` [rows, vocab], by the reference if the backend fails."""
        try:
            return self.backend.draw(logits, params, usable_vocab=self._usable_vocab, processed=processed)
        except Exception as error:  # whatever it is, the tokens must flow
            if self.recorder is not None:
                self.recorder.fallback("kernel", error)
            if self._decides_alone:
                self.rollout.count(0, 1, "a draw that failed")
            return sample_reference.draw(logits, params, usable_vocab=self._usable_vocab, processed=processed)

    def draw_stock(
        self, drawn: Drawn, logits: torch.Tensor, metadata: SamplingMetadata, where: Sequence[Place]
    ) -> None:
        """Let vLLM's own sampler draw the rows of `where` that ask for it; `logits` [rows, vocab] after all edits."""
        mine = [each for each in where if each.request.is_stocks and each.drafted == 0]
        discarded = self.discarded(1 + max((each.row for each in mine), default=0))
        mine = [each for each in mine if not discarded[each.row]]
        if not mine:
            return
        beside = np.array([each.index for each in mine if each.request.shadowed], np.int64)
        if len(beside):
            drawn.beside.append(Beside(beside, Draw(drawn.draw.tokens[beside], drawn.draw.flags[beside])))
        tokens, processed = stock.draw(self._stock_rows, logits, metadata, mine)
        drawn.put_stock([place.index for place in mine], tokens, processed)

    def count(
        self, drawn: Drawn, rows: Rows, sent: np.ndarray | None = None, request: np.ndarray | None = None
    ) -> None:
        """Count the rows of a step that a client gets.

        Args:
            drawn: the step's draw.
            rows: of the batch.
            sent: bool [rows], whether a row's token is sent at all; None means all are.
            request: int [rows], the request that a row belongs to; None means that each row is one.
        """
        admitted = rows.take_admitted()
        if self._discarded is not None:
            kept = ~self._discarded()[slice(None) if request is None else request]
            sent = kept if sent is None else kept & sent
        soundness.tell(self.rollout, drawn, sent, watched=self._decides_alone)
        if self.recorder is None:
            return
        slots = rows.slot[: len(drawn.draw.tokens)] if request is None else rows.slot[request]
        self.recorder.record(drawn.as_step(slots, admitted), sent)
        if drawn.beside:
            self.recorder.record_shadow(lambda: drawn.shadow_steps(slots, sent))

    def replace_bad_rows(self, draw: Draw, rows: Rows | None, request: np.ndarray | None = None) -> np.ndarray:
        """Return the drawn tokens, int64 [rows], with the setting `on_bad_row` applied to rows that have none."""
        for row in np.flatnonzero(draw.tokens == NO_TOKEN):
            draw.tokens[row] = self._token_of_bad_row(rows, int(row if request is None else request[row]))
        return draw.tokens

    def raw_logprobs(self, logits: torch.Tensor, tokens: torch.Tensor, wanted: int) -> LogprobsTensors:
        """Return logprobs of `tokens` int64 [rows] and the `wanted` best, from logits [rows, vocab] as they came."""
        if logits.device.type == "cpu":
            found = self.backend.gather_logprobs(as_array(logits), tokens.numpy(), wanted)
            if found is not None:
                return LogprobsTensors(*(torch.from_numpy(each) for each in found))
        return self.finite(self.gather_logprobs(self.compute_logprobs(logits), wanted, tokens))

    finite = staticmethod(logprobs.finite)
    compute_logprobs = staticmethod(logprobs.compute)
    gather_logprobs = staticmethod(logprobs.gather)

    def _token_of_bad_row(self, rows: Rows | None, row: int) -> int:
        """Return what a row without any candidate yields, by the setting `on_bad_row`."""
        if self.settings.on_bad_row == "lowest" or rows is None:
            return 0
        return next((stop for stop in (rows.stop_token[row], self._default_stop) if stop is not None), 0)
