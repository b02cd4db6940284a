"""What a step of runner V2 returns beside tokens: logprobs, sampling masks, counts; and what bad rows become."""

import json
from inspect import signature

import numpy as np
import pytest
import torch
from vllm.v1.worker.gpu.sample.sampler import Sampler

from tests.recording import total
from tests.test_v1_sampler import MIXED, MODES, STOP, spoiled
from tests.v2.building import Driver, count_into, random_logits
from vllm_gumbel.kernels import sample_reference
from vllm_gumbel.metrics import catalogue


@pytest.fixture(params=["triton", "numba"])
def backend(request):
    return request.param


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_logprobs_are_those_of_the_definition_in_every_mode(config, mode, dtype, backend):
    """Values at 1e-5, ids of the best, rank of the drawn token; and logprobs change no token."""
    driver = Driver(config, slots=16, backend=backend, stock={"logprobs_mode": mode})
    for i, each in enumerate(MIXED * 2):
        driver.add(str(i), **{"seed": i, **each}, logprobs=5)
    logits = random_logits(14, dtype=dtype)
    shown = logits.float()
    if mode.startswith("processed"):
        sample_reference.draw(logits.float().numpy(), driver.params(), processed=(kept := np.empty((14, 300), "f4")))
        shown = torch.from_numpy(kept)
    if mode.endswith("logprobs"):
        shown = shown.log_softmax(-1)
    output = driver.draw(logits.clone())
    tokens, found = output.sampled_token_ids, output.logprobs_tensors
    for name in list(driver.requests):
        driver.sampler.sampling_states.num_logprobs[driver.states.req_id_to_index[name]] = -1
    assert tokens.flatten().tolist() == driver.tokens(logits)
    assert torch.equal(found.logprob_token_ids[:, :1], tokens)
    expected = shown.gather(1, found.logprob_token_ids)
    finite = expected > -torch.inf
    assert torch.allclose(found.logprobs[finite], expected[finite], rtol=0, atol=1e-5)
    assert (found.logprobs[~finite] == -torch.inf).all() or "logits" in mode
    assert torch.equal(found.logprobs[:, 1:].isfinite().sum(1) > 0, torch.ones(14, dtype=torch.bool))
    best = shown.topk(5).values
    assert torch.allclose(found.logprobs[:, 1:].nan_to_num(neginf=-1e9), best.nan_to_num(neginf=-1e9), atol=1e-5)
    own = shown.gather(1, tokens)
    if dtype == torch.bfloat16 and mode.startswith("raw"):
        return  # vLLM's rank kernel compares bfloat16 wrongly in the interpreter
    assert found.selected_token_ranks.tolist() == (shown >= own).sum(1).tolist()


@pytest.mark.parametrize("temperature", [0, 0.8])
@pytest.mark.parametrize(("policy", "token"), [("stop", STOP), ("lowest", 0)])
@pytest.mark.parametrize("mode", MODES)
def test_bad_rows_are_drawn_from_what_is_left_and_touch_no_neighbour(config, backend, temperature, policy, token, mode):
    """colibri#369, vllm#22881, vllm#48585, flashinfer#2402, as under runner V1 (`tests/test_v1_sampler.py`)."""
    good = random_logits(19)
    bad, kinds = spoiled(good)
    driver = Driver(config, slots=19, backend=backend, on_bad_row=policy, stock={"logprobs_mode": mode})
    for i in range(19):
        driver.add(str(i), temperature=temperature, seed=i, logprobs=5, stop=STOP)
    output, clean = driver.draw(bad.clone()), driver.draw(good.clone())
    tokens, undisturbed = (each.sampled_token_ids.flatten().tolist() for each in (output, clean))
    assert tokens[::2] == undisturbed[::2]
    assert torch.equal(output.logprobs_tensors.logprobs[::2], clean.logprobs_tensors.logprobs[::2])
    found = dict(zip(kinds, tokens[1::2], strict=True))
    assert found["one +inf"] == 9
    assert found["two +inf and a nan"] == 40
    assert found["all but one"] == 77
    assert found["only nan and +inf"] == 299
    assert found["all nan"] == found["all -inf"] == found["nan and -inf"] == token
    masked = torch.where(bad.isnan(), -torch.inf, bad)
    expected = sample_reference.draw(masked.numpy(), driver.params()).tokens.tolist()
    assert tokens[1:5:2] == expected[1:5:2]
    values, ids = output.logprobs_tensors.logprobs, output.logprobs_tensors.logprob_token_ids
    assert torch.equal(ids[[1, 3], 1:], masked[[1, 3]].topk(5).indices), "the best are no NaN"
    if mode.endswith("logprobs"):
        assert values[1, 1:].exp().sum() < 1 + 1e-5
        assert values[5, 1] == pytest.approx(0, abs=1e-6), "the one +inf has all the mass"
    json.dumps(torch.where(values == -torch.inf, -9999.0, values).tolist(), allow_nan=False)


@pytest.mark.skipif(
    "return_sampling_mask" not in signature(Sampler.__init__).parameters, reason="vLLM 0.31 has no sampling masks"
)
def test_sampling_mask_is_the_definitions_kept_set(config, backend):
    driver = Driver(config, slots=16, backend=backend, stock={"return_sampling_mask": True})
    for i, each in enumerate(MIXED * 2):
        driver.add(str(i), **{"seed": i, "top_k": 20, **each})
    logits = random_logits(14)
    masks = driver.draw(logits.clone()).sampling_mask_tensors
    sample_reference.draw(logits.numpy(), driver.params(), processed=(kept := np.empty((14, 300), "f4")))
    expected = [np.flatnonzero(row > -np.inf).tolist() for row in kept]
    assert masks.counts.tolist() == [len(each) for each in expected]
    listed = [row[: len(each)].tolist() for row, each in zip(masks.token_ids, expected, strict=True)]
    assert all(ids == each[: len(ids)] for ids, each in zip(listed, expected, strict=True))
    assert {len(each) for each in expected} > {5, 20}


def test_step_is_counted_by_kind_without_what_is_not_sent(config, backend, tmp_path):
    """Draws for unfinished prompts, of vLLM's warm-up and of its profiling run are not counted."""
    driver = Driver(config, slots=20, backend=backend)
    driver.sampler._usable_vocab = 290
    count_into(driver, tmp_path)
    for i in range(19):
        driver.add(str(i), temperature=1.0, seed=i)
    bad, _ = spoiled(random_logits(19))
    bad[0, 295] = 100.0  # a padded id that would have won
    driver.draw(bad.clone())
    assert total(tmp_path) == 19
    kinds = ("nonfinite_logits", "no_candidate", "padded_id")
    assert [total(tmp_path, catalogue.ANOMALOUS_TOKENS, kind=kind) for kind in kinds] == [8, 4, 2]
    batch = driver.batch()
    batch.seq_lens[:10] = 1  # their prompts have three tokens
    assert driver.sampler(bad.clone(), batch).num_sampled.tolist() == [0] * 10 + [1] * 9
    assert total(tmp_path) == 19 + 9
    driver.add("_warmup_0_")
    driver.draw(random_logits(1), ["_warmup_0_"])
    profiling = driver.batch(["0", "1"])
    profiling.req_ids = ["req_0_a", "req_1_b"]
    driver.sampler(random_logits(2), profiling)
    assert total(tmp_path) == 19 + 9
    assert total(tmp_path, catalogue.FAULTS) == 0


def test_trace_that_is_replayed_comes_in_place_of_what_was_drawn(config, backend):
    """With the logprobs of its own tokens; the other rows get what was drawn."""
    driver = Driver(config, backend=backend, stock={"enable_trace_replay": True})
    driver.add("drawn", seed=1, logprobs=0)
    driver.add("replayed", seed=1, logprobs=0, trace_decode_token_ids=[250])
    logits = random_logits(1).repeat(2, 1)
    output = driver.draw(logits.clone())
    (drawn,), (replayed,) = output.sampled_token_ids.tolist()
    assert (drawn, replayed) == (sample_reference.draw(logits.numpy(), driver.params()).tokens[0], 250)
    expected = logits.log_softmax(-1)[[0, 1], [drawn, 250]]
    assert torch.allclose(output.logprobs_tensors.logprobs[:, 0], expected, atol=1e-5)
