"""What a comparison found, in one paragraph."""

from typing import Any

#: Differences that are spelled out.
MOST_NAMED = 5


def paragraph(found: dict[str, Any]) -> str:
    """Return the findings of a comparison's document in words."""
    parts = [_agreement(found), _differences(found), _saving(found), _missing(found)]
    return " ".join(part for part in parts if part)


def number(value: float | None, signed: bool = False) -> str:
    """Return a number with three digits that count; a dash where there is none."""
    if value is None or value != value:
        return "–"  # noqa: RUF001  (a dash, as in tables)
    text = f"{value:+.3g}" if signed else f"{value:.3g}"
    return f"{value:{'+' if signed else ''},.0f}" if abs(value) >= 1000 else text


def excludes_zero(row: dict[str, Any]) -> bool:
    """Return whether a row's interval of the difference lies on one side of 0."""
    if None in (row["difference"], row["low"], row["high"]):
        return False
    return bool(row["low"] > 0 or row["high"] < 0)


def _agreement(found: dict[str, Any]) -> str:
    agreement, unit = found["agreement"], found["unit"]
    texts = f"{found['pairs']:,} pairs of texts ({found['prompts']:,} prompts, {found['seeds']} seeds)"
    if not agreement["tokens"]:
        return f"There are {texts}, without a {unit} to compare."
    median = agreement["median_divergence"]
    parted = f"half of the pairs have parted at {unit} {median:,}" if median else "fewer than half of the pairs part"
    how = "equal noise on both sides" if found["coupled"] else "no noise in common"
    return (
        f"Over {texts}, with {how}: after the same text both sides draw the same {unit} {agreement['share']:.1%} of "
        f"the time ({agreement['low']:.1%} to {agreement['high']:.1%}), and {parted}."
    )


def _differences(found: dict[str, Any]) -> str:
    rows = [row for row in found["measures"] if row["kind"] != "divergence" and row["low"] == row["low"]]
    if not rows:
        return "There are too few prompts for intervals."
    level = f"{rows[0]['level']:.0%}"
    clear = [row for row in rows if excludes_zero(row)]
    if not clear:
        return f"None of {len(rows)} measures differs beyond its {level} interval."
    said = "; ".join(
        f"{_lower(row['title'])}: {number(row['baseline'])} and {number(row['candidate'])}, so "
        f"{number(row['difference'], True)} ({number(row['low'], True)} to {number(row['high'], True)})"
        for row in clear[:MOST_NAMED]
    )
    more = f"; and {len(clear) - MOST_NAMED} more" if len(clear) > MOST_NAMED else ""
    chance = f"{1 - rows[0]['level']:.2g}"
    return (
        f"{len(clear)} of {len(rows)} {level} intervals of the difference (candidate less baseline) exclude 0, where "
        f"each does with chance {chance} if nothing differs: {said}{more}."
    )


def _saving(found: dict[str, Any]) -> str:
    needed = found["tokens_for_interval"]
    if not found["coupled"]:
        return ""
    if needed is None:
        return "What equal noise saves cannot be told from this few seeds or prompts."
    row = next(each for each in found["measures"] if each["name"] == needed["measure"])
    what = _lower(row["title"]).partition(", ")[0]
    reduction = (
        f"Equal noise divides the variance of the difference in {what} by "
        f"{number(row['variance_reduction'])} ({number(row['variance_reduction_low'])} to "
        f"{number(row['variance_reduction_high'])}) for a prompt and seed at random"
    )
    return (
        f"{reduction}; the interval above took {needed['coupled']:,} tokens, and would take {needed['independent']:,} "
        "with independent seeds."
    )


def _missing(found: dict[str, Any]) -> str:
    said = []
    for what in ("failed", "missing"):
        counts = found[what]
        if any(counts.values()):
            said.append(
                f"{counts['baseline']:,} of the baseline's and {counts['candidate']:,} of the candidate's {what}"
            )
    return f"Of {found['asked']:,} texts a side, {' and '.join(said)}." if said else ""


def _lower(title: str) -> str:
    """Return a title within a sentence: names such as BLEU stay as they are."""
    return title if title[1:2].isupper() else title[0].lower() + title[1:]
