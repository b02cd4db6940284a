#!/usr/bin/env python3
"""Times the draw against vLLM's stock sampler on the same logits, operator against operator, in one process.

    scripts/benchmark_sampler.py --quick
    scripts/benchmark_sampler.py --vocab 49152 128256 --rows 1 64 --logits peaked --threads 2

Stock is what vLLM's V1 sampler does with a step's logits: the conversion to float32, penalties, the division by the
temperature, min_p, `TopKTopPSampler` with or without seeded generators, and for logprobs its log-softmax, top-n and
ranks. Ours is `sample_numba.draw` on the logits as they are, `logprobs_numba.gather`, and for penalties a float32 copy
and the sparse counts of `integration/penalties.py`. What a whole call costs, Python included, is for
`benchmark_step.py`.

Tokens and kept sets are compared with the reference before anything is timed. Then the two and `torch.amax`, the price
of reading the logits once, take turns; stock works in place, so it gets a fresh copy each time, made outside the
timing. The minimum counts as much as the median: on a busy machine only minima repeat. With one thread the clock is the
thread's own CPU time, which does not run while another process has the core; with more it is the wall's.

Columns: microseconds a row (median, minimum) of ours and of stock; the ratio stock / ours; ours / amax in float32;
gigabytes a second that ours reads, and that amax reads, the ceiling. The last line is one JSON document.
"""

import argparse
import json
import os
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")

VOCABULARIES = (32_000, 49_152, 128_256, 151_936, 262_144)
ROWS = (1, 8, 64, 256)
TEMPERATURE = 0.8
#: name -> parameters of every row
MODES: dict[str, dict[str, float]] = {
    "greedy": {"temperature": 0.0},
    "temperature": {},
    "seeded": {},
    "one odd row": {},
    "top_k=50": {"top_k": 50},
    "top_p=.95": {"top_p": 0.95},
    "k=50 p=.95": {"top_k": 50, "top_p": 0.95},
    "min_p=.05": {"min_p": 0.05},
    "penalties": {},
    "logprobs=5": {},
}


def parse_arguments() -> argparse.Namespace:
    """Return the command line's choices."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("--vocab", type=int, nargs="+", default=VOCABULARIES, help="vocabulary sizes")
    parser.add_argument("--rows", type=int, nargs="+", default=ROWS, help="rows of a batch")
    parser.add_argument(
        "--modes", nargs="+", default=list(MODES), choices=list(MODES), metavar="MODE", help=", ".join(MODES)
    )
    parser.add_argument(
        "--logits", nargs="+", default=["flat", "peaked"], help="flat, peaked, or a .npy file [rows, vocab]"
    )
    parser.add_argument("--dtypes", nargs="+", default=["float32", "bfloat16"], choices=["float32", "bfloat16"])
    parser.add_argument("--threads", type=int, default=1, help="threads of both; 1 by default")
    parser.add_argument("--seconds", type=float, default=2.0, help="time spent on one cell; at least 3 turns each")
    parser.add_argument("--quick", action="store_true", help="V 49152, 8 rows, half a second a cell")
    arguments = parser.parse_args()
    if arguments.quick:
        arguments.vocab, arguments.rows, arguments.seconds = [49_152], [8], 0.5
    return arguments


ARGUMENTS = parse_arguments()
os.environ.setdefault("OMP_NUM_THREADS", str(ARGUMENTS.threads))  # before torch, which reads it once

import numpy as np  # noqa: E402
import torch  # noqa: E402

from vllm_gumbel.kernels import logprobs_numba, sample_numba, sample_reference  # noqa: E402
from vllm_gumbel.kernels.contract import RowParams  # noqa: E402
from vllm_gumbel.kernels.slots import as_array  # noqa: E402


def make_logits(kind: str, rows: int, vocab: int, rng: np.random.Generator) -> torch.Tensor:
    """Return float32 logits [rows, vocab].

    flat: standard normal, at T = 0.8 about 60% of the ids are in the nucleus of .95. peaked: as language models give
    them, a normal body of spread 2.5 and three ids a row about 12 above it. A file: its rows, repeated.
    """
    if kind.endswith(".npy"):
        stored = np.load(kind).astype(np.float32)
        if stored.shape[1] != vocab:
            raise SystemExit(f"{kind} has {stored.shape[1]} ids, not {vocab}")
        return torch.from_numpy(np.resize(stored, (rows, vocab)))
    logits = rng.standard_normal((rows, vocab), np.float32)
    if kind == "peaked":
        logits *= np.float32(2.5)
        logits[rng.random(logits.shape, np.float32) < 3 / vocab] += np.float32(12)
    elif kind != "flat":
        raise SystemExit(f"logits must be flat, peaked or a .npy file, got {kind!r}")
    return torch.from_numpy(logits)


class Stock:
    """vLLM's own sampler classes, called as its V1 sampler calls them."""

    def __init__(self) -> None:
        from vllm.config import VllmConfig, set_current_vllm_config
        from vllm.v1.sample.logits_processor import MinPLogitsProcessor
        from vllm.v1.sample.sampler import Sampler

        with set_current_vllm_config(VllmConfig()):
            self.sampler = Sampler()
        self._min_p = MinPLogitsProcessor

    def step(self, mode: str, rows: int, vocab: int) -> Callable[[torch.Tensor], Any]:
        """Return what stock does with the logits of a step; it may overwrite them."""
        filters = MODES[mode]
        temperature = torch.full((rows,), TEMPERATURE)
        k = torch.full((rows,), int(filters["top_k"]), dtype=torch.int32) if "top_k" in filters else None
        p = torch.full((rows,), filters["top_p"]) if "top_p" in filters else None
        seeded = rows if mode == "seeded" else 1 if mode == "one odd row" else 0
        generators = {row: torch.Generator().manual_seed(row) for row in range(seeded)}
        prompt = torch.randint(vocab, (rows, 200))
        output = [torch.randint(vocab, (100,)).tolist() for _ in range(rows)]
        penalty = torch.full((rows,), 1.1)
        zero = torch.zeros(rows)
        draw, sampler = self.sampler.topk_topp_sampler, self.sampler
        min_p = self._min_p.__new__(self._min_p)
        min_p.min_p_count = rows
        min_p.min_p = torch.full((rows, 1), filters.get("min_p", 0.0))

        def step(logits: torch.Tensor) -> Any:
            raw = sampler.compute_logprobs(logits) if mode == "logprobs=5" else None
            logits = logits.to(torch.float32)
            if mode == "penalties":
                metadata = SimpleNamespace(
                    no_penalties=False,
                    prompt_token_ids=prompt,
                    presence_penalties=zero,
                    frequency_penalties=zero,
                    repetition_penalties=penalty,
                )
                logits = sampler.apply_penalties(logits, metadata, output)
            if mode == "greedy":
                return sampler.greedy_sample(logits)
            logits = sampler.apply_temperature(logits, temperature, True)
            if "min_p" in filters:
                logits = min_p.apply(logits)
            tokens, _ = draw(logits, generators, k, p)
            return tokens if raw is None else sampler.gather_logprobs(raw, 5, tokens.long())

        return step


def our_step(mode: str, params: RowParams, vocab: int) -> Callable[[torch.Tensor], Any]:
    """Return what we do with the logits of a step."""
    rows, counts = len(params.seed), []
    if mode == "penalties":
        from vllm import SamplingParams

        from vllm_gumbel.integration.penalties import PenaltyCounts

        for _ in range(rows):
            each = PenaltyCounts(torch.randint(vocab, (200,)).tolist(), SamplingParams(repetition_penalty=1.1))
            each.update(torch.randint(vocab, (100,)).tolist())
            counts.append(each)

    def step(logits: torch.Tensor) -> Any:
        if counts:
            logits = logits.to(torch.float32, copy=True)
            for row, each in zip(logits.numpy(), counts, strict=True):
                each.apply(row)
        values = as_array(logits)
        drawn = sample_numba.draw(values, params)
        return logprobs_numba.gather(values, drawn.tokens, 5) if mode == "logprobs=5" else drawn

    return step


def check(logits: torch.Tensor, params: RowParams) -> None:
    """Raise if our tokens or kept sets of some rows differ from the reference's."""
    some = slice(0, 4)
    few = RowParams(**{name: values[some] for name, values in vars(params).items()})
    values = as_array(logits)[some]
    ours, right = np.empty(values.shape, np.float32), np.empty(values.shape, np.float32)
    got = sample_numba.draw(values, few, processed=ours)
    expected = sample_reference.draw(values, few, processed=right)
    if (got.tokens != expected.tokens).any() or (ours != right).any():
        raise SystemExit("our results differ from the reference's: nothing is timed")
    if (sample_numba.draw(values, few).tokens != expected.tokens).any():
        raise SystemExit("our tokens depend on whether processed values are wanted: nothing is timed")


def read(logits: torch.Tensor) -> torch.Tensor:
    """Return the maxima of the rows: one pass over the logits."""
    return logits.amax(1)


def time_cell(logits: torch.Tensor, ours: Callable, stock: Callable, seconds: float) -> dict[str, list[float]]:
    """Return times in seconds of ours, stock and amax, taking turns."""
    clock = time.thread_time if ARGUMENTS.threads == 1 else time.perf_counter
    times: dict[str, list[float]] = {"ours": [], "stock": [], "amax": []}
    wide = logits.float()
    end = time.perf_counter() + seconds
    while time.perf_counter() < end or len(times["ours"]) < 3:
        fresh = logits.clone()
        for name, call, argument in (("ours", ours, logits), ("stock", stock, fresh), ("amax", read, wide)):
            began = clock()
            call(argument)
            times[name].append(clock() - began)
    return times


def show(cell: dict[str, Any], number: int, of: int) -> None:
    """Print one line of the table, and how far it has come."""
    names = f"{cell['vocab']:>7} {cell['rows']:>4} {cell['logits'][:6]:>6} {cell['dtype']:>8} {cell['mode']:<12}"
    ours = f"{cell['ours_us']:>9} {cell['ours_min_us']:>8}"
    stock = f"{cell['stock_us']:>9} {cell['stock_min_us']:>9}"
    ratios = f"{cell['ratio_to_stock']:>7} {cell['ratio_to_amax']:>6} {cell['ours_gb_s']:>6} {cell['amax_gb_s']:>6}"
    print(f"{names} {ours} {stock} {ratios}  {number}/{of}", flush=True)


def main() -> None:
    """Print the table, and the same as one JSON document."""
    torch.set_num_threads(ARGUMENTS.threads)
    threads = sample_numba.set_threads(ARGUMENTS.threads)
    print(f"{threads} thread(s) for ours, {torch.get_num_threads()} for stock")
    stock = Stock()
    for dtype in ARGUMENTS.dtypes:
        name = {"float32": np.float32, "bfloat16": np.uint16}[dtype]
        for module in (sample_numba, logprobs_numba):
            module.warm_up(max(ARGUMENTS.vocab), name, lambda line: print(line, flush=True))
    rng = np.random.default_rng(0)
    cells = [
        (vocab, rows, kind, dtype, mode)
        for vocab in ARGUMENTS.vocab
        for rows in ARGUMENTS.rows
        for kind in ARGUMENTS.logits
        for dtype in ARGUMENTS.dtypes
        for mode in ARGUMENTS.modes
    ]
    print(
        "      V rows logits    dtype mode              ours      min     stock       min   ratio  /amax   GB/s   amax"
    )
    results, previous = [], None
    for number, (vocab, rows, kind, dtype, mode) in enumerate(cells, 1):
        if previous != (vocab, rows, kind, dtype):
            previous = (vocab, rows, kind, dtype)
            logits = make_logits(kind, rows, vocab, rng).to(getattr(torch, dtype))
        params = RowParams.uniform(rows, **({"temperature": TEMPERATURE} | MODES[mode]))  # type: ignore[arg-type]
        params.seed[:] = np.arange(rows)
        if mode == "one odd row":
            params.temperature[0], params.top_k[0] = 1.1, 7
        check(logits, params)
        times = time_cell(logits, our_step(mode, params, vocab), stock.step(mode, rows, vocab), ARGUMENTS.seconds)
        cell = {
            "vocab": vocab,
            "rows": rows,
            "logits": Path(kind).stem,
            "dtype": dtype,
            "mode": mode,
            "turns": len(times["ours"]),
        }
        for name, values in times.items():
            cell[f"{name}_us"] = round(statistics.median(values) / rows * 1e6, 2)
            cell[f"{name}_min_us"] = round(min(values) / rows * 1e6, 2)
        cell["ratio_to_stock"] = round(cell["stock_us"] / cell["ours_us"], 2)
        cell["ratio_of_minima"] = round(cell["stock_min_us"] / cell["ours_min_us"], 2)
        cell["ratio_to_amax"] = round(cell["ours_us"] / cell["amax_us"], 2)
        cell["ratio_to_amax_of_minima"] = round(cell["ours_min_us"] / cell["amax_min_us"], 2)
        cell["ours_gb_s"] = round(vocab * logits.element_size() / cell["ours_min_us"] / 1e3, 1)
        cell["amax_gb_s"] = round(vocab * 4 / cell["amax_min_us"] / 1e3, 1)
        results.append(cell)
        show(cell, number, len(cells))
    print(json.dumps({"threads": ARGUMENTS.threads, "temperature": TEMPERATURE, "cells": results}))


if __name__ == "__main__":
    main()
