"""One line in the server's log, now and then, of what was drawn and whether anything was wrong with it."""

import logging
import time
from collections.abc import Callable

from vllm_gumbel.metrics.catalogue import GUMBEL, AnomalyKind
from vllm_gumbel.metrics.series import Total
from vllm_gumbel.metrics.step import Step

logger = logging.getLogger("vllm.gumbel")


class Summary:
    """Logs a line at the first step after each interval in which something was drawn.

    Args:
        sampled: counters of tokens by arm.
        anomalies: counters of anomalous tokens by kind and arm.
        seconds: length of the interval.
        clock: returns seconds that never go back.
    """

    name = "summary"

    def __init__(
        self,
        sampled: dict[str, Total],
        anomalies: dict[tuple[AnomalyKind, str], Total],
        seconds: float,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._sampled, self._anomalies, self._interval, self._clock = sampled, anomalies, seconds, clock
        self._began = clock()
        self._before = self._values()

    def record(self, step: Step) -> None:
        """Look whether a line is due."""
        now = self._clock()
        passed = now - self._began
        if passed < self._interval:
            return
        values = self._values()
        before, self._began, self._before = self._before, now, values
        tokens, seen = ({key: values[i][key] - before[i][key] for key in values[i]} for i in (0, 1))
        if not any(tokens.values()):
            return
        wrong = ", ".join(f"{kind} {count:.0f}" for kind, count in seen.items() if count) or "none"
        stock = "" if not tokens["default"] else f", {tokens['default']:.0f} by vLLM's own sampler"
        logger.info(
            "vllm-gumbel: %.0f tokens in %.1f s (%.1f/s)%s; anomalous: %s",
            sum(tokens.values()),
            passed,
            sum(tokens.values()) / passed,
            stock,
            wrong,
        )

    def _values(self) -> tuple[dict[str, float], dict[str, float]]:
        """Return tokens by arm, and anomalous tokens of our arm by kind."""
        return (
            {arm: total.value for arm, total in self._sampled.items()},
            {kind: total.value for (kind, arm), total in self._anomalies.items() if arm == GUMBEL},
        )
