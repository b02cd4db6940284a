"""The rollout of a real server: its HTTP routes, who draws what, shadow, and a breaker that opens by itself."""

import contextlib
import itertools
import json
import os
import re
import subprocess
import sys
import threading
from collections import Counter
from pathlib import Path

import pytest

from tests.clients import Clients
from tests.prometheus import prometheus, scraping
from tests.serving import serving
from vllm_gumbel.integration.control import KEY_VARIABLE, refusal

COMMAND = Path(sys.executable).with_name("vllm-gumbel")
#: Holds as short as a test can be: gates that compare times of a busy machine, or rare events, only show what they see.
SHOWN = ("first_token", "next_token", "sampler_time", "errors", "improbable", "repetition", "glitch")
SHOWN += ("nonfinite_logits", "no_candidate", "padded_id")
LENIENT = ("--hold", "10s", *(word for gate in SHOWN for word in ("--ignore", gate)))

KEY = "a-key-of-the-operators"
PLUGINS = {"VLLM_PLUGINS": "vllm_gumbel,vllm_gumbel_rollout", "GUMBEL_ADMIN_KEY": KEY}
ASKED = {"prompt": "Once upon a time", "max_tokens": 12, "temperature": 0.9, "seed": 3}
BY_STOCK = {**ASKED, "vllm_xargs": {"gumbel_sampler": "default"}}


def control(server, change=None, key=KEY, **content):
    """Return status code and content of the answer to a change of the rollout; without one, of a question."""
    headers = {} if key is None else {"Authorization": f"Bearer {key}"}
    if change is None and not content:
        answer = server.client.get("/gumbel/rollout", headers=headers)
    else:
        answer = server.client.post("/gumbel/rollout", headers=headers, **(content or {"json": change}))
    return answer.status_code, answer.json()


def rollout(*arguments):
    """Run `vllm-gumbel rollout`."""
    environment = {**os.environ, KEY_VARIABLE: KEY}
    return subprocess.run(
        [COMMAND, "rollout", *arguments], capture_output=True, text=True, timeout=600, env=environment
    )


@contextlib.contextmanager
def traffic(server, clients=12):
    """Send requests all the time; what became of them is in `received`."""
    sender, stop, numbers = Clients(server), threading.Event(), itertools.count()

    def send():
        while not stop.is_set():
            body = {"prompt": f"Story {next(numbers)}:", "max_tokens": 16, "temperature": 1.0, "ignore_eos": True}
            sender.received["answered" if server.complete(**body).status_code == 200 else "lost"] += 1

    threads = [threading.Thread(target=send) for _ in range(clients)]
    for thread in threads:
        thread.start()
    try:
        yield sender
    finally:
        stop.set()
        for thread in threads:
            thread.join()


def by_arm(server, name="vllm_gumbel_requests_total"):
    """Return a counter's value by arm."""
    return Counter({labels["arm"]: value for labels, value in server.samples(name)})


@pytest.fixture(scope="module")
def kept(tmp_path_factory):
    """The file in which the server keeps its rollout."""
    return tmp_path_factory.mktemp("rollout") / "state.json"


@pytest.fixture(scope="module")
def rolled(model_path, kept, tmp_path_factory):
    """A server that begins with a fraction of 0."""
    settings = json.dumps({"watch": 1, "rollout_fraction": 0, "rollout_state": str(kept)})
    log = tmp_path_factory.mktemp("server") / "log"
    flags = ("--sampler", "gumbel", "--sampler-config", settings, "--api-key", "a key of the clients")
    with serving(model_path, log, *flags, **PLUGINS) as server:
        server.client.headers["Authorization"] = "Bearer a key of the clients"
        yield server


def test_only_the_admin_key_opens_the_route(rolled):
    """vLLM's own key is another one, and does not."""
    state = {"fraction": 0.0, "shadow": 0.0, "breaker": {"open": False, "reason": None}, "workers": 1}
    assert control(rolled) == (200, state)
    for key in (None, "wrong", "a key of the clients", KEY + "x", KEY[:-1]):
        for change in (None, {"fraction": 1}):
            status, said = control(rolled, change, key)
            assert (status, KEY in str(said)) == (401, False)
    assert control(rolled) == (200, state)


@pytest.mark.parametrize(
    ("content", "said"),
    [
        ({"json": {"fraction": 2}}, "fraction must be a number from 0 to 1, got 2"),
        ({"json": {"fraction": "half"}}, "fraction must be a number from 0 to 1, got 'half'"),
        ({"content": '{"fraction": NaN}'}, "fraction must be a number from 0 to 1, got nan"),
        ({"json": {"stage": 3}}, "'stage' is no field of the rollout (known: fraction, shadow, breaker)"),
        ({"json": []}, "a change must be an object with any of fraction, shadow, breaker, got []"),
        ({"content": "{"}, "a change must be JSON: "),
        ({"content": b"\xff\xfe"}, "a change must be JSON: "),
        ({"content": "[" * 3000}, "a change must be JSON: "),
        ({"content": " " * 10_000}, "a change has at most 4096 bytes, got 10000"),
    ],
)
def test_bad_change_is_a_400_that_names_field_rule_and_value(rolled, content, said):
    status, answer = control(rolled, **content)
    assert (status, answer["error"][: len(said)]) == (400, said)
    assert control(rolled)[1]["fraction"] == 0


def test_change_holds_for_the_next_requests_is_shown_and_kept(rolled, kept):
    gumbels, stocks = (
        rolled.tokens(**{**ASKED, "vllm_xargs": {"gumbel_sampler": arm}}) for arm in ("gumbel", "default")
    )
    assert gumbels != stocks
    assert rolled.tokens(**ASKED) == stocks
    assert control(rolled, {"fraction": 1})[1]["fraction"] == 1
    assert rolled.metric("vllm_gumbel_rollout_fraction") == 1
    assert json.loads(kept.read_text())["fraction"] == 1
    assert rolled.tokens(**ASKED) == gumbels
    assert control(rolled, {"fraction": 0})[0] == 200
    assert rolled.tokens(**ASKED) == stocks


def test_share_of_users_gets_the_gumbel_arm_and_keeps_it(rolled):
    """Thirty users, two requests each, one of two completions: those of a user have one arm."""
    control(rolled, {"fraction": 0.5})
    arms = []
    for user in range(30):
        before = by_arm(rolled)
        for count in (1, 2):
            keys = {"gumbel_rollout_key": f"user {user}"}
            rolled.complete(prompt="a", max_tokens=1, temperature=1, n=count, vllm_xargs=keys)
        ((arm, requests),) = (by_arm(rolled) - before).items()
        assert requests == 3
        arms.append(arm)
    assert 4 <= arms.count("gumbel") <= 26, "a fair coin leaves that range once in 2e-5 draws; the users are fixed"


def test_shadow_changes_nothing_that_a_client_sees(rolled):
    control(rolled, {"fraction": 0, "shadow": 0})
    bodies = [{**ASKED, "seed": seed, "logprobs": 2} for seed in range(8)]
    plain = [rolled.complete(**body).json()["choices"] for body in bodies]
    control(rolled, {"shadow": 1})
    sent = by_arm(rolled, "vllm_gumbel_sampled_tokens_total")
    shadowed = [rolled.complete(**body).json()["choices"] for body in bodies]
    for mine, before in zip(shadowed, plain, strict=True):
        assert mine[0]["token_ids"] == before[0]["token_ids"]
        assert mine[0]["logprobs"]["token_logprobs"] == pytest.approx(before[0]["logprobs"]["token_logprobs"], abs=1e-4)
    drawn = {labels["result"]: value for labels, value in rolled.samples("vllm_gumbel_shadow_tokens_total")}
    assert drawn["agree"] + drawn["differ"] == 8 * 12
    assert drawn["agree"] > 10
    assert by_arm(rolled, "vllm_gumbel_sampled_tokens_total") - sent == Counter(default=8 * 12)
    assert rolled.metric("vllm_gumbel_watched_tokens_total", arm="shadow") == 8 * 12
    assert rolled.metric("vllm_gumbel_faults_total") == 0


def test_stages_of_a_right_sampler_are_passed(rolled, tmp_path):
    """From shadow to all, under traffic, by a real Prometheus; no request is lost."""
    with prometheus(tmp_path, scraping(rolled.url)) as running, traffic(rolled) as clients:
        running.wait_for_scrape()
        done = rollout(
            "run", "--server", rolled.url, "--prometheus", running.url, *LENIENT, "--stages", "0:shadow,50,100"
        )
    assert done.returncode == 0, done.stdout + done.stderr
    assert control(rolled)[1]["fraction"] == 1
    assert clients.received["answered"] > 50
    assert set(clients.received) == {"answered"}


@pytest.fixture(scope="module")
def broken(model_path, tmp_path_factory):
    """A server whose gumbel arm draws too hot, and does not look at masks; it begins with a fraction of 0."""
    log = tmp_path_factory.mktemp("broken") / "log"
    flags = ("--sampler", "tests.broken:HotAndUnmasked", "--sampler-config", '{"watch": 1, "rollout_fraction": 0}')
    with serving(model_path, log, *flags, **PLUGINS) as server:
        yield server


def test_stage_in_which_nobody_gets_its_tokens_shows_that_a_sampler_is_broken(broken, tmp_path):
    """The run ends in shadow, sets the server back and says why; `check` on the same server does too."""
    evidence = tmp_path / "evidence.json"
    with prometheus(tmp_path, scraping(broken.url)) as running, traffic(broken) as clients:
        running.wait_for_scrape()
        arguments = ("--server", broken.url, "--prometheus", running.url, "--json", str(evidence))
        done = rollout("run", *arguments, *LENIENT, "--stages", "0:shadow,100", "--give-up", "20")
    assert done.returncode == 1, done.stdout + done.stderr
    assert "exactness" in done.stdout
    assert json.loads(evidence.read_text())
    state = control(broken)[1]
    assert (state["fraction"], state["shadow"]) == (0, 0)
    assert set(clients.received) == {"answered"}
    control(broken, {"shadow": 1})  # a run may end at evidence that is less than `check` asks for
    Clients(broken).post([{"temperature": 1.0, "vllm_xargs": {"gumbel_sampler": "default"}}], 64, times=24)
    checked = subprocess.run([COMMAND, "check", broken.url], capture_output=True, text=True, timeout=120)
    assert re.search(r"arm shadow does NOT draw exactly.*\blaw\b", checked.stdout), checked.stdout + checked.stderr
    assert checked.returncode == 1


def test_sampler_that_draws_masked_tokens_is_switched_off_by_itself(broken):
    """No request is lost, the operator reads why, and closing the breaker puts the arm back."""
    control(broken, {"fraction": 1})
    clients = Clients(broken)
    masked = {"temperature": 1.0, "allowed_token_ids": [100, 200, 300]}
    clients.post([masked], 24, times=4)
    assert broken.metric("vllm_gumbel_breaker_open") == 1
    before = by_arm(broken)
    clients.post([masked], 8, times=4)
    assert by_arm(broken) - before == Counter(default=4)
    state = control(broken)[1]
    assert state["breaker"]["open"]
    assert "outside_filter" in state["breaker"]["reason"]
    assert "the breaker opened: " in broken.log.read_text()
    assert control(broken, {"breaker": "close"})[1]["breaker"] == {"open": False, "reason": None}
    clients.post([{"temperature": 1.0}], 8, times=2)
    assert by_arm(broken) - before == Counter(default=4, gumbel=2)


@pytest.mark.parametrize("key", [None, ""])
def test_server_without_a_key_refuses_everybody(key, monkeypatch):
    monkeypatch.delenv(KEY_VARIABLE, raising=False)
    if key is not None:
        monkeypatch.setenv(KEY_VARIABLE, key)
    for given in ("", "Bearer", "Bearer ", "Bearer x"):
        status, said = refusal(given)
        assert (status, KEY_VARIABLE in said) == (403, True)
