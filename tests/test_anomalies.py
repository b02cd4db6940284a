"""Loops and runs are found exactly as their definition says, whatever the batch."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from vllm_gumbel.metrics.anomalies import REPLAYED, LoopWatch


class Text:
    """One text, watched in plain Python straight from the definition.

    Args:
        tokens: what it holds already; negative ones equal nothing.
    """

    def __init__(self, tokens=()):
        self.tokens = [token if token >= 0 else object() for token in tokens]
        self.looping = self.in_loop()

    def in_loop(self):
        """Whether the last max(3p, 24) tokens repeat with some period p from 1 to 64."""
        for period in range(1, 65):
            last = self.tokens[-max(3 * period, 24) :]
            if len(last) == max(3 * period, 24) and last[period:] == last[:-period]:
                return True
        return False

    def run(self):
        """How many equal tokens the text ends in."""
        length = 0
        while length < len(self.tokens) and self.tokens[-1 - length] == self.tokens[-1]:
            length += 1
        return length

    def add(self, token):
        """Return whether a loop began with this token, and the length of the run that it ended or None."""
        ended = self.run() if self.tokens and self.tokens[-1] != token else None
        self.tokens.append(token)
        before, self.looping = self.looping, self.in_loop()
        return self.looping and not before, ended


def begun_at(tokens):
    """Return the indices of the tokens with which LoopWatch sees a loop begin."""
    watch = LoopWatch(3)
    watch.admit(1, [])
    steps = [watch.update(np.array([1]), np.array([token])) for token in tokens]
    return [index for index, step in enumerate(steps) if step.begun[0]]


def piece(period, first=100):
    """Return `period` different tokens."""
    return list(range(first, first + period))


@pytest.mark.parametrize(
    ("period", "at"), [(1, 24), (2, 24), (7, 24), (8, 24), (9, 27), (21, 63), (63, 189), (64, 192)]
)
def test_loop_begins_with_its_third_copy_and_24th_token_and_is_counted_once(period, at):
    """Three copies and 24 tokens, for the shortest and longest periods and those around 8, where the rule changes."""
    tokens = ([1, 2, 3] + piece(period) * 40)[: 3 + 4 * at]
    assert begun_at(tokens) == [3 + at - 1]


def test_period_of_65_is_no_loop():
    assert begun_at(piece(65) * 5) == []


def test_loop_that_was_left_and_entered_again_is_counted_again():
    tokens = piece(4) * 10 + [7] + piece(4) * 10
    assert begun_at(tokens) == [23, 40 + 1 + 23]


def test_loop_within_a_loop_is_not_counted_again():
    """A piece of 40 zeros and 24 others: zeros loop in the first three copies, then the piece does, zeros and all."""
    assert begun_at(([0] * 40 + piece(24)) * 6) == [23, 64 + 23, 128 + 23, 191]


def test_loop_of_a_long_period_is_seen_through_runs_that_are_no_loop():
    assert begun_at(([9] * 20 + piece(44)) * 4) == [191]


def test_runs_are_measured_when_another_token_follows():
    watch = LoopWatch(2)
    rows = np.array([0, 1])
    ended = [watch.update(rows, np.array(pair)) for pair in [(5, 5), (5, 6), (5, 7), (0, 7), (1, 7)]]
    seen = [(step.ended_rows.tolist(), step.ended_runs.tolist()) for step in ended]
    assert seen == [([], []), ([1], [1]), ([1], [1]), ([0], [3]), ([0], [1])]


def test_run_of_any_length_is_measured():
    """Past 2^16, so that no counter of 16 bits passes."""
    watch, slot = LoopWatch(1), np.array([0])
    begun = 0
    for _ in range(70_000):
        begun += int(watch.update(slot, np.array([3])).begun[0])
    assert watch.update(slot, np.array([4])).ended_runs.tolist() == [70_000]
    assert begun == 1


def test_largest_token_ids_are_told_apart():
    last = 2**31 - 1
    assert begun_at([last, last - 1] * 12 + [last, last - 2] * 12) == [23, 47]


def test_step_without_tokens_brings_nothing():
    step = LoopWatch(2).update(np.zeros(0, np.int64), np.zeros(0, np.int64))
    assert [len(part) for part in step] == [0, 0, 0]


def test_admitted_text_goes_on_where_it_was():
    """Its loop is not counted a second time; one that is about to begin is."""
    going, close = LoopWatch(1), LoopWatch(1)
    going.admit(0, piece(64) * 5)
    close.admit(0, piece(64) * 3)
    close.admit(0, (piece(64) * 3)[:-1])
    nexts = [watch.update(np.array([0]), np.array([token])) for watch, token in ((going, 100), (close, 163))]
    assert [step.begun.tolist() for step in nexts] == [[False], [True]]


def test_unknown_tokens_of_an_admitted_text_equal_nothing():
    watch = LoopWatch(1)
    watch.admit(0, [-1] * 100)
    step = watch.update(np.array([0]), np.array([5]))
    assert (step.begun.tolist(), step.ended_runs.tolist()) == ([False], [1])


TOKEN = st.integers(0, 2)


@st.composite
def texts(draw):
    """Return a text that often loops: pieces of a tiny alphabet, each repeated."""
    parts = draw(st.lists(st.tuples(st.lists(TOKEN, min_size=1, max_size=30), st.integers(1, 12)), max_size=6))
    return [token for part, copies in parts for token in part * copies]


@st.composite
def traffic(draw):
    """Return events on 4 slots: texts admitted, with a tail still to come, and how many rows each step has."""
    admitted = draw(st.lists(st.tuples(st.integers(0, 3), texts(), texts()), min_size=1, max_size=8))
    groups = draw(st.lists(st.integers(1, 9), min_size=1, max_size=30))
    return admitted, groups


@settings(max_examples=150, deadline=None)
@given(traffic=traffic(), seed=st.integers(0, 2**32 - 1))
def test_random_traffic_is_seen_as_the_definition_says(traffic, seed):
    """Slots are reused, resumed texts replayed, and a step holds several tokens of a slot, in any mixture of rows.

    The oracle sees whole texts, so runs of resumed texts are cut to what is replayed.
    """
    admitted, groups = traffic
    generator = np.random.default_rng(seed)
    watch, oracles, coming = LoopWatch(4), {slot: Text() for slot in range(4)}, {slot: [] for slot in range(4)}
    for turn in range(max(len(groups), len(admitted))):
        if turn < len(admitted):
            slot, before, after = admitted[turn]
            watch.admit(slot, before)
            oracles[slot], coming[slot] = Text(before[-REPLAYED:]), list(after)
        for _ in range(12):
            waiting = [slot for slot in range(4) if coming[slot]]
            if not waiting:
                break
            slots, tokens = [], []
            for slot in generator.choice(waiting, groups[turn % len(groups)]):
                if coming[slot]:
                    slots.append(int(slot))
                    tokens.append(coming[slot].pop(0))
            step = watch.update(np.array(slots), np.array(tokens))
            expected = [oracles[slot].add(token) for slot, token in zip(slots, tokens, strict=True)]
            assert step.begun.tolist() == [begun for begun, _ in expected]
            runs = {row: length for row, (_, length) in enumerate(expected) if length is not None}
            assert dict(zip(step.ended_rows.tolist(), step.ended_runs.tolist(), strict=True)) == runs


@pytest.mark.parametrize("length", [0, 1, 2, 23, 24, 63, 64, 65, 191, 192, 193, 400])
@pytest.mark.parametrize("period", [1, 3, 40, 64])
def test_admitting_a_text_equals_having_written_it(length, period):
    """The states that decide later steps agree: the same texts go on in both, over all kinds of loop ends."""
    tokens = (piece(period) * 400)[:length]
    written, resumed = LoopWatch(1), LoopWatch(1)
    for token in tokens:
        written.update(np.array([0]), np.array([token]))
    resumed.admit(0, tokens)
    following = piece(period)[length % period :] + piece(period) * 3 + [1, 1] + piece(2) * 20
    for token in following:
        old, new = (watch.update(np.array([0]), np.array([token])) for watch in (written, resumed))
        assert old.begun.tolist() == new.begun.tolist()
        assert [min(run, REPLAYED) for run in old.ended_runs] == [min(run, REPLAYED) for run in new.ended_runs]
