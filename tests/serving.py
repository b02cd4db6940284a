"""Starts the real server and the real engine for tests, once a session, and stops what was started."""

import contextlib
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import httpx

from vllm_gumbel.metrics.exporter import PRIVATE_VARIABLE

ROOT = Path(__file__).resolve().parent.parent
VLLM = Path(sys.executable).with_name("vllm")

#: The model in float32: with bfloat16 a row's logits depend on the batch that it is computed in, which is no property
#: of the sampler; in float32 the differences are too small to change a draw.
MODEL_FLAGS = ("--dtype", "float32", "--enforce-eager", "--max-model-len", "1024")


class Server:
    """A running `vllm serve`.

    Attributes:
        url: base address.
        log: path of its output.
        process: the process, leader of its own group.
    """

    def __init__(self, url: str, log: Path, process: subprocess.Popen) -> None:
        self.url = url
        self.log = log
        self.process = process
        self.client = httpx.Client(base_url=url, timeout=300)

    def complete(self, **body) -> httpx.Response:
        """Post a completion request; the model and `return_token_ids` are filled in."""
        return self.client.post("/v1/completions", json={"model": "smollm2", "return_token_ids": True, **body})

    def tokens(self, **body) -> list[int]:
        """Return the token ids of the first choice of a completion."""
        response = self.complete(**body)
        assert response.status_code == 200, response.text
        return response.json()["choices"][0]["token_ids"]

    def metric(self, name: str, **labels: str) -> float:
        """Return the sum of a metric's samples on `/metrics` whose labels include `labels`."""
        return sum(value for found, value in self.samples(name) if labels.items() <= found.items())

    def samples(self, name: str) -> list[tuple[dict[str, str], float]]:
        """Return labels and value of every sample of a metric on `/metrics`."""
        from prometheus_client.parser import text_string_to_metric_families

        text = self.client.get("/metrics").text
        families = text_string_to_metric_families(text)
        return [(s.labels, s.value) for family in families for s in family.samples if s.name == name]


def free_port() -> int:
    """Return a TCP port that nothing listens on."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


@contextlib.contextmanager
def serving(model: Path, log: Path, *flags: str, **environment: str) -> Iterator[Server]:
    """Run `vllm serve` until the context ends, with its output in `log`."""
    port = free_port()
    # An engine of this process has chosen a folder for its metrics; a server that inherited it would show them too.
    others = {name: value for name, value in os.environ.items() if name != PRIVATE_VARIABLE}
    command = [str(VLLM), "serve", str(model), "--served-model-name", "smollm2", "--port", str(port)]
    with log.open("w") as output:
        process = subprocess.Popen(
            [*command, *MODEL_FLAGS, *flags],
            cwd=ROOT,
            stdout=output,
            stderr=subprocess.STDOUT,
            start_new_session=True,
            env={**others, "PYTHONPATH": str(ROOT), **environment},
        )
    server = Server(f"http://127.0.0.1:{port}", log, process)
    try:
        wait_until_ready(server)
        yield server
    finally:
        server.client.close()
        stop(process)


def wait_until_ready(server: Server, seconds: float = 420) -> None:
    """Return when `/health` answers; fail with the end of the log if the server exits or takes too long."""
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        if server.process.poll() is not None:
            break
        with contextlib.suppress(httpx.HTTPError):
            if server.client.get("/health", timeout=5).status_code == 200:
                return
        time.sleep(0.5)
    raise AssertionError(f"the server did not start; its last output:\n{server.log.read_text()[-4000:]}")


def stop(process: subprocess.Popen) -> None:
    """End a process and everything in its group."""
    for number, patience in ((signal.SIGINT, 30), (signal.SIGTERM, 15), (signal.SIGKILL, 15)):
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, number)
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(patience)
            break
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
