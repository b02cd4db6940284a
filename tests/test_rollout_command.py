"""`vllm-gumbel rollout`: what it prints, its exit codes, and what it refuses."""

import json
import subprocess
import sys

import pytest

from tests.control import KEY, controlled
from tests.test_rollout_gates import page_of, window_of
from vllm_gumbel.cli import main
from vllm_gumbel.metrics import catalogue
from vllm_gumbel.metrics.catalogue import AnomalyKind
from vllm_gumbel.rollout.history import Prometheus

URL = "http://127.0.0.1:1"


@pytest.fixture
def key(monkeypatch):
    monkeypatch.setenv("GUMBEL_ADMIN_KEY", KEY)


@pytest.fixture
def counted(monkeypatch):
    """Make a page what Prometheus has of the window that is asked for."""

    def use(page):
        monkeypatch.setattr(Prometheus, "time", lambda self: 1000.0)
        monkeypatch.setattr(Prometheus, "window", lambda self, began, ended: window_of(page))

    return use


def called(capsys, *arguments):
    code = main(["rollout", *arguments])
    return code, *capsys.readouterr()


def test_state_is_printed_and_set(key, capsys):
    with controlled() as server:
        assert called(capsys, "status", server.url) == (
            0,
            "fraction 0, shadow 0, breaker closed, workers 1\n",
            "",
        )
        assert called(capsys, "set", "5%", server.url)[1] == "fraction 0.05, shadow 0, breaker closed, workers 1\n"
        assert called(capsys, "shadow", "1", server.url)[1] == "fraction 0.05, shadow 1, breaker closed, workers 1\n"
        assert called(capsys, "close", server.url)[0] == 0
        assert called(capsys, "off", server.url)[1] == "fraction 0, shadow 0, breaker closed, workers 1\n"
        assert server.changes == [(0.05, 0.0), (0.05, 1.0), (0.05, 1.0), (0.0, 0.0)]


def test_key_comes_from_the_environment_or_a_file(capsys, tmp_path, monkeypatch):
    monkeypatch.delenv("GUMBEL_ADMIN_KEY", raising=False)
    file = tmp_path / "key"
    with controlled() as server:
        code, out, err = called(capsys, "status", server.url)
        assert (code, out) == (2, "")
        assert "no key: set GUMBEL_ADMIN_KEY, or name a file" in err
        file.write_text(KEY + "\n")
        assert called(capsys, "status", server.url, "--key-file", str(file))[0] == 0
        file.write_text("wrong-word")
        code, _, err = called(capsys, "status", server.url, "--key-file", str(file))
        assert code == 2
        assert "refuses the key" in err
        assert "wrong-word" not in err
    assert called(capsys, "status", URL, "--key-file", str(tmp_path / "none"))[0] == 2


def test_server_that_is_away_exits_2(key, capsys):
    code, out, err = called(capsys, "off", URL)
    assert (code, out) == (2, "")
    assert err == f"vllm-gumbel rollout: {URL}/gumbel/rollout: connection refused: nothing listens there\n"


@pytest.mark.parametrize(
    ("spoilt", "code", "outcome"),
    [(0, 0, "pass"), (60, 1, "fail")],
)
def test_window_is_judged_once(spoilt, code, outcome, counted, capsys, tmp_path):
    page = page_of()
    page.spoil(AnomalyKind.REPETITION, spoilt)
    counted(page)
    report = tmp_path / "report.json"
    found, out, _ = called(capsys, "judge", "--prometheus", URL, "--window", "10m", "--json", str(report))
    assert found == code
    assert f"The last 10m: {outcome}" in out
    assert json.loads(report.read_text())["outcome"] == outcome
    assert called(capsys, "judge", "--prometheus", URL, "--json", str(tmp_path / "none" / "x"))[0] == 2


def test_arms_that_are_judged_are_those_that_draw(counted, capsys):
    counted(page_of(0.0, 1.0))
    code, out, _ = called(capsys, "judge", "--prometheus", URL)
    assert (code, "shadow exactness" in out, "gumbel exactness" in out) == (0, True, False)
    counted(page_of(0.0))
    code, out, _ = called(capsys, "judge", "--prometheus", URL)
    assert (code, "gumbel traffic" in out, "nothing to judge" in out) == (3, True, True)


def test_gate_may_be_ignored_and_limits_given(counted, capsys):
    page = page_of()
    page.spoil(AnomalyKind.REPETITION, 60)
    page.child(catalogue.TOKEN_FREQUENCY_KL, reference="default").set(0.3)
    counted(page)
    judge = ["judge", "--prometheus", URL]
    assert called(capsys, *judge, "--ignore", "repetition")[0] == 0
    assert called(capsys, *judge, "--ignore", "repetition", "--kl", "0.1")[0] == 1
    assert called(capsys, *judge, "--ratio", "1e5")[0] == 3  # nothing would be found


@pytest.mark.parametrize(
    ("arguments", "reason"),
    [
        ((), "ACTION"),
        (("set", "2", URL), "a share must be from 0 to 1"),
        (("set", "nan", URL), "is no share"),
        (("shadow", "101%", URL), "a share must be from 0 to 1"),
        (("status", "ftp://x"), "is no address"),
        (("run", "--server", URL, "--prometheus", URL, "--stages", "5,1"), "stage '1' is not above 5%"),
        (("run", "--server", URL, "--prometheus", URL, "--hold", "10"), "is no duration"),
        (("run", "--server", URL, "--prometheus", URL, "--give-up", "0"), "must be at least 1"),
        (("run", "--server", URL), "--prometheus"),
        (("run", "--prometheus", URL), "--server"),
        (("judge", "--prometheus", URL, "--alpha", "0"), "above 0 and below 1"),
        (("judge", "--prometheus", URL, "--ratio", "nan"), "above 0 and below a million"),
        (("judge", "--prometheus", URL, "--ignore", "traffic"), "invalid choice: 'traffic'"),
    ],
    ids=range(13),
)
def test_wrong_usage_exits_2_and_says_why(arguments, reason, capsys):
    with pytest.raises(SystemExit) as exited:
        main(["rollout", *arguments])
    assert exited.value.code == 2
    assert reason in capsys.readouterr().err


def test_command_needs_neither_torch_nor_vllm():
    code = "import sys, vllm_gumbel.rollout.command; print([m for m in ('torch', 'vllm', 'numba') if m in sys.modules])"
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert result.stdout.strip() == "[]"
