"""Counts what a worker draws; called once a step with arrays, never raising into the serving loop.

Each part counts one group of metrics. A part that raises is counted in `faults_total` under its name and logged once;
the other parts and the tokens go on.
"""

import logging
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Protocol

import numpy as np
import numpy.typing as npt

from vllm_gumbel.metrics import catalogue
from vllm_gumbel.metrics.anomalies import LoopWatch
from vllm_gumbel.metrics.catalogue import ARMS, DEFAULT, GUMBEL, AnomalyKind
from vllm_gumbel.metrics.evidence import EvidenceSums
from vllm_gumbel.metrics.frequencies import Frequencies
from vllm_gumbel.metrics.rollout import RolloutSeries, Shadow
from vllm_gumbel.metrics.series import Series, Total
from vllm_gumbel.metrics.step import Step, flagged
from vllm_gumbel.metrics.summary import Summary
from vllm_gumbel.settings import SamplerSettings

logger = logging.getLogger("vllm.gumbel")


class Part(Protocol):
    """Counts one group of metrics."""

    name: str

    def record(self, step: Step) -> None:
        """Count a step, all of whose tokens are sent."""


class Recorder:
    """The counters of one worker.

    Args:
        folder: where the counters live (`exporter.shared_folder`).
        model_name: label.
        engine: label; the index of the data-parallel replica.
        build: values of the labels of `build_info`.
        settings: which groups are counted, and how.
        vocab: vocabulary size.
        slots: number of requests that a batch holds at most.
        glitches: bool [vocab], the ids that are glitch tokens; None if they are not known.
        summary_seconds: how often a line goes to the log; None for never.

    Raises:
        OSError: the folder cannot be written.
    """

    def __init__(
        self,
        folder: Path,
        *,
        model_name: str,
        engine: int,
        build: dict[str, str],
        settings: SamplerSettings | None = None,
        vocab: int = 0,
        slots: int = 0,
        glitches: npt.NDArray[np.bool_] | None = None,
        summary_seconds: float | None = None,
    ) -> None:
        settings = settings or SamplerSettings()
        series = Series(folder, model_name=model_name, engine=engine)
        anomalies = {
            (kind, arm): series.counter(catalogue.ANOMALOUS_TOKENS, arm, kind=kind)
            for kind in AnomalyKind
            for arm in ARMS
        }
        self._seconds = series.histogram(catalogue.SAMPLER_SECONDS) if settings.watch_time else None
        self.sampled = {arm: series.counter(catalogue.SAMPLED_TOKENS, arm) for arm in ARMS}
        self._shadow = Shadow(series, settings, glitches)
        self.rollout = RolloutSeries(series, self._shadow)
        self._parts: list[Part] = [Counts(series, self.sampled, anomalies, self.rollout.fallbacks)]
        if settings.watch > 0:
            self._parts.append(EvidenceSums(series, anomalies, settings.improbable_below, ARMS))
        if settings.watch_loops:
            self._parts.append(Loops(series, anomalies, slots))
        if glitches is not None:
            self._parts.append(Glitches(glitches, anomalies))
        if settings.watch_frequencies:
            self._parts.append(Frequencies(series, vocab, settings.token_profile))
        if summary_seconds is not None:
            self._parts.append(Summary(self.sampled, anomalies, summary_seconds))
        self._faults = {
            name: series.counter(catalogue.FAULTS, part=name)
            for name in {"recorder", "time", "exactness", "rollout", self._shadow.name, *(p.name for p in self._parts)}
        }
        series.gauge(catalogue.BUILD_INFO, **build).set(1)
        self._reported: set[str] = set()

    def record(self, step: Step, sent: npt.NDArray[np.bool_] | None = None) -> None:
        """Count one step.

        Args:
            step: what was drawn.
            sent: bool [rows], rows whose token goes to the client; None means all.
        """
        try:
            if sent is not None:
                step = step.only(sent)
        except Exception as error:  # whatever it is, the tokens must flow
            self.fault("recorder", error)
            return
        for part in self._parts:
            try:
                part.record(step)
            except Exception as error:  # as above
                self.fault(part.name, error)

    def record_shadow(self, steps: Callable[[], Iterable[tuple[Step, npt.NDArray[np.bool_]]]]) -> None:
        """Count what was drawn in shadow.

        Args:
            steps: returns steps of the arm `shadow`, all of whose rows sent a token of the arm `default`, and, bool
                [rows], whether that token is the row's.
        """
        try:
            for step, agrees in steps():
                self._shadow.record(step, agrees)
        except Exception as error:  # as in `record`
            self.fault(self._shadow.name, error)

    def show_rollout(self, fraction: float, shadow: float, is_open: bool) -> None:
        """Show the state of the rollout: share of the gumbel arm, share in shadow, whether the breaker is open."""
        try:
            self.rollout.show(fraction, shadow, is_open)
        except Exception as error:  # as in `record`
            self.fault("rollout", error)

    def fallback(self, reason: str, error: Exception) -> None:
        """Count that something was done in another way than asked, and log the first error of a kind."""
        key = f"fallback {reason} {type(error).__name__}"
        if key not in self._reported:
            self._reported.add(key)
            logger.warning(
                "vllm-gumbel: fallback (%s), tokens keep flowing, further ones are counted", reason, exc_info=error
            )
        try:
            self.rollout.fallbacks[reason].inc()
        except Exception as second:  # as in `record`
            self.fault("rollout", second)

    def seconds(self, duration: float) -> None:
        """Count the seconds that a step spent in the sampler."""
        if self._seconds is None:
            return
        try:
            self._seconds.observe(duration)
        except Exception as error:  # as in `record`
            self.fault("time", error)

    def fault(self, part: str, error: Exception) -> None:
        """Count an error in the bookkeeping, and log it the first time; never raises."""
        key = f"{part} {type(error).__name__}"
        if key not in self._reported:
            self._reported.add(key)
            logger.warning(
                "vllm-gumbel: counting failed in %s, tokens keep flowing (further ones are counted, not logged): %r",
                part,
                error,
            )
        try:
            self._faults[part].inc()
        except Exception as second:
            if "fault counter" not in self._reported:
                self._reported.add("fault counter")
                logger.warning("vllm-gumbel: the fault itself could not be counted: %r", second)


class Counts:
    """Tokens and requests by arm, and what the draw flagged.

    Args:
        series: makes the counters.
        sampled: counter of tokens by arm.
        anomalies: counters of anomalous tokens by kind and arm.
        fallbacks: counters by reason.
    """

    name = "counts"

    def __init__(
        self,
        series: Series,
        sampled: dict[str, Total],
        anomalies: dict[tuple[AnomalyKind, str], Total],
        fallbacks: dict[str, Total],
    ) -> None:
        self._sampled, self._anomalies, self._fallbacks = sampled, anomalies, fallbacks
        self._requests = {arm: series.counter(catalogue.REQUESTS, arm) for arm in ARMS}
        self._given_up = series.summary(catalogue.TOP_N_GIVEN_UP)
        self._logged: set[AnomalyKind] = set()

    def record(self, step: Step) -> None:
        """Count a step."""
        for arm, mine in step.by_arm():
            self._sampled[arm].inc(int(np.count_nonzero(mine)))
        for each in step.admitted:
            if each.first:
                self._requests[DEFAULT if each.by_stock else GUMBEL].inc()
            if each.fallback is not None:
                self._fallbacks[each.fallback].inc()
        if step.given_up is not None:
            for share in step.given_up[~np.isnan(step.given_up)]:
                self._given_up.observe(share)
        if not step.flags.any():
            return
        for arm, kind, rows in flagged(step):
            self._anomalies[kind, arm].inc(rows)
            if kind not in self._logged:
                self._logged.add(kind)
                logger.warning("vllm-gumbel: %d rows of a step: %s (further ones are counted, not logged)", rows, kind)


class Loops:
    """Loops that begin in generated texts, and the lengths of runs of one token.

    Args:
        series: makes the counters.
        anomalies: counters of anomalous tokens by kind and arm.
        slots: number of slots.
    """

    name = "loops"

    def __init__(self, series: Series, anomalies: dict[tuple[AnomalyKind, str], Total], slots: int) -> None:
        self._watch = LoopWatch(slots)
        self._begun = {arm: anomalies[AnomalyKind.REPETITION, arm] for arm in ARMS}
        self._runs = {arm: series.distribution(catalogue.TOKEN_RUN_LENGTH, arm) for arm in ARMS}

    def record(self, step: Step) -> None:
        """Count a step."""
        for each in step.admitted:
            self._watch.admit(each.slot, each.tokens)
        for arm, mine in step.by_arm():
            update = self._watch.update(step.slots[mine], step.tokens[mine])
            self._begun[arm].inc(int(np.count_nonzero(update.begun)))
            self._runs[arm].add(update.ended_runs)


class Glitches:
    """Tokens that are on the list of glitch tokens.

    Args:
        listed: bool [vocab].
        anomalies: counters of anomalous tokens by kind and arm.
    """

    name = "glitches"

    def __init__(self, listed: npt.NDArray[np.bool_], anomalies: dict[tuple[AnomalyKind, str], Total]) -> None:
        self._listed = listed
        self._seen = {arm: anomalies[AnomalyKind.GLITCH, arm] for arm in ARMS}

    def record(self, step: Step) -> None:
        """Count a step."""
        listed = self._listed[step.tokens]
        for arm, mine in step.by_arm() if listed.any() else ():
            self._seen[arm].inc(int(np.count_nonzero(listed & mine)))
