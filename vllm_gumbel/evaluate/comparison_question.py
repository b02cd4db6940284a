"""What a comparison asks, and the folder that keeps what was asked, so that a second run asks only what is missing."""

import contextlib
import fcntl
import json
import os
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from vllm_gumbel.evaluate.client_probe import Side
from vllm_gumbel.evaluate.prompts import Prompt
from vllm_gumbel.evaluate.records import Record, read, write_json

ROLES = ("baseline", "candidate")

#: Said to every vLLM server, whose model may bring other defaults.
VLLM_DEFAULTS = {"top_k": 0, "min_p": 0.0, "repetition_penalty": 1.0}
#: Parameters that are set by options of their own, or that this command needs for itself.
OWN_PARAMETERS = frozenset(
    {
        "best_of",
        "echo",
        "logprobs",
        "max_completion_tokens",
        "max_tokens",
        "messages",
        "model",
        "n",
        "prompt",
        "return_token_ids",
        "seed",
        "stream",
        "stream_options",
        "top_logprobs",
        "vllm_xargs",
    }
)


class QuestionError(Exception):
    """A comparison cannot be made as asked; the message says why."""


@dataclass(frozen=True)
class Question:
    """What is asked of both sides.

    Attributes:
        baseline: address of a server, or folder of a model.
        candidate: the same.
        baseline_name: of the model there; empty for the only one.
        candidate_name: the same.
        tasks: of the built-in prompts; empty for a file's.
        prompts: digest of all prompts.
        seeds: texts of a prompt and a side.
        first_seed: of them; the others follow.
        max_tokens: of a text.
        chat: whether texts are sent as chats.
        settings: sampling parameters of both sides.
        baseline_settings: of one alone.
        candidate_settings: of the other.
        baseline_serve: flags of `vllm serve`, for a model's folder.
        candidate_serve: the same.
    """

    baseline: str
    candidate: str
    baseline_name: str
    candidate_name: str
    tasks: list[str]
    prompts: str
    seeds: int
    first_seed: int
    max_tokens: int
    chat: bool
    settings: dict[str, Any]
    baseline_settings: dict[str, Any]
    candidate_settings: dict[str, Any]
    baseline_serve: list[str]
    candidate_serve: list[str]

    def of(self, role: str, what: str) -> Any:
        """Return the question's `what` of one side."""
        return getattr(self, f"{role}{what}")

    def params(self, side: Side, prompt: Prompt, number: int) -> dict[str, Any]:
        """Return the sampling parameters of a prompt's text with a number, for one side.

        Prompts are kept independent of each other by a salt where it reaches the noise, else by other seeds.
        """
        seed = self.first_seed + number
        params = {**(VLLM_DEFAULTS if side.is_vllm else {}), **side.settings, "max_tokens": self.max_tokens}
        if side.is_salted:
            return {"gumbel_sampler": "gumbel", "gumbel_salt": prompt.salt, **params, "seed": seed}
        return {**params, "seed": seed + (prompt.salt >> 23)}


def name_of(prompt: Prompt, number: int) -> str:
    """Return the id of the record of a prompt's text with a number."""
    return f"{prompt.id}/{number}"


@contextlib.contextmanager
def held(folder: Path, question: Question) -> Iterator[None]:
    """Keep a folder for one question and one process.

    Raises:
        QuestionError: the folder cannot be written, is in use, or holds another question's answers.
    """
    try:
        folder.mkdir(parents=True, exist_ok=True, mode=0o700)
        lock = os.open(folder / ".lock", os.O_RDWR | os.O_CREAT, 0o600)
    except OSError as error:
        raise QuestionError(f"the folder {folder} cannot be written: {error.strerror}") from None
    try:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise QuestionError(f"another process is writing to {folder}") from None
        _check(folder / "question.json", asdict(question))
        yield
    finally:
        os.close(lock)


def answers(folder: Path) -> dict[str, dict[str, Record]]:
    """Return the records of each side by id; the files may not be there yet.

    Raises:
        RecordError: a file is broken before its last line.
    """
    paths = {role: folder / f"{role}.jsonl" for role in ROLES}
    return {role: {record.id: record for record in read(path)} if path.exists() else {} for role, path in paths.items()}


def _check(path: Path, asked: dict[str, Any]) -> None:
    """Write the question, or compare it with the one that is there."""
    if not path.exists():
        if any((path.parent / f"{role}.jsonl").exists() for role in ROLES):
            raise QuestionError(f"{path.parent} has records but no {path.name}; choose another --out")
        write_json(path, asked)
        return
    try:
        kept = json.loads(path.read_text())
        differing = [key for key in {**kept, **asked} if kept.get(key) != asked.get(key)]
    except (OSError, ValueError, TypeError) as error:
        raise QuestionError(f"{path} cannot be read ({error}); choose another --out") from None
    if differing:
        said = "; ".join(f"{key} was {kept.get(key)!r} and is {asked.get(key)!r}" for key in sorted(differing))
        raise QuestionError(f"{path.parent} holds the answers to another question ({said}); choose another --out")
