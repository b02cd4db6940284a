"""Presets, defaults and the seeds of unseeded requests, in the real engine, whose worker is a process of its own."""

import pytest

from tests.test_rows import make_batch, make_request
from vllm_gumbel import seeds
from vllm_gumbel.integration import rows
from vllm_gumbel.integration.replay import Replay, _as_seed
from vllm_gumbel.integration.rows import RowBatch

SETTINGS = {"presets": {"calm": 0.3}, "request_defaults": {"gumbel_hybrid_steps": 3}, "salt": 2**63 + 5}
PROMPT = "The meaning of life is"


@pytest.fixture(scope="module")
def llm(model_path):
    """An engine with presets and defaults."""
    from vllm import LLM

    config = {"sampler": "gumbel", "sampler_config": SETTINGS}
    llm = LLM(str(model_path), dtype="float32", enforce_eager=True, max_model_len=128, additional_config=config)
    yield llm
    llm.llm_engine.engine_core.shutdown()


def generate(llm, *requests):
    """Return the outputs of requests, each with the same prompt."""
    from vllm import SamplingParams

    params = [SamplingParams(max_tokens=12, ignore_eos=True, **each) for each in requests]
    return llm.generate([PROMPT] * len(params), params, use_tqdm=False)


def tokens(outputs):
    return [[list(each.token_ids) for each in output.outputs] for output in outputs]


def test_preset_and_default_of_the_server_are_what_the_request_could_have_set(llm):
    seeded = {"seed": 11, "temperature": 1.0}
    hybrid, plain = {"gumbel_hybrid_steps": 3}, {"gumbel_hybrid_steps": 0}
    asked = [{}, hybrid, plain, {"gumbel_preset": "calm"}, {"gumbel_sampler": "default"}]
    found = tokens(generate(llm, *({**seeded, "extra_args": keys} for keys in asked)))
    calm, greedy, best = tokens(
        generate(
            llm,
            {"seed": 11, "temperature": 0.3},
            {"temperature": 0},
            {**seeded, "extra_args": {"gumbel_noise_scale": 0}},
        )
    )
    assert found[0] == found[1] != found[2]
    assert found[3] == calm != found[0]
    assert greedy == best, "neither is refused for the default"
    assert found[4] not in found[:4]


def test_refusal_names_the_servers_presets(llm):
    from vllm.exceptions import VLLMValidationError

    with pytest.raises(VLLMValidationError, match="gumbel_preset must be one of creative, factual, calm, got 'wild'"):
        generate(llm, {"extra_args": {"gumbel_preset": "wild"}})


def test_unseeded_request_is_replayed_with_the_seed_that_it_had(llm):
    """Also each of several completions; and seeds are those of requests that asked for it, and no others."""
    before = seeds(llm)
    asked = {"temperature": 1.0, "extra_args": {"gumbel_return_info": True}}
    outputs = generate(llm, asked, {"temperature": 1.0}, {**asked, "n": 2}, {**asked, "seed": 5})
    told = seeds(llm)
    ids = [output.request_id for output in outputs]
    assert told.keys() - before.keys() == {ids[0], ids[2], ids[3]}
    assert [sorted(told[each]) for each in (ids[0], ids[2], ids[3])] == [[0], [0, 1], [0]]
    assert told[ids[3]][0] == Replay(5, 2**63 + 5)
    first, (second, third) = tokens(outputs)[0][0], tokens(outputs)[2]
    replays = [told[ids[0]][0], told[ids[2]][0], told[ids[2]][1]]
    assert len({each.seed for each in replays}) == 3
    again = [{"temperature": 1.0, "seed": each.seed, "extra_args": {"gumbel_salt": each.salt}} for each in replays]
    assert tokens(generate(llm, *again)) == [[first], [second], [third]]
    assert len({tuple(first), tuple(second), tuple(third)}) == 3


def test_batch_remembers_the_last_requests_only(monkeypatch):
    monkeypatch.setattr(rows, "MOST_TOLD", 3)
    batch: RowBatch = make_batch()
    for name in "abcdea":  # the last one comes back after a preemption
        batch.add_request(make_request(name, seed=ord(name), extra_args={"gumbel_return_info": True}))
        batch.remove_request(name)
        batch.condense()
        batch.refresh_metadata()
    batch.add_request(make_request("silent", seed=1))
    assert batch.told == {name: (ord(name), 0) for name in "dea"}


@pytest.mark.parametrize(
    ("word", "seed"), [(0, 0), (2**63 - 1, 2**63 - 1), (2**63, -(2**63)), (2**64 - 2, -2), (2**64 - 1, 2**64 - 1)]
)
def test_seed_is_one_that_the_openai_api_takes(word, seed):
    """But for the last, which would be vLLM's -1 for no seed."""
    assert _as_seed(word) == seed
    assert seed % 2**64 == word
