"""Random requests of which nobody knows what becomes of them: legal ones with some fields replaced by anything.

They may be answered or refused, but must not be an error of the server.
"""

import json
import random
from typing import Any

from scripts.fuzz_refusals import HALF_A_PAIR, HUGE, INFINITY, NAN, WRONG_KEYS, spell
from scripts.fuzz_requests import CHAT, COMPLETIONS, Request, legal

#: Every field of the two endpoints by what it takes; a test compares them with vLLM's.
FIELDS = {
    "number": """
        frequency_penalty length_penalty logprobs max_completion_tokens max_tokens min_p min_tokens n presence_penalty
        priority prompt_logprobs repetition_penalty routed_experts_prompt_start seed stream_interval temperature
        thinking_token_budget top_k top_logprobs top_p truncate_prompt_tokens""",
    "text": """
        cache_salt chat_template mm_payload model prompt prompt_embeds reasoning_effort request_id session_id suffix
        tool_choice truncation_side user""",
    "truth": """
        add_generation_prompt add_special_tokens continue_final_message echo ignore_eos include_reasoning
        include_stop_str_in_output parallel_tool_calls return_mm_kwargs return_prompt_text return_token_ids
        return_token_offsets return_tokens_as_token_ids skip_special_tokens spaces_between_special_tokens stream
        use_beam_search watermarking""",
    "list": "allowed_token_ids bad_words documents logprob_token_ids messages stop stop_token_ids tools",
    "object": """
        chat_template_kwargs ec_transfer_params kv_transfer_params logit_bias media_io_kwargs mm_processor_kwargs
        repetition_detection response_format stream_options structured_outputs vllm_xargs""",
}
KIND_OF = {name: kind for kind, names in FIELDS.items() for name in names.split()}

NUMBERS: list[Any] = [0, -1, 1, 2, 3, 0.5, -0.0, 1e308, 5e-324, 1e-30, 1e30, HUGE, NAN, INFINITY, -INFINITY, 10**30]
NUMBERS += [2**31 - 1, 2**31, 2**32, 2**53 + 1, 2**63 - 1, 2**63, 2**64 - 1, 2**64, -(2**63), -(2**63) - 1, 20, 511]
TEXTS = [
    "",
    "0",
    "1",
    "NaN",
    "none",
    "auto",
    "high",
    "left",
    "x" * 10_000,
    "a" * 500,
    "\x00",
    "😀",
    "{{ x }}",
    HALF_A_PAIR,
]
LISTS: list[Any] = [[], [0], [-1], [2**40], [None], [0.5], ["a", "b"], ["a" * 9_000], ["\x00"], [[1]], [[]], [{}]]
LISTS += [list(range(258)), [258, 299], list(range(258, 300)), [256], [257], [5, 5, 5], ["a"] * 200, [HALF_A_PAIR]]
ENDLESS = {"grammar": "root ::= root"}
OBJECTS: list[Any] = [
    {},
    {"a": 1},
    {"5": 1},
    {"5": NAN},
    {"400": 1},
    {"299": 100},
    {"a": {"b": []}},
    {"include_usage": 1},
]
OBJECTS += [
    {"type": "json_object"},
    {"json": {}},
    {"json": "true"},
    {"json": {"type": "object"}},
    {"choice": ["", "a"]},
]
OBJECTS += [{"regex": "[" * 50}, {"regex": ""}, {"regex": "(a{1,50}){1,50}"}, {"structural_tag": "{}"}, {"json": False}]
OBJECTS += [ENDLESS, {"choice": ["\x00", "😀"]}, {"max_pattern_size": 9, "min_count": 2}]
OBJECTS += [{"gumbel_salt": 3}, {"gumbel_sampler": "default"}, {"gumbel_rollout_key": "\x00"}]
VALUES = {"number": NUMBERS, "text": TEXTS, "truth": [True, False, 0, 1, None], "list": LISTS, "object": OBJECTS}
ANYTHING = [each for values in VALUES.values() for each in values]


def fails_in_vllm(name: str, value: Any) -> bool:
    """Return whether a field makes vLLM's own server (0.32) answer 500, or draw from NaN.

    - `structured_outputs` that is no object: a validator asks any value for its `get`, and the connection is closed;
    - a grammar that allows no first token;
    - `repetition_penalty` that float32 takes for 0 or infinity, or NaN: logits are divided and multiplied by it;
    - half of a surrogate pair, or an integer past 64 bits, in what goes to the engine: it cannot be encoded, and nobody
      looks before it is sent.
    """
    if name == "structured_outputs":
        return value == ENDLESS or (value is not None and not isinstance(value, dict))
    if name == "repetition_penalty":
        return isinstance(value, int | float) and not (value <= 0 or 1e-37 < value < 3e38)
    if name in ("top_k", "stream_interval"):
        return isinstance(value, int) and value >= 2**64
    return name not in ("prompt", "messages") and "\\ud800" in json.dumps(value)


def wild(rng: random.Random, number: int) -> Request:
    """Return such a request; most values are of the kind that their field takes."""
    path = rng.choice([COMPLETIONS, CHAT])
    body, _ = legal(rng, path)
    for _ in range(rng.choice([1, 1, 1, 2, 3])):
        name = rng.choice(list(KIND_OF) if rng.random() < 0.7 else list(body))
        value = rng.choice(VALUES[KIND_OF[name]] if rng.random() < 0.9 else ANYTHING)
        if not fails_in_vllm(name, value):
            body[name] = value
    if body.keys() & {"structured_outputs", "response_format"}:
        for name in ("stop_token_ids", "allowed_token_ids", "bad_words"):  # nothing may be left, which is a 500 of vLLM
            body.pop(name, None)
    if rng.random() < 0.2:
        body["vllm_xargs"] = {rng.choice(list(WRONG_KEYS)): rng.choice(ANYTHING)}
    return Request(number, "wild", path, spell(body))
