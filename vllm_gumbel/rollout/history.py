"""Reads from Prometheus what servers counted in a window, exactly.

PromQL's `increase()` extrapolates to the ends of its range, so that 3 events become 3.2; an exact test needs the 3. So
the raw samples are read and added up here. A window reaches, for each target, from its first scrape in it to its last,
and a series grew by

- what it rose from each scrape to the next; where it fell, or its process is another one than before, it began anew
  from 0, and grew by all that it shows;
- all that its first sample shows, if it was not there at an earlier scrape of its target in the window or if its
  process began within the window; else by nothing, since what it shows was counted before.

A page that was read while a step was counted shows half of that step (`Scrape.half_counted`), and at an end of a window
that would be evidence of something. So the first and last scrapes are chosen among a few that are least so.

All times are those of Prometheus' clock.
"""

import itertools
import math
import statistics
import time
import urllib.parse
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from vllm_gumbel.metrics import catalogue
from vllm_gumbel.metrics.catalogue import PREFIX
from vllm_gumbel.metrics.scrape import Labels, Scrape
from vllm_gumbel.rollout.web import TalkError, WebError, ask
from vllm_gumbel.text import shorten

#: vLLM's own names, the same in 0.31, 0.32 and 0.33 (vllm/v1/metrics/loggers.py), and that of the process.
FIRST_TOKEN, NEXT_TOKEN = "vllm:time_to_first_token_seconds", "vllm:inter_token_latency_seconds"
FINISHED = "vllm:request_success_total"
STARTED = "process_start_time_seconds"
#: What Prometheus itself records of each try to scrape a target, 0 for one that failed.
UP = "up"
#: What vLLM's HTTP server counts (prometheus_fastapi_instrumentator), by handler and class of status.
HTTP = "http_requests_total"

#: Names of what only shows a state; everything else that is read counts.
GAUGES = {
    metric.exposed_name
    for metric in (
        catalogue.ROLLOUT_FRACTION,
        catalogue.ROLLOUT_SHADOW,
        catalogue.BREAKER_OPEN,
        catalogue.TOKEN_FREQUENCY_KL,
    )
} | {STARTED, UP}
_COUNTERS = {
    metric.exposed_name
    for metric in (
        catalogue.SAMPLED_TOKENS,
        catalogue.REQUESTS,
        catalogue.ANOMALOUS_TOKENS,
        catalogue.WATCHED_TOKENS,
        catalogue.EXPECTED_IMPROBABLE,
        catalogue.TESTED_TOKENS,
        catalogue.SURPRISAL,
        catalogue.ENTROPY,
        catalogue.SURPRISAL_VARIANCE,
        catalogue.SCORE_PIT,
        catalogue.SCORE_SQUARES,
        catalogue.SCORE_STEP_SQUARES,
        catalogue.SCORE_PAIRS,
        catalogue.SHADOW_TOKENS,
        catalogue.FALLBACKS,
        catalogue.FAULTS,
    )
} | {FINISHED}
_HISTOGRAMS = {catalogue.SAMPLER_SECONDS.exposed_name, FIRST_TOKEN, NEXT_TOKEN}
_NAMES = sorted(
    GAUGES | _COUNTERS | {f"{name}_{suffix}" for name in _HISTOGRAMS for suffix in ("sum", "count", "bucket")}
)

#: A target without a sample for so many of its intervals is gone.
GONE_AFTER = 3
#: Scrapes at either end of a window among which the least torn one is chosen, at most.
ENDS = 3
#: A sum over files may round another way when one more file is there.
ROUNDING = 1e-9

Points = Sequence[tuple[float, float]]


class HistoryError(TalkError):
    """Prometheus does not say."""


@dataclass(frozen=True)
class Target:
    """One page that Prometheus reads.

    Attributes:
        name: its labels `job` and `instance`.
        scrapes: how many were successful within the window.
        seconds: between the first and the last of them that count.
        restarted: whether its process began anew between two of them, or a counter fell.
        silent: seconds since the last one at the end of the window; None while that is no more than expected.
        dropped: whether it is silent because Prometheus no longer tries, as for a pod that was taken away.
    """

    name: str
    scrapes: int
    seconds: float
    restarted: bool
    silent: float | None
    dropped: bool = False


@dataclass(frozen=True)
class Window:
    """What was counted in a window.

    Attributes:
        began, ended: the window, on Prometheus' clock.
        counted: by how much each counter grew.
        shown: what each gauge said last, of targets that are not gone.
        targets: the pages with metrics of vllm-gumbel.
    """

    began: float
    ended: float
    counted: Scrape = field(repr=False)
    shown: Scrape = field(repr=False)
    targets: tuple[Target, ...] = ()

    @property
    def seconds(self) -> float:
        """Seconds that were counted, on average over the targets."""
        return statistics.fmean(target.seconds for target in self.targets) if self.targets else 0.0

    @property
    def restarted(self) -> list[str]:
        """Names of the targets that began anew."""
        return [target.name for target in self.targets if target.restarted]


class Prometheus:
    """A Prometheus, or whatever has its HTTP API.

    Args:
        url: its base address.
        selector: further matchers, as in PromQL's braces, that choose the servers; empty for every server it knows.
        timeout: seconds that an answer may take.
    """

    def __init__(self, url: str, selector: str = "", timeout: float = 30.0) -> None:
        self.url = url
        self.selector = selector.strip(" ,{}")
        self._timeout = timeout

    def time(self) -> float:
        """Return the time by its clock.

        Raises:
            HistoryError: as `window`.
        """
        kind, result = self._query("time()")
        try:
            if kind != "scalar":
                raise ValueError(kind)
            return float(result[1])
        except (ValueError, TypeError, IndexError, KeyError):
            raise HistoryError(f"{self.url}: the answer is no time: {shorten(result)}") from None

    def window(self, began: float, ended: float) -> Window:
        """Return what was counted between two times.

        Raises:
            HistoryError: Prometheus is away, refuses or answers something else.
        """
        names = "|".join(_NAMES)
        series: list[tuple[Labels, Points]] = []
        for matchers in (f'__name__=~"{names}"', f'__name__="{HTTP}",handler=~"/v1/.*"'):
            both = ",".join(filter(None, (matchers, self.selector)))
            # A range may leave out its older end, so it is a millisecond longer.
            milliseconds = max(1, math.ceil((ended - began) * 1000) + 1)
            kind, result = self._query(f"{{{both}}}[{milliseconds}ms]", ended)
            if kind != "matrix":
                raise HistoryError(f"{self.url}: expected a matrix of samples, got {shorten(kind)}")
            series += [_series(self.url, each) for each in result]
        return assemble(self.url, began, ended, series)

    def _query(self, expression: str, when: float | None = None) -> tuple[str, Any]:
        """Return type and content of the result of an instant query."""
        form = {"query": expression} | ({} if when is None else {"time": f"{when:.3f}"})
        body = urllib.parse.urlencode(form).encode()
        headers = {"Content-Type": "application/x-www-form-urlencoded"}
        try:
            answer = ask(f"{self.url}/api/v1/query", headers=headers, body=body, timeout=self._timeout)
        except WebError as error:
            raise HistoryError(str(error), passing=True) from None
        content = answer.content if isinstance(answer.content, dict) else {}
        if answer.status != 200 or content.get("status") != "success":
            said = f": {shorten(content['error'])}" if isinstance(content.get("error"), str) else ""
            hint = "" if content else "; is it the address of a Prometheus?"
            refused = f"Prometheus answers {answer.status} {answer.reason}{said}{hint}"
            raise HistoryError(f"{self.url}: {refused}", passing=answer.status >= 500)
        data = content.get("data")
        if not isinstance(data, dict) or not isinstance(data.get("result"), list):
            raise HistoryError(f"{self.url}: the answer has no result: {shorten(content)}")
        return str(data.get("resultType")), data["result"]


def assemble(url: str, began: float, ended: float, series: Iterable[tuple[Labels, Points]]) -> Window:
    """Return the window that raw samples make, each series given by its labels and (time, value) in order of time.

    Raises:
        HistoryError: a counter holds what nothing counts to.
    """
    by_target: dict[tuple[str, str], list[tuple[Labels, Points]]] = {}
    for labels, points in series:
        within = [point for point in points if began <= point[0] <= ended]
        if within:
            by_target.setdefault((labels.get("job", ""), labels.get("instance", "")), []).append((labels, within))
    counted: dict[str, list[tuple[Labels, float]]] = {}
    shown: dict[str, list[tuple[Labels, float]]] = {}
    targets = []
    for (job, instance), mine in sorted(by_target.items()):
        if not any(labels["__name__"].startswith(PREFIX) for labels, _ in mine):
            continue
        name = f"{job} {instance}".strip()
        target, grown = _grown(url, name, began, ended, mine)
        targets.append(target)
        for labels, value in grown:
            counted.setdefault(labels["__name__"], []).append((labels, value))
        last = _times(mine)[-1]
        for labels, points in mine:
            # A series that the target's last page lacks is gone, though the target is not.
            if labels["__name__"] in GAUGES and target.silent is None and points[-1][0] == last:
                shown.setdefault(labels["__name__"], []).append((labels, points[-1][1]))
    now = time.monotonic()
    return Window(began, ended, Scrape(url, now, counted), Scrape(url, now, shown), tuple(targets))


def increase(points: Points, from_zero: bool, restarts: Collection[float] = ()) -> float:
    """Return by how much a counter grew from the first of its samples to the last.

    Args:
        points: (time, value) in order of time, at least one.
        from_zero: whether the first sample was counted within the window too.
        restarts: times at which its target was first seen with another process.
    """
    grown = points[0][1] if from_zero else 0.0
    for (earlier, before), (later, value) in itertools.pairwise(points):
        anew = value < before * (1 - ROUNDING) or any(earlier < restart <= later for restart in restarts)
        grown += value if anew else max(0.0, value - before)
    return grown


def _grown(
    url: str, name: str, began: float, ended: float, series: Sequence[tuple[Labels, Points]]
) -> tuple[Target, list[tuple[Labels, float]]]:
    """Return what is to be said of a target, and by how much each of its counters grew."""
    times = _times(series)
    processes = [points for labels, points in series if labels["__name__"] == STARTED]
    restarts = {later for points in processes for (_, old), (later, new) in itertools.pairwise(points) if old != new}
    young = any(points[0][1] >= began for points in processes)
    counters = [(labels, points) for labels, points in series if labels["__name__"] not in GAUGES]
    for labels, points in counters:
        for _, value in points:
            if not (math.isfinite(value) and value >= 0):
                raise HistoryError(f"{url}: {labels['__name__']} of {name} is {value}, which nothing counts to")
    first, last = _ends(times, counters)
    grown, fell = [], False
    for labels, points in counters:
        kept = [point for point in points if first <= point[0] <= last]
        if kept:
            from_zero = kept[0][0] > first or (young and first == times[0])
            grown.append((labels, increase(kept, from_zero, restarts)))
            fell |= any(b < a * (1 - ROUNDING) for (_, a), (_, b) in itertools.pairwise(kept))
    interval = statistics.median(b - a for a, b in itertools.pairwise(times)) if len(times) > 1 else ended - began
    expected = GONE_AFTER * max(interval, 1.0)
    quiet = ended - times[-1]
    tries = [points[-1][0] for labels, points in series if labels["__name__"] == UP]
    silent = quiet if quiet > expected else None
    dropped = silent is not None and bool(tries) and ended - max(tries) > expected
    return Target(name, len(times), last - first, bool(restarts) or fell, silent, dropped), grown


def _times(series: Iterable[tuple[Labels, Points]]) -> list[float]:
    """Return the times of a target's successful scrapes."""
    return sorted({when for labels, points in series if labels["__name__"] != UP for when, _ in points})


def _ends(times: Sequence[float], counters: Sequence[tuple[Labels, Points]]) -> tuple[float, float]:
    """Return the times of the first and the last scrape that count: of the outermost few the least torn ones."""
    few = max(1, min(ENDS, len(times) // 3))
    torn = {when: _torn(when, counters) for when in (*times[:few], *times[-few:])}
    return min(times[:few], key=torn.__getitem__), min(reversed(times[-few:]), key=torn.__getitem__)


def _torn(when: float, counters: Sequence[tuple[Labels, Points]]) -> float:
    """Return `Scrape.half_counted` of a target's page at a time."""
    names = {catalogue.TESTED_TOKENS.exposed_name, catalogue.SCORE_PIT.exposed_name}
    samples: dict[str, list[tuple[Labels, float]]] = {}
    for labels, points in counters:
        if labels["__name__"] in names:
            value = next((value for time_, value in points if time_ == when), None)
            if value is not None:
                samples.setdefault(labels["__name__"], []).append((labels, value))
    return Scrape("", when, samples).half_counted()


def _series(url: str, entry: Any) -> tuple[Labels, Points]:
    """Return labels and samples of one series of an answer."""
    try:
        labels: Mapping[str, str] = entry["metric"]
        if not isinstance(labels["__name__"], str):
            raise TypeError(labels)
        points = [(float(when), float(value)) for when, value in entry["values"]]
    except (KeyError, TypeError, ValueError):
        raise HistoryError(f"{url}: the answer holds a series without samples: {shorten(entry)}") from None
    return dict(labels), points
