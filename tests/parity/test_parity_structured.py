"""Structured outputs: at temperature 0 stock's, when drawn valid all the same, and repeated by their seed."""

import json
import re

import pytest

SCHEMA = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 12},
        "age": {"type": "integer", "minimum": 0, "maximum": 120},
        "tags": {"type": "array", "items": {"type": "string", "enum": ["red", "green", "blue"]}, "maxItems": 3},
    },
    "required": ["name", "age", "tags"],
    "additionalProperties": False,
}
REGEX = r"[A-Z][a-z]{2,6}-\d{3}"
CHOICES = ["left", "right", "straight on"]
GRAMMAR = 'root ::= term (" + " term){1,3} " = ?"\nterm ::= [0-9]{1,3}\n'
PROMPT = "Answer: "


def is_person(text):
    found = json.loads(text)
    return found.keys() == SCHEMA["properties"].keys() and 0 <= found["age"] <= 120 and len(found["tags"]) <= 3


#: kind -> (what the request says, whether a text is one).
KINDS = {
    "json": ({"json": SCHEMA}, is_person),
    "regex": ({"regex": REGEX}, lambda text: re.fullmatch(REGEX, text)),
    "choice": ({"choice": CHOICES}, lambda text: text in CHOICES),
    "grammar": ({"grammar": GRAMMAR}, lambda text: re.fullmatch(r"\d{1,3}( \+ \d{1,3}){1,3} = \?", text)),
}


def check(pair, kind):
    """Ask both for a text of a kind, greedy, then ours for drawn ones."""
    structured, valid = KINDS[kind]
    body = {"prompt": PROMPT, "structured_outputs": structured, "max_tokens": 80}
    greedy = pair.choice(**body, temperature=0, logprobs=1)
    assert greedy["finish_reason"] == "stop"
    assert valid(greedy["text"]), greedy["text"]
    texts = []
    for seed in (1, 2, 1):
        answer = pair.ours.complete(**body, temperature=1.0, seed=seed).json()["choices"][0]
        if answer["finish_reason"] == "stop":
            assert valid(answer["text"]), answer["text"]
            texts.append(answer["text"])
    assert len(texts) >= 2, "most of them end"
    assert texts[0] == texts[-1]


def test_json_by_a_schema(pair):
    check(pair, "json")


def test_text_by_a_regex(pair):
    check(pair, "regex")


def test_choice_of_texts(pair):
    check(pair, "choice")


def test_text_by_a_grammar(pair):
    check(pair, "grammar")


def test_response_format_of_a_chat(pair):
    numbers = {"n": {"type": "integer", "enum": [1, 2, 3]}}
    schema = {"type": "object", "properties": numbers, "required": ["n"], "additionalProperties": False}
    asked = {"type": "json_schema", "json_schema": {"name": "number", "schema": schema}}
    messages = [{"role": "user", "content": "Give me a JSON object with a number."}]
    body = {"messages": messages, "max_tokens": 40, "temperature": 0, "response_format": asked}
    answer = pair.alike("/v1/chat/completions", **body)
    assert json.loads(answer["choices"][0]["message"]["content"])["n"] in (1, 2, 3)


@pytest.mark.parametrize("bad", [{"json": "{"}, {"regex": "("}, {"choice": []}, {"grammar": "root := 1"}], ids=str)
def test_bad_structure_is_refused_in_stocks_words(pair, bad):
    assert pair.refused(prompt=PROMPT, structured_outputs=bad)
