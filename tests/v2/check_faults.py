"""A kernel of runner V2 that raises: the reference draws the step, which is counted, and the breaker opens at last."""

from dataclasses import replace

import pytest
import torch

from tests.recording import total
from tests.v2.building import Driver, count_into, random_logits
from vllm_gumbel.metrics import catalogue

ROWS = 12


def filled(config, **settings):
    """Return a driver with seeded requests."""
    driver = Driver(config, slots=ROWS, vocab=64, **settings)
    for i in range(ROWS):
        filters = [{}, {"top_p": 0.9}, {"min_p": 0.05}, {"temperature": 0.0}, {"logit_bias": {5: 2.0}}, {"top_k": 5}]
        driver.add(f"request {i}", **{"temperature": 0.8, "seed": i, **filters[i % 6]})
    return driver


def fail(*_, **__):
    raise MemoryError("no room")


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_draw_that_fails_is_made_by_the_reference(config, dtype, tmp_path):
    logits = random_logits(ROWS, 64, seed=3, dtype=dtype)
    expected = filled(config, backend="triton").tokens(logits.clone())
    driver = filled(config, backend="triton")
    count_into(driver, tmp_path)
    driver.sampler.backend = replace(driver.sampler.backend, draw=fail)
    steps = 0
    while not driver.sampler.rollout.breaker.is_open:
        steps += 1
        assert driver.tokens(logits.clone()) == expected
    assert steps > 3, "one fault is none of those that keep coming"
    assert total(tmp_path, catalogue.FALLBACKS, reason="kernel") == steps
    assert total(tmp_path) == steps * ROWS
    assert "a draw that failed" in driver.sampler.rollout.breaker.reason


def test_noise_that_the_host_does_not_have_cannot_be_drawn_anew(config):
    driver = filled(config, backend="triton", noise="stock")
    driver.sampler.backend = replace(driver.sampler.backend, draw=fail)
    with pytest.raises(MemoryError):
        driver.tokens(random_logits(ROWS, 64))
