"""The page of a comparison: what differs, how far texts go together, and what the common noise saves."""

import itertools
from collections.abc import Iterator, Sequence

from vllm_gumbel.evaluate import plots
from vllm_gumbel.evaluate.page import Cell, Example, Figure, Finding, Page, Section, Table, Text
from vllm_gumbel.evaluate.plots_canvas import Key, sign
from vllm_gumbel.evaluate.report_shapes import Comparison, Frequencies, Measure, Pair, Quantiles, Side
from vllm_gumbel.evaluate.words import (
    TEXT_LIMIT,
    clean,
    counted,
    interval,
    listed,
    moment,
    number,
    percent,
    sentence,
    share_interval,
    spelled,
)

#: Examples, failed texts of a side and named tokens that are shown at most.
EXAMPLES, FAILURES, NAMED = 12, 20, 8
#: Characters of a token that are shown in a drawing.
SHORT = 14
#: Characters of what was asked that are shown at most; what is longer are digests and paths.
LONGEST = 40
#: Ratio of two shares of a token from which on it may be named.
APART = 1.5

KINDS = {
    "quality": "Quality",
    "speed": "Speed",
    "divergence": "How far the texts part",
}


def page(data: Comparison) -> Page:
    """Return the page of a comparison."""
    lead, *others = _findings(data)
    sections = [
        Section("Measures", tables=[_measures(kind, data) for kind in KINDS if _of(data, kind)]),
        Section("By task", tables=_by_task(data)),
        Section("In pictures", figures=list(_figures(data))),
        Section("Failed", tables=_failures(data)),
        Section("Texts", paragraphs=_about_texts(data), examples=[_example(each) for each in data.examples[:EXAMPLES]]),
    ]
    return Page(
        f"{data.candidate.shown} against {data.baseline.shown}",
        "A comparison of two deployments",
        lead,
        _facts(data),
        others,
        _limits(data),
        sections,
    )


def _facts(data: Comparison) -> list[tuple[str, str]]:
    settings = data.question.get("settings")
    everything = {**data.question, **(settings if isinstance(settings, dict) else {})}
    plain = {clean(key): clean(str(each)) for key, each in everything.items() if isinstance(each, int | float | str)}
    asked = [f"{key} {value}" for key, value in plain.items() if len(value) <= LONGEST]
    return [
        ("Baseline", _side(data.baseline)),
        ("Candidate", _side(data.candidate)),
        ("Texts", f"{data.prompts:,} prompts with {data.seeds:,} seeds: {data.pairs:,} pairs"),
        ("Measured", moment(data.created)),
        *([("Asked", clean(", ".join(asked), 300))] if asked else []),
    ]


def _side(side: Side) -> str:
    where = next((each for each in (side.url, side.model) if each and each != side.name), "")
    who = {"gumbel": "sampler gumbel", "default": "vLLM's own sampler"}.get(side.sampler or "", "sampler not known")
    version = f", noise {side.noise_version}" if side.noise_version is not None else ""
    return f"{side.shown}{f' ({where})' if where else ''}, {who}{version}"


def _of(data: Comparison, kind: str) -> list[Measure]:
    return [measure for measure in data.measures if measure.kind == kind]


def _findings(data: Comparison) -> Iterator[Finding]:
    """Yield what was found, the main thing first."""
    known = [measure for measure in data.measures if measure.kind == "quality" and measure.known]
    differing = [measure for measure in known if measure.differs]
    if not known:
        yield Finding("No measure of quality could be computed, so nothing is known about a difference.", "unsure")
    elif not differing:
        yield Finding(f"No difference of quality is shown by any of {counted(len(known), 'measure')}.")
    else:
        differ = "differs" if len(differing) == 1 else "differ"
        worse = sum(measure.worse for measure in differing)
        text = f"{counted(len(differing), 'measure').capitalize()} of quality out of {len(known)} {differ}"
        judged = f", {spelled(worse)} for the worse" if worse else ""
        yield Finding(f"{text}{judged}.", "bad" if worse else "")
    for measure in data.measures:
        if measure.differs:
            yield Finding(_change(measure), "bad" if measure.worse else "")
    yield from _agreement(data)
    likenesses = [measure for measure in _of(data, "divergence") if measure.value is not None]
    for measure in likenesses:
        floor = measure.independent_value
        beside = "" if floor is None else f"; other seeds of the same prompts reach {number(floor)}"
        yield Finding(f"{measure.title}: {number(measure.value)}{_within(measure)}{beside}.")
    yield from _savings(data)
    if data.coupling:
        yield Finding(sentence(data.coupling), "good" if data.coupled else "unsure")
    lost = {side: count for side, count in data.failed.items() if count}
    if lost:
        parts = listed(f"{count:,} of the {side}" for side, count in lost.items())
        yield Finding(f"Some texts failed and are in no figure: {parts}.", "unsure")


def _change(measure: Measure) -> str:
    """Return a difference in words."""
    direction = "higher" if (measure.difference or 0) > 0 else "lower"
    judged = "" if measure.better is None else ", which is worse" if measure.worse else ", which is better"
    size = number(abs(measure.difference or 0))
    return (
        f"{measure.title}: {size} {direction}{judged} ({number(measure.candidate)} against {number(measure.baseline)}; "
        f"{percent(measure.level)} interval of the difference {interval(measure.low, measure.high)})."
    )


def _within(measure: Measure) -> str:
    bounds = interval(measure.low, measure.high)
    return f" ({percent(measure.level)} interval {bounds})" if bounds else ""


def _agreement(data: Comparison) -> Iterator[Finding]:
    found = data.agreement
    if found is None or found.share is None:
        return
    bounds = share_interval(found.low, found.high)
    yield Finding(
        f"As long as both texts were the same, the next {data.unit} was the same too in {percent(found.share)} of "
        f"{found.tokens:,} cases{f' (interval {bounds})' if bounds else ''}."
    )
    curve = [(at, share) for at, share, *_ in found.curve if share is not None]
    half = found.median_divergence
    if half is not None:
        yield Finding(f"Half of the pairs have parted by {data.unit} {number(half)}.")
    if curve:
        at, share = curve[-1]
        yield Finding(f"After {at:,} {data.unit}s {percent(share)} of the pairs had not parted.")


def _savings(data: Comparison) -> Iterator[Finding]:
    titles = {measure.name: measure.title for measure in data.measures}
    reduced = [measure for measure in data.measures if measure.variance_reduction is not None]
    if data.coupled and reduced:
        first = next((each for each in reduced if each.name == "mean_logprob"), reduced[0])
        bounds = interval(first.variance_reduction_low, first.variance_reduction_high)
        saves = (first.variance_reduction_low or 0) > 1
        yield Finding(
            f"Common noise divides the variance of the difference by {number(first.variance_reduction)}"
            f"{f' ({bounds})' if bounds else ''} for {first.title}{'' if saves else ': no saving is shown'}."
        )
    needed = data.tokens_for_interval
    if data.coupled and needed is not None and None not in (needed.coupled, needed.independent, needed.half_width):
        what = titles.get(needed.measure or "", needed.measure or "the measure")
        yield Finding(
            f"To know {what} to {number(needed.half_width)} on either side takes {number(needed.coupled)} tokens with "
            f"the same seeds, and {number(needed.independent)} with independent ones."
        )


def _limits(data: Comparison) -> list[str]:
    levels = sorted({measure.level for measure in data.measures if measure.known})
    limits = [
        "An interval that contains 0 does not show that both sides are equal: a difference inside it may be there.",
        "Likeness of the two sides' texts is no quality: two good answers may share no word.",
        "What holds for these prompts need not hold for others.",
    ]
    if levels:
        chance = percent(levels[0])
        limits.insert(1, f"Each interval holds the truth with a chance of {chance} by itself, not all together.")
    if data.same_machine and not any("machine" in note for note in data.notes):
        limits.append("Both sides ran on one machine: their times disturb each other.")
    if not data.coupled:
        limits.append("The two sides did not draw with common noise: that texts part says nothing.")
    return limits + [sentence(note) for note in data.notes]


def _measures(kind: str, data: Comparison) -> Table:
    measures = _of(data, kind)
    if kind == "divergence":
        rows: list[list[str | Cell]] = [
            [
                each.title,
                number(each.value),
                interval(each.low, each.high),
                number(each.independent_value),
                _texts(each),
            ]
            for each in measures
        ]
        columns = ["Measure", "Same seeds", "Interval", "Other seeds", "Pairs"]
        note = "Other seeds: how alike the two sides' texts of one prompt are where their seeds differ."
        return Table(f"{KINDS[kind]}, which is no quality", columns, rows, note)
    rows = [[*_row(each), _reduction(each), _texts(each)] for each in measures]
    columns = ["Measure", "Baseline", "Candidate", "Difference", "Interval", "", "Variance divided by", "Pairs"]
    note = "The bar shows the interval on a scale of its own, 0 in the middle; it is filled where 0 lies outside."
    return Table(KINDS[kind], columns, rows, note).without_empty_columns()


def _row(measure: Measure) -> list[str | Cell]:
    drawing = Cell()
    if measure.known:
        drawing = Cell(drawing=plots.interval_bar(measure.low or 0, measure.difference or 0, measure.high or 0))
    return [
        Cell(measure.title, "bad" if measure.worse else ""),
        number(measure.baseline),
        number(measure.candidate),
        number(measure.difference, signed=True),
        interval(measure.low, measure.high),
        drawing,
    ]


def _reduction(measure: Measure) -> str:
    if measure.variance_reduction is None:
        return ""
    bounds = interval(measure.variance_reduction_low, measure.variance_reduction_high)
    return f"{number(measure.variance_reduction)}{f' ({bounds})' if bounds else ''}"


def _texts(measure: Measure) -> str:
    return "" if measure.texts is None else f"{measure.texts:,}"


def _by_task(data: Comparison) -> list[Table]:
    columns = ["Measure", "Baseline", "Candidate", "Difference", "Interval", ""]
    tables = []
    for task, measures in data.by_task.items():
        rows = [_row(measure) for measure in measures if measure.known]
        if rows:
            tables.append(Table(f"Task: {task}", columns, rows))
    return tables


def _failures(data: Comparison) -> list[Table]:
    tables = []
    for side, failures in data.failures.items():
        if failures:
            left = f"{len(failures) - FAILURES:,} more are not shown." if len(failures) > FAILURES else ""
            tables.append(Table(f"Failed texts of the {side}", ["Text", "Why"], failures[:FAILURES], left))
    return tables


def _about_texts(data: Comparison) -> list[str]:
    if not data.examples:
        return []
    more = len(data.examples) - EXAMPLES
    left = f" {more:,} more are not shown." if more > 0 else ""
    return [f"Where two texts part, the rest is underlined.{left}"]


def _example(pair: Pair) -> Example:
    prompt = pair.prompt if isinstance(pair.prompt, str) else clean(str(pair.prompt or ""), TEXT_LIMIT)
    title = ", ".join(each for each in (pair.id, pair.task) if each) or prompt[:60] or "a pair"
    first, second = pair.baseline or "", pair.candidate or ""
    same = sum(1 for _ in itertools.takewhile(lambda each: each[0] == each[1], zip(first, second, strict=False)))
    texts = [Text(name, text[:same], text[same:]) for name, text in (("Baseline", first), ("Candidate", second))]
    parted = "" if pair.diverges_at is None else f"; they part at {pair.diverges_at:,}"
    return Example(f"{title}{parted}", [Text("Prompt", "", prompt), *texts])


def _figures(data: Comparison) -> Iterator[Figure]:
    if data.agreement is not None:
        yield from _survival(data)
    if data.token_frequencies is not None and data.token_frequencies.tokens:
        yield _tokens(data.token_frequencies)
    for key, title, unit, found in (
        ("latency", "Time to the last token", "seconds", data.latency),
        ("first-token", "Time to the first token", "seconds", data.latency.of_first_token() if data.latency else None),
        ("lengths", "Length of the texts", f"{data.unit}s", data.lengths),
    ):
        if found is not None and found.baseline and found.candidate:
            yield _quantiles(key, title, unit, found)


def _survival(data: Comparison) -> Iterator[Figure]:
    found = data.agreement
    points = [(float(at), share) for at, share, *_ in found.curve if share is not None] if found else []
    if found is None or len(points) < 2:
        return
    band = [(float(at), low, high) for at, _, low, high in found.curve if low is not None and high is not None]
    says = f"Of all pairs, {percent(points[0][1])} are the same up to {data.unit} {points[0][0]:,.0f}, and "
    says += f"{percent(points[-1][1])} up to {data.unit} {points[-1][0]:,.0f}."
    title = "Pairs that have not parted yet"
    names = plots.Names("agreement", title, says, f"{data.unit} of the text", "share of the pairs")
    rows = [[f"{at:,}", percent(share), share_interval(low, high)] for at, share, low, high in found.curve]
    numbers = Table(title, [data.unit.capitalize(), "Share", "Interval"], rows)
    legend = [Key(sign("line", "line one"), "share"), *([Key(sign("box", "band one"), "its interval")] if band else [])]
    yield Figure(title, plots.curve(names, points, band), says, legend, numbers)


def _tokens(found: Frequencies) -> Figure:
    least = min([share for _, *shares in found.tokens for share in shares if share > 0], default=1e-6) / 2
    ratios = [(max(a, least) / max(b, least), token, a, b) for token, a, b in found.tokens]
    named = sorted(ratios, key=lambda each: -max(each[0], 1 / each[0]))[:NAMED]
    labels = {(token, a, b) for ratio, token, a, b in named if max(ratio, 1 / ratio) >= APART and token is not None}
    spots = [
        plots.Spot(
            max(a, least),
            max(b, least),
            _token(token)[:SHORT] if (token, a, b) in labels else "",
            "two" if 0 in (a, b) else "one",
        )
        for token, a, b in found.tokens
    ]
    never = any(0 in (a, b) for _, a, b in found.tokens)
    says = f"The {len(spots):,} most frequent tokens of both sides; on the dashed line both say a token equally often."
    title = "How often each token is said"
    names = plots.Names("tokens", title, says, "share at the baseline", "share at the candidate")
    legend = [Key(sign("dot", "dot one"), f"a {found.unit}")]
    if never:
        legend.append(Key(sign("dot", "dot two"), "said by one side only: drawn at half the least share"))
    rows = [[_token(token), number(a), number(b), number(b / a if a else None)] for token, a, b in found.tokens]
    numbers = Table(names.title, [found.unit.capitalize(), "Baseline", "Candidate", "Ratio"], rows)
    drawing = plots.scatter(names, spots, both_logarithmic=True, diagonal=True)
    return Figure(names.title, drawing, says, legend, numbers)


def _token(token: str | int | None) -> str:
    return "left out" if token is None else f"{token}" if isinstance(token, int) else f"\u201c{token}\u201d"


def _quantiles(key: str, title: str, unit: str, found: Quantiles) -> Figure:
    sides = {"baseline": found.baseline or [], "candidate": found.candidate or []}
    rows = [(name, sorted(values)) for name, values in sides.items()]
    shares = found.quantiles
    ends = f"{percent(shares[0])} to {percent(shares[-1])}"
    says = f"The line goes from {ends} of the texts, the bar from {percent(shares[len(shares) // 4])} to "
    says += f"{percent(shares[-1 - len(shares) // 4])}; the stroke is the median."
    table_rows: list[Sequence[str]] = [[name, *(number(value) for value in values)] for name, values in rows]
    numbers = Table(title, ["", *map(percent, shares)], table_rows)
    names = plots.Names(key, f"{title}, {unit}", says, unit)
    return Figure(f"{title}, {unit}", plots.ranges(names, rows), says, (), numbers)
