"""Shows a comparison's document on a terminal."""

from typing import Any

from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table

from vllm_gumbel.evaluate.comparison_words import excludes_zero, number

#: Columns where no terminal says how many there are.
WIDTH = 150
MOST_FAILURES = 3
#: Positions of the curve that are printed.
MOST_POSITIONS = 12


def show(found: dict[str, Any], console: Console) -> None:
    """Print a comparison: words first."""
    console.print(found["words"], markup=False, highlight=False)
    console.print()
    for line in (found["coupling"], *found["notes"]):
        console.print(f"- {line}", markup=False, highlight=False)
    console.print(_differences(found))
    console.print(_likeness(found))
    if found["agreement"]["curve"]:
        console.print(_curve(found))
    for role, failures in found["failures"].items():
        for name, error in failures[:MOST_FAILURES]:
            console.print(f"{role}, {name}: {error}", markup=False, highlight=False)


def plain_console() -> Console:
    """Return where tables go: as wide as the terminal, or wide enough for them."""
    console = Console()
    return console if console.is_terminal else Console(width=WIDTH)


def _differences(found: dict[str, Any]) -> Table:
    table = Table(box=SIMPLE_HEAD, pad_edge=False, title="Measures of each side", title_justify="left")
    table.add_column("measure")
    level = f"{found['measures'][0]['level']:.0%}" if found["measures"] else ""
    for name in ("baseline", "candidate", "difference", level, f"{level}, independent", "variance / ", "texts"):
        table.add_column(name, justify="right", no_wrap=True)
    for row in found["measures"]:
        if row["kind"] == "divergence":
            continue
        style = "bold" if excludes_zero(row) else ""
        reduction = number(row["variance_reduction"])
        if reduction[0].isdigit():
            reduction += f" [{number(row['variance_reduction_low'])}, {number(row['variance_reduction_high'])}]"
        table.add_row(
            row["title"],
            number(row["baseline"]),
            number(row["candidate"]),
            number(row["difference"], True),
            _interval(row["low"], row["high"]),
            _interval(row["independent_low"], row["independent_high"]),
            reduction.replace("[", r"\["),
            f"{row['texts']:,}",
            style=style,
        )
    table.caption = (
        "difference: candidate less baseline. independent: the interval that as many texts with independent seeds "
        "would give. variance /: what equal noise divides the variance of the difference by."
    )
    table.caption_justify = "left"
    return table


def _likeness(found: dict[str, Any]) -> Table:
    level = f"{found['measures'][0]['level']:.0%}" if found["measures"] else ""
    table = Table(
        box=SIMPLE_HEAD, pad_edge=False, title="How alike the sides' texts are (no quality)", title_justify="left"
    )
    table.add_column("measure")
    for name in ("same seed", level, "other seed", "texts"):
        table.add_column(name, justify="right", no_wrap=True)
    for row in found["measures"]:
        if row["kind"] == "divergence":
            interval = _interval(row["low"], row["high"], signed=False)
            cells = (number(row["value"]), interval, number(row["independent_value"]))
            table.add_row(row["title"], *cells, f"{row['texts']:,}")
    return table


def _curve(found: dict[str, Any]) -> Table:
    curve = found["agreement"]["curve"]
    step = max(1, -(-len(curve) // MOST_POSITIONS))
    shown = curve[::step] + ([curve[-1]] if (len(curve) - 1) % step else [])
    table = Table(box=SIMPLE_HEAD, pad_edge=False, title="Pairs that have not parted yet", title_justify="left")
    table.add_column(found["unit"])
    for position, *_ in shown:
        table.add_column(f"{position:,}", justify="right", no_wrap=True)
    table.add_row("share", *(f"{share:.2f}" for _, share, _, _ in shown))
    table.add_row("low", *(f"{low:.2f}" for _, _, low, _ in shown))
    table.add_row("high", *(f"{high:.2f}" for _, _, _, high in shown))
    return table


def _interval(low: float | None, high: float | None, signed: bool = True) -> str:
    if low is None or high is None or low != low:
        return ""
    return rf"\[{number(low, signed)}, {number(high, signed)}]"
