"""The page of a live server: whether it draws exactly, and what was drawn, from all it has counted since it started."""

import math
import time
from collections.abc import Iterator, Sequence

from vllm_gumbel import check
from vllm_gumbel.evaluate import plots
from vllm_gumbel.evaluate.page import Cell, Figure, Finding, Page, Section, Table
from vllm_gumbel.evaluate.plots_canvas import SERIES, Key, sign
from vllm_gumbel.evaluate.words import NAME_LIMIT, clean, listed, number, percent
from vllm_gumbel.metrics import catalogue
from vllm_gumbel.metrics.catalogue import AnomalyKind, Metric
from vllm_gumbel.metrics.evidence import PIT_BINS
from vllm_gumbel.metrics.exactness import State
from vllm_gumbel.metrics.scrape import Scrape

#: Chance that an exact server is called not exact.
ALPHA = 1e-6
#: Kinds that are looked for among watched tokens only.
AMONG_WATCHED = (AnomalyKind.IMPROBABLE, AnomalyKind.OUTSIDE_FILTER)
#: Arms that are drawn beside each other.
ARMS = 3
#: Quantiles of latencies.
QUANTILES = (0.05, 0.25, 0.5, 0.75, 0.95)
#: What is drawn of vLLM's own histograms: name -> label.
LATENCIES = {
    "vllm:time_to_first_token_seconds": "first token",
    "vllm:inter_token_latency_seconds": "each next token",
    "vllm:e2e_request_latency_seconds": "whole request",
}
#: What is drawn of ours: metric, title, unit of its buckets, and what it says.
HISTOGRAMS = (
    (
        catalogue.KEPT_TOKENS,
        "Candidates left after the filters",
        "ids, up to",
        "How many ids a watched token had to choose from.",
    ),
    (
        catalogue.TOKEN_RUN_LENGTH,
        "Runs of one token",
        "tokens in a row, up to",
        "How often one token follows itself; 1 is no repetition.",
    ),
    (
        catalogue.SAMPLER_SECONDS,
        "Time in the sampler",
        "milliseconds a step, up to",
        "Time that a step spends in the sampler.",
    ),
)
MARKS = {State.EXACT: "good", State.INEXACT: "bad", State.UNKNOWN: "unsure"}

#: Upper bound of each bucket -> how many observations it holds.
Buckets = list[tuple[float, float]]


def page(now: Scrape) -> Page:
    """Return the page of a server as its metrics are now."""
    report = check.judge(now, None, "everything counted since the server started", ALPHA)
    models = sorted({labels.get("model_name", "") for labels, _ in now.series(catalogue.SAMPLED_TOKENS)} - {""})
    facts = [
        ("Server", clean(now.address.split("?")[0])),
        ("Read", time.strftime("%Y-%m-%d %H:%M:%S UTC", time.gmtime())),
        ("Covers", report.covers),
        *([("Model", clean(", ".join(models), NAME_LIMIT))] if models else []),
        *_builds(now),
    ]
    lead, *others = _findings(now, report)
    arms = [clean(arm) for arm in now.arms()]
    sections = [
        Section("Does it draw exactly?", tables=[_tests(report)], figures=list(_pits(report))),
        Section("What was drawn", tables=[_counts(now, arms)], figures=list(_histograms(now))),
        Section("Time", figures=list(_latencies(now))),
    ]
    return Page(f"Server {clean(now.address.split('?')[0])}", "A live server", lead, facts, others, _limits(), sections)


def _builds(now: Scrape) -> list[tuple[str, str]]:
    builds = [labels for labels, value in now.series(catalogue.BUILD_INFO) if value > 0]
    words = {
        f"vllm-gumbel {clean(labels.get('version', '?'))}, noise {clean(labels.get('noise_version', '?'))}, backend "
        f"{clean(labels.get('backend', '?'))}, runner {clean(labels.get('runner', '?'))}, vLLM "
        f"{clean(labels.get('vllm_version', '?'))}"
        for labels in builds
    }
    return [("Build", each) for each in sorted(words)]


def _findings(now: Scrape, report: check.Report) -> Iterator[Finding]:
    """Yield what was found, the main thing first."""
    inexact = [arm for arm in report.arms if arm.state is State.INEXACT]
    exact = [arm for arm in report.arms if arm.state is State.EXACT]
    if inexact:
        yield Finding(f"{_named(inexact)} {'does' if len(inexact) == 1 else 'do'} not draw exactly.", "bad")
    elif exact and len(exact) == len(report.arms):
        draw = "draws" if len(exact) == 1 else "draw"
        yield Finding(f"{_named(exact)} {draw} exactly, as far as the tested tokens can tell.", "good")
    else:
        yield Finding("Whether this server draws exactly is not known yet: too few tokens were tested.", "unsure")
    for arm in report.arms:
        tested = f"{number(arm.evidence.tested)} tested tokens"
        share = "" if not arm.tested_share else f", {percent(arm.tested_share)} of those drawn"
        word = {State.EXACT: "exact", State.INEXACT: "not exact", State.UNKNOWN: "not known"}[arm.state]
        yield Finding(f"{_named([arm])}: {word}, by {tested}{share}.", MARKS[arm.state])
        for verdict in arm.verdicts:
            if verdict.state is State.INEXACT:
                p = "" if verdict.p_value is None else f" (chance {number(verdict.p_value, 2)})"
                yield Finding(f"{_named([arm])}, {verdict.test}: {verdict.says}{p}.", "bad")
    kinds = [(arm, kind) for arm in now.arms() for kind in AnomalyKind]
    seen = {each: now.total(catalogue.ANOMALOUS_TOKENS, arm=each[0], kind=each[1]) for each in kinds}
    if any(seen.values()):
        parts = [f"{number(count)} {_words(kind)} ({_arm(arm)})" for (arm, kind), count in seen.items() if count]
        yield Finding(f"Anomalous tokens: {listed(parts)}.", "unsure")
    else:
        yield Finding("No token was anomalous.", "good")
    faults = now.total(catalogue.FAULTS)
    if faults:
        yield Finding(f"The sampler's own bookkeeping had {number(faults)} errors.", "bad")
    if any(value for _, value in now.series(catalogue.BREAKER_OPEN)):
        yield Finding("The breaker is open: all new requests go to vLLM's own sampler.", "bad")
    fractions = sorted({value for _, value in now.series(catalogue.ROLLOUT_FRACTION)})
    if fractions and fractions != [1.0]:
        yield Finding(f"The rollout gives the gumbel arm {' or '.join(map(percent, fractions))} of the requests.")


def _words(kind: AnomalyKind) -> str:
    return kind.replace("_", " ")


def _arm(arm: str) -> str:
    return f"the arm {clean(arm)}"


def _named(arms: list[check.ArmReport]) -> str:
    return "T" + listed(_arm(arm.arm) for arm in arms)[1:]


def _limits() -> list[str]:
    return [
        f"An exact server is called not exact with a chance of {number(ALPHA)} at most, all tests and arms together.",
        "Exactly drawn tokens follow the model's distribution; whether that is any good is not asked here.",
        "Only tokens drawn at random by requests without a seed are tested.",
        "Everything since the start is one sum: what went wrong for a short time may not show.",
    ]


def _tests(report: check.Report) -> Table:
    rows: list[list[str | Cell]] = []
    for arm in report.arms:
        for verdict in arm.verdicts:
            judged = verdict.p_value is not None
            chances = [number(verdict.p_value, 2), number(verdict.rate, 2)] if judged else ["", ""]
            state = Cell(str(verdict.state), MARKS[verdict.state])
            rows.append([f"{clean(arm.arm)}: {verdict.test}", state, verdict.says, *chances])
    return Table("Tests of exactness", ["Test", "Says", "Seen", "p", "Not exact below"], rows)


def _pits(report: check.Report) -> Iterator[Figure]:
    """Yield a histogram of each arm's scores, with what is expected and the chance of what is seen."""
    for i, arm in enumerate(report.arms):
        n = sum(arm.evidence.pit)
        if n <= 0:
            continue
        half = 2.576 * math.sqrt((1 - 1 / PIT_BINS) / PIT_BINS / n)
        share = 1 / PIT_BINS
        verdict = next(each for each in arm.verdicts if each.test == "scores")
        p = "" if verdict.p_value is None else f" An exact draw is as uneven with chance {number(verdict.p_value, 2)}."
        title = f"Winning scores of {_arm(arm.arm)}"
        says = f"{number(n)} scores by twentieth of their distribution function, equally many in each if the draw is "
        says += f"exact.{p} The shade holds 99 in 100 bars of an exact draw."
        bins = [number(b / PIT_BINS, 2) for b in range(PIT_BINS)]
        shares = [count / n for count in arm.evidence.pit]
        rows = [[bins[b], number(count), percent(count / n)] for b, count in enumerate(arm.evidence.pit)]
        names = plots.Names(f"pit-{i}", title, says, "distribution function, from this value on", "share of the scores")
        legend = [Key(sign("box", "bar one"), "scores"), Key(sign("line", "expected"), "expected")]
        drawing = plots.histogram(names, bins, [shares], (share, share - half, share + half))
        yield Figure(title, drawing, says, legend, Table(title, ["From", "Scores", "Share"], rows))


def _counts(now: Scrape, arms: list[str]) -> Table:
    def row(label: str, metric: Metric, **labels: str) -> list[str]:
        return [label, *(number(now.total(metric, arm=arm, **labels)) for arm in now.arms())]

    def mean(label: str, metric: Metric) -> list[str]:
        tested = [now.total(catalogue.TESTED_TOKENS, arm=arm) for arm in now.arms()]
        sums = [now.total(metric, arm=arm) for arm in now.arms()]
        return [label, *(number(s / n if n else None) for s, n in zip(sums, tested, strict=True))]

    def per_million(kind: AnomalyKind) -> list[str | Cell]:
        among = catalogue.WATCHED_TOKENS if kind in AMONG_WATCHED else catalogue.SAMPLED_TOKENS
        cells: list[str | Cell] = [f"{_words(kind)}, per million"]
        for arm in now.arms():
            seen, of = now.total(catalogue.ANOMALOUS_TOKENS, arm=arm, kind=kind), now.total(among, arm=arm)
            cells.append(Cell(number(1e6 * seen / of if of else None), "unsure" if seen else ""))
        return cells

    def divergence(reference: str) -> list[str]:
        found = [now.series(catalogue.TOKEN_FREQUENCY_KL, arm=arm, reference=reference) for arm in now.arms()]
        cells = [number(each[0][1]) if each else "" for each in found]
        return [f"KL of token frequencies from {clean(reference)}, nats", *cells]

    references = sorted({labels.get("reference", "?") for labels, _ in now.series(catalogue.TOKEN_FREQUENCY_KL)})
    rows: list[Sequence[str | Cell]] = [
        row("tokens", catalogue.SAMPLED_TOKENS),
        row("requests", catalogue.REQUESTS),
        row("watched tokens", catalogue.WATCHED_TOKENS),
        row("tested tokens", catalogue.TESTED_TOKENS),
        mean("mean entropy, nats", catalogue.ENTROPY),
        mean("mean surprisal, nats", catalogue.SURPRISAL),
        *(per_million(kind) for kind in AnomalyKind),
        row("faults", catalogue.FAULTS),
        *(divergence(reference) for reference in references),
    ]
    note = "Improbable and outside filter are rates among watched tokens, the others among all drawn."
    return Table("Counted since the start", ["", *arms], rows, note)


def _histograms(now: Scrape) -> Iterator[Figure]:
    for metric, title, unit, says in HISTOGRAMS:
        found = {arm: _buckets(now, metric.exposed_name, arm=arm) for arm in now.arms()}
        found = {arm: buckets for arm, buckets in found.items() if sum(count for _, count in buckets)}
        if found:
            yield _histogram(metric, title, unit, says, dict(list(found.items())[:ARMS]))


def _histogram(metric: Metric, title: str, unit: str, says: str, found: dict[str, Buckets]) -> Figure:
    factor = 1e3 if metric.name.endswith("seconds") else 1.0
    bounds = sorted({bound for buckets in found.values() for bound, _ in buckets})
    bins = ["more" if bound == math.inf else _short(bound * factor) for bound in bounds]
    totals = {arm: sum(count for _, count in buckets) for arm, buckets in found.items()}
    shares = {arm: [dict(found[arm]).get(bound, 0.0) / totals[arm] for bound in bounds] for arm in found}
    names = plots.Names(metric.name.replace("_", "-"), title, says, unit, "share")
    legend = [Key(sign("box", f"bar {style}"), clean(arm)) for style, arm in zip(SERIES, found, strict=False)]
    rows = [[bins[i], *(percent(shares[arm][i]) for arm in found)] for i in range(len(bins))]
    numbers = Table(title, [unit.capitalize(), *(clean(arm) for arm in found)], rows)
    return Figure(title, plots.histogram(names, bins, list(shares.values())), says, legend, numbers)


def _short(value: float) -> str:
    return f"{value / 1000:g}k" if value >= 1000 else f"{value:g}"


def _latencies(now: Scrape) -> Iterator[Figure]:
    rows = []
    for name, label in LATENCIES.items():
        buckets = _buckets(now, name)
        if sum(count for _, count in buckets):
            rows.append((label, [quantile(buckets, share) for share in QUANTILES]))
    for i, (label, values) in enumerate(rows):
        title = f"Time to {label}, seconds" if label == "first token" else f"Time of {label}, seconds"
        says = f"The line goes from {percent(QUANTILES[0])} to {percent(QUANTILES[-1])}, the bar from "
        says += (
            f"{percent(QUANTILES[1])} to {percent(QUANTILES[-2])}; the stroke is the median. Read from buckets: rough."
        )
        names = plots.Names(f"latency-{i}", title, says, "seconds")
        numbers = Table(title, ["", *map(percent, QUANTILES)], [[label, *map(number, values)]])
        yield Figure(title, plots.ranges(names, [(label, values)]), says, (), numbers)


def _buckets(now: Scrape, name: str, **labels: str) -> Buckets:
    """Return how many observations lie in each bucket of a histogram, over all engines."""
    up_to: dict[float, float] = {}
    for found, value in now.named(f"{name}_bucket", **labels):
        try:
            bound = float(found.get("le", "nan"))
        except ValueError:
            continue
        if not math.isnan(bound) and math.isfinite(value):
            up_to[bound] = up_to.get(bound, 0.0) + value
    before, buckets = 0.0, []
    for bound in sorted(up_to):
        buckets.append((bound, max(0.0, up_to[bound] - before)))
        before = max(before, up_to[bound])
    return buckets


def quantile(buckets: Buckets, share: float) -> float:
    """Return a quantile of a histogram, on a straight line through its bucket; above all bounds the largest of them."""
    wanted = share * sum(count for _, count in buckets)
    low, passed = 0.0, 0.0
    for bound, count in buckets:
        if count and passed + count >= wanted:
            return low if bound == math.inf else low + (bound - low) * (wanted - passed) / count
        passed += count
        low = bound if bound < math.inf else low
    return low
