"""Runs a real Prometheus for tests: what it makes of our metrics decides, not what we think of the format."""

import contextlib
import json
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.serving import free_port, stop

#: Where scripts/setup puts the programs if the machine has none.
UNPACKED = Path(sys.prefix) / "prometheus"

#: Labels and value of one series.
Series = tuple[dict[str, str], float]


def program(name: str) -> str:
    """Return the path of `prometheus` or `promtool`; the test is skipped if there is none."""
    found = shutil.which(name, path=f"{os.environ.get('PATH', '')}{os.pathsep}{UNPACKED}")
    if found is None:
        pytest.skip(f"no {name}, neither on PATH nor in {UNPACKED}, where scripts/setup puts it")
    return found


class Prometheus:
    """A running Prometheus.

    Attributes:
        url: base address.
        log: path of its output.
    """

    def __init__(self, url: str, log: Path) -> None:
        self.url = url
        self.log = log
        self._client = httpx.Client(base_url=url, timeout=30)

    def query(self, expression: str) -> list[Series]:
        """Return the series that an expression of PromQL has now; an expression that it refuses fails the test."""
        answer = self._client.post("/api/v1/query", data={"query": expression}).json()
        assert answer["status"] == "success", f"{expression}: {answer.get('error')}"
        assert answer["data"]["resultType"] == "vector", expression
        return [(series["metric"], float(series["value"][1])) for series in answer["data"]["result"]]

    def value(self, expression: str) -> float:
        """Return the value of an expression that has one series."""
        ((_, value),) = self.query(expression)
        return value

    def wait_for_scrape(self, seconds: float = 60) -> None:
        """Return when every target has been scraped successfully by a scrape that began after this call."""
        now = time.time()
        self._wait(lambda: self._scraped_since(now), "scrape every target", seconds)

    def wait_until_ready(self, process: subprocess.Popen, seconds: float = 60) -> None:
        """Return when it answers queries; fail with its output if it exits or takes too long."""

        def ready() -> bool:
            assert process.poll() is None, f"Prometheus exited:\n{self.log.read_text()[-4000:]}"
            with contextlib.suppress(httpx.HTTPError):
                return self._client.get("/-/ready").status_code == 200
            return False

        self._wait(ready, "start", seconds)

    def close(self) -> None:
        """Close the connections of this client."""
        self._client.close()

    def _scraped_since(self, then: float) -> bool:
        targets = self._client.get("/api/v1/targets", params={"state": "active"}).json()["data"]["activeTargets"]
        seen = {labels["instance"] for labels, _ in self.query(f"timestamp(up) >= {then} and up == 1")}
        return bool(targets) and {target["labels"]["instance"] for target in targets} == seen

    def _wait(self, condition: Callable[[], bool], what: str, seconds: float) -> None:
        deadline = time.monotonic() + seconds
        while not condition():
            if time.monotonic() > deadline:
                raise AssertionError(
                    f"Prometheus did not {what} in {seconds} s; its last output:\n{self.log.read_text()[-4000:]}"
                )
            time.sleep(0.2)


@contextlib.contextmanager
def prometheus(folder: Path, *scrape_configs: dict[str, Any]) -> Iterator[Prometheus]:
    """Run Prometheus on a free port of loopback until the context ends, scraping every second.

    Args:
        folder: for its configuration, data and output.
        scrape_configs: entries of the section of that name; one without `job_name` gets one.
    """
    entries = [{"job_name": f"job{i}", **entry} for i, entry in enumerate(scrape_configs)]
    intervals = {"scrape_interval": "1s", "scrape_timeout": "1s"}
    config, log = folder / "prometheus.yml", folder / "prometheus.log"
    config.write_text(json.dumps({"global": intervals, "scrape_configs": entries}))  # JSON is YAML
    address = f"127.0.0.1:{free_port()}"
    command = [program("prometheus"), f"--config.file={config}", f"--storage.tsdb.path={folder / 'data'}"]
    with log.open("w") as output:
        process = subprocess.Popen(
            [*command, f"--web.listen-address={address}"],
            cwd=folder,
            stdout=output,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
    running = Prometheus(f"http://{address}", log)
    try:
        running.wait_until_ready(process)
        yield running
    finally:
        running.close()
        stop(process)


def scraping(*urls: str) -> dict[str, Any]:
    """Return a scrape configuration of servers given by their base addresses."""
    return {"static_configs": [{"targets": [url.removeprefix("http://") for url in urls]}]}
