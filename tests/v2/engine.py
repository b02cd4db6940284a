"""Generates with the default model under runner V2 and writes, as JSON, what came out of each of several engines.

usage: python -m tests.v2.engine MODEL OUTPUT RUN ...

`tests/test_v2_engine.py` runs it in the interpreter, where a token takes about half a second.
"""

import gc
import json
import sys
from pathlib import Path

from tests.v2.features import answers

#: Requests, each with a prompt; all seeded or greedy, so that any engine must give the same tokens.
REQUESTS = [
    ("The capital of France is", {"temperature": 0}),
    ("Once upon a time", {"temperature": 0, "repetition_penalty": 1.3, "logprobs": 2}),
    ("1, 2, 3,", {"temperature": 1.0, "seed": 7}),
    ("1, 2, 3,", {"temperature": 1.0, "seed": 7, "extra_args": {"gumbel_salt": 5}}),
    ("Once upon a time", {"temperature": 0.8, "seed": 2**63 + 1, "top_k": 20, "top_p": 0.9}),
    ("The cat sat on the mat. The dog sat on the", {"temperature": 1.2, "seed": -5, "min_p": 0.02, "logprobs": 1}),
    ("The cat sat on", {"temperature": 0.7, "seed": 3, "frequency_penalty": 0.7, "top_p": 0.95}),
]

#: Requests of which the noise alone decides, as far as stock runs in the interpreter: without top_k and top_p.
SEEDED = [
    ("1, 2, 3,", {"temperature": 1.0, "seed": 7}),
    ("Once upon a time", {"temperature": 0.8, "seed": 2**40 + 5}),
    ("The cat sat on", {"temperature": 1.5, "seed": 11, "presence_penalty": 0.5}),
    ("The capital of France is", {"temperature": 0}),
]

OURS = "gumbel"

#: name -> (sampler, its settings, further arguments of the engine, requests, tokens).
RUNS = {
    "gumbel": (OURS, {}, {}, REQUESTS, 6),
    "in pieces": (OURS, {"backend": "triton"}, {"max_num_batched_tokens": 16}, REQUESTS, 3),
    "stock": ("default", {}, {}, SEEDED, 4),
    "stock's noise": (OURS, {"backend": "triton", "noise": "stock"}, {}, SEEDED, 4),
    "drafts": (OURS, {}, {"drafter": 2}, SEEDED, 4),
    "rejection": (OURS, {"verification": "rejection"}, {"drafter": 2}, SEEDED[2:], 4),
}


def main(model: str, output: str, *runs: str) -> None:
    """Write for each run the tokens and summed logprobs of its requests, a refusal, and the process's counters."""
    from prometheus_client import REGISTRY
    from vllm import LLM, SamplingParams
    from vllm.exceptions import VLLMValidationError

    written = {}
    for name in runs:
        sampler, settings, arguments, requests, tokens = RUNS[name]
        arguments = dict(arguments)
        drafts = arguments.pop("drafter", None)
        if drafts is not None:  # the model drafts for itself: where nothing is drawn, its drafts are right
            speculation = {"method": "draft_model", "model": model, "num_speculative_tokens": drafts}
            arguments["speculative_config"] = speculation
        llm = LLM(
            model,
            dtype="float32",
            enforce_eager=True,
            max_model_len=64,
            max_num_seqs=8,
            disable_log_stats=False,
            additional_config={"sampler": sampler, "sampler_config": settings},
            **arguments,
        )
        assert llm.llm_engine.vllm_config.use_v2_model_runner
        params = [SamplingParams(max_tokens=tokens, **request) for _, request in requests]
        outputs = [each.outputs[0] for each in llm.generate([p for p, _ in requests], params, use_tqdm=False)]
        try:
            llm.generate("x", SamplingParams(max_tokens=1, extra_args={"gumbel_salt": 0.5}), use_tqdm=False)
            refusal = None
        except VLLMValidationError as error:
            refusal = str(error)
        metrics: dict[str, float] = {}
        for sample in [sample for metric in REGISTRY.collect() for sample in metric.samples]:
            if sample.name.startswith(("vllm_gumbel_", "vllm:spec_decode_num")) and sample.name.endswith("_total"):
                metrics[sample.name] = metrics.get(sample.name, 0) + sample.value
        labels = [
            sample.labels
            for metric in REGISTRY.collect()
            for sample in metric.samples
            if sample.name == "vllm_gumbel_build_info"
        ]
        written[name] = {
            "tokens": [list(each.token_ids) for each in outputs],
            "logprobs": [each.cumulative_logprob for each in outputs],
            "refusal": refusal,
            "metrics": metrics,
            "labels": labels,
        }
        if name == OURS:
            written["features"] = answers(llm)
        llm.llm_engine.engine_core.shutdown()
        del llm
        gc.collect()
    Path(output).write_text(json.dumps(written))


if __name__ == "__main__":
    main(*sys.argv[1:])
