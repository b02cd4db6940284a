"""Every backend draws what the reference draws: tokens, flags, and logits after the filters, bit for bit."""

import numpy as np
import pytest

from vllm_gumbel.kernels import dispatch, sample_reference
from vllm_gumbel.kernels.contract import RowParams, Stream

OTHERS = [name for name in dispatch.BACKENDS if name != "reference"]
TEMPERATURES = [0.0, 1e-5, 1e-4, 0.3, 0.8, 1.0, 1.7, 100.0]


def random_params(generator, rows, vocab):
    """Return parameters of a mixed batch, at and past the ends of their ranges."""
    pick = generator.choice
    return RowParams(
        temperature=pick(TEMPERATURES, rows).astype(np.float32),
        top_k=pick([-1, 0, 1, 2, 50, vocab // 2 + 1, vocab - 1, vocab, 2**31 - 1], rows).astype(np.int32),
        top_p=pick([1e-6, 0.3, 0.9, 0.95, 0.999, 1.0, 1.0], rows).astype(np.float32),
        min_p=pick([0.0, 0.0, 1e-6, 0.05, 0.5, 1.0], rows).astype(np.float32),
        seed=generator.integers(0, 2**64, rows, dtype=np.uint64),
        position=generator.integers(0, 2**20, rows),
        salt=pick([0, 1, 2**64 - 1], rows).astype(np.uint64),
    )


def random_logits(generator, rows, vocab, dtype):
    """Return rows that are flat, peaked, tied, or hold NaN and infinities, in a dtype of the contract."""
    x = generator.normal(0, 1, (rows, vocab)).astype(np.float32)
    x *= generator.choice([0.0, 0.01, 1.0, 4.0, 30.0], (rows, 1)).astype(np.float32)
    for r in range(rows):
        kind = r % 8
        some = generator.integers(0, vocab, max(1, vocab // 50))
        if kind == 1:
            x[r] = np.round(x[r])
        elif kind == 2:
            x[r, some] = np.nan
        elif kind == 3:
            x[r, some] = -np.inf
        elif kind == 4 and r % 3 == 0:
            x[r, some[:2]] = np.inf
        elif kind == 5:
            keep = x[r, some[0]]
            x[r] = -np.inf
            x[r, some[0]] = keep
        elif kind == 6 and r % 5 == 0:
            x[r] = generator.choice([np.nan, -np.inf])
        elif kind == 7:
            x[r] *= np.float32(1e-41)
    if dtype == "float32":
        return x
    if dtype == "float16":
        with np.errstate(over="ignore"):
            return x.astype(np.float16)
    return (x.view(np.uint32) >> 16).astype(np.uint16)


def assert_equal_to_reference(name, logits, params, **options):
    """Compare all that a draw returns, and that it leaves its arguments alone."""
    before = logits.copy()
    ours, theirs = (np.full(logits.shape, 7, np.float32) for _ in range(2))
    found = dispatch.choose(name).draw(logits, params, processed=ours, **options)
    expected = sample_reference.draw(logits, params, processed=theirs, **options)
    np.testing.assert_array_equal(found.tokens, expected.tokens)
    np.testing.assert_array_equal(found.flags, expected.flags)
    np.testing.assert_array_equal(ours.view(np.uint32), theirs.view(np.uint32))
    assert logits.tobytes() == before.tobytes()
    plain = dispatch.choose(name).draw(logits, params, **options)
    np.testing.assert_array_equal(plain.tokens, expected.tokens)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
@pytest.mark.parametrize("vocab", [1, 2, 7, 255, 256, 257, 999, 1023, 1024, 1025, 4097, 32000])
@pytest.mark.parametrize("name", OTHERS)
def test_backend_equals_the_reference(name, vocab, dtype):
    """Sizes that do not fill a block, one more and one less; every kind of row beside every other."""
    generator = np.random.default_rng(vocab)
    rows = 400 if vocab < 2000 else 48
    logits, params = random_logits(generator, rows, vocab, dtype), random_params(generator, rows, vocab)
    assert_equal_to_reference(name, logits, params)
    usable = int(generator.integers(1, vocab + 1))
    assert_equal_to_reference(name, logits, params, usable_vocab=usable, stream=Stream.DRAFT)


@pytest.mark.parametrize("vocab", [49152, 151936])
@pytest.mark.parametrize("name", OTHERS)
def test_backend_equals_the_reference_at_the_sizes_of_models(name, vocab):
    generator = np.random.default_rng(vocab)
    logits = random_logits(generator, 24, vocab, "bfloat16")
    assert_equal_to_reference(name, logits, random_params(generator, 24, vocab))


@pytest.mark.parametrize("name", OTHERS)
def test_backend_reads_rows_of_any_stride(name):
    """vllm#42684: a view of wider rows, every other row, reversed rows, and columns that do not lie side by side."""
    generator = np.random.default_rng(5)
    wide = random_logits(generator, 32, 1100, "float32")
    params = random_params(generator, 16, 1000)
    for view in (wide[:16, :1000], wide[::2, 37:1037], wide[31:15:-1, :1000], np.asfortranarray(wide[:16, :1000])):
        assert_equal_to_reference(name, view, params)


@pytest.mark.parametrize("name", OTHERS)
def test_noise_of_many_draws_decides_alike(name):
    """20,000 draws from equal logits, where only noise decides: some of them close."""
    params = RowParams.uniform(20_000, temperature=1.0)
    params.position[:] = np.arange(20_000)
    logits = np.broadcast_to(np.zeros(64, np.float32), (20_000, 64)).copy()
    expected = sample_reference.draw(logits, params).tokens
    np.testing.assert_array_equal(dispatch.choose(name).draw(logits, params).tokens, expected)
