"""What an operator sees of the real server: a real Prometheus scrapes it, and the commands judge and show it.

The server looks at every token. Its clients mix what a request can ask for, and count what they get.
"""

import math
import re
import shutil
import subprocess
import sys
from collections import Counter
from pathlib import Path

import numpy as np
import pytest

from tests.clients import MIXED, SAMPLED, Clients
from tests.prometheus import program, prometheus, scraping
from tests.serving import ROOT, serving
from tests.test_server import LONG_PROMPT
from vllm_gumbel.metrics import glitch

ANOMALOUS = "vllm_gumbel_anomalous_tokens_total"
COMMAND = Path(sys.executable).with_name("vllm-gumbel")
README = (ROOT / "README.md").read_text()
QUERIES = README.split("```promql\n")[1].split("```")[0].split("# ")[1:]
#: What each query of the README is for, and its expression.
EXPRESSIONS = [query.split("\n", 1) for query in QUERIES]


def command(*arguments):
    """Run `vllm-gumbel` with the address of a server."""
    return subprocess.run([COMMAND, *arguments], capture_output=True, text=True, timeout=120)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """The folder of the metrics of `clients`' server."""
    return tmp_path_factory.mktemp("metrics")


@pytest.fixture(scope="module")
def clients(model_path, folder, tmp_path_factory):
    """Clients that got some thousand tokens."""
    log = tmp_path_factory.mktemp("server") / "log"
    flags = ("--sampler", "gumbel", "--sampler-config", '{"watch": 1}')
    with serving(model_path, log, *flags, GUMBEL_METRICS_DIRECTORY=str(folder)) as server:
        made = Clients(server)
        made.post(MIXED, 64, times=8)
        yield made


@pytest.fixture(scope="module")
def scraped(clients, tmp_path_factory):
    """A Prometheus that has scraped the server before and after some more traffic."""
    with prometheus(tmp_path_factory.mktemp("prometheus"), scraping(clients.server.url)) as running:
        running.wait_for_scrape()
        clients.post(MIXED, 24)
        running.wait_for_scrape()
        yield running


def test_page_counts_exactly_the_tokens_that_clients_got(clients):
    assert clients.counted() == clients.received
    assert clients.received["default"] > 0
    server = clients.server
    assert server.metric("vllm_gumbel_watched_tokens_total") == sum(clients.received.values())
    assert server.metric("vllm_gumbel_faults_total") == 0
    assert server.metric("vllm_gumbel_anomalous_tokens_total", kind="outside_filter") == 0


def test_promtool_accepts_the_page(clients):
    """vLLM's own metrics share the page and are not ours to judge, so only our lines are given to it."""
    lines = clients.server.client.get("/metrics").text.splitlines(keepends=True)
    ours = "".join(line for line in lines if re.match(r"(# (HELP|TYPE) )?vllm_gumbel_", line))
    checked = subprocess.run([program("promtool"), "check", "metrics"], input=ours, capture_output=True, text=True)
    assert (checked.returncode, checked.stdout, checked.stderr) == (0, "", "")


def test_prometheus_sees_the_tokens_that_clients_got(clients, scraped):
    found = {labels["arm"]: value for labels, value in scraped.query(f"sum by (arm) ({SAMPLED})")}
    assert found == clients.received
    assert scraped.value('count({__name__=~"vllm_gumbel_build_info"})') == 1


@pytest.mark.parametrize(("purpose", "expression"), EXPRESSIONS, ids=[purpose for purpose, _ in EXPRESSIONS])
def test_every_query_of_the_readme_answers(purpose, expression, scraped):
    found = scraped.query(expression)
    assert found, f"{purpose}: no series"
    assert all(math.isfinite(value) for _, value in found), f"{expression}: {found}"


@pytest.mark.parametrize("is_glitch", [True, False])
def test_loops_and_glitch_tokens_are_counted_as_what_they_are(is_glitch, clients, model_path):
    """One id is allowed, so the text is a loop, which begins once; each of its tokens is a glitch, or none is."""
    listed = glitch.find(model_path).mask(49_152)
    token = int(np.flatnonzero(listed == is_glitch)[-1])

    def seen():
        return [clients.server.metric(ANOMALOUS, kind=kind, arm="gumbel") for kind in ("repetition", "glitch")]

    before = seen()
    clients.receive({"prompt": "Say", "temperature": 1.0, "max_tokens": 40, "allowed_token_ids": [token]})
    assert [now - then for now, then in zip(seen(), before, strict=True)] == [1, 40 if is_glitch else 0]


def test_left_stream_is_counted_until_the_server_notices(clients):
    before = clients.counted()["gumbel"]
    got = clients.receive({"prompt": LONG_PROMPT, "temperature": 1.0, "max_tokens": 700, "stream": True}, at_most=5)
    clients.received["gumbel"] -= got
    while clients.server.metric("vllm:num_requests_running"):  # the test's own limit ends this
        pass
    drawn = clients.counted()["gumbel"] - before
    assert got <= drawn < 700
    clients.received["gumbel"] += int(drawn)
    clients.post(MIXED, 8)
    assert clients.counted() == clients.received


def test_check_calls_the_server_exact(clients):
    checked = command("check", clients.server.url, "--arm", "gumbel")
    assert "arm gumbel draws exactly" in checked.stdout, checked.stdout + checked.stderr
    assert checked.returncode == 0
    assert command("check", clients.server.url).returncode in (0, 3), "no arm is called not exact"


def test_check_does_not_accuse_a_server_of_chunked_prompts_and_foreign_processors(server):
    before = Clients(server)
    counted = Counter(before.counted())
    halved = {"temperature": 0.5, "vllm_xargs": {"halve": 1}}
    before.post([*MIXED, halved, {"temperature": 1.0, "prompt": LONG_PROMPT}], 32, times=2)
    assert before.counted() == counted + before.received
    assert server.metric("vllm_gumbel_faults_total") == 0
    checked = command("check", server.url)
    assert checked.returncode in (0, 3), checked.stdout + checked.stderr


def test_top_prints_what_is_drawn(clients):
    shown = command("top", clients.server.url, "--once", "--interval", "0.5")
    assert (shown.returncode, shown.stderr) == (0, "")
    assert "backend numba, runner v1" in shown.stdout
    (line,) = re.findall(r"^tokens +([\d,]+) +([\d,]+)$", shown.stdout, re.MULTILINE)
    assert [int(number.replace(",", "")) for number in line] == [clients.received[arm] for arm in ("gumbel", "default")]


def test_server_goes_on_without_its_metrics_folder(clients, folder):
    """Comes last: the folder is gone after it."""
    shutil.rmtree(folder)
    clients.post(MIXED, 8)
    page = clients.server.client.get("/metrics")
    assert page.status_code == 200
    assert "vllm:generation_tokens_total" in page.text
    assert "vllm_gumbel_" not in page.text
    said = [line for line in clients.server.log.read_text().splitlines() if "metrics cannot be read from" in line]
    assert len(said) == 1, page.text[:2000]
    assert str(folder) in said[0]
    checked = command("check", clients.server.url)
    assert checked.returncode == 3
    assert "no vllm_gumbel_ metrics there" in checked.stderr
