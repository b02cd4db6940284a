"""Remembers how far a rollout has come, so that another process can go on with it."""

import contextlib
import fcntl
import json
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from vllm_gumbel.metrics.files import written_whole
from vllm_gumbel.rollout.counts import ArmCounts, ServerCounts
from vllm_gumbel.text import shorten

#: Of the file; another number is refused.
VERSION = 1


class JournalError(ValueError):
    """A state file cannot be used; the message says why."""


@dataclass
class Journal:
    """How far a rollout has come.

    Attributes:
        server: address of the server.
        stages: as on the command line.
        hold: seconds that a stage lasts.
        stage: index of the stage that is next or in progress; -1 for the baseline.
        began: when its window began, on Prometheus' clock; None if it has none yet.
        look: how often this stage has been looked at.
        holds: how many holds its window is long, for the next look.
        baseline: what the server did before the first stage; None until that is known.
        earlier: counts of the stages passed, by arm.
        looks: every look so far, of types that JSON has.
        outcome: "pass" or "fail" once it has ended so.
    """

    server: str
    stages: str
    hold: float
    stage: int = -1
    began: float | None = None
    look: int = 0
    holds: int = 1
    baseline: ServerCounts | None = None
    earlier: dict[str, ArmCounts] = field(default_factory=dict)
    looks: list[dict[str, Any]] = field(default_factory=list)
    outcome: str | None = None

    def next_stage(self) -> None:
        """Go on to the next stage."""
        self.stage += 1
        self.begin_anew()
        self.look = 0

    def begin_anew(self) -> None:
        """Forget the window of the stage."""
        self.began, self.holds = None, 1


class Keeper:
    """The file that keeps a journal; without a path nothing is kept.

    Args:
        path: of the file.
    """

    def __init__(self, path: Path | None) -> None:
        self.path = path

    @contextlib.contextmanager
    def alone(self) -> Iterator[None]:
        """Keep every other process from using the file meanwhile; a lock beside it does so until this process ends.

        Raises:
            JournalError: another one uses it, or the folder cannot be written.
        """
        if self.path is None:
            yield
            return
        lock = self.path.with_name(f"{self.path.name}.lock")
        try:
            opened = lock.open("w")
        except OSError as error:
            raise JournalError(f"{lock} cannot be written: {error.strerror}") from None
        with opened:
            try:
                fcntl.flock(opened, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except OSError:
                raise JournalError(f"another run is at work with {self.path}") from None
            yield

    def load(self, fresh: Journal) -> Journal:
        """Return the journal of the file if there is one, else the fresh one.

        Raises:
            JournalError: the file cannot be read, is damaged, or is of another server, other stages or another hold.
        """
        if self.path is None or not self.path.exists():
            return fresh
        try:
            content = json.loads(self.path.read_text())
            version = content.pop("version")
            if version != VERSION:
                raise JournalError(f"{self.path} is of version {shorten(version)}, this program writes {VERSION}")
            kept = _restored(content)
        except OSError as error:
            raise JournalError(f"{self.path} cannot be read: {error.strerror}") from None
        except JournalError:
            raise
        except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
            raise JournalError(f"{self.path} is no state of a rollout: {shorten(str(error))}") from None
        for name in ("server", "stages", "hold"):
            theirs, ours = getattr(kept, name), getattr(fresh, name)
            if theirs != ours:
                raise JournalError(
                    f"{self.path} is of a run with {name} {theirs}, not {ours}: give another --state file, or remove "
                    "this one to begin anew"
                )
        return kept

    def save(self, journal: Journal) -> None:
        """Replace the file, all of it or nothing.

        Raises:
            JournalError: it cannot be written.
        """
        if self.path is None:
            return
        try:
            with written_whole(self.path) as file:
                file.write(json.dumps({"version": VERSION, **asdict(journal)}).encode())
        except OSError as error:
            raise JournalError(f"{self.path} cannot be written: {error.strerror}") from None


def _restored(content: dict[str, Any]) -> Journal:
    """Return the journal of a file."""
    baseline, earlier = content.pop("baseline"), content.pop("earlier")
    journal = Journal(
        **content,
        baseline=None if baseline is None else ServerCounts.restored(baseline),
        earlier={
            arm: ArmCounts(
                float(each["tokens"]), float(each["watched"]), {k: float(v) for k, v in each["kinds"].items()}
            )
            for arm, each in earlier.items()
        },
    )
    counted = (journal.stage, journal.look, journal.holds)
    if not all(isinstance(number, int) for number in counted) or journal.stage < -1 or journal.holds < 1:
        raise ValueError(f"stage, look and holds are {counted}")
    if not isinstance(journal.began, float | int | None) or not isinstance(journal.looks, list):
        raise ValueError("began is no time, or looks no list")
    return journal
