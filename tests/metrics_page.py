"""A real `/metrics` on loopback with chosen numbers under the names of the catalogue, written by prometheus_client."""

import contextlib
import http.server
import threading
from collections.abc import Iterator

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, Summary, generate_latest

from vllm_gumbel.metrics import catalogue
from vllm_gumbel.metrics.catalogue import AnomalyKind, Metric
from vllm_gumbel.metrics.exactness import Evidence

BUILD = {"version": "0.1.0", "noise_version": "1", "backend": "numba", "runner": "v1", "vllm_version": "0.32.0"}
_KINDS = {"counter": Counter, "gauge": Gauge, "histogram": Histogram, "summary": Summary}


class Page:
    """The metrics of a server's workers, at 0 until something is added."""

    def __init__(self) -> None:
        self.registry = CollectorRegistry()
        self._parents = {metric.name: self._parent(metric) for metric in catalogue.CATALOGUE}
        self.child(catalogue.BUILD_INFO, **BUILD).set(1)

    def _parent(self, metric: Metric):
        options = {"buckets": metric.buckets} if metric.kind == "histogram" else {}
        name = catalogue.PREFIX + metric.name
        return _KINDS[metric.kind](name, metric.help, metric.label_names, registry=self.registry, **options)

    def child(self, metric: Metric, arm: str = "gumbel", engine: str = "0", **labels: str):
        """Return the metric of prometheus_client with these labels."""
        return self._parents[metric.name].labels(model_name="m", engine=engine, arm=arm, **labels)

    def add(self, evidence: Evidence, *, drawn: float = 0, arm: str = "gumbel", engine: str = "0") -> None:
        """Count as a worker does that has this evidence."""
        sums = {
            catalogue.WATCHED_TOKENS: evidence.watched,
            catalogue.TESTED_TOKENS: evidence.tested,
            catalogue.SURPRISAL: evidence.surprisal,
            catalogue.ENTROPY: evidence.entropy,
            catalogue.SURPRISAL_VARIANCE: evidence.variance,
            catalogue.EXPECTED_IMPROBABLE: evidence.improbable_expected,
            catalogue.SAMPLED_TOKENS: drawn,
        }
        if evidence.pit:
            sums |= {
                catalogue.SCORE_SQUARES: evidence.score_squares,
                catalogue.SCORE_STEP_SQUARES: evidence.score_step_squares,
                catalogue.SCORE_PAIRS: evidence.score_pairs,
            }
        for metric, amount in sums.items():
            self.child(metric, arm, engine).inc(amount)
        for bin, count in enumerate(evidence.pit):
            self.child(catalogue.SCORE_PIT, arm, engine, bin=str(bin)).inc(count)
        for kind, count in (
            (AnomalyKind.IMPROBABLE, evidence.improbable),
            (AnomalyKind.OUTSIDE_FILTER, evidence.outside_filter),
        ):
            self.child(catalogue.ANOMALOUS_TOKENS, arm, engine, kind=kind).inc(count)

    def text(self) -> bytes:
        """Return the page."""
        return generate_latest(self.registry)


class Served:
    """A server of one page, whose content may be replaced while it runs.

    Attributes:
        page: what is served; bytes are served as they are, an int is the status of an empty answer, of a list each
            request takes the next until one is left.
        asked: how many requests were answered.
        announced: value of Content-Length; None for that of the content.
    """

    def __init__(self, page: "Page | bytes | int | list") -> None:
        self.page, self.asked, self.announced = page, 0, None
        self._server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), self._handler())
        self.url = f"http://127.0.0.1:{self._server.server_port}"
        threading.Thread(target=self._server.serve_forever, args=(0.01,), daemon=True).start()

    def close(self) -> None:
        """Stop; the port refuses from now on."""
        self._server.shutdown()
        self._server.server_close()

    def _handler(self):
        served = self

        class Handler(http.server.BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                served.asked += 1
                content = served.content() if self.path == "/metrics" else 404
                status, body = (content, b"") if isinstance(content, int) else (200, content)
                self.send_response(status)
                self.send_header("Content-Length", str(len(body) if served.announced is None else served.announced))
                self.end_headers()
                self.wfile.write(body)

            def log_message(self, *_: object) -> None:
                """Say nothing."""

        return Handler

    def content(self) -> bytes | int:
        """Return the bytes of the page, or a status."""
        page = self.page
        if isinstance(page, list):
            page = page.pop(0) if len(page) > 1 else page[0]
        return page.text() if isinstance(page, Page) else page


@contextlib.contextmanager
def serving_page(page: Page | bytes | int | list) -> Iterator[Served]:
    """Serve a page on loopback."""
    served = Served(page)
    try:
        yield served
    finally:
        served.close()
