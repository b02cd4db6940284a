"""Runs engines of a tiny model with either sampler, and writes as JSON what came out of each.

usage: python -m tests.parity.engines MODEL DRAFTER OUTPUT

What an engine fixes at its start needs one of its own; with a model of two layers one is there in seconds. All run in
one process, `tests/parity/test_parity_engines.py` starts it.
"""

import gc
import json
import sys
from pathlib import Path

MODES = ("raw_logprobs", "processed_logprobs", "raw_logits", "processed_logits")
SAMPLERS = ("default", "gumbel")
PROMPTS = ["Hello", "one two one two one two one", "abcabcabcabc"]

#: Requests of which noise decides nothing, so that their logprobs are comparable: greedy, filtered down to one id, or
#: with one id far above all others.
DECIDED = [
    {"temperature": 0},
    {"temperature": 0, "repetition_penalty": 1.3, "presence_penalty": 0.5, "logit_bias": {70: 2.0}},
    {"temperature": 0, "allowed_token_ids": [65, 66, 67, 68]},
    {"temperature": 0.7, "top_k": 1},
    {"temperature": 1.3, "logit_bias": {80: 100.0}},
    {"temperature": 0.6, "logit_bias": {80: 100.0}, "top_k": 9, "min_p": 1e-30},
    {"temperature": 0.9, "logit_bias": {80: 100.0}, "top_p": 0.8, "frequency_penalty": 0.1},
]

#: Requests by what they ask for; all of a kind are one batch, and `mixed` asks for different things at once.
ASKED = {
    "0": [{"logprobs": 0}],
    "5": [{"logprobs": 5}],
    "all": [{"logprobs": -1}],
    "ids": [{"logprob_token_ids": [65, 7, 257]}],
    "prompt": [{"prompt_logprobs": 3, "logprobs": 1}, {"prompt_logprobs": -1}],
    "mixed": [{"logprobs": 0}, {"logprobs": 5}, {}, {"logprobs": -1}, {"prompt_logprobs": 2}],
}

#: Requests that drafts must not change.
SEEDED = [
    {"temperature": 0},
    {"temperature": 0, "repetition_penalty": 1.2},
    {"temperature": 1.0, "seed": 1},
    {"temperature": 0.7, "seed": 2, "top_k": 20, "top_p": 0.9},
    {"temperature": 0.8, "seed": 3, "presence_penalty": 0.6, "bad_words": ["e"]},
]

#: name -> (sampler, further arguments of the engine); `DRAFTER` and `MODEL` are paths.
DRAFTS = {
    "no drafts, stock": ("default", None),
    "no drafts": ("gumbel", None),
    "drafts of the model itself": ("gumbel", "MODEL"),
    "drafts of another model": ("gumbel", "DRAFTER"),
    "drafts of another model, stock": ("default", "DRAFTER"),
}


def start(model: str, sampler: str, **arguments):
    """Return an engine."""
    from vllm import LLM

    return LLM(
        model,
        dtype="float32",
        enforce_eager=True,
        max_model_len=256,
        max_num_seqs=64,
        disable_log_stats=False,
        max_logprobs=-1,
        enable_prefix_caching=False,
        additional_config={"sampler": sampler},
        **arguments,
    )


def plain(logprobs) -> list | None:
    """Return logprobs of places as lists of (id, logprob), by id."""
    if logprobs is None:
        return None
    return [each and sorted((token, found.logprob) for token, found in each.items()) for each in logprobs]


def ranks(choice) -> list | None:
    """Return the rank of each drawn token."""
    if choice.logprobs is None:
        return None
    return [place[token].rank for place, token in zip(choice.logprobs, choice.token_ids, strict=True)]


def answers(llm, requests: list[dict], tokens: int) -> list[dict]:
    """Return what an engine says to each request of each prompt, all at once."""
    from vllm import SamplingParams

    each = [(p, SamplingParams(max_tokens=tokens, ignore_eos=True, **r)) for p in PROMPTS for r in requests]
    outputs = llm.generate([prompt for prompt, _ in each], [params for _, params in each], use_tqdm=False)
    return [
        {
            "tokens": list(output.outputs[0].token_ids),
            "logprobs": plain(output.outputs[0].logprobs),
            "ranks": ranks(output.outputs[0]),
            "prompt": plain(output.prompt_logprobs),
            "sum": output.outputs[0].cumulative_logprob,
        }
        for output in outputs
    ]


def stop(llm) -> None:
    """End an engine."""
    llm.llm_engine.engine_core.shutdown()
    gc.collect()


def logprobs(model: str) -> dict:
    """Return the answers by mode, sampler and what is asked."""
    found: dict = {}
    for mode in MODES:
        for sampler in SAMPLERS:
            llm = start(model, sampler, logprobs_mode=mode)
            found[f"{mode}, {sampler}"] = {
                name: answers(llm, [{**one, **more} for one in DECIDED for more in asked], 4)
                for name, asked in ASKED.items()
            }
            stop(llm)
            del llm
    return found


def drafts(model: str, drafter: str) -> dict:
    """Return the answers with and without drafts, and how many drafts there were and were accepted."""
    found: dict = {}
    for name, (sampler, drafting) in DRAFTS.items():
        arguments = {}
        if drafting is not None:
            path = model if drafting == "MODEL" else drafter
            config = {"method": "draft_model", "model": path, "num_speculative_tokens": 3}
            arguments = {"speculative_config": config, "async_scheduling": False}
        llm = start(model, sampler, **arguments)
        requests = SEEDED if sampler == "gumbel" else [each for each in SEEDED if each["temperature"] == 0]
        found[name] = {"answers": answers(llm, [{**each, "logprobs": 2} for each in requests], 24)}
        for metric in llm.get_metrics():
            if metric.name in ("vllm:spec_decode_num_draft_tokens", "vllm:spec_decode_num_accepted_tokens"):
                found[name][metric.name] = metric.value
        stop(llm)
        del llm
    return found


def main(model: str, drafter: str, output: str) -> None:
    """Run all."""
    Path(output).write_text(json.dumps({"logprobs": logprobs(model), "drafts": drafts(model, drafter)}))


if __name__ == "__main__":
    main(*sys.argv[1:])
