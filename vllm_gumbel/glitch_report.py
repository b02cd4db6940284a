"""`vllm-gumbel glitch`: a model's glitch tokens as tables or JSON."""

import argparse
import contextlib
import json
import sys
from pathlib import Path

from rich.console import Console
from rich.progress import Progress
from rich.table import Table
from rich.text import Text

from vllm_gumbel.default_model import ModelUnavailable, prepare
from vllm_gumbel.metrics.glitch import CLEAR, GlitchError, Glitches, find

#: So many ids of a kind are shown unless all are asked for.
SHOWN = 20

MEANINGS = {
    "undertrained": f"indicator below {CLEAR:g} of the median over ordinary ids",
    "unreachable": "no text is tokenised to it",
    "special": "control tokens, wrong within a text",
}


def run(arguments: argparse.Namespace) -> int:
    """Print the glitch tokens of a model; return the exit code."""
    try:
        # The libraries behind it may print; only the result belongs on standard output.
        with contextlib.redirect_stdout(sys.stderr):
            model = Path(arguments.model) if arguments.model else prepare()
            found = _find(model)
    except (GlitchError, ModelUnavailable) as error:
        print(f"vllm-gumbel glitch: {error}", file=sys.stderr)
        return 1
    if arguments.json:
        print(json.dumps(as_json(model, found), indent=1))
    else:
        show(found, None if arguments.all else SHOWN, Console())
    return 0


def as_json(model: Path, found: Glitches) -> dict[str, object]:
    """Return everything that is known, with the ids of each kind as objects."""
    facts = {name: getattr(found, name) for name in ("fingerprint", "vocab", "tied", "references", "partial")}
    return {"model": str(model), **facts, **{kind: _entries(found, kind) for kind in MEANINGS}}


def show(found: Glitches, shown: int | None, console: Console) -> None:
    """Print a summary, and a table for each kind, the clearest first.

    Args:
        found: what is printed.
        shown: how many ids of a kind; None for all.
        console: where to.
    """
    if not found.tied:
        how = "by the lengths of its rows"
    elif found.references:
        how = f"by its direction and length, after {found.references} ids known to be unused"
    else:
        how = "by the lengths of its rows, since no ids are known to be unused"
    counts = ", ".join(f"{len(_entries(found, kind)):,} {kind}" for kind in MEANINGS)
    console.print(f"{found.vocab:,} ids: {counts}; {found.partial:,} are parts of characters and no glitch.")
    console.print(f"The {'tied' if found.tied else 'untied'} embedding was judged {how}.")
    for kind, meaning in MEANINGS.items():
        entries = _entries(found, kind)
        if not entries:
            continue
        table = Table(title=f"{kind}: {meaning}", title_justify="left")
        table.add_column("id", justify="right")
        table.add_column("text", overflow="fold")
        table.add_column("indicator", justify="right")
        for entry in entries[:shown]:
            table.add_row(str(entry["id"]), Text(repr(entry["text"])), f"{entry['indicator']:.4f}")
        console.print(table)
        if shown is not None and len(entries) > shown:
            console.print(f"{len(entries) - shown:,} more; --all shows them.")


def _entries(found: Glitches, kind: str) -> list[dict[str, object]]:
    """Return the ids of a kind, the clearest first."""
    ids = sorted(getattr(found, kind), key=lambda index: (found.indicators[index], index))
    return [{"id": index, "text": found.texts[index], "indicator": found.indicators[index]} for index in ids]


def _find(model: Path) -> Glitches:
    """Find the glitch tokens, with a progress bar where somebody sees it."""
    console = Console(stderr=True)
    with Progress(console=console, transient=True, disable=not console.is_terminal) as progress:
        task = progress.add_task("looking for glitch tokens", total=1.0)
        return find(model, lambda share: progress.update(task, completed=share))
