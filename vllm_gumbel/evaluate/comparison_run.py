"""Asks both sides everything that is missing, the same at about the same time, and keeps each answer as it comes."""

import asyncio
import contextlib
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import httpx

from vllm_gumbel.evaluate.client import (
    ClientError,
    HopelessError,
    Patience,
    RefusedError,
    UnavailableError,
    ask,
)
from vllm_gumbel.evaluate.client_probe import Side
from vllm_gumbel.evaluate.comparison_question import Question, name_of
from vllm_gumbel.evaluate.prompts import Prompt
from vllm_gumbel.evaluate.records import Record, Records

#: Answers in a row that a side may refuse, or fail to give, from the start or since the last one that came.
MOST_REFUSALS, MOST_FAILURES = 16, 16


@dataclass
class Progress:
    """What has come, by side; a view of it is called after every change.

    Attributes:
        done: texts that are there, by role.
        failed: of those, how many are refusals, by role.
        changed: called after every change.
    """

    done: dict[str, int]
    failed: dict[str, int]
    changed: Callable[[], None] = lambda: None


@dataclass
class _Asking:
    """One side while it is asked."""

    side: Side
    http: httpx.AsyncClient
    records: Records
    have: set[str]
    refusals: int = 0
    failures: int = 0
    answered: bool = False


async def ask_all(
    question: Question,
    prompts: list[Prompt],
    sides: tuple[Side, Side],
    have: dict[str, dict[str, Record]],
    folder: Path,
    *,
    concurrency: int,
    timeout: float,
    patience: Patience,
    progress: Progress,
) -> None:
    """Ask what is missing and append it to the folder's files.

    Both sides get a prompt and seed together, and the one that is sent first alternates, so that whatever else the
    machines do falls on both. All prompts come once before any comes with its second seed.

    Args:
        question: what is asked.
        prompts: of it.
        sides: who is asked.
        have: what is there, by role and id.
        folder: of the comparison.
        concurrency: requests at a time to each side.
        timeout: seconds without a byte after which an attempt ends.
        patience: of each request.
        progress: is told what comes.

    Raises:
        ClientError: a side refuses everything or has gone away; what has come is kept.
        RecordError: a file cannot be written.
    """
    async with contextlib.AsyncExitStack() as stack:
        askings = []
        for side in sides:
            http = await stack.enter_async_context(side.endpoint.client(timeout, concurrency))
            records = stack.enter_context(Records(folder / f"{side.role}.jsonl"))
            askings.append(_Asking(side, http, records, set(have[side.role])))
        numbered = enumerate((prompt, number) for number in range(question.seeds) for prompt in prompts)
        queue = deque(each for each in numbered if any(name_of(*each[1]) not in asking.have for asking in askings))

        async def one(asking: _Asking, prompt: Prompt, number: int) -> None:
            name = name_of(prompt, number)
            if name in asking.have:
                return
            side = asking.side
            params = question.params(side, prompt, number)
            try:
                record = await patience.repeated(
                    lambda: ask(asking.http, side.endpoint, prompt, params, name, question.chat)
                )
            except UnavailableError as error:
                _count_failure(asking, error)
                return
            except RefusedError as error:
                record = _refused(prompt, params, name, side, error)
            _keep(asking, record, progress)

        async def work() -> None:
            while queue:
                at, (prompt, number) = queue.popleft()
                order = askings if at % 2 == 0 else askings[::-1]
                async with asyncio.TaskGroup() as both:
                    for asking in order:
                        both.create_task(one(asking, prompt, number))

        try:
            async with asyncio.TaskGroup() as workers:
                for _ in range(concurrency):
                    workers.create_task(work())
        except ExceptionGroup as group:
            raise _first(group) from None


def _keep(asking: _Asking, record: Record, progress: Progress) -> None:
    """Write a record, and stop where a side does nothing but refuse."""
    sampler = asking.side.sampler
    if record.error is None and sampler.noise is not None:
        record = record.model_copy(update={"noise": sampler.noise, "noise_version": sampler.noise_version})
    asking.records.append(record)
    progress.done[asking.side.role] += 1
    progress.failed[asking.side.role] += record.error is not None
    progress.changed()
    asking.failures = 0
    if record.error is None:
        asking.answered = True
        return
    asking.refusals += 1
    if not asking.answered and asking.refusals >= MOST_REFUSALS:
        raise HopelessError(
            f"the {asking.side.role} at {asking.side.endpoint.url} refuses everything, last: {record.error}"
        )


def _count_failure(asking: _Asking, error: UnavailableError) -> None:
    """Count a text that could not be had now, and stop where a side gives none any more."""
    asking.failures += 1
    if asking.failures >= MOST_FAILURES:
        raise ClientError(f"the {asking.side.role} at {asking.side.endpoint.url} gives no answers any more: {error}")


def _refused(prompt: Prompt, params: dict[str, object], name: str, side: Side, error: RefusedError) -> Record:
    return Record(
        id=name,
        task=prompt.task,
        prompt=prompt.prompt,
        messages=prompt.messages,
        params=params,
        model=side.endpoint.name,
        error=str(error),
    )


def _first(group: ExceptionGroup[Exception]) -> Exception:
    """Return the first error within groups of errors."""
    error: Exception = group
    while isinstance(error, ExceptionGroup):
        error = error.exceptions[0]
    return error
