"""The tokens of the sampler of runner V2: the definition's, whatever the backend, and those of runner V1."""

from dataclasses import replace

import numpy as np
import pytest
import torch

from tests.test_v1_sampler import BEFORE, MIXED, STOP
from tests.test_v1_sampler import batch_of as batch_v1
from tests.test_v1_sampler import draw as draw_v1
from tests.v2.building import Driver, layout, random_logits
from vllm_gumbel.kernels import dispatch, sample_reference
from vllm_gumbel.kernels.contract import NO_TOKEN

NAN = float("nan")
BACKENDS = [*dispatch.DEVICE_BACKENDS, *dispatch.BACKENDS]


def definition(driver, logits, names=None, **options):
    """Return the draw of the definition for a step."""
    return sample_reference.draw(logits.float().numpy(), driver.params(names), **options)


@pytest.fixture(scope="module", params=BACKENDS)
def driver(request, config):
    """A sampler with a mixed batch in its slots, by each backend."""
    driver = Driver(config, slots=16, backend=request.param)
    for i, each in enumerate(MIXED * 2):
        driver.add(f"request {i}", range(1, 3 + i % 5), **each)
    return driver


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_tokens_are_the_definitions(driver, dtype):
    """In any order of rows, from logits of any dtype."""
    for seed in range(4):
        names = [f"request {i}" for i in np.random.default_rng(seed).permutation(14)]
        logits = random_logits(14, seed=seed, dtype=dtype)
        assert driver.tokens(logits, names) == definition(driver, logits, names).tokens.tolist()


def test_tokens_are_those_of_runner_v1(driver, config):
    """Equal logits, parameters, seeds and positions; greedy and seeded requests, since others draw their seed."""
    requests = [each for each in MIXED * 2 if "seed" in each or each["temperature"] == 0]
    prompts = [range(1, 3 + i % 5) for i in range(len(requests))]
    v2 = Driver(config, slots=16, backend=driver.sampler.backend.name)
    for i, (prompt, each) in enumerate(zip(prompts, requests, strict=True)):
        v2.add(f"request {i}", prompt, **each)
    v1 = batch_v1([{"prompt": prompt, **each} for prompt, each in zip(prompts, requests, strict=True)])
    for seed in range(4):
        logits = random_logits(len(requests), seed=seed)
        assert v2.tokens(logits) == draw_v1(logits, v1)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_everything_before_the_draw_acts_as_under_runner_v1(driver, config, dtype):
    """Masks, bad words, bias, minimum lengths, penalties; from float32, which both make of a changed batch."""
    requests = [{"seed": i, "prompt": (1, 2, 3), **each} for i, each in enumerate(BEFORE)]
    v2 = Driver(config, slots=16, backend=driver.sampler.backend.name)
    for i, each in enumerate(requests):
        v2.add(f"request {i}", stop=STOP, **each)
    v1 = batch_v1(requests)
    for seed in range(4):
        logits = random_logits(len(requests), seed=seed, dtype=dtype)
        logits[:, [STOP, 3, 12, 30, 40, 50]] = 12.0  # ids that the requests are about: mostly they would be drawn
        assert v2.tokens(logits) == draw_v1(logits, v1)


def test_logits_that_nothing_changes_are_drawn_from_where_they_lie(driver, monkeypatch):
    """No float32 copy, in contrast to vLLM, for temperatures and filters; one if a penalty asks for it."""
    seen, sampler = [], driver.sampler
    draw = sampler.backend.draw

    def recorded(logits, *arguments, **keywords):
        seen.append(logits)
        return draw(logits, *arguments, **keywords)

    monkeypatch.setattr(sampler, "backend", replace(sampler.backend, draw=recorded))
    logits = random_logits(14, dtype=torch.bfloat16)
    driver.draw(logits)
    assert seen.pop() is logits
    driver.add("penalised", presence_penalty=1.0)
    driver.draw(random_logits(15, dtype=torch.bfloat16))
    driver.remove("penalised")
    assert seen.pop().dtype == torch.float32
    driver.draw(logits)
    assert seen.pop() is logits


def test_what_a_verifier_asks_for_are_the_definitions_kept_sets(driver):
    """vLLM's `apply_sampling_params`: after temperature and filters, -inf where not kept; a bad row keeps its stop."""
    logits = random_logits(14, seed=5)
    logits[3] = NAN
    batch = driver.batch()
    found = driver.sampler.apply_sampling_params(logits, *layout(batch))
    kept = np.empty((14, 300), np.float32)
    definition(driver, logits, processed=kept)
    kept[3, driver.sampler.sampling_states.bad_row_token.np[batch.idx_mapping_np[3]]] = 0
    np.testing.assert_array_equal(found.numpy(), kept)
    driver.sampler._flags.clear()
    driver.sampler._seen.clear()


def test_draws_that_only_compile_leave_nothing_behind(driver):
    """What a worker does at start-up on an accelerator, where each dtype and choice of filters is compiled apart."""
    logits = random_logits(14)
    before = driver.tokens(logits)
    driver.sampler.compile(300, logits.device, [torch.float32, torch.bfloat16], rows=5000)
    assert driver.sampler._flags == driver.sampler._seen == []
    assert driver.tokens(logits) == before


def test_row_of_no_request_gets_no_token_and_disturbs_no_other(driver):
    states, logits = driver.sampler.sampling_states, random_logits(4)
    slots = torch.tensor([2, -1, 0, -1], dtype=torch.int32)
    positions = torch.tensor([5, 6, 7, 8])
    arguments = (states.params(), slots, positions, states.filters(np.array([2, 0])))
    drawn = driver.sampler.backend.draw(logits, *arguments)
    served = [0, 2]
    alone = driver.sampler.backend.draw(
        logits[served], states.params(), slots[served], positions[served], arguments[-1]
    )
    assert drawn.tokens[1::2].tolist() == [NO_TOKEN, NO_TOKEN]
    assert drawn.flags[1::2].tolist() == [0, 0]
    assert torch.equal(drawn.tokens[::2], alone.tokens)
