#!/usr/bin/env python
"""Sends random requests, legal and not, many at a time, to a real `vllm serve` and demands that nothing breaks.

    .venv/bin/python scripts/fuzz_server.py                            # 20,000 requests, some minutes
    .venv/bin/python scripts/fuzz_server.py --seed 1 --only 4711       # one of them, in full
    .venv/bin/python scripts/fuzz_server.py --requests 2000 -- --logits-processors tests.processors:HalveTempered

Four kinds of requests: `served`, every combination of parameters that is legal; `refused`, in which one thing is wrong;
`broken`, no request at all; and `wild`, of which nobody knows, with some fields replaced by anything.

Demanded: no status of 500 or above, no silence, a server that lives; 200 for legal requests, a 4xx that says why for
wrong ones. The model's logits are a table (`fuzz_model.py`), so a seeded or greedy request must have the same tokens
alone as among the others: `--compare` of them are asked again one at a time. The metrics must have counted what clients
got and were refused. Exit code 0 if all of that holds, else 1.

With `--stock` the same requests go to a server with vLLM's own sampler: what fails there too is not ours.
"""

import argparse
import dataclasses
import os
import random
import signal
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path

import httpx
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
os.environ.update(HF_HUB_OFFLINE="1", VLLM_NO_USAGE_STATS="1", DO_NOT_TRACK="1")
os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", "2")

from scripts.fuzz_client import LIMITS, Answer, differing, send, send_all, wrong_with
from scripts.fuzz_counts import PREEMPTIONS, Page, miscounted
from scripts.fuzz_model import VOCAB, write_table_model
from scripts.fuzz_refusals import broken, refused
from scripts.fuzz_requests import LONGEST, Request, served
from scripts.fuzz_wild import wild

#: The kinds of requests with their shares.
KINDS = {served: 0.65, refused: 0.2, wild: 0.12, broken: 0.03}
#: What both samplers are served with, and what makes reproducibility hard, of which vLLM's own engine dies.
FLAGS = ("--max-model-len", str(LONGEST), "--max-logprobs", str(VOCAB), "--max-num-seqs", "48", "--block-size", "32")
HARD = ("--max-num-batched-tokens", "128", "--async-scheduling", "--enable-prefix-caching")
SMALL_CACHE = ("--num-gpu-blocks-override", "24")


def parse_arguments() -> argparse.Namespace:
    """Return the command line's choices."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--requests", type=int, default=20_000)
    parser.add_argument("--first", type=int, default=0, help="number of the first request")
    parser.add_argument("--seed", type=int, default=1, help="equal seeds give equal requests")
    parser.add_argument("--concurrency", type=int, default=64, help="requests in flight")
    parser.add_argument("--compare", type=int, default=2_000, help="how many are asked again alone")
    parser.add_argument("--only", type=int, action="append", help="send this request alone; may be repeated")
    parser.add_argument("--model", type=Path, help="a model's folder in place of the table; its rounding may show")
    parser.add_argument("--stock", action="store_true", help="serve with vLLM's own sampler")
    parser.add_argument("further", nargs="*", help="further flags of vllm serve, behind --")
    return parser.parse_args()


def make(seed: int, number: int) -> Request:
    """Return one request of the fuzz with a seed: a function of the two alone, so that it can be made again."""
    rng = random.Random(f"{seed}/{number}")
    (kind,) = rng.choices(list(KINDS), list(KINDS.values()))
    return kind(rng, number)


@dataclasses.dataclass
class Report:
    """What a fuzz has found.

    Attributes:
        seen: requests by kind and what came of them.
        tokens: that clients got.
        compared: requests that were asked again alone.
        failures: request and what is wrong with its answer.
        complaints: what is wrong beside that.
        seconds: of the requests together, and of those alone.
        preempted: how often a request had to give its place up and begin again.
        series: of the metrics, before and after.
    """

    seen: Counter[tuple[str, str]]
    tokens: int
    compared: int
    failures: list[tuple[Request, str]]
    complaints: list[str]
    seconds: tuple[float, float]
    preempted: int
    series: tuple[int, int]


def fuzz(
    url: str,
    requests: list[Request],
    *,
    concurrency: int,
    compare: int,
    seed: int,
    ours: bool = True,
    on_answer: Callable[[Request, str | None], None] = lambda request, wrong: None,
) -> Report:
    """Send requests to a server and return what was found.

    Args:
        url: of the server.
        requests: to send.
        concurrency: how many at a time.
        compare: how many of those with equal tokens are asked again alone.
        seed: chooses these.
        ours: whether our sampler draws.
        on_answer: called with every request and what is wrong with its answer.
    """
    failures: list[tuple[Request, str]] = []

    def check(request: Request, wrong: str | None) -> None:
        if wrong is not None:
            failures.append((request, wrong))
        on_answer(request, wrong)

    with httpx.Client(base_url=url, timeout=60, limits=LIMITS) as client:
        before, began = Page.of(client), time.monotonic()
        answers = send_all(
            url, requests, concurrency, lambda request, answer: check(request, wrong_with(request, answer))
        )
        middle = time.monotonic()
        after = Page.of(client)
        complaints = miscounted(before, after, [(each, answers[each.number]) for each in requests]) if ours else []
        repeated = [each for each in requests if each.repeats and answers[each.number].status == 200]
        chosen = random.Random(seed).sample(repeated, min(compare, len(repeated)))
        compared = 0
        try:
            for request in chosen:
                alone = send(client, request, leaves=False)
                check(request, wrong_with(request, alone) or differing(request, answers[request.number], alone))
                compared += 1
        except KeyboardInterrupt:
            complaints.append(f"interrupted: {compared} of {len(chosen)} were asked again alone")
        if client.get("/health").status_code != 200:
            complaints.append("the server is not healthy any more")
    return Report(
        Counter((each.kind, outcome(answers[each.number])) for each in requests),
        sum(answer.tokens for answer in answers.values()),
        compared,
        failures,
        complaints,
        (middle - began, time.monotonic() - middle),
        int(after.values[PREEMPTIONS] - before.values[PREEMPTIONS]),
        (before.series, after.series),
    )


def outcome(answer: Answer) -> str:
    """Return what came of a request, for a table."""
    return "left" if answer.left else str(answer.status or "none")


def described(request: Request, wrong: str) -> str:
    """Return a failure in words, with what repeats it."""
    return f"--only {request.number} ({request.kind}, {request.path}): {wrong[:600]}\n    {request.content[:600]}"


def show(report: Report, seed: int, console: Console) -> None:
    """Print what was found."""
    outcomes = sorted({outcome for _, outcome in report.seen})
    table = Table("kind", *outcomes)
    for kind in sorted({kind for kind, _ in report.seen}):
        table.add_row(kind, *(f"{report.seen[kind, outcome]:,}" for outcome in outcomes))
    console.print(table)
    together, alone = report.seconds
    console.print(
        f"seed {seed}: {report.seen.total():,} requests in {together:.0f} s, {report.tokens:,} tokens; "
        f"{report.preempted:,} preemptions; {report.compared:,} asked again alone in {alone:.0f} s; "
        f"{report.series[0]} series of metrics before, {report.series[1]} after"
    )
    for complaint in report.complaints:
        console.print(complaint, markup=False)
    console.print(f"{len(report.failures)} failures, {len(report.complaints)} complaints")


def main() -> int:
    """Run the fuzz and return the exit code."""
    from tests.serving import serving

    arguments = parse_arguments()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # so that the server is stopped too
    console = Console(width=None if sys.stdout.isatty() else 150)
    numbers = arguments.only or range(arguments.first, arguments.first + arguments.requests)
    requests = [make(arguments.seed, number) for number in numbers]
    with tempfile.TemporaryDirectory() as folder:
        model = arguments.model or write_table_model(Path(folder) / "model")
        flags = FLAGS if arguments.stock else (*FLAGS, *HARD, *SMALL_CACHE, "--sampler", "gumbel")
        console.print("starting the server")
        log = Path(folder) / "log"
        with serving(model, log, *flags, *arguments.further) as server:
            if arguments.only:
                for request in requests:
                    answer = send(server.client, request)
                    print(request.content, "\n", answer, "\n", wrong_with(request, answer))
                return 0
            columns = (TextColumn("requests"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
            with Progress(*columns, TextColumn("{task.fields[failed]} failed"), console=console) as progress:
                task = progress.add_task("", total=len(requests) + arguments.compare, failed=0)

                def advance(request: Request, wrong: str | None) -> None:
                    progress.update(task, advance=1)
                    if wrong is not None:
                        progress.update(task, failed=progress.tasks[task].fields["failed"] + 1)
                        progress.console.print(described(request, wrong), markup=False)

                report = fuzz(
                    server.url,
                    requests,
                    concurrency=arguments.concurrency,
                    compare=arguments.compare,
                    seed=arguments.seed,
                    ours=not arguments.stock,
                    on_answer=advance,
                )
        show(report, arguments.seed, console)
    return 1 if report.failures or report.complaints else 0


if __name__ == "__main__":
    sys.exit(main())
