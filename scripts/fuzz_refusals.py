"""Random requests that a server has to refuse with a 4xx and words, and bodies that are no requests at all."""

import json
import random
from typing import Any

from scripts.fuzz_model import VOCAB
from scripts.fuzz_requests import CHAT, COMPLETIONS, LONGEST, MODEL, Request
from vllm_gumbel.params import GumbelParams

NAN, INFINITY = float("nan"), float("inf")
#: Stands in a body for a number that JSON can spell and Python cannot.
HUGE = "<1e400>"

#: A string that JSON can spell and UTF-8 cannot.
HALF_A_PAIR = "\ud800"

#: Values of fields, either of which alone makes a request wrong.
WRONG: dict[str, list[Any]] = {
    "temperature": [-0.1, 2.1, "hot", [], {}, NAN, INFINITY, -INFINITY, HUGE, 10**400],
    "top_p": [0, -1, 1.1, NAN, INFINITY, "x", [0.5]],
    "top_k": [-2, 0.5, "many", [1], NAN, INFINITY, HUGE],
    "min_p": [-0.1, 1.1, NAN, INFINITY, "x"],
    "presence_penalty": [-2.1, 2.1, NAN, INFINITY, "x"],
    "frequency_penalty": [-2.1, 2.1, NAN, -INFINITY, {}],
    "repetition_penalty": [0, -1, NAN, INFINITY, "x"],
    "seed": [2**63, 2**64, -(2**63) - 1, 0.5, "x", [1], NAN, 10**30],
    "n": [0, -1, 1.5, "two", 16385, 2**31, 10**20],
    "max_tokens": [-1, "x", 1.5, [], NAN],
    "min_tokens": [-1, 100, "x", 2**40],
    "stop": [[""], 5, [1], ["a"] * 5, {}],
    "stop_token_ids": [[VOCAB], [-1], [2**40], ["x"], "x", [2**70]],
    "logit_bias": [{"x": 1}, {"5": NAN}, {"5": INFINITY}, {str(VOCAB): 1}, {"-1": 1}, {"5": "x"}, [5], {"5": HUGE}],
    "allowed_token_ids": [[], [VOCAB], [-1], ["x"], 5, [2**40]],
    "bad_words": [[""], [1], "x", [" "]],
    "prompt_logprobs": [-2, VOCAB + 1, "x", 2**40],
    "structured_outputs": [
        {},
        {"regex": "("},
        {"regex": "a\x00"},
        {"choice": []},
        {"json": "{"},
        {"json": ""},
        {"grammar": "root ::= ("},
        {"grammar": " "},
        {"regex": "a", "choice": ["a"]},
        {"json_object": False},
        {"json": json.loads("[" * 300 + "]" * 300)},
    ],
    "response_format": [{"type": "json_schema"}, {"type": "xml"}, {}, "json", {"type": "structural_tag"}],
    "repetition_detection": [{"max_pattern_size": 3}, {"min_pattern_size": 2}, {"max_pattern_size": -1}],
    "stream_options": [5, "x"],
    "stream_interval": [0, -1, "x"],
    "truncate_prompt_tokens": [-2, "x", 2**70],
    "cache_salt": ["", "a/b", "\x00", "x" * 2000, 5],
    "priority": ["x", 0.5, 2**70],
    "vllm_xargs": [5, [], "x", {"a": {"b": 1}}, {"a": [[1]]}, {"a": None}],
    "model": ["another", "😀" * 1000],
}
WRONG_COMPLETIONS: dict[str, list[Any]] = {
    "prompt": [
        "",
        [],
        [[]],
        {},
        5,
        [VOCAB],
        [-1],
        [2**70],
        ["a", 1],
        "a" * LONGEST,
        "a" * 200_000,
        [1] * LONGEST,
        None,
    ],
    "logprobs": [-2, VOCAB + 1, "x"],
    "suffix": ["after"],
}
WRONG_CHAT: dict[str, list[Any]] = {
    "messages": [
        [],
        5,
        "x",
        [{}],
        [{"role": "user"}, 5],
        [{"role": "user", "content": 5}],
        [{"role": "user", "content": "a" * LONGEST}],
        [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "file:///etc/passwd"}}]}],
    ],
    "top_logprobs": [-2, 5, "x"],
    "tool_choice": ["required", "auto", "x", {"type": "function"}],
    "tools": [[], 5],
    "chat_template": ["{{ messages }}"],
}

#: Values of keys, either of which is refused; what the refusal says begins with the key.
WRONG_KEYS: dict[str, list[Any]] = {
    "gumbel_sampler": ["stock", 1, "", "\x00", ["gumbel"]],
    "gumbel_rollout_key": ["", HALF_A_PAIR, "x" * 257, "x" * 100_000, 0.5, NAN, ["user"], 2**64],
    "gumbel_salt": ["5", 0.5, [1], NAN, INFINITY, HUGE, 2**64, -(2**63) - 1, 10**30],
    "gumbel_preset": ["wild", "", HALF_A_PAIR, 1, ["creative"], "😀" * 5000],
    "gumbel_temperature_rule": ["log", 1, NAN],
    "gumbel_hybrid_steps": [-1, 2.5, 2**31, 2**40, "x", NAN],
    "gumbel_top_n": [0, -1, "50", [50], 2**31, -(2**70)],
    "gumbel_tail_boost": [-0.1, 10.1, NAN, INFINITY, HUGE, "x"],
    "gumbel_repetition_offset": [101, -1, -INFINITY, "x", []],
    "gumbel_noise_scale": [1.5, -0.5, "0.5", NAN],
    "gumbel_return_info": ["yes", 2, 0.5, [1]],
    "gumbel_": [1],
    "gumbel_\x00": [1],
    "gumbel_" + "x" * 10_000: [1],
}
#: Keys that contradict one another or the temperature, with the one that is named.
CONTRADICTIONS: list[tuple[str, dict[str, Any], dict[str, Any]]] = [
    ("gumbel_salt", {"gumbel_salt": 1, "gumbel_sampler": "default"}, {}),
    ("gumbel_return_info", {"gumbel_return_info": True, "gumbel_sampler": "default"}, {}),
    ("gumbel_hybrid_steps", {"gumbel_hybrid_steps": 3}, {"temperature": 0}),
    ("gumbel_tail_boost", {"gumbel_tail_boost": 1}, {"temperature": 0}),
    ("gumbel_noise_scale", {"gumbel_noise_scale": 0.5}, {"temperature": 0}),
    ("gumbel_preset", {"gumbel_preset": "factual"}, {"temperature": 0.5}),
]

#: What is no body of a request at all.
BROKEN = [
    "",
    "{",
    "null",
    "5",
    "[]",
    '"x"',
    "\x00",
    "[" * 100_000,
    '{"model": "smollm2", "prompt": ' + "[" * 5_000 + "]" * 5_000 + "}",
    '{"model": "smollm2", "prompt": "x", "seed": ' + "9" * 5_000 + "}",
    '{"model": "smollm2", "prompt": "x", "vllm_xargs": {"gumbel_salt": ' + "9" * 5_000 + "}}",
    '{"a":' * 20_000 + "1" + "}" * 20_000,
    '{"model": "smollm2"}',
    "{'model': 'smollm2'}",
    '{"prompt": "' + "x" * 1_000_000,
]


def spell(body: dict[str, Any]) -> str:
    """Return a body as JSON, with NaN and numbers without end as clients have sent them."""
    return json.dumps(body).replace(f'"{HUGE}"', "1e400")


def _plain(rng: random.Random, path: str) -> dict[str, Any]:
    body: dict[str, Any] = {"model": MODEL, "max_tokens": 4, "return_token_ids": True}
    body.update({"messages": [{"role": "user", "content": "x"}]} if path == CHAT else {"prompt": "x"})
    if rng.random() < 0.4:
        body["stream"] = True
    if rng.random() < 0.3:
        body["seed"] = 1
    return body


def refused(rng: random.Random, number: int) -> Request:
    """Return a request in which one thing is wrong."""
    path = rng.choice([COMPLETIONS, CHAT])
    body, says = _plain(rng, path), ""
    which = rng.random()
    if which < 0.4:
        says = rng.choice(list(WRONG_KEYS))
        body["vllm_xargs"] = {says: rng.choice(WRONG_KEYS[says])}
        says = says if says in GumbelParams.model_fields else "is not a known parameter"
    elif which < 0.5:
        says, keys, others = rng.choice(CONTRADICTIONS)
        body.update(vllm_xargs=keys, **others)
    else:
        pool = WRONG | (WRONG_CHAT if path == CHAT else WRONG_COMPLETIONS)
        field = rng.choice(list(pool))
        body[field] = rng.choice(pool[field])
        if field == "prompt_logprobs":
            body.pop("stream", None)
    return Request(number, "refused", path, spell(body), says=says)


def broken(rng: random.Random, number: int) -> Request:
    """Return a body that is no request."""
    return Request(number, "broken", rng.choice([COMPLETIONS, CHAT]), rng.choice(BROKEN))
