"""Gates about the whole server, whichever arm drew; the docstring of `gates.py` says what they do."""

import math

from vllm_gumbel.metrics import catalogue
from vllm_gumbel.metrics.catalogue import SHADOW
from vllm_gumbel.rollout.counts import Latency, ServerCounts
from vllm_gumbel.rollout.results import Outcome, Question, Result, compare, shown_share

#: Requests, and steps of the sampler, below which a latency is not judged.
LEAST_OBSERVATIONS = 100
#: As many times the baseline's requests a second make latencies incomparable.
LOADED = 1.25


def scraped(question: Question) -> Result:
    """Return whether Prometheus has the servers' pages of the whole window."""
    targets = question.window.targets
    if not targets:
        says = "Prometheus has no metric of vllm-gumbel in this window: does it scrape the server, is --selector right?"
        return Result("scraped", Outcome.UNKNOWN, says)
    here = [target for target in targets if not target.dropped]
    if not here:
        return Result("scraped", Outcome.UNKNOWN, "Prometheus no longer scrapes any server")
    for target in here:
        if target.silent is not None:
            return Result("scraped", Outcome.UNKNOWN, f"{target.name} has not been scraped for {target.silent:.0f} s")
        if target.scrapes < 2:
            return Result("scraped", Outcome.UNKNOWN, f"{target.name} was scraped only once")
        if target.restarted:
            says = f"{target.name} has restarted; counted before and after"
            return Result("scraped", Outcome.SHOWN, says)
    says = f"{sum(target.scrapes for target in here)} scrapes of {len(here)} targets, {question.window.seconds:.0f} s"
    says += f"; {len(targets) - len(here)} more are gone" if len(here) < len(targets) else ""
    return Result("scraped", Outcome.PASS, says)


def asked(question: Question) -> list[Result]:
    """Return whether Prometheus shows what was asked for."""
    results = []
    for metric, wanted in (
        (catalogue.ROLLOUT_FRACTION, question.fraction),
        (catalogue.ROLLOUT_SHADOW, question.shadow),
    ):
        values = [value for _, value in question.window.shown.series(metric)]
        says = ", ".join(f"{value:g}" for value in sorted(set(values))) or f"no {metric.exposed_name} in Prometheus"
        if wanted is None:
            results.append(Result(metric.name, Outcome.SHOWN, says))
        else:
            agrees = bool(values) and all(math.isclose(value, wanted, abs_tol=1e-9) for value in values)
            says += "" if agrees else f", asked for {wanted:g}"
            results.append(Result(metric.name, Outcome.PASS if agrees else Outcome.UNKNOWN, says))
    return results


def errors(question: Question, now: ServerCounts) -> Result:
    """Return whether more requests end in an error than in the baseline."""
    before = question.baseline
    if before is None:
        return Result("errors", Outcome.SHOWN, f"{shown_share(now.errors, now.requests)} requests; no baseline")
    return compare(
        "errors",
        (now.errors, now.requests),
        (before.errors, before.requests),
        question,
        units="requests",
        whose="baseline",
        least_rise=question.limits.least_error_rise,
    )


def latencies(question: Question, now: ServerCounts) -> list[Result]:
    """Return whether tokens come as soon as in the baseline: the first one, and each after another."""
    before, limits, load = question.baseline, question.limits, _load(now, question.baseline)
    first_token, next_token = (before.first_token, before.next_token) if before else (None, None)
    return [
        _latency("first_token", now.first_token, first_token, limits.first_token, load),
        _latency("next_token", now.next_token, next_token, limits.next_token, load),
    ]


def _latency(gate: str, now: Latency, before: Latency | None, limit: float, load: float) -> Result:
    says = _told(now) if now.count else "no observations"
    if before is None:
        return Result(gate, Outcome.SHOWN, f"{says}; no baseline")
    if min(now.count, before.count) < LEAST_OBSERVATIONS:
        fewest = f"{now.count:,.0f} observations, baseline {before.count:,.0f}; {LEAST_OBSERVATIONS} are needed of each"
        return Result(gate, Outcome.UNKNOWN, fewest)
    says += f"; baseline {_told(before)}; limit {limit:g} times that"
    worst = max(now.mean / before.mean, now.quantile(0.95) / before.quantile(0.95)) if before.total else math.nan
    if not worst > limit:
        return Result(gate, Outcome.PASS, says)
    if load > LOADED:
        return Result(gate, Outcome.UNKNOWN, f"{says}; but the server gets {load:.2g} times as many requests as then")
    return Result(gate, Outcome.FAIL, says)


def sampler(question: Question, now: ServerCounts) -> Result:
    """Return whether the sampler takes as long as in the baseline."""
    gate, before, limit = "sampler_time", question.baseline, question.limits.sampler
    if not now.steps or not now.tokens:
        says = "no steps" if before is None else "no steps; is the server's setting `watch_time` off?"
        return Result(gate, Outcome.SHOWN if before is None else Outcome.UNKNOWN, says)
    step, token = now.sampler_seconds / now.steps, now.sampler_seconds / now.tokens
    says = f"{1e6 * step:,.0f} microseconds a step, {1e6 * token:,.1f} a token"
    if before is None or SHADOW in question.arms:
        why = "no baseline" if before is None else "two samplers draw"
        return Result(gate, Outcome.SHOWN, f"{says}; {why}")
    if min(now.steps, before.steps) < LEAST_OBSERVATIONS or not before.tokens:
        return Result(gate, Outcome.UNKNOWN, f"{now.steps:,.0f} steps, baseline {before.steps:,.0f}; too few")
    old_step, old_token = before.sampler_seconds / before.steps, before.sampler_seconds / before.tokens
    says += f"; baseline {1e6 * old_step:,.0f} and {1e6 * old_token:,.1f}; limit {limit:g} times both"
    slower = step > limit * old_step and token > limit * old_token
    return Result(gate, Outcome.FAIL if slower else Outcome.PASS, says)


def throughput(question: Question, now: ServerCounts) -> Result:
    """Return how much the server does."""

    def told(counts: ServerCounts) -> str:
        seconds = max(counts.seconds, 1e-9)
        return f"{counts.tokens / seconds:,.1f} tokens/s, {counts.requests / seconds:,.2f} requests/s"

    before = question.baseline
    return Result("throughput", Outcome.SHOWN, told(now) + (f"; baseline {told(before)}" if before else ""))


def _load(now: ServerCounts, before: ServerCounts | None) -> float:
    """Return how many times the baseline's requests a second the server gets."""
    if before is None or not before.requests or not now.seconds or not before.seconds:
        return 1.0
    return (now.requests / now.seconds) / (before.requests / before.seconds)


def _told(latency: Latency) -> str:
    return f"mean {1e3 * latency.mean:,.1f} ms, 95% within {1e3 * latency.quantile(0.95):,.1f} ms"
