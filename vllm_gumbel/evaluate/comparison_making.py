"""Makes a comparison: serves what is a folder, asks both sides what is missing, computes, writes and shows."""

import argparse
import asyncio
import contextlib
import json
import os
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, TextColumn, TimeElapsedColumn, TimeRemainingColumn
from rich.progress import Progress as Bars

from vllm_gumbel.evaluate import coherence, comparison, measures
from vllm_gumbel.evaluate.client import Endpoint, Patience
from vllm_gumbel.evaluate.client_probe import Side, coupling, look, same_machine
from vllm_gumbel.evaluate.client_server import serving
from vllm_gumbel.evaluate.comparison_question import ROLES, Question, QuestionError, answers
from vllm_gumbel.evaluate.comparison_run import Progress, ask_all
from vllm_gumbel.evaluate.comparison_table import plain_console, show
from vllm_gumbel.evaluate.prompts import Prompt
from vllm_gumbel.evaluate.records import Record, rewrite, write_json

KEY_VARIABLE = "OPENAI_API_KEY"
#: Attempts to find out what a side is: a wrong address should show at once.
FIRST_TRIES = 3

ONE_MACHINE = "Both sides run on one machine: their times disturb each other, and compare with each other only."


class Incomplete(QuestionError):  # noqa: N818  (it says what is the case)
    """Texts are missing, so the comparison rests on others; what there is has been written and shown."""


class _Looked(NamedTuple):
    """What the document says about the two sides."""

    sides: dict[str, Any]
    coupled: bool
    coupling: str
    same_machine: bool


def make(arguments: argparse.Namespace, question: Question, prompts: list[Prompt]) -> None:
    """Ask what is missing, compute, write and show.

    Args:
        arguments: of the command.
        question: what they ask.
        prompts: of it.

    Raises:
        Incomplete: texts are missing, or there is no pair.
        ClientError, ServerError, RecordError, MeasureError, CoherenceUnavailable: it cannot be done.
    """
    folder = arguments.out
    have = answers(folder)
    if any(_is_redacted(record) for each in have.values() for record in each.values()):
        _show_done(folder)
        return
    measures.check()
    measure = coherence.measure()
    if arguments.retry_failed:
        for role in ROLES:
            have[role] = {name: record for name, record in have[role].items() if record.error is None}
            rewrite(folder / f"{role}.jsonl", list(have[role].values()))
    looked = _known(folder) if all(len(each) == len(prompts) * question.seeds for each in have.values()) else None
    if looked is None:
        with _served(arguments, question) as urls:
            looked = _asked(arguments, question, prompts, urls, have)
        have = answers(folder)
    both = comparison.Answers(prompts, question.seeds, have["baseline"], have["candidate"])
    if not any(both.pairs()):
        raise Incomplete(f"no prompt has texts of both sides; see {folder}/baseline.jsonl and {folder}/candidate.jsonl")
    found = comparison.document(
        both,
        {
            "question": _described(question, arguments),
            **looked.sides,
            "coupling": looked.coupling,
            "same_machine": looked.same_machine,
        },
        coupled=looked.coupled,
        coherence=measure,
        notes=_notes(looked, both),
        redact=arguments.redact,
    )
    write_json(folder / "comparison.json", found)
    if arguments.redact:
        for role in ROLES:
            rewrite(folder / f"{role}.jsonl", [record.redacted() for record in have[role].values()])
    show(found, plain_console())
    print(f"{folder / 'comparison.json'}; as a page: vllm-gumbel report {folder}", file=sys.stderr)
    if any(found["missing"].values()):
        raise Incomplete("texts are missing; the same command again asks for them")


def _asked(
    arguments: argparse.Namespace,
    question: Question,
    prompts: list[Prompt],
    urls: dict[str, str],
    have: dict[str, dict[str, Record]],
) -> _Looked:
    """Look at both sides, ask them what is missing, and return what they are."""
    patience = Patience(arguments.tries)
    first = Patience(min(arguments.tries, FIRST_TRIES))
    key = os.environ.get(KEY_VARIABLE) or None

    async def look_and_ask() -> tuple[Side, Side]:
        ours, theirs = [
            await look(
                role,
                Endpoint(urls[role], question.of(role, "_name"), key=key),
                {**question.settings, **question.of(role, "_settings")},
                prompts,
                chat=question.chat,
                timeout=arguments.timeout,
                patience=first,
            )
            for role in ROLES
        ]
        print(coupling(ours, theirs)[1], file=sys.stderr)
        with _progress(len(prompts) * question.seeds, have) as progress:
            await ask_all(
                question,
                prompts,
                (ours, theirs),
                have,
                arguments.out,
                concurrency=arguments.concurrency,
                timeout=arguments.timeout,
                patience=patience,
                progress=progress,
            )
        return ours, theirs

    try:
        sides = asyncio.run(look_and_ask())
    except KeyboardInterrupt:
        print(f"interrupted; what has come is kept in {arguments.out}: the same command goes on", file=sys.stderr)
        raise
    one_machine = same_machine(*(side.endpoint.url for side in sides))
    return _Looked({side.role: _of_side(side, question) for side in sides}, *coupling(*sides), one_machine)


@contextlib.contextmanager
def _progress(wanted: int, have: dict[str, dict[str, Record]]) -> Iterator[Progress]:
    """Yield what counts the texts that come, and show it on standard error."""
    failed = {role: sum(each.error is not None for each in have[role].values()) for role in ROLES}
    progress = Progress({role: len(have[role]) for role in ROLES}, failed)
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn())
    times = (TextColumn("{task.fields[failed]} failed"), TimeElapsedColumn(), TimeRemainingColumn())
    with Bars(*columns, *times, console=Console(stderr=True)) as bars:
        rows = {role: bars.add_task(role, total=wanted, failed=failed[role]) for role in ROLES}

        def changed() -> None:
            for role, row in rows.items():
                bars.update(row, completed=progress.done[role], failed=progress.failed[role])

        progress.changed = changed
        changed()
        yield progress


@contextlib.contextmanager
def _served(arguments: argparse.Namespace, question: Question) -> Iterator[dict[str, str]]:
    """Yield the address of each side, serving what is a folder."""
    folders = [role for role in ROLES if Path(question.of(role, "")).is_dir()]
    models = [
        (Path(question.of(role, "")), arguments.out / f"{role}-server.log", question.of(role, "_serve"))
        for role in folders
    ]
    for model, log, _ in models:
        print(f"serving {model}, with its output in {log}", file=sys.stderr)
    with serving(models) as urls:
        started = dict(zip(folders, urls, strict=True))
        yield {role: started.get(role) or question.of(role, "") for role in ROLES}


def _known(folder: Path) -> _Looked | None:
    """Return what an earlier run that asked everything has found the sides to be; None if it did not get so far."""
    try:
        found = json.loads((folder / "comparison.json").read_text())
        sides = {role: found[role] for role in ROLES}
        return _Looked(sides, found["coupled"], found["coupling"], found["same_machine"])
    except (OSError, ValueError, KeyError, TypeError):
        return None


def _notes(looked: _Looked, answers: comparison.Answers) -> list[str]:
    """Return what a reader must know."""
    notes = [ONE_MACHINE] if looked.same_machine else []
    differing = answers.differing_prompts()
    if looked.coupled and differing:
        notes.append(
            f"{differing} prompts are other tokens for the candidate than for the baseline: there equal seeds are no "
            "equal noise, since it goes by position and token."
        )
    return [*notes, coherence.NOTE, measures.NOTE]


def _described(question: Question, arguments: argparse.Namespace) -> dict[str, Any]:
    """Return what was asked, for the document."""
    names = ("tasks", "prompts", "seeds", "first_seed", "max_tokens", "chat", "settings")
    kept = {name: getattr(question, name) for name in names}
    return {**kept, "concurrency": arguments.concurrency, "file": str(arguments.prompts) if arguments.prompts else None}


def _of_side(side: Side, question: Question) -> dict[str, Any]:
    """Return what a side is, for the document."""
    given = question.of(side.role, "")
    is_folder = Path(given).is_dir()
    return {
        "url": None if is_folder else given,
        "model": given if is_folder else None,
        "name": side.endpoint.name,
        "vllm": side.is_vllm,
        "sampler": side.sampler.name,
        "noise": side.sampler.noise,
        "noise_version": side.sampler.noise_version,
        "settings": question.of(side.role, "_settings"),
        "serve": question.of(side.role, "_serve"),
    }


def _is_redacted(record: Record) -> bool:
    return record.error is None and record.output is None


def _show_done(folder: Path) -> None:
    """Show the result of a comparison whose texts were not kept."""
    try:
        found = json.loads((folder / "comparison.json").read_text())
    except (OSError, ValueError) as error:
        raise Incomplete(f"the texts in {folder} were not kept, and no comparison.json can be read ({error})") from None
    show(found, plain_console())
    print(f"{folder}: done before, with --redact; nothing was asked", file=sys.stderr)
