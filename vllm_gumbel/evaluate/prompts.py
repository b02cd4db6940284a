"""What two deployments are asked: built-in sets by task, or a file with one JSON object a line.

A line has `prompt`, a text, or `messages`, a chat in the API's form. It may have `id` (else the line's number), `task`
and `references`, texts that a good answer would resemble.
"""

import hashlib
import json
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from vllm_gumbel.evaluate.records import first_error

FOLDER = Path(__file__).parent / "prompts"

#: The built-in sets, twelve prompts each.
TASKS = ("chat", "facts", "summary", "code", "story")


class PromptError(Exception):
    """Prompts cannot be used; the message names file, line, field and rule."""


class Prompt(BaseModel):
    """One thing to ask.

    Attributes:
        id: its name, unique.
        task: what kind of prompt it is.
        prompt: the text; None for a chat.
        messages: the chat; None for a text.
        references: texts that a good answer would resemble.
    """

    model_config = ConfigDict(extra="forbid", strict=True, frozen=True)

    id: str = Field(min_length=1, max_length=200)
    task: str = "other"
    prompt: str | None = None
    messages: list[dict[str, Any]] | None = Field(None, min_length=1)
    references: list[str] = []

    @property
    def salt(self) -> int:
        """Number of 53 bits that belongs to the name, so that the noise of different prompts is independent.

        Every number of JSON readers is exact up to there.
        """
        return int.from_bytes(hashlib.sha256(self.id.encode()).digest()[:8]) >> 11

    def shown(self) -> str:
        """Return the prompt as one text."""
        if self.prompt is not None:
            return self.prompt
        return "\n".join(f"{each.get('role', '')}: {each.get('content', '')}" for each in self.messages or [])


def built_in(tasks: Sequence[str] = TASKS) -> list[Prompt]:
    """Return the built-in prompts of some tasks."""
    return [prompt for task in tasks for prompt in read(FOLDER / f"{task}.jsonl")]


def read(path: Path) -> list[Prompt]:
    """Return the prompts of a file.

    Raises:
        PromptError: it cannot be read or has none; a line is no prompt; two have one id.
    """
    try:
        content = path.read_bytes().decode()
    except OSError as error:
        raise PromptError(f"{path} cannot be read: {error.strerror}") from None
    except UnicodeDecodeError as error:
        raise PromptError(f"{path} is no text in UTF-8: byte {error.start} is {content_at(error)}") from None
    prompts: dict[str, Prompt] = {}
    for number, line in enumerate(content.split("\n"), 1):
        if not line.strip():
            continue
        where = f"{path}, line {number}"
        prompt = _parsed(line, number, where)
        if prompt.id in prompts:
            raise PromptError(f"{where}: id {prompt.id!r} is that of an earlier line too")
        prompts[prompt.id] = prompt
    if not prompts:
        raise PromptError(f"{path} has no prompt")
    return list(prompts.values())


def content_at(error: UnicodeDecodeError) -> str:
    """Return the byte that is no text, as it is written in hexadecimal."""
    return f"0x{error.object[error.start]:02x}"


def digest(prompts: Iterable[Prompt]) -> str:
    """Return what tells these prompts from others: a SHA-256 in hexadecimal."""
    lines = (json.dumps(prompt.model_dump(), sort_keys=True) for prompt in prompts)
    return hashlib.sha256("\n".join(lines).encode()).hexdigest()


def _parsed(line: str, number: int, where: str) -> Prompt:
    try:
        content = json.loads(line)
        json.dumps(content, ensure_ascii=False).encode()
    except json.JSONDecodeError as error:
        raise PromptError(f"{where}: no JSON ({error.msg} at column {error.colno})") from None
    except UnicodeEncodeError:
        raise PromptError(f"{where}: half of a pair of surrogates, which is no text") from None
    except (ValueError, RecursionError) as error:
        raise PromptError(f"{where}: {'nested too deeply' if isinstance(error, RecursionError) else error}") from None
    if not isinstance(content, dict):
        raise PromptError(f"{where}: must be an object with `prompt` or `messages`")
    content.setdefault("id", str(number))
    try:
        prompt = Prompt.model_validate(content)
    except ValidationError as error:
        raise PromptError(f"{where}: {': '.join(first_error(error))}") from None
    if (prompt.prompt is None) == (prompt.messages is None):
        raise PromptError(f"{where}: must have `prompt` or `messages`, and not both")
    return prompt
