#!/usr/bin/env python
"""How often `vllm-gumbel verify` finds that a text was not drawn as claimed, and how often it wrongs an honest one.

    .venv/bin/python scripts/study_verification.py --outputs 300 --tokens 128 --folder FOLDER

vLLM writes texts in bfloat16 with the sampler `gumbel`: honest ones, ones with another temperature and top_p, and ones
with weights rounded to 8 and to 4 bits. Each is claimed to come from the unrounded model with temperature 0.7, top_p
0.95 and its seed, and verified with transformers. All texts have the same length, since the end of a text is ignored.
Records stay in the folder, so that a second run only does what is
missing. Printed per kind: the share that `differs`, `matches` and is undecided with exact intervals (Clopper, Pearson
1934), the share of equal tokens, the median of the tokens that the right verdict took (`matches` for honest texts,
`differs` for others), and after how many tokens all texts, taken as one, differ. The last line is JSON.

Beside them stand the figures published for Token-DiFR: 98% of tokens match for an honest server; a 4-bit model is found
within 300 tokens. They are for other models, and of a verifier that pools the tokens of many texts.
"""

import argparse
import json
import os
import sys
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
sys.path.insert(0, str(Path(__file__).resolve().parent))
os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", "2")
os.environ.update(HF_HUB_OFFLINE="1", VLLM_NO_USAGE_STATS="1", DO_NOT_TRACK="1", TOKENIZERS_PARALLELISM="false")

from rounded_model import rounded
from tqdm import tqdm

from vllm_gumbel.evaluate.records import Record, Records, read

CLAIM = {"temperature": 0.7, "top_p": 0.95}
#: kind -> (bits of the weights, what the texts were really drawn with).
WRITTEN: dict[str, tuple[int | None, dict[str, float]]] = {
    "honest": (None, CLAIM),
    "temperature 0.9": (None, {**CLAIM, "temperature": 0.9}),
    "top_p 0.8": (None, {**CLAIM, "top_p": 0.8}),
    "8-bit weights": (8, CLAIM),
    "4-bit weights": (4, CLAIM),
}
#: Kinds that are made from the honest texts.
MADE = ("another seed", "one word edited")


def parse_arguments() -> argparse.Namespace:
    """Return the command line's choices."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--outputs", type=int, default=300, help="texts of each kind; default 300")
    parser.add_argument("--tokens", type=int, default=128, help="tokens of a text; default 128")
    parser.add_argument("--folder", type=Path, required=True, help="folder for models, records and results")
    parser.add_argument("--kinds", nargs="+", choices=[*WRITTEN, *MADE], default=[*WRITTEN, *MADE])
    parser.add_argument("--precision", default="float32", help="of the verifier; default float32")
    parser.add_argument("--tolerance", type=float, help="default: what `vllm-gumbel verify` takes")
    parser.add_argument("--alpha", type=float, default=1e-3, help="of each text; default 0.001")
    parser.add_argument("--jobs", type=int, default=os.cpu_count(), help="processes that verify; default one a CPU")
    return parser.parse_args()


def write_texts(kind: str, model: Path, arguments: argparse.Namespace) -> None:
    """Let vLLM write the texts of one kind that are not in the folder yet."""
    from transformers import AutoTokenizer

    from vllm_gumbel.evaluate.prompts import built_in

    file = records_of(kind, arguments.folder)
    have = {record.id for record in read(file)} if file.exists() else set()
    tokenizer, prompts = AutoTokenizer.from_pretrained(model), built_in()
    asked = []
    for number in range(arguments.outputs):
        prompt = prompts[number % len(prompts)]
        messages = prompt.messages or [{"role": "user", "content": prompt.prompt}]
        ids = tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_dict=False)
        # Kinds have seeds of their own, so that no two share their noise.
        seed = 1_000_000 * list(WRITTEN).index(kind) + number
        asked.append((f"{prompt.id}/{number}", prompt.task, ids, seed))
    missing = [each for each in asked if each[0] not in have]
    if not missing:
        return
    bits, really = WRITTEN[kind]
    folder = model if bits is None else rounded(model, bits, arguments.folder / f"{bits}-bit")
    from vllm import LLM, SamplingParams

    llm = LLM(
        str(folder),
        dtype="bfloat16",
        enforce_eager=True,
        max_model_len=1024,
        max_num_seqs=64,
        additional_config={"sampler": "gumbel"},
    )
    with Records(file) as kept:
        for start in range(0, len(missing), 100):
            part = missing[start : start + 100]
            params = [
                SamplingParams(**really, seed=seed, max_tokens=arguments.tokens, ignore_eos=True) for *_, seed in part
            ]
            outputs = llm.generate([{"prompt_token_ids": ids} for _, _, ids, _ in part], params)
            for (name, task, ids, seed), output in zip(part, outputs, strict=True):
                text = output.outputs[0]
                kept.append(
                    Record(
                        id=name,
                        task=task,
                        prompt_token_ids=ids,
                        output=text.text,
                        output_token_ids=list(text.token_ids),
                        params={**CLAIM, "seed": seed, "max_tokens": arguments.tokens},
                        noise="gumbel",
                        noise_version=1,
                        finish_reason=text.finish_reason,
                    )
                )
    llm.llm_engine.engine_core.shutdown()


def records_of(kind: str, folder: Path) -> Path:
    """Return the file of a kind."""
    return folder / f"{kind.replace(' ', '_')}.jsonl"


def texts(kind: str, model: Path, arguments: argparse.Namespace) -> Iterator[Record]:
    """Yield the records of one kind as they are verified."""
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(model)
    honest = list(read(records_of("honest" if kind in MADE else kind, arguments.folder)))[: arguments.outputs]
    for record in honest:
        if kind == "another seed":
            record = record.model_copy(update={"params": {**record.params, "seed": record.params["seed"] + 5_000_000}})
        yield record if kind != "one word edited" else edited(record, tokenizer)


def edited(record: Record, tokenizer: Any) -> Record:
    """Return a record with one word near its middle changed for another of as many tokens, the hardest edit to see."""
    words = [ids[0] for word in (" red", " small", " people", " never") if len(ids := tokenizer.encode(word)) == 1]
    ids = list(record.output_token_ids or [])
    order = sorted(range(len(ids)), key=lambda place: abs(place - len(ids) // 2))
    for place in order:
        text = tokenizer.decode([ids[place]])
        if text.startswith(" ") and text[1:].isalpha() and len(text) > 3 and ids[place] not in words:
            ids[place] = words[len(ids) % len(words)]
            break
    return record.model_copy(
        update={"output_token_ids": ids, "output": tokenizer.decode(ids, skip_special_tokens=True)}
    )


def verify(job: tuple[Path, str, float | None, float, list[Record]]) -> list[dict[str, Any]]:
    """Return what is found out about some records; runs in a process of its own."""
    import torch

    from vllm_gumbel.evaluate.likelihood import TOLERANCES
    from vllm_gumbel.evaluate.likelihood_text import verified
    from vllm_gumbel.evaluate.logits import Network

    torch.set_num_threads(1)
    model, precision, tolerance, alpha, records = job
    network = NETWORKS.setdefault(precision, None) or Network(model, precision)
    NETWORKS[precision] = network
    found = []
    for record in records:
        one = verified(record, network, tolerance or TOLERANCES["bfloat16"], alpha)
        if one.judgement is None:
            raise RuntimeError(f"{record.id}: {one.reason}")
        best = one.judgement.alternatives[0] if one.judgement.alternatives else None
        found.append(
            {
                "verdict": one.verdict,
                "decided_at": one.judgement.decided_at,
                "against": one.judgement.evidence_against,
                "for": one.judgement.evidence_for,
                "family": None if best is None else best.family,
                "tokens": len(one.looks),
                "matched": one.matched,
                "ratios": [[list(key), ratio] for key, ratio in one.judgement.ratios.items()],
            }
        )
    return found


NETWORKS: dict[str, Any] = {}


def summary(kind: str, found: list[dict[str, Any]], alpha: float) -> dict[str, Any]:
    """Return the figures of one kind."""
    import numpy as np

    counts = {
        verdict: sum(one["verdict"] == verdict for one in found) for verdict in ("differs", "matches", "undecided")
    }
    wanted = "matches" if kind == "honest" else "differs"
    took = [one["decided_at"] + 1 if one["verdict"] == wanted else float("inf") for one in found]
    families = [one["family"] for one in found if one["verdict"] == "differs"]
    median = float(np.median(took))
    return {
        "kind": kind,
        "texts": len(found),
        **{verdict: [count / len(found), *interval(count, len(found))] for verdict, count in counts.items()},
        "tokens": sum(one["tokens"] for one in found),
        "equal": sum(one["matched"] for one in found) / max(1, sum(one["tokens"] for one in found)),
        "median_tokens": None if median == float("inf") else median,
        "explained_by": {family: families.count(family) for family in sorted(set(families))},
        "tokens_as_one": tokens_as_one(found, alpha),
    }


def tokens_as_one(found: list[dict[str, Any]], alpha: float) -> int | None:
    """Return after how many tokens all texts, taken as one, differ from their claims; None if they do not."""
    import numpy as np

    from vllm_gumbel.evaluate.likelihood import shares

    ratios: dict[tuple[str, str, float], float] = {}
    tokens = 0
    for one in found:
        tokens += one["tokens"]
        for key, ratio in one["ratios"]:
            ratios[tuple(key)] = ratios.get(tuple(key), 0.0) + ratio
        if np.logaddexp.reduce(np.array(list(ratios.values())) + np.log(shares(list(ratios)))) >= -np.log(alpha):
            return tokens
    return None


def interval(count: int, of: int, level: float = 0.95) -> tuple[float, float]:
    """Return the exact interval of a share."""
    from scipy.stats import beta

    low = 0.0 if count == 0 else float(beta.ppf((1 - level) / 2, count, of - count + 1))
    return low, 1.0 if count == of else float(beta.ppf((1 + level) / 2, count + 1, of - count))


def shown(share: list[float]) -> str:
    """Return a share with its interval, in percent."""
    return f"{100 * share[0]:.1f} ({100 * share[1]:.1f} to {100 * share[2]:.1f})"


def main() -> None:
    """Write texts, verify them, and print the table."""
    arguments = parse_arguments()
    from vllm_gumbel.default_model import prepare

    model = prepare()
    arguments.folder.mkdir(parents=True, exist_ok=True)
    for kind in WRITTEN:
        if kind in arguments.kinds or (kind == "honest" and set(MADE) & set(arguments.kinds)):
            write_texts(kind, model, arguments)
    results = []
    heads = ("kind", "texts", "differs %", "matches %", "undecided %", "equal tokens %", "median tokens")
    heads += ("explained by", "tokens, all texts as one")
    print("| " + " | ".join(heads) + " |\n|" + "---|" * len(heads))
    with ProcessPoolExecutor(arguments.jobs) as pool:
        for kind in arguments.kinds:
            records = list(texts(kind, model, arguments))
            parts = [records[start : start + 4] for start in range(0, len(records), 4)]
            jobs = [(model, arguments.precision, arguments.tolerance, arguments.alpha, part) for part in parts]
            bar = tqdm(pool.map(verify, jobs), total=len(jobs), desc=kind, disable=not sys.stderr.isatty())
            found = summary(kind, [one for part in bar for one in part], arguments.alpha)
            results.append(found)
            by = ", ".join(f"{family} {count}" for family, count in found["explained_by"].items())
            cells = [kind, found["texts"], *(shown(found[name]) for name in ("differs", "matches", "undecided"))]
            cells += [
                f"{100 * found['equal']:.2f}",
                found["median_tokens"] or "-",
                by or "-",
                found["tokens_as_one"] or "-",
            ]
            print("| " + " | ".join(map(str, cells)) + " |", flush=True)
    print(
        "Published for Token-DiFR: 98% of an honest server's tokens match; 4-bit weights are found within 300 tokens."
    )
    print(json.dumps(results))


if __name__ == "__main__":
    main()
