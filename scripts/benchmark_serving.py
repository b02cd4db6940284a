#!/usr/bin/env python
"""Throughput of a whole engine with vLLM's own sampler and with `gumbel`, setting by setting, alternating.

Both engines run at the same time in one run of this program and take turns, request batch by request batch, so that
whatever else the machine does meets both. All of that is done twice, the second time with the engines made in the
other order: the one made first, which idles while the other loads, can be a fifth slower ever after. Before anything is
timed, greedy outputs of the two are compared, one request at a time. Printed are medians in tokens per second, their
ratio, and the share of greedy's throughput in the same run; the last line is JSON.

    .venv/bin/python scripts/benchmark_serving.py --rounds 5 --requests 64 --tokens 48

With `--drafts N` nothing is timed: the share of draft tokens, from n-grams of each request's own text, that stock's
rejection sampling and `gumbel`'s exact match accept, one engine after the other.

With `--metrics` the cost of counting: `gumbel` with metrics off, on, on while another process collects them 50 times a
second as a server does for Prometheus, and on with every token looked at, alternating, with all requests and with one.
"""

import argparse
import itertools
import json
import multiprocessing
import os
import statistics
import sys
import tempfile
import time
from multiprocessing.synchronize import Event
from pathlib import Path

SETTINGS = {
    "greedy": {"temperature": 0.0},
    "temperature": {"temperature": 0.8},
    "seeded": {"temperature": 0.8, "seed": 1},
    "min_p": {"temperature": 0.8, "min_p": 0.05},
    "top_k=50": {"temperature": 0.8, "top_k": 50},
    "top_p=0.95": {"temperature": 0.8, "top_p": 0.95},
    "top_k+top_p": {"temperature": 0.8, "top_k": 50, "top_p": 0.95},
    "repetition penalty": {"temperature": 0.8, "repetition_penalty": 1.1},
    "logprobs=5": {"temperature": 0.8, "logprobs": 5},
}
ARMS = ("stock", "gumbel")

#: What `--metrics` compares: settings of the sampler. `scraped` is the engine of `on`, while it is scraped; a second
#: engine like the first shows what two that are equal differ by.
COUNTING = {
    "off": {"metrics": False},
    "on": {},
    "scraped": None,
    "watch=1": {"watch": 1.0},
    "off again": {"metrics": False},
}
SCRAPES_PER_SECOND = 50


def engine(model: str, arm: str, requests: int, backend: str, drafts: int = 0, config: dict | None = None):
    """Return an engine of one arm, with that many draft tokens, and more settings of the sampler."""
    from vllm import LLM

    drafting = {"method": "ngram", "num_speculative_tokens": drafts, "prompt_lookup_max": 3}
    chosen = {"sampler": "gumbel", "sampler_config": {"backend": backend, **(config or {})}} if arm == "gumbel" else {}
    return LLM(
        model,
        enforce_eager=True,
        max_model_len=512,
        max_num_seqs=requests,
        enable_prefix_caching=False,
        additional_config=chosen,
        disable_log_stats=not drafts,
        **({"speculative_config": drafting, "async_scheduling": False} if drafts else {}),
    )


def measure(llm, requests: int, tokens: int, setting: dict, first: int = 0) -> tuple[float, list[list[int]]]:
    """Return tokens per second of one batch of requests, numbered from `first`, and its token ids."""
    from vllm import SamplingParams

    prompts = [f"Story number {i}: once upon a time" for i in range(first, first + requests)]
    params = [
        SamplingParams(max_tokens=tokens, ignore_eos=True, **{**setting, **({"seed": i} if "seed" in setting else {})})
        for i in range(requests)
    ]
    began = time.perf_counter()
    outputs = llm.generate(prompts, params, use_tqdm=False)
    seconds = time.perf_counter() - began
    ids = [list(output.outputs[0].token_ids) for output in outputs]
    return sum(map(len, ids)) / seconds, ids


def draft_counts(llm) -> list[float]:
    """Return how many draft tokens were proposed, and how many accepted, since the engine started."""
    found = {metric.name: metric for metric in llm.get_metrics()}
    return [found[f"vllm:spec_decode_num_{kind}_tokens"].value for kind in ("draft", "accepted")]


def compare_drafts(arguments: argparse.Namespace) -> None:
    """Print the accepted shares of both arms."""
    names = [name for name in arguments.settings if "min_p" not in SETTINGS[name]]  # vLLM refuses it with drafts
    counts: dict[str, dict[str, list[float]]] = {name: {} for name in names}
    for arm in ARMS:
        llm = engine(arguments.model, arm, arguments.requests, arguments.backend, arguments.drafts)
        for name in names:
            before = draft_counts(llm)
            try:
                for _ in range(arguments.rounds):
                    measure(llm, arguments.requests, arguments.tokens, SETTINGS[name])
            except (
                Exception
            ) as error:  # stock's rejection sampling ends the engine on a CPU where top_k or top_p is set
                print(f"{arm}: {name} ended the engine: {error}", file=sys.stderr, flush=True)
                break
            counts[name][arm] = [now - then for now, then in zip(draft_counts(llm), before, strict=True)]
            print(f"{arm}: {name} done", file=sys.stderr, flush=True)
        llm.llm_engine.engine_core.shutdown()
    print(f"\n{'accepted of drafted':20s} {'stock':>24s} {'gumbel':>24s}")
    for name, arms in counts.items():
        cells = [
            f"{arms[arm][1]:.0f} of {arms[arm][0]:.0f} {arms[arm][1] / max(arms[arm][0], 1):7.3f}"
            if arm in arms
            else "-"
            for arm in ARMS
        ]
        print(f"{name:20s} " + " ".join(f"{cell:>24s}" for cell in cells))
    print(json.dumps({"drafts": arguments.drafts, "drafted_and_accepted": counts}))


def scrape(folder: str, now: Event, ended: Event, scrapes) -> None:
    """Be a process that answers scrapes of a metrics folder while `now` is set, and counts them."""
    from prometheus_client import CollectorRegistry, generate_latest

    from vllm_gumbel.metrics.exporter import FolderCollector

    registry = CollectorRegistry()
    registry.register(FolderCollector(Path(folder)))
    while not ended.is_set():
        due = time.perf_counter() + 1 / SCRAPES_PER_SECOND
        if now.wait(0.1):
            generate_latest(registry)
            scrapes.value += 1
            time.sleep(max(0.0, due - time.perf_counter()))


def compare_counting(arguments: argparse.Namespace, folders: Path) -> None:
    """Print the throughput of each way of counting, and its ratio to none, as medians over the rounds."""
    engines = {}
    for name, config in COUNTING.items():
        if config is not None:
            (folders / name).mkdir()  # a folder each, so that a scrape reads what one server's would
            os.environ["GUMBEL_METRICS_DIRECTORY"] = str(folders / name)
            engines[name] = engine(arguments.model, "gumbel", arguments.requests, arguments.backend, config=config)
    spawn = multiprocessing.get_context("spawn")
    now, ended, scrapes = spawn.Event(), spawn.Event(), spawn.Value("l", 0)
    scraper = spawn.Process(target=scrape, args=(str(folders / "on"), now, ended, scrapes), daemon=True)
    scraper.start()
    rates: dict[str, dict[str, list[float]]] = {}
    scraped_seconds = 0.0
    for requests, setting in itertools.product(dict.fromkeys((arguments.requests, 1)), arguments.settings):
        # One request gets more tokens, so that its times are not much shorter, and no noisier, than those of a batch.
        tokens = arguments.tokens * (4 if requests == 1 else 1)
        rates[f"{setting}, {requests} requests"] = found = {name: [] for name in COUNTING}
        for llm in engines.values():
            measure(llm, requests, 4, SETTINGS[setting])
        for round_number in range(arguments.rounds):
            for name in COUNTING if round_number % 2 == 0 else reversed(COUNTING):
                llm = engines["on" if name == "scraped" else name]
                began = time.perf_counter()
                if name == "scraped":
                    now.set()
                found[name].append(measure(llm, requests, tokens, SETTINGS[setting])[0])
                if name == "scraped":
                    now.clear()
                    scraped_seconds += time.perf_counter() - began
    ended.set()
    scraper.join()
    print(f"\n{'tokens/s; ratio to off':32s}" + "".join(f"{name:>16s}" for name in COUNTING))
    for title, found in rates.items():
        cells = []
        for values in found.values():
            ratio = statistics.median(each / off for each, off in zip(values, found["off"], strict=True))
            cells.append(f"{statistics.median(values):.0f}; {ratio:.3f}")
        print(f"{title:32s}" + "".join(f"{cell:>16s}" for cell in cells))
    print(f"{scrapes.value / scraped_seconds:.0f} scrapes a second of the engine that is scraped")
    print(json.dumps({"requests": arguments.requests, "tokens": arguments.tokens, "tokens_per_second": rates}))
    for llm in engines.values():
        llm.llm_engine.engine_core.shutdown()


def compare_arms(
    arguments: argparse.Namespace, order: tuple[str, ...], rates: dict[str, dict[str, list[float]]]
) -> None:
    """Measure both arms, whose engines are made in that order, and add what is measured to `rates`."""
    engines = {arm: engine(arguments.model, arm, arguments.requests, arguments.backend) for arm in order}
    # Alone, since in bfloat16 a row's logits depend on what else a step computes.
    for i in range(4):
        alone = [measure(llm, 1, min(8, arguments.tokens), SETTINGS["greedy"], first=i)[1] for llm in engines.values()]
        if alone[0] != alone[1]:
            raise SystemExit("greedy outputs of the two arms differ: nothing is timed")
    for name in arguments.settings:  # the first batch of a setting compiles and allocates
        for arm in order:
            measure(engines[arm], arguments.requests, 4, SETTINGS[name])
    for round_number in range(arguments.rounds):
        for name in arguments.settings:
            for arm in order if round_number % 2 == 0 else reversed(order):
                rates[name][arm].append(measure(engines[arm], arguments.requests, arguments.tokens, SETTINGS[name])[0])
            done = "  ".join(f"{arm} {rates[name][arm][-1]:.0f}" for arm in order)
            count = f"round {round_number + 1} of {arguments.rounds}, {order[0]} made first"
            print(f"{count}  {name:20s} {done} tokens/s", file=sys.stderr, flush=True)
    for llm in engines.values():
        llm.llm_engine.engine_core.shutdown()


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", help="a model for vLLM; default: the one that `vllm-gumbel model` prepares")
    parser.add_argument("--rounds", type=int, default=5, help="with each order of the engines")
    parser.add_argument("--requests", type=int, default=64)
    parser.add_argument("--tokens", type=int, default=48, help="per request")
    parser.add_argument("--settings", nargs="*", choices=SETTINGS, default=list(SETTINGS))
    parser.add_argument("--backend", default="auto", help="of the gumbel arm")
    parser.add_argument("--drafts", type=int, default=0, help="compare accepted shares of that many draft tokens")
    parser.add_argument("--metrics", action="store_true", help="compare ways of counting with none")
    arguments = parser.parse_args()
    os.environ.setdefault("VLLM_NO_USAGE_STATS", "1")
    os.environ.setdefault("DO_NOT_TRACK", "1")
    os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", "2")
    os.environ.setdefault("VLLM_LOGGING_LEVEL", "WARNING")
    if arguments.model is None:
        from vllm_gumbel.default_model import prepare

        os.environ.setdefault("HF_HUB_OFFLINE", "1")
        arguments.model = str(prepare())
    if arguments.drafts:
        compare_drafts(arguments)
        return 0
    if arguments.metrics:
        with tempfile.TemporaryDirectory(prefix="benchmark-metrics-") as folders:
            compare_counting(arguments, Path(folders))
        return 0
    rates: dict[str, dict[str, list[float]]] = {name: {arm: [] for arm in ARMS} for name in arguments.settings}
    for order in (ARMS, tuple(reversed(ARMS))):
        compare_arms(arguments, order, rates)
    medians = {name: {arm: statistics.median(values) for arm, values in arms.items()} for name, arms in rates.items()}
    floor = medians.get("greedy", {})
    print(f"\n{'setting':20s} {'stock':>8s} {'gumbel':>8s} {'ratio':>6s} {'of greedy: stock':>17s} {'gumbel':>7s}")
    for name, arms in medians.items():
        shares = (
            "".join(f"{arms[arm] / floor[arm]:>{width}.2f}" for arm, width in (("stock", 18), ("gumbel", 8)))
            if floor
            else ""
        )
        print(f"{name:20s} {arms['stock']:8.0f} {arms['gumbel']:8.0f} {arms['gumbel'] / arms['stock']:6.2f}{shares}")
    print(json.dumps({"requests": arguments.requests, "tokens": arguments.tokens, "tokens_per_second": rates}))
    return 0


if __name__ == "__main__":
    sys.exit(main())
