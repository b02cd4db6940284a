#!/usr/bin/env python
"""Throughput of a whole engine with vLLM's own sampler and with `gumbel`, setting by setting, alternating.

Both engines run at the same time in one run of this program and take turns, request batch by request batch, so that
whatever else the machine does meets both. Before anything is timed, greedy outputs of the two are compared. Printed are
medians in tokens per second, their ratio, and the share of greedy's throughput in the same run; the last line is JSON.

    .venv/bin/python scripts/benchmark_serving.py --rounds 5 --requests 64 --tokens 48
"""

import argparse
import json
import os
import statistics
import sys
import time

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


def engine(model: str, arm: str, requests: int, backend: str):
    """Return an engine of one arm."""
    from vllm import LLM

    chosen = {"sampler": "gumbel", "sampler_config": {"backend": backend}} if arm == "gumbel" else {}
    return LLM(
        model,
        enforce_eager=True,
        max_model_len=512,
        max_num_seqs=requests,
        enable_prefix_caching=False,
        additional_config=chosen,
    )


def measure(llm, requests: int, tokens: int, setting: dict) -> tuple[float, list[list[int]]]:
    """Return tokens per second of one batch of requests, and its token ids."""
    from vllm import SamplingParams

    prompts = [f"Story number {i}: once upon a time" for i in range(requests)]
    params = [
        SamplingParams(max_tokens=tokens, ignore_eos=True, **{**setting, **({"seed": i} if "seed" in setting else {})})
        for i in range(requests)
    ]
    began = time.perf_counter()
    outputs = llm.generate(prompts, params, use_tqdm=False)
    seconds = time.perf_counter() - began
    ids = [list(output.outputs[0].token_ids) for output in outputs]
    return sum(map(len, ids)) / seconds, ids


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", help="a model for vLLM; default: the one that `vllm-gumbel model` prepares")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--requests", type=int, default=64)
    parser.add_argument("--tokens", type=int, default=48, help="per request")
    parser.add_argument("--settings", nargs="*", choices=SETTINGS, default=list(SETTINGS))
    parser.add_argument("--backend", default="auto", help="of the gumbel arm")
    arguments = parser.parse_args()
    os.environ.setdefault("VLLM_NO_USAGE_STATS", "1")
    os.environ.setdefault("DO_NOT_TRACK", "1")
    os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", "2")
    os.environ.setdefault("VLLM_LOGGING_LEVEL", "WARNING")
    if arguments.model is None:
        from vllm_gumbel.default_model import prepare

        os.environ.setdefault("HF_HUB_OFFLINE", "1")
        arguments.model = str(prepare())
    engines = {arm: engine(arguments.model, arm, arguments.requests, arguments.backend) for arm in ARMS}
    greedy = {
        arm: measure(llm, arguments.requests, min(8, arguments.tokens), SETTINGS["greedy"])[1]
        for arm, llm in engines.items()
    }
    if greedy["stock"] != greedy["gumbel"]:
        raise SystemExit("greedy outputs of the two arms differ: nothing is timed")
    rates: dict[str, dict[str, list[float]]] = {name: {arm: [] for arm in ARMS} for name in arguments.settings}
    for name in arguments.settings:  # the first batch of a setting compiles and allocates
        for arm in ARMS:
            measure(engines[arm], arguments.requests, 4, SETTINGS[name])
    for round_number in range(arguments.rounds):
        for name in arguments.settings:
            for arm in ARMS if round_number % 2 == 0 else reversed(ARMS):
                rates[name][arm].append(measure(engines[arm], arguments.requests, arguments.tokens, SETTINGS[name])[0])
            done = "  ".join(f"{arm} {rates[name][arm][-1]:.0f}" for arm in ARMS)
            print(
                f"round {round_number + 1} of {arguments.rounds}  {name:20s} {done} tokens/s",
                file=sys.stderr,
                flush=True,
            )
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
    for llm in engines.values():
        llm.llm_engine.engine_core.shutdown()
    return 0


if __name__ == "__main__":
    sys.exit(main())
