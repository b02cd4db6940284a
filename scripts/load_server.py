#!/usr/bin/env python
"""Keeps many streams in flight against a stock server and one with `--sampler gumbel`, in turns, and compares them.

    .venv/bin/python scripts/load_server.py
    .venv/bin/python scripts/load_server.py --streams 64 --minutes 1 --turn-minutes 0.5
    .venv/bin/python scripts/load_server.py --layers 2 --dtype float32  # on two cores without AVX-512

Both servers run all the time with equal flags; during a turn one of them has all the streams, and the other idles. The
order within a pair of turns changes from pair to pair. Both get the same requests in the same order: every kind of
parameters, prompts and lengths that differ. Whoever's stream ends sends the next request until the turn is over; then
what is in flight is waited for, and counts as requests but in no rate or latency. A request is an error unless it ends
with a finish reason and as many tokens as its usage says. Printed: a table with tokens a second, time to the first
token and between two tokens, and the memory of the worker after a warm-up and at the end; each ratio is the median over
pairs of turns, with the least and the greatest. Exit code 0 if there was no error, else 1. The last line is JSON.
"""

import argparse
import asyncio
import contextlib
import itertools
import json
import os
import random
import re
import signal
import statistics
import sys
import tempfile
import time
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
os.environ.update(HF_HUB_OFFLINE="1", VLLM_NO_USAGE_STATS="1", DO_NOT_TRACK="1", GOMP_SPINCOUNT="0")
os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", "2")

ARMS = {"stock": (), "gumbel": ("--sampler", "gumbel")}
#: What requests ask for, one after the other.
KINDS: tuple[dict[str, Any], ...] = (
    {"temperature": 1.0},
    {"temperature": 0.8, "seed": 1},
    {"temperature": 0.0},
    {"temperature": 0.9, "top_p": 0.95},
    {"temperature": 0.8, "top_k": 50},
    {"temperature": 0.9, "min_p": 0.05},
    {"temperature": 0.9, "repetition_penalty": 1.1, "presence_penalty": 0.2},
    {"temperature": 0.7, "logprobs": 5},
    {"temperature": 0.8, "top_k": 100, "top_p": 0.9, "seed": 2},
    {"temperature": 1.0, "frequency_penalty": 0.3, "seed": 3},
)
WORDS = (
    "the",
    "sea",
    "a",
    "lost",
    "key",
    "two",
    "cities",
    "bread",
    "moon",
    "letter",
    "trains",
    "old",
    "house",
    "winter",
)
LATENCIES = ("first token, ms", "between tokens, ms")
PERCENTILES = (50, 90, 99)


def parse_arguments() -> argparse.Namespace:
    """Return the command line's choices."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--streams", type=int, default=256, help="requests in flight")
    parser.add_argument("--minutes", type=float, default=10.0, help="of load on each server")
    parser.add_argument("--turn-minutes", type=float, default=2.5, help="of a turn")
    parser.add_argument(
        "--dtype", default="bfloat16", help="of the model; float32 is faster on a CPU without AVX-512; default bfloat16"
    )
    parser.add_argument(
        "--layers",
        type=int,
        help="of the model, the first ones, to serve many streams on a small machine; default all",
    )
    parser.add_argument("--model", type=Path, help="folder of a model; default: what `vllm-gumbel model` prepares")
    return parser.parse_args()


def request(number: int) -> dict[str, Any]:
    """Return the body of a request; equal numbers give equal requests."""
    chosen = random.Random(number)
    kind = dict(KINDS[number % len(KINDS)])
    if "seed" in kind:
        kind["seed"] = number
    return {
        "model": "smollm2",
        "prompt": f"{number}: " + " ".join(chosen.choices(WORDS, k=chosen.randint(4, 120))),
        "max_tokens": chosen.randint(16, 96),
        "ignore_eos": True,
        "stream": True,
        "stream_options": {"include_usage": True},
        "return_token_ids": True,
        **kind,
    }


@dataclass
class Turn:
    """What a server did in a turn.

    Attributes:
        requests: how many ended as they should, drained ones included.
        errors: how often each kind came.
        tokens: that came within the turn.
        seconds: that it lasted.
        latencies: milliseconds within the turn, by name.
    """

    requests: int = 0
    errors: Counter[str] = field(default_factory=Counter)
    tokens: int = 0
    seconds: float = 0.0
    latencies: dict[str, list[float]] = field(default_factory=lambda: {name: [] for name in LATENCIES})

    def numbers(self) -> dict[str, float]:
        """Return what is compared."""
        import numpy as np

        found = {"tokens/s": self.tokens / self.seconds}
        for name, values in self.latencies.items():
            for percentile in PERCENTILES:
                found[f"{name}, p{percentile}"] = float(np.percentile(values, percentile)) if values else float("nan")
        return found


class Load:
    """Streams against one server, until a time.

    Args:
        client: of httpx.
        numbers: of the requests, endless.
        turn: what is seen goes there.
        seconds: of the turn.
    """

    def __init__(self, client: Any, numbers: Any, turn: Turn, seconds: float) -> None:
        self._client, self._numbers, self._turn = client, numbers, turn
        self._began = time.perf_counter()
        self._ends = self._began + seconds
        turn.seconds = seconds

    async def run(self, streams: int) -> None:
        """Keep that many streams in flight, and wait for the last ones."""
        await asyncio.gather(*(self._stream_on() for _ in range(streams)))

    async def _stream_on(self) -> None:
        import httpx

        while (began := time.perf_counter()) < self._ends:
            number = next(self._numbers)
            try:
                wrong = await self._ask(request(number))
            except (httpx.HTTPError, ValueError, LookupError) as error:
                wrong = type(error).__name__
                causes: BaseException | None = error
                while causes is not None:
                    print(f"request {number}: {causes!r}", file=sys.stderr)
                    causes = causes.__cause__ or causes.__context__
            if wrong is None:
                self._turn.requests += 1
            else:
                now = time.perf_counter()
                at = f"{now - began:.1f} s after it was sent, {now - self._began:.0f} s into the turn"
                print(f"request {number}: {wrong}, {at}", file=sys.stderr, flush=True)
                self._turn.errors[wrong] += 1
                await asyncio.sleep(0.1)  # a server that is gone must not be asked as fast as it refuses

    async def _ask(self, body: dict[str, Any]) -> str | None:
        """Send a request, and return what was wrong with the answer."""
        tokens, reason, usage = 0, None, None
        before = time.perf_counter()
        async with self._client.stream("POST", "/v1/completions", json=body) as answer:
            if answer.status_code != 200:
                return f"HTTP {answer.status_code}"
            async for line in answer.aiter_lines():
                if not line.startswith("data: {"):
                    continue
                event = json.loads(line[6:])
                if "error" in event:
                    return "an error within the stream"
                usage = event.get("usage") or usage
                for choice in event["choices"]:
                    reason = choice["finish_reason"] or reason
                    came = len(choice["token_ids"])
                    now = time.perf_counter()
                    if came and now < self._ends:
                        name = LATENCIES[tokens > 0]
                        self._turn.latencies[name].append(1000 * (now - before))
                        self._turn.tokens += came
                    if came:
                        tokens, before = tokens + came, now
        if reason is None or usage is None:
            return "no finish reason" if reason is None else "no usage"
        return None if tokens == usage["completion_tokens"] == body["max_tokens"] else "a wrong number of tokens"


def cut(model: Path, layers: int, folder: Path) -> Path:
    """Write a copy of a Llama that has its first layers only, and return its folder."""
    from scripts.rounded_model import rewritten

    def kept(name: str, weight: Any) -> Any:
        found = re.match(r"model\.layers\.(\d+)\.", name)
        return weight if found is None or int(found[1]) < layers else None

    rewritten(model, folder, kept)
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, "num_hidden_layers": layers}))
    return folder


def resident(group: int) -> float:
    """Return the MiB that the workers of a server hold."""
    from tests.test_faults import workers

    pages = sum(int(Path(f"/proc/{worker}/statm").read_text().split()[1]) for worker in workers(group))
    return pages * os.sysconf("SC_PAGE_SIZE") / 2**20


async def alternate(
    servers: dict[str, Any], arguments: argparse.Namespace
) -> tuple[dict[str, list[Turn]], dict[str, list[float]]]:
    """Return the turns of each server, in pairs, and the MiB that its worker held after each, the warm-up included."""
    import httpx
    from rich.console import Console
    from rich.progress import Progress

    pairs = max(1, round(arguments.minutes / arguments.turn_minutes))
    turns: dict[str, list[Turn]] = {arm: [] for arm in servers}
    held: dict[str, list[float]] = {arm: [] for arm in servers}
    limits = httpx.Limits(max_connections=None, max_keepalive_connections=None)
    with Progress(console=Console(stderr=True)) as progress:
        bar = progress.add_task("turns", total=2 * pairs)
        for pair in range(-1, pairs):  # the first is a short one, in which either server warms up
            order = list(servers) if pair % 2 == 0 else list(reversed(servers))
            for arm in order:
                progress.update(bar, description="warming up" if pair < 0 else f"turn {pair + 1} of {arm}")
                turn, numbers = Turn(), itertools.count(1_000_000 * (pair + 1))
                async with httpx.AsyncClient(base_url=servers[arm].url, timeout=600, limits=limits) as client:
                    seconds = 60 * arguments.turn_minutes if pair >= 0 else 5.0
                    await Load(client, numbers, turn, seconds).run(arguments.streams)
                held[arm].append(resident(servers[arm].process.pid))
                if pair >= 0:
                    turns[arm].append(turn)
                    progress.advance(bar)
                    found = {name: round(value, 1) for name, value in turn.numbers().items()}
                    progress.console.print(f"{arm}: {turn.requests} requests, errors {dict(turn.errors)}, {found}")
    return turns, held


def table(turns: dict[str, list[Turn]], held: dict[str, list[float]]) -> tuple[str, dict[str, Any]]:
    """Return the markdown table and the same as data."""
    numbers = {arm: [turn.numbers() for turn in each] for arm, each in turns.items()}
    stock, ours = numbers["stock"], numbers["gumbel"]
    lines = ["| | stock | gumbel | gumbel / stock, by pair |", "|---|---|---|---|"]
    data: dict[str, Any] = {}
    for name in stock[0]:
        first, second = (statistics.median(turn[name] for turn in arm) for arm in (stock, ours))
        ratios = [b[name] / a[name] if a[name] else float("nan") for a, b in zip(stock, ours, strict=True)]
        data[name] = {"stock": first, "gumbel": second, "ratios": ratios}
        spread = f"{statistics.median(ratios):.2f} [{min(ratios):.2f}, {max(ratios):.2f}]"
        lines.append(f"| {name} | {first:,.0f} | {second:,.0f} | {spread} |")
    for name, value in {
        "requests": lambda arm: sum(turn.requests for turn in turns[arm]),
        "errors": lambda arm: dict(sum((turn.errors for turn in turns[arm]), Counter())) or 0,
        "worker's memory, MiB": lambda arm: f"{held[arm][0]:.0f} to {held[arm][-1]:.0f}",
    }.items():
        data[name] = {arm: value(arm) for arm in turns}
        lines.append(f"| {name} | {data[name]['stock']} | {data[name]['gumbel']} | |")
    return "\n".join(lines), data


def main() -> int:
    """Run both servers and the load, print, and return the exit code."""
    from tests.serving import serving
    from vllm_gumbel.default_model import prepare

    arguments = parse_arguments()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # so that the servers are stopped too
    model = arguments.model or prepare()
    with contextlib.ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="load-server-")))
        if arguments.layers is not None:
            model = cut(model, arguments.layers, folder / "model")
        # A prompt that takes several steps is whole here: on a CPU stock's engine dies of one with a seed.
        flags = ("--dtype", arguments.dtype, "--max-num-seqs", str(arguments.streams), "--no-enable-chunked-prefill")
        servers = {}
        for arm, own in ARMS.items():
            print(f"starting {arm}", file=sys.stderr, flush=True)
            servers[arm] = stack.enter_context(serving(model, folder / f"{arm}.log", *flags, *own))
        turns, held = asyncio.run(alternate(servers, arguments))
    text, data = table(turns, held)
    print(text)
    chosen = {name: value for name, value in vars(arguments).items() if name != "model"}
    print(json.dumps({**chosen, "measured": data}))
    return 0 if not any(turn.errors for arm in turns.values() for turn in arm) else 1


if __name__ == "__main__":
    sys.exit(main())
