"""Generated texts on disk: one JSON object a line, readable by their owner only.

A line is written and flushed as soon as its text has come, so that a run that is killed keeps what it has. What may be
left of the last line of such a run is dropped when the file is read; a line broken elsewhere is an error.
"""

import contextlib
import json
import math
import os
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Annotated, Any, Final, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError

#: Version of the format; a reader refuses others.
RECORD_VERSION: Final = 1

Ids = list[Annotated[int, Field(ge=0)]]


class RecordError(Exception):
    """A file of records cannot be used; the message names file, line, field and rule."""


class Record(BaseModel):
    """One generated text and what it was asked with.

    Attributes:
        record_version: of this format.
        id: its name, unique in a file.
        task: what kind of prompt it is; None if nobody said.
        prompt: the text sent; None where only ids are known, or for a chat.
        messages: the chat sent, in the API's form; None for a plain prompt.
        prompt_token_ids: what the model was fed, chat template and special tokens included; None if the server did not
            say.
        output: the text that came back; None if nothing did.
        output_token_ids: its tokens, with the one that ended it if the server shows it; None if the server did not say.
        logprobs: log-probability of each output token, in nats; None if not asked.
        params: sampling parameters by the names of vLLM's `SamplingParams`, the `gumbel_` keys among them; one that is
            not there had vLLM's default. `seed` is the seed of this very text: with n > 1 the request's plus the index.
        noise: whose noise drew it, `gumbel` or, by vLLM's runner V2 itself, `stock`; None if nobody said.
        noise_version: of the noise `gumbel`.
        server_salt: the server's own `salt`, which holds where `params` has no `gumbel_salt`.
        usable_vocab: how many ids the server's tokenizer knows; None for those of the verifier's.
        model: the name the server gives it.
        finish_reason: in the API's words; None if nothing came.
        error: why there is no text; None if there is.
        seconds: from sending to the last token.
        first_token_seconds: from sending to the first one; None if it was not streamed.
    """

    model_config = ConfigDict(extra="forbid", strict=True, allow_inf_nan=False)

    record_version: Literal[1] = RECORD_VERSION
    id: str
    task: str | None = None
    prompt: str | None = None
    messages: list[dict[str, Any]] | None = None
    prompt_token_ids: Ids | None = None
    output: str | None = None
    output_token_ids: Ids | None = None
    logprobs: list[float] | None = None
    params: dict[str, Any]
    noise: Literal["gumbel", "stock"] | None = None
    noise_version: int | None = None
    server_salt: int = 0
    usable_vocab: int | None = None
    model: str | None = None
    finish_reason: str | None = None
    error: str | None = None
    seconds: float | None = None
    first_token_seconds: float | None = None

    def redacted(self) -> "Record":
        """Return this record without texts and tokens: sizes, parameters and times stay."""
        nothing = dict.fromkeys(("prompt", "messages", "prompt_token_ids", "output", "output_token_ids", "logprobs"))
        return self.model_copy(update=nothing)


class Records:
    """A file of records, to append to.

    Args:
        path: of the file; made with mode 600 if it is not there.

    Raises:
        RecordError: it cannot be written.
    """

    def __init__(self, path: Path) -> None:
        try:
            descriptor = os.open(path, os.O_RDWR | os.O_CREAT, 0o600)
            os.fchmod(descriptor, 0o600)
            self._file = os.fdopen(descriptor, "r+b", buffering=0)
            self._file.truncate(_length_of_whole_lines(self._file.read()))
            self._file.seek(0, os.SEEK_END)
        except OSError as error:
            raise RecordError(f"{path} cannot be written: {error.strerror}") from error
        self._path = path

    def append(self, record: Record) -> None:
        """Write one record, or nothing of it.

        Raises:
            RecordError: there is no room, or the file has become unwritable.
        """
        left, begin = memoryview(_line(record).encode()), self._file.tell()
        try:
            while left:
                left = left[self._file.write(left) :]
        except OSError as error:
            self._file.seek(begin)
            self._file.truncate()
            raise RecordError(f"{self._path} cannot be written: {error.strerror}") from error

    def close(self) -> None:
        """Close the file."""
        self._file.close()

    def __enter__(self) -> "Records":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def read(path: Path) -> Iterator[Record]:
    """Yield the records of a file.

    Raises:
        RecordError: it cannot be read; a line before the last is no record; two records have one id.
    """
    try:
        lines = path.read_bytes().split(b"\n")
    except OSError as error:
        raise RecordError(f"{path} cannot be read: {error.strerror}") from error
    seen: dict[str, int] = {}
    for number, line in enumerate(lines, 1):
        if not line.strip():
            continue
        try:
            record = Record.model_validate(json.loads(line))
        except (ValueError, RecursionError) as error:
            if number == len(lines) and not isinstance(error, ValidationError):
                return  # what a killed run left of its last line
            raise RecordError(f"{path}, line {number}: {_why(error)}") from None
        if record.id in seen:
            raise RecordError(f"{path}, line {number}: id {record.id!r} is that of line {seen[record.id]} too")
        seen[record.id] = number
        yield record


def write_json(path: Path, content: Any) -> None:
    """Write a result as JSON, with mode 600 and all at once; numbers that JSON lacks become null.

    Raises:
        RecordError: the file cannot be written.
    """
    write_whole(path, json.dumps(_finite(content), indent=1, allow_nan=False) + "\n")


def rewrite(path: Path, records: Iterable[Record]) -> None:
    """Put other records in place of a file's, all at once.

    Raises:
        RecordError: the file cannot be written.
    """
    write_whole(path, "".join(map(_line, records)))


def write_whole(path: Path, text: str) -> None:
    """Write a file all at once, readable by its owner only.

    Raises:
        RecordError: it cannot be written; what was there before stays.
    """
    partial = path.with_name(f".{path.name}.partial")
    try:
        partial.unlink(missing_ok=True)
        with os.fdopen(os.open(partial, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "w", encoding="utf-8") as file:
            file.write(text)
        partial.replace(path)
    except OSError as error:
        with contextlib.suppress(OSError):
            partial.unlink(missing_ok=True)
        raise RecordError(f"{path} cannot be written: {error.strerror}") from error


def first_error(error: ValidationError) -> tuple[str, str]:
    """Return the first field that is wrong, empty for the whole, and what is wrong with it."""
    first = error.errors(include_url=False, include_input=False)[0]
    return ".".join(map(str, first["loc"])), first["msg"]


def _line(record: Record) -> str:
    return json.dumps(record.model_dump(exclude_defaults=True), allow_nan=False) + "\n"


def _finite(content: Any) -> Any:
    """Return content with None for every NaN and infinity."""
    if isinstance(content, dict):
        return {key: _finite(value) for key, value in content.items()}
    if isinstance(content, Sequence) and not isinstance(content, str):
        return [_finite(value) for value in content]
    if isinstance(content, float) and not math.isfinite(content):
        return None
    return content


def _length_of_whole_lines(content: bytes) -> int:
    return content.rfind(b"\n") + 1


def _why(error: Exception) -> str:
    """Return what is wrong with a line."""
    if isinstance(error, ValidationError):
        field, rule = first_error(error)
        return f"{field or 'the record'}: {rule}"
    if isinstance(error, json.JSONDecodeError):
        return f"no JSON ({error.msg} at column {error.colno})"
    return "nested too deeply" if isinstance(error, RecursionError) else f"no text in UTF-8 ({error})"
