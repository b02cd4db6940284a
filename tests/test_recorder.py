"""What the recorder counts of a step, and that none of its parts can harm another, the process or the tokens."""

import math
from dataclasses import fields
from types import SimpleNamespace

import numpy as np
import pytest

from tests.recording import VOCAB, heard, make_recorder, step, total, watched
from vllm_gumbel.kernels.statistics import RowStatistics
from vllm_gumbel.metrics import catalogue
from vllm_gumbel.metrics.catalogue import (
    ANOMALOUS_TOKENS,
    ARMS,
    DEFAULT,
    FAULTS,
    GUMBEL,
    REQUESTS,
    SAMPLED_TOKENS,
    TOKEN_RUN_LENGTH,
)
from vllm_gumbel.metrics.series import Series
from vllm_gumbel.metrics.step import Admission, Watched
from vllm_gumbel.metrics.summary import Summary


@pytest.fixture
def said():
    """The lines that are logged."""
    with heard() as lines:
        yield lines


# ---------------------------------------------------------------------------------------------------------------- steps


def test_step_of_what_is_sent_keeps_the_right_rows_and_all_that_was_admitted():
    """Over random masks: every column of every row that is sent, and what was seen in it, in its new place."""
    generator = np.random.default_rng(0)
    for _ in range(200):
        rows = int(generator.integers(1, 12))
        index = np.flatnonzero(generator.random(rows) < 0.5)
        seen = watched(index, *({"surprisal": float(i)} for i in index), tested=index % 3 == 0) if len(index) else None
        given_up = generator.random(rows) if generator.random() < 0.5 else None
        admitted = (Admission(4), Admission(2, (7, 7)))
        whole = step(
            *range(100, 100 + rows),
            flags=generator.integers(0, 8, rows),
            slots=range(50, 50 + rows),
            by_stock=np.flatnonzero(generator.random(rows) < 0.3),
            watched=seen,
            given_up=given_up,
            admitted=admitted,
        )
        sent = generator.random(rows) < 0.6
        part = whole.only(sent)
        kept = np.flatnonzero(sent)
        assert part.tokens.tolist() == [100 + i for i in kept]
        assert part.slots.tolist() == [50 + i for i in kept]
        assert part.flags.tolist() == whole.flags[kept].tolist()
        assert part.by_stock.tolist() == whole.by_stock[kept].tolist()
        assert part.admitted == admitted
        assert (part.given_up is None) == (given_up is None)
        assert given_up is None or part.given_up.tolist() == given_up[kept].tolist()
        if seen is not None:
            still = [i for i in index if sent[i]]
            assert [kept[i] for i in part.watched.index] == still
            assert part.watched.statistics.surprisal.tolist() == still
            assert part.watched.tested.tolist() == [i % 3 == 0 for i in still]


def test_parts_of_what_was_seen_are_joined_in_the_order_of_the_rows():
    assert Watched.join([]) is None
    columns = [f.name for f in fields(RowStatistics)]
    parts = []
    for index in ([3, 9], [0], [4, 7]):
        rows = [{name: 100 * i + place for place, name in enumerate(columns)} for i in index]
        parts.append(watched(index, *rows, tested=[i > 3 for i in index]))
    assert Watched.join(parts[:1]) is parts[0]
    joined = Watched.join(parts)
    assert joined.index.tolist() == [0, 3, 4, 7, 9]
    assert joined.tested.tolist() == [False, False, True, True, True]
    for place, name in enumerate(columns):
        assert getattr(joined.statistics, name).tolist() == [100 * i + place for i in joined.index]


@pytest.mark.parametrize("amount", [-1, -1e-300, math.nan, -math.inf])
def test_counter_refuses_what_would_break_rates(tmp_path, amount):
    """vllm#6642, vllm#26372: a counter that falls looks like a restart, a NaN stays for ever."""
    counter = Series(tmp_path, model_name="m", engine=0).counter(SAMPLED_TOKENS)
    counter.inc(3)
    with pytest.raises(ValueError, match="from 0 on"):
        counter.inc(amount)
    assert (counter.value, total(tmp_path)) == (3, 3)


# ---------------------------------------------------------------------------------------------------------------- parts


def test_requests_are_counted_once_however_often_they_come_back(tmp_path):
    """Preempted ones bring what they had generated; each is counted for the sampler that it asked for."""
    recorder = make_recorder(tmp_path)
    recorder.record(step(1, 2, admitted=[Admission(0), Admission(1, by_stock=True), Admission(2)]))
    recorder.record(step(admitted=[Admission(0, (1, 2), first=False), Admission(1, (5,), False, True)]))
    recorder.record(step(3, admitted=[Admission(5)]), np.array([False]))
    assert [total(tmp_path, REQUESTS, arm=arm) for arm in ARMS] == [3, 1]
    assert total(tmp_path, FAULTS) == 0


def loops_and_runs(text):
    """Return at which tokens of a text a loop begins, and the lengths of the runs of one token that ended."""
    begun, runs, inside = [], [], False
    for end in range(1, len(text) + 1):
        here = text[:end]
        looping = any(
            len(here) >= (n := max(3 * p, 24)) and here[len(here) - n + p :] == here[len(here) - n : len(here) - p]
            for p in range(1, 65)
        )
        if looping and not inside:
            begun.append(end - 1)
        inside = looping
        if end > 1 and here[-1] != here[-2]:
            runs.append(next(k for k in range(1, end) if k == end - 1 or here[-2 - k] != here[-2]))
    return begun, runs


@pytest.mark.parametrize("at_once", [1, 3])
def test_loops_and_runs_are_those_of_the_texts_by_arm(tmp_path, at_once):
    """Texts that loop with several periods, in slots that others had before; one token a step, or several."""
    generator = np.random.default_rng(at_once)
    texts = []
    for i in range(12):
        head, tail = generator.integers(0, 9, generator.integers(1, 30)), generator.integers(0, 9, 96)
        period = generator.integers(0, 9, i % 5 + 1)
        texts.append([*head.tolist(), *period.tolist() * (45 // (i % 5 + 1)), *tail.tolist()][:96])
    recorder = make_recorder(tmp_path, slots=4)
    for first in range(0, 12, 4):
        admitted = [Admission(slot, by_stock=slot == 1) for slot in range(4)]
        for start in range(0, 96, at_once):
            tokens = [texts[first + slot][start + k] for slot in range(4) for k in range(at_once)]
            slots = np.repeat(range(4), at_once)
            recorder.record(step(*tokens, slots=slots, by_stock=np.flatnonzero(slots == 1), admitted=admitted))
            admitted = []
    for arm, mine in ((GUMBEL, (0, 2, 3)), (DEFAULT, (1,))):
        found = [loops_and_runs(texts[first + slot]) for first in range(0, 12, 4) for slot in mine]
        assert total(tmp_path, ANOMALOUS_TOKENS, kind="repetition", arm=arm) == sum(len(begun) for begun, _ in found)
        assert total(tmp_path, TOKEN_RUN_LENGTH, "_count", arm=arm) == sum(len(runs) for _, runs in found) > 50
        assert total(tmp_path, TOKEN_RUN_LENGTH, "_sum", arm=arm) == sum(sum(runs) for _, runs in found)
    assert total(tmp_path, ANOMALOUS_TOKENS, kind="repetition") > 8
    assert total(tmp_path, FAULTS) == 0


@pytest.mark.parametrize("known", [True, False])
def test_loop_of_a_request_that_comes_back_is_not_counted_again(tmp_path, known):
    """If the worker knows what was generated; if not, the loop is found anew once the text shows it again."""
    recorder = make_recorder(tmp_path)
    recorder.record(step(admitted=[Admission(0)]))
    for _ in range(40):
        recorder.record(step(5, slots=[0]))
    assert total(tmp_path, ANOMALOUS_TOKENS, kind="repetition") == 1
    recorder.record(step(admitted=[Admission(3, (5,) * 40 if known else (), first=False)]))
    for _ in range(40):
        recorder.record(step(5, slots=[3]))
    assert total(tmp_path, ANOMALOUS_TOKENS, kind="repetition") == (1 if known else 2)


def test_glitch_tokens_are_counted_by_arm(tmp_path):
    listed = np.zeros(VOCAB, bool)
    listed[[7, 299]] = True
    recorder = make_recorder(tmp_path, glitches=listed)
    recorder.record(step(7, 8, 299, 7, 7, by_stock=(3,)), np.array([True, True, True, True, False]))
    assert [total(tmp_path, ANOMALOUS_TOKENS, kind="glitch", arm=arm) for arm in ARMS] == [2, 1]
    assert total(tmp_path, FAULTS) == 0


def test_line_of_the_log_comes_after_each_interval_with_tokens_and_only_then(tmp_path, said):
    now = 100.0
    series = Series(tmp_path, model_name="m", engine=0)
    sampled = {arm: series.counter(SAMPLED_TOKENS, arm) for arm in ARMS}
    anomalies = {
        (kind, arm): series.counter(ANOMALOUS_TOKENS, arm, kind=kind) for kind in catalogue.AnomalyKind for arm in ARMS
    }
    summary = Summary(sampled, anomalies, 10.0, clock=lambda: now)
    sampled[GUMBEL].inc(30)
    now = 109.9
    summary.record(step())
    assert said == []
    now = 112.0
    summary.record(step())
    assert said == ["vllm-gumbel: 30 tokens in 12.0 s (2.5/s); anomalous: none"]
    now = 200.0
    summary.record(step())
    assert len(said) == 1, "nothing was drawn"
    sampled[GUMBEL].inc(7)
    sampled[DEFAULT].inc(3)
    anomalies[catalogue.AnomalyKind.GLITCH, GUMBEL].inc(2)
    anomalies[catalogue.AnomalyKind.IMPROBABLE, GUMBEL].inc(1)
    anomalies[catalogue.AnomalyKind.REPETITION, DEFAULT].inc(5)
    now = 210.0
    summary.record(step())
    assert said[1:] == [
        "vllm-gumbel: 10 tokens in 10.0 s (1.0/s), 3 by vLLM's own sampler; anomalous: improbable 1, glitch 2"
    ]


def test_time_in_the_sampler_is_a_histogram(tmp_path):
    recorder = make_recorder(tmp_path)
    for duration in (0.0, 0.0002, 0.3, 5.0):
        recorder.seconds(duration)
    assert total(tmp_path, catalogue.SAMPLER_SECONDS, "_count") == 4
    assert total(tmp_path, catalogue.SAMPLER_SECONDS, "_sum") == pytest.approx(5.3002)
    assert total(tmp_path, catalogue.SAMPLER_SECONDS, "_bucket", le="0.0002") == 2
    assert total(tmp_path, catalogue.SAMPLER_SECONDS, "_bucket", le="0.5") == 3


def test_values_added_at_once_are_those_added_one_by_one(tmp_path):
    """At, below and above every bound, in any number, none too."""
    series, generator = Series(tmp_path, model_name="m", engine=0), np.random.default_rng(0)
    at_once = series.distribution(TOKEN_RUN_LENGTH, GUMBEL)
    one_by_one = series.histogram(TOKEN_RUN_LENGTH, DEFAULT)
    for size in (0, 1, 3, 200):
        values = generator.integers(0, 90, size)
        at_once.add(values)
        for value in values:
            one_by_one.observe(value)
    for suffix in ("_count", "_sum"):
        first, second = (total(tmp_path, TOKEN_RUN_LENGTH, suffix, arm=arm) for arm in ARMS)
        assert first == second > 200
    for bound in [*map(float, TOKEN_RUN_LENGTH.buckets), "+Inf"]:
        first, second = (total(tmp_path, TOKEN_RUN_LENGTH, "_bucket", arm=arm, le=str(bound)) for arm in ARMS)
        assert first == second > 0, bound


# --------------------------------------------------------------------------------------------------------------- faults


@pytest.mark.parametrize("name", ["counts", "exactness", "loops", "glitches", "frequencies", "summary"])
def test_part_that_raises_is_counted_under_its_name_and_costs_no_other(tmp_path, said, name):
    recorder = make_recorder(tmp_path, glitches=np.ones(VOCAB, bool), summary_seconds=1e9)
    place = [part.name for part in recorder._parts].index(name)

    def fail(step):
        raise ZeroDivisionError("planted")

    recorder._parts[place] = SimpleNamespace(name=name, record=fail)
    for _ in range(3):
        recorder.record(step(1, 2, watched=watched([0, 1]), admitted=[Admission(0)]))
    assert (total(tmp_path, FAULTS, part=name), total(tmp_path, FAULTS)) == (3, 3)
    (line,) = (line for line in said if "planted" in line)
    assert f"counting failed in {name}, tokens keep flowing" in line
    assert total(tmp_path) == (0 if name == "counts" else 6)
    assert total(tmp_path, catalogue.TESTED_TOKENS) == (0 if name == "exactness" else 6)
    assert total(tmp_path, ANOMALOUS_TOKENS, kind="glitch") == (0 if name == "glitches" else 6)


@pytest.mark.parametrize("wrong", [lambda inc: lambda amount: inc(-amount), lambda inc: lambda amount: inc(None)])
def test_counter_that_fails_is_a_fault_and_is_logged_once(tmp_path, said, wrong):
    """vllm#6642, vllm#26372, vllm#43031: a negative increment, or none at all; no exception comes out."""
    recorder = make_recorder(tmp_path)
    sampled = recorder.sampled[GUMBEL]
    recorder.sampled[GUMBEL] = SimpleNamespace(inc=wrong(sampled.inc))
    for _ in range(3):
        recorder.record(step(1, 2))
    assert total(tmp_path, FAULTS, part="counts") == 3
    assert total(tmp_path) == 0
    assert len(said) == 1
    assert "Error" in said[0]
    assert "tokens keep flowing" in said[0]
    recorder.sampled[GUMBEL] = sampled
    for mask in ([True], [False], [True] * 3):
        recorder.record(step(1, 2), np.array(mask))
    assert (total(tmp_path, FAULTS, part="recorder"), len(said)) == (3, 2), "a mask that does not fit"
    recorder.record(step(1, 2))
    assert total(tmp_path) == 2, "counting goes on"


def test_even_faults_that_cannot_be_counted_do_no_harm(tmp_path, said):
    recorder = make_recorder(tmp_path)

    def fail(*_):
        raise OSError(28, "No space left on device")

    recorder.sampled[GUMBEL] = SimpleNamespace(inc=fail)
    recorder._faults = {name: SimpleNamespace(inc=fail) for name in recorder._faults}
    for _ in range(3):
        recorder.record(step(1))
    assert len(said) == 2
    assert all("No space left on device" in line for line in said)
    recorder.fault("of no name", ValueError("x"))
