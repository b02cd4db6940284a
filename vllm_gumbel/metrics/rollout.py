"""What is counted of a rollout: its state, what is drawn in shadow, what could not be done as asked."""

import numpy as np
import numpy.typing as npt

from vllm_gumbel.metrics import catalogue
from vllm_gumbel.metrics.catalogue import DEFAULT, SHADOW, AnomalyKind
from vllm_gumbel.metrics.evidence import EvidenceSums
from vllm_gumbel.metrics.series import Series, Total
from vllm_gumbel.metrics.step import Step, flagged
from vllm_gumbel.settings import SamplerSettings

#: Values of the label `reason` of `fallbacks_total`.
FALLBACK_REASONS = ("kernel", "breaker", "keys")


class Shadow:
    """What the gumbel arm drew beside tokens of the default arm, which were sent.

    Its series begin when something is first to be drawn in shadow, so that a server without it does not show a third
    arm.

    Args:
        series: makes the counters.
        settings: which groups are counted.
        glitches: bool [vocab], the ids that are glitch tokens; None if they are not counted.
    """

    name = "shadow"

    def __init__(self, series: Series, settings: SamplerSettings, glitches: npt.NDArray[np.bool_] | None) -> None:
        self._series, self._settings, self._glitches = series, settings, glitches
        self._anomalies: dict[tuple[AnomalyKind, str], Total] = {}

    def begin(self) -> None:
        """Show the series, at 0; a second call changes nothing."""
        if self._anomalies:
            return
        series = self._series
        kinds = [kind for kind in AnomalyKind if kind != AnomalyKind.REPETITION]
        self._results = {
            agrees: series.counter(catalogue.SHADOW_TOKENS, SHADOW, result=result)
            for agrees, result in ((True, "agree"), (False, "differ"))
        }
        self._anomalies = {
            (kind, SHADOW): series.counter(catalogue.ANOMALOUS_TOKENS, SHADOW, kind=kind) for kind in kinds
        }
        self._evidence = None
        if self._settings.watch > 0:
            self._evidence = EvidenceSums(series, self._anomalies, self._settings.improbable_below, (SHADOW,))

    def record(self, step: Step, agrees: npt.NDArray[np.bool_]) -> None:
        """Count a step; see `Recorder.record_shadow`."""
        self.begin()
        agreeing = int(np.count_nonzero(agrees))
        self._results[True].inc(agreeing)
        self._results[False].inc(len(agrees) - agreeing)
        for arm, kind, rows in flagged(step):
            self._anomalies[kind, arm].inc(rows)
        if self._glitches is not None:
            self._anomalies[AnomalyKind.GLITCH, SHADOW].inc(
                int(np.count_nonzero(self._glitches[step.tokens[step.tokens >= 0]]))
            )
        if self._evidence is not None:
            self._evidence.record(step)


class RolloutSeries:
    """The state of the rollout, and requests and steps that something else had to serve than was asked for.

    Args:
        series: makes them.
        shadow: told when something is to be drawn in shadow.
    """

    def __init__(self, series: Series, shadow: Shadow) -> None:
        self._fraction = series.gauge(catalogue.ROLLOUT_FRACTION)
        self._share = series.gauge(catalogue.ROLLOUT_SHADOW, DEFAULT)
        self._open = series.gauge(catalogue.BREAKER_OPEN)
        self._shadow = shadow
        self.fallbacks = {reason: series.counter(catalogue.FALLBACKS, reason=reason) for reason in FALLBACK_REASONS}

    def show(self, fraction: float, shadow: float, is_open: bool) -> None:
        """Show the state: share of the gumbel arm, share drawn in shadow, whether the breaker is open."""
        if shadow > 0:
            self._shadow.begin()
        self._fraction.set(fraction)
        self._share.set(shadow)
        self._open.set(float(is_open))
