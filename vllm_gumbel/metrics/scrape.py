"""Reads the metrics of `catalogue.py` from a server's `/metrics`."""

import http.client
import math
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from dataclasses import dataclass, field
from urllib.parse import urlsplit, urlunsplit

from prometheus_client.parser import text_string_to_metric_families

from vllm_gumbel.metrics import catalogue
from vllm_gumbel.metrics.catalogue import ARMS, CATALOGUE, PREFIX, AnomalyKind, Metric
from vllm_gumbel.metrics.evidence import PIT_BINS
from vllm_gumbel.metrics.exactness import Evidence

#: Bytes of a page that are read at most; a server's own page has some hundred thousand.
LARGEST_PAGE = 64 * 2**20
#: How often a page is read that was perhaps written to meanwhile, and how many seconds lie between.
TRIES, PAUSE_SECONDS = 4, 0.05

#: Names of the samples that only ever grow while a server lives.
_GROWING = {
    metric.exposed_name + suffix
    for metric in CATALOGUE
    for suffix in {"counter": ("",), "summary": ("_count", "_sum"), "histogram": ("_count", "_sum", "_bucket")}.get(
        metric.kind, ()
    )
}
_START = "process_start_time_seconds"

Labels = dict[str, str]


class ScrapeError(Exception):
    """A page cannot be had or is not what it should be; the message names address and reason."""


@dataclass(frozen=True)
class Scrape:
    """What a page said at one time.

    Attributes:
        address: of the page.
        seconds: when it was read, on a clock that never goes back.
        samples: labels and value of every sample, by name.
    """

    address: str
    seconds: float
    samples: dict[str, list[tuple[Labels, float]]] = field(repr=False)

    def series(self, metric: Metric, suffix: str = "", **labels: str) -> list[tuple[Labels, float]]:
        """Return labels and value of a metric's samples that have these labels; `suffix` is that of a histogram."""
        return self.named(metric.exposed_name + suffix, **labels)

    def named(self, name: str, **labels: str) -> list[tuple[Labels, float]]:
        """Return labels and value of the samples of any name, vLLM's too."""
        return [each for each in self.samples.get(name, ()) if labels.items() <= each[0].items()]

    def total(self, metric: Metric, suffix: str = "", **labels: str) -> float:
        """Return the sum of a metric's samples over engines, models and whatever labels are not given; 0 for none."""
        return math.fsum(value for _, value in self.series(metric, suffix, **labels))

    def arms(self) -> list[str]:
        """Return the arms on the page, the known ones first."""
        seen = {labels["arm"] for name in self.samples for labels, _ in self.named(name) if "arm" in labels}
        return [arm for arm in ARMS if arm in seen] + sorted(seen - set(ARMS))

    def evidence(self, arm: str) -> Evidence:
        """Return the sums of an arm over its engines."""
        bins = range(PIT_BINS) if self.series(catalogue.SCORE_PIT, arm=arm) else ()
        kinds = (AnomalyKind.IMPROBABLE, AnomalyKind.OUTSIDE_FILTER)
        improbable, outside = (self.total(catalogue.ANOMALOUS_TOKENS, arm=arm, kind=kind) for kind in kinds)
        return Evidence(
            watched=self.total(catalogue.WATCHED_TOKENS, arm=arm),
            tested=self.total(catalogue.TESTED_TOKENS, arm=arm),
            surprisal=self.total(catalogue.SURPRISAL, arm=arm),
            entropy=self.total(catalogue.ENTROPY, arm=arm),
            variance=self.total(catalogue.SURPRISAL_VARIANCE, arm=arm),
            pit=tuple(self.total(catalogue.SCORE_PIT, arm=arm, bin=str(bin)) for bin in bins),
            score_squares=self.total(catalogue.SCORE_SQUARES, arm=arm),
            score_step_squares=self.total(catalogue.SCORE_STEP_SQUARES, arm=arm),
            score_pairs=self.total(catalogue.SCORE_PAIRS, arm=arm),
            improbable=improbable,
            improbable_expected=self.total(catalogue.EXPECTED_IMPROBABLE, arm=arm),
            outside_filter=outside,
        )

    def restarted_since(self, earlier: "Scrape") -> bool:
        """Return whether counters began anew: one of them is smaller than it was or gone, or the process is younger."""
        if earlier.samples.get(_START) != self.samples.get(_START):
            return True
        now = dict(self._growing())
        # A sum over files may round another way when one more file is there.
        return any(now.get(key, -1.0) < value * (1 - 1e-9) for key, value in earlier._growing())

    def half_counted(self) -> float:
        """Return by how many tokens the sums of tested tokens disagree, the first that a step adds to with the last.

        0 shows that the page was not written to while it was read. Tested tokens without a score are no reason either.
        """
        evidence = (self.evidence(arm) for arm in self.arms())
        return sum(abs(each.tested - sum(each.pit)) for each in evidence if each.pit)

    def _growing(self) -> Iterator[tuple[tuple[str, frozenset[tuple[str, str]]], float]]:
        for name in _GROWING & self.samples.keys():
            for labels, value in self.samples[name]:
                yield (name, frozenset(labels.items())), value


def page_address(text: str) -> str:
    """Return the address of a metrics page.

    Args:
        text: address of the page, or of the server, then `/metrics` is added; http without a scheme.

    Raises:
        ScrapeError: it is no address of http or https.
    """
    given = text if "://" in text else f"http://{text}"
    try:
        parts = urlsplit(given)
        fine = parts.scheme in ("http", "https") and parts.hostname and parts.port != 0 and "@" not in parts.netloc
    except ValueError:
        fine = False
    if not fine or any(character.isspace() or not character.isprintable() for character in given):
        raise ScrapeError(f"{text!r} is no address like http://127.0.0.1:8000 of a server or its /metrics")
    return urlunsplit(parts._replace(path=parts.path if parts.path.strip("/") else "/metrics", fragment=""))


def fetch(url: str, timeout: float = 10.0) -> Scrape:
    """Return what a server's metrics page says now.

    A server counts while its page is read, and a step's surprisals without its entropies would look like evidence. So a
    page that may show half a step is read again, a few times, and the one that disagrees least with itself is taken.

    Args:
        url: as `page_address` takes it.
        timeout: seconds that the server may take to answer.

    Raises:
        ScrapeError: it cannot be read, or it is no page with metrics of vllm-gumbel.
    """
    address = page_address(url)
    best = parse(_read(address, timeout), address)
    for _ in range(TRIES - 1):
        if not best.half_counted():
            break
        time.sleep(PAUSE_SECONDS)
        best = min(parse(_read(address, timeout), address), best, key=Scrape.half_counted)
    return best


def evidence_by_arm(page: Scrape) -> dict[str, Evidence]:
    """Return the evidence of every arm on a page."""
    return {arm: page.evidence(arm) for arm in page.arms()}


def parse(text: str, address: str) -> Scrape:
    """Return what the text of a page says; `address` is for messages.

    Raises:
        ScrapeError: it is not in Prometheus' format, has no metric of vllm-gumbel, or one that no counter can have.
    """
    if text and not text.endswith("\n"):
        raise ScrapeError(f"{address}: the page ends within a line")
    samples: dict[str, list[tuple[Labels, float]]] = {}
    try:
        for family in text_string_to_metric_families(text):
            for sample in family.samples:
                samples.setdefault(sample.name, []).append((sample.labels, float(sample.value)))
    except Exception as error:  # the parser raises whatever a malformed line makes its code raise
        reason = str(error).splitlines()[0][:80] if str(error) else type(error).__name__
        raise ScrapeError(f"{address}: the page is not in Prometheus' text format: {reason}") from None
    if not any(name.startswith(PREFIX) for name in samples):
        hint = "is it a vLLM server with --sampler gumbel, whose setting `metrics` is on?"
        raise ScrapeError(f"{address}: no {PREFIX} metrics there; {hint}")
    for name in sorted(_GROWING & samples.keys()):
        for labels, value in samples[name]:
            if not (math.isfinite(value) and value >= 0):
                raise ScrapeError(f"{address}: {name}{labels} is {value}, which nothing counts to")
    return Scrape(address, time.monotonic(), samples)


def _read(address: str, timeout: float) -> str:
    """Return the text at an address, whose size is checked against what the server announced."""
    request = urllib.request.Request(address, headers={"Accept": "text/plain;version=0.0.4"})
    try:
        with urllib.request.urlopen(request, timeout=timeout) as response:
            body: bytes = response.read(LARGEST_PAGE + 1)
            announced = response.headers.get("Content-Length")
        text = body.decode()
    except urllib.error.HTTPError as error:
        error.close()
        raise ScrapeError(f"{address}: the server answers {error.code} {error.reason}") from None
    except UnicodeDecodeError:
        raise ScrapeError(f"{address}: the page is not text") from None
    except (OSError, http.client.HTTPException, ValueError) as error:
        raise ScrapeError(f"{address}: {reason_of(error, timeout)}") from None
    if len(body) > LARGEST_PAGE:
        raise ScrapeError(f"{address}: the page is larger than {LARGEST_PAGE // 2**20} MiB")
    if announced is not None and announced.isdigit() and len(body) < int(announced):
        raise ScrapeError(f"{address}: the page ends after {len(body)} of {announced} bytes")
    return text


def reason_of(error: Exception, timeout: float) -> str:
    """Return in words why a page could not be read."""
    cause = error.reason if isinstance(error, urllib.error.URLError) and isinstance(error.reason, OSError) else error
    if isinstance(cause, TimeoutError):
        return f"no answer within {timeout:g} s"
    if isinstance(cause, ConnectionRefusedError):
        return "connection refused: nothing listens there"
    if isinstance(cause, http.client.IncompleteRead):
        return "the server closed the connection within the page"
    return getattr(cause, "strerror", None) or str(cause) or type(cause).__name__
