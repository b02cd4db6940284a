"""The page of a verification: which texts came from the model with their seeds, and how sure that is."""

import itertools
import math
from collections import Counter
from collections.abc import Iterator

from vllm_gumbel.evaluate import plots
from vllm_gumbel.evaluate.page import Cell, Figure, Finding, Page, Section, Table
from vllm_gumbel.evaluate.plots_canvas import Key, sign
from vllm_gumbel.evaluate.report_shapes import Position, Verification, Verified
from vllm_gumbel.evaluate.words import counted, moment, number, percent, sentence

#: Mark of each verdict, in the order in which records are shown.
MARKS = {"differs": "bad", "unreadable": "unsure", "undecided": "unsure", "matches": "good"}
#: Records whose tokens are drawn, and tokens of one that are.
DRAWN, TOKENS = 6, 400
#: Texts whose explanation is among the first words.
EXPLAINED = 5
#: Bounds of a histogram of margins, in nats.
MARGINS = (-math.inf, -2.0, -0.5, -0.1, 0.0, 0.1, 0.5, 1.0, 2.0, 4.0, math.inf)


def page(data: Verification) -> Page:
    """Return the page of a verification."""
    ranked = sorted(data.records, key=lambda record: list(MARKS).index(record.verdict))
    lead, *others = _findings(data)
    facts = [
        ("Model", data.model or "not named"),
        ("Precision", f"{data.precision or 'not named'}; of the server {data.server_precision or 'not named'}"),
        ("Records", f"{len(data.records):,}"),
        ("Chance of a false alarm, a record", number(data.alpha)),
        ("Verified", moment(data.created)),
    ]
    sections = [
        Section("In pictures", figures=list(_figures(data, ranked))),
        Section("Records", tables=[_table(ranked)]),
    ]
    title = f"{len(data.records):,} texts against {data.model or 'a model'}"
    return Page(title, "A verification of generated texts", lead, facts, others, _limits(data), sections)


def _findings(data: Verification) -> Iterator[Finding]:
    """Yield what was found, the main thing first."""
    verdicts = Counter[str](record.verdict for record in data.records)
    differs = [record for record in data.records if record.verdict == "differs"]
    if not data.records:
        yield Finding("There was no record to verify.", "unsure")
    elif differs:
        yield Finding(
            f"{counted(len(differs), 'text').capitalize()} of {len(data.records):,} did not come from this model as "
            f"claimed.",
            "bad",
        )
    elif verdicts["matches"] == len(data.records):
        yield Finding(
            f"{counted(len(data.records), 'text').capitalize()}: each came from this model with its seed.", "good"
        )
    else:
        yield Finding(
            f"{counted(verdicts['matches'], 'text').capitalize()} of {len(data.records):,} came from this model with "
            "its seed; the others are not decided.",
            "unsure",
        )
    totals = data.totals
    if totals.tokens:
        matched = percent(totals.matched / totals.tokens)
        yield Finding(f"{matched} of {totals.tokens:,} tokens are those that the replayed noise chooses.")
    if totals.summary:
        yield Finding(sentence(totals.summary))
    for verdict, words in (("undecided", "undecided: too little evidence"), ("unreadable", "could not be verified")):
        if verdicts[verdict]:
            yield Finding(f"{counted(verdicts[verdict], 'text').capitalize()} {words}.", "unsure")
    explained = [record for record in differs if record.explanation]
    for record in explained[:EXPLAINED]:
        yield Finding(f"{record.id}: {record.explanation}.", "bad")
    if len(explained) > EXPLAINED:
        further = counted(len(explained) - EXPLAINED, "further text")
        yield Finding(f"{further.capitalize()}: the table of records says why.", "bad")
    decided = sorted(record.decided_at for record in differs if record.decided_at is not None)
    if decided:
        middle = decided[(len(decided) - 1) // 2]
        yield Finding(f"Half of those that differ were found by token {middle:,}.")


def _limits(data: Verification) -> list[str]:
    return [
        "That a text matches says that these weights with this seed make it, not who ran them.",
        f"An honest text is called different with a chance of {number(data.alpha)} at most, as far as the model of the "
        "two sides' rounding holds; among many texts a few false alarms are expected.",
        "A greedy text has no noise: it says nothing about a seed.",
    ] + [sentence(note) for note in data.notes]


def _table(records: list[Verified]) -> Table:
    rows: list[list[str | Cell]] = [
        [
            record.id,
            Cell(record.verdict, MARKS[record.verdict]),
            "; ".join([*([record.explanation] if record.explanation else []), *record.notes]),
            f"{record.tokens:,}",
            percent(record.matched / record.tokens) if record.tokens else "",
            number(record.evidence_against),
            number(record.evidence_for),
            "" if record.decided_at is None else f"{record.decided_at:,}",
        ]
        for record in records
    ]
    columns = [
        "Record",
        "Verdict",
        "Explanation",
        "Tokens",
        "Matched",
        "Evidence against",
        "Evidence for",
        "Decided at",
    ]
    note = "Evidence: power of ten by which the tokens speak against honesty, and for this seed over any other."
    return Table("Each record, those that differ first", columns, rows, note)


def _figures(data: Verification, ranked: list[Verified]) -> Iterator[Figure]:
    positions = [each for record in data.records for each in record.positions if each.margin is not None]
    if positions:
        yield _margins(positions)
    judged = [record for record in data.records if None not in (record.evidence_for, record.evidence_against)]
    if judged:
        yield _evidence(judged, data.alpha)
    drawn = [record for record in ranked if any(each.margin is not None for each in record.positions[:TOKENS])]
    for i, record in enumerate(drawn[:DRAWN]):
        yield _record(f"record-{i}", record)


def _margins(positions: list[Position]) -> Figure:
    counts = [0] * (len(MARGINS) - 1)
    for each in positions:
        margin = each.margin or 0.0
        counts[sum(margin >= bound for bound in MARGINS[1:-1])] += 1
    labels = [_bin(low, high) for low, high in itertools.pairwise(MARGINS)]
    shares = [count / len(positions) for count in counts]
    below = sum(counts[i] for i, high in enumerate(MARGINS[1:]) if high <= 0)
    title = "Margins of all tokens"
    says = "By how much the claimed token's score beats the best other one. "
    says += f"{below:,} of {len(positions):,} lie below 0, where another token should have been drawn. "
    says += "Rounding moves what is near 0."
    rows = [[label, f"{count:,}", percent(share)] for label, count, share in zip(labels, counts, shares, strict=True)]
    names = plots.Names("margins", title, says, "margin, nats, from this value on", "share of the tokens")
    drawing = plots.histogram(names, [_start(low) for low in MARGINS[:-1]], [shares])
    return Figure(title, drawing, says, (), Table(title, ["Margin", "Tokens", "Share"], rows))


def _bin(low: float, high: float) -> str:
    if low == -math.inf:
        return f"below {number(high)}"
    return f"{number(low)} and above" if high == math.inf else f"{number(low)} to {number(high)}"


def _start(low: float) -> str:
    return "less" if low == -math.inf else number(low, 2)


def _evidence(records: list[Verified], alpha: float) -> Figure:
    styles = {"matches": "one", "differs": "cross two", "undecided": "three", "unreadable": "three"}
    spots = [
        plots.Spot(record.evidence_against or 0, record.evidence_for or 0, "", styles[record.verdict])
        for record in records
    ]
    bar = number(-math.log10(alpha)) if 0 < alpha < 1 else number(None)
    title = "Evidence of each text"
    says = f"Powers of ten. From {bar} on the horizontal axis on a text differs; else it matches from {bar} on the "
    says += "vertical one."
    names = plots.Names("evidence", title, says, "evidence against honesty", "evidence for the seed")
    legend = [
        Key(sign("dot", "dot one"), "matches"),
        Key(sign("cross", "cross two"), "differs"),
        Key(sign("dot", "dot three"), "undecided"),
    ]
    return Figure(title, plots.scatter(names, spots), says, legend)


def _record(key: str, record: Verified) -> Figure:
    positions = enumerate(record.positions[:TOKENS])
    known = [(i, each) for i, each in positions if each.margin is not None or not each.match]
    least = min((each.margin for _, each in known if each.margin is not None), default=0.0)
    values = [(float(i), min(least, 0.0) if each.margin is None else each.margin, each.match) for i, each in known]
    wrong, outside = sum(not each.match for _, each in known), sum(each.margin is None for _, each in known)
    says = f"{record.verdict.capitalize()}{f': {record.explanation}' if record.explanation else ''}. "
    says += f"{wrong:,} of {len(known):,} tokens are not what the replayed noise chooses."
    if outside:
        says += f" {outside:,} of them lie outside the filters and have no margin; they stand at the lower end."
    if record.decided_at is not None:
        says += f" Decided at token {record.decided_at:,}, the dashed line."
    title = f"Margin of each token: {record.id}"
    rows = [[f"{i:,}", *_words_of(each)] for i, each in known]
    numbers = Table(title, ["Position", "Token", "Match", "Margin", "Rank"], rows)
    names = plots.Names(key, title, says, "token of the text", "margin, nats")
    legend = [Key(sign("line", "line one"), "chosen by the noise")]
    if wrong:
        legend.append(Key(sign("cross", "cross two"), "another would be"))
    drawing = plots.stems(names, values, None if record.decided_at is None else float(record.decided_at))
    return Figure(title, drawing, says, legend, numbers)


def _words_of(each: Position) -> list[str | Cell]:
    token = each.text if each.text is not None else "" if each.token is None else f"{each.token}"
    match = Cell("yes") if each.match else Cell("no", "bad")
    return [token, match, number(each.margin), "" if each.rank is None else f"{each.rank:,}"]
