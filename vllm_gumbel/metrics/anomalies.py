"""What counts as an anomaly of a generated token, and the detectors that look at tokens alone.

The kinds are those of `catalogue.AnomalyKind`, the label `kind` of `anomalous_tokens_total`:

    kind              the token is anomalous if                           threshold           who sees it
    nonfinite_logits  its row of logits held a NaN or +inf                any                 the draw, a flag
    no_candidate      its row held no finite logit; nothing was drawn     all                 the draw, a flag
    padded_id         an id past the tokenizer's size would have won      any                 the draw, a flag
    outside_filter    the filters of its request leave it out             any; must stay 0    statistics
    improbable        the model itself, at temperature 1 and without      probability 1e-6    statistics
                      filters, gives it hardly any probability
    repetition        with it the text ends in a loop                     3 copies and 24     LoopWatch
                                                                          tokens
    glitch            it is a glitch token of this model                  see `glitch.py`     recorder

    Cost. A flag is free: the draw reads those logits anyway. The statistics (`kernels/statistics_reference.py`) read
    the row once more, for watched tokens only, so that both kinds are counts among watched tokens. LoopWatch: 9
    microseconds a step for one request, 21 to 26 for 64, whatever they write. A glitch token is one look into a table.

An improbable token is no fault as such: an exact sampler draws some, and `improbable_expected_tokens_total` says how
many. A loop is no fault of the sampler either: greedy decoding of a small model makes many. A rate that jumps is what
to look at.
"""

from collections import Counter
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from vllm_gumbel.kernels.loops import FEWEST_COPIES, LONGEST_PERIOD

#: Fewest tokens that make a loop, so that three equal tokens ("...", a row of zeros) are none.
SHORTEST_LOOP = 24

#: As many tokens as decide whether a text ends in a loop of the longest period.
REPLAYED = FEWEST_COPIES * LONGEST_PERIOD

#: By period p, from 1 on: in a loop the last max(3p, 24) tokens repeat with period p, so all of them but the first p
#: equal the one p before. The counters start at 1, hence one more.
_ENOUGH = np.array(
    [max(FEWEST_COPIES * period, SHORTEST_LOOP) - period + 1 for period in range(1, LONGEST_PERIOD + 1)], np.int32
)

#: Columns of the state of a slot: the last tokens, latest first; the counters by period; whether it is in a loop.
_TOKENS, _COUNTERS, _LOOPING = slice(0, LONGEST_PERIOD), slice(LONGEST_PERIOD, 2 * LONGEST_PERIOD), 2 * LONGEST_PERIOD

#: Stands for a token that is not known, and equals none.
_UNKNOWN = -1


class Update(NamedTuple):
    """What a step brought.

    Attributes:
        begun: bool [n]; rows with whose token a loop began.
        ended_rows: int64 [m]; rows whose token ended a run of equal tokens, in no set order.
        ended_runs: int64 [m]; lengths of those runs.
    """

    begun: npt.NDArray[np.bool_]
    ended_rows: npt.NDArray[np.int64]
    ended_runs: npt.NDArray[np.int64]


class LoopWatch:
    """Finds the tokens with which generated texts fall into a loop, and measures runs of one token.

    A text is in a loop while, for some period p from 1 to `LONGEST_PERIOD`, its last max(3p, 24) tokens repeat with
    that period. A loop begins at a token with which that becomes true, and is counted once, however long it lasts and
    whatever periods it also has. The last run of a text is not measured, since nothing ends it.

    Args:
        slots: how many texts there are at a time.
    """

    def __init__(self, slots: int) -> None:
        self._state = np.zeros((slots, 2 * LONGEST_PERIOD + 1), np.int32)
        self._state[:, _TOKENS] = _UNKNOWN

    def admit(self, slot: int, tokens: Sequence[int]) -> None:
        """Start a slot anew.

        Args:
            slot: index below the number of slots.
            tokens: what its text holds already, negative where not known. Only the last `REPLAYED` are looked at: a
                run that is longer is taken to be as long as that.
        """
        state = self._state[slot]
        state[:] = 0
        state[_TOKENS] = _UNKNOWN
        if not len(tokens):
            return
        text = np.array(tokens[-REPLAYED:], np.int32)
        text[text < 0] = _UNKNOWN
        padded = np.concatenate([np.full(LONGEST_PERIOD, _UNKNOWN, np.int32), text])
        earlier = np.lib.stride_tricks.sliding_window_view(padded, LONGEST_PERIOD)[:-1, ::-1]  # [token, period - 1]
        repeats = (earlier == text[:, None]) & (text[:, None] >= 0)
        state[_COUNTERS] = 1 + np.logical_and.accumulate(repeats[::-1]).sum(axis=0)
        state[_TOKENS] = padded[: -LONGEST_PERIOD - 1 : -1]
        state[_LOOPING] = (state[_COUNTERS] >= _ENOUGH).any()

    def update(self, slots: npt.NDArray[np.int64], tokens: npt.NDArray[np.int64]) -> Update:
        """Take the tokens of a step.

        Args:
            slots: int64 [n]; whose token a row is. Several tokens of one slot come in the order of its text.
            tokens: int64 [n], at least 0.
        """
        if len(slots) == 1 or len(set(slots.tolist())) == len(slots):
            return self._one_each(slots, tokens)
        rounds: list[list[int]] = []
        taken: Counter[int] = Counter()
        for row, slot in enumerate(slots.tolist()):
            if taken[slot] == len(rounds):
                rounds.append([])
            rounds[taken[slot]].append(row)
            taken[slot] += 1
        begun = np.zeros(len(slots), np.bool_)
        ended_rows, ended_runs = [], []
        for rows in map(np.array, rounds):
            part = self._one_each(slots[rows], tokens[rows])
            begun[rows] = part.begun
            ended_rows.append(rows[part.ended_rows])
            ended_runs.append(part.ended_runs)
        return Update(begun, np.concatenate(ended_rows), np.concatenate(ended_runs))

    def _one_each(self, slots: npt.NDArray[np.int64], tokens: npt.NDArray[np.int64]) -> Update:
        """Take one token for each of several different slots."""
        state = self._state.take(slots, axis=0)
        recent, counters = state[:, _TOKENS], state[:, _COUNTERS]
        latest = tokens.astype(np.int32)
        repeats = recent == latest[:, None]
        runs = counters[:, 0].astype(np.int64)
        counters *= repeats
        counters += 1
        recent[:, 1:] = recent[:, :-1]
        recent[:, 0] = latest
        looping = np.logical_or.reduce(counters >= _ENOUGH, axis=1)
        begun = looping > state[:, _LOOPING]
        state[:, _LOOPING] = looping
        self._state[slots] = state
        # The counter of period 1 is the length of the run: 0 before the first token, else it grows or falls back to 1.
        ended = (counters[:, 0] <= runs).nonzero()[0]
        return Update(begun, ended, runs[ended])
