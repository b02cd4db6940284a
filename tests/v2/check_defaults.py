"""What a server's presets and defaults of keys make of requests in slots of runner V2."""

import numpy as np

from tests.v2.building import Driver, random_logits

SETTINGS = {
    "presets": {"calm": 0.25, "best": 0},
    "request_defaults": {"gumbel_preset": "calm", "gumbel_top_n": 5},
}


def test_own_keys_win_and_a_default_that_contradicts_the_request_is_left_out(config):
    """And nothing of the slot's last request stays."""
    driver = Driver(config, backend="reference", **SETTINGS)
    states = driver.sampler.sampling_states
    for temperature, keys, expected in [
        (1.0, {}, (0.25, 5)),
        (1.0, {"gumbel_preset": "factual", "gumbel_top_n": 9}, (0.7, 9)),
        (0.5, {}, (0.5, 5)),
        (1.0, {"gumbel_preset": "best"}, (0, 5)),
        (0.0, {}, (0, 5)),
        (1.0, {}, (0.25, 5)),
    ]:
        slot = driver.add("one", temperature=temperature, extra_args=keys)
        found = states.temperature.np[slot], states.top_k.np[slot]
        assert found == (np.float32(expected[0]), expected[1]), (temperature, keys)
        driver.remove("one")


def test_sampler_draws_what_it_draws_for_requests_that_set_the_defaults_themselves(config):
    given = random_logits(20, 64, seed=3)
    own = Driver(config, backend="reference", slots=20, vocab=64, presets=SETTINGS["presets"])
    default = Driver(config, backend="reference", slots=20, vocab=64, **SETTINGS)
    for i in range(20):
        own.add(str(i), temperature=1.0, seed=i, extra_args=SETTINGS["request_defaults"])
        default.add(str(i), temperature=1.0, seed=i)
    assert default.tokens(given) == own.tokens(given)
    assert len(set(default.tokens(given))) > 5
