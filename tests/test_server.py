"""The real server with `--sampler gumbel`: tokens, seeds, bad input, bad rows, metrics.

It runs with what makes reproducibility hard: prompts in chunks of 64 tokens, asynchronous scheduling, prefix caching,
and a processor of another package.
"""

import asyncio
import json

import openai
import pytest

LONG_PROMPT = " ".join(f"Item {i} of the long list is number {i * i}." for i in range(24))
MIXED = [
    {"temperature": 0},
    {"temperature": 1.2, "top_k": 40},
    {"temperature": 0.6, "top_p": 0.9},
    {"temperature": 1.0, "min_p": 0.05},
    {"temperature": 0.9, "repetition_penalty": 1.2, "frequency_penalty": 0.3},
    {"temperature": 0.8, "logprobs": 3, "top_k": 10, "top_p": 0.8},
]


def gather(server, bodies):
    """Post completions at the same time and return their JSON bodies in order."""

    async def run():
        async with openai.AsyncOpenAI(
            base_url=f"{server.url}/v1", api_key="none", max_retries=0, timeout=300
        ) as client:
            return await asyncio.gather(*(one(client, body) for body in bodies))

    async def one(client, body):
        standard = {k: v for k, v in body.items() if k not in ("top_k", "min_p", "repetition_penalty", "vllm_xargs")}
        extra = {k: v for k, v in body.items() if k not in standard} | {"return_token_ids": True}
        return (await client.completions.create(model="smollm2", extra_body=extra, **standard)).model_dump()

    return asyncio.run(run())


def token_ids(completion):
    return [choice["token_ids"] for choice in completion["choices"]]


def test_completion_and_chat_answer_sensibly_at_temperature_07(server):
    client = openai.OpenAI(base_url=f"{server.url}/v1", api_key="none")
    text = (
        client.completions.create(
            model="smollm2", prompt="The capital of France is", temperature=0.7, seed=1, max_tokens=12
        )
        .choices[0]
        .text
    )
    chat = client.chat.completions.create(
        model="smollm2",
        messages=[{"role": "user", "content": "What is the capital of France? Answer in one sentence."}],
        temperature=0.7,
        seed=1,
        max_tokens=30,
        extra_body={"vllm_xargs": {"gumbel_salt": 7}},
    )
    assert "Paris" in text
    assert "Paris" in chat.choices[0].message.content


def test_seeded_request_is_the_same_alone_and_among_thirty_others(server):
    """vllm#51226, vllm#17524: the other rows and their parameters change nothing."""
    body = {"prompt": "Once upon a time", "temperature": 1.0, "top_p": 0.95, "seed": 42, "max_tokens": 32}
    others = [
        {"prompt": f"Number {i}:", "max_tokens": 24, **MIXED[i % len(MIXED)], **({"seed": i} if i % 2 else {})}
        for i in range(30)
    ]
    alone = server.tokens(**body)
    assert len(alone) == 32
    for place in (0, 17, 30):
        together = gather(server, [*others[:place], body, *others[place:]])
        assert token_ids(together[place]) == [alone]


def test_equal_concurrent_requests_give_equal_text(server):
    """tt-metal#53802: whatever slot a request gets."""
    body = {"prompt": "My favourite colour is", "temperature": 1.0, "seed": 5, "max_tokens": 24}
    assert len({json.dumps(token_ids(answer)) for answer in gather(server, [body] * 6)}) == 1


def test_children_of_one_request_differ_and_repeat(server):
    """vllm#11898: n=4 gives four texts, and the same four again; child k draws with seed + k."""
    body = {"prompt": "Dear diary,", "temperature": 1.0, "seed": 7, "max_tokens": 24, "n": 4}
    first, second = token_ids(server.complete(**body).json()), token_ids(server.complete(**body).json())
    assert len({tuple(tokens) for tokens in first}) == 4
    assert first == second
    assert server.tokens(**{**body, "n": 1, "seed": 9}) == first[2]


def test_salt_makes_equal_positions_independent(server):
    """vllm#50440: one seed shares its noise among prompts; a salt of their own parts them."""
    body = {"prompt": "A list of animals:", "temperature": 1.0, "seed": 3, "max_tokens": 24}
    plain = server.tokens(**body)
    assert server.tokens(**body, vllm_xargs={"gumbel_salt": 0}) == plain
    salted = server.tokens(**body, vllm_xargs={"gumbel_salt": 1})
    assert salted != plain
    assert server.tokens(**body, vllm_xargs={"gumbel_salt": 1, "of_somebody_else": "x"}) == salted


def test_unseeded_requests_differ(server):
    """The noise of unseeded rows is not shared, as on a ROCm path of vLLM 0.33."""
    answers = gather(server, [{"prompt": "The best idea is", "temperature": 1.0, "max_tokens": 16}] * 6)
    assert len({json.dumps(token_ids(answer)) for answer in answers}) == 6


def test_seeded_prompt_longer_than_a_chunk_completes(server):
    """vllm-rbln#1025, vllm-qaic#92, tt-xla#3487: stock's engine dies of it on a CPU."""
    body = {"prompt": LONG_PROMPT, "temperature": 1.0, "seed": 7, "max_tokens": 16}
    response = server.complete(**body).json()
    assert response["usage"]["prompt_tokens"] > 3 * 64
    assert len(response["choices"][0]["token_ids"]) == 16
    assert server.tokens(**body) == response["choices"][0]["token_ids"]


def test_tokens_equal_those_of_another_schedule(server, engine):
    """vllm-rbln#1025, vllm#19940, tt-metal#51981, vllm#40896: what the schedule does not change.

    The server prefills in chunks, schedules asynchronously and caches prefixes; the engine does none of these, and
    with all requests at once it runs out of cache and preempts. Seeded tokens are the same.
    """
    from vllm import SamplingParams

    prompts = [LONG_PROMPT, *(f"{i} green bottles" for i in range(11))]
    settings = [{"temperature": 1.0, "seed": i, "max_tokens": 64, "ignore_eos": True, "top_k": 0} for i in range(12)]
    preempted = preemptions(engine)
    outputs = engine.generate(prompts, [SamplingParams(**each) for each in settings], use_tqdm=False)
    assert preemptions(engine) > preempted, "the case is only hard if the engine preempts"
    served = gather_raw(server, [{"prompt": p, **each} for p, each in zip(prompts, settings, strict=True)])
    assert served == [list(output.outputs[0].token_ids) for output in outputs]


def gather_raw(server, bodies):
    """Post completions at the same time, with fields that the OpenAI client does not know, and return token ids."""
    from concurrent.futures import ThreadPoolExecutor

    with ThreadPoolExecutor(len(bodies)) as pool:
        return list(pool.map(lambda body: server.tokens(**body), bodies))


def preemptions(engine):
    """Return how often the engine has preempted a request."""
    return sum(metric.value for metric in engine.get_metrics() if metric.name == "vllm:num_preemptions")


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ({"gumbel_salt": "7"}, "gumbel_salt must be an integer from -2^63 to 2^64 - 1, got '7'"),
        ({"gumbel_salt": 0.5}, "gumbel_salt must be an integer from -2^63 to 2^64 - 1, got 0.5"),
        ({"gumbel_salt": [1]}, "gumbel_salt must be an integer from -2^63 to 2^64 - 1, got [1]"),
        ({"gumbel_salt": float("nan")}, "gumbel_salt must be an integer"),
        ({"gumbel_salt": float("inf")}, "gumbel_salt must be an integer"),
        ({"gumbel_salt": 2**64}, f"gumbel_salt must be an integer from -2^63 to 2^64 - 1, got {2**64}"),
        ({"gumbel_pepper": 1}, "gumbel_pepper is not a known parameter (known: gumbel_sampler, gumbel_rollout_key, "),
    ],
)
def test_bad_key_is_a_400_that_names_key_rule_and_value(server, arguments, said):
    body = {"model": "smollm2", "prompt": "x", "max_tokens": 2, "vllm_xargs": arguments}
    chat = {"model": "smollm2", "messages": [{"role": "user", "content": "x"}], "vllm_xargs": arguments}
    for path, content in (("/v1/completions", body), ("/v1/chat/completions", chat)):
        for stream in (False, True):
            text = json.dumps({**content, "stream": stream})  # Python's json, which writes NaN and Infinity
            response = server.client.post(path, content=text, headers={"Content-Type": "application/json"})
            assert response.status_code == 400, response.text
            assert said in response.json()["error"]["message"]
    assert server.tokens(prompt="x", max_tokens=2)


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("temperature", float("nan")),
        ("temperature", float("inf")),
        ("repetition_penalty", float("nan")),
        ("repetition_penalty", float("inf")),
        ("logit_bias", {"5": float("nan")}),
        ("logit_bias", {"5": float("inf")}),
        ("top_p", 0),
        ("seed", 2**64),
    ],
)
def test_values_that_are_no_numbers_are_a_400(server, field, value):
    """vllm#45116, lmms-eval#1265: refused, never repaired in silence."""
    text = json.dumps({"model": "smollm2", "prompt": "x", "max_tokens": 2, field: value})
    response = server.client.post("/v1/completions", content=text, headers={"Content-Type": "application/json"})
    assert response.status_code == 400, response.text
    assert field in response.json()["error"]["message"]


def test_top_k_past_the_vocabulary_is_no_top_k(server):
    """sendnn-inference#542"""
    body = {"prompt": "Blue", "temperature": 1.0, "seed": 4, "max_tokens": 12}
    assert server.tokens(**body, top_k=9_999_999) == server.tokens(**body)


@pytest.mark.parametrize(("spoil", "kind"), [("all_nan", "nonfinite_logits"), ("all_masked", "no_candidate")])
def test_row_without_a_candidate_ends_the_request_and_is_counted(server, spoil, kind):
    """vllm#22881, vllm#14126, vllm#13035: never an endless token 0; neighbours are untouched."""
    before = {k: server.metric("vllm_gumbel_anomalous_tokens_total", kind=k) for k in (kind, "no_candidate")}
    neighbour = {"prompt": "Red is", "temperature": 1.0, "seed": 8, "max_tokens": 20}
    expected = server.tokens(**neighbour)
    bad = {"prompt": "Sky", "temperature": 1.0, "max_tokens": 64, "vllm_xargs": {"spoil": spoil, "spoil_from": 5}}
    answers = gather(server, [neighbour, bad, neighbour])
    assert token_ids(answers[0]) == token_ids(answers[2]) == [expected]
    (tokens,) = token_ids(answers[1])
    assert len(tokens) <= 6
    assert answers[1]["choices"][0]["finish_reason"] == "stop"
    if len(tokens) == 6:  # it did not end by itself before it was spoiled
        for each, value in before.items():
            assert server.metric("vllm_gumbel_anomalous_tokens_total", kind=each) == value + 1


def test_row_with_some_nan_is_drawn_from_the_rest_and_counted(server):
    """colibri#369, vllm#48585: a NaN is impossible, the rest follows its law, and logprobs are valid JSON."""
    before = server.metric("vllm_gumbel_anomalous_tokens_total", kind="nonfinite_logits")
    body = {"prompt": "Sky", "temperature": 1.0, "seed": 1, "max_tokens": 8, "ignore_eos": True, "logprobs": 2}
    response = server.complete(**body, vllm_xargs={"spoil": "some_nan"})
    assert response.status_code == 200
    (choice,) = json.loads(response.text, parse_constant=pytest.fail)["choices"]
    assert min(choice["token_ids"]) >= 49152 // 2
    assert len(choice["token_ids"]) == 8
    assert server.metric("vllm_gumbel_anomalous_tokens_total", kind="nonfinite_logits") == before + 8


def test_finished_schema_before_min_tokens_yields_valid_json(server):
    """vllm#53665: every token is masked then; the answer is valid JSON all the same."""
    response = server.client.post(
        "/v1/chat/completions",
        json={
            "model": "smollm2",
            "messages": [{"role": "user", "content": "Give me a JSON object with a number."}],
            "temperature": 0.7,
            "seed": 3,
            "max_tokens": 64,
            "min_tokens": 60,
            "response_format": {
                "type": "json_schema",
                "json_schema": {
                    "name": "answer",
                    "schema": {
                        "type": "object",
                        "properties": {"n": {"type": "integer", "enum": [1, 2, 3]}},
                        "required": ["n"],
                        "additionalProperties": False,
                    },
                },
            },
        },
    )
    assert response.status_code == 200, response.text
    assert json.loads(response.json()["choices"][0]["message"]["content"])["n"] in (1, 2, 3)


def test_metrics_show_the_build_and_count_exactly_the_tokens_that_clients_got(server):
    """LMCache#621: counters of the worker reach `/metrics`; discarded draws of chunked prompts are not counted."""
    ((labels, value),) = server.samples("vllm_gumbel_build_info")
    assert value == 1
    assert labels["noise_version"] == "1"
    assert labels["backend"] == "numba"
    assert labels["runner"] == "v1"
    assert labels["model_name"] == "smollm2"
    before = server.metric("vllm_gumbel_sampled_tokens_total")
    bodies = [{"prompt": LONG_PROMPT, "max_tokens": 5 + i, "temperature": 1.0} for i in range(6)]
    received = sum(answer["usage"]["completion_tokens"] for answer in gather(server, bodies))
    assert server.metric("vllm_gumbel_sampled_tokens_total") == before + received
