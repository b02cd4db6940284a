"""The gate runner with a real endpoint, real counters and a real Prometheus: stages, faults, and where it ends."""

import json
import signal
import subprocess
import sys
import time
from dataclasses import asdict, replace
from io import StringIO
from pathlib import Path

import pytest
from rich.console import Console

from tests.control import KEY, controlled
from tests.prometheus import prometheus, scraping
from tests.test_rollout_gates import BASELINE
from vllm_gumbel.cli import main
from vllm_gumbel.metrics.catalogue import AnomalyKind
from vllm_gumbel.rollout import holding, runner
from vllm_gumbel.rollout.client import Control
from vllm_gumbel.rollout.counts import ArmCounts
from vllm_gumbel.rollout.history import Prometheus
from vllm_gumbel.rollout.journal import Journal, JournalError, Keeper
from vllm_gumbel.rollout.runner import Plan, Runner
from vllm_gumbel.rollout.stages import parse_stages

COMMAND = Path(sys.executable).with_name("vllm-gumbel")
HOLD = 2.0
#: Of a hold that something happens in: a machine too busy to scrape in time must still be in it.
AMID = 6.0
DEFAULT = {"default": ArmCounts(240_000.0, 30_000.0, {})}


@pytest.fixture(scope="module")
def running(tmp_path_factory):
    """A server and the Prometheus that scrapes it every second."""
    folder = tmp_path_factory.mktemp("prometheus")
    with controlled() as server, prometheus(folder, scraping(server.url)) as scraped:
        scraped.wait_for_scrape()
        yield server, scraped


@pytest.fixture
def server(running):
    """The server as new, but for its counters."""
    made = running[0]
    made.fraction, made.shadow, made.busy, made.slow = 0.0, 0.0, True, 1.0
    made.spoilt, made.answers, made.changes = {}, [], []
    return made


class Run:
    """A run of a prepared rollout, whose baseline is known.

    Attributes:
        history: its Prometheus; may be changed while it runs.
        said: what it printed, tables and notes.
    """

    def __init__(self, server, url, folder, stages="50", **changes):
        self.said, self.keeper = StringIO(), Keeper(folder / "state.json")
        plan = Plan(server.url, parse_stages(stages), stages, HOLD, report=folder / "report.json", give_up=2)
        self.plan = replace(plan, **changes)
        if not self.keeper.path.exists():
            prepared = Journal(server.url, stages, self.plan.hold, stage=0, baseline=BASELINE, earlier=DEFAULT)
            self.keeper.save(prepared)
        self.history = Prometheus(url)
        consoles = (Console(file=self.said, width=200) for _ in range(2))
        self.runner = Runner(self.plan, Control(server.url, KEY), self.history, self.keeper, *consoles)

    def __call__(self):
        return self.runner.run()

    def report(self):
        return json.loads(self.plan.report.read_text())


@pytest.fixture
def prepared(server, running, tmp_path):
    return lambda stages="50", **changes: Run(server, running[1].url, tmp_path, stages, **changes)


def amid_a_hold(run, act):
    """Let something happen as soon as a run has set a stage and holds it, which no clock of the test can tell."""
    holder = run.runner._holder
    peek = holder._peek

    def act_and_peek(*arguments):
        holder._peek = peek
        act()
        return peek(*arguments)

    holder._peek = act_and_peek


def test_all_stages_are_passed_and_the_evidence_is_kept(server, running, tmp_path, monkeypatch, capsys):
    monkeypatch.setenv("GUMBEL_ADMIN_KEY", KEY)
    report, state = tmp_path / "report.json", tmp_path / "state.json"
    files = ["--json", str(report), "--state", str(state)]
    where = ["--server", server.url, "--prometheus", running[1].url]
    arguments = ["rollout", "run", *where, "--stages", "0:shadow,50,100", "--hold", f"{HOLD}s", *files]
    assert main([*arguments, "--dry-run"]) == 0
    assert "baseline, 0% with shadow, 50%, 100%; 2s each, 8s at least" in capsys.readouterr().out
    assert (server.changes, state.exists(), report.exists()) == ([], False, False)
    assert main(arguments) == 0
    out, err = capsys.readouterr()
    assert server.changes == [(0.0, 0.0), (0.0, 1.0), (0.5, 0.0), (1.0, 0.0)]
    assert "the server stands at fraction 1, shadow 0" in err
    found = json.loads(report.read_text())
    stages = ["baseline", "0% with shadow", "50%", "100%"]
    outcomes = [(look["stage"], look["outcome"]) for look in found["looks"]]
    # A machine too busy to scrape in time may need a further look; none may fail.
    assert [each for each in outcomes if each[1] != "unknown"] == [(stage, "pass") for stage in stages]
    assert found["exit_code"] == 0
    repetition = next(each for each in found["looks"][-1]["results"] if each["gate"] == "gumbel repetition")
    assert (repetition["outcome"], "default arm 0 of" in repetition["says"]) == ("pass", True)
    assert KEY not in out + err + report.read_text() + state.read_text()
    assert main(arguments) == 2
    assert "has ended (pass); remove it to begin anew" in capsys.readouterr().err
    assert json.loads(report.read_text()) == found


def test_arm_that_is_worse_is_found_and_set_back(server, prepared):
    server.spoilt = {AnomalyKind.REPETITION: 6}
    run = prepared("50,100")
    assert run() == 1
    assert server.changes == [(0.5, 0.0), (0.0, 0.0)]
    assert "50% failed: gumbel repetition; setting back" in run.said.getvalue()
    found = run.report()
    assert (found["exit_code"], found["looks"][-1]["outcome"]) == (1, "fail")
    assert found["set_back_seconds"] > 0
    again = prepared("50,100")
    assert again() == 2
    assert "has ended (fail)" in again.said.getvalue()


def test_what_no_chance_explains_ends_a_hold_early(server, prepared):
    server.spoilt = {AnomalyKind.OUTSIDE_FILTER: 1}
    run = prepared(hold=20.0)
    assert run() == 1
    (look,) = run.report()["looks"]
    assert look["ended"] - look["began"] < 15
    assert server.changes == [(0.5, 0.0), (0.0, 0.0)]


def test_setting_back_is_tried_until_it_works(server, prepared, monkeypatch):
    monkeypatch.setattr(runner, "BACKOFF", (0.1, 0.1))
    server.spoilt = {AnomalyKind.OUTSIDE_FILTER: 1}
    server.answers = [200, 503, 503]
    run = prepared()
    assert run() == 1
    assert server.fraction == 0
    assert run.said.getvalue().count("not set back: ") == 2


def test_server_that_cannot_be_set_back_is_said_loudly_and_tried_again_by_the_next_run(server, prepared, monkeypatch):
    monkeypatch.setattr(runner, "BACKOFF", (0.1,))
    server.spoilt = {AnomalyKind.OUTSIDE_FILTER: 1}
    server.answers = [200, 503, 503]
    run = prepared()
    assert run() == 2
    assert "THE SERVER COULD NOT BE SET BACK" in run.said.getvalue()
    assert run.report()["exit_code"] == 2
    assert server.fraction == 0.5
    assert prepared()() == 1
    assert server.fraction == 0


@pytest.mark.parametrize("back", [False, True])
def test_stage_without_traffic_is_unknown_and_holds_until_it_gives_up(back, server, prepared):
    server.busy = False
    run = prepared(hold=1.5, back_when_unknown=back)
    assert run() == 3
    assert [look["outcome"] for look in run.report()["looks"]] == ["unknown", "unknown"]
    assert "50% is unknown after 2 looks" in run.said.getvalue()
    assert server.changes == [(0.5, 0.0)] + [(0.0, 0.0)] * back
    results = [each for look in run.report()["looks"] for each in look["results"]]
    rates = [each["rate"] for each in results if each["gate"] == "gumbel exactness"]
    assert rates == pytest.approx([1e-3 / 8 / 4 / split for split in (2, 6)])


def test_another_process_goes_on_where_a_killed_one_was(server, running, prepared, tmp_path, monkeypatch):
    monkeypatch.setenv("GUMBEL_ADMIN_KEY", KEY)
    run = prepared(hold=3.0)
    where = ["--server", server.url, "--prometheus", running[1].url, "--state", str(run.keeper.path)]
    process = subprocess.Popen(
        [COMMAND, "rollout", "run", *where, "--stages", "50", "--hold", "3s"],
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    try:
        deadline = time.monotonic() + 60
        while json.loads(run.keeper.path.read_text())["began"] is None and time.monotonic() < deadline:
            time.sleep(0.05)
        second = prepared(hold=3.0)
        assert second() == 2
        assert "another run is at work with" in second.said.getvalue()
    finally:
        process.kill()
        process.wait()
    assert server.changes == [(0.5, 0.0)]
    began = json.loads(run.keeper.path.read_text())["began"]
    assert run() == 0
    assert "going on with 50%" in run.said.getvalue()
    assert server.changes == [(0.5, 0.0)]
    assert run.report()["looks"][0]["began"] == began


def test_server_that_restarts_is_set_again_and_counted_anew(server, prepared):
    run = prepared(hold=AMID)
    amid_a_hold(run, server.restart)
    assert run() == 0
    assert server.changes == [(0.5, 0.0), (0.5, 0.0)]
    looks = run.report()["looks"]
    assert [look["outcome"] for look in looks] == ["unknown", "pass"]
    assert looks[0]["results"][0]["says"].startswith("restarted: job0 ")


def test_fraction_that_somebody_else_set_is_left_there(server, prepared, monkeypatch):
    run = prepared(hold=AMID)

    def somebody():
        monkeypatch.setattr(holding, "LONGEST_PATIENCE", 1.5)
        server.fraction = 0.25

    amid_a_hold(run, somebody)
    assert run() == 3
    assert "fraction 0.25, shadow 0, which this run did not set" in run.said.getvalue()
    assert "the server stands at fraction 0.25" in run.said.getvalue()
    assert server.changes == [(0.5, 0.0)]


def test_prometheus_that_is_away_for_a_while_is_waited_for(server, prepared):
    run = prepared(hold=AMID)
    url, say = run.history.url, run.runner._holder.say

    def say_and_return(text):
        say(text)
        run.history.url = url

    def leave():
        run.history.url = "http://127.0.0.1:1"
        run.runner._holder.say = say_and_return

    amid_a_hold(run, leave)
    assert run() == 0
    assert "nothing listens there; asking again" in run.said.getvalue()


def test_prometheus_that_stays_away_leaves_the_fraction_where_it_is(server, prepared):
    run = prepared(hold=AMID, give_up=1)
    amid_a_hold(run, lambda: setattr(run.history, "url", "http://127.0.0.1:1"))
    assert run() == 3
    assert server.changes == [(0.5, 0.0)]
    assert "the server stands at fraction 0.5" in run.said.getvalue()


def test_prometheus_that_does_not_know_the_server_makes_a_stage_unknown(server, prepared, monkeypatch):
    monkeypatch.setattr(holding, "SHORTEST_PATIENCE", 1.0)
    run = prepared(hold=1.0, give_up=1)
    run.history.selector = 'job="none"'
    assert run() == 3
    says = run.report()["looks"][0]["results"][0]["says"]
    assert says.startswith("Prometheus did not show in 1s what was set: rollout_fraction no vllm_gumbel_rollout")


def test_clock_that_goes_back_begins_the_window_anew(server, prepared, monkeypatch):
    run, true_time = prepared(hold=AMID, give_up=1), Prometheus.time
    shift = {"seconds": 0.0}
    monkeypatch.setattr(run.history, "time", lambda: true_time(run.history) - shift["seconds"])
    amid_a_hold(run, lambda: shift.update(seconds=100.0))
    assert run() == 3
    assert run.report()["looks"][0]["results"][0]["says"] == "Prometheus' clock went back"
    assert json.loads(run.keeper.path.read_text())["began"] is None


@pytest.fixture
def interruptible():
    """Let an interruption reach this process, which ignores it where a shell started it in the background."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


@pytest.mark.usefixtures("interruptible")
def test_interrupted_run_says_where_the_fraction_stands(server, prepared):
    run = prepared(hold=30.0)
    amid_a_hold(run, lambda: signal.raise_signal(signal.SIGINT))
    assert run() == 130
    assert "interrupted; the server stands at fraction 0.5" in run.said.getvalue()
    assert server.changes == [(0.5, 0.0)]


@pytest.mark.parametrize(
    ("wrong", "reason"),
    [
        ("key", "the server refuses the key"),
        ("prometheus", "nothing listens there"),
        ("server", "nothing listens there; where the server stands is not known"),
    ],
)
def test_run_that_cannot_talk_changes_nothing(wrong, reason, server, prepared):
    run = prepared()
    if wrong == "key":
        run.runner._control._headers["Authorization"] = "Bearer wrong"
    elif wrong == "server":
        run.runner._control.address = "http://127.0.0.1:1/gumbel/rollout"
    else:
        run.history.url = "http://127.0.0.1:1"
    assert run() == 2
    assert reason in run.said.getvalue()
    assert server.changes == []


FRESH = Journal("http://a", "1,5", 600.0)


@pytest.mark.parametrize(
    ("content", "reason"),
    [
        ({**asdict(FRESH), "version": 1, "server": "http://b"}, "a run with server http://b, not http://a"),
        ({**asdict(FRESH), "version": 1, "stages": "1"}, "a run with stages 1, not 1,5"),
        ({**asdict(FRESH), "version": 1, "hold": 60.0}, "a run with hold 60.0, not 600.0"),
        ({**asdict(FRESH), "version": 2}, "is of version 2"),
        (asdict(FRESH), "no state of a rollout"),
        ({"version": 1}, "no state of a rollout"),
        ({**asdict(FRESH), "version": 1, "stage": "1"}, "no state of a rollout"),
        ({**asdict(FRESH), "version": 1, "began": "now"}, "no state of a rollout"),
        ({**asdict(FRESH), "version": 1, "baseline": {"seconds": 1}}, "no state of a rollout"),
        ([], "no state of a rollout"),
    ],
    ids=range(10),
)
def test_state_of_another_run_is_refused_in_words(content, reason, tmp_path):
    path = tmp_path / "state.json"
    path.write_text(json.dumps(content))
    with pytest.raises(JournalError) as refused:
        Keeper(path).load(FRESH)
    assert str(refused.value).startswith(str(path))
    assert reason in str(refused.value)


def test_state_survives_its_file(tmp_path):
    keeper = Keeper(tmp_path / "state.json")
    assert keeper.load(FRESH) is FRESH
    journal = replace(FRESH, stage=1, began=1.5, look=2, holds=3, baseline=BASELINE, earlier=DEFAULT)
    keeper.save(journal)
    assert keeper.load(FRESH) == journal
    assert [path.name for path in tmp_path.iterdir()] == ["state.json"]
    with pytest.raises(JournalError, match="cannot be written"):
        Keeper(tmp_path / "none" / "state.json").save(journal)
    (tmp_path / "state.json").write_text("{")
    with pytest.raises(JournalError, match="no state of a rollout"):
        keeper.load(FRESH)
