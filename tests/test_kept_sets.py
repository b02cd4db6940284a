"""Kept sets and tokens of the reference against `naive.py`, over many rows full of ties."""

import math

import numpy as np
import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from tests import naive
from tests.rows import INFINITY, NAN, bfloat16, draw_row, random_params
from vllm_gumbel.kernels.contract import Stream
from vllm_gumbel.kernels.sample_reference import draw


def nearly_on_an_edge(x, row):
    """Return whether rounding could decide the kept set: a sum of unequal masses within 1e-12 of top_p."""
    share = naive.single(row.top_p)
    masses = [math.exp(x[i] - max(x)) for i in naive.kept(x, row._replace(top_p=1.0)) if max(x) < INFINITY]
    if not 0 < share < 1 or not masses or min(masses) == 1:
        return False
    prefix = np.cumsum(sorted(masses, reverse=True))
    return bool((abs(prefix - share * prefix[-1]) < 1e-12 * prefix[-1]).any())


def assert_same(logits, row, usable=None, stream=0):
    """Assert that the reference keeps and draws what the second implementation does."""
    token, kept = naive.draw(logits, row, usable, stream)
    got = draw_row(logits, usable_vocab=usable, **row._asdict())
    assert got.kept == kept, (logits, row, usable)
    assert got.token == token, (logits, row, usable)


def test_batches_of_random_rows_with_ties_equal_the_second_implementation():
    """1,200 rows in batches of mixed parameters, V from 1 to 300, values rounded to bfloat16 at three spreads."""
    rng = np.random.default_rng(5)
    seen = set()
    for vocabulary in [1, 2, 3, 255, 256, 257, 300, *rng.integers(1, 301, 53)]:
        rows, usable = 20, int(rng.integers(1, vocabulary + 2))
        logits = bfloat16(rng.normal(0, rng.choice([0.02, 1, 8]), (rows, vocabulary)))
        logits[rng.random(logits.shape) < rng.choice([0, 0.3])] = -INFINITY
        params = random_params(rng, rows, vocabulary)
        stream = Stream(int(rng.integers(4)))
        processed = np.empty_like(logits)
        drawn = draw(logits, params, usable_vocab=usable, stream=stream, processed=processed)
        for r in range(rows):
            row = naive.Parameters(**{name: values[r].item() for name, values in vars(params).items()})
            token, kept = naive.draw(logits[r].tolist(), row, usable, int(stream))
            assert np.flatnonzero(processed[r] > -np.inf).tolist() == kept, (vocabulary, row)
            assert drawn.tokens[r] == token, (vocabulary, row)
            seen.add(len(kept))
    assert len(seen) > 100, "kept sets of many sizes"


levels = st.integers(-24, 24).map(lambda n: n / 8)  # few levels, exact in bfloat16: ties everywhere
wide = st.floats(-60, 60, width=32).map(lambda v: float(bfloat16(v)))
special = st.sampled_from([NAN, INFINITY, -INFINITY, -0.0, 3.3e38, -3.3e38, 1e-45])
finite_rows = st.one_of(st.lists(levels, min_size=1, max_size=300), st.lists(wide, min_size=1, max_size=100))
odd_rows = st.lists(st.one_of(levels, levels, special), min_size=1, max_size=40)
parameters = st.builds(
    naive.Parameters,
    temperature=st.one_of(st.sampled_from([0.0, 9.9e-6, 1e-5, 1.0]), st.floats(0.03125, 8, width=32)),
    top_k=st.one_of(st.integers(-2, 40), st.sampled_from([299, 300, 2**31 - 1])),
    top_p=st.one_of(st.sampled_from([1.0, 1.25, 0.0, 0.5, 1e-45, 1 - 2**-24]), st.floats(0, 1, width=32)),
    min_p=st.one_of(st.sampled_from([0.0, -1.0, 1.0, 1e-45]), st.floats(0, 1, width=32)),
    seed=st.integers(-(2**63), 2**64 - 1),
    position=st.integers(0, 2**63 - 1),
    salt=st.integers(0, 2**64 - 1),
)


@settings(max_examples=250, derandomize=True, deadline=None, database=None)
@given(logits=finite_rows, row=parameters, usable=st.one_of(st.none(), st.integers(1, 301)))
def test_any_finite_row_equals_the_second_implementation(logits, row, usable):
    """Rows, parameters and limits chosen and made small by hypothesis."""
    x = naive.tempered(logits, row.temperature)
    assume(not nearly_on_an_edge(x[:usable], row))
    assert_same(logits, row, usable)


@settings(max_examples=250, derandomize=True, deadline=None, database=None)
@given(logits=odd_rows, row=parameters)
def test_any_odd_row_equals_the_second_implementation(logits, row):
    """NaN, infinities, both zeros, values that overflow when divided, the smallest subnormal."""
    assume(not nearly_on_an_edge(naive.tempered(logits, row.temperature), row))
    assert_same(logits, row)


@pytest.mark.parametrize("vocabulary", [1, 7, 255, 257, 300])
@pytest.mark.parametrize("top_p", [0.25, 0.5, 0.75])
def test_nucleus_of_equal_logits_is_exact_at_its_edge(vocabulary, top_p):
    """Masses of 1 add up without rounding: ceil(top_p V) ids are kept, also where the sum is exactly top_p."""
    assert draw_row(np.zeros(vocabulary), top_p=top_p).kept == list(range(math.ceil(top_p * vocabulary)))


@pytest.mark.parametrize("top_k", range(1, 9))
@pytest.mark.parametrize("top_p", [0.3, 0.6, 0.9])
def test_nucleus_is_taken_of_what_top_k_left(top_k, top_p):
    """top_p is a share of the mass of the k best, not of the whole row."""
    logits = bfloat16(np.linspace(1.5, 0, 8))
    both = draw_row(logits, top_k=top_k, top_p=top_p).kept
    assert both == draw_row(logits[:top_k], top_p=top_p).kept


@pytest.mark.parametrize("min_p", [0.3, 0.6, 0.9])
def test_nucleus_is_taken_of_what_min_p_left(min_p):
    """top_p is a share of the mass that reaches min_p."""
    logits = bfloat16(np.linspace(1.5, 0, 8))
    left = draw_row(logits, min_p=min_p).kept
    assert left == list(range(len(left)))
    assert draw_row(logits, min_p=min_p, top_p=0.8).kept == draw_row(logits[left], top_p=0.8).kept
