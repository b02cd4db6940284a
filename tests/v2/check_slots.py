"""What a slot of runner V2 holds: seeds, salts, stop tokens; and that nothing of its last request is left."""

import numpy as np
import pytest
import torch
from vllm import SamplingParams

from tests.test_v1_sampler import MIXED, STOP
from tests.v2.building import Driver, configured, random_logits
from vllm_gumbel.integration.rows import SeedSource
from vllm_gumbel.integration.slots import SlotStates
from vllm_gumbel.kernels import noise_reference

NAN = float("nan")


def seeds_of(driver):
    return driver.sampler.sampling_states.seeds.np.view(np.uint64)


@pytest.mark.parametrize("seed", [0, 1, -1, 2**63 - 1, 2**63, 2**64 - 1, -(2**63)])
def test_seed_is_kept_modulo_2_to_the_64(config, seed):
    """vLLM's own slots take no seed of 2^63 and above: the engine would die. (It takes -1 for no seed.)"""
    driver = Driver(config, backend="reference")
    slot = driver.add("one", seed=seed)
    expected = seed % 2**64 if seed != -1 else SeedSource(config.model_config.seed, 0).next()
    assert int(seeds_of(driver)[slot]) == expected
    assert int(driver.sampler.sampling_states.seeds.gpu.numpy().view(np.uint64)[slot]) == expected


def test_unseeded_requests_get_seeds_in_the_order_of_admission(config):
    """Equal on every tensor-parallel rank, other than those of another replica, none from NumPy's own generator."""
    before = np.random.get_state()[1].tolist()
    first, second = (Driver(config, backend="reference") for _ in range(2))
    for driver in (first, second):
        for i in range(6):
            driver.add(str(i), seed=7 if i == 2 else None)
    source = SeedSource(config.model_config.seed, 0)
    drawn = [source.next() for _ in range(5)]
    slots = [first.states.req_id_to_index[str(i)] for i in range(6)]
    assert seeds_of(first)[slots].tolist() == [*drawn[:2], 7, *drawn[2:]]
    assert seeds_of(first).tolist() == seeds_of(second).tolist()
    other = SeedSource(config.model_config.seed, 1)
    assert not {other.next() for _ in range(5)} & set(drawn)
    assert np.random.get_state()[1].tolist() == before


@pytest.mark.parametrize(
    ("own", "default", "salt"), [(None, 0, 0), (None, -3, 2**64 - 3), (0, 5, 0), (-1, 5, 2**64 - 1), (2**64 - 1, 5, -1)]
)
def test_salt_is_the_requests_own_or_the_servers(config, own, default, salt):
    driver = Driver(config, backend="reference", salt=default)
    slot = driver.add("one", extra_args=None if own is None else {"gumbel_salt": own})
    assert int(driver.sampler.sampling_states.salt.np.view(np.uint64)[slot]) == salt % 2**64


def test_keys_that_are_parameters_are_settled_in_the_slot(config):
    """Preset, temperature rule and top_n; the request's own parameters stay as they were."""
    driver = Driver(config, backend="reference")
    states = driver.sampler.sampling_states
    for name, parameters, temperature, top_k in (
        ("preset", {"temperature": 1.0, "extra_args": {"gumbel_preset": "factual"}}, 0.7, 300),
        (
            "rule",
            {"temperature": 0.5, "extra_args": {"gumbel_temperature_rule": "log_vocab"}},
            0.5 + 0.05 * np.log(300),
            300,
        ),
        ("greedy", {"temperature": 0, "extra_args": {"gumbel_temperature_rule": "log_vocab"}}, 0, 300),
        ("top_n", {"temperature": 0.5, "top_k": 9, "extra_args": {"gumbel_top_n": 4}}, 0.5, 4),
        ("top_k", {"temperature": 0.5, "top_k": 3, "extra_args": {"gumbel_top_n": 4}}, 0.5, 3),
    ):
        slot = driver.add(name, **parameters)
        assert states.temperature.np[slot] == np.float32(temperature), name
        assert states.top_k.np[slot] == top_k, name


def test_stocks_noise_has_no_salt_so_it_goes_into_the_seed(config):
    settings = configured(config, noise="stock").additional_config["sampler_config"].carried
    states = SlotStates(4, 300, seeds=SeedSource(0, 0), settings=settings, default_stop=None)
    for slot, extra in enumerate((None, {"gumbel_salt": 0}, {"gumbel_salt": 9})):
        states.add_request(slot, SamplingParams(seed=5, extra_args=extra))
    mixed = 5 ^ int(noise_reference.mix64(np.array([9], np.uint64))[0])
    assert states.seeds.np.view(np.uint64)[:3].tolist() == [5, 5, mixed]


@pytest.mark.parametrize(
    ("parameters", "policy", "token"),
    [
        ({"stop": 7, "stop_token_ids": [3]}, "stop", 7),
        ({"stop": None, "stop_token_ids": [30, 4, 20]}, "stop", 4),
        ({"stop": None}, "stop", 2),  # the model's own
        ({"stop": 0}, "stop", 0),
        ({"stop": 7}, "lowest", 0),
    ],
)
def test_bad_row_gives_the_requests_own_stop_token_if_it_has_one(config, parameters, policy, token):
    driver = Driver(config, backend="reference", on_bad_row=policy)
    driver.add("before", stop=9)
    driver.add("one", **parameters)
    assert driver.tokens(torch.full((2, 300), NAN)) == [9 if policy == "stop" else 0, token]


def test_nothing_of_a_slots_last_request_is_left(config):
    """Requests with everything come and go; then plain ones draw as in slots that were never used."""
    everything = {
        "temperature": 0.4,
        "top_k": 3,
        "top_p": 0.5,
        "min_p": 0.3,
        "seed": 11,
        "extra_args": {"gumbel_salt": 99},
        "repetition_penalty": 1.9,
        "presence_penalty": 1.5,
        "frequency_penalty": 1.5,
        "logit_bias": {4: 50.0},
        "allowed_token_ids": [4, 5, 6],
        "min_tokens": 20,
        "max_tokens": 40,
        "stop_token_ids": [30],
        "bad_ids": [[5]],
        "logprobs": 3,
    }
    used, fresh = Driver(config, slots=4, backend="reference"), Driver(config, slots=4, backend="reference")
    for i in range(4):
        used.add(f"old {i}", (1, 2, 3), (4, 4, 5), stop=STOP, **everything)
    used.draw(random_logits(4))
    for i in range(4):
        used.remove(f"old {i}")
    for driver in (used, fresh):
        for i, each in enumerate(MIXED[:4]):
            driver.add(f"new {i}", **{"seed": i, **each})
    logits = random_logits(4, seed=1)
    assert used.tokens(logits) == fresh.tokens(logits)
    for name in ("seeds", "salt", "temperature", "top_k", "top_p", "min_p", "bad_row_token"):
        slots = [[each.states.req_id_to_index[f"new {i}"] for i in range(4)] for each in (used, fresh)]
        columns = [getattr(each.sampler.sampling_states, name).np for each in (used, fresh)]
        assert columns[0][slots[0]].tolist() == columns[1][slots[1]].tolist(), name
    assert used.draw(logits).logprobs_tensors is None
    assert used.tokens(torch.full((4, 300), NAN)) == [2] * 4, "the model's own stop token"
