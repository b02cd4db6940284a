"""What is looked at under runner V2: rows as they were drawn, whoever has their slot later, and at no token's cost."""

from dataclasses import fields

import numpy as np
import pytest
import torch
from vllm.engine.arg_utils import EngineArgs

from tests.recording import Counted, total
from tests.test_v1_sampler import BEFORE, MIXED, STOP, spoiled
from tests.test_watch import assert_same, unseeded_and_random
from tests.v2.building import CPU, DRAFTS, Driver, count_into, random_logits
from vllm_gumbel.integration.speculative_v2 import Verifier
from vllm_gumbel.integration.tally import Tally
from vllm_gumbel.kernels import statistics_reference
from vllm_gumbel.kernels.slots import as_array
from vllm_gumbel.kernels.statistics import RowStatistics
from vllm_gumbel.metrics import catalogue

NAN = float("nan")


def watching(config, requests, *, watch=1.0, slots=32, **options):
    """Return a driver with these requests, whose sampler tells a recorder that keeps what it is told."""
    driver = Driver(config, slots=slots, watch=watch, improbable_below=1e-4, **options)
    driver.sampler._tally = Tally(Counted())
    for i, each in enumerate(requests):
        driver.add(str(i), stop=STOP, **each)
    return driver


def told(driver):
    """Return the steps that a driver's sampler has told of, with what was sent; nothing went wrong."""
    recorder = driver.sampler._tally._recorder
    assert recorder.faults == []
    return recorder.steps


def reference(logits, params, tokens, index, **options):
    """Return the statistics of some rows by the definition."""
    return statistics_reference.statistics(as_array(logits), params, tokens, index, improbable_below=1e-4, **options)


@pytest.mark.parametrize(("backend", "dtype"), [("triton", torch.bfloat16), ("numba", torch.float32)])
def test_every_row_is_seen_as_it_was_drawn(config, backend, dtype):
    """Also rows that cannot be drawn; tested are those without a seed that are not greedy."""
    requests = [{**MIXED[i % 7]} for i in range(19)]
    driver = watching(config, requests, backend=backend)
    driver.sampler._usable_vocab = driver.sampler._watch._usable_vocab = 290
    for seed in range(2):
        logits = random_logits(19, seed=seed, dtype=dtype)
        if seed:
            logits, _ = spoiled(logits)
        params = driver.params()
        driver.draw(logits.clone())
        step, sent = told(driver)[-1]
        seen = step.watched
        assert sent.all()
        assert seen.index.tolist() == list(range(19))
        assert seen.tested.tolist() == unseeded_and_random(requests)
        assert_same(seen.statistics, reference(logits, params, step.tokens, seen.index, usable_vocab=290))
    assert (seen.statistics.kept == 0).sum() == 6, "the case is one"
    assert step.slots.tolist() == driver.batch().idx_mapping_np.tolist()


def test_rows_that_are_edited_are_seen_as_they_are_after_it(config):
    driver = watching(config, BEFORE, backend="numba")
    logits, raw = random_logits(len(BEFORE)), []
    logits[:, [STOP, 3, 12, 30, 40, 50]] = 8.0  # ids that the edits are about
    edit = driver.sampler.edit

    def recorded(*arguments):
        raw.append(edit(*arguments))
        return raw[-1]

    driver.sampler.edit = recorded
    driver.draw(logits.clone())
    ((step, _),) = told(driver)
    params, seen = driver.params(), step.watched
    assert_same(seen.statistics, reference(raw[0], params, step.tokens, seen.index))
    plain = reference(logits, params, step.tokens, seen.index)
    assert (np.abs(plain.log_total - seen.statistics.log_total) > 0.01).sum() >= 6, "the edits matter"


def test_noise_of_vllm_leaves_the_score_unknown(config):
    driver = watching(config, MIXED, backend="triton", noise="stock")
    logits = random_logits(7)
    driver.draw(logits.clone())
    ((step, _),) = told(driver)
    expected = reference(logits, driver.params(), step.tokens, step.watched.index)
    assert np.isnan(step.watched.statistics.score).all()
    columns = {f.name: getattr(expected, f.name) for f in fields(RowStatistics)} | {"score": np.full(7, NAN)}
    assert_same(step.watched.statistics, RowStatistics(**columns))


@pytest.mark.parametrize("backend", ["triton", "numba"])
def test_looking_changes_no_token(config, backend):
    requests = [*MIXED, *BEFORE]
    drivers = [watching(config, requests, backend=backend, watch=share) for share in (0, 1.0, 0.4)]
    for seed in range(2):
        logits = random_logits(len(requests), seed=seed, dtype=torch.bfloat16)
        tokens = [driver.tokens(logits) for driver in drivers]
        assert tokens[0] == tokens[1] == tokens[2]
    counts = [sum(len(step.watched.index) for step, _ in told(driver) if step.watched) for driver in drivers]
    assert counts[0] == 0 < counts[2] < counts[1] == 2 * len(requests)


def test_statistics_that_fail_cost_a_fault_and_nothing_else(config, monkeypatch):
    driver, untouched = watching(config, MIXED, backend="numba"), watching(config, MIXED, backend="numba", watch=0)
    logits = random_logits(7)

    def fail(*_, **__):
        raise MemoryError("planted")

    for name in ("look", "report"):
        with monkeypatch.context() as broken:
            broken.setattr(driver.sampler._watch, name, fail)
            assert driver.tokens(logits) == untouched.tokens(logits)
    recorder = driver.sampler._tally._recorder
    assert [(part, str(error)) for part, error in recorder.faults] == [
        ("exactness", "planted"),
        ("recorder", "planted"),
    ]
    ((step, _),) = recorder.steps
    assert step.watched is None
    assert driver.sampler._flags == driver.sampler._seen == []


def test_draws_that_are_not_sent_are_not_counted_and_requests_are_once(config, tmp_path):
    """Draws of unfinished prompts; a request that comes back with what it had generated is no new one."""
    driver = Driver(config, backend="numba", watch=1.0)
    count_into(driver, tmp_path)
    for i in range(4):
        driver.add(str(i), temperature=1.0)
    batch = driver.batch()
    batch.seq_lens[:2] = 1  # their prompts have three tokens
    driver.sampler(random_logits(4), batch)
    assert total(tmp_path, catalogue.WATCHED_TOKENS) == total(tmp_path, catalogue.TESTED_TOKENS) == 2
    driver.remove("0")
    driver.add("0", (1, 2, 3), (8, 9), temperature=1.0)
    driver.draw(random_logits(4))
    assert total(tmp_path, catalogue.WATCHED_TOKENS) == 6
    assert total(tmp_path, catalogue.REQUESTS) == 4
    assert total(tmp_path, catalogue.SAMPLER_SECONDS, "_count") == 2
    assert total(tmp_path, catalogue.FAULTS) == 0


def test_what_is_seen_belongs_to_the_request_that_had_the_slot_then(config):
    """On an accelerator a step is counted later: another request, seeded, may have the slot by that time."""
    driver = watching(config, [{"temperature": 1.0}] * 3, backend="numba", slots=3)
    logits, params, told_of = random_logits(3), driver.params(), []
    driver.sampler._tally.add = lambda arrays, finish: told_of.append((arrays, finish))
    driver.draw(logits.clone())
    for name in list(driver.requests):
        driver.remove(name)
    for i in range(3):
        driver.add(f"later {i}", seed=5, temperature=0.3, extra_args={"gumbel_salt": 9})
    ((arrays, finish),) = told_of
    step, _, _ = finish({name: values.numpy() for name, values in arrays.items()})
    assert step.watched.tested.tolist() == [True] * 3
    assert_same(step.watched.statistics, reference(logits, params, step.tokens, step.watched.index))


def test_rows_of_drafts_are_seen_with_the_drafts_before_them(config, model_path):
    """Of every row of a step; those are counted that are sent."""
    drafting = {"method": "draft_model", "model": str(model_path), "num_speculative_tokens": DRAFTS}
    arguments = EngineArgs(str(model_path), dtype="float32", max_model_len=64, speculative_config=drafting)
    requests = [{"temperature": 0.8}, {"temperature": 1.0, "seed": 3}, {"temperature": 0.7, "top_k": 9}]
    driver = watching(config, requests, backend="numba")
    driver.step(random_logits(3))
    verifier = Verifier(driver.sampler, arguments.create_engine_config().speculative_config, CPU)
    batch = driver.batch(drafts={"0": [7, 7], "2": [1, 2, 3]})
    request, offset = np.repeat(range(3), [3, 1, 4]), np.array([0, 1, 2, 0, 0, 1, 2, 3])
    logits, params = random_logits(8, seed=4), driver.params().take(request)
    params.position[:] += offset
    output = verifier(logits.clone(), batch, None)
    step, sent = told(driver)[-1]
    seen = step.watched
    assert seen.index.tolist() == list(range(8))
    assert seen.tested.tolist() == [True] * 3 + [False] + [True] * 4
    assert sent.sum() == output.num_sampled.sum() < 8
    part = step.only(sent)
    kept = np.flatnonzero(sent)
    assert_same(part.watched.statistics, reference(logits, params, step.tokens, kept))
