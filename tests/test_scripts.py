"""The scripts and the console command: what they print, what they refuse, and that they end what they started."""

import importlib.util
import os
import shutil
import signal
import socket
import subprocess
import sys
import time
from importlib.metadata import version
from pathlib import Path

import pytest

from vllm_gumbel import default_model

ROOT = Path(__file__).resolve().parent.parent
SERVE_PROGRAM = ROOT / "scripts" / "serve_model.py"
COMMAND = Path(sys.executable).with_name("vllm-gumbel")


def run(*command: str | Path, **environment: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        command, capture_output=True, text=True, env=os.environ | environment, stdin=subprocess.DEVNULL
    )


@pytest.fixture(scope="module")
def serve_model():
    """The program behind scripts/serve as a module."""
    spec = importlib.util.spec_from_file_location("serve_model", SERVE_PROGRAM)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture
def checkout(tmp_path):
    """A checkout in which nothing has been set up."""
    shutil.copytree(ROOT / "scripts", tmp_path / "scripts", ignore=shutil.ignore_patterns("__pycache__"))
    shutil.copy(ROOT / "pyproject.toml", tmp_path)
    return tmp_path


# --------------------------------------------------------------------------------------------------------- vllm-gumbel


def test_model_command_prints_the_path_and_nothing_else(model_path):
    result = run(COMMAND, "model")
    assert (result.returncode, result.stdout) == (0, f"{model_path}\n")


def test_model_command_reports_an_error_on_standard_error(tmp_path):
    (tmp_path / "file").write_text("")
    result = run(COMMAND, "model", XDG_CACHE_HOME=str(tmp_path / "file"))
    assert (result.returncode, result.stdout) == (1, "")
    assert "XDG_CACHE_HOME" in result.stderr
    assert "Traceback" not in result.stderr


def test_command_shows_its_version_and_its_subcommands():
    assert run(COMMAND, "--version").stdout == f"vllm-gumbel {version('vllm-gumbel')}\n"
    assert "model" in run(COMMAND, "--help").stdout
    assert run(COMMAND).returncode == 2


# ------------------------------------------------------------------------------------------------------- scripts/setup


@pytest.mark.skipif(Path(sys.prefix) != ROOT / ".venv", reason="run by another Python than that of scripts/setup")
def test_second_setup_has_nothing_to_do():
    checked = run(ROOT / "scripts" / "setup", "--check")
    # Not run if it would change the packages under this test's feet.
    assert (checked.returncode, checked.stdout) == (0, "setup: nothing to do, .venv is complete\n"), checked
    assert run(ROOT / "scripts" / "setup").stdout == checked.stdout


@pytest.mark.parametrize("wanted", ["0.30.2", "0.34.0", "0.32", "1.0.0", "0.32.0; echo"])
def test_setup_refuses_an_unsupported_vllm_and_names_the_range(checkout, wanted):
    result = run(checkout / "scripts" / "setup", GUMBEL_VLLM_VERSION=wanted)
    assert result.returncode == 1
    assert f"{wanted} is not supported" in result.stderr
    assert "0.31.*, 0.32.*, 0.33.*" in result.stderr
    assert not (checkout / ".venv").exists()


def test_setup_names_the_interpreter_that_cannot_be_used(checkout):
    result = run(checkout / "scripts" / "setup", GUMBEL_PYTHON="/nowhere/python3.11")
    assert result.returncode == 1
    assert "3.11, 3.12, 3.13" in result.stderr
    assert "GUMBEL_PYTHON=/nowhere/python3.11" in result.stderr
    assert not (checkout / ".venv").exists()


def test_setup_keeps_an_environment_that_is_not_its_own(checkout):
    (checkout / ".venv").mkdir()
    (checkout / ".venv" / "precious").write_text("mine")
    result = run(checkout / "scripts" / "setup")
    assert result.returncode == 1
    assert "was not made by scripts/setup" in result.stderr
    assert (checkout / ".venv" / "precious").read_text() == "mine"


def test_setup_check_changes_nothing(checkout):
    result = run(checkout / "scripts" / "setup", "--check")
    assert (result.returncode, result.stdout) == (1, "setup: .venv is not complete, scripts/setup makes it so\n")
    assert not (checkout / ".venv").exists()


def test_setup_help_names_its_variables():
    result = run(ROOT / "scripts" / "setup", "--help")
    assert result.returncode == 0
    assert "GUMBEL_PYTHON" in result.stdout
    assert "GUMBEL_VLLM_VERSION" in result.stdout


# ------------------------------------------------------------------------------------------------------- scripts/serve


def test_serve_help_needs_no_setup(checkout):
    (checkout / "scripts" / "setup").write_text("#!/bin/sh\necho set up >&2\nexit 9\n")
    result = run(checkout / "scripts" / "serve", "--port", "8001", "--help", COLUMNS="200")
    assert (result.returncode, result.stderr) == (0, "")
    for option in ["--model", "--port", "--host", "--sampler gumbel"]:
        assert option in result.stdout


def test_serve_ends_with_the_exit_code_of_a_failed_setup(checkout):
    (checkout / "scripts" / "setup").write_text("#!/bin/sh\nexit 9\n")
    # What stands after "--" is not ours: this is no request for our help.
    assert run(checkout / "scripts" / "serve", "--", "--help").returncode == 9


def test_serve_refuses_a_taken_port_before_starting_anything():
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        result = run(sys.executable, SERVE_PROGRAM, "--port", str(port))
    assert (result.returncode, result.stdout) == (1, "")
    assert f"cannot listen at 127.0.0.1 port {port}" in result.stderr
    assert "Traceback" not in result.stderr


@pytest.mark.parametrize("model", ["./absent", "/absent/model", "~/absent-model", "scripts/absent", "a/b/c"])
def test_serve_refuses_a_path_where_nothing_is(model, free_port):
    result = subprocess.run(
        [sys.executable, SERVE_PROGRAM, "--model", model, "--port", free_port], capture_output=True, text=True, cwd=ROOT
    )
    assert (result.returncode, result.stdout) == (1, "")
    assert "there is no model at" in result.stderr
    assert model.strip("./~") in result.stderr


@pytest.fixture
def free_port():
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return str(probe.getsockname()[1])


@pytest.mark.parametrize("model", ["gpt2", "HuggingFaceTB/SmolLM2-135M-Instruct"])
def test_name_on_a_hub_is_no_path(serve_model, model):
    assert serve_model.local_path(model) is None


@pytest.mark.parametrize("arguments", [["--port", "0"], ["--port", "65536"], ["--", "--port=1"], ["--", "--uds", "x"]])
def test_serve_refuses_what_it_could_not_watch(arguments):
    result = run(sys.executable, SERVE_PROGRAM, *arguments)
    assert result.returncode == 2
    assert "scripts/serve: error:" in result.stderr


def test_serve_passes_arguments_on_and_yields_to_them(serve_model, model_path, monkeypatch):
    monkeypatch.delenv("VLLM_NO_USAGE_STATS")
    monkeypatch.setenv("VLLM_CPU_KVCACHE_SPACE", "7")
    command, environment = serve_model.command_and_environment(serve_model.parse(["--port", "8123"]))
    assert command[1:3] == ["serve", str(model_path)]
    assert command[command.index("--sampler") + 1] == "gumbel"
    assert command[command.index("--port") + 1] == "8123"
    assert command[command.index("--served-model-name") + 1] == default_model.MODEL_NAME
    assert (environment["VLLM_NO_USAGE_STATS"], environment["VLLM_CPU_KVCACHE_SPACE"]) == ("1", "7")

    own = ["--", "--sampler=default", "--max-num-seqs", "4"]
    command, _ = serve_model.command_and_environment(serve_model.parse(own))
    assert "--sampler" not in command
    assert command[-3:] == own[1:]


@pytest.mark.parametrize(
    ("host", "url"),
    [("127.0.0.1", "http://127.0.0.1:80"), ("0.0.0.0", "http://127.0.0.1:80"), ("::", "http://[::1]:80")],
)
def test_server_on_every_address_is_asked_on_this_machine(serve_model, host, url):
    assert serve_model.base_url(host, 80) == url


def is_running(pid: int) -> bool:
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except (FileNotFoundError, ProcessLookupError):  # gone before it was opened, or before it was read
        return False
    return state != "Z"


@pytest.mark.parametrize(
    ("leader", "signals"),
    [
        pytest.param("sleep 1000 & echo $!; wait", [signal.SIGINT], id="orphan"),
        pytest.param("trap '' TERM; sleep 1000 & echo $!; wait", [signal.SIGINT], id="deaf"),
    ],
)
def test_stopping_ends_the_leader_and_all_that_it_started(serve_model, monkeypatch, leader, signals):
    monkeypatch.setattr(serve_model, "SECONDS_TO_END", 0.5)
    process = subprocess.Popen(["bash", "-c", leader], stdout=subprocess.PIPE, start_new_session=True)
    child = int(process.stdout.readline())
    assert is_running(child)
    serve_model.end(process, signals)
    assert process.poll() is not None
    while is_running(child):  # the signal is on its way; the test's own limit ends this
        time.sleep(0.01)


def test_default_name_is_that_of_the_default_model(serve_model):
    assert serve_model.DEFAULT_NAME == default_model.MODEL_NAME
