"""Servers of several processes: each token is counted once, whoever draws it and whoever answers `/metrics`.

The model is small and random, since processes are what is tested; it has heads that two workers can share.
"""

import contextlib
import json
import os
import random
import re
import signal
import socket
import subprocess
import sys
import threading
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace

import httpx
import pytest
from prometheus_client.parser import text_string_to_metric_families

from tests import test_tensor_parallel
from tests.clients import MIXED, Clients
from tests.recording import total
from tests.serving import ROOT, free_port, serving
from vllm_gumbel.metrics import catalogue
from vllm_gumbel.metrics.exporter import PRIVATE_VARIABLE

pytestmark = pytest.mark.skipif(len(os.sched_getaffinity(0)) < 2, reason="two workers need two CPUs")
small_model = test_tensor_parallel.small_model

#: A CPU for each of two workers; vLLM's own choice refuses two on one memory node.
CPUS = "|".join(map(str, sorted(os.sched_getaffinity(0))[:2]))

SAMPLED = catalogue.SAMPLED_TOKENS
FLAGS = ("--sampler", "gumbel", "--max-model-len", "256")
CONTROLLED = {"VLLM_PLUGINS": "vllm_gumbel,vllm_gumbel_rollout", "GUMBEL_ADMIN_KEY": "key"}

#: A request that is refused, which the API server counts.
BAD = {"model": "smollm2", "prompt": "x", "max_tokens": 1, "vllm_xargs": {"gumbel_salt": "x"}}

#: An engine without a server, and what its process's registry shows of ours.
OFFLINE = """
import json, sys, prometheus_client
from vllm import LLM, SamplingParams

llm = LLM(sys.argv[1], dtype="float32", enforce_eager=True, max_model_len=256, additional_config={"sampler": "gumbel"})
params = SamplingParams(max_tokens=20, ignore_eos=True, n=2)
outputs = llm.generate(["one two three", "The cat sat on the", "Once upon a time"], params, use_tqdm=False)
shown = [s for metric in prometheus_client.REGISTRY.collect() for s in metric.samples]
tokens = sum(len(each.token_ids) for output in outputs for each in output.outputs)
ours = [[s.name, s.labels, s.value] for s in shown if s.name.startswith("vllm_gumbel_")]
llm.llm_engine.engine_core.shutdown()
print(json.dumps({"tokens": tokens, "samples": ours}))
"""


def page(url):
    """Return (name, labels) and value of every series of ours on a page, asked for on a connection of its own."""
    found = {}
    for family in text_string_to_metric_families(httpx.get(f"{url}/metrics", timeout=60).text):
        for sample in family.samples if family.name.startswith(catalogue.PREFIX) else ():
            key = sample.name, frozenset(sample.labels.items())
            assert key not in found, f"shown twice: {key}"
            found[key] = sample.value
    return found


def at_once(ask, times=16):
    """Return the answers to so many requests at the same time: one by one, a single API server may take them all."""
    with ThreadPoolExecutor(times) as pool:
        return [future.result() for future in [pool.submit(ask) for _ in range(times)]]


def two_free_ports():
    """Return a port that is free like the one after it, below those that the system gives away meanwhile."""
    while True:
        port = random.randrange(20_000, 30_000)
        with (
            contextlib.suppress(OSError),
            socket.create_server(("127.0.0.1", port)),
            socket.create_server(("127.0.0.1", port + 1)),
        ):
            return port


def summed(shown, metric, **labels):
    """Return the sum of those series of a metric on a page that have these labels."""
    return sum(
        value for (name, have), value in shown.items() if name == metric.exposed_name and labels.items() <= set(have)
    )


def engines_of_builds(shown):
    """Return the label `engine` of every `build_info` on a page, in order."""
    return sorted(dict(labels)["engine"] for name, labels in shown if name == catalogue.BUILD_INFO.exposed_name)


def test_two_replicas_behind_two_api_servers_count_each_token_once(small_model, tmp_path_factory):
    port, folder = two_free_ports(), tmp_path_factory.mktemp("t")  # short, since vLLM makes sockets in it
    config = json.dumps({"watch": 1, "metrics_address": f"127.0.0.1:{port}"})
    flags = ("--sampler-config", config, "--api-server-count", "2", "--data-parallel-size", "2")
    environment = {"VLLM_CPU_OMP_THREADS_BIND": CPUS, "TMPDIR": str(folder), **CONTROLLED}  # vLLM chooses the folder
    with serving(small_model, folder / "log", *FLAGS, *flags, **environment) as server:
        clients = Clients(server)
        clients.post(MIXED, 24, times=3)
        refused, url = [], f"{server.url}/v1/completions"
        # Two files are the workers', two those of API servers that have refused; the test's own limit ends this.
        while len(list(folder.rglob("counter_*-gumbel.db"))) < 4:
            refused += at_once(lambda: httpx.post(url, json=BAD, timeout=60).status_code)
        changed = changed_rollout(server.url, {"fraction": 0.25})
        shown = at_once(lambda: page(server.url))
        by_port = [page(f"http://127.0.0.1:{port + replica}") for replica in range(2)]
    received = sum(clients.received.values())
    assert set(refused) == {400}
    for each in [*shown, *by_port]:
        assert each == shown[0], "every API server and every worker's own port shows the same"
    assert {arm: summed(shown[0], SAMPLED, arm=arm) for arm in clients.received} == clients.received
    assert all(0 < summed(shown[0], SAMPLED, engine=engine) < received for engine in "01"), "both replicas draw"
    assert engines_of_builds(shown[0]) == ["0", "1"]
    assert summed(shown[0], catalogue.BUILD_INFO) == 2
    assert summed(shown[0], catalogue.REJECTED_PARAMS) == len(refused)
    assert summed(shown[0], catalogue.FAULTS) == 0
    assert changed["fraction"] == 0.25
    fractions = [summed(shown[0], catalogue.ROLLOUT_FRACTION, engine=engine) for engine in "01"]
    assert fractions == [0.25, 0.25], "a change reaches the workers of every replica"


def changed_rollout(url, change):
    """Change the rollout of a server, and return its answer."""
    answer = httpx.post(f"{url}/gumbel/rollout", json=change, headers={"Authorization": "Bearer key"}, timeout=60)
    assert answer.status_code == 200, answer.text
    return answer.json()


@pytest.fixture(scope="module")
def killed(small_model, tmp_path_factory):
    """What a server of two tensor-parallel workers showed, and what became of it when one was killed under load.

    Attributes:
        received: tokens of clients, by arm, when `shown` and `own_port` were read.
        workers: how many a change of the rollout has reached.
        halved: tokens by arm of requests after that change to one half.
        folder: the folder of its metrics.
        load: tokens that came to clients afterwards.
        code: with which the server exited.
    """
    folder, port = tmp_path_factory.mktemp("metrics"), free_port()
    config = json.dumps({"metrics_address": f"127.0.0.1:{port}"})
    flags = (*FLAGS, "--sampler-config", config, "--tensor-parallel-size", "2")
    environment = {"VLLM_CPU_OMP_THREADS_BIND": CPUS, PRIVATE_VARIABLE: str(folder), **CONTROLLED}
    with serving(small_model, tmp_path_factory.mktemp("server") / "log", *flags, **environment) as server:
        clients = Clients(server)
        clients.post(MIXED, 24)
        seen = SimpleNamespace(received=clients.received.copy(), folder=folder)
        seen.shown, seen.own_port = page(server.url), page(f"http://127.0.0.1:{port}")
        seen.workers = changed_rollout(server.url, {"fraction": 0.5})["workers"]
        before = Counter(clients.counted())
        clients.post([{"temperature": 1.0}], 12, times=16)
        seen.halved = Counter(clients.counted()) - before
        load, flowing = Counter(), threading.Event()
        threads = [threading.Thread(target=_stream, args=(server, i, load, flowing)) for i in range(4)]
        for thread in threads:
            thread.start()
        assert flowing.wait(60)
        counters = min(folder.glob("counter_*-gumbel.db"))
        os.kill(int(re.search(r"\d+", counters.name).group()), signal.SIGKILL)
        for thread in threads:
            thread.join(120)
        seen.code, seen.load = server.process.wait(120), sum(load.values())
    return seen


def _stream(server, number, load, flowing):
    """Count the tokens of a stream until it breaks."""
    body = {"prompt": f"{number} bottles", "max_tokens": 240, "stream": True, "ignore_eos": True, "temperature": 1}
    try:
        request = {"model": "smollm2", **body}
        with httpx.stream("POST", f"{server.url}/v1/completions", json=request, timeout=60) as response:
            for line in response.iter_lines():
                load[number] += '"text"' in line
                if load[number] > 20:
                    flowing.set()
    except httpx.HTTPError:
        pass


def test_two_tensor_parallel_workers_count_each_token_once(killed):
    assert {arm: summed(killed.shown, SAMPLED, arm=arm) for arm in killed.received} == killed.received
    assert killed.own_port == killed.shown, "the worker's own port shows what the server shows"
    assert engines_of_builds(killed.shown) == ["0"]
    assert summed(killed.shown, catalogue.BUILD_INFO) == 1


def test_ranks_agree_who_draws_what(killed):
    """Ranks that did not would wait for each other for ever, or write different texts."""
    assert killed.workers == 2
    assert set(killed.halved) == {"gumbel", "default"}
    assert sum(killed.halved.values()) == 16 * 12


def test_killed_worker_ends_the_server_and_its_counts_stay_readable(killed):
    assert killed.code is not None
    assert 0 < killed.load < 4 * 240, "it was killed under load"
    assert total(killed.folder) >= sum(killed.received.values()) + sum(killed.halved.values()) + killed.load
    assert total(killed.folder, catalogue.BUILD_INFO) == 1


def test_engine_that_starts_in_the_folder_of_a_dead_server_shows_its_own_counts_only(killed, small_model):
    environment = {**os.environ, PRIVATE_VARIABLE: str(killed.folder)}
    run = [sys.executable, "-c", OFFLINE, str(small_model)]
    finished = subprocess.run(run, capture_output=True, text=True, cwd=ROOT, env=environment, timeout=300)
    assert finished.returncode == 0, finished.stderr[-4000:]
    said = json.loads(finished.stdout.splitlines()[-1])
    assert sum(value for name, _, value in said["samples"] if name == SAMPLED.exposed_name) == said["tokens"] > 0
    assert {labels["model_name"] for _, labels, _ in said["samples"] if "model_name" in labels} == {str(small_model)}
    assert [value for name, _, value in said["samples"] if name == catalogue.BUILD_INFO.exposed_name] == [1]
    keys = [(name, frozenset(labels.items())) for name, labels, _ in said["samples"]]
    assert len(set(keys)) == len(keys), "each series is shown once"
