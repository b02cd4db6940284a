#!/usr/bin/env python
"""Measures what is claimed in print about sampling by the Gumbel-Max trick, and says of each whether it holds here.

    .venv/bin/python scripts/study_claims.py --output study

Baselines are softmax and `torch.multinomial`, the usual way to draw, with filters by a sort, and the sampler that vLLM
itself has. All arms get the same bfloat16 logits, peaked as a language model's. Times are the calling thread's CPU
time, one thread, arms in turn, medians; memory is the rise of a process's peak over three draws, each arm in a process
of its own. The claims are about other implementations on other machines: a verdict here is about this one, on a CPU.

The table goes to `claims.md` in the folder; the last line is JSON.
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
os.environ["OMP_NUM_THREADS"] = "1"  # before torch, which reads it once

import numpy as np
import torch

ARMS = ("gumbel", "multinomial", "stock")
MODES: dict[str, dict[str, float]] = {"temperature": {}, "top_k 50, top_p 0.95": {"top_k": 50, "top_p": 0.95}}
TEMPERATURE = 0.8


class Claim(NamedTuple):
    """A row of the table."""

    claim: str
    measured: str
    baseline: str
    verdict: str


def make_logits(rows: int, vocab: int) -> torch.Tensor:
    """Return bfloat16 logits [rows, vocab]: spread 2.5, three ids a row about 12 above it."""
    generator = torch.Generator().manual_seed(0)
    logits = torch.randn(rows, vocab, generator=generator) * 2.5
    logits[torch.rand(rows, vocab, generator=generator) < 3 / vocab] += 12
    return logits.bfloat16()


def make_arm(name: str, rows: int, mode: dict[str, float]) -> Callable[[torch.Tensor], Any]:
    """Return what draws one token per row of the logits that it is given."""
    if name == "gumbel":
        from vllm_gumbel.kernels import launch_numba, sample_numba
        from vllm_gumbel.kernels.contract import RowParams

        launch_numba.set_threads(1)
        params = RowParams.uniform(rows, temperature=TEMPERATURE, seed=1, **mode)  # type: ignore[arg-type]

        def ours(logits: torch.Tensor) -> Any:
            params.position[:] += 1
            values = logits.view(torch.uint16) if logits.dtype == torch.bfloat16 else logits
            return sample_numba.draw(values.numpy(), params)

        return ours
    top_k, top_p = int(mode.get("top_k", 0)), mode.get("top_p", 1.0)
    if name == "multinomial":
        return lambda logits: multinomial(logits, top_k, top_p)
    from vllm.platforms import current_platform
    from vllm.v1.sample.ops.topk_topp_sampler import TopKTopPSampler

    current_platform.import_kernels()
    sampler = TopKTopPSampler()
    k = torch.full((rows,), top_k, dtype=torch.int32) if top_k else None
    p = torch.full((rows,), top_p) if top_p < 1 else None
    return lambda logits: sampler(logits.to(torch.float32, copy=True).div_(TEMPERATURE), {}, k, p)


def multinomial(logits: torch.Tensor, top_k: int, top_p: float) -> torch.Tensor:
    """Return tokens by softmax and `torch.multinomial`; filters by a sort of the whole row."""
    x = logits.float() / TEMPERATURE
    if top_k or top_p < 1:
        values, order = x.sort(dim=-1, descending=True)
        if top_k:
            values[:, top_k:] = -torch.inf
        mass = values.softmax(-1).cumsum(-1)
        values[:, 1:].masked_fill_(mass[:, :-1] >= top_p, -torch.inf)
        x = torch.full_like(x, -torch.inf).scatter_(1, order, values)
    return torch.multinomial(x.softmax(-1), 1)


def medians(steps: dict[str, Callable[[], Any]], turns: int) -> dict[str, float]:
    """Return the median CPU time of each step in microseconds, taken in turn."""
    times: dict[str, list[float]] = {name: [] for name in steps}
    for turn in range(turns + 2):
        for name, step in steps.items():
            began = time.thread_time()
            step()
            if turn >= 2:
                times[name].append((time.thread_time() - began) * 1e6)
    return {name: statistics.median(values) for name, values in times.items()}


def throughput(rows: int, vocab: int, turns: int) -> list[Claim]:
    """Return what was measured of "2.7 times the throughput"."""
    logits, claims = make_logits(rows, vocab), []
    for mode, filters in MODES.items():
        arms = {name: make_arm(name, rows, filters) for name in ARMS}
        found = medians({name: (lambda arm=arm: arm(logits)) for name, arm in arms.items()}, turns)  # type: ignore[misc]
        ratios = {name: found[name] / found["gumbel"] for name in ARMS[1:]}
        measured = f"{mode}, operator alone, {rows} x {vocab}: {found['gumbel'] / rows:.1f} microseconds a row, "
        measured += ", ".join(f"{name} {ratio:.1f} times that" for name, ratio in ratios.items())
        claims.append(verdict("2.7 times the throughput", measured, ratios, 2.7))
    return claims


def verdict(claim: str, measured: str, ratios: dict[str, float], least: float) -> Claim:
    """Return a claim that holds where the ratio to every baseline is at least `least`."""
    holds = [name for name, ratio in ratios.items() if ratio >= least]
    said = "supported" if len(holds) == len(ratios) else f"supported against {', '.join(holds)} only" if holds else "no"
    return Claim(claim, measured, ", ".join(ratios), said if said != "no" else "not supported")


def memory_work(rows: int, vocab: int, turns: int) -> Claim:
    """Return what was measured of "a third more from work on memory": logits read in place, not copied to float32."""
    logits, draw = make_logits(rows, vocab), make_arm("gumbel", rows, {})
    steps = {"in place": lambda: draw(logits), "copied": lambda: draw(logits.float())}
    found = medians(steps, turns)
    ratio = found["copied"] / found["in place"]
    measured = f"bfloat16 read in place {found['in place'] / rows:.1f} microseconds a row, copied to float32 first "
    measured += f"{found['copied'] / rows:.1f}: {ratio:.2f} times the throughput"
    return verdict("a third more from work on memory", measured, {"our own draw after a copy": ratio}, 4 / 3)


def memory_overhead(rows: int, vocab: int) -> Claim:
    """Return what was measured of memory that the trick needs beside the logits."""
    rises = {}
    for arm in ARMS:
        command = [sys.executable, __file__, "--arm", arm, "--rows", str(rows), "--vocab", str(vocab)]
        rises[arm] = float(subprocess.run(command, capture_output=True, text=True, check=True).stdout.split()[-1])
    logits = rows * vocab * 2 / 2**20
    measured = f"top_k and top_p, {logits:.0f} MiB of logits: "
    measured += ", ".join(f"{arm} {rise:.0f} MiB more" for arm, rise in rises.items())
    holds = rises["gumbel"] > 0.1 * logits
    return Claim("noise for the whole vocabulary costs memory", measured, "multinomial, stock", said(holds))


def said(holds: bool) -> str:
    return "supported" if holds else "not supported"


def peak(arm: str, rows: int, vocab: int) -> float:
    """Return by how many MiB this process's peak rises over three draws; on Linux."""

    def mib(name: str) -> float:
        lines = Path("/proc/self/status").read_text().splitlines()
        return next(float(line.split()[1]) for line in lines if line.startswith(name)) / 1024

    logits, draw = make_logits(rows, vocab), make_arm(arm, rows, MODES["top_k 50, top_p 0.95"])
    make_arm(arm, 1, MODES["top_k 50, top_p 0.95"])(logits[:1])
    Path("/proc/self/clear_refs").write_text("5")  # the peak so far is forgotten
    held = mib("VmRSS")
    for _ in range(3):
        draw(logits)
    return mib("VmHWM") - held


def temperature_sensitivity(draws: int) -> Claim:
    """Return the chi-square p-values of draws against the softmax, at temperatures from cold to hot."""
    from scipy import stats

    from vllm_gumbel.kernels import sample_numba
    from vllm_gumbel.kernels.contract import RowParams

    row, found = np.random.default_rng(0).standard_normal(200).astype(np.float32) * 2, {}
    for temperature in (0.2, 0.5, 1.0, 2.0, 5.0):
        params = RowParams.uniform(draws, temperature=temperature, seed=3)
        params.position[:] = np.arange(draws)
        tokens = sample_numba.draw(np.broadcast_to(row, (draws, 200)), params).tokens
        law = np.exp((row - row.max()).astype(np.float64) / temperature)
        expected = draws * law / law.sum()
        order = np.argsort(expected)
        edges = np.searchsorted(np.cumsum(expected[order]) // 20, np.arange(1, draws // 20)).clip(0, 199)
        edges = np.unique(np.concatenate([[0], edges[edges > 0]]))
        counts = np.add.reduceat(np.bincount(tokens, minlength=200)[order].astype(float), edges)
        means = np.add.reduceat(expected[order], edges)
        found[temperature] = float(stats.chi2.sf(((counts - means) ** 2 / means).sum(), len(edges) - 1))
    measured = f"chi-square of {draws} draws against the softmax: "
    measured += ", ".join(f"T = {temperature:g} p = {p:.2f}" for temperature, p in found.items())
    holds = min(found.values()) < 1e-4
    return Claim("sensitive to temperature, needs a correction by ln V", measured, "the exact softmax", said(holds))


def tail_distortion(draws: int) -> Claim:
    """Return how often one of 65,536 ids 18 nats below the best wins, by our noise, float32 noise and multinomial.

    In float32 -ln(-ln u) cannot exceed 16.6.
    """
    from vllm_gumbel.kernels import sample_numba
    from vllm_gumbel.kernels.contract import RowParams

    row = np.full(65_537, -18.0, np.float32)
    row[0] = 0
    expected = draws * (1 - 1 / (1 + 65_536 * np.exp(-18.0)))
    params = RowParams.uniform(draws, seed=5)
    params.position[:] = np.arange(draws)
    ours = int((sample_numba.draw(np.broadcast_to(row, (draws, len(row))), params).tokens != 0).sum())
    generator, logits, coarse, usual = torch.Generator().manual_seed(1), torch.from_numpy(row), 0, 0
    for _ in range(draws // 50):
        u = torch.rand(50, len(row), generator=generator)
        coarse += int(((logits - torch.log(-torch.log(u))).argmax(-1) != 0).sum())
        usual += int((torch.multinomial(logits.softmax(-1).expand(50, -1), 1, generator=generator) != 0).sum())
    measured = f"hits of the tail in {draws} draws, {expected:.1f} expected: ours {ours}, float32 noise "
    measured += f"-ln(-ln u) {coarse}, multinomial {usual}"
    holds = abs(ours - expected) > 5 * expected**0.5
    return Claim("distorts the tail, needs a boost", measured, "the exact law, multinomial", said(holds))


def main() -> None:
    """Print the table, and the same as one JSON document."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output", type=Path, help="folder of the table; printed only if not given")
    parser.add_argument("--rows", type=int, default=64)
    parser.add_argument("--vocab", type=int, default=49_152)
    parser.add_argument("--turns", type=int, default=20)
    parser.add_argument("--draws", type=int, default=20_000)
    parser.add_argument("--arm", choices=ARMS, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    rows, vocab = arguments.rows, arguments.vocab
    if arguments.arm is not None:
        print(peak(arguments.arm, rows, vocab))
        return
    claims = [
        *throughput(rows, vocab, arguments.turns),
        memory_work(rows, vocab, arguments.turns),
        memory_overhead(rows, vocab),
        temperature_sensitivity(10 * arguments.draws),
        tail_distortion(arguments.draws),
    ]
    lines = ["| claim | measured here | baseline | verdict |", "|---|---|---|---|"]
    lines += ["| " + " | ".join(each) + " |" for each in claims]
    print("\n".join(lines))
    if arguments.output is not None:
        arguments.output.mkdir(parents=True, exist_ok=True)
        (arguments.output / "claims.md").write_text("\n".join(lines) + "\n")
    print(json.dumps({"rows": rows, "vocab": vocab, "claims": [each._asdict() for each in claims]}))


if __name__ == "__main__":
    main()
