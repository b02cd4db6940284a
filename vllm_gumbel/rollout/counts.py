"""What the gates compare, of a window: numbers that are added up, kept in a file and read again."""

import itertools
import math
from dataclasses import dataclass, field
from typing import Any

from vllm_gumbel.metrics import catalogue
from vllm_gumbel.metrics.catalogue import SHADOW, AnomalyKind
from vllm_gumbel.metrics.scrape import Scrape
from vllm_gumbel.rollout.history import FINISHED, FIRST_TOKEN, HTTP, NEXT_TOKEN, Window


@dataclass(frozen=True)
class ArmCounts:
    """What one arm drew.

    Attributes:
        tokens: drawn.
        watched: tokens whose distribution was looked at.
        kinds: anomalous tokens by `AnomalyKind`.
    """

    tokens: float = 0.0
    watched: float = 0.0
    kinds: dict[str, float] = field(default_factory=dict)

    def __add__(self, other: "ArmCounts") -> "ArmCounts":
        """Return the counts of two windows together."""
        kinds = {str(kind): self.kinds.get(kind, 0.0) + other.kinds.get(kind, 0.0) for kind in AnomalyKind}
        return ArmCounts(self.tokens + other.tokens, self.watched + other.watched, kinds)

    @staticmethod
    def of(counted: Scrape, arm: str) -> "ArmCounts":
        """Return the counts of an arm in a window."""
        drawn = catalogue.SHADOW_TOKENS if arm == SHADOW else catalogue.SAMPLED_TOKENS
        kinds = {str(kind): counted.total(catalogue.ANOMALOUS_TOKENS, arm=arm, kind=kind) for kind in AnomalyKind}
        return ArmCounts(counted.total(drawn, arm=arm), counted.total(catalogue.WATCHED_TOKENS, arm=arm), kinds)


@dataclass(frozen=True)
class Latency:
    """A histogram of seconds.

    Attributes:
        total: sum of the seconds.
        count: of observations.
        up_to: (upper bound, observations up to it), ascending, infinity last.
    """

    total: float = 0.0
    count: float = 0.0
    up_to: tuple[tuple[float, float], ...] = ()

    @property
    def mean(self) -> float:
        """Mean in seconds; NaN without observations."""
        return self.total / self.count if self.count else math.nan

    def quantile(self, share: float) -> float:
        """Return a quantile as `histogram_quantile` of PromQL does: linear within its bucket; NaN if there is none."""
        if not self.up_to or self.up_to[-1][1] <= 0:
            return math.nan
        wanted = share * self.up_to[-1][1]
        for (low, below), (bound, until) in itertools.pairwise(((0.0, 0.0), *self.up_to)):
            if until >= wanted:
                return low if math.isinf(bound) else low + (bound - low) * (wanted - below) / max(until - below, 1e-300)
        return math.nan

    @staticmethod
    def of(counted: Scrape, name: str) -> "Latency":
        """Return what a histogram of vLLM's counted in a window, over all engines."""
        total, count = (math.fsum(value for _, value in counted.named(f"{name}_{part}")) for part in ("sum", "count"))
        up_to: dict[float, float] = {}
        for labels, value in counted.named(f"{name}_bucket"):
            bound = float(labels["le"])
            up_to[bound] = up_to.get(bound, 0.0) + value
        return Latency(total, count, tuple(sorted(up_to.items())))


@dataclass(frozen=True)
class ServerCounts:
    """What whole servers did in a window, whichever arm drew.

    Attributes:
        seconds: length of the window.
        requests: that ended.
        errors: of these, those that ended in an error: an HTTP status of 500 and above, or in the engine, whichever is
            more, since one is often both.
        first_token, next_token: seconds to the first token, and from each to the next.
        sampler_seconds: in the sampler.
        steps: of the sampler.
        tokens: drawn.
    """

    seconds: float = 0.0
    requests: float = 0.0
    errors: float = 0.0
    first_token: Latency = field(default_factory=Latency)
    next_token: Latency = field(default_factory=Latency)
    sampler_seconds: float = 0.0
    steps: float = 0.0
    tokens: float = 0.0

    @staticmethod
    def of(window: Window) -> "ServerCounts":
        """Return the counts of a window."""
        counted = window.counted
        answered = counted.named(HTTP)
        failed = math.fsum(value for labels, value in answered if labels.get("status", "").startswith("5"))
        in_engine = math.fsum(value for _, value in counted.named(FINISHED, finished_reason="error"))
        finished = math.fsum(value for _, value in counted.named(FINISHED))
        return ServerCounts(
            seconds=window.seconds,
            requests=max(finished, math.fsum(value for _, value in answered)),
            errors=max(failed, in_engine),
            first_token=Latency.of(counted, FIRST_TOKEN),
            next_token=Latency.of(counted, NEXT_TOKEN),
            sampler_seconds=counted.total(catalogue.SAMPLER_SECONDS, "_sum"),
            steps=counted.total(catalogue.SAMPLER_SECONDS, "_count"),
            tokens=counted.total(catalogue.SAMPLED_TOKENS),
        )

    @staticmethod
    def restored(content: dict[str, Any]) -> "ServerCounts":
        """Return the counts that `dataclasses.asdict` and JSON made something else of.

        Raises:
            TypeError, KeyError, ValueError: it is something else.
        """
        return ServerCounts(
            seconds=float(content["seconds"]),
            requests=float(content["requests"]),
            errors=float(content["errors"]),
            first_token=_latency(content["first_token"]),
            next_token=_latency(content["next_token"]),
            sampler_seconds=float(content["sampler_seconds"]),
            steps=float(content["steps"]),
            tokens=float(content["tokens"]),
        )


def _latency(content: dict[str, Any]) -> Latency:
    """Return the histogram that `ServerCounts.restored` reads."""
    up_to = tuple((float(bound), float(until)) for bound, until in content["up_to"])
    return Latency(float(content["total"]), float(content["count"]), up_to)
