"""A small real HTTP server that speaks OpenAI's completions API, badly where it is told to.

Its texts are made of words that are drawn by a hash of seed, salt, position and the word before, so that two of these
servers draw with the same noise, and part for good where one of them draws another word.
"""

import contextlib
import hashlib
import http.server
import json
import threading
import time
from collections.abc import Callable, Iterator

WORDS = 50

BUILD = """# HELP vllm_gumbel_build_info 1.
# TYPE vllm_gumbel_build_info gauge
vllm_gumbel_build_info{model_name="m",engine="0",arm="gumbel",version="1",noise_version="%s",backend="b",runner="V1"} 1
# TYPE vllm_gumbel_breaker_open gauge
vllm_gumbel_breaker_open{model_name="m",engine="0",arm="gumbel"} %d
"""


def drawn(*key: object) -> int:
    """Return a number of 32 bits that belongs to a key."""
    return int.from_bytes(hashlib.sha256(repr(key).encode()).digest()[:4])


class OpenAIServer:
    """The server's state.

    Args:
        noise_version: that its metrics show; None for a server without them, which is no vLLM.
        wrong: one of so many words is another one; 0 for none.

    Attributes:
        bodies: of the requests, in order.
        keys: their headers `Authorization`.
        mood: what it does: body, how often this body has come before -> a name of `Handler.MOODS`, or `ok`.
        breaker: whether its metrics show an open one.
        models: names that it serves.
        most: requests at a time so far.
    """

    def __init__(self, noise_version: str | None = "1", wrong: int = 0) -> None:
        self.noise_version, self.wrong = noise_version, wrong
        self.bodies: list[dict] = []
        self.keys: list[str | None] = []
        self.mood: Callable[[dict, int], str] = lambda body, before: "ok"
        self.breaker = False
        self.models = ["m"]
        self.seconds = 0.0
        self.now = self.most = 0
        self.lock = threading.Lock()
        self.url = ""

    def tokens(self, body: dict) -> list[int]:
        """Return the words of a request's text; drawn 7 in a row of them ends it."""
        salt = body.get("vllm_xargs", {}).get("gumbel_salt", json.dumps(body.get("prompt") or body.get("messages")))
        found: list[int] = []
        while len(found) < body["max_tokens"]:
            before = found[-1] if found else None
            token = drawn(body.get("seed"), salt, len(found), before) % WORDS
            if self.wrong and drawn("wrong", body.get("seed"), salt, len(found), before) % self.wrong == 0:
                token = (token + 1) % WORDS
            found.append(token)
            if token == 7 and len(found) > 3:
                break
        return found


class Handler(http.server.BaseHTTPRequestHandler):
    """Answers one connection."""

    protocol_version = "HTTP/1.1"
    server: "_Listener"

    def log_message(self, *_: object) -> None:
        """Print nothing."""

    def do_GET(self) -> None:
        """Answer what the server is."""
        state = self.server.state
        if self.path == "/v1/models":
            owner = "somebody" if state.noise_version is None else "vllm"
            cards = [{"id": name, "owned_by": owner, "max_model_len": 4096} for name in state.models]
            self._send(200, {"object": "list", "data": cards})
        elif self.path == "/metrics" and state.noise_version is not None:
            self._send(200, (BUILD % (state.noise_version, state.breaker)).encode(), "text/plain")
        else:
            self._send(404, {"detail": "Not Found"})

    def do_POST(self) -> None:
        """Answer a request in the mood for it."""
        state = self.server.state
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        with state.lock:
            before = state.bodies.count(body)
            state.bodies.append(body)
            state.keys.append(self.headers.get("Authorization"))
            state.now += 1
            state.most = max(state.most, state.now)
        try:
            time.sleep(state.seconds)
            mood = state.mood(body, before)
            if mood.isdigit():
                advice = {"Retry-After": "0"} if mood in ("429", "503") else {}
                self._send(int(mood), {"error": {"message": f"told to say {mood}"}}, **advice)
            elif mood == "hang up":
                self.close_connection = True
            elif mood == "whole":
                self._send(200, {"choices": [self._choice(body, state.tokens(body), 0, True)]})
            elif mood == "not json":
                self._send(200, b"<html>Welcome</html>", "text/html")
            elif mood == "other form":
                self._send(200, {"text": "hello"})
            else:
                self._stream(body, state.tokens(body), mood)
        finally:
            with state.lock:
                state.now -= 1

    def _choice(self, body: dict, tokens: list[int], first: int, last: bool) -> dict:
        text = "".join(f" w{token}" for token in tokens)
        logprobs = [-1 - token / WORDS for token in tokens]
        ending = ("stop" if tokens[-1] == 7 else "length") if last else None
        choice: dict = {"index": 0, "finish_reason": ending}
        if body.get("return_token_ids"):
            choice["token_ids"] = tokens
            if first == 0:
                choice["prompt_token_ids"] = [1, 2, 3]
        if "messages" in body:
            choice["delta" if body.get("stream") else "message"] = {"content": text}
            if body.get("logprobs"):
                choice["logprobs"] = {"content": [{"logprob": each} for each in logprobs]}
        else:
            choice["text"] = text
            if body.get("logprobs") is not None:
                choice["logprobs"] = {"token_logprobs": logprobs}
        return choice

    def _stream(self, body: dict, tokens: list[int], mood: str) -> None:
        self.send_response(200)
        self.send_header("Content-Type", "text/event-stream; charset=utf-8")
        self.send_header("Transfer-Encoding", "chunked")
        self.end_headers()
        for first in range(0, len(tokens), 2):
            last = first + 2 >= len(tokens)
            data = json.dumps({"choices": [self._choice(body, tokens[first : first + 2], first, last)]})
            if first == 2 and mood == "cut off":
                self.wfile.write(b"ff\r\ndata: {")
                self.close_connection = True
                return
            if first == 2 and mood == "ends early":
                break
            if first == 2 and mood == "broken json":
                data = data[:-3]
            if first == 2 and mood == "error within":
                data = json.dumps({"error": {"message": "out of memory", "code": 500}})
            # U+2028 separates lines for Python, not for a stream of events.
            event = f"data: {data}\n\n".replace("w9", "w9\u2028").encode()
            self._chunk(event[: len(event) // 2])
            self._chunk(event[len(event) // 2 :])
        self._chunk(b"data: [DONE]\n\n")
        self._chunk(b"")

    def _chunk(self, content: bytes) -> None:
        self.wfile.write(f"{len(content):x}\r\n".encode() + content + b"\r\n")

    def _send(self, status: int, content: object, kind: str = "application/json", **headers: str) -> None:
        data = content if isinstance(content, bytes) else json.dumps(content).encode()
        self.send_response(status)
        self.send_header("Content-Type", kind)
        self.send_header("Content-Length", str(len(data)))
        for name, value in headers.items():
            self.send_header(name, value)
        self.end_headers()
        self.wfile.write(data)


class _Listener(http.server.ThreadingHTTPServer):
    daemon_threads = True
    request_queue_size = 64

    def __init__(self, state: OpenAIServer, port: int) -> None:
        self.state = state
        super().__init__(("127.0.0.1", port), Handler)

    def handle_error(self, *_: object) -> None:
        """Say nothing of clients that went away."""


@contextlib.contextmanager
def listening(state: OpenAIServer, port: int = 0) -> Iterator[OpenAIServer]:
    """Serve until the context ends; the same state may be served again later."""
    listener = _Listener(state, port)
    state.url = f"http://127.0.0.1:{listener.server_address[1]}"
    thread = threading.Thread(target=listener.serve_forever, args=(0.01,), daemon=True)
    thread.start()
    try:
        yield state
    finally:
        listener.shutdown()
        listener.server_close()
        thread.join()
