"""A worker killed while it draws and while its share is changed: nobody waits for ever, nothing half is kept."""

import contextlib
import json
import os
import signal
import threading
import time
from collections import Counter
from pathlib import Path

import httpx
import pytest

from tests.serving import serving
from tests.test_rollout_server import ASKED, KEY, PLUGINS, control

FRACTIONS = (0.25, 0.5)
#: Seconds within which everybody must have an answer; vLLM notices a worker that is gone within a few.
PATIENCE = 90


def workers(group: int) -> list[int]:
    """Return the processes of a group in which a model runs."""
    found = []
    for entry in Path("/proc").iterdir():
        with contextlib.suppress(OSError, ValueError):
            if os.getpgid(int(entry.name)) == group and b"VLLM::Worker" in (entry / "cmdline").read_bytes():
                found.append(int(entry.name))
    return found


class Callers:
    """Threads that ask a server the same again and again until it is gone.

    Attributes:
        answers: how often each status came, or a kind of error.
    """

    def __init__(self) -> None:
        self.answers: Counter[int | str] = Counter()
        self._threads: list[threading.Thread] = []

    def start(self, ask) -> None:
        """Let one more thread call a function that returns a status."""
        self._threads.append(threading.Thread(target=self._repeat, args=(ask,), daemon=True))
        self._threads[-1].start()

    def join(self, seconds: float) -> bool:
        """Wait for all, and return whether they have ended."""
        deadline = time.monotonic() + seconds
        for thread in self._threads:
            thread.join(max(0, deadline - time.monotonic()))
        return not any(thread.is_alive() for thread in self._threads)

    def _repeat(self, ask) -> None:
        while True:
            try:
                status = ask()
            except httpx.HTTPError as error:
                self.answers[type(error).__name__] += 1
                return
            self.answers[status] += 1
            if status >= 500:
                return


@pytest.fixture(scope="module")
def start(model_path, tmp_path_factory):
    """Serve with a rollout whose state is kept in one file."""
    folder = tmp_path_factory.mktemp("faults")
    settings = json.dumps({"rollout_fraction": 0, "rollout_state": str(folder / "state.json")})
    flags = ("--sampler", "gumbel", "--sampler-config", settings)
    return folder, lambda name: serving(model_path, folder / name, *flags, **PLUGINS)


def test_worker_killed_amid_draws_and_changes(start):
    folder, served = start
    changes, requests = Callers(), Callers()
    turns = iter(range(10**9))
    with served("first.log") as server:
        assert control(server, {"fraction": 1})[0] == 200
        tokens = server.tokens(**ASKED)
        changes.start(lambda: control(server, {"fraction": FRACTIONS[next(turns) % 2]})[0])
        for number in range(8):
            body = {"prompt": f"Story {number}:", "max_tokens": 64, "ignore_eos": True}
            requests.start(lambda body=body: server.complete(**body).status_code)
        deadline = time.monotonic() + 3 * PATIENCE
        while changes.answers[200] < 5 or requests.answers[200] < 8:
            assert time.monotonic() < deadline, f"no answers: {changes.answers}, {requests.answers}"
            time.sleep(0.1)
        (worker,) = workers(server.process.pid)
        os.kill(worker, signal.SIGKILL)
        assert changes.join(PATIENCE), f"a change waits: {changes.answers}"
        assert requests.join(PATIENCE), f"a request waits: {requests.answers}"
        assert set(changes.answers) - {200, 503} <= {"ConnectError", "ReadError", "RemoteProtocolError"}
        server.process.wait(PATIENCE)  # so that whoever looks after it starts another
    kept = json.loads((folder / "state.json").read_text())
    assert kept["fraction"] in FRACTIONS
    assert [path.name for path in folder.glob("*state.json*")] == ["state.json"]
    with served("second.log") as server:
        status, state = control(server)
        assert (status, state["fraction"], state["breaker"]["open"]) == (200, kept["fraction"], False)
        assert server.metric("vllm_gumbel_sampled_tokens_total") == 0
        assert server.tokens(**ASKED, vllm_xargs={"gumbel_sampler": "gumbel"}) == tokens
        assert server.metric("vllm_gumbel_sampled_tokens_total", arm="gumbel") == len(tokens)
    assert KEY not in (folder / "first.log").read_text()
