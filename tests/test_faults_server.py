"""One real server through faults: kernels that raise, a full disk, a clock that jumps, a thousand streams left.

After each of them tokens are those of before, what clients got is what was counted, and nothing of a request is kept.
The disk is a small one of the server's own, its clock a `time.time` that adds what a file says.
"""

import json
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from tests.clients import MIXED, Clients
from tests.serving import VLLM, serving
from tests.test_exporter import namespace
from tests.test_faults_disk import fill
from tests.test_rollout_server import ASKED, KEY, PLUGINS, control

__all__ = ["namespace"]  # a fixture

PATIENCE = 120
STREAMS = 1000
HOUR = 3600

CLOCK = """import os, time
clock, jump = time.time, os.environ["CLOCK_JUMP"]
def jumping():
    try:
        with open(jump) as file:
            return clock() + float(file.read())
    except (OSError, ValueError):
        return clock()
time.time = jumping
"""

#: Runs vLLM where a folder is a small disk.
ON_A_SMALL_DISK = """#!/bin/sh
run='mount -t tmpfs -o size=12m tmpfs "$SMALL_DISK" && exec "$0" "$@"'
exec unshare --map-root-user --mount sh -c "$run" {vllm} "$@"
"""


class Held:
    """A part of the worker that tells what it keeps of requests."""

    def held(self):
        """Return the sizes of everything that is kept for a request as long as it lasts."""
        runner = self.model_runner
        batch = runner.input_batch
        return {
            "requests of the runner": len(runner.requests),
            "rows of the batch": batch.num_reqs,
            "rows of ours": len(batch._request_rows),
            "slots taken": batch.max_num_reqs - len(batch._free_slots),
            "admitted, not counted": len(batch.admitted),
            "told": len(batch.told),
        }


NOTHING_HELD = dict.fromkeys(
    ("requests of the runner", "rows of the batch", "rows of ours", "slots taken", "admitted, not counted", "told"), 0
)


class Broken:
    """The server, and how it is broken.

    Attributes:
        server: it.
        folder: where the files lie that break it; `disk` is its small disk, as the server sees it.
        clients: count what they get.
        tokens: of the request `ASKED` before anything was broken.
    """

    def __init__(self, server, folder):
        self.server, self.folder, self.clients = server, folder, Clients(server)
        self.disk = Path(f"/proc/{server.process.pid}/root/{folder}/disk")
        self.tokens = self.ask()

    def ask(self):
        """Return the tokens of a seeded request."""
        tokens = self.server.tokens(**ASKED)
        self.clients.received["gumbel"] += len(tokens)
        return tokens

    def check(self):
        """Draw mixed requests; every token that clients got was counted once, and the seeded one is as before."""
        self.clients.post(MIXED, 12, times=2)
        assert self.ask() == self.tokens
        assert self.clients.counted() == self.clients.received

    def fail(self, draws):
        """Let that many draws fail from now on."""
        (self.folder / "fault").write_text(str(draws))

    def jump(self, hours):
        """Let the wall clock jump."""
        (self.folder / "clock").write_text(str(hours * HOUR))

    def said(self, text):
        """Return how many lines of the log have a text."""
        return sum(text in line for line in self.server.log.read_text().splitlines())

    def faults(self):
        """Return how many errors of the bookkeeping were counted."""
        return self.server.metric("vllm_gumbel_faults_total")

    def held(self):
        """Return what the worker keeps of requests."""
        answer = self.server.client.post("/collective_rpc", json={"method": "held"})
        return answer.json()["results"][0]


@pytest.fixture(scope="module")
def broken(model_path, tmp_path_factory):
    """A server that can be broken in all these ways."""
    folder = tmp_path_factory.mktemp("broken")
    (folder / "disk").mkdir()
    (folder / "sitecustomize.py").write_text(CLOCK)
    command = folder / "vllm"
    command.write_text(ON_A_SMALL_DISK.format(vllm=VLLM))
    command.chmod(0o755)
    settings = json.dumps({"rollout_state": str(folder / "disk" / "state.json")})
    flags = ("--sampler", "tests.broken:FailsWhileTold", "--sampler-config", settings, "--max-num-seqs", "48")
    flags += ("--worker-extension-cls", "tests.test_faults_server.Held")
    environment = {
        **PLUGINS,
        "VLLM_SERVER_DEV_MODE": "1",
        "GUMBEL_METRICS_DIRECTORY": str(folder / "disk"),
        "SMALL_DISK": str(folder / "disk"),
        "KERNEL_FAULT": str(folder / "fault"),
        "CLOCK_JUMP": str(folder / "clock"),
        "PYTHONPATH": f"{folder}:{Path(__file__).parents[1]}",
    }
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr("tests.serving.VLLM", command)
        with serving(model_path, folder / "log", *flags, **environment) as server:
            yield Broken(server, folder)


def test_step_whose_kernel_raises_is_drawn_all_the_same_and_the_breaker_opens_if_it_goes_on(broken):
    fallbacks = lambda: broken.server.metric("vllm_gumbel_fallbacks_total", reason="kernel")  # noqa: E731
    broken.fail(3)
    broken.check()
    assert (fallbacks(), control(broken.server)[1]["breaker"]["open"]) == (3, False)
    broken.fail(12)
    assert broken.ask() == broken.tokens, "it began before the breaker opened"
    assert fallbacks() == 15
    state = control(broken.server)[1]
    assert state["breaker"]["open"]
    assert "a draw that failed" in state["breaker"]["reason"]
    broken.clients.received["default"] += len(broken.server.tokens(**ASKED))
    assert broken.clients.counted() == broken.clients.received
    assert control(broken.server, {"breaker": "close"})[0] == 200
    broken.check()
    assert broken.said("fallback (kernel), tokens keep flowing") == 1


def test_full_disk_costs_what_would_be_kept_there_and_nothing_else(namespace, broken):
    before, counted = broken.faults(), "vllm_gumbel_rejected_params_total"
    ballast = fill(broken.disk)
    deadline = time.monotonic() + PATIENCE
    while not broken.server.metric("vllm_gumbel_faults_total", part="frequencies"):  # written every ten seconds
        assert time.monotonic() < deadline
        broken.check()
    assert broken.faults() == before + broken.server.metric("vllm_gumbel_faults_total", part="frequencies")
    for fraction in (0.5, 1):
        status, state = control(broken.server, {"fraction": fraction})
        assert (status, state["fraction"]) == (200, fraction)
        assert broken.server.metric("vllm_gumbel_rollout_fraction") == fraction
    for _ in range(3):
        refused = broken.server.complete(**ASKED, vllm_xargs={"gumbel_salt": "x"})
        assert refused.status_code == 400
        assert "gumbel_salt" in refused.text
    assert [broken.said(text) for text in ("counting failed in frequencies", "refused requests cannot be")] == [1, 1]
    assert broken.said("the rollout's state cannot be kept") == 2
    assert not list(broken.disk.glob("partial-*"))
    ballast.unlink()
    assert control(broken.server, {"shadow": 0})[0] == 200
    assert json.loads((broken.disk / "state.json").read_text())["fraction"] == 1
    assert broken.server.complete(**ASKED, vllm_xargs={"gumbel_salt": "x"}).status_code == 400
    assert broken.server.metric(counted, key="gumbel_salt") == 1, "it is counted again"
    broken.check()


def test_clock_that_jumps_by_hours_changes_no_token_and_no_count(broken):
    before, seconds = broken.faults(), broken.server.metric("vllm_gumbel_sampler_seconds_sum")
    began, ended = time.monotonic(), threading.Event()

    def jump():
        while not ended.is_set():
            for hours in (6, -12, 0, 1000):
                broken.jump(hours)
                time.sleep(0.05)

    jumper = threading.Thread(target=jump)
    jumper.start()
    try:
        for _ in range(3):
            broken.check()
        assert control(broken.server, {"fraction": 0.25})[1]["fraction"] == 0.25
        assert broken.server.metric("vllm_gumbel_rollout_fraction") == 0.25
        assert control(broken.server, {"fraction": 1})[0] == 200
    finally:
        ended.set()
        jumper.join()
        broken.jump(0)
    spent = broken.server.metric("vllm_gumbel_sampler_seconds_sum") - seconds
    assert 0 < spent < time.monotonic() - began
    assert broken.faults() == before
    assert not control(broken.server)[1]["breaker"]["open"]
    broken.check()


def test_thousand_streams_that_clients_leave_leave_nothing_behind(broken):
    """In flight are more than run at a time, so some are left while they wait, some before their first token."""
    server, before = broken.server, broken.clients.counted()["gumbel"]
    drawn = [body for body in MIXED if "vllm_xargs" not in body]

    def leave(number):
        body = {"prompt": f"Story {number}:", "max_tokens": 200, **drawn[number % len(drawn)], "stream": True}
        return broken.clients.receive(body, at_most=number % 7)

    requests = server.metric("vllm_gumbel_requests_total")
    with ThreadPoolExecutor(80) as pool:
        received = sum(pool.map(leave, range(STREAMS)))
    deadline = time.monotonic() + PATIENCE
    while server.metric("vllm:num_requests_running") or server.metric("vllm:num_requests_waiting"):
        assert time.monotonic() < deadline
        time.sleep(0.2)
    assert broken.held() == NOTHING_HELD
    sampled = broken.clients.counted()["gumbel"] - before
    assert 0 < received <= sampled < STREAMS * 200 / 2, "streams were left, not finished"
    assert 0 < server.metric("vllm_gumbel_requests_total") - requests <= STREAMS
    broken.clients.received["gumbel"] += int(sampled) - received
    broken.check()
    assert KEY not in server.log.read_text()
