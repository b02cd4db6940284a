"""A wall clock that jumps by hours at every look at it: nothing of the draw, of what is counted or of the rollout."""

import itertools
import time

import pytest

from tests.recording import make_recorder, total
from tests.test_rollout_run import prepared, running, server
from tests.test_two_arms import bound, rolled, seeded
from tests.test_v1_sampler import random_logits, stock_kernels, tokens_of
from vllm_gumbel import SamplerSettings
from vllm_gumbel.metrics import catalogue

__all__ = ["prepared", "running", "server", "stock_kernels"]  # fixtures, of which every test here uses the last

HOUR = 3600.0
STEPS, ROWS = 40, 20


def drawn(folder):
    """Return the tokens of some steps with everything counted, a change of the rollout and a fault amid them."""
    batch, rollout, _ = rolled(1.0, seeded(ROWS))
    recorder = make_recorder(folder, slots=64, summary_seconds=1e9)
    sampler = bound(batch, rollout, settings=SamplerSettings(watch=1), recorder=recorder)
    tokens = []
    for step in range(STEPS):
        tokens.append(tokens_of(sampler(random_logits(ROWS, seed=step), batch.sampling_metadata)))
        rollout.change({"fraction": step / STEPS, "shadow": 0.5})
        if step == STEPS // 2:
            rollout.count(20, 20, "x")
    return tokens


@pytest.mark.parametrize("hours", [(6, -6, 30), (-1000, 0, 1000), (-24 * 365 * 50,)])
def test_wall_clock_that_jumps_changes_no_token_and_no_count(hours, tmp_path, monkeypatch):
    right = tmp_path / "right"
    right.mkdir()
    expected = drawn(right)
    clock, jumps = time.time, itertools.cycle(hours)
    monkeypatch.setattr(time, "time", lambda: clock() + HOUR * next(jumps))
    began = time.monotonic()
    assert drawn(tmp_path) == expected
    passed = time.monotonic() - began
    assert 0 < total(tmp_path, catalogue.SAMPLER_SECONDS, "_sum") < passed
    assert total(tmp_path, catalogue.SAMPLER_SECONDS, "_count") == STEPS
    assert total(tmp_path, catalogue.ROLLOUT_FRACTION) == (STEPS - 1) / STEPS, "the last that was set is shown"
    assert total(tmp_path, catalogue.BREAKER_OPEN) == 1
    for metric in (catalogue.SAMPLED_TOKENS, catalogue.WATCHED_TOKENS, catalogue.REQUESTS):
        assert total(tmp_path, metric) == total(right, metric) > 0
    assert total(tmp_path, catalogue.FAULTS) == 0


def test_wall_clock_that_jumps_does_not_shorten_or_lengthen_a_stage(server, prepared, monkeypatch):
    run = prepared()
    clock, jumps = time.time, itertools.cycle((6, -6, 30))
    monkeypatch.setattr(time, "time", lambda: clock() + HOUR * next(jumps))
    assert run() == 0, run.said.getvalue()
    assert server.changes == [(0.5, 0.0)]
    (look,) = run.report()["looks"]
    assert look["ended"] - look["began"] >= 0.9 * run.plan.hold
