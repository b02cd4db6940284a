"""What gates are asked, what they answer, and how two frequencies are compared; `gates.py` says which there are."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum

from vllm_gumbel.metrics.catalogue import GUMBEL, SHADOW, AnomalyKind
from vllm_gumbel.rollout.counts import ArmCounts, ServerCounts
from vllm_gumbel.rollout.exact import binomial_tail, chance_of_first, rate_that_shows
from vllm_gumbel.rollout.history import Window

#: Kinds that the draw flags in the logits, which are no fault of a sampler.
FLAGS = (AnomalyKind.NONFINITE_LOGITS, AnomalyKind.NO_CANDIDATE, AnomalyKind.PADDED_ID)
#: Kinds that are compared, by arm; outside_filter has no chance of a false alarm.
COMPARED = {
    GUMBEL: (AnomalyKind.IMPROBABLE, AnomalyKind.REPETITION, AnomalyKind.GLITCH, *FLAGS),
    SHADOW: (AnomalyKind.IMPROBABLE, AnomalyKind.GLITCH),
}


class Outcome(StrEnum):
    """What a gate says."""

    PASS = "pass"
    FAIL = "fail"
    UNKNOWN = "unknown"
    SHOWN = "shown"


@dataclass(frozen=True)
class Result:
    """What one gate says.

    Attributes:
        gate: its name, with the arm before it if it is about one.
        outcome: of it; `SHOWN` decides nothing.
        says: what was seen, in words with numbers.
        p_value: chance of what was seen or more if the arm is no worse than tolerated; None where there is none.
        rate: `p_value` below which the gate fails.
        finds: rate of events that it would have found with chance 0.99; None for gates of anything else.
    """

    gate: str
    outcome: Outcome
    says: str
    p_value: float | None = None
    rate: float | None = None
    finds: float | None = None


@dataclass(frozen=True)
class Limits:
    """What is tolerated.

    Attributes:
        ratio: rate of anomalies or errors, as a multiple of the reference's.
        least_rise: share of the tokens by which anomalies may rise unseen; a gate that could miss more is unknown.
        least_error_rise: the same for errors, of the requests.
        first_token, next_token: mean and 95th percentile of these latencies, as multiples of the baseline's.
        sampler: time in the sampler, as a multiple of the baseline's.
        kl: nats of the token frequencies from their reference; None for no limit.
        ignored: names of gates, without the arm, that are only shown.
    """

    ratio: float = 1.5
    least_rise: float = 0.01
    least_error_rise: float = 0.05
    first_token: float = 1.5
    next_token: float = 1.25
    sampler: float = 1.5
    kl: float | None = None
    ignored: frozenset[str] = frozenset()


@dataclass(frozen=True)
class Question:
    """What is to be judged.

    Attributes:
        window: what was counted.
        arms: those that are judged.
        alpha: chance that any gate with a chance fails an arm that is no worse.
        limits: what is tolerated.
        fraction, shadow: what the servers were asked for; None if that is not known.
        baseline: what they did before the first stage; None if that is not known.
        earlier: counts of earlier windows, by arm.
    """

    window: Window
    arms: Sequence[str]
    alpha: float
    limits: Limits = field(default_factory=Limits)
    fraction: float | None = None
    shadow: float | None = None
    baseline: ServerCounts | None = None
    earlier: Mapping[str, ArmCounts] = field(default_factory=dict)

    @property
    def rate(self) -> float:
        """Chance of a false alarm that each gate gets."""
        return self.alpha / (1 + sum(1 + len(COMPARED[arm]) for arm in self.arms))


def compare(
    gate: str,
    seen: tuple[float, float],
    reference: tuple[float, float],
    question: Question,
    *,
    units: str,
    whose: str,
    least_rise: float,
) -> Result:
    """Return whether events are more frequent than those of a reference, tolerated ratio included.

    Args:
        gate: its name.
        seen: events and trials of what is judged.
        reference: those of what it is compared with.
        question: for rate and ratio.
        units: what the trials are, in words.
        whose: the reference, in words.
        least_rise: that must be found for it to pass.
    """
    (events, trials), (others, other_trials) = seen, reference
    says = f"{shown_share(events, trials)} {units}; {whose} {shown_share(others, other_trials)}"
    if trials <= 0 or other_trials <= 0:
        return Result(gate, Outcome.UNKNOWN, f"{says}; nothing to compare{'' if trials <= 0 else ' with'}")
    rate, ratio = question.rate, question.limits.ratio
    k, other_k = round(events), round(others)
    p = binomial_tail(k, k + other_k, chance_of_first(trials, other_trials, ratio))
    finds = rate_that_shows(trials, other_k, other_trials, ratio, rate)
    return judged(gate, says, p, rate, finds, finds - others / other_trials, least_rise)


def judged(gate: str, says: str, p: float, rate: float, finds: float, rise: float, least_rise: float) -> Result:
    """Return a result of counts: a p-value shows that there is no rise only if it would have shown one."""
    if p < rate:
        return Result(gate, Outcome.FAIL, says, p, rate, finds)
    if rise > least_rise:
        return Result(gate, Outcome.UNKNOWN, f"{says}; too few to tell", p, rate, finds)
    return Result(gate, Outcome.PASS, says, p, rate, finds)


def shown_share(events: float, trials: float) -> str:
    """Return two counts in words."""
    return f"{events:,.6g} of {trials:,.0f}"
