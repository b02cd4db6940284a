"""A small real server with the endpoint of a rollout, real counters and traffic that is known to the token."""

import contextlib
import http.server
import json
import threading
import time
from collections.abc import Iterator

from prometheus_client import Counter, Gauge, Histogram

from tests.metrics_page import Page
from vllm_gumbel.metrics import catalogue
from vllm_gumbel.metrics.catalogue import AnomalyKind
from vllm_gumbel.metrics.evidence import PIT_BINS
from vllm_gumbel.metrics.exactness import Evidence

KEY = "a-key-of-the-test"
#: What a tick adds, over both arms.
TICK_SECONDS, REQUESTS, TOKENS = 0.05, 100, 24_000


def exact(tested: float, z: float = 0.0) -> Evidence:
    """Return evidence of an exact sampler with 2 nats^2 of variance a token, or of one that is z sigma off."""
    return Evidence(
        watched=tested,
        tested=tested,
        surprisal=2 * tested + z * (2 * tested) ** 0.5,
        entropy=2 * tested,
        variance=2 * tested,
        pit=(tested / PIT_BINS,) * PIT_BINS,
        score_squares=tested,
        score_step_squares=tested,
        score_pairs=10 * tested,
    )


class RolloutPage(Page):
    """The page of a process that started now, vLLM's own metrics included."""

    def __init__(self) -> None:
        super().__init__()
        labels = ["model_name", "engine"]
        self.latencies = [
            Histogram(name, "vLLM's own.", labels, registry=self.registry).labels("m", "0")
            for name in ("vllm:time_to_first_token_seconds", "vllm:inter_token_latency_seconds")
        ]
        finished = Counter("vllm:request_success", "vLLM's own.", [*labels, "finished_reason"], registry=self.registry)
        self.finished = finished.labels("m", "0", "stop")
        self.http = Counter("http_requests", "HTTP.", ["handler", "status", "method"], registry=self.registry)
        Gauge("process_start_time_seconds", "Start.", registry=self.registry).set(time.time())

    def add_traffic(self, fraction: float, shadow: float, slow: float = 1.0) -> None:
        """Count a tick, shared by the arms exactly."""
        for arm, share in (("gumbel", fraction), ("default", 1 - fraction), ("shadow", (1 - fraction) * shadow)):
            if not share:
                continue
            evidence = exact(TOKENS * share / 8)
            if arm == "shadow":
                self.child(catalogue.SHADOW_TOKENS, arm, result="differ").inc(TOKENS * share)
            else:
                self.child(catalogue.REQUESTS, arm).inc(REQUESTS * share)
            bare = Evidence(**{**vars(evidence), "pit": ()}) if arm == "default" else evidence
            self.add(bare, drawn=0 if arm == "shadow" else TOKENS * share, arm=arm)
        for latency in self.latencies:
            for _ in range(REQUESTS):
                latency.observe(0.02 * slow)
        self.finished.inc(REQUESTS)
        self.http.labels("/v1/completions", "2xx", "POST").inc(REQUESTS)
        for _ in range(20):
            self.child(catalogue.SAMPLER_SECONDS).observe(0.001)

    def spoil(self, kind: AnomalyKind, count: float, arm: str = "gumbel") -> None:
        """Count anomalous tokens."""
        self.child(catalogue.ANOMALOUS_TOKENS, arm, kind=kind).inc(count)


class ControlledServer:
    """A server that shares its traffic by its fraction.

    Attributes:
        url: base address.
        fraction, shadow: its state.
        busy: whether there is traffic.
        spoilt: anomalies of the gumbel arm a tick, by kind, while its fraction is above 0.
        answers: statuses that are answered in place of changes, first one first.
        changes: fraction and shadow after each change.
    """

    def __init__(self) -> None:
        self.fraction, self.shadow, self.busy, self.slow = 0.0, 0.0, True, 1.0
        self.spoilt: dict[AnomalyKind, float] = {}
        self.answers: list[int] = []
        self.changes: list[tuple[float, float]] = []
        self.page, self._lock, self._ended = RolloutPage(), threading.Lock(), threading.Event()
        self._server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), self._handler())
        self.url = f"http://127.0.0.1:{self._server.server_port}"
        self._threads = [
            threading.Thread(target=self._server.serve_forever, args=(0.01,), daemon=True),
            threading.Thread(target=self._traffic, daemon=True),
        ]
        for thread in self._threads:
            thread.start()

    def restart(self) -> None:
        """Become another process: counters from 0, and the state of the settings."""
        with self._lock:
            self.page, self.fraction, self.shadow = RolloutPage(), 0.0, 0.0

    def status(self) -> dict:
        """Return the state as the endpoint shows it."""
        breaker = {"open": False, "reason": None}
        return {"fraction": self.fraction, "shadow": self.shadow, "breaker": breaker, "workers": 1}

    def metrics(self) -> bytes:
        """Return the page."""
        with self._lock:
            self.page.child(catalogue.ROLLOUT_FRACTION).set(self.fraction)
            self.page.child(catalogue.ROLLOUT_SHADOW, "shadow").set(self.shadow)
            self.page.child(catalogue.BREAKER_OPEN).set(0)
            return self.page.text()

    def answer(self, method: str, key: str | None, body: bytes) -> tuple[int, dict]:
        """Return status and content of an answer of the endpoint."""
        if key != f"Bearer {KEY}":
            return 401, {"error": "wrong key"}
        if method == "POST":
            if self.answers and (status := self.answers.pop(0)) != 200:
                return status, {"error": "not now"}
            wanted = json.loads(body)
            self.fraction, self.shadow = (wanted.get(name, getattr(self, name)) for name in ("fraction", "shadow"))
            self.changes.append((self.fraction, self.shadow))
        return 200, self.status()

    def close(self) -> None:
        """Stop; the port refuses from now on."""
        self._ended.set()
        self._server.shutdown()
        self._server.server_close()
        for thread in self._threads:
            thread.join()

    def _traffic(self) -> None:
        while not self._ended.wait(TICK_SECONDS):
            if self.busy:
                with self._lock:
                    self.page.add_traffic(self.fraction, self.shadow, self.slow if self.fraction else 1.0)
                    for kind, count in self.spoilt.items() if self.fraction else ():
                        self.page.spoil(kind, count)

    def _handler(self):
        served = self

        class Handler(http.server.BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                if self.path == "/metrics":
                    self.send(200, served.metrics())
                else:
                    self.control(b"")

            def do_POST(self) -> None:
                self.control(self.rfile.read(int(self.headers["Content-Length"])))

            def control(self, body: bytes) -> None:
                known = self.path == "/gumbel/rollout"
                key = self.headers["Authorization"]
                status, content = served.answer(self.command, key, body) if known else (404, {})
                self.send(status, json.dumps(content).encode())

            def send(self, status: int, body: bytes) -> None:
                self.send_response(status)
                self.send_header("Content-Length", str(len(body)))
                self.end_headers()
                self.wfile.write(body)

            def log_message(self, *_: object) -> None:
                """Say nothing."""

        return Handler


@contextlib.contextmanager
def controlled() -> Iterator[ControlledServer]:
    """Run such a server until the context ends."""
    server = ControlledServer()
    try:
        yield server
    finally:
        server.close()
