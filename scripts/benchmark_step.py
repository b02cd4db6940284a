#!/usr/bin/env python
"""Times one whole call of the sampler, Python included, inside vLLM's real batch: `gumbel` and stock take turns.

    .venv/bin/python scripts/benchmark_step.py --rows 1 64 --vocab 49152
    .venv/bin/python scripts/benchmark_step.py --memory

A step is what the model runner asks for once per token: logits and sampling metadata in, tokens and logprobs out. Every
step each request has one more output token, as in serving. Before anything is timed, greedy tokens of the two are
compared. "odd" modes are plain rows of temperature 0.8 but one. In "keys settled" every request sets a salt and a
preset of temperature 0.8, keys that are settled at admission; stock knows no keys and draws at temperature 1. A batch
in which no request sets a key that acts on rows calls nothing of theirs, which `tests/test_keys_v1.py` shows. Columns:
microseconds a step (median, minimum) of ours and stock, their ratio, and ours over our own plain step. `--memory`
prints instead how far the peak of a process lies above what it held before its first step, for each mode in a process
of its own. `--metrics` prints instead what counting adds to a step of ours, at the default share of watched rows and
with all of them watched, as means, since most of it falls on few steps. The last line is JSON.
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")

PLAIN: dict[str, Any] = {"temperature": 0.8}
#: mode -> what the first row asks for, and all the other rows
MODES: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "greedy": ({"temperature": 0.0}, {"temperature": 0.0}),
    "temperature": (PLAIN, PLAIN),
    "seeded": ({**PLAIN, "seed": 1}, {**PLAIN, "seed": 2}),
    "top_k=50": ({**PLAIN, "top_k": 50},) * 2,
    "top_p=.95": ({**PLAIN, "top_p": 0.95},) * 2,
    "k=50 p=.95": ({**PLAIN, "top_k": 50, "top_p": 0.95},) * 2,
    "min_p=.05": ({**PLAIN, "min_p": 0.05},) * 2,
    "penalties": ({**PLAIN, "repetition_penalty": 1.1, "presence_penalty": 0.1},) * 2,
    "logit_bias": ({**PLAIN, "logit_bias": {5: 1.0, 6: -1.0}},) * 2,
    "logprobs=5": ({**PLAIN, "logprobs": 5},) * 2,
    "keys settled": ({"temperature": 1.0, "extra_args": {"gumbel_salt": 1, "gumbel_preset": "plain"}},) * 2,
    "odd: seeded": ({**PLAIN, "seed": 1}, PLAIN),
    "odd: k and p": ({**PLAIN, "top_k": 50, "top_p": 0.95}, PLAIN),
    "odd: penalties": ({**PLAIN, "repetition_penalty": 1.1}, PLAIN),
    "odd: greedy": ({"temperature": 0.0}, PLAIN),
    "odd: keyed": ({**PLAIN, "extra_args": {"gumbel_noise_scale": 0.5}}, PLAIN),
}
ARMS = ("gumbel", "stock")


def parse_arguments() -> argparse.Namespace:
    """Return the command line's choices."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", type=int, nargs="+", default=[1, 64], help="requests of a batch")
    parser.add_argument("--vocab", type=int, nargs="+", default=[49_152, 151_936], help="vocabulary sizes")
    parser.add_argument("--modes", nargs="+", default=list(MODES), choices=list(MODES), metavar="MODE")
    parser.add_argument("--dtype", default="bfloat16", choices=["bfloat16", "float32"], help="of the logits")
    parser.add_argument("--threads", type=int, default=1, help="threads of both")
    parser.add_argument("--steps", type=int, default=60, help="steps of each per mode, at most 200 but for --metrics")
    parser.add_argument("--prompt", type=int, default=200, help="tokens of a prompt")
    parser.add_argument("--metrics", action="store_true", help="what counting costs: ours with it against ours without")
    parser.add_argument("--memory", action="store_true", help="peak memory instead of time, 256 rows of 151936 ids")
    parser.add_argument("--arm", choices=ARMS, help=argparse.SUPPRESS)
    return parser.parse_args()


ARGUMENTS = parse_arguments()
os.environ.setdefault("OMP_NUM_THREADS", str(ARGUMENTS.threads))

import torch  # noqa: E402


@cache
def vllm_config() -> Any:
    """Return vLLM's default configuration, with room for the rows of every batch here."""
    from vllm.config import VllmConfig

    config = VllmConfig()
    config.scheduler_config.max_num_seqs = max(256, *ARGUMENTS.rows, 0)
    return config


class Arm:
    """One sampler with a batch of its own.

    Args:
        name: "gumbel" or "stock".
        mode: of `MODES`.
        rows: requests.
        vocab: vocabulary size.
    """

    def __init__(self, name: str, mode: str, rows: int, vocab: int) -> None:
        from vllm import SamplingParams
        from vllm.v1.sample.logits_processor import build_logitsprocs
        from vllm.v1.sample.sampler import Sampler
        from vllm.v1.worker.gpu_input_batch import CachedRequestState, InputBatch

        from vllm_gumbel.integration.rows import RowBatch, SeedSource
        from vllm_gumbel.integration.v1 import GumbelSampler
        from vllm_gumbel.params import ServerRules

        ours, rules = name == "gumbel", ServerRules(presets={"plain": PLAIN["temperature"]})
        length = ARGUMENTS.prompt + 256
        batch = (RowBatch if ours else InputBatch)(
            max_num_reqs=rows,
            max_model_len=length,
            max_num_batched_tokens=rows * length,
            device=torch.device("cpu"),
            vocab_size=vocab,
            block_sizes=[16],
            max_num_blocks_per_req=[length // 16 + 1],
            logitsprocs=build_logitsprocs(vllm_config(), torch.device("cpu"), False, False, ()),
            logitsprocs_need_output_token_ids=True,
            **({"seeds": SeedSource(0, 0), "default_salt": 0, "rules": rules} if ours else {}),
        )
        self.outputs: list[list[int]] = []
        for row in range(rows):
            params = SamplingParams(**MODES[mode][0 if row == 0 else 1])
            output = [7, 8, 9]
            generator = None if params.seed is None else torch.Generator().manual_seed(params.seed)
            prompt = [(13 * i + row) % vocab for i in range(ARGUMENTS.prompt)]
            batch.add_request(
                CachedRequestState(f"request {row}", prompt, [], params, generator, ([0],), 0, output)  # type: ignore
            )
            self.outputs.append(output)
        batch.refresh_metadata()
        self.batch, self.sampler = batch, GumbelSampler() if ours else Sampler()

    def step(self, logits: torch.Tensor) -> torch.Tensor:
        """Return the tokens of a step; stock may overwrite float32 logits."""
        return self.sampler(logits, self.batch.sampling_metadata).sampled_token_ids

    def advance(self, token: int) -> None:
        """Give every request one more output token."""
        for output in self.outputs:
            output.append(token)


def make_logits(rows: int, vocab: int) -> torch.Tensor:
    """Return logits [rows, vocab] as peaked as a language model's: spread 2.5, three ids a row about 12 above it."""
    generator = torch.Generator().manual_seed(0)
    logits = torch.randn(rows, vocab, generator=generator) * 2.5
    logits[torch.rand(rows, vocab, generator=generator) < 3 / vocab] += 12
    return logits.to(getattr(torch, ARGUMENTS.dtype))


def prepare() -> None:
    """Load what a worker loads, and set the threads of both."""
    from vllm.platforms import current_platform

    from vllm_gumbel.kernels import launch_numba

    current_platform.import_kernels()
    torch.set_num_threads(ARGUMENTS.threads)
    launch_numba.set_threads(ARGUMENTS.threads)


def counting(folder: Path, rows: int, vocab: int, **settings: Any) -> Any:
    """Return what counts in a server, with a summary in the log that is never due."""
    from vllm_gumbel.metrics import catalogue
    from vllm_gumbel.metrics.recorder import Recorder
    from vllm_gumbel.settings import SamplerSettings

    return Recorder(
        folder,
        model_name="m",
        engine=0,
        build=dict.fromkeys(catalogue.BUILD_INFO.labels, "x"),
        settings=SamplerSettings(**settings),
        vocab=vocab,
        slots=rows,
        glitches=torch.zeros(vocab, dtype=torch.bool).numpy(),
        summary_seconds=1e9,
    )


def time_counting(mode: str, rows: int, vocab: int, logits: torch.Tensor) -> dict[str, float]:
    """Return means in microseconds a step, of which a share looks at rows: without counting, with it, with watch 1."""
    from vllm_gumbel.integration.watch import Watch
    from vllm_gumbel.settings import SamplerSettings

    times: dict[str, list[float]] = {"off": [], "on": [], "watch 1": []}
    with tempfile.TemporaryDirectory() as folder:
        arms = {name: Arm("gumbel", mode, rows, vocab) for name in times}
        for name, settings in (("on", {}), ("watch 1", {"watch": 1})):
            (Path(folder) / name).mkdir()
            arms[name].sampler.recorder = counting(Path(folder) / name, rows, vocab, **settings)
            arms[name].sampler.watch = Watch(SamplerSettings(**settings), arms[name].sampler.backend, None)
        for step in range(ARGUMENTS.steps + 3):
            for name in times if step % 2 == 0 else reversed(times):
                arms[name].advance(step % vocab)
                began = time.thread_time()
                arms[name].step(logits)
                if step >= 3:
                    times[name].append(time.thread_time() - began)
    return {name: round(statistics.mean(values) * 1e6, 1) for name, values in times.items()}


def metrics() -> list[dict[str, Any]]:
    """Print and return what counting costs in every mode: microseconds a step, in the calling thread."""
    results: list[dict[str, Any]] = []
    print("      V  rows mode                 off       on  watch 1  on - off  watch 1 - off")
    for vocab, rows in [(vocab, rows) for vocab in ARGUMENTS.vocab for rows in ARGUMENTS.rows]:
        logits = make_logits(rows, vocab)
        for mode in ARGUMENTS.modes:
            cell = time_counting(mode, rows, vocab, logits)
            off, on, all_rows = cell.values()
            results.append({"mode": mode, "rows": rows, "vocab": vocab, **cell})
            row = f"{off:>8} {on:>8} {all_rows:>8} {on - off:>9.1f} {all_rows - off:>14.1f}"
            print(f"{vocab:>7} {rows:>5} {mode:<15} {row}", flush=True)
    return results


def time_mode(mode: str, rows: int, vocab: int, logits: torch.Tensor) -> dict[str, Any]:
    """Return medians and minima of both arms, in microseconds a step."""
    arms = {name: Arm(name, mode, rows, vocab) for name in ARMS}
    clock = time.thread_time if ARGUMENTS.threads == 1 else time.perf_counter
    times: dict[str, list[float]] = {name: [] for name in ARMS}
    for step in range(min(ARGUMENTS.steps, 200) + 3):
        for name in ARMS if step % 2 == 0 else reversed(ARMS):
            arm, given = arms[name], logits.clone()
            arm.advance(step % vocab)
            began = clock()
            arm.step(given)
            if step >= 3:
                times[name].append(clock() - began)
    result: dict[str, Any] = {"mode": mode, "rows": rows, "vocab": vocab}
    for name, values in times.items():
        result[f"{name}_us"] = round(statistics.median(values) * 1e6, 1)
        result[f"{name}_min_us"] = round(min(values) * 1e6, 1)
    return result


def check(rows: int, vocab: int, logits: torch.Tensor) -> None:
    """End the program if greedy tokens of the two differ."""
    first, second = (Arm(name, "greedy", rows, vocab).step(logits.clone()) for name in ARMS)
    if not torch.equal(first, second):
        raise SystemExit("greedy tokens of the two samplers differ: nothing is timed")


def peak_of(step: Callable[[], Any]) -> float:
    """Return by how many MiB the process's peak rises above what it holds now, over three steps; on Linux."""

    def mib(field: str) -> float:
        lines = Path("/proc/self/status").read_text().splitlines()
        return next(float(line.split()[1]) for line in lines if line.startswith(field)) / 1024

    Path("/proc/self/clear_refs").write_text("5")  # the peak so far is forgotten
    held = mib("VmRSS")
    for _ in range(3):
        step()
    return mib("VmHWM") - held


def memory() -> list[dict[str, Any]]:
    """Return the peaks of every mode and arm, each measured in a process of its own."""
    results: list[dict[str, Any]] = []
    print(f"{'MiB above the start, 256 rows of 151936 ids':44} {'gumbel':>8} {'stock':>8}")
    for mode in ARGUMENTS.modes:
        peaks = {}
        for arm in ARMS:
            command = [sys.executable, __file__, "--memory", "--arm", arm, "--modes", mode, "--dtype", ARGUMENTS.dtype]
            done = subprocess.run(command, capture_output=True, text=True, check=True)
            peaks[arm] = float(done.stdout.splitlines()[-1])
        results.append({"mode": mode, **peaks})
        print(f"{mode:44} {peaks['gumbel']:8.0f} {peaks['stock']:8.0f}", flush=True)
    return results


def main() -> None:
    """Print the table, and the same as one JSON document."""
    if ARGUMENTS.memory and ARGUMENTS.arm is None:
        print(json.dumps({"dtype": ARGUMENTS.dtype, "peak_mib": memory()}))
        return
    prepare()
    if ARGUMENTS.memory:
        logits = make_logits(256, 151_936)
        warm, arm = (Arm(ARGUMENTS.arm, ARGUMENTS.modes[0], rows, 151_936) for rows in (1, 256))
        warm.step(logits[:1].clone())
        print(peak_of(lambda: arm.step(logits)))
        return
    if ARGUMENTS.metrics:
        print(json.dumps({"dtype": ARGUMENTS.dtype, "counting": metrics()}))
        return
    results = []
    print("      V  rows mode               gumbel       min      stock        min  ratio  /plain")
    cells = [(vocab, rows) for vocab in ARGUMENTS.vocab for rows in ARGUMENTS.rows]
    for vocab, rows in cells:
        logits = make_logits(rows, vocab)
        check(rows, vocab, logits)
        plain = time_mode("temperature", rows, vocab, logits)["gumbel_us"]
        for mode in ARGUMENTS.modes:
            if rows == 1 and mode.startswith("odd"):
                continue
            cell = time_mode(mode, rows, vocab, logits)
            cell["ratio"] = round(cell["stock_us"] / cell["gumbel_us"], 2)
            cell["to_plain"] = round(cell["gumbel_us"] / plain, 3)
            results.append(cell)
            print(
                f"{vocab:>7} {rows:>5} {mode:<15} {cell['gumbel_us']:>9} {cell['gumbel_min_us']:>9} "
                f"{cell['stock_us']:>10} {cell['stock_min_us']:>10} {cell['ratio']:>6} {cell['to_plain']:>7}",
                flush=True,
            )
    print(json.dumps({"dtype": ARGUMENTS.dtype, "threads": ARGUMENTS.threads, "cells": results}))


if __name__ == "__main__":
    main()
