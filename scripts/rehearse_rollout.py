#!/usr/bin/env python
"""Rehearses a rollout: a real server under traffic, a real Prometheus, and `vllm-gumbel rollout run` on both.

    .venv/bin/python scripts/rehearse_rollout.py --hold 60s
    .venv/bin/python scripts/rehearse_rollout.py --hold 60s --sampler tests.broken:TooHot

The server begins with everything drawn by vLLM's own sampler. With a sampler that is broken on purpose the run should
end at the first stage that can show it, with the server set back. Printed: what the run says, and then how many tokens
either arm had drawn, how long it took from the failed look until the server was back, and what the clients saw.
"""

import argparse
import contextlib
import itertools
import json
import os
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections import Counter
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
os.environ.update(HF_HUB_OFFLINE="1", VLLM_NO_USAGE_STATS="1", DO_NOT_TRACK="1")
os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", "2")

KEY = "rehearsal"
SETTINGS = [{"temperature": 1.0}, {"temperature": 0.9, "top_p": 0.95}, {"temperature": 0.8, "top_k": 50}]
TOPICS = ["the sea", "a lost key", "two cities", "bread", "the moon", "a letter", "trains", "an old house"]


def parse_arguments() -> argparse.Namespace:
    """Return the command line's choices."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sampler", default="gumbel", help="what the gumbel arm is, such as tests.broken:TooHot")
    parser.add_argument("--stages", default="0:shadow,25,50,100")
    parser.add_argument("--hold", default="60s")
    parser.add_argument("--clients", type=int, default=24, help="requests in flight")
    parser.add_argument("--tokens", type=int, default=8, help="tokens of a request")
    parser.add_argument("further", nargs="*", help="further arguments of `vllm-gumbel rollout run`, behind --")
    return parser.parse_args()


class Traffic:
    """Clients that send one request after another until they are told to stop.

    Attributes:
        seen: requests by what became of them.
        times: seconds that each took.
    """

    def __init__(self, url: str, clients: int, tokens: int) -> None:
        self.seen: Counter[str] = Counter()
        self.times: list[float] = []
        self._url, self._tokens = url, tokens
        self._stop = threading.Event()
        self._numbers = itertools.count()
        self._threads = [threading.Thread(target=self._client, daemon=True) for _ in range(clients)]

    def start(self) -> None:
        """Begin to send."""
        for thread in self._threads:
            thread.start()

    def end(self) -> None:
        """Stop, when what is in flight has come."""
        self._stop.set()
        for thread in self._threads:
            thread.join()

    def _client(self) -> None:
        import httpx

        with httpx.Client(base_url=self._url, timeout=120) as client:
            while not self._stop.is_set():
                began, number = time.monotonic(), next(self._numbers)
                try:
                    answer = client.post("/v1/completions", json=self._request(number))
                    self.seen["answered" if answer.status_code == 200 else f"HTTP {answer.status_code}"] += 1
                except httpx.HTTPError as error:
                    self.seen[f"lost: {type(error).__name__}"] += 1
                self.times.append(time.monotonic() - began)

    def _request(self, number: int) -> dict[str, Any]:
        return {
            "model": "smollm2",
            "prompt": f"Write a story about {TOPICS[number % len(TOPICS)]}, number {number}.\n",
            "max_tokens": self._tokens,
            **SETTINGS[number % len(SETTINGS)],
        }


def main() -> int:
    """Run the rehearsal, and return the exit code of the rollout."""
    from tests.prometheus import prometheus, scraping
    from tests.serving import serving
    from vllm_gumbel.default_model import prepare

    arguments = parse_arguments()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # so that the servers are stopped too
    with contextlib.ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        (folder / "prometheus").mkdir()
        settings = json.dumps({"rollout_fraction": 0, "watch": 1})
        flags = ("--sampler", arguments.sampler, "--sampler-config", settings)
        plugins = {"VLLM_PLUGINS": "vllm_gumbel,vllm_gumbel_rollout", "GUMBEL_ADMIN_KEY": KEY}
        print("starting the server and Prometheus", file=sys.stderr)
        server = stack.enter_context(serving(prepare(), folder / "log", *flags, **plugins))
        running = stack.enter_context(prometheus(folder / "prometheus", scraping(server.url)))
        traffic = Traffic(server.url, arguments.clients, arguments.tokens)
        traffic.start()
        stack.callback(traffic.end)
        time.sleep(15)  # traffic before the baseline
        began = time.monotonic()
        command = [Path(sys.executable).with_name("vllm-gumbel"), "rollout", "run", "--server", server.url]
        command += ["--prometheus", running.url, "--stages", arguments.stages, "--hold", arguments.hold]
        done = subprocess.run(
            [*command, "--json", str(folder / "evidence.json"), *arguments.further],
            env={**os.environ, "GUMBEL_ADMIN_KEY": KEY, "COLUMNS": "150"},
        )
        seconds = time.monotonic() - began
        sampled = {labels["arm"]: int(value) for labels, value in server.samples("vllm_gumbel_sampled_tokens_total")}
        shadow = int(server.metric("vllm_gumbel_shadow_tokens_total"))
        status = server.client.get("/gumbel/rollout", headers={"Authorization": f"Bearer {KEY}"}).json()
        traffic.end()
        lost = {what: count for what, count in traffic.seen.items() if what != "answered"}
        print(f"\nexit code {done.returncode} after {seconds:.0f} s; the server's rollout now: {json.dumps(status)}")
        print(f"tokens drawn by arm: {sampled}, in shadow: {shadow}")
        print(f"requests answered: {traffic.seen['answered']}, others: {lost or 'none'}")
        print(f"seconds of a request: median {sorted(traffic.times)[len(traffic.times) // 2]:.1f}")
    return done.returncode


if __name__ == "__main__":
    sys.exit(main())
