"""The noise of the Triton kernels: words bit for bit, exponentials to the last bits."""

import numpy as np
import pytest
import torch
import triton
import triton.language as tl

from vllm_gumbel.kernels import noise_reference, noise_triton
from vllm_gumbel.kernels.contract import Stream

ENDS = [0, 1, 2, 2**11 - 1, 2**12, 2**53, 2**62, 2**63 - 2, 2**63 - 1, 2**63, 2**63 + 1, 2**64 - 2**11, 2**64 - 1]


@triton.jit
def write_words(seeds, positions, salts, stream, first, words, TILE: tl.constexpr):  # noqa: N803
    row = tl.program_id(0)
    k0, k1, k2 = noise_triton.row_keys(
        tl.load(seeds + row), tl.load(positions + row), stream, tl.load(salts + row)
    )  # fmt: skip
    ids = first + tl.arange(0, TILE)
    tl.store(words + row * TILE + tl.arange(0, TILE), noise_triton.noise_word(k0, k1, k2, ids).to(tl.int64))


@triton.jit
def write_exponentials(words, exponentials, TILE: tl.constexpr):  # noqa: N803
    place = tl.program_id(0) * TILE + tl.arange(0, TILE)
    tl.store(exponentials + place, noise_triton.exponential(tl.load(words + place).to(tl.uint64, bitcast=True)))


@pytest.mark.parametrize("stream", Stream)
@pytest.mark.parametrize("first", [0, 1, 262_143, 2**31 - 1 - 1024])
def test_words_equal_the_reference_bit_for_bit(stream, first):
    """16 groups of 20 rows of 1024 ids; seeds and salts over all 64 bits, their ends among them."""
    rng = np.random.default_rng(stream)
    seeds, salts = (np.r_[np.array(ENDS, np.uint64), rng.integers(0, 2**64, 7, dtype=np.uint64)] for _ in range(2))
    salts = rng.permutation(salts)
    positions = rng.integers(0, 2**62, 20) >> rng.integers(0, 62, 20)
    words = torch.empty(20, 1024, dtype=torch.int64)
    signed = [torch.from_numpy(values.view(np.int64)) for values in (seeds, positions, salts)]
    write_words[(20,)](*signed, int(stream), first, words, TILE=1024)
    ids = first + np.arange(1024)
    for row in range(20):
        want = noise_reference.noise_words(int(seeds[row]), int(positions[row]), ids, int(stream), int(salts[row]))
        np.testing.assert_array_equal(words[row].numpy().view(np.uint64), want)


def test_exponential_is_within_a_few_last_bits_of_the_reference():
    """2 million words: uniform, and within every power of 2 of either end; measured 4.5e-16 on 4 million others."""
    rng = np.random.default_rng(3)
    near_0 = (2 ** rng.uniform(0, 63.999, 2**19)).astype(np.uint64)
    words = np.r_[np.array(ENDS, np.uint64), near_0, ~near_0, rng.integers(0, 2**64, 2**20, dtype=np.uint64)]
    words = words[: 2**21]
    got = torch.empty(len(words), dtype=torch.float64)
    write_exponentials[(32,)](torch.from_numpy(words.view(np.int64)), got, TILE=2**16)
    want = noise_reference.exponential(words)
    assert np.isfinite(got.numpy()).all()
    assert (got.numpy() > 0).all()
    assert np.abs(got.numpy() / want - 1).max() < 1e-15
