#!/usr/bin/env python
"""Twelve hours of a busy worker's steps, at the sampler: does memory grow, do counters drift, is anything left behind?

    .venv/bin/python scripts/soak_sampler.py
    .venv/bin/python scripts/soak_sampler.py --steps 20000

vLLM's own batch and the sampler `gumbel` draw step after step from random logits, with everything counted. Requests of
all kinds come, are preempted, come back, are left and end, as a model runner does it; some are drawn by vLLM's own
sampler, some in shadow, some rows hold a NaN. Printed every tenth: the memory of the process. At the end: its growth by
least squares, without the first half, in which the requests that are away grow as old as they get, with its 95%
interval; counters against what this program counted itself; and what the batch still holds when all requests have
ended. Exit code 0 if memory is flat (it grows by less than 1 KiB in 1,000 steps, or the interval reaches 0), counters
agree and nothing is held, else 1. The last line is JSON.
"""

import argparse
import gc
import json
import os
import random
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
os.environ.setdefault("OMP_NUM_THREADS", "1")

import numpy as np
import torch

PROMPT, MOST = 12, 96  # tokens of a prompt, and of a text at most; the batch of the tests has room for 160
#: Id whose logit is sometimes a NaN; nothing that is asked for masks it.
SPOILT = 2
#: How often memory is looked at.
LOOKS = 200
#: Share of the requests in the batch that leave it before a step, to come back later or never.
LEAVING = 0.04
#: What is asked for: each request takes some of these.
KINDS: tuple[dict[str, Any], ...] = (
    {"temperature": 0.0},
    {"temperature": 1.0},
    {"temperature": 0.8, "top_p": 0.9},
    {"temperature": 0.8, "top_k": 50},
    {"temperature": 1.2, "min_p": 0.05, "top_k": 200},
    {"temperature": 0.9, "repetition_penalty": 1.1, "presence_penalty": 0.2, "frequency_penalty": 0.1},
    {"temperature": 0.9, "logprobs": 3},
    {"temperature": 1.0, "allowed_token_ids": [2, 3, 5, 7, 11]},
    {"temperature": 1.0, "logit_bias": {5: 1.5, 6: -2.0}},
    {"temperature": 0.7, "seed": 7},
    {"temperature": 1.0, "bad_words_token_ids": [[9], [4, 8]]},
    {"temperature": 1.0, "extra_args": {"gumbel_salt": 5, "gumbel_return_info": True}},
    {"temperature": 1.0, "extra_args": {"gumbel_noise_scale": 0.5, "gumbel_return_info": True}},
    {"temperature": 1.0, "extra_args": {"gumbel_top_n": 20, "gumbel_repetition_offset": 1.0}},
)


def parse_arguments() -> argparse.Namespace:
    """Return the command line's choices."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=200_000)
    parser.add_argument("--rows", type=int, default=8, help="requests of a batch at most")
    parser.add_argument("--vocab", type=int, default=1000)
    parser.add_argument("--seed", type=int, default=0)
    return parser.parse_args()


class Soak:
    """A batch with its sampler, and what should have been counted.

    Args:
        arguments: the command line's.
        folder: for counters.

    Attributes:
        expected: metric and labels -> value.
    """

    def __init__(self, arguments: argparse.Namespace, folder: Path) -> None:
        from tests.test_rows import make_batch
        from vllm_gumbel.integration.rows import MOST_TOLD
        from vllm_gumbel.integration.v1 import GumbelSampler
        from vllm_gumbel.metrics import catalogue
        from vllm_gumbel.metrics.recorder import Recorder
        from vllm_gumbel.rollout.state import Rollout
        from vllm_gumbel.settings import SamplerSettings

        self.random = random.Random(arguments.seed)
        self.vocab = arguments.vocab
        settings = SamplerSettings(rollout_fraction=0.98, rollout_shadow=0.5, breaker_rate=0.0)
        recorder = Recorder(
            folder,
            model_name="m",
            engine=0,
            build=dict.fromkeys(catalogue.BUILD_INFO.labels, "x"),
            settings=settings,
            vocab=arguments.vocab,
            slots=arguments.rows,
            glitches=np.arange(arguments.vocab) < 10,
            summary_seconds=60.0,
        )
        self.batch = make_batch(
            rows=arguments.rows, vocabulary=arguments.vocab, rollout=Rollout(settings), processors=processors()
        )
        # Full, as after a long time, of what takes as much room as what comes.
        self.batch.told.update((f"earlier {i:05}", (2**63 + i, 0)) for i in range(MOST_TOLD))
        self.sampler = GumbelSampler(settings=settings, recorder=recorder)
        self.sampler.rollout = self.batch.rollout
        self.batch.rollout.listen(recorder.show_rollout)
        self.requests: dict[str, Any] = {}
        self.away: list[str] = []
        self.expected: Counter[tuple[str, str]] = Counter()
        self.admitted = 0
        generator = torch.Generator().manual_seed(arguments.seed)
        # Each step takes rows from somewhere in it.
        self.logits = (torch.randn(500, arguments.vocab, generator=generator) * 3).to(torch.bfloat16)

    def step(self) -> None:
        """Let requests come and go, and draw a token for each that is there."""
        self.change()
        rows = self.batch.num_reqs
        first = self.random.randrange(len(self.logits) - rows)
        logits = self.logits[first : first + rows].clone()
        spoilt = self.random.randrange(rows) if self.random.random() < 0.01 else None
        if spoilt is not None:
            logits[spoilt, SPOILT] = float("nan")
        output = self.sampler(logits, self.batch.sampling_metadata)
        tokens = output.sampled_token_ids[:, 0].tolist()
        for row, name in enumerate(self.batch.req_ids):
            request, end = self.requests[name], self.batch.num_tokens_no_spec[row]
            request.output_token_ids.append(tokens[row])
            self.batch.token_ids_cpu[row, end] = tokens[row]
            self.batch.num_tokens_no_spec[row] = end + 1
            arm = request.gumbel_arm[0]
            self.expected["sampled_tokens_total", arm] += 1
            self.expected["nonfinite", arm] += row == spoilt
            self.expected["shadow_tokens_total", "shadow"] += request.gumbel_arm[1]
        self.expected["sampler_seconds_count", "gumbel"] += 1

    def change(self) -> None:
        """Do to the batch what the model runner does between two steps."""
        for name in list(self.batch.req_id_to_index):
            done = len(self.requests[name].output_token_ids) >= MOST
            if done or self.random.random() < LEAVING:
                self.batch.remove_request(name)
                if not done and self.random.random() < 0.3 and len(self.away) < 100:
                    self.away.append(name)
                else:
                    del self.requests[name]
        while self.batch.num_reqs < self.batch.max_num_reqs and (self.random.random() < 0.8 or not self.batch.num_reqs):
            name = self.come()
            new = not hasattr(self.requests[name], "gumbel_arm")
            self.batch.add_request(self.requests[name])
            fallback = self.batch._request_rows[name].fallback
            if new and fallback is not None:
                self.expected["fallbacks_total", fallback] += 1
        self.batch.condense()
        self.batch.refresh_metadata()

    def come(self) -> str:
        """Return the name of a request that comes back, or of a new one."""
        from tests.test_rows import make_request

        if self.away and self.random.random() < 0.3:
            return self.away.pop(self.random.randrange(len(self.away)))
        self.admitted += 1
        kind = dict(self.random.choice(KINDS))
        bad = kind.pop("bad_words_token_ids", None)
        seed = kind.get("seed")
        if seed is not None:
            kind["seed"] = self.admitted
        generator = None if seed is None else torch.Generator().manual_seed(self.admitted)
        prompt = self.random.choices(range(self.vocab), k=PROMPT)
        request = make_request(f"request {self.admitted}", prompt=prompt, stop=2, generator=generator, **kind)
        request.sampling_params._bad_words_token_ids = bad
        self.requests[request.req_id] = request
        return request.req_id

    def end(self) -> dict[str, int]:
        """End all requests, and return what is still held of them."""
        for name in list(self.requests):
            self.batch.remove_request(name)
        self.requests.clear()
        self.batch.condense()
        self.batch.refresh_metadata()
        rows = self.batch._rows
        return {
            "rows": len(self.batch._request_rows),
            "slots": self.batch.max_num_reqs - len(self.batch._free_slots),
            "admitted": len(self.batch.admitted),
            "penalties": len(rows.penalties),
            "keyed": len(rows.keyed),
        }


def processors() -> Any:
    """Return vLLM's own logits processors, as a server has them."""
    from vllm.config import VllmConfig
    from vllm.v1.sample.logits_processor import build_logitsprocs

    return build_logitsprocs(VllmConfig(), torch.device("cpu"), False, False, ())


def memory() -> float:
    """Return the KiB of its own that the process holds, in memory or swapped; files come and go as the kernel likes."""
    gc.collect()
    fields = (line.split() for line in Path("/proc/self/status").read_text().splitlines())
    return sum(float(field[1]) for field in fields if field[0] in ("RssAnon:", "VmSwap:"))


def slope(steps: list[int], held: list[float]) -> tuple[float, float]:
    """Return KiB in 1,000 steps by least squares, and half of its 95% interval."""
    from scipy import stats

    x = np.array(steps) / 1000
    fit = stats.linregress(x, held)
    error = 0.0 if np.ptp(held) == 0 else fit.stderr  # it is a NaN where nothing changes
    return float(fit.slope), float(error * stats.t.ppf(0.975, len(x) - 2))


def counted(folder: Path) -> Counter[tuple[str, str]]:
    """Return what the counters show, under the names that `Soak.expected` has."""
    from vllm_gumbel.metrics.exporter import FolderCollector

    found: Counter[tuple[str, str]] = Counter()
    for metric in FolderCollector(folder).collect():
        for sample in metric.samples:
            name, arm = sample.name.removeprefix("vllm_gumbel_"), sample.labels.get("arm", "")
            if sample.labels.get("kind") == "nonfinite_logits" and arm != "shadow":
                found["nonfinite", arm] += sample.value
            elif name in ("sampled_tokens_total", "shadow_tokens_total", "requests_total", "sampler_seconds_count"):
                found[name, arm] += sample.value
            elif name in ("faults_total", "fallbacks_total"):
                found[name, sample.labels.get("part", sample.labels.get("reason"))] += sample.value
    return +found


def main() -> int:
    """Run, print, and return the exit code."""
    from rich.console import Console
    from rich.progress import Progress

    from vllm_gumbel.kernels import launch_numba

    arguments = parse_arguments()
    steps, held = [], []
    torch.set_num_threads(1)
    launch_numba.set_threads(1)
    with tempfile.TemporaryDirectory() as name, Progress(console=Console(stderr=True), transient=True) as progress:
        soak = Soak(arguments, Path(name))
        gc.freeze()  # what is loaded by now need not be gone through at each look
        task, began = progress.add_task("steps", total=arguments.steps), time.monotonic()
        for step in range(1, arguments.steps + 1):
            soak.step()
            if step % 100 == 0:
                progress.update(task, completed=step)
            if step % max(1, arguments.steps // LOOKS) == 0:
                steps.append(step)
                held.append(memory())
                if len(steps) % (LOOKS // 10) == 0:
                    rate = step / (time.monotonic() - began)
                    print(f"{step:>8} steps {held[-1] / 1024:8.1f} MiB {rate:6.0f} steps/s", flush=True)
        gc.unfreeze()
        left, found = soak.end(), counted(Path(name))
    return report(soak, steps, held, left, found)


def report(soak: Soak, steps: list[int], held: list[float], left: dict[str, int], found: Counter) -> int:
    """Print what came of it, and return the exit code."""
    after = len(steps) // 2
    growth, half = slope(steps[after:], held[after:])
    flat = growth < 1 or growth - half <= 0
    requests = {arm: found.pop(("requests_total", arm), 0) for arm in ("gumbel", "default")}
    agree = found == +soak.expected and sum(requests.values()) == soak.admitted
    print(f"memory grows by {growth:.2f} KiB in 1,000 steps [{growth - half:.2f}, {growth + half:.2f}]")
    print(f"requests: {soak.admitted} came, counted {requests}")
    for key in sorted(found.keys() | (+soak.expected).keys(), key=str):
        print(f"{' '.join(map(str, key)):36} counted {found[key]:>10.0f} expected {soak.expected[key]:>10}")
    print(f"held after the end: {left}")
    result = {"steps": steps[-1], "kib_per_1000_steps": growth, "half_interval": half, "requests": soak.admitted}
    print(json.dumps({**result, "flat": flat, "counters_agree": agree, "held": left}))
    return 0 if flat and agree and not any(left.values()) else 1


if __name__ == "__main__":
    sys.exit(main())
