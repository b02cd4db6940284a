#!/usr/bin/env python
"""How many tokens it takes until live evidence shows that a sampler is broken, and that a right one stays quiet.

    .venv/bin/python scripts/study_detection.py --tokens 2000000

Samplers with a planted fault, and the right one, draw from logits of the default model inside vLLM's real batch; what
they draw is watched and counted as in a server, and judged from the exposed metrics as `vllm-gumbel check` does, at
growing numbers of tokens, each look with its share of the false-alarm rate. Printed per sampler and setting: the number
of tested tokens at the first look that says "not exact" and the tests that say so. The last line is JSON.
"""

import argparse
import json
import os
import sys
import tempfile
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
os.environ.update(HF_HUB_OFFLINE="1", VLLM_NO_USAGE_STATS="1", DO_NOT_TRACK="1")

import numpy as np
import torch
from tqdm import tqdm

SETTINGS: dict[str, dict[str, Any]] = {
    "T = 1": {"temperature": 1.0},
    "T = 0.8, top_p 0.95": {"temperature": 0.8, "top_p": 0.95},
}
ROWS = 64
TEXT = (
    "The quick brown fox jumps over the lazy dog. Once upon a time there was a small village by the sea, where people "
    "built boats and told each other stories. def add(a, b): return a + b. The capital of France is Paris, and the "
    "capital of Italy is Rome. Water boils at 100 degrees. My favourite book is about a garden that nobody could find."
)


def parse_arguments() -> argparse.Namespace:
    """Return the command line's choices."""
    from tests import broken

    names = ["GumbelSampler", *(name for name in vars(broken) if isinstance(getattr(broken, name), type))]
    names = [name for name in names if name == "GumbelSampler" or getattr(broken, name).__module__ == broken.__name__]
    names = [name for name in names if not name.startswith("_")]
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokens", type=int, default=2_000_000, help="tokens of the right sampler in each setting")
    parser.add_argument("--most", type=int, default=500_000, help="tokens after which a broken one counts as unseen")
    parser.add_argument("--samplers", nargs="+", default=names, choices=names)
    parser.add_argument("--alpha", type=float, default=1e-6, help="chance of a false alarm per sampler and setting")
    return parser.parse_args()


def logits_of_text(model: str) -> torch.Tensor:
    """Return the model's logits, bfloat16 [positions, vocab], after every beginning of a text."""
    from transformers import AutoModelForCausalLM, AutoTokenizer

    ids = AutoTokenizer.from_pretrained(model)(TEXT, return_tensors="pt").input_ids
    with torch.inference_mode():
        return AutoModelForCausalLM.from_pretrained(model, dtype=torch.bfloat16)(ids).logits[0]


def watch(sampler_name: str, asked: dict[str, Any], bank: torch.Tensor, most: int, alpha: float) -> dict[str, Any]:
    """Return what was found about one sampler: at how many tested tokens, and by which tests."""
    from prometheus_client import CollectorRegistry, generate_latest

    from tests import broken
    from tests.test_v1_sampler import batch_of
    from vllm_gumbel.integration.v1 import GumbelSampler
    from vllm_gumbel.metrics import catalogue, exactness, scrape
    from vllm_gumbel.metrics.exporter import FolderCollector
    from vllm_gumbel.metrics.recorder import Recorder
    from vllm_gumbel.settings import SamplerSettings

    settings = SamplerSettings(watch=1, watch_loops=False, watch_frequencies=False, watch_glitches=False)
    cls = GumbelSampler if sampler_name == "GumbelSampler" else getattr(broken, sampler_name)
    vocab, rng, look, due = bank.shape[1], np.random.default_rng(1), 0, 250
    with tempfile.TemporaryDirectory() as folder:
        build = dict.fromkeys(catalogue.BUILD_INFO.labels, "study")
        recorder = Recorder(Path(folder), model_name="m", engine=0, build=build, settings=settings, vocab=vocab)
        batch = batch_of([asked] * ROWS, vocabulary=vocab)
        sampler = cls(settings=settings, recorder=recorder)
        registry = CollectorRegistry()
        registry.register(FolderCollector(Path(folder)))  # type: ignore[arg-type]
        progress = tqdm(total=most, desc=sampler_name, leave=False, disable=not sys.stderr.isatty())
        for step in range(1, most // ROWS + 2):
            batch.num_tokens_no_spec[:ROWS] += 1  # each step is at a position of its own
            sampler(bank[rng.integers(len(bank), size=ROWS)], batch.sampling_metadata)
            progress.update(ROWS)
            if step * ROWS < due and step * ROWS < most:
                continue
            look, due = look + 1, due * 2
            page = scrape.parse(generate_latest(registry).decode(), "study")
            (evidence,) = [each for arm, each in scrape.evidence_by_arm(page).items() if arm == "gumbel"]
            verdicts = exactness.verdicts(evidence, exactness.rate_of_look(alpha, look))
            failed = [each for each in verdicts if each.state is exactness.State.INEXACT]
            if failed:
                break
        progress.close()
        return {
            "sampler": sampler_name,
            "tested_tokens": evidence.tested,
            "found_by": {each.test: each.p_value for each in failed},
            "says": {each.test: each.says for each in verdicts},
        }


def main() -> None:
    """Print the table, and the same as one JSON document."""
    arguments = parse_arguments()
    from vllm_gumbel.default_model import prepare

    bank = logits_of_text(str(prepare()))
    results = []
    print(f"{'sampler':16} {'setting':22} {'tested tokens':>13}  not exact by")
    for setting, asked in SETTINGS.items():
        for name in arguments.samplers:
            most = arguments.tokens if name == "GumbelSampler" else arguments.most
            found = watch(name, asked, bank, most, arguments.alpha) | {"setting": setting}
            results.append(found)
            by = ", ".join(found["found_by"]) or "nothing"
            print(f"{name:16} {setting:22} {found['tested_tokens']:13,.0f}  {by}", flush=True)
    print(json.dumps(results))


if __name__ == "__main__":
    main()
