"""Keys in the real server and the real engine: bad ones are a 400, good ones give the same tokens in any schedule.

The server prefills in chunks, schedules asynchronously and has processors of another package, so its steps take another
way through the sampler than the engine's, which draws row by row and preempts.
"""

import json

import pytest

from tests.test_server import LONG_PROMPT, gather_raw, preemptions
from vllm_gumbel.params import MOST_INT32

NAN, INFINITY = float("nan"), float("inf")

#: (keys, other parameters, what the refusal says); JSON's true and false are 1 and 0 before anybody sees them.
REFUSED = [
    ({"gumbel_sampler": "stock"}, {}, "gumbel_sampler must be 'gumbel' or 'default', got 'stock'"),
    ({"gumbel_sampler": 1}, {}, "gumbel_sampler must be 'gumbel' or 'default', got 1"),
    ({"gumbel_salt": "5"}, {}, "gumbel_salt must be an integer from -2^63 to 2^64 - 1, got '5'"),
    ({"gumbel_preset": "wild"}, {}, "gumbel_preset must be one of creative, factual, got 'wild'"),
    ({"gumbel_preset": ["creative"]}, {}, "gumbel_preset must be one of creative, factual, got ['creative']"),
    ({"gumbel_temperature_rule": "log"}, {}, "gumbel_temperature_rule must be 'none' or 'log_vocab', got 'log'"),
    ({"gumbel_temperature_rule": NAN}, {}, "gumbel_temperature_rule must be 'none' or 'log_vocab', got nan"),
    ({"gumbel_hybrid_steps": -1}, {}, f"gumbel_hybrid_steps must be an integer from 0 to {MOST_INT32}, got -1"),
    ({"gumbel_hybrid_steps": 2.5}, {}, f"gumbel_hybrid_steps must be an integer from 0 to {MOST_INT32}, got 2.5"),
    ({"gumbel_hybrid_steps": 2**40}, {}, f"gumbel_hybrid_steps must be an integer from 0 to {MOST_INT32}, got {2**40}"),
    ({"gumbel_top_n": 0}, {}, f"gumbel_top_n must be an integer from 1 to {MOST_INT32}, got 0"),
    ({"gumbel_top_n": "50"}, {}, f"gumbel_top_n must be an integer from 1 to {MOST_INT32}, got '50'"),
    ({"gumbel_top_n": [50]}, {}, f"gumbel_top_n must be an integer from 1 to {MOST_INT32}, got [50]"),
    ({"gumbel_tail_boost": -0.1}, {}, "gumbel_tail_boost must be a number from 0 to 10, got -0.1"),
    ({"gumbel_tail_boost": NAN}, {}, "gumbel_tail_boost must be a number from 0 to 10, got nan"),
    ({"gumbel_tail_boost": INFINITY}, {}, "gumbel_tail_boost must be a number from 0 to 10, got inf"),
    ({"gumbel_repetition_offset": 101}, {}, "gumbel_repetition_offset must be a number from 0 to 100, got 101"),
    ({"gumbel_repetition_offset": -INFINITY}, {}, "gumbel_repetition_offset must be a number from 0 to 100, got -inf"),
    ({"gumbel_noise_scale": 1.5}, {}, "gumbel_noise_scale must be a number from 0 to 1, got 1.5"),
    ({"gumbel_noise_scale": "0.5"}, {}, "gumbel_noise_scale must be a number from 0 to 1, got '0.5'"),
    ({"gumbel_return_info": "yes"}, {}, "gumbel_return_info must be true or false, got 'yes'"),
    ({"gumbel_return_info": 2}, {}, "gumbel_return_info must be true or false, got 2"),
    ({"gumbel_sampler": "default", "gumbel_salt": 7}, {}, "gumbel_salt contradicts gumbel_sampler 'default'"),
    ({"gumbel_noise_scale": 0.5}, {"temperature": 0}, "gumbel_noise_scale contradicts temperature 0"),
    ({"gumbel_hybrid_steps": 3}, {"temperature": 0}, "gumbel_hybrid_steps contradicts temperature 0"),
    ({"gumbel_tail_boost": 0.5}, {"temperature": 0}, "gumbel_tail_boost contradicts temperature 0"),
    ({"gumbel_preset": "creative"}, {"temperature": 0.5}, "gumbel_preset contradicts temperature"),
]

#: The same, for the server alone: `SamplingParams` itself refuses integers past 64 bits, and does not say which.
PAST_64_BITS = [
    ({"gumbel_salt": 2**64}, {}, f"gumbel_salt must be an integer from -2^63 to 2^64 - 1, got {2**64}"),
    ({"gumbel_top_n": -(2**70)}, {}, f"gumbel_top_n must be an integer from 1 to {MOST_INT32}, got {-(2**70)}"),
]

#: Requests that are served, one per kind of key and some together.
SERVED = [
    {"temperature": 1.0, "vllm_xargs": {"gumbel_salt": 3, "gumbel_return_info": True}},
    {"vllm_xargs": {"gumbel_preset": "factual"}},
    {"temperature": 0.3, "vllm_xargs": {"gumbel_temperature_rule": "log_vocab"}},
    {"temperature": 1.0, "vllm_xargs": {"gumbel_hybrid_steps": 8}},
    {"temperature": 1.0, "top_k": 40, "vllm_xargs": {"gumbel_top_n": 20}},
    {"temperature": 0.8, "vllm_xargs": {"gumbel_tail_boost": 0.3}},
    {"temperature": 0.0, "vllm_xargs": {"gumbel_repetition_offset": 4.0}},
    {"temperature": 1.0, "top_p": 0.9, "vllm_xargs": {"gumbel_noise_scale": 0.5}},
    {"temperature": 0.9, "top_k": 30, "min_p": 0.02, "vllm_xargs": {"gumbel_sampler": "default"}},
    {"temperature": 0.7, "repetition_penalty": 1.2, "vllm_xargs": {"gumbel_sampler": "default"}},
    {
        "temperature": 1.0,
        "frequency_penalty": 0.2,
        "vllm_xargs": {"gumbel_hybrid_steps": 20, "gumbel_noise_scale": 0.75, "gumbel_repetition_offset": 1.0},
    },
]
PROMPTS = [LONG_PROMPT, "1 2 1 2 1 2 1 2 1 2"]


def test_bad_keys_are_a_400_and_are_counted(server):
    """In completions and chat, streaming and not; and the server lives."""
    before = server.metric("vllm_gumbel_rejected_params_total")
    salts = server.metric("vllm_gumbel_rejected_params_total", key="gumbel_salt")
    posted = 0
    for arguments, others, said in [*REFUSED, *PAST_64_BITS]:
        common = {"model": "smollm2", "max_tokens": 2, "vllm_xargs": arguments, **others}
        chat = {**common, "messages": [{"role": "user", "content": "x"}]}
        for path, content in (("/v1/completions", {**common, "prompt": "x"}), ("/v1/chat/completions", chat)):
            for stream in (False, True):
                text = json.dumps({**content, "stream": stream})  # Python's json, which writes NaN and Infinity
                response = server.client.post(path, content=text, headers={"Content-Type": "application/json"})
                assert response.status_code == 400, (arguments, response.text)
                assert said in response.json()["error"]["message"]
                posted += 1
    assert server.metric("vllm_gumbel_rejected_params_total") == before + posted
    assert server.metric("vllm_gumbel_rejected_params_total", key="gumbel_salt") == salts + 12
    assert len(server.tokens(prompt="x", max_tokens=2, ignore_eos=True)) == 2


def test_llm_raises_the_same_text(engine):
    from vllm import SamplingParams
    from vllm.exceptions import VLLMValidationError

    for arguments, others, said in REFUSED:
        with pytest.raises(VLLMValidationError) as refused:
            engine.generate("x", SamplingParams(**others, max_tokens=2, extra_args=arguments), use_tqdm=False)
        assert said in str(refused.value)
    (output,) = engine.generate("x", SamplingParams(max_tokens=2, ignore_eos=True), use_tqdm=False)
    assert len(output.outputs[0].token_ids) == 2


def bodies():
    """Return every served request with every prompt, seeded."""
    return [
        {"prompt": prompt, "max_tokens": 24, "ignore_eos": True, "seed": i, **each}
        for prompt in PROMPTS
        for i, each in enumerate(SERVED)
    ]


def test_tokens_are_the_same_alone_together_and_in_another_schedule(server, engine):
    """No row changes another; chunks, asynchronous scheduling and preemption change nothing."""
    from vllm import SamplingParams

    together = gather_raw(server, bodies())
    alone = [server.tokens(**body) for body in bodies()[: len(SERVED)]]
    assert together[: len(SERVED)] == alone
    params = []
    for body in bodies():
        fields = {key: value for key, value in body.items() if key not in ("prompt", "vllm_xargs")}
        params.append(SamplingParams(**{"top_k": 0, **fields}, extra_args=body["vllm_xargs"]))
    preempted = preemptions(engine)
    outputs = engine.generate([body["prompt"] for body in bodies()], params, use_tqdm=False)
    assert preemptions(engine) > preempted, "the case is only hard if the engine preempts"
    assert [list(output.outputs[0].token_ids) for output in outputs] == together


def test_keys_change_what_they_should(server):
    body = {"prompt": "The meaning of life is", "max_tokens": 24, "ignore_eos": True, "seed": 11, "temperature": 1.0}
    plain = server.tokens(**body)
    same = [
        {"gumbel_sampler": "gumbel"},
        {"gumbel_noise_scale": 1},
        {"gumbel_hybrid_steps": 0},
        {"gumbel_preset": "creative"},
    ]
    same += [{"gumbel_return_info": True}, {"gumbel_top_n": 49_152}, {"gumbel_repetition_offset": 0}]
    changed = [{"gumbel_sampler": "default"}, {"gumbel_hybrid_steps": 24}, {"gumbel_preset": "factual"}]
    changed += [{"gumbel_temperature_rule": "log_vocab"}, {"gumbel_tail_boost": 0.5}, {"gumbel_noise_scale": 0.5}]
    best = [{"gumbel_noise_scale": 0}, {"gumbel_top_n": 1}]
    found = gather_raw(server, [{**body, "vllm_xargs": keys} for keys in (*same, *changed, *best)])
    assert found[: len(same)] == [plain] * len(same)
    for keys, tokens in zip(changed, found[len(same) :], strict=False):
        assert tokens != plain, keys
    assert found[-2:] == [server.tokens(**{**body, "temperature": 0})] * 2


def test_hybrid_start_hands_over_to_the_ordinary_draw(server):
    """The first N tokens are other ones; from there on the noise is that of the position, as without the key."""
    body = {"prompt": "The meaning of life is", "ignore_eos": True, "seed": 11, "temperature": 1.0}
    start = server.tokens(**body, max_tokens=4, vllm_xargs={"gumbel_hybrid_steps": 4})
    both = server.tokens(**body, max_tokens=12, vllm_xargs={"gumbel_hybrid_steps": 4})
    assert both[:4] == start
    prompt = server.client.post("/tokenize", json={"model": "smollm2", "prompt": body["prompt"]}).json()["tokens"]
    continued = server.tokens(**{**body, "prompt": [*prompt, *start]}, max_tokens=8)
    assert both[4:] == continued


def test_offset_ends_a_loop_and_changes_nothing_before_it(server):
    """Greedy decoding of this model loops here; the offset breaks that, at the first loop of three copies."""
    body = {"prompt": "1 2 1 2 1 2 1 2 1 2", "max_tokens": 48, "ignore_eos": True, "temperature": 0}
    plain = server.tokens(**body)
    offset = server.tokens(**body, vllm_xargs={"gumbel_repetition_offset": 10.0})
    apart = next(i for i, (a, b) in enumerate(zip(plain, offset, strict=True)) if a != b)
    from vllm_gumbel.kernels.loops import continuations

    assert plain[apart] in continuations(plain[:apart]), "it was a loop that was left"
    assert all(plain[i] not in continuations(plain[:i]) for i in range(apart))


def test_tokens_of_vllms_sampler_and_the_mass_given_up_are_counted(server):
    before = {arm: server.metric("vllm_gumbel_sampled_tokens_total", arm=arm) for arm in ("gumbel", "default")}
    count = server.metric("vllm_gumbel_top_n_given_up_mass_count")
    share = server.metric("vllm_gumbel_top_n_given_up_mass_sum")
    body = {"prompt": LONG_PROMPT, "max_tokens": 7, "ignore_eos": True, "temperature": 1.0}
    server.tokens(**body, vllm_xargs={"gumbel_sampler": "default"})
    server.tokens(**body, vllm_xargs={"gumbel_top_n": 10})
    assert server.metric("vllm_gumbel_sampled_tokens_total", arm="default") == before["default"] + 7
    assert server.metric("vllm_gumbel_sampled_tokens_total", arm="gumbel") == before["gumbel"] + 7
    assert server.metric("vllm_gumbel_top_n_given_up_mass_count") == count + 7
    assert 0 < server.metric("vllm_gumbel_top_n_given_up_mass_sum") - share < 7
