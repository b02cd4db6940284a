"""`logprobs_numba.gather` against what vLLM's sampler does: `log_softmax`, `topk`, `gather`, count for ranks."""

import numpy as np
import pytest
import torch

from tests.rows import INFINITY, NAN
from vllm_gumbel.kernels.contract import widen
from vllm_gumbel.kernels.logprobs_numba import gather
from vllm_gumbel.kernels.slots import as_array

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


def make(rng, rows, vocabulary, dtype, spread):
    """Return the same logits as a tensor, and as the array that `gather` takes."""
    tensor = torch.from_numpy(rng.normal(0, spread, (rows, vocabulary)).astype(np.float32)).to(DTYPES[dtype])
    return tensor, as_array(tensor)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("vocabulary", [1, 7, 255, 257, 4097, 49_152, 151_936])
def test_logprobs_ids_and_ranks_equal_vllms(vocabulary, dtype):
    """Within 1e-5 absolute; ids by value, ties by lowest id; ranks exact but for logits that merge when rounded."""
    rng = np.random.default_rng(vocabulary)
    for spread in (0.1, 1, 8):
        tensor, logits = make(rng, 6, vocabulary, dtype, spread)
        tokens, n = rng.integers(0, vocabulary, 6), min(5, vocabulary)
        ids, logprobs, ranks = gather(logits, tokens, n)
        stock = tensor.log_softmax(dim=-1, dtype=torch.float32)
        drawn = stock.gather(1, torch.from_numpy(tokens)[:, None])
        expected = torch.cat((drawn, stock.topk(n, dim=-1).values), dim=1).numpy()
        assert np.abs(logprobs - expected).max() < 1e-5
        values = tensor.float().numpy()
        order = np.lexsort((np.broadcast_to(np.arange(vocabulary), values.shape), -values))[:, :n]
        assert (ids == np.concatenate([tokens[:, None], order], axis=1)).all()
        assert np.abs(ranks - (stock >= drawn).sum(-1).numpy()).max() <= (2 if dtype == "float32" else 0)


def test_top_n_of_every_size():
    """None, one, as many as blocks, more, all; ties everywhere."""
    logits = np.random.default_rng(1).integers(-9, 9, (3, 1500)).astype(np.float32)
    order = np.lexsort((np.broadcast_to(np.arange(1500), logits.shape), -logits))
    for n in (0, 1, 6, 7, 100, 1500):
        ids, logprobs, _ = gather(logits, order[:, 3], n)
        assert (ids[:, 1:] == order[:, :n]).all()
        assert (ids[:, 0] == order[:, 3]).all()
        assert (np.diff(logprobs[:, 1:]) <= 0).all()


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("n", [512, 513, 2000, 5000])
def test_long_lists_are_in_order_too(n, dtype):
    """Values of every size, zeros of either sign, masked ids, and ties among all of them."""
    rng = np.random.default_rng(n)
    values = rng.normal(size=(4, 5000)) * rng.choice([1e-30, 1e-3, 1, 1e4], (4, 5000))
    values[:, ::7], values[:, ::11], values[:, ::13], values[:, ::17] = 0.0, -0.0, -INFINITY, 1.5
    tensor = torch.from_numpy(values).to(DTYPES[dtype])
    logits = as_array(tensor)
    order = np.argsort(-tensor.double().numpy(), axis=1, kind="stable")
    ids, logprobs, _ = gather(logits, order[:, 0], n)
    assert (ids[:, 1:] == order[:, :n]).all()
    assert (logprobs[:, 1:6] == gather(logits, order[:, 0], 5)[1][:, 1:]).all()
    assert np.allclose(logprobs[:, 1:], tensor.float().log_softmax(-1).numpy()[np.arange(4)[:, None], order[:, :n]])


def test_bad_rows_have_numbers():
    """vllm#48585: NaN is -inf, +inf shares the mass, no finite logit is -inf; neighbours keep theirs."""
    logits = np.random.default_rng(2).normal(size=(6, 300)).astype(np.float32)
    good = gather(logits, np.full(6, 7), 3)[1]
    logits[1, 7], logits[2, [20, 40]], logits[3], logits[4] = NAN, INFINITY, NAN, -INFINITY
    ids, logprobs, ranks = gather(logits, np.full(6, 7), 3)
    assert not np.isnan(logprobs).any()
    assert (logprobs[[0, 5]] == good[[0, 5]]).all()
    assert logprobs[1, 0] == -INFINITY
    assert ranks[1] == 300
    assert np.allclose(
        logprobs[1, 1:], np.sort(np.delete(logits[1], 7))[::-1][:3] - np.log(np.nansum(np.exp(logits[1]))), atol=1e-5
    )
    assert ids[2].tolist() == [7, 20, 40, int(np.argmax(np.where(np.isinf(logits[2]), -INFINITY, logits[2])))]
    assert np.allclose(logprobs[2], [-INFINITY, -np.log(2), -np.log(2), -INFINITY])
    assert (logprobs[3:5] == -INFINITY).all()
    assert ids[4].tolist() == [7, 0, 1, 2]


@pytest.mark.parametrize("size", [1e9, 3e9, 3e38])
def test_logits_so_large_that_nothing_near_them_is_another_number(size):
    """The largest less a hundred is the largest itself; its mass is all there is all the same."""
    ids, logprobs, ranks = gather(np.array([[0, size, -size, 1]], np.float32), np.array([1]), 2)
    assert ids.tolist() == [[1, 1, 3]]
    assert np.allclose(logprobs[0, :2], 0, atol=1e-5)
    assert -INFINITY < logprobs[0, 2] <= -size / 2
    assert ranks.tolist() == [1]


def test_token_outside_the_row_has_no_probability():
    """-1 stands for a row without a candidate, and no memory is read for it."""
    _, logprobs, ranks = gather(np.zeros((2, 10), np.float32), np.array([-1, 10]), 1)
    assert (logprobs[:, 0] == -INFINITY).all()
    assert ranks.tolist() == [10, 10]


def test_strides_and_threads_change_nothing():
    """A view with longer rows, a transposed copy, a batch large enough for the pool; the logits are not written to."""
    rng = np.random.default_rng(3)
    base = rng.normal(size=(40, 8100)).astype(np.float32)
    base.flags.writeable = False
    view, tokens = base[:, :8000], rng.integers(0, 8000, 40)
    expected = [gather(view[[r]], tokens[[r]], 4) for r in range(40)]
    for layout in (view, np.asfortranarray(view)):
        for ours, alone in zip(gather(layout, tokens, 4), zip(*expected, strict=True), strict=True):
            assert (ours == np.concatenate(alone)).all()


@pytest.mark.parametrize(
    ("logits", "tokens", "n", "error"),
    [
        (np.zeros((2, 5)), np.zeros(2, np.int64), 1, TypeError),
        (np.zeros(5, np.float32), np.zeros(2, np.int64), 1, ValueError),
        (np.zeros((2, 5), np.float32), np.zeros(2, np.int32), 1, TypeError),
        (np.zeros((2, 5), np.float32), np.zeros(3, np.int64), 1, ValueError),
        (np.zeros((2, 5), np.float32), np.zeros(2, np.int64), 6, ValueError),
        (np.zeros((2, 5), np.float32), np.zeros(2, np.int64), -1, ValueError),
    ],
)
def test_arguments_off_the_contract_are_refused(logits, tokens, n, error):
    """By dtype, shape and range."""
    with pytest.raises(error, match="must"):
        gather(logits, tokens, n)


def test_empty_batch():
    """No rows, no error."""
    ids, logprobs, ranks = gather(np.zeros((0, 9), np.float32), np.zeros(0, np.int64), 3)
    assert (ids.shape, logprobs.shape, ranks.shape) == ((0, 4), (0, 4), (0,))
    assert widen(np.zeros((0, 9), np.float32)).shape == (0, 9)
