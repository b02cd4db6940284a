"""A draw is a pure function of its row: logits, parameters, seed, position. And what `processed` receives.

Equality, nothing statistical: the same row is drawn in other batches, at other places, through other strides.
"""

import numpy as np
import pytest

from tests import naive
from tests.rows import INFINITY, NAN, bfloat16, random_params, take
from vllm_gumbel.kernels.contract import RowParams, Stream
from vllm_gumbel.kernels.sample_reference import draw

ROWS, VOCABULARY, USABLE = 48, 997, 990


@pytest.fixture(scope="module")
def batch():
    """48 rows with many ties, masks, a NaN, an infinity and an empty row; every row with parameters of its own."""
    rng = np.random.default_rng(1)
    logits = bfloat16(rng.normal(0, 3, (ROWS, VOCABULARY)))
    logits[rng.random(logits.shape) < 0.1] = -INFINITY
    logits[5, 17], logits[6, 18], logits[7] = NAN, INFINITY, NAN
    return logits, random_params(rng, ROWS, VOCABULARY)


@pytest.fixture(scope="module")
def alone(batch):
    """Token, flags and processed row of every row, each drawn in a batch of its own."""
    logits, params = batch
    return [outcome(logits[[row]], take(params, [row]))[0] for row in range(ROWS)]


def outcome(logits, params):
    """Return (token, flags, bytes of the processed row) of every row."""
    processed = np.full(logits.shape, 7, np.float32)
    drawn = draw(logits, params, usable_vocab=USABLE, processed=processed)
    return [(int(t), int(f), p.tobytes()) for t, f, p in zip(drawn.tokens, drawn.flags, processed, strict=True)]


@pytest.mark.parametrize("size", [1, 2, 7, 31, ROWS])
def test_row_does_not_depend_on_the_batch_size_or_its_index(batch, alone, size):
    """Windows of `size` rows, so that every row stands at every index of the batch at some time."""
    logits, params = batch
    for start in range(0, ROWS, max(1, size // 2)):
        rows = np.arange(start, start + size) % ROWS
        assert outcome(logits[rows], take(params, rows)) == [alone[row] for row in rows]


def test_row_does_not_depend_on_the_order_of_rows(batch, alone):
    """vllm#17524: three random orders."""
    logits, params = batch
    for seed in range(3):
        rows = np.random.default_rng(seed).permutation(ROWS)
        assert outcome(logits[rows], take(params, rows)) == [alone[row] for row in rows]


def test_row_does_not_depend_on_its_neighbours(batch, alone):
    """Every second row becomes NaN, +inf or all masked, with other parameters: the rows between stay as they were."""
    logits, params = batch
    rng = np.random.default_rng(3)
    spoiled, other = logits.copy(), random_params(rng, ROWS, VOCABULARY)
    spoiled[1::2] = rng.choice(np.array([NAN, INFINITY, -INFINITY], np.float32), (ROWS // 2, 1))
    for name, values in vars(params).items():
        getattr(other, name)[::2] = values[::2]
    assert outcome(spoiled, other)[::2] == alone[::2]


def strided(kind, logits):
    """Return an array equal to `logits` that is laid out as `kind` says."""
    rows, vocabulary = logits.shape
    if kind == "column order":
        return np.asfortranarray(logits)
    if kind == "backwards":
        return logits[::-1, ::-1].copy()[::-1, ::-1]
    if kind == "every third column":
        wide = np.full((rows, 3 * vocabulary), NAN, np.float32)
        wide[:, ::3] = logits
        return wide[:, ::3]
    if kind == "unaligned":
        raw = np.zeros(logits.nbytes + 1, np.uint8)[1:]
        raw[:] = np.frombuffer(logits.tobytes(), np.uint8)
        return raw.view(np.float32).reshape(logits.shape)
    wide = np.full((2 * rows, vocabulary + 10), NAN, np.float32)
    wide[::2, :vocabulary] = logits
    return wide[::2, :vocabulary]


@pytest.mark.parametrize("kind", ["column order", "backwards", "every third column", "unaligned", "padded rows"])
def test_row_does_not_depend_on_strides(batch, alone, kind):
    """vllm#42684, other layouts; what lies between the elements is NaN."""
    logits, params = batch
    view = strided(kind, logits)
    assert np.array_equal(view, logits, equal_nan=True)
    assert outcome(view, params) == alone


def test_view_with_longer_rows_equals_its_contiguous_copy():
    """vllm#42684: [rows, 100278] with a stride of 100288, top_p = .95; 6 rows here instead of 192."""
    base = np.random.default_rng(42684).normal(0, 3, (6, 100_288)).astype(np.float32)
    base[:, 100_278:] = 1e4
    params = RowParams.uniform(6, top_p=0.95, seed=1)
    params.position[:] = np.arange(6)
    view = base[:, :100_278]
    assert view.strides == (4 * 100_288, 4)
    ours, copied = np.empty(view.shape, np.float32), np.empty(view.shape, np.float32)
    tokens = draw(view, params, processed=ours).tokens
    assert (tokens == draw(view.copy(), params, processed=copied).tokens).all()
    assert (ours == copied).all()


def test_row_past_two_billion_elements_is_read_where_it_lies(tmp_path):
    """vllm#46560, #47383, #48055: V = 151,936; the second row lies 14,134 rows after the first and crosses 2^31."""
    vocabulary, distance = 151_936, 14_134
    assert vocabulary * distance < 2**31 < vocabulary * (distance + 1)
    sparse = np.memmap(tmp_path / "logits", np.float32, "w+", shape=(distance + 1, vocabulary))
    rows = np.random.default_rng(46560).normal(0, 3, (2, vocabulary)).astype(np.float32)
    view = np.asarray(sparse)[::distance]
    view[:] = rows
    params = RowParams.uniform(2, top_k=50, seed=2)
    assert (draw(view, params).tokens == draw(rows, params).tokens).all()
    (tmp_path / "logits").unlink()


def test_logits_are_not_written_to(batch):
    """Neither with nor without `processed`."""
    logits, params = batch
    copy = logits.copy()
    copy.flags.writeable = False
    outcome(copy, params)
    draw(copy, params)
    assert np.array_equal(copy, logits, equal_nan=True)


# --- processed ---------------------------------------------------------------------------------------------------


def test_processed_holds_tempered_values_of_the_kept_ids(batch, alone):
    """x = logit / temperature, rounded once, where the filters keep an id; -inf elsewhere, never a NaN."""
    logits, params = batch
    for row, (token, _, received) in enumerate(alone):
        processed = np.frombuffer(received, np.float32)
        parameters = naive.Parameters(**{name: values[row].item() for name, values in vars(params).items()})
        x = naive.tempered(logits[row].tolist(), parameters.temperature)
        kept = naive.kept(x[:USABLE] + [-INFINITY] * (VOCABULARY - USABLE), parameters)
        expected = np.full(VOCABULARY, -INFINITY, np.float32)
        expected[kept] = np.array(x, np.float32)[kept]
        assert (processed == expected).all(), row
        assert token in kept or not kept


def test_processed_may_be_the_logits_themselves(batch, alone):
    """Written in place, the same tokens and the same values."""
    logits, params = batch
    both = logits.copy()
    drawn = draw(both, params, usable_vocab=USABLE, processed=both)
    got = zip(drawn.tokens, drawn.flags, both, strict=True)
    assert [(int(t), int(f), p.tobytes()) for t, f, p in got] == alone


def test_tokens_do_not_depend_on_processed_being_wanted(batch, alone):
    """None is the default."""
    logits, params = batch
    drawn = draw(logits, params, usable_vocab=USABLE)
    assert [(int(t), int(f)) for t, f in zip(drawn.tokens, drawn.flags, strict=True)] == [row[:2] for row in alone]


def test_stream_changes_the_noise_and_nothing_else(batch):
    """Most noisy rows draw another token in another stream; greedy rows draw the same."""
    logits, _ = batch
    wide = RowParams.uniform(ROWS, seed=3)
    wide.position[:] = np.arange(ROWS)
    tokens = [draw(logits, wide, stream=stream).tokens for stream in Stream]
    assert all((a != b).sum() > ROWS // 2 for i, a in enumerate(tokens) for b in tokens[:i])
    greedy = RowParams.uniform(ROWS, temperature=0.0)
    assert len({draw(logits, greedy, stream=stream).tokens.tobytes() for stream in Stream}) == 1
