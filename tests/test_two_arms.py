"""Both samplers in one batch: each row by its arm, whatever the others are; shadow draws; the breaker's causes."""

from dataclasses import replace

import numpy as np
import pytest
import torch
from vllm.v1.sample.sampler import Sampler

from tests.recording import make_recorder, total
from tests.test_keys_v1 import STOCK_ROWS, pair_of_batches
from tests.test_rows import filled, make_request
from tests.test_v1_sampler import batch_of, draw, random_logits, stock_kernels, tokens_of
from vllm_gumbel import SamplerSettings
from vllm_gumbel.integration.v1 import GumbelSampler
from vllm_gumbel.kernels.contract import Draw
from vllm_gumbel.metrics import catalogue
from vllm_gumbel.metrics.catalogue import SHADOW
from vllm_gumbel.rollout.state import Rollout

__all__ = ["stock_kernels"]  # a fixture that every test here uses

NAN = float("nan")
ANOMALOUS, FALLBACKS, SHADOWED = catalogue.ANOMALOUS_TOKENS, catalogue.FALLBACKS, catalogue.SHADOW_TOKENS


def rolled(fraction, rows, shadow=0.0, **others):
    """Return a batch whose requests are shared out, and its rollout; rows named as the requests in `batch_of`."""
    rollout = Rollout(SamplerSettings(rollout_fraction=fraction, rollout_shadow=shadow))
    requests = [make_request(f"request {i}", **row) for i, row in enumerate(rows)]
    return filled(requests, rollout=rollout, **others), rollout, requests


def seeded(count, **others):
    """Return rows with a seed of their own, and the generator that vLLM makes of it."""
    return [
        {"temperature": 0.9, "seed": i, "generator": torch.Generator().manual_seed(i), **others} for i in range(count)
    ]


def bound(batch, rollout, **options):
    """Return a sampler that knows the rollout of a batch, as a runner would tell it."""
    sampler = GumbelSampler(**options)
    sampler.rollout = rollout
    if sampler.recorder is not None:
        rollout.listen(sampler.recorder.show_rollout)
    return sampler


@pytest.mark.parametrize("fraction", [0.0, 0.3, 0.7, 1.0])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_each_row_gets_what_its_arm_draws_whatever_the_others_are(fraction, dtype):
    logits = random_logits(40, dtype=dtype)
    ours = draw(logits, rolled(1.0, seeded(40))[0])
    metadata = replace(
        batch_of(seeded(40)).sampling_metadata, generators={i: s["generator"] for i, s in enumerate(seeded(40))}
    )
    theirs = tokens_of(Sampler()(logits.clone(), metadata))
    batch, rollout, requests = rolled(fraction, seeded(40))
    got = tokens_of(bound(batch, rollout)(logits.clone(), batch.sampling_metadata))
    arms = [request.gumbel_arm[0] for request in requests]
    assert got == [theirs[i] if arm == "default" else ours[i] for i, arm in enumerate(arms)]
    assert abs(arms.count("gumbel") - 40 * fraction) <= 12
    assert ours != theirs


@pytest.mark.parametrize("mode", ["raw_logprobs", "processed_logprobs"])
def test_batch_of_stock_alone_is_vllms_to_the_last_bit(mode):
    """Twelve steps of seeded requests with edits and logprobs, through `forward` of either sampler."""
    rows = [{**row, "logprobs": 3} for row in STOCK_ROWS]
    ours, theirs, states = pair_of_batches(rows)
    for found in states[0].values():  # they were admitted by a batch whose rollout gives all to gumbel
        ours.remove_request(found.req_id)
        found.gumbel_arm = ("default", False)
    ours.condense()
    for found in states[0].values():
        ours.add_request(found)
    ours.refresh_metadata()
    sampler, reference = GumbelSampler(logprobs_mode=mode), Sampler(logprobs_mode=mode)
    for step in range(12):
        logits = random_logits(len(rows), seed=step)
        outputs = []
        for batch, sample, found in ((ours, sampler, states[0]), (theirs, reference, states[1])):
            output = sample(logits.clone(), batch.sampling_metadata)
            outputs.append(output)
            for row, name in enumerate(batch.req_ids):
                batch.num_tokens_no_spec[row] += 1
                found[name].output_token_ids.append(tokens_of(output)[row])
        assert ours.req_ids == theirs.req_ids
        assert tokens_of(outputs[0]) == tokens_of(outputs[1])
        for mine, stocks in zip(*(output.logprobs_tensors for output in outputs), strict=True):
            assert mine is stocks is None or torch.equal(mine, stocks)


def test_arm_is_kept_through_preemption_and_a_change_of_the_share():
    batch, rollout, requests = rolled(0.5, seeded(30))
    arms = [request.gumbel_arm for request in requests]
    rollout.change({"fraction": 0.0})
    rollout.count(20, 20, "x")
    for request in requests:
        batch.remove_request(request.req_id)
    batch.condense()
    batch.refresh_metadata()
    for request in requests:
        batch.add_request(request)
    batch.refresh_metadata()
    assert [request.gumbel_arm for request in requests] == arms
    newcomer = make_request("request new", temperature=1.0)
    batch.remove_request("request 0")
    batch.condense()
    batch.refresh_metadata()
    batch.add_request(newcomer)
    assert newcomer.gumbel_arm == ("default", False)


def test_key_of_the_rollout_decides_for_all_requests_that_bear_it():
    rows = [{"temperature": 1.0, "extra_args": {"gumbel_rollout_key": f"user {i % 10}"}} for i in range(60)]
    _, _, requests = rolled(0.5, rows)
    arms = [request.gumbel_arm[0] for request in requests]
    assert arms == arms[:10] * 6
    assert set(arms) == {"gumbel", "default"}


def test_shadow_sends_stocks_tokens_and_counts_ours(tmp_path):
    """All rows in shadow: what is sent is vLLM's, and the third arm's evidence is that of the gumbel arm's draws."""
    logits = random_logits(40)
    logits[3] = NAN
    batch, rollout, _ = rolled(0.0, seeded(40, top_k=20), shadow=1.0)
    sampler = bound(batch, rollout, settings=SamplerSettings(watch=1), recorder=make_recorder(tmp_path, slots=64))
    got = tokens_of(sampler(logits.clone(), batch.sampling_metadata))
    plain = rolled(0.0, seeded(40, top_k=20))
    assert got == tokens_of(bound(*plain[:2])(logits.clone(), plain[0].sampling_metadata))
    ours = draw(logits, rolled(1.0, seeded(40, top_k=20))[0])
    agree = sum(a == b for i, (a, b) in enumerate(zip(got, ours, strict=True)) if i != 3)
    assert total(tmp_path, SHADOWED, result="agree") == agree
    assert total(tmp_path, SHADOWED, result="differ") == 40 - agree
    assert 0 < agree < 40
    assert total(tmp_path, arm="default") == 40
    assert total(tmp_path, arm="gumbel") == 0
    watched = catalogue.WATCHED_TOKENS
    assert (total(tmp_path, watched, arm=SHADOW), total(tmp_path, watched, arm="default")) == (39, 39)
    for kind in ("nonfinite_logits", "no_candidate"):
        assert (
            total(tmp_path, ANOMALOUS, arm=SHADOW, kind=kind)
            == total(tmp_path, ANOMALOUS, arm="default", kind=kind)
            == 1
        )
    assert total(tmp_path, ANOMALOUS, kind="outside_filter") == 0
    assert total(tmp_path, catalogue.FAULTS) == 0
    assert not rollout.breaker.is_open, "NaN logits are nobody's fault here"


def test_arm_shadow_is_not_shown_before_something_is_to_be_drawn_in_it(tmp_path):
    batch, rollout, _ = rolled(0.5, seeded(4))
    bound(batch, rollout, recorder=make_recorder(tmp_path, slots=64))
    from vllm_gumbel.metrics.exporter import FolderCollector

    def arms():
        metrics = FolderCollector(tmp_path).collect()
        return {sample.labels.get("arm") for metric in metrics for sample in metric.samples}

    assert SHADOW not in arms()
    rollout.change({"shadow": 0.1})
    assert SHADOW in arms()


class Failing:
    """A backend whose draws raise."""

    name, reason = "failing", "test"

    def draw(self, *arguments, **keywords):
        raise MemoryError("no room")


def test_draw_that_fails_is_made_by_the_reference_and_opens_the_breaker_when_it_keeps_failing(tmp_path):
    logits = random_logits(20)
    batch, rollout, _ = rolled(1.0, seeded(20))
    sampler = bound(batch, rollout, recorder=make_recorder(tmp_path, slots=64))
    expected = tokens_of(sampler(logits.clone(), batch.sampling_metadata))
    sampler.backend = Failing()
    steps = 0
    while not rollout.breaker.is_open:
        steps += 1
        assert tokens_of(sampler(logits.clone(), batch.sampling_metadata)) == expected
    assert steps > 3, "one fault is none of those that keep coming"
    assert total(tmp_path, FALLBACKS, reason="kernel") == steps
    assert "a draw that failed" in rollout.breaker.reason


@pytest.mark.parametrize(("wrong", "kind"), [(-5, "outside_filter"), (300, "outside_filter"), (7, "outside_filter")])
def test_token_that_cannot_be_opens_the_breaker(wrong, kind, monkeypatch):
    """Ids that do not exist, and one that is masked."""
    logits = random_logits(20)
    logits[:, 7] = -torch.inf
    batch, rollout, _ = rolled(1.0, seeded(20))
    sampler = bound(batch, rollout)
    sampler(logits.clone(), batch.sampling_metadata)
    assert not rollout.breaker.is_open
    right = sampler.backend.draw

    class Wrong:
        """A backend that draws one id for all."""

        def draw(self, *arguments, **keywords):
            drawn = right(*arguments, **keywords)
            return Draw(np.full_like(drawn.tokens, wrong), drawn.flags)

    sampler.backend = Wrong()
    sampler(logits.clone(), batch.sampling_metadata)
    assert kind in rollout.breaker.reason


def test_no_request_can_open_the_breaker():
    """Rows that nothing can be drawn from, by the model or by parameters, are as bad with vLLM's own sampler."""
    rows = seeded(30)
    for i in range(10):
        rows[i] |= {"allowed_token_ids": [5], "bad_ids": [[5]]}
        rows[10 + i] |= {"extra_args": {"gumbel_tail_boost": 10.0, "gumbel_repetition_offset": 100.0}}
    batch = batch_of(rows)
    logits = random_logits(30)
    logits[20:25], logits[25:] = NAN, torch.inf
    sampler = bound(batch, batch.rollout)
    for _ in range(10):
        sampler(logits.clone(), batch.sampling_metadata)
    assert not batch.rollout.breaker.is_open


def test_requests_that_are_not_served_as_they_asked_are_counted(tmp_path):
    batch, rollout, _ = rolled(
        0.0, [{"temperature": 1.0, "extra_args": {"gumbel_noise_scale": 0.5}}, {"temperature": 1.0}]
    )
    sampler = bound(batch, rollout, recorder=make_recorder(tmp_path, slots=64))
    sampler(random_logits(2), batch.sampling_metadata)
    rollout.count(20, 20, "x")
    batch.remove_request("request 1")
    batch.condense()
    batch.add_request(make_request("request 2", temperature=1.0, extra_args={"gumbel_sampler": "gumbel"}))
    batch.refresh_metadata()
    sampler(random_logits(2), batch.sampling_metadata)
    assert [total(tmp_path, FALLBACKS, reason=reason) for reason in ("keys", "breaker", "kernel")] == [1, 1, 0]
    assert total(tmp_path, catalogue.BREAKER_OPEN) == 1
    assert total(tmp_path, catalogue.ROLLOUT_FRACTION) == 0
