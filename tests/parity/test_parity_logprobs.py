"""Logprobs over HTTP: those of stock, for greedy tokens and for tokens that penalties have changed."""

import math

from tests.test_server import LONG_PROMPT

GREEDY = {"prompt": "The capital of France is", "temperature": 0, "max_tokens": 12}
CHAT = {"messages": [{"role": "user", "content": "Name a colour."}], "temperature": 0, "max_tokens": 12}
ALL = 49152


def test_logprobs_of_the_drawn_token_alone(pair):
    """logprobs 0; penalties change what is drawn, not its raw logprob."""
    for more in ({}, {"frequency_penalty": 1.5}):
        places = pair.choice(**GREEDY, **more, logprobs=0)["logprobs"]["top_logprobs"]
        assert [len(each) for each in places] == [1] * 12


def test_logprobs_of_the_five_best(pair):
    """And of the drawn token, where a bias has made another than these win."""
    for bias, counts in ({}, {5}), ({"30000": 100}, {5, 6}):
        logprobs = pair.choice(**GREEDY, logit_bias=bias, logprobs=5)["logprobs"]
        assert {len(each) for each in logprobs["top_logprobs"]} == counts
    chat = pair.alike("/v1/chat/completions", **CHAT, logprobs=True, top_logprobs=5)["choices"][0]
    assert {len(each["top_logprobs"]) for each in chat["logprobs"]["content"]} == {5}


def test_logprobs_of_all_ids(pair):
    body = {**GREEDY, "max_tokens": 2, "logprobs": -1, "return_tokens_as_token_ids": True}
    for place in pair.choice(**body)["logprobs"]["top_logprobs"]:
        assert len(place) == ALL
        assert math.isclose(sum(math.exp(each) for each in place.values()), 1, abs_tol=1e-3)


def test_logprobs_of_the_prompt(pair):
    """Of a prompt in pieces, and of an echo; they come from the runner, past the sampler."""
    first, *others = pair.choice(**{**GREEDY, "prompt": LONG_PROMPT}, prompt_logprobs=3)["prompt_logprobs"]
    assert first is None
    assert len(others) > 3 * 64
    assert all(len(each) in (3, 4) for each in others)
    echo = pair.choice(**GREEDY, echo=True, logprobs=2, return_token_ids=False)
    assert echo["text"].startswith(GREEDY["prompt"])
    assert len(echo["logprobs"]["token_logprobs"]) > 12


def test_logprobs_of_chosen_ids(pair):
    """logprob_token_ids, beside requests that ask for others."""
    ids = [5, 7042, 300]
    places = pair.choice(**GREEDY, logprobs=1, logprob_token_ids=ids, return_tokens_as_token_ids=True)["logprobs"]
    for place in places["top_logprobs"]:
        assert {f"token_id:{each}" for each in ids} <= place.keys()


def test_logprobs_change_no_draw(pair):
    """And a drawn token has the logprob that it has when it is not the only one asked for."""
    seeded = {**GREEDY, "temperature": 1.0, "seed": 5, "return_token_ids": True}
    answers = [
        pair.ours.complete(**seeded, **more).json()["choices"][0] for more in ({}, {"logprobs": 0}, {"logprobs": 5})
    ]
    assert len({tuple(each["token_ids"]) for each in answers}) == 1
    for none, five in zip(*(each["logprobs"]["token_logprobs"] for each in answers[1:]), strict=True):
        assert math.isclose(none, five, abs_tol=1e-5)
