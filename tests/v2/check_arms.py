"""Both samplers in one batch of runner V2: each row by its arm; with vLLM's own noise, shadow agrees in every row."""

from collections import Counter

import numpy as np
import pytest
import torch

from tests.recording import total
from tests.v2.building import Driver, count_into, random_logits
from vllm_gumbel.integration.stock_v2 import draw
from vllm_gumbel.metrics import catalogue
from vllm_gumbel.metrics.catalogue import SHADOW
from vllm_gumbel.params import ParamsError

ROWS = 24


def filled(config, fraction, **settings):
    """Return a driver with seeded requests; without top_k and top_p, whose kernel the interpreter cannot run."""
    driver = Driver(config, slots=ROWS, vocab=64, rollout_fraction=fraction, **settings)
    for i in range(ROWS):
        filters = [{}, {"temperature": 1.5}, {"min_p": 0.05}, {"temperature": 0.0}, {"logit_bias": {5: 2.0}}][i % 5]
        driver.add(f"request {i}", **{"temperature": 0.8, "seed": i, **filters})
    return driver


def counting(driver, folder):
    """Return the driver, counting into a folder."""
    count_into(driver, folder)
    driver.sampler.rollout.listen(driver.sampler._tally._recorder.show_rollout)
    return driver


@pytest.mark.parametrize("fraction", [0.0, 0.5])
def test_each_row_gets_what_its_arm_draws(config, fraction):
    logits = random_logits(ROWS, 64, seed=3)
    ours = filled(config, 1.0, backend="reference").tokens(logits.clone())
    driver = filled(config, fraction, backend="reference")
    batch = driver.batch()
    positions = batch.positions[batch.logits_indices]
    theirs = draw(
        driver.sampler.sampling_states,
        logits,
        batch.expanded_idx_mapping,
        batch.idx_mapping_np,
        positions,
        use_fp64=False,
    ).tolist()
    arms = [driver.sampler.sampling_states.requests[slot].arm for slot in batch.idx_mapping_np]
    got = driver.tokens(logits.clone())
    assert got == [theirs[i] if arm == "default" else ours[i] for i, arm in enumerate(arms)]
    assert set(arms) == ({"default"} if fraction == 0 else {"default", "gumbel"})
    assert ours != theirs


def test_shadow_with_stocks_noise_agrees_in_every_row_and_changes_nothing(config, tmp_path):
    """A direct proof that the draws are the same: same noise, same law."""
    logits = random_logits(ROWS, 64, seed=4)
    plain = filled(config, 0.0, backend="triton", noise="stock").tokens(logits.clone())
    driver = counting(filled(config, 0.0, backend="triton", noise="stock", rollout_shadow=1.0, watch=1), tmp_path)
    assert driver.tokens(logits.clone()) == plain
    assert total(tmp_path, catalogue.SHADOW_TOKENS, result="agree") == ROWS
    assert total(tmp_path, catalogue.SHADOW_TOKENS, result="differ") == 0
    assert total(tmp_path, catalogue.WATCHED_TOKENS, arm=SHADOW) == ROWS
    assert total(tmp_path, arm="default") == ROWS
    assert total(tmp_path, catalogue.FAULTS) == 0


def test_shadow_with_other_noise_differs_somewhere(config, tmp_path):
    logits = random_logits(ROWS, 64, seed=5)
    driver = counting(filled(config, 0.0, backend="reference", rollout_shadow=1.0), tmp_path)
    driver.tokens(logits)
    differ = total(tmp_path, catalogue.SHADOW_TOKENS, result="differ")
    assert 0 < differ < ROWS
    assert differ + total(tmp_path, catalogue.SHADOW_TOKENS, result="agree") == ROWS


def test_arm_outlives_a_stay_in_the_slot(config):
    driver = filled(config, 0.5, backend="reference")
    states = driver.sampler.sampling_states

    def arms():
        return {name: states.requests[slot].arm for name, slot in driver.states.req_id_to_index.items()}

    before = arms()
    driver.sampler.rollout.change({"fraction": 0.0})
    for i in range(ROWS):
        driver.remove(f"request {i}")
    for i in reversed(range(ROWS)):
        driver.add(f"request {i}", output=(5, 6), temperature=0.8, seed=i)
    assert arms() == before
    driver.remove("request 0")
    driver.add("request new", temperature=0.8)
    assert arms()["request new"] == "default"
    assert set(Counter(before.values())) == {"default", "gumbel"}


def test_choice_of_a_request_holds(config):
    driver = Driver(config, slots=2, backend="reference", rollout_fraction=0.0)
    driver.add("a", temperature=1.0, extra_args={"gumbel_sampler": "gumbel"})
    driver.add("b", temperature=1.0, extra_args={"gumbel_rollout_key": "ann"})
    found = driver.sampler.sampling_states
    assert [request.arm for request in found.requests.values()] == ["gumbel", "default"]
    assert found.by_stock.np[:2].sum() == 1
    with pytest.raises(ParamsError):
        driver.sampler.validate_params(_params(gumbel_noise_scale=0.5))
    driver.sampler.validate_params(_params(gumbel_sampler="default"))
    assert np.isfinite(driver.step(torch.zeros(2, 300)).num_sampled.sum())


def _params(**keys):
    from vllm import SamplingParams

    return SamplingParams(extra_args=keys)
