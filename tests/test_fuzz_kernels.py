"""Random batches, chosen and made small by hypothesis, through every Numba kernel; a profile says how many.

`--hypothesis-profile long` takes 5,000 of each; without it a hundred; either always the same ones.
"""

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.rows import INFINITY, random_params, take
from tests.test_numba_equality import DTYPES, as_dtype, make_rows
from tests.test_numba_equality import compare as compare_draws
from tests.test_statistics import mixed_batch
from tests.test_statistics_backends import compare as compare_statistics
from vllm_gumbel.kernels import sample_numba, statistics_numba
from vllm_gumbel.kernels.contract import Stream, widen
from vllm_gumbel.kernels.logprobs_numba import gather

sizes = st.one_of(st.integers(1, 3000), st.sampled_from([1, 2, 255, 256, 257, 511, 512, 513, 1024, 2999]))
batches = st.fixed_dictionaries(
    {
        "seed": st.integers(0, 2**32 - 1),
        "rows": st.integers(1, 9),
        "vocabulary": sizes,
        "dtype": st.sampled_from(DTYPES),
    }
)
usables = st.one_of(st.none(), sizes)
streams = st.sampled_from(Stream)
fuzz = settings(deadline=None, derandomize=True, database=None)


@fuzz
@given(batch=batches, usable=usables, stream=streams, wanted=st.booleans())
def test_any_batch_is_drawn_as_by_the_reference(batch, usable, stream, wanted):
    """Tokens, flags and kept sets of rows that are flat, peaked, tied, masked, NaN, infinite, huge or tiny."""
    rng, rows, vocabulary = np.random.default_rng(batch["seed"]), batch["rows"], batch["vocabulary"]
    logits = as_dtype(make_rows(rng, rows, vocabulary), batch["dtype"])
    params = random_params(rng, rows, vocabulary)
    compare_draws(logits, params, usable=usable, stream=stream, wanted=wanted)


@fuzz
@given(batch=batches, usable=usables, stream=streams, below=st.sampled_from([0.0, 1e-6, 1e-3, 0.1, 1.0]))
def test_any_batch_has_the_statistics_of_the_reference(batch, usable, stream, below):
    """Of rows in any order and repeated, also for tokens that were not drawn or do not exist."""
    rng, rows = np.random.default_rng(batch["seed"]), batch["rows"]
    logits, params, tokens = mixed_batch(rng, rows, batch["vocabulary"], batch["dtype"], usable, stream)
    chosen = rng.integers(0, rows, 1 + rows // 2)
    compare_statistics(
        statistics_numba.statistics, logits, params, tokens, chosen, below=below, usable_vocab=usable, stream=stream
    )


@fuzz
@given(batch=batches, usable=usables)
def test_any_row_is_drawn_alone_as_in_its_batch(batch, usable):
    """In any order of the rows too."""
    rng, rows, vocabulary = np.random.default_rng(batch["seed"]), batch["rows"], batch["vocabulary"]
    logits = as_dtype(make_rows(rng, rows, vocabulary), batch["dtype"])
    params, order = random_params(rng, rows, vocabulary), rng.permutation(rows)
    together = sample_numba.draw(logits, params, usable_vocab=usable).tokens
    moved = sample_numba.draw(logits[order], take(params, order), usable_vocab=usable).tokens
    alone = [sample_numba.draw(logits[[r]], take(params, [r]), usable_vocab=usable).tokens[0] for r in range(rows)]
    assert together.tolist() == alone
    assert moved.tolist() == together[order].tolist()


@fuzz
@given(batch=batches, top_n=st.integers(0, 40))
def test_any_sound_row_has_the_logprobs_of_float64(batch, top_n):
    """Ids by value and then by number, as many as are asked for; masked ids have no probability."""
    rng, rows, vocabulary = np.random.default_rng(batch["seed"]), batch["rows"], batch["vocabulary"]
    values = rng.normal(0, rng.choice([0.02, 1, 8, 1e3]), (rows, vocabulary)).astype(np.float32)
    values[rng.random(values.shape) < rng.choice([0, 0.3, 0.99])] = -INFINITY
    values[:, rng.integers(vocabulary)] = 0
    logits, tokens = as_dtype(values, batch["dtype"]), rng.integers(0, vocabulary, rows)
    top_n = min(top_n, vocabulary)
    ids, logprobs, _ = gather(logits, tokens, top_n)
    exact = widen(logits).astype(np.float64)
    order = np.lexsort((np.broadcast_to(np.arange(vocabulary), exact.shape), -exact))[:, :top_n]
    assert ids.tolist() == np.concatenate([tokens[:, None], order], axis=1).tolist()
    shifted = exact - exact.max(axis=1, keepdims=True)
    right = shifted - np.log(np.exp(shifted).sum(axis=1, keepdims=True))
    np.testing.assert_allclose(logprobs, np.take_along_axis(right, ids, axis=1), rtol=1e-6, atol=2e-5)
