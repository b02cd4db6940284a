"""Random legal requests for a server: every combination of parameters that has to be answered."""

import json
import random
import string
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from scripts.fuzz_model import USABLE, VOCAB

MODEL = "smollm2"
#: Tokens of a prompt and its text together that the server takes.
LONGEST = 512
COMPLETIONS, CHAT = "/v1/completions", "/v1/chat/completions"

LETTERS = string.ascii_letters + string.digits + " .,\n"
ODD_TEXTS = [
    "😀",
    "\x00",
    "é",
    "\u2028",
    "漢字",
    "\ufeff",
    "\u202e",
    "\\",
    '"',
    "</s>",
    "<s>",
    "{{ x }}",
    "\x7f",
    "🏳️‍🌈",
]
STOPS = ["a", "e", " ", "\n", "the", "é", "😀", "zz", "</s>"]

STRUCTURES: list[dict[str, Any]] = [
    {"choice": ["yes", "no", "maybe 😀"]},
    {"regex": "[a-f]{2,9}"},
    {"regex": "(a|bc)*d?"},
    {"json": {"type": "object", "properties": {"n": {"type": "integer"}}, "required": ["n"]}},
    {"json": {"type": "array", "items": {"enum": ["a", "b", 1]}, "maxItems": 3}},
    {"json_object": True},
    {"grammar": 'root ::= ("x" | "y") [0-9]+ "."'},
]
FORMATS: list[dict[str, Any]] = [
    {"type": "text"},
    {"type": "json_object"},
    {"type": "json_schema", "json_schema": {"name": "a", "schema": {"type": "boolean"}}},
]


@dataclass(frozen=True)
class Request:
    """A request and what has to become of it.

    Attributes:
        number: of the request.
        kind: `served`, `refused`, `wild` or `broken`.
        path: of the endpoint.
        content: the body.
        choices: how many texts it asks for; 0 if that is not known.
        longest: how many tokens each of them has at most.
        leaves_after: the client goes after so many tokens; None to stay.
        beams: whether it asks for beam search, which draws more tokens than it sends, may end fewer beams than it was
            asked for, and chooses among ids of equal logits by chance.
        repeats: whether it has the same tokens whenever it is asked.
        says: what a refusal has to say.
    """

    number: int
    kind: str
    path: str
    content: str
    choices: int = 0
    longest: int = LONGEST
    leaves_after: int | None = None
    beams: bool = False
    repeats: bool = False
    says: str = ""


def served(rng: random.Random, number: int) -> Request:
    """Return a legal request."""
    path = rng.choices([COMPLETIONS, CHAT], [2, 1])[0]
    if rng.random() < 0.02:
        return _beams(rng, number, path)
    body, prompts = legal(rng, path)
    leaves = None
    if body.get("stream") and rng.random() < 0.12:
        leaves = rng.randrange(1, LONGEST // 20)
    elif not body.get("stream") and rng.random() < 0.02:
        leaves = 0
    seed, count = body.get("seed"), body.get("n", 1)
    # To vLLM -1 is no seed; of n texts the one that draws with `seed + k` of -1 is not seeded either.
    seeded = seed is not None and not seed <= -1 < seed + count
    return Request(
        number,
        "served",
        path,
        json.dumps(body),
        choices=count * prompts,
        longest=body.get("max_completion_tokens", body["max_tokens"]),
        leaves_after=leaves,
        repeats=seeded or body.get("temperature") == 0,
    )


def legal(rng: random.Random, path: str) -> tuple[dict[str, Any], int]:
    """Return the body of a legal request without beams, and how many prompts it has."""
    body: dict[str, Any] = {"model": MODEL, "return_token_ids": True}
    body["max_tokens"] = rng.choice([1, 1, 2, 3, 4, 5, 6, 8, 16])
    if path == CHAT and rng.random() < 0.3:
        body["max_completion_tokens"] = rng.choice([1, 2, 5, 9])
    longest = body.get("max_completion_tokens", body["max_tokens"])
    prompts = _put_prompt(rng, body, path, LONGEST - longest)
    _put_law(rng, body)
    _put_ending(rng, body, longest)
    _put_masks(rng, body)
    _put_keys(rng, body)
    body.update(_some(rng, 0.4, stream=[True]))
    _put_shown(rng, body, path)
    body.update(_some(rng, 0.03, user=["somebody", "😀" * 50], priority=[0], cache_salt=["s"], session_id=["one"]))
    body.update(_some(rng, 0.03, request_id=["same", f"{rng.random()}"], skip_special_tokens=[True, False]))
    body.update(_some(rng, 0.03, spaces_between_special_tokens=[True, False], include_reasoning=[True, False]))
    return body, prompts


def _some(rng: random.Random, share: float, **pools: Sequence[Any]) -> dict[str, Any]:
    """Return some of the fields, each with a value of its pool; an absent field is one of the choices."""
    return {name: rng.choice(pool) for name, pool in pools.items() if rng.random() < share}


def text(rng: random.Random, longest: int) -> str:
    """Return a prompt of at most so many bytes, and at least one."""
    room = min(rng.choice([1, 3, 8, 20, 20, 40, 40, 120, longest]), longest)
    pieces: list[str] = []
    while True:
        piece = rng.choice(ODD_TEXTS) if rng.random() < 0.05 else rng.choice(LETTERS)
        room -= len(piece.encode())
        if room < 0:
            return "".join(pieces) or "x"
        pieces.append(piece)


def _put_prompt(rng: random.Random, body: dict[str, Any], path: str, room: int) -> int:
    """Put a prompt of at most `room` tokens into a body, and return how many prompts it is."""
    if path == CHAT:
        messages: list[dict[str, Any]] = [{"role": "user", "content": text(rng, room - 60)}]
        if rng.random() < 0.3:
            messages.insert(0, {"role": "system", "content": "Be 😀."})
        if rng.random() < 0.2:
            messages[-1]["content"] = [{"type": "text", "text": messages[-1]["content"]}]
        if rng.random() < 0.1:
            messages.append({"role": "assistant", "content": rng.choice(["", "So"])})
        body["messages"] = messages
        body.update(_some(rng, 0.05, chat_template_kwargs=[{"x": 1}], add_generation_prompt=[True, False]))
        return 1
    if rng.random() < 0.05:
        body.update(truncate_prompt_tokens=rng.choice([1, 7, 60]))
        body.update(_some(rng, 0.5, truncation_side=["left", "right"]))
    form = rng.choices(["text", "texts", "ids", "lists"], [6, 1, 2, 1])[0]
    if form == "text":
        body["prompt"] = text(rng, room)
        return 1
    if form == "ids":
        body["prompt"] = [rng.randrange(USABLE) for _ in range(rng.choice([1, 2, 30, room]))]
        return 1
    count = rng.choice([1, 2, 3])
    one = (lambda: text(rng, room)) if form == "texts" else (lambda: [rng.randrange(USABLE) for _ in range(9)])
    body["prompt"] = [one() for _ in range(count)]
    return count


def _put_law(rng: random.Random, body: dict[str, Any]) -> None:
    """Choose temperature, filters, penalties and seed."""
    body.update(_some(rng, 0.7, temperature=[0, 1e-7, 0.005, 0.3, 0.7, 1, 1.0, 1.3, 2, None]))
    body.update(_some(rng, 0.25, top_p=[1e-9, 0.1, 0.5, 0.9, 0.95, 1 - 2**-24, 1.0, None, 1 - rng.random()]))
    body.update(_some(rng, 0.25, top_k=[-1, 0, 1, 2, 40, USABLE, VOCAB, 10**6, 2**31 - 1, None]))
    body.update(_some(rng, 0.2, min_p=[0, 1e-9, 0.05, 0.3, 1, None]))
    body.update(_some(rng, 0.12, presence_penalty=[-2, 0.5, 2], frequency_penalty=[-2, 0.3, 2, 0]))
    body.update(_some(rng, 0.12, repetition_penalty=[0.05, 0.9, 1, 1.2, 10]))
    body.update(_some(rng, 0.7, seed=[0, 1, 42, -1, -2, 2**63 - 1, -(2**63), rng.randrange(2**62)]))
    if body.get("temperature", 1) != 0:
        body.update(_some(rng, 0.15, n=[1, 2, 3]))


def _put_ending(rng: random.Random, body: dict[str, Any], longest: int) -> None:
    """Choose what ends a text."""
    body.update(_some(rng, 0.2, ignore_eos=[True, False], min_tokens=range(longest + 1)))
    body.update(_some(rng, 0.15, stop=[rng.choice(STOPS), rng.sample(STOPS, 3), []]))
    body.update(_some(rng, 0.1, include_stop_str_in_output=[True, False]))
    body.update(_some(rng, 0.1, stop_token_ids=[[], [rng.randrange(VOCAB)], rng.sample(range(VOCAB), 9)]))
    detection = {"max_pattern_size": 3, "min_pattern_size": 1, "min_count": 2}
    body.update(_some(rng, 0.05, repetition_detection=[detection, {"max_pattern_size": 0}]))


def _put_masks(rng: random.Random, body: dict[str, Any]) -> None:
    """Choose which ids may come; a structure only alone, since with others nothing may be left."""
    if rng.random() < 0.1:
        body["structured_outputs"] = rng.choice(STRUCTURES)
        body.pop("stop_token_ids", None)
    elif rng.random() < 0.05:
        body["response_format"] = rng.choice(FORMATS)
        body.pop("stop_token_ids", None)
    else:
        ids = rng.sample(range(USABLE), rng.choice([1, 3, 60]))
        bias = {str(each): rng.choice([-100, -1.5, 0, 3, 100]) for each in ids[:20]}
        body.update(_some(rng, 0.1, allowed_token_ids=[ids], logit_bias=[bias, {}]))
        body.update(_some(rng, 0.1, bad_words=[["a"], ["the", "😀", "q"], []]))


def _put_keys(rng: random.Random, body: dict[str, Any]) -> None:
    """Choose keys of the sampler that do not contradict each other or the temperature."""
    if rng.random() < 0.5:
        return
    keys = _some(rng, 0.3, gumbel_rollout_key=["user", "😀" * 256, 7, -(2**63), 2**64 - 1])
    temperature = body.get("temperature")
    if temperature is None or temperature == 1:
        keys.update(_some(rng, 0.2, gumbel_preset=["creative", "factual"]))
    keys.update(_some(rng, 0.15, gumbel_temperature_rule=["none", "log_vocab"]))
    keys.update(_some(rng, 0.15, gumbel_top_n=[1, 20, VOCAB, 2**31 - 1]))
    keys.update(_some(rng, 0.15, gumbel_repetition_offset=[0, 0.5, 10, 100]))
    keys.update(_some(rng, 0.2, gumbel_sampler=["gumbel", "default"]))
    if keys.get("gumbel_sampler") != "default":
        keys.update(_some(rng, 0.3, gumbel_salt=[0, 7, -(2**63), 2**64 - 1], gumbel_return_info=[True, False, 0, 1]))
        if temperature != 0:
            keys.update(_some(rng, 0.15, gumbel_hybrid_steps=[0, 3, 2**31 - 1]))
            keys.update(_some(rng, 0.15, gumbel_tail_boost=[0, 0.3, 10]))
            keys.update(_some(rng, 0.15, gumbel_noise_scale=[0, 0.5, 1.0, 5e-324]))
    body["vllm_xargs"] = keys | _some(rng, 0.1, of_somebody_else=["x", [1, 2.5, "a"], 3])


def _put_shown(rng: random.Random, body: dict[str, Any], path: str) -> None:
    """Choose what an answer shows beside its tokens, and how a stream comes."""
    ids = rng.sample(range(VOCAB), 5)
    body.update(_some(rng, 0.05, return_tokens_as_token_ids=[True, False]))
    if path == CHAT:
        if rng.random() < 0.2:
            body.update(logprobs=True, **_some(rng, 0.7, top_logprobs=[0, 1, 5, 20, -1], logprob_token_ids=[ids]))
    elif rng.random() < 0.2:
        body.update(logprobs=rng.choice([0, 1, 5, 20, -1]), **_some(rng, 0.1, logprob_token_ids=[ids]))
    if path == COMPLETIONS:
        body.update(_some(rng, 0.05, echo=[True, False]))
    if not body.get("stream"):
        body.update(_some(rng, 0.05, prompt_logprobs=[0, 1, 4, -1]))
        return
    body.update(_some(rng, 0.3, stream_options=[{"include_usage": True}, {"continuous_usage_stats": True}, {}]))
    body.update(_some(rng, 0.1, stream_interval=[1, 3, 100]))


def _beams(rng: random.Random, number: int, path: str) -> Request:
    body = {"model": MODEL, "return_token_ids": True, "use_beam_search": True, "max_tokens": rng.choice([1, 3, 6])}
    body.update(n=rng.choice([1, 2, 3]), **_some(rng, 0.5, temperature=[0, 0.7, 1], length_penalty=[0.5, 1, 2]))
    body.update(_some(rng, 0.3, ignore_eos=[True, False]))
    prompt = text(rng, 100)
    body.update({"messages": [{"role": "user", "content": prompt}]} if path == CHAT else {"prompt": prompt})
    sizes = {"choices": body["n"], "longest": body["max_tokens"]}
    return Request(number, "served", path, json.dumps(body), beams=True, **sizes)
