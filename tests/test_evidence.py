"""The sums over watched rows, against plain Python, and what is left out of them."""

import math
from statistics import NormalDist

import numpy as np
import pytest

from tests.recording import ORDINARY, heard, make_recorder, step, total, watched
from vllm_gumbel.metrics import catalogue
from vllm_gumbel.metrics.catalogue import ARMS, DEFAULT, GUMBEL
from vllm_gumbel.settings import SamplerSettings

NAN, INFINITY = float("nan"), float("inf")
NORMAL = NormalDist()

#: A row without a law: no finite candidate, or an infinite logit.
LAWLESS = {name: 0 if name == "kept" else NAN for name in ORDINARY}

#: Metrics that are sums of a statistic over tested rows.
SUMS = {
    "surprisal": catalogue.SURPRISAL,
    "entropy": catalogue.ENTROPY,
    "variance": catalogue.SURPRISAL_VARIANCE,
}


def random_row(generator):
    """Return a row of any kind but those whose statistics are wrong."""
    kind = generator.integers(8)
    if kind == 0:
        return LAWLESS
    row = {
        "kept": int(generator.integers(1, 200_000)),
        "log_total": generator.normal(),
        "surprisal": generator.exponential(),
        "entropy": generator.exponential(),
        "variance": generator.exponential(),
        "score": generator.gumbel(),
        "log_probability": -generator.exponential(8),
        "improbable_mass": generator.random() ** 4,
    }
    return row | {1: {"surprisal": INFINITY}, 2: {"score": NAN}, 3: {"score": generator.normal() * 50}}.get(kind, {})


class Naive:
    """The sums of one arm, row by row.

    Args:
        threshold: `improbable_below`.
    """

    def __init__(self, threshold):
        self.threshold = threshold
        self.watched = self.tested = self.outside = self.improbable = self.pairs = 0
        self.expected = self.squares = self.products = 0.0
        self.sums = dict.fromkeys(SUMS, 0.0)
        self.bins, self.kept = [0] * 20, []

    def add(self, rows):
        """Add the rows of a step, each with whether it is tested."""
        z = []
        for row, tested in rows:
            if row["kept"] == 0:
                continue
            self.watched += 1
            self.kept.append(row["kept"])
            self.outside += row["surprisal"] == INFINITY
            self.improbable += math.exp(row["log_probability"]) < self.threshold
            self.expected += row["improbable_mass"]
            if not tested or row["surprisal"] == INFINITY:
                continue
            self.tested += 1
            for name in SUMS:
                self.sums[name] += row[name]
            if math.isnan(row["score"]):
                continue
            share = math.exp(-math.exp(-row["score"])) if row["score"] > -700 else 0.0
            self.bins[min(19, math.floor(20 * share))] += 1
            z.append(NORMAL.inv_cdf(min(max(share, 1e-300), 1 - 2**-53)))
        self.squares += sum(value * value for value in z)
        for i in range(len(z)):
            for j in range(len(z)):
                if i != j:
                    self.pairs += 1
                    self.products += z[i] * z[j]


@pytest.mark.parametrize("threshold", [1e-6, 1e-3])
def test_sums_are_those_of_plain_python(tmp_path, threshold):
    """100 random steps, in which some rows are ours, some vLLM's, some seeded, some not sent, some without a law."""
    generator = np.random.default_rng(1)
    recorder = make_recorder(tmp_path, settings=SamplerSettings(watch=1, improbable_below=threshold))
    naive = {arm: Naive(threshold) for arm in ARMS}
    for _ in range(100):
        count = int(generator.integers(1, 14))
        index = np.flatnonzero(generator.random(count) < 0.7)
        rows = [random_row(generator) for _ in index]
        tested, by_stock = generator.random(len(index)) < 0.6, np.flatnonzero(generator.random(count) < 0.3)
        sent = generator.random(count) < 0.8
        seen = watched(index, *rows, tested=tested) if len(index) else None
        recorder.record(step(*range(count), by_stock=by_stock, watched=seen), sent)
        for arm in ARMS:
            mine = [sent[i] and (i in by_stock) == (arm == DEFAULT) for i in index]
            naive[arm].add([(row, test) for row, test, is_mine in zip(rows, tested, mine, strict=True) if is_mine])
    for arm, expected in naive.items():
        assert total(tmp_path, catalogue.WATCHED_TOKENS, arm=arm) == expected.watched > 50
        assert total(tmp_path, catalogue.TESTED_TOKENS, arm=arm) == expected.tested > 30
        outside, improbable = (
            total(tmp_path, catalogue.ANOMALOUS_TOKENS, kind=kind, arm=arm) for kind in ("outside_filter", "improbable")
        )
        assert outside == expected.outside > 3
        assert improbable == expected.improbable > 3
        assert total(tmp_path, catalogue.EXPECTED_IMPROBABLE, arm=arm) == pytest.approx(expected.expected, rel=1e-12)
        for name, metric in SUMS.items():
            assert total(tmp_path, metric, arm=arm) == pytest.approx(expected.sums[name], rel=1e-12)
        assert total(tmp_path, catalogue.KEPT_TOKENS, "_sum", arm=arm) == sum(expected.kept)
        for bound in catalogue.KEPT_TOKENS.buckets:
            below = sum(kept <= bound for kept in expected.kept)
            assert total(tmp_path, catalogue.KEPT_TOKENS, "_bucket", arm=arm, le=repr(float(bound))) == below
    ours = naive[GUMBEL]
    assert [total(tmp_path, catalogue.SCORE_PIT, bin=str(bin)) for bin in range(20)] == ours.bins
    assert total(tmp_path, catalogue.SCORE_PAIRS) == ours.pairs > 100
    squares = total(tmp_path, catalogue.SCORE_SQUARES)
    assert squares == pytest.approx(ours.squares, rel=1e-9)
    assert total(tmp_path, catalogue.SCORE_STEP_SQUARES) - squares == pytest.approx(ours.products, rel=1e-6, abs=1e-6)
    assert total(tmp_path, catalogue.FAULTS) == 0


@pytest.mark.parametrize("name", ["surprisal", "entropy", "variance", "improbable_mass"])
@pytest.mark.parametrize("value", [NAN, -INFINITY, INFINITY])
def test_row_whose_statistics_are_no_numbers_is_left_out_and_is_a_fault(tmp_path, name, value):
    """One row must not spoil sums that hold millions; the others of its step are summed."""
    recorder = make_recorder(tmp_path)
    with heard() as said:
        recorder.record(step(1, 2, 3, watched=watched([0, 1, 2], {}, {name: value}, {"surprisal": 2.0})))
    if (name, value) == ("surprisal", INFINITY):  # a token outside the filters
        assert (total(tmp_path, catalogue.FAULTS), said) == (0, [])
        assert total(tmp_path, catalogue.ANOMALOUS_TOKENS, kind="outside_filter") == 1
    else:
        assert total(tmp_path, catalogue.FAULTS, part="exactness") == total(tmp_path, catalogue.FAULTS) == 1
        assert "the statistics of 1 rows are no finite numbers" in said[0]
    mass_is_wrong = name == "improbable_mass"
    assert total(tmp_path, catalogue.WATCHED_TOKENS) == 3
    assert total(tmp_path, catalogue.TESTED_TOKENS) == (3 if mass_is_wrong else 2)
    assert total(tmp_path, catalogue.SURPRISAL) == 3.0 + (ORDINARY["surprisal"] if mass_is_wrong else 0)
    assert total(tmp_path, catalogue.EXPECTED_IMPROBABLE) == ORDINARY["improbable_mass"] * (2 if mass_is_wrong else 3)
    assert total(tmp_path) == 3
    recorder.record(step(4, watched=watched([0])))
    assert total(tmp_path, catalogue.WATCHED_TOKENS) == 4


def test_token_outside_the_filters_is_counted_and_no_evidence_of_the_law(tmp_path):
    recorder = make_recorder(tmp_path)
    recorder.record(
        step(1, 2, watched=watched([0, 1], {"surprisal": INFINITY}, {"surprisal": INFINITY}), by_stock=(1,))
    )
    for arm in ARMS:
        assert total(tmp_path, catalogue.ANOMALOUS_TOKENS, kind="outside_filter", arm=arm) == 1
        assert total(tmp_path, catalogue.WATCHED_TOKENS, arm=arm) == 1
        assert total(tmp_path, catalogue.TESTED_TOKENS, arm=arm) == 0
    assert total(tmp_path, catalogue.ENTROPY) == total(tmp_path, catalogue.SCORE_SQUARES) == 0
    assert total(tmp_path, catalogue.FAULTS) == 0


@pytest.mark.parametrize(("below", "counted"), [(1e-6, 2), (1e-9, 1), (1e-3, 3)])
def test_improbable_tokens_are_those_below_the_threshold_and_their_expectation_is_beside_them(tmp_path, below, counted):
    """Whether tested or not: rows by seed and greedy rows draw improbable tokens too, and their masses say so."""
    rows = [
        {"log_probability": math.log(p), "improbable_mass": mass}
        for p, mass in ((1e-4, 0.5), (0.99e-6, 0.25), (1e-30, 1.0), (1e-3, 0.0625))
    ]
    recorder = make_recorder(tmp_path, settings=SamplerSettings(improbable_below=below))
    recorder.record(step(1, 2, 3, 4, watched=watched(range(4), *rows, tested=[True, False, False, True])))
    assert total(tmp_path, catalogue.ANOMALOUS_TOKENS, kind="improbable") == counted
    assert total(tmp_path, catalogue.EXPECTED_IMPROBABLE) == 1.8125


def test_noise_whose_scores_are_not_known_gives_evidence_of_the_law_only(tmp_path):
    """vLLM's own noise, under runner V2, and vLLM's own sampler, under V1."""
    recorder = make_recorder(tmp_path)
    recorder.record(step(1, 2, 3, watched=watched([0, 1, 2], {"score": NAN}, {}, {}), by_stock=(1,)))
    assert total(tmp_path, catalogue.TESTED_TOKENS) == 3
    assert total(tmp_path, catalogue.SURPRISAL) == 3 * ORDINARY["surprisal"]
    assert sum(total(tmp_path, catalogue.SCORE_PIT, bin=str(bin)) for bin in range(20)) == 1
    assert total(tmp_path, catalogue.SCORE_PAIRS) == 0
    assert total(tmp_path, catalogue.FAULTS) == 0


def test_rows_that_are_not_tested_are_watched_all_the_same(tmp_path):
    recorder = make_recorder(tmp_path)
    recorder.record(step(1, 2, watched=watched([0, 1], tested=False)))
    assert total(tmp_path, catalogue.WATCHED_TOKENS) == total(tmp_path, catalogue.KEPT_TOKENS, "_count") == 2
    for metric in (catalogue.TESTED_TOKENS, catalogue.SURPRISAL, catalogue.SCORE_SQUARES):
        assert total(tmp_path, metric) == 0


@pytest.mark.parametrize(("score", "bin"), [(-1e6, 0), (-800.0, 0), (-3.0, 0), (40.0, 19), (1e6, 19)])
def test_score_that_no_exact_draw_has_is_binned_at_its_end(tmp_path, score, bin):
    recorder = make_recorder(tmp_path)
    recorder.record(step(1, 2, watched=watched([0, 1], {"score": score}, {"score": score})))
    assert total(tmp_path, catalogue.SCORE_PIT, bin=str(bin)) == 2
    assert 2 * total(tmp_path, catalogue.SCORE_SQUARES) == pytest.approx(total(tmp_path, catalogue.SCORE_STEP_SQUARES))
    assert 10 < total(tmp_path, catalogue.SCORE_SQUARES) < 2 * 38**2
    assert total(tmp_path, catalogue.FAULTS) == 0
