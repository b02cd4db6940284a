"""Asks a server with OpenAI's API for one text, again where that may help, and says in words why it did not.

Answers are streamed, for the time to the first token. Nothing of a server is believed: an answer that is cut off, is no
JSON or has other types than the API's is an error of that answer.
"""

import asyncio
import datetime
import email.utils
import json
import math
import random
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, TypeVar

import httpx

from vllm_gumbel.evaluate.prompts import Prompt
from vllm_gumbel.evaluate.records import Record
from vllm_gumbel.text import shorten

#: Seconds before the second attempt; they double with each, up to the longest.
FIRST_WAIT, LONGEST_WAIT = 0.5, 30.0
#: Seconds of a `Retry-After` that are waited at most.
LONGEST_ADVICE = 300.0
#: Statuses after which the same request may succeed.
PASSING = frozenset({408, 409, 425, 429, *range(500, 600)})
#: Statuses that no other prompt would change.
HOPELESS = frozenset({401, 403})
#: Bytes of an answer that are read at most, and of a line of one.
LARGEST_ANSWER = 256 * 2**20
#: Characters of a server's words that are kept.
WORDS = 500

T = TypeVar("T")


class ClientError(Exception):
    """A text could not be had; the message says what was asked of whom and what came."""


class RefusedError(ClientError):
    """The server refuses this request; asking again would not help.

    Attributes:
        status: of HTTP.
    """

    def __init__(self, message: str, status: int) -> None:
        super().__init__(message)
        self.status = status


class HopelessError(ClientError):
    """The server would refuse every request."""


class UnavailableError(ClientError):
    """The server is away, overloaded or broken; asking again may help.

    Attributes:
        seconds: that the server asks to wait; None if it does not say.
    """

    def __init__(self, message: str, seconds: float | None = None) -> None:
        super().__init__(message)
        self.seconds = seconds


@dataclass(frozen=True)
class Features:
    """What is asked for beyond the text: only what the server takes.

    Attributes:
        token_ids: vLLM's own `return_token_ids`.
        logprobs: of the tokens that come.
    """

    token_ids: bool = False
    logprobs: bool = True


@dataclass(frozen=True)
class Endpoint:
    """Where texts come from.

    Attributes:
        url: of the server, without `/v1`.
        name: of the model.
        features: that the server has.
        key: of the API; None for none.
    """

    url: str
    name: str
    features: Features = Features()
    key: str | None = field(default=None, repr=False)

    def client(self, timeout: float, connections: int) -> httpx.AsyncClient:
        """Return a client of HTTP for this server; `timeout` is seconds without a byte."""
        headers = {"Content-Type": "application/json"}
        if self.key:
            headers["Authorization"] = f"Bearer {self.key}"
        limits = httpx.Limits(max_connections=connections, max_keepalive_connections=connections)
        patience = httpx.Timeout(timeout, connect=min(timeout, 10.0))
        return httpx.AsyncClient(base_url=self.url, timeout=patience, limits=limits, headers=headers)


@dataclass
class Patience:
    """How often and how patiently a request is repeated.

    Attributes:
        tries: attempts in all.
        first_wait: seconds before the second one; doubled with each, and multiplied by a random number from 1/2 to 1,
            so that many clients do not come back at once.
        luck: where that number comes from.
    """

    tries: int = 8
    first_wait: float = FIRST_WAIT
    luck: random.Random = field(default_factory=random.Random)

    async def repeated(self, act: Callable[[], Awaitable[T]]) -> T:
        """Return what `act` returns; `UnavailableError` is raised only by the last attempt."""
        for attempt in range(self.tries):
            try:
                return await act()
            except UnavailableError as error:
                if attempt + 1 == self.tries:
                    raise
                wait = min(self.first_wait * 2**attempt, LONGEST_WAIT) * self.luck.uniform(0.5, 1.0)
                await asyncio.sleep(max(wait, min(error.seconds or 0.0, LONGEST_ADVICE)))
        raise ValueError("there must be an attempt")


@dataclass
class Answer:
    """What has come of an answer so far."""

    text: list[str] = field(default_factory=list)
    ids: list[int] = field(default_factory=list)
    prompt_ids: list[int] | None = None
    logprobs: list[float] = field(default_factory=list)
    finish_reason: str | None = None
    first_token_seconds: float | None = None

    def add(self, chunk: Any, seconds: float) -> None:
        """Add a piece of a stream, or a whole answer.

        Raises:
            UnavailableError: it is an error, or not of the API's form.
        """
        if isinstance(chunk, dict) and "error" in chunk:
            raise UnavailableError(f"the server breaks off: {_words(chunk)}")
        try:
            self.prompt_ids = chunk.get("prompt_token_ids") or self.prompt_ids
            for choice in chunk["choices"][:1]:
                self._add_choice(choice, seconds)
        except (KeyError, TypeError, AttributeError, ValueError):
            raise UnavailableError(f"the answer has not the form of OpenAI's API: {shorten(chunk)}") from None

    def _add_choice(self, choice: dict[str, Any], seconds: float) -> None:
        said = choice.get("delta") or choice.get("message") or choice
        parts = (said.get("reasoning_content") or said.get("reasoning"), said.get("content") or said.get("text"))
        text = "".join(part for part in parts if part)
        ids = choice.get("token_ids") or []
        if (text or ids) and self.first_token_seconds is None:
            self.first_token_seconds = seconds
        self.text.append(text)
        self.ids += [int(each) for each in ids]
        self.prompt_ids = choice.get("prompt_token_ids") or self.prompt_ids
        logprobs = choice.get("logprobs") or {}
        found = logprobs.get("token_logprobs") or [each["logprob"] for each in logprobs.get("content") or []]
        self.logprobs += [math.nan if each is None else float(each) for each in found]
        self.finish_reason = choice.get("finish_reason") or self.finish_reason


def body_of(endpoint: Endpoint, prompt: Prompt, params: Mapping[str, Any], chat: bool) -> tuple[str, dict[str, Any]]:
    """Return the path and the body of a request.

    Args:
        endpoint: who is asked.
        prompt: what.
        params: sampling parameters; the `gumbel_` keys among them go where vLLM takes keys of plugins.
        chat: whether a text is sent as a chat of one message.
    """
    features = endpoint.features
    body: dict[str, Any] = {"model": endpoint.name, "stream": True}
    body |= {key: value for key, value in params.items() if not key.startswith("gumbel_")}
    keys = {key: value for key, value in params.items() if key.startswith("gumbel_")}
    if keys:
        body["vllm_xargs"] = keys
    if features.token_ids:
        body["return_token_ids"] = True
    if prompt.messages is None and not chat:
        # vLLM takes 0 for the drawn token alone, which costs less; other servers may take that for none.
        return "/v1/completions", body | {"prompt": prompt.prompt} | (
            {"logprobs": 0 if features.token_ids else 1} if features.logprobs else {}
        )
    messages = prompt.messages or [{"role": "user", "content": prompt.prompt}]
    return "/v1/chat/completions", body | {"messages": messages} | ({"logprobs": True} if features.logprobs else {})


async def ask(
    http: httpx.AsyncClient,
    endpoint: Endpoint,
    prompt: Prompt,
    params: Mapping[str, Any],
    name: str,
    chat: bool,
) -> Record:
    """Return one text, in one attempt.

    Args:
        http: client for the endpoint.
        endpoint: who is asked.
        prompt: what.
        params: sampling parameters.
        name: id of the record.
        chat: whether a text is sent as a chat.

    Raises:
        RefusedError, HopelessError, UnavailableError: there is none.
    """
    path, body = body_of(endpoint, prompt, params, chat)
    answer = Answer()
    began = time.perf_counter()
    try:
        async with http.stream("POST", path, content=json.dumps(body)) as response:
            if response.status_code != 200:
                await _refuse(response, path)
            streamed = "text/event-stream" in response.headers.get("content-type", "")
            async for piece in _events(response) if streamed else _whole(response):
                answer.add(_parsed(piece), time.perf_counter() - began)
    except httpx.TransportError as error:
        raise UnavailableError(f"{path}: {_why(error)}") from None
    except httpx.HTTPError as error:
        raise UnavailableError(f"{path}: {error}") from None
    seconds = time.perf_counter() - began
    if answer.finish_reason is None:
        raise UnavailableError(f"{path}: the answer was cut off")
    known = len(answer.logprobs) > 0 and all(map(math.isfinite, answer.logprobs))
    return Record(
        id=name,
        task=prompt.task,
        prompt=prompt.prompt,
        messages=prompt.messages,
        prompt_token_ids=answer.prompt_ids,
        output=_sound("".join(answer.text)),
        output_token_ids=answer.ids if endpoint.features.token_ids else None,
        logprobs=answer.logprobs if known else None,
        params=dict(params),
        model=endpoint.name,
        finish_reason=answer.finish_reason,
        seconds=seconds,
        first_token_seconds=answer.first_token_seconds if streamed else None,
    )


async def fetch(http: httpx.AsyncClient, path: str) -> Any:
    """Return the JSON at a path, in one attempt; raises as `ask` does."""
    try:
        response = await http.get(path)
        if response.status_code != 200:
            await _refuse(response, path)
        return _parsed(response.content)
    except httpx.HTTPError as error:
        raise UnavailableError(f"{path}: {_why(error)}") from None


async def _events(response: httpx.Response) -> AsyncIterator[bytes]:
    """Yield the data of server-sent events. Only line feeds end a line here: JSON may hold what Python splits at."""
    rest, size = b"", 0
    async for piece in response.aiter_bytes():
        size += len(piece)
        if size > LARGEST_ANSWER:
            raise UnavailableError(f"the answer is larger than {LARGEST_ANSWER >> 20} MiB")
        *lines, rest = (rest + piece).split(b"\n")
        for line in lines:
            data = line.strip().removeprefix(b"data:").strip()
            if line.startswith(b"data:") and data != b"[DONE]":
                yield data


async def _whole(response: httpx.Response) -> AsyncIterator[bytes]:
    """Yield the body of an answer that is not streamed."""
    yield await response.aread()


def _parsed(content: bytes) -> Any:
    try:
        return json.loads(content)
    except (ValueError, RecursionError):
        shown = shorten(content.decode(errors="replace"))
        raise UnavailableError(f"the answer is no JSON: {shown}") from None


async def _refuse(response: httpx.Response, path: str) -> None:
    """Raise what a status other than 200 means."""
    await response.aread()
    try:
        words = _words(json.loads(response.content))
    except (ValueError, RecursionError):
        words = response.text.strip()[:WORDS]
    status = response.status_code
    message = f"{path}: {status} {response.reason_phrase}{f': {words}' if words else ''}"
    if status in PASSING:
        raise UnavailableError(message, _retry_after(response.headers.get("retry-after", "")))
    if status in HOPELESS:
        raise HopelessError(f"{message} (the key is taken from the variable OPENAI_API_KEY)")
    raise RefusedError(message, status)


def _words(content: Any) -> str:
    """Return what an error says, in whatever form the server puts it."""
    while isinstance(content, dict):
        content = next((content[key] for key in ("error", "message", "detail") if content.get(key)), "")
    return (content if isinstance(content, str) else json.dumps(content))[:WORDS]


def _retry_after(text: str) -> float | None:
    """Return the seconds of a `Retry-After`: a number, or a date."""
    try:
        return max(float(text), 0.0) if math.isfinite(float(text)) else None
    except ValueError:
        pass
    try:
        when = email.utils.parsedate_to_datetime(text)
        return max((when - datetime.datetime.now(when.tzinfo)).total_seconds(), 0.0)
    except (ValueError, TypeError):
        return None


def _why(error: httpx.HTTPError) -> str:
    """Return in words why no answer came."""
    if isinstance(error, httpx.ConnectTimeout | httpx.PoolTimeout):
        return "no connection in time"
    if isinstance(error, httpx.TimeoutException):
        return "no byte within the time that is waited (--timeout)"
    if isinstance(error, httpx.ConnectError):
        return "no connection: " + (str(error) or "nothing listens there")
    return f"the connection broke ({str(error) or type(error).__name__})"


def _sound(text: str) -> str:
    """Return text with halves of pairs of surrogates joined, or replaced where the other half is missing."""
    return text.encode("utf-16-le", "surrogatepass").decode("utf-16-le", "replace")
