"""The Numba backend against the reference: token for token, flag for flag, kept set for kept set. Nothing statistical.

`processed` is compared bit for bit, which compares kept sets and tempered values at once.
"""

import os
import subprocess
import sys

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.rows import INFINITY, NAN, bfloat16, random_params, take
from vllm_gumbel.kernels import sample_numba, sample_reference
from vllm_gumbel.kernels.contract import NO_TOKEN, Flag, RowParams, Stream, widen

DTYPES = ("float32", "bfloat16", "float16")


def as_dtype(values, dtype):
    """Return float32 values as the logits of a dtype; NaN stay NaN."""
    values = np.asarray(values, np.float32)
    if dtype == "bfloat16":
        return (values.view(np.uint32) >> np.uint32(16)).astype(np.uint16)
    with np.errstate(over="ignore"):
        return values.astype(dtype)


def make_rows(rng, rows, vocabulary):
    """Return float32 rows of one kind: flat, spread, peaked, tied, with or without masks, some of them odd."""
    spread = rng.choice([0.02, 1, 8])
    logits = rng.normal(0, spread, (rows, vocabulary)).astype(np.float32)
    if rng.random() < 0.5:
        logits = bfloat16(logits)  # ties in every dtype
    if rng.random() < 0.3:
        logits[np.arange(rows), rng.integers(vocabulary, size=rows)] += np.float32(12)
    logits[rng.random(logits.shape) < rng.choice([0, 0, 0.3, 0.99])] = -INFINITY
    kind = rng.random(rows)
    for r in range(rows):
        column = rng.integers(vocabulary)
        if kind[r] < 0.05:
            logits[r, column] = NAN
        elif kind[r] < 0.1:
            logits[r, column] = INFINITY
        elif kind[r] < 0.14:
            logits[r] = rng.choice([NAN, -NAN, -INFINITY, 0.0])
        elif kind[r] < 0.18:
            with np.errstate(over="ignore"):
                logits[r] *= np.float32(rng.choice([1e38, 1e-42, 1e4]))
        elif kind[r] < 0.2:
            logits[r, :column] = -np.float32(NAN)
    return logits


def compare(logits, params, *, usable=None, stream=Stream.TARGET, wanted=True):
    """Assert that both backends give the same, and return what they gave."""
    ours = np.full(logits.shape, 7, np.float32) if wanted else None
    expected = ours.copy() if wanted else None
    with np.errstate(all="ignore"):
        right = sample_reference.draw(logits, params, usable_vocab=usable, stream=stream, processed=expected)
    got = sample_numba.draw(logits, params, usable_vocab=usable, stream=stream, processed=ours)
    same = (got.tokens == right.tokens) & (got.flags == right.flags)
    if wanted:
        same &= (ours.view(np.uint32) == expected.view(np.uint32)).all(axis=1)
    assert same.all(), [(int(r), {k: v[r] for k, v in vars(params).items()}) for r in np.flatnonzero(~same)[:3]]
    return got


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("vocabulary", [1, 7, 255, 256, 257, 1023, 1025, 4097])
def test_mixed_batches_equal_the_reference(vocabulary, dtype):
    """About 600 rows a size and dtype, every row with parameters of its own, at and past their ends."""
    rng = np.random.default_rng([vocabulary, DTYPES.index(dtype)])
    for batch in range(20 if vocabulary < 4000 else 8):
        rows = 30
        logits = as_dtype(make_rows(rng, rows, vocabulary), dtype)
        usable = int(rng.integers(1, vocabulary + 2)) if batch % 2 else None
        stream = Stream(int(rng.integers(4)))
        compare(logits, random_params(rng, rows, vocabulary), usable=usable, stream=stream, wanted=batch % 3 > 0)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("vocabulary", [32_000, 49_152, 128_256, 300_000])
def test_large_rows_equal_the_reference(vocabulary, dtype):
    """12 rows with every filter and combination of filters on a flat and on a peaked row."""
    rng = np.random.default_rng([vocabulary, DTYPES.index(dtype)])
    flat, peaked = rng.normal(0, 1, vocabulary), rng.normal(0, 2.5, vocabulary)
    peaked[rng.integers(vocabulary, size=5)] += 12
    logits = as_dtype(np.tile([flat, peaked], (6, 1)), dtype)
    params = RowParams.uniform(12, temperature=0.8, position=vocabulary)
    params.seed[:] = rng.integers(0, 2**63, 12)
    params.top_k[2:4], params.top_k[8:10] = 50, 50
    params.top_p[4:6], params.top_p[8:10], params.top_p[10:] = 0.95, 0.95, 0.6
    params.min_p[6:8], params.min_p[10:] = 0.05, 0.01
    drawn = compare(logits, params, wanted=False)
    compare(logits[4:6], take(params, [4, 5]))
    assert len(set(drawn.tokens.tolist())) > 3


def test_thousands_of_draws_from_one_row_equal_the_reference():
    """8,000 seeds over four filters on one row of 1,500 ids: the race itself, thread by thread."""
    logits = np.broadcast_to(np.random.default_rng(9).normal(0, 1.5, 1500).astype(np.float32), (2000, 1500))
    for filters in ({}, {"top_k": 40}, {"top_p": 0.8}, {"min_p": 0.1}):
        params = RowParams.uniform(2000, **filters)
        params.seed[:] = np.arange(2000)
        tokens = compare(logits, params, wanted=False).tokens
        assert len(np.unique(tokens)) > 10


@pytest.mark.parametrize("top_p", [0.25, 0.5, 0.75, 1e-6, 0.0, 1 - 2**-24])
@pytest.mark.parametrize("vocabulary", [1, 8, 257, 1024])
def test_boundary_of_the_nucleus_among_equal_logits(vocabulary, top_p):
    """vllm-ascend#13847, vllm#54651: sums that hit top_p exactly; no reference needed, since masses of 1 add up."""
    before = sample_numba.reference_rows()
    params = RowParams.uniform(20, top_p=top_p)
    params.seed[:] = np.arange(20)
    compare(np.zeros((20, vocabulary), np.float32), params)
    assert sample_numba.reference_rows() == before


def test_boundary_of_the_nucleus_that_rounding_decides():
    """Masses that do not add up exactly, in tied pairs: the share of every prefix as top_p, and its neighbours."""
    logits = np.repeat(np.linspace(0, -4, 32), 2).astype(np.float32)
    mass = np.cumsum(np.exp(logits.astype(np.float64)))
    params = RowParams.uniform(64)
    params.top_p[:] = (mass / mass[-1]).astype(np.float32)
    for step in (-1, 0, 1):
        nudged = np.nextafter(params.top_p, np.float32(2 * step)) if step else params.top_p
        compare(np.tile(logits, (64, 1)), RowParams(**(vars(params) | {"top_p": nudged})))


@pytest.mark.parametrize("top_k", [1, 2, 49, 50, 51, 4096, 9999])
def test_top_k_among_ties_keeps_exactly_k(top_k):
    """vllm#50979: 10,000 ids on few levels, top-k below, at and above the number of blocks."""
    logits = np.random.default_rng(top_k).integers(-3, 3, (3, 10_000)).astype(np.float32)
    processed = np.empty_like(logits)
    compare(logits, RowParams.uniform(3, top_k=top_k))
    sample_numba.draw(logits, RowParams.uniform(3, top_k=top_k), processed=processed)
    assert ((processed > -INFINITY).sum(axis=1) == top_k).all()


levels = st.integers(-24, 24).map(lambda n: n / 8)
special = st.sampled_from([NAN, INFINITY, -INFINITY, -0.0, 3.3e38, -3.3e38, 1e-45])
parameters = st.fixed_dictionaries(
    {
        "temperature": st.one_of(
            st.sampled_from([0.0, 9.9e-6, 1e-5, 1.0, 3.4e38, INFINITY, NAN, -1.0]), st.floats(1e-4, 1e4)
        ),
        "top_k": st.one_of(st.integers(-2, 40), st.sampled_from([299, 300, 2**31 - 1])),
        "top_p": st.one_of(st.sampled_from([1.0, 1.25, 0.0, -1.0, 0.5, 1e-45, 1 - 2**-24]), st.floats(0, 1)),
        "min_p": st.one_of(st.sampled_from([0.0, -1.0, 1.0, 1e-45]), st.floats(0, 1)),
        "seed": st.integers(-(2**63), 2**64 - 1),
        "position": st.integers(0, 2**63 - 1),
        "salt": st.integers(0, 2**64 - 1),
    }
)


@settings(max_examples=400, derandomize=True, deadline=None, database=None)
@given(
    logits=st.lists(st.one_of(levels, levels, st.floats(-60, 60, width=32), special), min_size=1, max_size=300),
    row=parameters,
    usable=st.one_of(st.none(), st.integers(1, 301)),
    dtype=st.sampled_from(DTYPES),
)
def test_any_row_equals_the_reference(logits, row, usable, dtype):
    """Rows, parameters, limits and dtypes chosen and made small by hypothesis."""
    compare(as_dtype([logits], dtype), RowParams.uniform(1, **row), usable=usable)


@settings(max_examples=25, derandomize=True, deadline=None, database=None)
@given(vocabulary=st.integers(1, 300_000), seed=st.integers(0, 2**32), row=parameters)
def test_any_vocabulary_equals_the_reference(vocabulary, seed, row):
    """V from 1 to 300,000."""
    logits = np.random.default_rng(seed).normal(0, 2, (1, vocabulary)).astype(np.float32)
    compare(logits, RowParams.uniform(1, **row), wanted=False)


# --- layouts -----------------------------------------------------------------------------------------------------


def layouts(logits):
    """Return views equal to `logits` in other layouts; what lies between the elements is NaN."""
    rows, vocabulary = logits.shape
    padded = np.full((2 * rows, vocabulary + 10), NAN, np.float32)
    padded[::2, :vocabulary] = logits
    spaced = np.full((rows, 3 * vocabulary), NAN, np.float32)
    spaced[:, ::3] = logits
    raw = np.zeros(logits.nbytes + 1, np.uint8)[1:]
    raw[:] = np.frombuffer(logits.tobytes(), np.uint8)
    locked = logits.copy()
    locked.flags.writeable = False
    return {
        "padded rows": padded[::2, :vocabulary],
        "every third column": spaced[:, ::3],
        "column order": np.asfortranarray(logits),
        "backwards": logits[::-1, ::-1].copy()[::-1, ::-1],
        "unaligned": raw.view(np.float32).reshape(logits.shape),
        "read-only": locked,
    }


@pytest.mark.parametrize(
    "kind", ["padded rows", "every third column", "column order", "backwards", "unaligned", "read-only"]
)
def test_layout_changes_nothing(kind):
    """vllm#42684: also as the layout of `processed`, whose other elements stay as they were."""
    rng = np.random.default_rng(2)
    logits = make_rows(rng, 24, 997)
    params = random_params(rng, 24, 997)
    plain = np.empty_like(logits)
    right = sample_numba.draw(logits, params, usable_vocab=990, processed=plain)
    view = layouts(logits)[kind]
    received = np.empty_like(logits)
    got = sample_numba.draw(view, params, usable_vocab=990, processed=received)
    assert (got.tokens == right.tokens).all()
    assert (received.view(np.uint32) == plain.view(np.uint32)).all()
    assert np.array_equal(view, logits, equal_nan=True)
    if kind in ("padded rows", "every third column"):
        sample_numba.draw(logits, params, usable_vocab=990, processed=view)
        assert np.array_equal(view, plain)
        assert np.isnan(view.base).sum() == view.base.size - view.size


def test_parameters_may_be_views_and_read_only():
    """Every second entry of longer arrays, backwards, locked."""
    rng = np.random.default_rng(3)
    logits, params = make_rows(rng, 8, 300), random_params(rng, 8, 300)
    views = {}
    for name, values in vars(params).items():
        long = np.zeros(16, values.dtype)
        long[14::-2] = values
        views[name] = long[14::-2]
        views[name].flags.writeable = False
    compare(logits, RowParams(**views))


def test_processed_may_be_the_logits_themselves():
    """Written in place; rows that the reference draws are still whole when it reads them."""
    rng = np.random.default_rng(4)
    logits, params = make_rows(rng, 200, 300), random_params(rng, 200, 300)
    right, plain = logits.copy(), np.empty_like(logits)
    drawn = sample_numba.draw(logits, params, processed=plain)
    in_place = sample_numba.draw(right, params, processed=right)
    assert (drawn.tokens == in_place.tokens).all()
    assert (right.view(np.uint32) == plain.view(np.uint32)).all()


def test_neighbours_and_thread_count_change_nothing():
    """flashinfer#2402, vllm#17524: rows alone, in the batch, in another order, by one and by two threads."""
    rng = np.random.default_rng(5)
    logits, params = make_rows(rng, 40, 8000), random_params(rng, 40, 8000)
    alone = [int(sample_numba.draw(logits[[r]], take(params, [r])).tokens[0]) for r in range(40)]
    try:
        for threads in (1, 2):
            sample_numba.set_threads(threads)
            order = rng.permutation(40)
            assert sample_numba.draw(logits, params).tokens.tolist() == alone
            assert sample_numba.draw(logits[order], take(params, order)).tokens.tolist() == [alone[r] for r in order]
    finally:
        sample_numba.set_threads()


# --- bad rows ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", DTYPES)
def test_bad_rows_are_flagged_and_leave_their_neighbours_alone(dtype):
    """colibri#369, vllm#22881: NaN of either sign anywhere, infinities, rows without a candidate, between good rows."""
    logits = np.zeros((9, 600), np.float32)
    logits[1, 0], logits[2, 599], logits[3, 300] = NAN, -np.float32(NAN), INFINITY
    logits[5], logits[6], logits[7, 256:258] = NAN, -INFINITY, INFINITY
    params = RowParams.uniform(9)
    params.seed[:] = np.arange(9)
    drawn = compare(as_dtype(logits, dtype), params)
    bad, none = int(Flag.NONFINITE), int(Flag.NO_CANDIDATE)
    assert drawn.flags.tolist() == [0, bad, bad, bad, 0, bad | none, none, bad, 0]
    assert drawn.tokens[[3, 5, 6, 7]].tolist() == [300, NO_TOKEN, NO_TOKEN, 256]


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_padded_ids_are_flagged_as_by_the_reference(temperature):
    """vllm#13175: padding that holds the best, an infinity, a NaN or nothing, behind limits on and off block edges."""
    rng = np.random.default_rng(13175)
    for usable in (1, 255, 256, 257, 511, 599):
        logits = rng.normal(size=(40, 600)).astype(np.float32)
        logits[::5, -1], logits[1::5, -1], logits[2::5, usable:] = 9, INFINITY, NAN
        logits[3::5, :usable] = -INFINITY
        params = RowParams.uniform(40, temperature=temperature)
        params.seed[:] = rng.integers(0, 2**63, 40)
        compare(logits, params, usable=usable)


def test_empty_batches_and_empty_rows():
    """No rows is no error, no ids is no candidate."""
    assert sample_numba.draw(np.zeros((0, 10), np.float32), RowParams.uniform(0)).tokens.shape == (0,)
    assert sample_numba.draw(np.zeros((2, 0), np.float32), RowParams.uniform(2)).tokens.tolist() == [NO_TOKEN] * 2


def test_widening_is_exact_for_every_float_of_16_bits():
    """All 65,536 of both kinds, as the only candidate of a greedy row."""
    bits = np.arange(2**16, dtype=np.uint16)
    for logits in (bits[:, None], bits.view(np.float16)[:, None]):
        processed = np.empty(logits.shape, np.float32)
        sample_numba.draw(logits, RowParams.uniform(2**16, temperature=0.0), processed=processed)
        value = widen(logits)
        expected = np.where(np.isnan(value), np.float32(-INFINITY), value)
        assert (processed.view(np.uint32) == expected.view(np.uint32)).all()


WITHOUT_JIT = """
import numpy as np
from tests.rows import random_params
from tests.test_numba_equality import DTYPES, as_dtype, compare, make_rows
rng = np.random.default_rng(1)
for vocabulary in (1, 7, 300, 600):
    for dtype in DTYPES:
        compare(as_dtype(make_rows(rng, 8, vocabulary), dtype), random_params(rng, 8, vocabulary), usable=500)
"""


def test_kernels_run_without_the_compiler():
    """`NUMBA_DISABLE_JIT=1`: the same functions as plain Python, equal to the reference."""
    environment = os.environ | {"NUMBA_DISABLE_JIT": "1"}
    subprocess.run([sys.executable, "-W", "ignore", "-c", WITHOUT_JIT], check=True, env=environment, timeout=120)
