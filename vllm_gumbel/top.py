"""A live view of what a server draws, from its `/metrics`: `vllm-gumbel top`.

The first part is about the time since the last look, the second about everything since the server started. Exactness is
judged at each look with what `exactness.rate_of_look` leaves of a chance of 1e-6.
"""

import contextlib
import itertools
import math
import sys
import time

from rich.box import SIMPLE_HEAD
from rich.console import Console, Group
from rich.live import Live
from rich.table import Table
from rich.text import Text

from vllm_gumbel.metrics import catalogue
from vllm_gumbel.metrics.catalogue import AnomalyKind, Metric
from vllm_gumbel.metrics.exactness import State, Verdict, overall, rate_of_look, verdicts
from vllm_gumbel.metrics.scrape import Scrape, ScrapeError, fetch

#: Kinds that are looked for among watched tokens only, so that their rate is one of those.
AMONG_WATCHED = (AnomalyKind.IMPROBABLE, AnomalyKind.OUTSIDE_FILTER)
#: Runs of one token longer than this are shown; a bound of `token_run_length`'s buckets.
LONG_RUN = 3
#: Chance that an exact server is ever shown as not exact.
ALPHA = 1e-6

NOTHING = "-"

Rows = list[tuple[str, list[str]]]


def lately(now: Scrape, before: Scrape, arms: list[str]) -> Rows:
    """Return a label and a text for each arm, for everything about the time between two looks."""
    seconds = now.seconds - before.seconds

    def grown(metric: Metric, arm: str, suffix: str = "") -> float:
        return now.total(metric, suffix, arm=arm) - before.total(metric, suffix, arm=arm)

    def mean(metric: Metric, arm: str) -> str:
        return _ratio(grown(metric, arm), grown(catalogue.TESTED_TOKENS, arm), "{:.3f} nats")

    def run_lengths(arm: str) -> str:
        runs = grown(catalogue.TOKEN_RUN_LENGTH, arm, "_count")
        short = _up_to(now, before, catalogue.TOKEN_RUN_LENGTH, arm).get(float(LONG_RUN), 0.0)
        mean_length = _ratio(grown(catalogue.TOKEN_RUN_LENGTH, arm, "_sum"), runs, "mean {:.2f}")
        return f"{mean_length}, {_ratio(runs - short, runs, '{:.2%}')}" if runs else NOTHING

    def sampler_share(arm: str) -> str:
        engines = len(now.series(catalogue.SAMPLER_SECONDS, "_sum", arm=arm))
        return _ratio(grown(catalogue.SAMPLER_SECONDS, arm, "_sum"), engines * seconds, "{:.1%}")

    return [
        ("tokens/s", [f"{grown(catalogue.SAMPLED_TOKENS, arm) / seconds:,.1f}" for arm in arms]),
        ("requests/s", [f"{grown(catalogue.REQUESTS, arm) / seconds:,.2f}" for arm in arms]),
        ("time in the sampler", [sampler_share(arm) for arm in arms]),
        ("mean entropy", [mean(catalogue.ENTROPY, arm) for arm in arms]),
        ("mean surprisal", [mean(catalogue.SURPRISAL, arm) for arm in arms]),
        ("kept ids, median", [_median(_up_to(now, before, catalogue.KEPT_TOKENS, arm)) for arm in arms]),
        (f"runs, longer than {LONG_RUN}", [run_lengths(arm) for arm in arms]),
    ]


def since_start(now: Scrape, arms: list[str], alpha: float) -> Rows:
    """Return a label and a text for each arm, for everything counted since the server started."""
    found = {arm: verdicts(now.evidence(arm), alpha) for arm in arms}
    by_test = {arm: {verdict.test: verdict for verdict in found[arm]} for arm in arms}

    def anomalies(kind: AnomalyKind, arm: str) -> str:
        among = catalogue.WATCHED_TOKENS if kind in AMONG_WATCHED else catalogue.SAMPLED_TOKENS
        seen = now.total(catalogue.ANOMALOUS_TOKENS, arm=arm, kind=kind)
        return _ratio(1e6 * seen, now.total(among, arm=arm), "{:,.1f}" if seen else "0")

    def divergences(arm: str) -> str:
        pairs = [f"{labels['reference']} {kl:.4f}" for labels, kl in now.series(catalogue.TOKEN_FREQUENCY_KL, arm=arm)]
        return ", ".join(pairs) or NOTHING

    return [
        ("tokens", [f"{now.total(catalogue.SAMPLED_TOKENS, arm=arm):,.0f}" for arm in arms]),
        ("requests", [f"{now.total(catalogue.REQUESTS, arm=arm):,.0f}" for arm in arms]),
        ("tested tokens", [f"{now.total(catalogue.TESTED_TOKENS, arm=arm):,.0f}" for arm in arms]),
        ("draws", [_state(found[arm]) for arm in arms]),
        ("  law", [_verdict(by_test[arm]["law"], "z {:.2f}") for arm in arms]),
        ("  scores", [_verdict(by_test[arm]["scores"], "chi2 {:.1f}") for arm in arms]),
        ("  rows", [_verdict(by_test[arm]["rows"], "r {:.5f}") for arm in arms]),
        ("anomalies per million", ["" for _ in arms]),
        *((f"  {kind}", [anomalies(kind, arm) for arm in arms]) for kind in AnomalyKind),
        ("KL of frequencies", [divergences(arm) for arm in arms]),
        ("faults", [f"{now.total(catalogue.FAULTS, arm=arm):,.0f}" for arm in arms]),
    ]


def view(now: Scrape, before: Scrape | None, alpha: float) -> Group:
    """Return what is shown of a page; what needs an earlier one is left out if there is none."""
    arms = now.arms()
    table = Table(box=SIMPLE_HEAD, pad_edge=False, show_edge=False)
    table.add_column("since the last look" if before else "since the start", no_wrap=True)
    for arm in arms:
        table.add_column(arm, justify="right", overflow="fold")
    if before is not None:
        for label, texts in lately(now, before, arms):
            table.add_row(label, *texts)
        table.add_section()
        table.add_row(Text("since the start", style="bold"))
    for label, texts in since_start(now, arms, alpha):
        style = "bold red" if label == "draws" and State.INEXACT in texts else ""
        table.add_row(label, *texts, style=style)
    return Group(*(Text(line, overflow="fold") for line in _head(now, before)), table)


def run(url: str, *, interval: float = 2.0, once: bool = False, timeout: float = 10.0) -> int:
    """Show a server until interrupted, and return the exit code: 0, 1 if `once` got no answer.

    A terminal shows one view that is renewed; anything else gets a table each time.

    Args:
        url: of the server or of its metrics page.
        interval: seconds between two looks.
        once: end after the first view, which takes two looks.
        timeout: seconds that the server may take to answer.
    """
    console = Console(highlight=False)
    before: Scrape | None = None
    with Live(console=console, auto_refresh=False) if console.is_terminal else contextlib.nullcontext() as live:
        for look in itertools.count(1):
            try:
                now = fetch(url, timeout)
            except ScrapeError as error:
                if once:
                    print(f"vllm-gumbel top: {error}", file=sys.stderr)
                    return 1
                _show(console, live, Text(f"{error}; looking again every {interval:g} s", overflow="fold"))
            else:
                if before is not None and now.restarted_since(before):
                    before = None
                if before is not None or not once:
                    _show(console, live, view(now, before, rate_of_look(ALPHA, look)))
                if before is not None and once:
                    return 0
                before = now
            time.sleep(interval)
    return 0


def _show(console: Console, live: Live | None, shown: Group | Text) -> None:
    if live is None:
        console.print(shown)
    else:
        live.update(shown, refresh=True)


def _head(now: Scrape, before: Scrape | None) -> list[str]:
    """Return the lines above the table: where, when, who draws, and vLLM's own queue."""
    looked = "" if before is None else f", {now.seconds - before.seconds:.1f} s after the last look"
    lines = [f"{now.address} at {time.strftime('%H:%M:%S')}{looked}"]
    builds = {tuple(labels.get(name, "?") for name in catalogue.BUILD_INFO.labels) for labels, _ in _builds(now)}
    lines += [
        f"vllm-gumbel {version}, noise {noise}, backend {backend}, runner {runner}, vLLM {vllm}"
        for version, noise, backend, runner, vllm in sorted(builds)
    ]
    queue = [
        f"{sum(value for _, value in series):.0f} {word}"
        for word, series in (
            ("running", now.named("vllm:num_requests_running")),
            ("waiting", now.named("vllm:num_requests_waiting")),
        )
        if series
    ]
    return [*lines, *([f"requests: {', '.join(queue)}"] if queue else []), *_rollout(now)]


def _rollout(now: Scrape) -> list[str]:
    """Return a line with the state of the rollout where it is anything but all by the gumbel arm."""
    fractions, shadows, breakers = (
        sorted({value for _, value in now.series(metric)})
        for metric in (catalogue.ROLLOUT_FRACTION, catalogue.ROLLOUT_SHADOW, catalogue.BREAKER_OPEN)
    )
    if fractions in ([], [1.0]) and not any(breakers):
        return []
    shares = " or ".join(f"{value:.4g}" for value in fractions)  # engines differ while a change is on its way
    shadow = " or ".join(f"{value:.4g}" for value in shadows)
    opened = "; THE BREAKER IS OPEN: all new requests go to vLLM's own sampler" if any(breakers) else ""
    return [f"rollout: fraction {shares}, shadow {shadow}{opened}"]


def _builds(now: Scrape) -> list[tuple[dict[str, str], float]]:
    return [each for each in now.series(catalogue.BUILD_INFO) if each[1] > 0]


def _state(found: list[Verdict]) -> str:
    state = overall(found)
    return {State.EXACT: "exactly", State.UNKNOWN: "too few to tell"}.get(state, state)


def _verdict(verdict: Verdict, form: str) -> str:
    if verdict.statistic is None or verdict.p_value is None:
        return NOTHING
    return f"{form.format(verdict.statistic)}, p {verdict.p_value:.2g}"


def _up_to(now: Scrape, before: Scrape, metric: Metric, arm: str) -> dict[float, float]:
    """Return, by bucket bound, how many observations up to it came between two looks."""
    found: dict[float, float] = {}
    for page, sign in ((now, 1), (before, -1)):
        for labels, value in page.series(metric, "_bucket", arm=arm):
            bound = float(labels["le"])
            found[bound] = found.get(bound, 0.0) + sign * value
    return found


def _median(up_to: dict[float, float]) -> str:
    """Return the bucket that holds the middle observation, as a bound."""
    total = up_to.get(math.inf, 0.0)
    if total <= 0:
        return NOTHING
    bounds = sorted(up_to)
    middle = next(bound for bound in bounds if up_to[bound] >= total / 2)
    return f"up to {middle:,.0f}" if middle < math.inf else f"above {bounds[-2]:,.0f}"


def _ratio(part: float, whole: float, form: str) -> str:
    return form.format(part / whole) if whole > 0 else NOTHING
