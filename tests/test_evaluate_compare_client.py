"""The client against a server that behaves badly: what is repeated, what is not, and what is said."""

import asyncio
import random

import pytest

from tests.openai_server import OpenAIServer, listening
from vllm_gumbel.evaluate import client_probe
from vllm_gumbel.evaluate.client import (
    ClientError,
    Endpoint,
    Features,
    HopelessError,
    Patience,
    RefusedError,
    UnavailableError,
    _retry_after,
    ask,
)
from vllm_gumbel.evaluate.client_probe import coupling, look
from vllm_gumbel.evaluate.prompts import Prompt

PROMPT = Prompt(id="p", prompt="Once upon a time")
CHAT = Prompt(id="c", messages=[{"role": "user", "content": "Hello"}])
PARAMS = {"max_tokens": 12, "seed": 3, "temperature": 1.0, "gumbel_salt": 5}


def asked(state, prompt=PROMPT, *, tries=1, params=PARAMS, features=None, key=None, timeout=60.0, chat=False):
    """Return the record of one request to a server that listens."""
    endpoint = Endpoint(state.url, "m", features or Features(token_ids=True), key)
    patience = Patience(tries, first_wait=0.001, luck=random.Random(0))

    async def go():
        async with endpoint.client(timeout, 4) as http:
            return await patience.repeated(lambda: ask(http, endpoint, prompt, params, "p/0", chat))

    return asyncio.run(go())


@pytest.fixture
def state():
    with listening(OpenAIServer()) as server:
        yield server


@pytest.mark.parametrize("prompt", [PROMPT, CHAT])
@pytest.mark.parametrize("mood", ["ok", "whole"])
def test_text_tokens_and_logprobs_come_streamed_or_not(state, prompt, mood):
    state.mood = lambda body, before: mood
    record = asked(state, prompt)
    (body,) = state.bodies
    tokens = state.tokens(body)
    assert record.output_token_ids == tokens
    assert record.output.replace("\u2028", "").split() == [f"w{token}" for token in tokens]
    assert record.logprobs == pytest.approx([-1 - token / 50 for token in tokens])
    assert record.prompt_token_ids == [1, 2, 3]
    assert record.params == PARAMS
    assert (record.first_token_seconds is None) == (mood == "whole")
    assert record.seconds >= (record.first_token_seconds or 0)
    assert body["vllm_xargs"] == {"gumbel_salt": 5}
    assert (body["seed"], body["temperature"], "gumbel_salt" in body) == (3, 1.0, False)


def test_plain_servers_get_nothing_that_is_vllms(state):
    record = asked(state, features=Features(), params={"max_tokens": 4, "seed": 1})
    assert state.bodies[0].keys() == {"model", "stream", "max_tokens", "seed", "prompt", "logprobs"}
    assert record.output_token_ids is None
    assert len(record.logprobs) == len(record.output.split())


def test_text_is_sent_as_a_chat_if_asked(state):
    asked(state, chat=True)
    assert state.bodies[0]["messages"] == [{"role": "user", "content": "Once upon a time"}]


def test_key_is_sent_only_if_there_is_one_and_never_shown(state):
    asked(state)
    asked(state, key="sk-secret")
    assert state.keys == [None, "Bearer sk-secret"]
    assert "sk-secret" not in repr(Endpoint("http://a", "m", key="sk-secret"))


PASSING = [
    "429",
    "503",
    "500",
    "hang up",
    "not json",
    "other form",
    "cut off",
    "ends early",
    "broken json",
    "error within",
]


@pytest.mark.parametrize("mood", PASSING)
def test_what_may_pass_is_asked_again(state, mood):
    state.mood = lambda body, before: mood if before < 2 else "ok"
    assert asked(state, tries=3).output_token_ids == state.tokens(state.bodies[0])
    assert len(state.bodies) == 3


@pytest.mark.parametrize("mood", PASSING)
def test_what_does_not_pass_is_said_in_words(state, mood):
    state.mood = lambda body, before: mood
    with pytest.raises(UnavailableError) as error:
        asked(state, tries=2)
    assert len(state.bodies) == 2
    said = {
        "429": "429 Too Many Requests: told to say 429",
        "hang up": "the connection broke",
        "not json": "the answer is no JSON: '<html>Welcome</html>'",
        "other form": "not the form of OpenAI's API",
        "cut off": "the connection broke",
        "ends early": "the answer was cut off",
        "broken json": "the answer is no JSON",
        "error within": "the server breaks off: out of memory",
    }
    assert said.get(mood, f"told to say {mood}") in str(error.value)


@pytest.mark.parametrize(("mood", "kind"), [("400", RefusedError), ("404", RefusedError), ("401", HopelessError)])
def test_refusals_are_not_repeated_and_quote_the_server(state, mood, kind):
    state.mood = lambda body, before: mood
    with pytest.raises(kind, match=f"{mood} .*told to say {mood}"):
        asked(state, tries=5)
    assert len(state.bodies) == 1


def test_nobody_there_and_nobody_in_time(state):
    with pytest.raises(UnavailableError, match="no connection"):
        asked(_nowhere())
    state.seconds = 1.0
    with pytest.raises(UnavailableError, match="no byte within the time"):
        asked(state, timeout=0.1)


def _nowhere():
    state = OpenAIServer()
    state.url = "http://127.0.0.1:1"
    return state


@pytest.mark.parametrize(
    ("text", "seconds"),
    [
        ("3", 3.0),
        ("0", 0.0),
        ("-2", 0.0),
        ("", None),
        ("soon", None),
        ("nan", None),
        ("Mon, 01 Jan 2001 00:00:00 GMT", 0),
    ],
)
def test_retry_after_is_a_number_or_a_date(text, seconds):
    assert _retry_after(text) == seconds


@pytest.mark.parametrize("text", ["🙂 emoji", "NUL \x00 inside", "x" * 100_000, "", "line\u2028separator", '"\\'])
def test_prompts_arrive_as_they_are(state, text):
    record = asked(state, Prompt(id="p", prompt=text))
    assert state.bodies[0]["prompt"] == text
    assert record.prompt == text


def looked(state, settings=None, prompts=(PROMPT,), name="", tries=1):
    return asyncio.run(
        look(
            "baseline",
            Endpoint(state.url, name),
            settings or {},
            list(prompts),
            chat=False,
            timeout=60.0,
            patience=Patience(tries, 0.001),
        )
    )


def test_vllm_with_this_package_is_recognised(state):
    side = looked(state)
    assert (side.endpoint.name, side.is_vllm, side.context, side.is_salted) == ("m", True, 4096, True)
    assert (side.sampler.name, side.sampler.noise, side.sampler.noise_version) == ("gumbel", "gumbel", 1)
    assert state.bodies == [], "vLLM's features are known"


def test_sides_are_coupled_by_equal_noise_alone(state):
    ours = looked(state)
    assert coupling(ours, ours)[0]
    assert "given different salts" in coupling(ours, looked(state, {"gumbel_salt": 4}))[1]
    told = coupling(ours, looked(state, {"gumbel_sampler": "default"}))
    assert told[0] is False
    assert "it was told to draw with vLLM's own sampler" in told[1]
    state.breaker = True
    assert "its breaker is open" in coupling(ours, looked(state))[1]
    state.breaker = False
    for version, said in (("2", "different noise, gumbel 1 and gumbel 2"), ("stock", "gumbel 1 and stock")):
        state.noise_version = version
        assert said in coupling(ours, looked(state))[1]
    assert coupling(looked(state), looked(state))[0], "vLLM's own noise of runner V2 is keyed by seed and position too"
    with listening(OpenAIServer(noise_version=None)) as plain:
        assert "its metrics do not show this package" in coupling(ours, looked(plain))[1]


def test_other_servers_are_tried_with_less_until_they_take_it():
    with listening(OpenAIServer(noise_version=None)) as plain:
        plain.mood = lambda body, before: "400" if "logprobs" in body else "ok"
        side = looked(plain)
        assert side.endpoint.features == Features(token_ids=False, logprobs=False)
        assert len(plain.bodies) == 2
        plain.mood = lambda body, before: "404"
        with pytest.raises(ClientError, match="needs --chat"):
            looked(plain)


def test_model_must_be_clear(state):
    state.models = ["a", "b"]
    with pytest.raises(ClientError, match=r"serves 2 models, so say which \(a, b\)"):
        looked(state)
    assert looked(state, name="b").endpoint.name == "b"
    with pytest.raises(ClientError, match="serves no 'c' but a, b"):
        looked(state, name="c")


def test_addresses_of_one_machine_are_known():
    assert client_probe.same_machine("http://127.0.0.1:1", "http://localhost:2")
    assert not client_probe.same_machine("http://127.0.0.1:1", "http://192.0.2.7:1")
