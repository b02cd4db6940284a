#!/usr/bin/env python
"""Measures what every key of a request does to a real model's text and distribution; a table, plots and figures.

    .venv/bin/python scripts/study_knobs.py --output study            # the whole study, about an hour on two cores
    .venv/bin/python scripts/study_knobs.py --output study --prompts 24 --tokens 24 --rows 24 --rounds 1

For each key and several values, over prompts written for this project (240, openings times subjects):

- KL from the model's own distribution, entropy and number of ids that can be drawn, in nats, by computation on the
  logits after each prompt;
- from generated text: mean log-probability under the model, distinct-1 to distinct-3 (different n-grams over all,
  within each text), the share of texts that ever end in a loop of three copies or more, and the share of tokens that
  continue such a loop;
- throughput of the whole engine, over that of the plain setting and over that of vLLM's own sampler in the same engine,
  at the same temperature and without keys. Every round runs each arm once, every other round backwards, so that
  whatever else the machine does falls on all; each arm counts by its median.

`scripts/study_claims.py` measures what is claimed about the method in print. Plots need matplotlib, which is in the
extra `study`. The last line is JSON; the same goes to `knobs.json` in the folder, the table to `knobs.md`.
"""

import argparse
import json
import os
import statistics
import sys
import time
from collections.abc import Callable
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

OPENINGS = (
    "{subject} is best explained by",
    "The first thing I noticed about {subject} was",
    "Question: what do most people get wrong about {subject}? Answer:",
    "A short story about {subject}. Once upon a time",
    "Here is a list of five facts about {subject}:\n1.",
    "Dear editor, I am writing to you about {subject} because",
    "In the year 2050, {subject}",
    "My grandmother always said that {subject}",
    "Chapter one. {subject}",
    "To write a program about {subject}, start with",
    "The history of {subject} begins in",
    "Two friends argue about {subject}. The first one says:",
    "A recipe inspired by {subject} needs",
    "News of the day: {subject}",
    "A poem about {subject}:\n",
    "If {subject} could speak, it would say",
    "The opposite of {subject} is",
    "How much does {subject} cost? It depends on",
    "Scientists who study {subject} have found that",
    "Write {subject} ten times:",
)
SUBJECTS = (
    "the sea at night",
    "a broken clock",
    "the price of bread",
    "learning to swim",
    "an old railway station",
    "the colour blue",
    "a garden in winter",
    "honest mistakes",
    "the number seven",
    "a letter that was never sent",
    "the moon",
    "two stubborn goats",
)
PROMPTS = [opening.format(subject=subject) for opening, subject in product(OPENINGS, SUBJECTS)]

PLAIN: dict[str, Any] = {"temperature": 1.0}
GREEDY: dict[str, Any] = {"temperature": 0.0}

#: The setting that throughput is set against.
PLAIN_NAME = "plain, temperature 1"

#: name -> what the request sets; keys apart from vLLM's own parameters.
SETTINGS: dict[str, dict[str, Any]] = {
    PLAIN_NAME: PLAIN,
    "sampler default": {**PLAIN, "gumbel_sampler": "default"},
    "salt 1": {**PLAIN, "gumbel_salt": 1},
    "preset creative": {**PLAIN, "gumbel_preset": "creative"},
    "preset factual": {**PLAIN, "gumbel_preset": "factual"},
    "rule log_vocab at 0.3": {"temperature": 0.3, "gumbel_temperature_rule": "log_vocab"},
    "rule log_vocab at 0.7": {"temperature": 0.7, "gumbel_temperature_rule": "log_vocab"},
    "rule log_vocab at 1": {**PLAIN, "gumbel_temperature_rule": "log_vocab"},
    "hybrid steps 8": {**PLAIN, "gumbel_hybrid_steps": 8},
    "hybrid steps, all": {**PLAIN, "gumbel_hybrid_steps": 2**20},
    "top_n 20": {**PLAIN, "gumbel_top_n": 20},
    "top_n 100": {**PLAIN, "gumbel_top_n": 100},
    "top_n 1000": {**PLAIN, "gumbel_top_n": 1000},
    "tail boost 0.1": {**PLAIN, "gumbel_tail_boost": 0.1},
    "tail boost 0.25": {**PLAIN, "gumbel_tail_boost": 0.25},
    "tail boost 0.5": {**PLAIN, "gumbel_tail_boost": 0.5},
    "noise scale 0": {**PLAIN, "gumbel_noise_scale": 0.0},
    "noise scale 0.5": {**PLAIN, "gumbel_noise_scale": 0.5},
    "noise scale 0.8": {**PLAIN, "gumbel_noise_scale": 0.8},
    "greedy": GREEDY,
    "greedy, repetition offset 0.5": {**GREEDY, "gumbel_repetition_offset": 0.5},
    "greedy, repetition offset 2": {**GREEDY, "gumbel_repetition_offset": 2.0},
    "greedy, repetition offset 10": {**GREEDY, "gumbel_repetition_offset": 10.0},
    "plain, repetition offset 2": {**PLAIN, "gumbel_repetition_offset": 2.0},
}


def parse_arguments() -> argparse.Namespace:
    """Return the command line's choices."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output", type=Path, required=True, help="folder of the table, the figures and the plots")
    parser.add_argument("--model", help="folder of a model; default: the one that `vllm-gumbel model` prepares")
    parser.add_argument("--prompts", type=int, default=len(PROMPTS), help="how many prompts, evenly spread")
    parser.add_argument(
        "--rows", type=int, default=len(PROMPTS), help="how many of them the distributions are computed on"
    )
    parser.add_argument("--tokens", type=int, default=128, help="per text; loops need room to begin")
    parser.add_argument("--rounds", type=int, default=5, help="of throughput, each with every arm once")
    parser.add_argument("--batch", type=int, default=32, help="prompts of an arm's batch in a round")
    parser.add_argument("--batch-tokens", type=int, default=32, help="tokens of each of them")
    parser.add_argument("--settings", nargs="*", choices=SETTINGS, default=list(SETTINGS), metavar="SETTING")
    return parser.parse_args()


def spread(count: int) -> list[str]:
    """Return that many prompts, evenly spread over openings and subjects."""
    count = min(count, len(PROMPTS))
    return [PROMPTS[i * len(PROMPTS) // count] for i in range(count)]


def distributions(model: str, prompts: list[str], names: list[str]) -> dict[str, dict[str, float]]:
    """Return, for each setting, what it does to the distributions after the prompts."""
    from vllm_gumbel import explain
    from vllm_gumbel.params import GumbelParams

    logits = explain.model_logits(model, prompts)
    found = {}
    for name in names:
        given = dict(SETTINGS[name])
        temperature = given.pop("temperature")
        setting = explain.Setting(temperature, keys=GumbelParams.from_extra_args(given, temperature))
        found[name] = vars(explain.effect(logits, setting))
        print(f"{name}: entropy {found[name]['entropy_nats']:.3f}", file=sys.stderr, flush=True)
    return found


def sampling(asked: dict[str, Any], tokens: int, **others: Any) -> Any:
    """Return vLLM's parameters for what a setting asks."""
    from vllm import SamplingParams

    keys = {key: value for key, value in asked.items() if key.startswith("gumbel_")}
    return SamplingParams(
        temperature=asked["temperature"], max_tokens=tokens, ignore_eos=True, extra_args=keys, **others
    )


def measures_of_text(completions: list[Any]) -> dict[str, float]:
    """Return the measures that need nothing but the generated tokens and their log-probabilities."""
    from vllm_gumbel.evaluate.measures import of_tokens

    found = [
        {"mean_logprob": each.cumulative_logprob / len(each.token_ids), **of_tokens(list(each.token_ids))}
        for each in completions
    ]
    return {name: float(np.mean([each[name] for each in found])) for name in found[0]}


def texts(llm: Any, prompts: list[str], tokens: int, names: list[str]) -> dict[str, dict[str, float]]:
    """Return, for each setting, the measures of generated text; prompt number i has seed i."""
    found = {}
    for name in names:
        params = [sampling(SETTINGS[name], tokens, seed=i, logprobs=0) for i in range(len(prompts))]
        outputs = llm.generate(prompts, params, use_tqdm=False)
        found[name] = measures_of_text([output.outputs[0] for output in outputs])
        print(f"{name}: {found[name]}", file=sys.stderr, flush=True)
    return found


def arms(names: list[str]) -> dict[tuple[str, str], dict[str, Any]]:
    """Return what each arm of the throughput asks: (sampler, setting) -> setting.

    The plain setting is always among ours; vLLM's own sampler runs once for each temperature.
    """
    ours = {("gumbel", name): SETTINGS[name] for name in dict.fromkeys((*names, PLAIN_NAME))}
    temperatures = sorted({asked["temperature"] for asked in ours.values()})
    stock = {"gumbel_sampler": "default"}
    return ours | {("default", f"{each:g}"): {"temperature": each, **stock} for each in temperatures}


def throughput(
    run: Callable[[Any], int], tokens: int, rounds: int, names: list[str]
) -> dict[tuple[str, str], list[float]]:
    """Return the tokens per second of every arm in each round; unseeded, without logprobs.

    Args:
        run: vLLM's parameters -> how many tokens it has generated with them.
        tokens: of each prompt.
        rounds: how often each arm runs.
        names: settings.
    """
    asked = arms(names)
    rates: dict[tuple[str, str], list[float]] = {arm: [] for arm in asked}
    for number in range(rounds):
        for arm in list(asked) if number % 2 == 0 else reversed(list(asked)):
            params = sampling(asked[arm], tokens)
            began = time.perf_counter()
            count = run(params)
            rates[arm].append(count / (time.perf_counter() - began))
        print(f"throughput, round {number + 1} of {rounds}", file=sys.stderr, flush=True)
    return rates


def ratios(rates: dict[tuple[str, str], list[float]], names: list[str]) -> dict[str, dict[str, float]]:
    """Return, for each setting, its median throughput, and that over the plain setting's and over vLLM's own."""
    medians = {arm: statistics.median(values) for arm, values in rates.items()}
    found = {}
    for name in names:
        rate, stock = medians["gumbel", name], medians["default", f"{SETTINGS[name]['temperature']:g}"]
        found[name] = {
            "tokens_per_second": rate,
            "throughput_ratio": rate / medians["gumbel", PLAIN_NAME],
            "stock_ratio": rate / stock,
        }
    return found


def generated(arguments: argparse.Namespace) -> dict[str, dict[str, float]]:
    """Return, for each setting, everything that an engine is needed for."""
    from vllm import LLM

    llm = LLM(arguments.model, enforce_eager=True, max_model_len=512, additional_config={"sampler": "gumbel"})
    llm.generate(spread(4), sampling(PLAIN, 4), use_tqdm=False)
    try:
        measured = texts(llm, spread(arguments.prompts), arguments.tokens, arguments.settings)
        batch = spread(arguments.batch)

        def run(params: Any) -> int:
            outputs = llm.generate(batch, params, use_tqdm=False)
            return sum(len(output.outputs[0].token_ids) for output in outputs)

        rates = throughput(run, arguments.batch_tokens, arguments.rounds, arguments.settings)
    finally:
        llm.llm_engine.engine_core.shutdown()
    speeds = ratios(rates, arguments.settings)
    return {name: {**measured[name], **speeds[name]} for name in arguments.settings}


COLUMNS = {
    "kl_nats": ("KL, nats", "{:.3f}"),
    "entropy_nats": ("entropy, nats", "{:.3f}"),
    "kept_ids": ("ids", "{:.0f}"),
    "mean_logprob": ("mean logprob", "{:.3f}"),
    "distinct_1": ("distinct-1", "{:.3f}"),
    "distinct_2": ("distinct-2", "{:.3f}"),
    "distinct_3": ("distinct-3", "{:.3f}"),
    "loop_rate": ("loops", "{:.3f}"),
    "loop_share": ("tokens in loops", "{:.3f}"),
    "throughput_ratio": ("throughput / plain", "{:.2f}"),
    "stock_ratio": ("throughput / stock", "{:.2f}"),
}


def table(results: dict[str, dict[str, float]]) -> str:
    """Return the results as a Markdown table."""
    lines = ["| setting | " + " | ".join(title for title, _ in COLUMNS.values()) + " |"]
    lines.append("|---" * (1 + len(COLUMNS)) + "|")
    for name, measures in results.items():
        cells = [pattern.format(measures[key]) for key, (_, pattern) in COLUMNS.items()]
        lines.append(f"| {name} | " + " | ".join(cells) + " |")
    return "\n".join(lines)


def plots(results: dict[str, dict[str, float]], folder: Path) -> None:
    """Draw one bar chart per measure, one bar per setting; says so where matplotlib is missing."""
    try:
        import matplotlib
    except ImportError:
        print("no plots: matplotlib is missing (pip install 'vllm-gumbel[study]')", file=sys.stderr)
        return
    matplotlib.use("Agg")
    from matplotlib import pyplot

    for key, (title, _) in COLUMNS.items():
        figure, axes = pyplot.subplots(figsize=(8, 0.3 * len(results) + 1))
        names = list(results)
        axes.barh(names[::-1], [results[name][key] for name in names[::-1]], color="tab:blue")
        axes.set_xlabel(title)
        figure.tight_layout()
        figure.savefig(folder / f"{key}.png", dpi=120)
        pyplot.close(figure)
    figure, axes = pyplot.subplots(figsize=(8, 6))
    for name, measures in results.items():
        axes.scatter(measures["entropy_nats"], measures["mean_logprob"], color="tab:blue")
        axes.annotate(name, (measures["entropy_nats"], measures["mean_logprob"]), fontsize=7)
    axes.set_xlabel("entropy of the distribution, nats")
    axes.set_ylabel("mean log-probability under the model")
    figure.tight_layout()
    figure.savefig(folder / "entropy_and_logprob.png", dpi=120)


def main() -> None:
    """Run the study."""
    arguments = parse_arguments()
    os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
    os.environ.update(VLLM_NO_USAGE_STATS="1", DO_NOT_TRACK="1", HF_HUB_OFFLINE="1")
    os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", "2")
    if arguments.model is None:
        from vllm_gumbel.default_model import prepare

        arguments.model = str(prepare())
    arguments.output.mkdir(parents=True, exist_ok=True)
    computed = distributions(arguments.model, spread(arguments.rows), arguments.settings)
    drawn = generated(arguments)
    results = {name: {**computed[name], **drawn[name]} for name in arguments.settings}
    sizes = ("prompts", "rows", "tokens", "rounds", "batch", "batch_tokens")
    document = {**{name: getattr(arguments, name) for name in sizes}, "settings": results}
    (arguments.output / "knobs.md").write_text(table(results) + "\n")
    (arguments.output / "knobs.json").write_text(json.dumps(document, indent=1))
    plots(results, arguments.output)
    print(table(results))
    print(json.dumps(document))


if __name__ == "__main__":
    main()
