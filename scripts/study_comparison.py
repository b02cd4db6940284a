#!/usr/bin/env python
"""Compares SmolLM2 with itself with weights rounded to 8 and to 4 bits, by `vllm-gumbel compare`.

    .venv/bin/python scripts/study_comparison.py --out study                     # some 20 minutes on two cores
    .venv/bin/python scripts/study_comparison.py --out study --limit 2 --seeds 2 --tokens 32

Prints a table for each number of bits: measures with paired intervals, by what equal noise divides the variance, and
how many tokens the same interval takes with equal and with independent seeds. The folders of the comparisons, which
`vllm-gumbel report` turns into pages, stay in the folder; a second run asks only what is missing.
"""

import argparse
import json
import os
import sys
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

SHOWN = ("mean_logprob", "length", "distinct_2", "compression", "loop_rate", "coherence", "bleu_reference", "bleu")


def parse_arguments() -> argparse.Namespace:
    """Return the command line's choices."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True, help="folder of the models and of the comparisons")
    parser.add_argument("--model", type=Path, help="folder of a model; default: that of `vllm-gumbel model`")
    parser.add_argument("--bits", type=int, nargs="*", default=[8, 4], help="of the rounded weights; default 8 4")
    parser.add_argument("--limit", type=int, default=12, help="prompts of each of the five tasks; default 12, all")
    parser.add_argument("--seeds", type=int, default=4, help="texts of a prompt; default 4")
    parser.add_argument("--tokens", type=int, default=192, help="of a text; default 192")
    return parser.parse_args()


def compared(baseline: Path, candidate: Path, arguments: argparse.Namespace, out: Path) -> dict[str, Any]:
    """Compare two folders of models, and return the document."""
    from vllm_gumbel.cli import main

    flags = "--enforce-eager --max-model-len 1024"
    sizes = ("--limit", arguments.limit, "--seeds", arguments.seeds, "--tokens", arguments.tokens)
    serve = ("--baseline-serve", flags, "--candidate-serve", flags)
    command = ("compare", "--baseline", baseline, "--candidate", candidate, "--out", out, *sizes, *serve)
    if main([str(each) for each in command]):
        raise SystemExit(1)
    return json.loads((out / "comparison.json").read_text())


def table(results: dict[str, dict[str, Any]]) -> str:
    """Return the measures of every comparison as a Markdown table."""
    from vllm_gumbel.evaluate.comparison_words import number

    lines = [
        "| weights | measure | bfloat16 | rounded | difference, 95% | with independent seeds | variance divided by |",
        "|---|---|---|---|---|---|---|",
    ]
    for name, found in results.items():
        rows = {row["name"]: row for row in found["measures"]}
        for row in (rows[each] for each in SHOWN if each in rows):
            if row["kind"] == "divergence":
                seen = f"{number(row['value'])} ({number(row['low'])} to {number(row['high'])})"
                cells = ["", "", seen, f"{number(row['independent_value'])} at other seeds", ""]
            else:
                cells = [
                    number(row["baseline"]),
                    number(row["candidate"]),
                    f"{number(row['difference'], True)} ({number(row['low'], True)} to {number(row['high'], True)})",
                    f"{number(row['independent_low'], True)} to {number(row['independent_high'], True)}",
                    f"{number(row['variance_reduction'])} ({number(row['variance_reduction_low'])} to "
                    f"{number(row['variance_reduction_high'])})",
                ]
            lines.append(f"| {name} | {row['title']} | " + " | ".join(cells) + " |")
    return "\n".join(lines)


def main() -> None:
    """Run the study."""
    from scripts.rounded_model import rounded

    arguments = parse_arguments()
    os.environ.update(VLLM_NO_USAGE_STATS="1", DO_NOT_TRACK="1", HF_HUB_OFFLINE="1")
    os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", "2")
    os.environ.setdefault("VLLM_LOGGING_LEVEL", "WARNING")
    if arguments.model is None:
        from vllm_gumbel.default_model import prepare

        arguments.model = prepare()
    results = {}
    for bits in arguments.bits:
        model = arguments.out / f"model-{bits}-bits"
        if not (model / "done").exists():
            rounded(arguments.model, bits, model)
            (model / "done").touch()
        results[f"{bits} bits"] = compared(arguments.model, model, arguments, arguments.out / f"{bits}-bits")
    print(table(results))
    for name, found in results.items():
        print(f"{name}: {found['words']}")
    kept = ("agreement", "tokens_for_interval", "measures", "prompts", "seeds", "pairs")
    print(json.dumps({name: {key: found[key] for key in kept} for name, found in results.items()}))


if __name__ == "__main__":
    main()
