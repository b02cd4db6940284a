"""Starts vLLM with the Gumbel sampler, waits until it answers, says how to ask it, and stops all of it at the end.

Run by scripts/serve with the Python of .venv. Nothing but the standard library is imported before the arguments are
read, so that `--help` needs no installation.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib.metadata
import json
import os
import signal
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from pathlib import Path
from typing import Any

DEFAULT_NAME = "SmolLM2-135M-Instruct"
# Where vLLM listens is decided here, since this program has to ask it there.
OWN_OPTIONS = ("--model", "--host", "--port", "--uds", "--ssl-keyfile", "--ssl-certfile", "--headless", "--root-path")
CPU_ENVIRONMENT = {"VLLM_CPU_KVCACHE_SPACE": "2"}
QUIET_ENVIRONMENT = {"VLLM_NO_USAGE_STATS": "1", "DO_NOT_TRACK": "1"}
SECONDS_BETWEEN_REPORTS = 10
SECONDS_TO_END = 30


class ServeError(Exception):
    """The server cannot be started as asked; the message says why and what to do."""


def say(text: str) -> None:
    """Prints one line of our own between those of vLLM, at once."""
    print(f"serve: {text}", flush=True)


def parse(argv: list[str]) -> argparse.Namespace:
    """Returns the options, and in `passed` what stands after `--`, for vLLM."""
    passed: list[str] = []
    if "--" in argv:
        at = argv.index("--")
        argv, passed = argv[:at], argv[at + 1 :]
    parser = argparse.ArgumentParser(
        prog="scripts/serve",
        usage="scripts/serve [--model NAME_OR_PATH] [--host HOST] [--port PORT] [-- ARGUMENTS OF VLLM ...]",
        description="Sets up .venv where needed and serves a model through vLLM with `--sampler gumbel`: an API like "
        "OpenAI's under http://HOST:PORT/v1 and metrics under /metrics. Ctrl-C stops all of it.",
        epilog="Arguments after `--` go to `vllm serve` unchanged, for instance: scripts/serve --port 8001 -- "
        "--max-num-seqs 16 --sampler default. Without an NVIDIA GPU vLLM gets 2 GiB for its KV cache "
        "(VLLM_CPU_KVCACHE_SPACE), and the default model 2048 tokens of context, uncompiled (--enforce-eager). "
        "vLLM's usage statistics are off (VLLM_NO_USAGE_STATS, DO_NOT_TRACK), and for a model from a local folder "
        "nothing is asked of a model hub (HF_HUB_OFFLINE). A variable that is set already is left as it is. Exit code: "
        "1 when it could "
        "not start, 130 after Ctrl-C, 143 after SIGTERM, else vLLM's own.",
    )
    parser.add_argument(
        "--model",
        metavar="NAME_OR_PATH",
        help=f"a folder, or a name on a model hub (default: {DEFAULT_NAME}, made from a package of PyPI)",
    )
    parser.add_argument("--host", default="127.0.0.1", help="the address to listen at (default: %(default)s)")
    parser.add_argument("--port", type=int, default=8000, help="the port to listen at (default: %(default)s)")
    options = parser.parse_args(argv)
    if not 1 <= options.port <= 65535:
        parser.error(f"--port must be from 1 to 65535, not {options.port}")
    for own in OWN_OPTIONS:
        if has_option(passed, own):
            before = " give it before `--`" if own in ("--model", "--host", "--port") else " run `vllm serve` itself"
            parser.error(f"{own} after `--` would leave this script without its server:{before}")
    options.passed = passed
    return options


def has_option(arguments: list[str], name: str) -> bool:
    """Whether `--name VALUE` or `--name=VALUE` is among the arguments."""
    return any(argument == name or argument.startswith(f"{name}=") for argument in arguments)


def check_address(host: str, port: int) -> None:
    """Raises ServeError if nothing could listen at this address, before vLLM spends a minute on finding out."""
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
        with socket.socket(family, kind, protocol) as probe:
            # As servers do: a port whose last connections are still closing is free.
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            probe.bind(address)
            probe.listen(1)
    except OSError as error:
        raise ServeError(f"cannot listen at {host} port {port}: {error}; try another --port or --host") from None


def local_path(model: str) -> Path | None:
    """Returns the folder or file that a model's name stands for, or None if it is a name on a hub.

    Raises:
        ServeError: it can only be a path, and nothing is there.
    """
    path = Path(model).expanduser()
    if path.exists():
        return path
    parts = Path(model).parts
    is_path = model.startswith((".", "/", "~")) or len(parts) > 2 or (len(parts) == 2 and Path(parts[0]).is_dir())
    if is_path:
        raise ServeError(f"there is no model at {path.absolute()}; --model takes a folder, or a name like owner/model")
    return None


def command_and_environment(options: argparse.Namespace) -> tuple[list[str], dict[str, str]]:
    """Returns the command line of vLLM and its environment; prepares the default model where it is asked for."""
    on_cpu = "cpu" in importlib.metadata.version("vllm")
    arguments: list[str] = []
    if options.model is None:
        from vllm_gumbel.default_model import ModelUnavailable, prepare

        try:
            model: str | Path = prepare()
        except ModelUnavailable as error:
            raise ServeError(str(error)) from None
        arguments += ["--served-model-name", DEFAULT_NAME]
        if on_cpu:
            # Compiling takes minutes at every start and gains a model of this size little.
            arguments += ["--max-model-len", "2048", "--enforce-eager"]
        local = True
    else:
        path = local_path(options.model)
        model, local = path or options.model, path is not None
    if not has_option(options.passed, "--sampler"):
        arguments += ["--sampler", "gumbel"]
    vllm = Path(sys.executable).with_name("vllm")
    command = [str(vllm), "serve", str(model), "--host", options.host, "--port", str(options.port), *arguments]
    defaults = QUIET_ENVIRONMENT | (CPU_ENVIRONMENT if on_cpu else {}) | ({"HF_HUB_OFFLINE": "1"} if local else {})
    return command + options.passed, defaults | os.environ


def base_url(host: str, port: int) -> str:
    """Returns the URL under which a server that listens at this address is reached from this machine."""
    host = {"0.0.0.0": "127.0.0.1", "::": "::1", "": "127.0.0.1"}.get(host, host)
    return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"


def get(url: str) -> bytes | None:
    """Returns what a GET request is answered with, None while there is no good answer."""
    # The server is on this machine: a proxy in the environment must not be asked.
    opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
    try:
        with opener.open(url, timeout=2) as answer:
            body: bytes = answer.read()
            return body
    except (OSError, urllib.error.URLError):
        return None


def greeting(url: str, fallback_name: str) -> str:
    """Returns how to use the server that has just come up."""
    models: dict[str, Any] = json.loads(get(f"{url}/v1/models") or "{}")
    name = models["data"][0]["id"] if models.get("data") else fallback_name
    request = {
        "model": name,
        "prompt": "Once upon a time, there was",
        "max_tokens": 32,
        "temperature": 0.7,
        "seed": 42,
        "vllm_xargs": {"gumbel_salt": 7},
    }
    return (
        f"ready: {url}/v1 serves {name}\n\n"
        f"  curl {url}/v1/completions -H 'Content-Type: application/json' -d '{json.dumps(request)}'\n\n"
        f"  metrics: {url}/metrics\n"
    )


def end(process: subprocess.Popen[bytes], signals: list[int]) -> None:
    """Ends vLLM and every process that it started: politely, and after a while or a second signal by force."""
    asked = len(signals)
    if process.poll() is None:
        say("stopping vLLM (once more to stop it by force)")
        # Its leader alone, which ends the others in order; whoever is left follows below.
        process.terminate()
        deadline = time.monotonic() + SECONDS_TO_END
        while process.poll() is None and time.monotonic() < deadline and len(signals) == asked:
            time.sleep(0.1)
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()


def serve(options: argparse.Namespace) -> int:
    """Runs vLLM until it ends or a signal asks to; returns the exit code."""
    check_address(options.host, options.port)
    command, environment = command_and_environment(options)
    url = base_url(options.host, options.port)
    signals: list[int] = []
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        if number == signal.SIGHUP and signal.getsignal(number) == signal.SIG_IGN:
            continue  # nohup
        signal.signal(number, lambda number, frame: signals.append(number))
    say(f"starting {' '.join(command)}")
    # A session of its own: Ctrl-C reaches only this program, which then ends the whole group.
    process = subprocess.Popen(command, env=environment, stdin=subprocess.DEVNULL, start_new_session=True)
    started = reported = time.monotonic()
    is_ready = False
    try:
        while not signals and process.poll() is None:
            now = time.monotonic()
            if not is_ready and get(f"{url}/health") is not None:
                is_ready = True
                print(f"\nserve: {greeting(url, command[2])}", flush=True)
            elif not is_ready and now - reported >= SECONDS_BETWEEN_REPORTS:
                reported = now
                say(f"waiting for vLLM, {now - started:.0f} s so far")
            time.sleep(0.25)
    finally:
        code = process.poll()
        end(process, signals)
    if code is not None:
        say(f"vLLM ended with exit code {code}" + ("" if is_ready else " before it was ready; its log above says why"))
        return code if code >= 0 else 128 - code
    return 128 + signals[0]


def main() -> int:
    """Runs the program; returns the exit code."""
    options = parse(sys.argv[1:])
    try:
        return serve(options)
    except ServeError as error:
        print(f"serve: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:  # before vLLM was started
        return 130


if __name__ == "__main__":
    sys.exit(main())
