"""Shows what gates say, as a table and for JSON."""

import json
import math
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from rich.box import SIMPLE_HEAD
from rich.table import Table

from vllm_gumbel.rollout.results import Outcome, Result

_STYLES = {Outcome.PASS: "green", Outcome.FAIL: "bold red", Outcome.UNKNOWN: "yellow", Outcome.SHOWN: "dim"}

FOOT = "`would find`: events per million tokens or requests that the gate had found with chance 0.99."


def table(title: str, results: Sequence[Result]) -> Table:
    """Return what gates say, one a row."""
    shown = Table(
        title=title, title_justify="left", box=SIMPLE_HEAD, pad_edge=False, caption=FOOT, caption_justify="left"
    )
    shown.add_column("gate")
    shown.add_column("says", no_wrap=True)
    shown.add_column("seen", overflow="fold", ratio=1)
    shown.add_column("p", justify="right", no_wrap=True)
    shown.add_column("fails below", justify="right", no_wrap=True)
    shown.add_column("would find", justify="right", no_wrap=True)
    for result in results:
        finds = None if result.finds is None else 1e6 * result.finds
        numbers = (_number(result.p_value, ".2g"), _number(result.rate, ".2g"), _number(finds, ",.0f"))
        outcome = f"[{_STYLES[result.outcome]}]{result.outcome}[/]"
        shown.add_row(result.gate, outcome, result.says.replace("[", r"\["), *numbers)
    return shown


def as_json(results: Sequence[Result]) -> list[dict[str, Any]]:
    """Return what gates say, of types that JSON has."""
    return [asdict(result) for result in results]


def write(path: Path, content: dict[str, Any]) -> None:
    """Write evidence as JSON.

    Raises:
        OSError: the file cannot be written.
    """
    path.write_text(json.dumps(content, indent=1, allow_nan=False) + "\n")


def _number(value: float | None, form: str) -> str:
    return "" if value is None or math.isnan(value) else format(value, form)
