"""Generates with the default model and writes, as JSON, what came out and whether the plugin was loaded.

usage: python -m tests.stock_outputs MODEL OUTPUT [ADDITIONAL_CONFIG]

`tests/test_stock.py` runs it in processes of their own, with and without the plugin.
"""

import json
import sys
from pathlib import Path

PROMPTS = ["The capital of France is", "Once upon a time there was a", "1, 2, 3,"]
REQUESTS = [
    {"temperature": 0},
    {"temperature": 0, "repetition_penalty": 1.3, "logprobs": 2},
    {"temperature": 1.0, "seed": 7},
    {"temperature": 0.8, "seed": 1, "top_p": 0.9, "n": 2},
    {"temperature": 1.2, "seed": 2, "top_k": 40, "min_p": 0.01, "frequency_penalty": 0.5},
]


def main(model: str, output: str, additional: str = "{}") -> None:
    """Run one engine and write its outputs, one list of token ids per choice of each request of each prompt."""
    from vllm import LLM, SamplingParams
    from vllm.engine.arg_utils import EngineArgs

    llm = LLM(model, dtype="float32", enforce_eager=True, max_model_len=256, additional_config=json.loads(additional))
    prompts = [prompt for prompt in PROMPTS for _ in REQUESTS]
    params = [SamplingParams(max_tokens=12, ignore_eos=True, **request) for _ in PROMPTS for request in REQUESTS]
    choices = [result.outputs for result in llm.generate(prompts, params, use_tqdm=False)]
    written = {
        "plugin": hasattr(EngineArgs.add_cli_args, "wrapped_by_vllm_gumbel"),
        "tokens": [[list(choice.token_ids) for choice in each] for each in choices],
        "logprobs": [[choice.cumulative_logprob for choice in each] for each in choices],
    }
    Path(output).write_text(json.dumps(written))


if __name__ == "__main__":
    main(*sys.argv[1:])
