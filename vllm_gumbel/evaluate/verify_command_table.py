"""How verdicts are shown: a line or a table for each text, one for all, and the same as JSON."""

from collections import Counter
from collections.abc import Sequence
from typing import Any

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from vllm_gumbel.evaluate.likelihood import DIFFERS, MATCHES, UNDECIDED, UNREADABLE, Totals
from vllm_gumbel.evaluate.likelihood_text import Verified

_STYLES = {MATCHES: "green", DIFFERS: "bold red", UNDECIDED: "yellow", UNREADABLE: "magenta"}


def lines(one: Verified, tokenizer: Any, *, per_token: bool, redact: bool) -> RenderableType:
    """Return what is printed of one text."""
    head = Text.assemble((f"{one.verdict:10}", _STYLES[one.verdict]), f" {one.record.id}: {one.explanation}")
    details = []
    if one.judgement is not None:
        found = one.judgement
        at = "" if found.decided_at is None else f", certain after token {found.decided_at}"
        details.append(
            f"{one.matched} of {len(one.looks)} tokens are the claim's; evidence for it 10^{found.evidence_for:.1f}, "
            f"against it 10^{found.evidence_against:.1f}{at}"
        )
    details.extend(one.notes)
    parts: list[RenderableType] = [head, *(Text(f"           {detail}", style="dim") for detail in details)]
    if per_token and one.looks:
        parts.append(_table(one, tokenizer, redact))
    return Group(*parts)


def summary(found: Sequence[Verified], together: Totals, alpha: float, tolerance: float) -> Text:
    """Return what is printed at the end."""
    return Text(f"\n{words(found, together, alpha)} (tolerance {tolerance:g})")


def words(found: Sequence[Verified], together: Totals, alpha: float) -> str:
    """Return what all verdicts say together."""
    counts = Counter(one.verdict for one in found)
    said = ", ".join(f"{counts[verdict]} {verdict}" for verdict in _STYLES if counts[verdict])
    said = f"{len(found)} texts: {said}" if found else "no texts"
    if together.judged > 1:
        said += f". At alpha {alpha:g} honest texts give {together.expected:.2g} false alarms on average"
        if together.differ:
            said += f", and {together.differ} or more of them with a chance of {together.chance:.2g}"
        said += f". All texts as one: {together.verdict}, {together.explanation} (evidence for the claims "
        said += f"10^{together.evidence_for:.1f}, against them 10^{together.evidence_against:.1f})"
    return said


def as_json(
    found: Sequence[Verified], together: Totals, alpha: float, tokenizer: Any, *, redact: bool
) -> dict[str, Any]:
    """Return records and totals as they are written."""
    counts = Counter(one.verdict for one in found)
    totals = {
        "records": len(found),
        **{verdict: counts[verdict] for verdict in _STYLES},
        "tokens": sum(len(one.looks) for one in found),
        "matched": sum(one.matched for one in found),
        "expected_false_alarms": together.expected,
        "chance_of_so_many": together.chance,
        "verdict": together.verdict,
        "explanation": together.explanation,
        "evidence_against": together.evidence_against,
        "evidence_for": together.evidence_for,
        "summary": words(found, together, alpha),
    }
    return {"records": [_record(one, tokenizer, redact) for one in found], "totals": totals}


def _record(one: Verified, tokenizer: Any, redact: bool) -> dict[str, Any]:
    found = one.judgement
    positions = []
    for token, look in zip(one.tokens, one.looks, strict=True):
        shown = {} if redact else {"token": token, "text": tokenizer.decode([token])}
        positions.append({**shown, **vars(look)})
    return {
        "id": one.record.id,
        "task": one.record.task,
        "verdict": one.verdict,
        "explanation": one.explanation if not (redact and found is None) else "it cannot be verified",
        "claim": _claim(one.record.params, redact),
        "noise": one.record.noise,
        "tokens": len(one.looks),
        "matched": one.matched,
        "evidence_against": None if found is None else found.evidence_against,
        "evidence_for": None if found is None else found.evidence_for,
        "decided_at": None if found is None else found.decided_at,
        "notes": list(one.notes),
        "alternatives": [] if found is None else [vars(each) for each in found.alternatives],
        "positions": positions,
    }


def _claim(params: dict[str, Any], redact: bool) -> dict[str, Any]:
    """Return the parameters of a record; redacted, those that are numbers, since others may hold text or tokens."""
    return {key: value for key, value in params.items() if not redact or isinstance(value, int | float)}


def _table(one: Verified, tokenizer: Any, redact: bool) -> Table:
    table = Table(box=None, padding=(0, 1))
    for name in ("token", "text", "match", "margin", "rank", "chance"):
        table.add_column(name, justify="left" if name in ("text", "match") else "right", no_wrap=True)
    decided = None if one.judgement is None else one.judgement.decided_at
    for place, (token, look) in enumerate(zip(one.tokens, one.looks, strict=True)):
        text = "" if redact else repr(tokenizer.decode([token]))
        match = "yes" if look.match else "no" if look.kept else "no: filtered out"
        if place == decided:
            match += "  <- certain"
        margin = "" if look.margin is None else "alone" if look.margin == float("inf") else f"{look.margin:.3f}"
        cells = (str(place), text, match, margin, str(look.rank), f"{look.probability:.3g}")
        table.add_row(*(Text(cell) for cell in cells), style=None if look.match else "red")
    return table
