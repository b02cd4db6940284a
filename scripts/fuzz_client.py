"""Sends a fuzz's requests, many at a time, and says what is wrong with an answer."""

import json
import re
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass, field
from queue import SimpleQueue
from typing import Any

import httpx

from scripts.fuzz_model import VOCAB
from scripts.fuzz_requests import Request

#: Seconds without a byte after which a server hangs.
PATIENCE = 120.0
#: Seconds after which a client that leaves before an answer leaves.
HURRY = 0.02
#: A server closes what is idle for five seconds, maybe just when the next request goes out.
LIMITS = httpx.Limits(max_connections=1, keepalive_expiry=2)
#: How a refusal by a key of ours begins, or by the seed.
OF_OURS = re.compile(r"'?(gumbel_.*?|seed) (must|is not a known|contradicts)", re.DOTALL)


@dataclass
class Answer:
    """What came of a request.

    Attributes:
        status: of HTTP, or the code of an error within a stream; 0 if there was none.
        message: of an error.
        texts: of each choice its tokens, by index.
        endings: of each choice what ended it, by index; those without are not complete.
        left: whether the client went before the end.
        counted: the server's own count of tokens, if it said.
    """

    status: int = 0
    message: str = ""
    texts: dict[int, list[int]] = field(default_factory=dict)
    endings: dict[int, str] = field(default_factory=dict)
    left: bool = False
    counted: int | None = None

    @property
    def tokens(self) -> int:
        """How many tokens came."""
        return sum(map(len, self.texts.values()))

    @property
    def key(self) -> str | None:
        """What refused it, if that was a key of ours or the seed."""
        found = OF_OURS.match(self.message) if self.status == 400 else None
        return found and found[1]

    def add(self, content: Any) -> None:
        """Take in an answer, or an event of a stream."""
        if "error" in content or "detail" in content:
            error = content.get("error") or {"code": self.status, "message": content["detail"]}
            self.status, self.message = int(error["code"]), str(error["message"])
            return
        for choice in content.get("choices", ()):
            self.texts.setdefault(choice["index"], []).extend(choice.get("token_ids") or ())
            if choice.get("finish_reason"):
                self.endings[choice["index"]] = f"{choice['finish_reason']} {choice.get('stop_reason')}"
        if content.get("usage"):
            self.counted = content["usage"].get("completion_tokens")


def send(client: httpx.Client, request: Request, leaves: bool = True) -> Answer:
    """Return what comes of a request; with `leaves` the client goes where the request says so."""
    answer = Answer()
    patience = PATIENCE
    after = request.leaves_after if leaves else None
    if after == 0:
        patience = HURRY
    options: dict[str, Any] = {"headers": {"Content-Type": "application/json"}, "timeout": httpx.Timeout(patience)}
    try:
        with client.stream("POST", request.path, content=request.content.encode(), **options) as response:
            answer.status = response.status_code
            if response.headers.get("content-type", "").startswith("text/event-stream"):
                for event in _events(response):
                    answer.add(event)
                    if after and answer.tokens >= after and not answer.endings:
                        answer.left = True
                        break
            else:
                text = response.read()
                content = json.loads(text) if text else {}
                answer.add(content)
    except httpx.TimeoutException:
        if after == 0:
            answer.left = True
        else:
            answer.status, answer.message = 0, f"no answer within {PATIENCE:g} s"
    except httpx.HTTPError as error:
        answer.status, answer.message = 0, f"{type(error).__name__}: {error}"
    except (ValueError, LookupError, TypeError, AttributeError) as error:
        answer.status, answer.message = 0, f"no answer of the API: {error!r}"
    return answer


def _events(response: httpx.Response) -> Iterator[Any]:
    """Yield what the events of a stream hold; its lines end with a newline alone."""
    rest = b""
    for piece in response.iter_bytes():
        *whole, rest = (rest + piece).split(b"\n\n")
        for event in whole:
            if event.startswith(b"data: ") and event != b"data: [DONE]":
                yield json.loads(event[6:])
    if rest.strip():
        raise ValueError(f"the stream ends within an event: {rest[:100]!r}")


def send_all(
    url: str, requests: Iterable[Request], concurrency: int, on_answer: Callable[[Request, Answer], None]
) -> dict[int, Answer]:
    """Send requests, so many at a time, and return the answers by number."""
    answers = {}
    with ExitStack() as stack, ThreadPoolExecutor(concurrency) as pool:
        # Of threads that share a client one may close the connection that another has just been given.
        free: SimpleQueue[httpx.Client] = SimpleQueue()
        for _ in range(concurrency):
            free.put(stack.enter_context(httpx.Client(base_url=url, limits=LIMITS)))

        def one(request: Request) -> tuple[Request, Answer]:
            client = free.get()
            try:
                return request, send(client, request)
            finally:
                free.put(client)

        for request, answer in pool.map(one, requests):
            answers[request.number] = answer
            on_answer(request, answer)
    return answers


def wrong_with(request: Request, answer: Answer) -> str | None:
    """Return what is wrong with an answer, None if nothing is."""
    if answer.left:
        return None
    if answer.status == 0 or answer.status >= 500:
        return f"{answer.status or 'no status'}: {answer.message}"
    if answer.status >= 400:
        if not answer.message:
            return f"{answer.status} without a word"
        if request.kind == "served":
            return f"refused, {answer.status}: {answer.message}"
        if request.says not in answer.message:
            return f"refused without {request.says!r}: {answer.message}"
        return None
    if request.kind in ("refused", "broken"):
        return f"answered, though it is {request.kind}"
    if any(not 0 <= token < VOCAB for tokens in answer.texts.values() for token in tokens):
        return "an id that does not exist"
    if answer.texts.keys() != answer.endings.keys():
        return f"choices {sorted(answer.texts)} came, and {sorted(answer.endings)} ended"
    if request.kind == "served":
        if len(answer.texts) > request.choices or (len(answer.texts) < request.choices and not request.beams):
            return f"{len(answer.texts)} choices where {request.choices} were asked for"
        if any(len(tokens) > request.longest for tokens in answer.texts.values()):
            return f"more than {request.longest} tokens"
    return None


def differing(request: Request, together: Answer, alone: Answer) -> str | None:
    """Return how the answer among others differs from the one alone, None if it does not."""
    if together.left:
        for index, tokens in together.texts.items():
            if alone.texts.get(index, [])[: len(tokens)] != tokens:
                return f"choice {index}: {tokens} among others, {alone.texts.get(index)} alone"
        return None
    if (together.texts, together.endings) != (alone.texts, alone.endings):
        return f"{together.texts} {together.endings} among others, {alone.texts} {alone.endings} alone"
    return None
