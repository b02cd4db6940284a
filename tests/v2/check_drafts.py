"""Drafts change no token under runner V2: what is drawn with drafts is what is drawn without, one step at a time."""

from inspect import signature

import numpy as np
import pytest
import torch
from vllm.engine.arg_utils import EngineArgs
from vllm.v1.worker.gpu.spec_decode.rejection_sampler import RejectionSampler

from tests.recording import total
from tests.test_v1_sampler import MIXED, STOP
from tests.v2.building import CPU, DRAFTS, Driver, count_into, random_logits
from vllm_gumbel.integration.speculative_v2 import Verifier, accept
from vllm_gumbel.metrics import catalogue

NAN = float("nan")

#: What a draft may change for the rows after it.
EDITED = [
    {"temperature": 0.6, "repetition_penalty": 1.7, "presence_penalty": 0.8, "frequency_penalty": 0.9},
    {"temperature": 1.0, "bad_ids": [[3, 4], [5, 6]], "min_tokens": 4, "stop_token_ids": [30, 31]},
]


@pytest.fixture(scope="module")
def speculation(model_path):
    """vLLM's configuration of drafts."""
    drafts = {"method": "draft_model", "model": str(model_path), "num_speculative_tokens": DRAFTS}
    arguments = EngineArgs(str(model_path), dtype="float32", max_model_len=64, speculative_config=drafts)
    return arguments.create_engine_config().speculative_config


def accepted_slowly(tokens, fed, counts):
    """Return what `accept` should, by a loop over requests."""
    start, found = 0, []
    for count in counts:
        drawn, drafts = tokens[start : start + count], fed[start + 1 : start + count]
        end = next((i for i, draft in enumerate(drafts) if drawn[i] != draft), count - 1)
        found.append(drawn[: end + 1])
        start += count
    return found


def test_accepted_are_the_drafts_up_to_the_first_that_differs():
    generator = np.random.default_rng(0)
    for _ in range(300):
        counts = generator.integers(1, DRAFTS + 2, generator.integers(1, 6))
        rows = int(counts.sum())
        tokens, fed = generator.integers(0, 2, rows), generator.integers(-1, 2, rows)
        offsets = np.concatenate([np.arange(count) for count in counts])
        first_rows = np.concatenate([[0], np.cumsum(counts)])
        drawn, valid = accept(
            torch.tensor(tokens), torch.tensor(fed), torch.tensor(offsets), torch.tensor(first_rows), DRAFTS
        )
        assert drawn.shape == (len(counts), DRAFTS + 1)
        assert valid.dtype == torch.int32
        found = [row[:n] for row, n in zip(drawn.tolist(), valid.tolist(), strict=True)]
        assert found == accepted_slowly(tokens.tolist(), fed.tolist(), counts.tolist())


def table(requests, seed=0, vocab=300):
    """Return the logits of a request at every position: what a model would give, so that runs can be compared."""
    return random_logits(requests * 16, vocab, seed).reshape(requests, 16, vocab)


def filled(config, requests, **options):
    """Return a driver with these requests."""
    driver = Driver(config, slots=16, **options)
    for i, each in enumerate(requests):
        driver.add(str(i), (1, 2, 3), stop=STOP, **each)
    return driver


def one_by_one(config, requests, logits, **options):
    """Return tokens [requests][steps] and logprobs [steps][requests] of requests drawn without drafts."""
    driver = filled(config, requests, **options)
    values = []
    for step in range(DRAFTS + 2):
        logprobs = driver.step(logits[:, step].clone()).logprobs_tensors
        values.append(None if logprobs is None else logprobs.logprobs.tolist())
    return [driver.requests[str(i)][3:] for i in range(len(requests))], values


@pytest.mark.parametrize("backend", ["triton", "numba"])
@pytest.mark.parametrize("mode", ["raw_logprobs", "processed_logprobs"])
def test_tokens_and_logprobs_with_drafts_are_those_without(config, speculation, backend, mode, tmp_path):
    """vllm#13196, vllm#6038: right drafts, wrong ones, none; filters, penalties, bad words, min_tokens, bad rows."""
    requests = [{"seed": i, **each, "logprobs": 2} for i, each in enumerate([*MIXED, *EDITED, {"temperature": 1.0}])]
    logits = table(len(requests))
    logits[-1, 2] = NAN
    options = {"backend": backend, "stock": {"logprobs_mode": mode}}
    expected, values = one_by_one(config, requests, logits, **options)
    assert expected[-1][2] == STOP
    driver = filled(config, requests, **options)
    driver.step(logits[:, 0].clone())  # vLLM drafts only once a prompt has given a token
    count_into(driver, tmp_path)
    verifier, drafts = Verifier(driver.sampler, speculation, CPU), {}
    for i in range(len(requests)):
        right = i % (DRAFTS + 1)
        drafts[str(i)] = [*expected[i][1 : 1 + right], *[7] * (DRAFTS - right)][: DRAFTS - i % 3]
    batch = driver.batch(drafts=drafts)
    given = torch.cat([logits[i, 1 : 2 + len(drafts[str(i)])] for i in range(len(requests))])
    output = verifier(given.clone(), batch, None)
    sent = 0
    for i in range(len(requests)):
        draft = drafts[str(i)]
        count = next((k for k, token in enumerate(draft, 1) if token != expected[i][k]), len(draft) + 1)
        assert output.num_sampled[i] == count
        assert output.num_rejected[i] == len(draft) + 1 - count
        assert output.sampled_token_ids[i, :count].tolist() == expected[i][1 : 1 + count]
        first = int(batch.cu_num_logits[i])
        found = output.logprobs_tensors.logprobs[first : first + count].tolist()
        for step, ours in enumerate(found, 1):
            assert ours == pytest.approx(values[step][i], abs=1e-5)
        sent += count
    assert len({int(n) for n in output.num_sampled}) > 3, "the case is hard only if some are accepted and some are not"
    assert total(tmp_path) == sent
    assert total(tmp_path, catalogue.FAULTS) == 0


@pytest.mark.skipif(
    "invalid_drafts" not in signature(RejectionSampler.__call__).parameters, reason="vLLM 0.31 does not say which"
)
def test_draft_that_a_grammar_forbids_is_not_accepted(config, speculation):
    """vLLM says which; from there on the model's own token is sent."""
    logits = table(1)
    (expected,), _ = one_by_one(config, [{"seed": 1}], logits, backend="numba")
    driver = filled(config, [{"seed": 1}], backend="numba")
    driver.step(logits[:, 0].clone())
    batch = driver.batch(drafts={"0": expected[1 : 1 + DRAFTS]})
    verifier, rows = Verifier(driver.sampler, speculation, CPU), logits[0, 1 : 2 + DRAFTS]
    assert verifier(rows.clone(), batch, None).num_sampled.tolist() == [DRAFTS + 1]
    assert verifier(rows.clone(), batch, None, torch.arange(DRAFTS + 1) == 3).num_sampled.tolist() == [3]


def test_drafts_of_an_unfinished_prompt_are_not_verified(config, speculation):
    driver = filled(config, [{"seed": 1}], backend="numba")
    batch = driver.batch(drafts={"0": [1, 2]})
    batch.seq_lens[:] = 2
    output = Verifier(driver.sampler, speculation, CPU)(table(1)[0, :3].clone(), batch, None)
    assert output.num_sampled.tolist() == [0]


def test_rejection_starts_from_our_kept_sets_and_is_counted(config, speculation, tmp_path):
    """vLLM's own verification, whose law is vLLM's: drafts that a filter left are accepted at times, others never."""
    rows = 60
    driver = Driver(config, slots=rows, vocab=8, backend="numba", verification="rejection")
    for i in range(rows):
        driver.add(str(i), temperature=1.0, top_k=2, seed=i)
    row = torch.tensor([0.0, 1.0, -0.5, -5.0, -5.0, -5.0, -5.0, -5.0])
    driver.step(row.repeat(rows, 1))
    count_into(driver, tmp_path)
    batch = driver.batch(drafts={str(i): [1 if i % 2 else 2] for i in range(rows)})
    output = Verifier(driver.sampler, speculation, CPU)(row.repeat(2 * rows, 1), batch, None)
    assert set(output.sampled_token_ids[:, 0].tolist()) == {0, 1}
    assert set(output.num_sampled[1::2].tolist()) == {1, 2}
    assert set(output.num_sampled[::2].tolist()) == {1}
    assert total(tmp_path) == int(output.num_sampled.sum())
    assert total(tmp_path, catalogue.FAULTS) == 0
