"""What two sets of answers to one question say about two deployments, as one JSON document."""

import datetime
import math
from collections import Counter
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from vllm_gumbel.evaluate import measures, paired
from vllm_gumbel.evaluate.comparison_question import ROLES, name_of
from vllm_gumbel.evaluate.comparison_words import paragraph
from vllm_gumbel.evaluate.paired import Divergence, Floats
from vllm_gumbel.evaluate.prompts import Prompt
from vllm_gumbel.evaluate.records import Record

VERSION = 1
QUANTILES = (0.05, 0.25, 0.5, 0.75, 0.95)
#: Tokens whose frequencies are told, points of the curve, pairs that are shown, characters of a text there.
MOST_TOKENS, MOST_POINTS, MOST_EXAMPLES, MOST_CHARACTERS = 200, 200, 6, 2000
#: Failures of a side that are quoted.
MOST_FAILURES = 20
#: Measures of time: equal noise makes no machine equally fast.
UNCOUPLED = ("speed",)

Table = dict[str, Floats]
Pair = tuple[Record, Record]


@dataclass(frozen=True)
class Answers:
    """Both sides' records of the same prompts and seeds.

    Attributes:
        prompts: in order.
        seeds: texts of a prompt and a side.
        baseline: records by id.
        candidate: the same.
    """

    prompts: Sequence[Prompt]
    seeds: int
    baseline: dict[str, Record]
    candidate: dict[str, Record]

    def of(self, role: str) -> dict[str, Record]:
        """Return the records of a side."""
        return self.baseline if role == "baseline" else self.candidate

    def text(self, role: str, prompt: Prompt, number: int) -> Record | None:
        """Return a record with a text; None where there is none."""
        record = self.of(role).get(name_of(prompt, number))
        return None if record is None or record.output is None else record

    def pair(self, prompt: Prompt, number: int, other: int | None = None) -> Pair | None:
        """Return a prompt's pair of texts, the candidate's with another seed if `other` is given; None for no pair."""
        ours = self.text("baseline", prompt, number)
        theirs = self.text("candidate", prompt, number if other is None else other)
        return None if ours is None or theirs is None else (ours, theirs)

    def pairs(self) -> list[list[Pair]]:
        """Return the pairs with equal seeds, by prompt."""
        found = ([self.pair(prompt, number) for number in range(self.seeds)] for prompt in self.prompts)
        return [[pair for pair in each if pair is not None] for each in found]

    def differing_prompts(self) -> int:
        """Return how many prompts became other tokens on the candidate's side, as far as both sides show them."""
        first = [each[0] for each in self.pairs() if each]
        ids = [(ours.prompt_token_ids, theirs.prompt_token_ids) for ours, theirs in first]
        return sum(None not in each and each[0] != each[1] for each in ids)

    def unit(self) -> str:
        """Return what texts are cut into: tokens where both sides show them, else words."""
        texts = [each for role in ROLES for each in self.of(role).values() if each.output is not None]
        return "token" if texts and all(each.output_token_ids is not None for each in texts) else "word"


def document(
    answers: Answers,
    described: dict[str, Any],
    *,
    coupled: bool,
    coherence: Callable[[str], float],
    notes: list[str],
    redact: bool,
    level: float = paired.LEVEL,
) -> dict[str, Any]:
    """Return everything that a comparison says.

    Args:
        answers: of both sides.
        described: what stands in the document about question and sides.
        coupled: whether equal seeds meant equal noise.
        coherence: text -> likeness of its neighbouring windows.
        notes: what a reader must know.
        redact: leave out texts and tokens.
        level: of intervals.
    """
    unit = answers.unit()
    tables = {role: _table(answers, role, unit, coherence) for role in ROLES}
    between = {number: _between(answers, number) for number in (0, 1)}
    tasks = list(dict.fromkeys(prompt.task for prompt in answers.prompts))

    def rows(task: str | None) -> list[dict[str, Any]]:
        chosen = np.array([task in (None, prompt.task) for prompt in answers.prompts])
        part = {role: {name: values[chosen] for name, values in tables[role].items()} for role in ROLES}
        alike = {number: {name: values[chosen] for name, values in each.items()} for number, each in between.items()}
        return _rows(part, alike, unit, coupled, level)

    found = {
        "kind": "comparison",
        "version": VERSION,
        "created": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds").replace("+00:00", "Z"),
        **described,
        "coupled": coupled,
        "prompts": len(answers.prompts),
        "seeds": answers.seeds,
        "asked": len(answers.prompts) * answers.seeds,
        "pairs": sum(map(len, answers.pairs())),
        "failed": {role: sum(each.error is not None for each in answers.of(role).values()) for role in ROLES},
        "missing": {role: len(answers.prompts) * answers.seeds - len(answers.of(role)) for role in ROLES},
        "failures": {role: [] if redact else _failures(answers, role) for role in ROLES},
        "unit": unit,
        "measures": rows(None),
        "agreement": _agreement(answers, unit, level),
        "by_task": {task: rows(task) for task in tasks} if len(tasks) > 1 else {},
        "token_frequencies": _frequencies(answers, unit, redact),
        "lengths": {"quantiles": QUANTILES, **{role: _quantiles(tables[role]["length"]) for role in ROLES}},
        "latency": {
            "quantiles": QUANTILES,
            **{role: _quantiles(tables[role]["seconds"]) for role in ROLES},
            "first_token": {role: _quantiles(tables[role]["first_token_seconds"]) for role in ROLES},
        },
        "notes": notes,
        "redacted": redact,
    }
    found["tokens_for_interval"] = _tokens_needed(found["measures"], tables)
    found["words"] = paragraph(found)
    if not redact:
        found["examples"] = _examples(answers, unit)
    return found


def _table(answers: Answers, role: str, unit: str, coherence: Callable[[str], float]) -> Table:
    """Return every measure of a side's texts, float64 [prompts, seeds], NaN for none."""
    shape = (len(answers.prompts), answers.seeds)
    table: Table = {each.name: np.full(shape, np.nan) for each in measures.MEASURES if each.kind != "divergence"}
    for row, prompt in enumerate(answers.prompts):
        for number in range(answers.seeds):
            record = answers.text(role, prompt, number)
            if record is None:
                continue
            found = measures.of_text(record, unit, coherence)
            if prompt.references:
                found |= measures.against_references(record.output or "", prompt.references)
            for name, value in found.items():
                table[name][row, number] = value
    return table


def _between(answers: Answers, shift: int) -> Table:
    """Return how alike the sides' texts are, the candidate's with a seed `shift` further, NaN for none."""
    shape = (len(answers.prompts), answers.seeds)
    names = [each.name for each in measures.MEASURES if each.kind == "divergence"]
    table: Table = {name: np.full(shape, np.nan) for name in names}
    if shift and answers.seeds == 1:
        return table
    for row, prompt in enumerate(answers.prompts):
        for number in range(answers.seeds):
            pair = answers.pair(prompt, number, (number + shift) % answers.seeds)
            if pair is not None:
                for name, value in measures.likeness(pair[1].output or "", [pair[0].output or ""]).items():
                    table[name][row, number] = value
    return table


def _rows(
    tables: dict[str, Table], between: dict[int, Table], unit: str, coupled: bool, level: float
) -> list[dict[str, Any]]:
    """Return one row for each measure that any text has."""
    rows = []
    for name, measure in measures.titles(unit).items():
        row = {"name": name, "title": measure.title, "kind": measure.kind, "better": measure.better, "level": level}
        if measure.kind == "divergence":
            values = between[0][name]
            value, low, high = paired.mean(values, level=level)
            apart = paired.mean(between[1][name], level=level).value
            found = {"value": value, "low": low, "high": high, "independent_value": apart}
            seen = np.isfinite(values)
            texts, prompts = int(seen.sum()), int(seen.any(axis=1).sum())
        else:
            with_noise = coupled and measure.kind not in UNCOUPLED
            difference = paired.difference(
                tables["baseline"][name], tables["candidate"][name], coupled=with_noise, level=level
            )
            found = _of_difference(difference)
            texts, prompts = difference.texts, difference.prompts
        if texts:
            rows.append({**dict.fromkeys(_COLUMNS), **row, **found, "texts": texts, "prompts": prompts})
    return rows


_COLUMNS = (
    *("baseline", "candidate", "difference", "low", "high", "value", "independent_value"),
    *("independent_low", "independent_high"),
    *("variance_reduction", "variance_reduction_low", "variance_reduction_high"),
    *("noise_variance_reduction", "noise_variance_reduction_low", "noise_variance_reduction_high"),
)


def _of_difference(found: paired.Difference) -> dict[str, float]:
    return {
        "baseline": found.baseline,
        "candidate": found.candidate,
        "difference": found.difference.value,
        "low": found.difference.low,
        "high": found.difference.high,
        "independent_low": found.independent.low,
        "independent_high": found.independent.high,
        "variance_reduction": found.reduction.value,
        "variance_reduction_low": found.reduction.low,
        "variance_reduction_high": found.reduction.high,
        "noise_variance_reduction": found.noise_reduction.value,
        "noise_variance_reduction_low": found.noise_reduction.low,
        "noise_variance_reduction_high": found.noise_reduction.high,
    }


def parting(pair: Pair, unit: str) -> Divergence:
    """Return where the texts of a pair part."""
    sequences = [measures.sequence_of(each, unit) for each in pair]
    shorter = min(range(2), key=lambda at: len(sequences[at]))
    ours, theirs = sequences
    return paired.first_divergence(ours, theirs, ended_by_length=pair[shorter].finish_reason == "length")


def _agreement(answers: Answers, unit: str, level: float) -> dict[str, Any]:
    found = paired.agreement([[parting(pair, unit) for pair in each] for each in answers.pairs()], level=level)
    # Close together at the start, where texts part, and ever further apart.
    last = len(found.curve)
    chosen = sorted({round(last ** (step / MOST_POINTS)) - 1 for step in range(MOST_POINTS + 1)}) if last else []
    return {
        "tokens": found.tokens,
        "agree": found.agree,
        "share": found.share.value,
        "low": found.share.low,
        "high": found.share.high,
        "median_divergence": found.median,
        "curve": [list(found.curve[at]) for at in chosen],
    }


def _frequencies(answers: Answers, unit: str, redact: bool) -> dict[str, Any]:
    """Return the shares of the most frequent tokens of both sides' texts."""
    counts = {role: Counter[Hashable]() for role in ROLES}
    for each in answers.pairs():
        for pair in each:
            for role, record in zip(ROLES, pair, strict=True):
                counts[role].update(measures.sequence_of(record, unit))
    totals = {role: max(counts[role].total(), 1) for role in ROLES}
    most = (counts["baseline"] + counts["candidate"]).most_common(MOST_TOKENS)
    return {
        "unit": f"{unit}{' id' if unit == 'token' else ''}",
        "baseline_total": counts["baseline"].total(),
        "candidate_total": counts["candidate"].total(),
        "tokens": [
            [None if redact else token, *(counts[role][token] / totals[role] for role in ROLES)] for token, _ in most
        ],
    }


def _tokens_needed(rows: list[dict[str, Any]], tables: dict[str, Table]) -> dict[str, Any] | None:
    """Return how many tokens the interval of the first measure cost, and would have cost with independent seeds."""
    for row in rows:
        width, apart = row["high"], row["independent_high"]
        if None in (width, apart) or row["kind"] != "quality":
            continue
        width, apart = (row["high"] - row["low"]) / 2, (row["independent_high"] - row["independent_low"]) / 2
        if math.isfinite(apart) and width > 0:
            used = np.isfinite(tables["baseline"][row["name"]]) & np.isfinite(tables["candidate"][row["name"]])
            tokens = sum(float(tables[role]["length"][used].sum()) for role in ROLES)
            return {
                "measure": row["name"],
                "half_width": width,
                "coupled": round(tokens),
                "independent": round(tokens * (apart / width) ** 2),
            }
    return None


def _quantiles(values: Floats) -> list[float]:
    known = values[np.isfinite(values)]
    return [float(each) for each in np.quantile(known, QUANTILES)] if known.size else []


def _failures(answers: Answers, role: str) -> list[list[str]]:
    """Return what the first failed requests of a side were told, in the order of the prompts: answers come in any."""
    names = (name_of(prompt, number) for prompt in answers.prompts for number in range(answers.seeds))
    records = (answers.of(role).get(name) for name in names)
    return [[each.id, each.error] for each in records if each is not None and each.error is not None][:MOST_FAILURES]


def _examples(answers: Answers, unit: str) -> list[dict[str, Any]]:
    """Return pairs from those that part first to those that part last."""
    by_prompt = zip(answers.prompts, answers.pairs(), strict=True)
    pairs = [(parting(pair, unit), prompt, pair) for prompt, each in by_prompt for pair in each]
    pairs.sort(key=lambda each: (each[0].equal, each[2][0].id))
    count = min(MOST_EXAMPLES, len(pairs))
    chosen = [pairs[at * (len(pairs) - 1) // max(count - 1, 1)] for at in range(count)]
    return [
        {
            "id": pair[0].id,
            "task": prompt.task,
            "prompt": prompt.shown()[:MOST_CHARACTERS],
            "baseline": (pair[0].output or "")[:MOST_CHARACTERS],
            "candidate": (pair[1].output or "")[:MOST_CHARACTERS],
            "diverges_at": divergence.equal if divergence.parted else None,
        }
        for divergence, prompt, pair in chosen
    ]
