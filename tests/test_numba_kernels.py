"""Parts of the Numba kernels on their own: noise, bounds, thresholds, masses, scratch memory, threads, cache."""

import gc
import math
import threading
import tracemalloc

import numpy as np
import pytest
import torch
from numba.core.runtime import _nrt_python, rtsys

from tests.rows import INFINITY, random_params
from vllm_gumbel.kernels import blocks_numba, jit_numba, launch_numba, masses_numba, sample_numba, select_numba
from vllm_gumbel.kernels import floats_numba as floats
from vllm_gumbel.kernels import noise_numba as noise
from vllm_gumbel.kernels import noise_reference as reference
from vllm_gumbel.kernels.contract import RowParams
from vllm_gumbel.kernels.jit_numba import jit

LARGEST = 2**64 - 1
EXTREME_WORDS = [0, 1, 2**48 - 1, 2**48, 2**53 - 1, 2**53, 2**63 - 1, 2**63, 2**63 + 1, LARGEST - 2**53, LARGEST]


@jit(inline=True)
def words_of(seed, position, stream, salt, tokens, words):
    """Write the words of tokens of one row."""
    keys = noise.row_keys(seed, position, stream, salt)
    for i in range(len(tokens)):
        words[i] = noise.word_of_token(tokens[i], keys)


@jit(inline=True)
def pairs_of(seed, start, stop, pairs):
    """Write the words of pairs, and return the smallest h16."""
    keys = noise.row_keys(seed, np.int64(0), np.int64(0), np.uint64(0))
    blocks_numba.write_words(start, stop, keys, pairs)
    return blocks_numba.block_word(start, stop, keys)


@jit(inline=True)
def exponentials(words, values):
    """Write E of every word."""
    for i in range(len(words)):
        values[i] = noise.exponential(words[i])


@jit(inline=True)
def passes(logits, words, temperature, best, marks):
    """Write which tokens the bound lets through."""
    slope, offset = blocks_numba.bound_slope(temperature), blocks_numba.bound_offset(best)
    blocks_numba.mark_possible(logits, words, np.float32(-np.inf), slope, offset, marks)


@jit(inline=True)
def masses_of(logits, temperature, largest, masses):
    """Write the float32 mass of every logit."""
    per_ln2 = 1.0 / (math.log(2.0) * np.float64(temperature))
    slope, shift = np.float32(per_ln2), np.float32(-np.float64(largest) / math.log(2.0))
    for i in range(len(logits)):
        masses[i] = masses_numba.mass(logits[i], slope, shift)


# --- noise -------------------------------------------------------------------------------------------------------


@jit(inline=True)
def rough_masses_of(logits, temperature, largest, masses):
    """Write the rough mass of every logit."""
    per_ln2 = 1.0 / (math.log(2.0) * np.float64(temperature))
    slope, shift = masses_numba.rough_slopes(np.float32(per_ln2), np.float32(-largest / math.log(2.0)))
    for i in range(len(logits)):
        masses[i] = masses_numba.rough_mass(logits[i], slope, shift)


def as_kernel_input(values, dtype):
    """Return float32 values as the kernels take them in a dtype."""
    if dtype == "float32":
        return values
    tensor = torch.from_numpy(values).to(getattr(torch, dtype))
    return tensor.view(torch.uint16 if dtype == "bfloat16" else torch.int16).numpy()


def widened(values):
    return np.array([floats.widen(value) for value in values], np.float32)


def test_words_equal_the_reference_bit_for_bit():
    """200 rows of random keys, ids at both ends of what an id can be."""
    rng = np.random.default_rng(1)
    tokens = np.concatenate([np.arange(300), rng.integers(0, 2**31, 300), [2**31 - 1, 2**31 - 2]])
    words = np.empty(len(tokens), np.uint64)
    for _ in range(200):
        seed, salt = rng.integers(0, 2**64, 2, dtype=np.uint64)
        position, stream = int(rng.integers(0, 2**62)), int(rng.integers(4))
        words_of(seed, position, stream, salt, tokens, words)
        assert (words == reference.noise_words(int(seed), position, tokens, stream, int(salt))).all()


@pytest.mark.parametrize(("start", "stop"), [(0, 256), (0, 1), (255, 256), (257, 300), (1000, 1001), (1001, 1257)])
def test_words_of_a_block_equal_the_reference(start, stop):
    """Pairs cover the ids of a block from and to any id; their smallest h16 is a lower bound."""
    pairs = np.zeros(192, np.uint32)
    for seed in range(50):
        smallest = pairs_of(np.uint64(seed), start, stop, pairs)
        k0, k1, _ = reference.row_keys(seed, 0)
        expected = reference.upper_words(k0, k1, np.arange(start, stop))
        halves = pairs.view(np.uint16)[start & 1 :][: stop - start]
        assert (halves == expected).all()
        wider = reference.upper_words(k0, k1, np.arange(start & ~1, (stop + 1) & ~1))
        assert smallest == wider.min() <= expected.min()


def test_exponential_agrees_with_the_reference():
    """The ends of the range and 200,000 random words: the logarithms of two libraries, within 1e-15."""
    words = np.concatenate(
        [np.array(EXTREME_WORDS, np.uint64), np.random.default_rng(2).integers(0, 2**64, 200_000, np.uint64)]
    )
    values = np.empty(len(words))
    exponentials(words, values)
    assert np.allclose(values, reference.exponential(words), rtol=1e-15, atol=0)


# --- bounds ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("temperature", [1e-5, 1e-3, 0.37, 0.8, 1.0, 3.3, 1e4, 3e38])
@pytest.mark.parametrize("best", [-1e30, -2e6, -300.0, -1.5, 0.0, 7.25, 44.0, 1e4, 3e6, 1e30])
def test_bound_of_the_exponential_is_never_below_it(temperature, best):
    """The claim of `blocks_numba`: every token with h16 < 65536 exp(x - s) passes; and few others do.

    Tempered values dense around the score, 65,000 of them, and far from it; h16 the largest word that must pass.
    """
    t = np.float32(temperature)
    distance = np.concatenate([np.linspace(-13, 4, 65_000), [-1e5, -90, -88, -87.3, 20, 88, 1e5]])
    with np.errstate(over="ignore"):
        logits = ((best + distance) * np.float64(t)).astype(np.float32)
        x = (logits / t).astype(np.float64)
        bound = 65536 * np.exp(np.minimum(x - best, 20))
    logits = logits[np.isfinite(logits) & np.isfinite(x)]
    bound = bound[np.isfinite(x)][: len(logits)]
    must = np.clip(np.ceil(bound) - 1, 0, 65535).astype(np.uint16)
    marks = np.zeros((len(logits) + 7) & ~7, np.uint8)
    passes(logits, must, t, best, marks)
    assert marks[: len(logits)].all()
    if abs(best) < 1000:
        loose = np.ceil(bound * 1.09 + 1)
        passes(logits, np.clip(loose, 0, 65535).astype(np.uint16), t, best, marks)
        assert not marks[: len(logits)][loose < 65535].any()


def test_bound_lets_everything_through_before_the_first_score_and_zero_always():
    """s = -inf; and h16 = 0 however low the logit, down to -inf."""
    logits = np.array([-INFINITY, -3e38, 0, 3e38], np.float32)
    marks = np.zeros(8, np.uint8)
    passes(logits, np.full(4, 65535, np.uint16), np.float32(1), -INFINITY, marks)
    assert marks[1:4].all()
    passes(logits, np.zeros(4, np.uint16), np.float32(1e-5), 1e30, marks)
    assert marks[:4].all()


def test_smallest_logit_of_a_bound_is_exact():
    """Its quotient reaches the bound, that of the float below does not; also where many quotients are equal."""
    rng = np.random.default_rng(3)
    for _ in range(3000):
        t = np.float32(10 ** rng.uniform(-5, 38))
        bound = np.float32(rng.normal() * 10 ** rng.uniform(-40, 38))
        logit = floats.least_logit(bound, t)
        with np.errstate(over="ignore", under="ignore"):
            below = np.nextafter(np.float32(logit), np.float32(-INFINITY))
            assert np.float32(logit) / t >= bound
            assert below / t < bound or logit == 0


def test_order_keys_order_floats():
    """All pairs of a hard set: infinities, both zeros, subnormals, neighbours."""
    values = np.array(
        [-INFINITY, -3.4e38, -1, -1e-45, -0.0, 0.0, 1e-45, 1, np.nextafter(1, 2), 3.4e38, INFINITY], np.float32
    )
    keys = [int(floats.key_of_float(value)) for value in values]
    assert keys == sorted(keys)
    assert [floats.float_of_key(key) for key in keys] == values.tolist()
    assert [floats.next_above(value) > value for value in values[1:-1]] == [True] * 9


@pytest.mark.parametrize("temperature", [0.01, 0.8, 1.0, 7.0])
def test_float32_masses_are_within_their_error(temperature):
    """The claim of `masses_numba`: relative error below 2^-15 + 2^-20 (|max| + 64), without the part for adding up."""
    t = np.float32(temperature)
    for largest in (-300.0, 0.0, 25.0, 1000.0):
        logits = ((largest - np.linspace(0, 64, 100_000)) * float(t)).astype(np.float32)
        x = logits / t
        masses = np.empty(len(logits), np.float32)
        masses_of(logits, t, x[0], masses)
        exact = np.exp(x.astype(np.float64) - float(x[0]))
        assert (np.abs(masses / exact - 1) < 2**-15 + 2**-20 * (abs(largest) + 64) - 2**-16).all()


# --- calls -------------------------------------------------------------------------------------------------------


def test_rough_masses_are_within_a_thirty_second():
    """Also past the end of what counts, where a mass may be anything up to 2^-125."""
    for temperature, largest in ((0.01, 25.0), (0.8, -300.0), (1.0, 0.0), (7.0, 1000.0)):
        t = np.float32(temperature)
        logits = ((largest - np.concatenate([np.linspace(0, 64, 100_000), [90.0, 1e4, np.inf]])) * float(t)).astype(
            "f4"
        )
        rough, exact = np.empty(len(logits), np.float32), np.exp((logits / t).astype(np.float64) - largest)
        rough_masses_of(logits, t, largest, rough)
        fine = 2**-15 + 2**-20 * (abs(largest) + 64)
        assert (np.abs(rough[:100_000] / exact[:100_000] - 1) < 2**-5 + fine).all()
        assert (rough[100_000:] < 2**-125).all()


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
def test_best_of_a_block_and_nan_at_every_place(dtype):
    """Lengths around vectors' and odd ones; a NaN of either sign, infinities, and blocks of -inf only."""
    for n in (1, 2, 3, 15, 16, 17, 33, 128, 255, 256):
        block = np.random.default_rng(n).normal(0, 3, n).astype(np.float32)
        for places in ({}, {n // 2: INFINITY}, dict.fromkeys(range(n), -INFINITY)):
            for place, value in places.items():
                block[place] = value
            values = as_kernel_input(block, dtype)
            assert blocks_numba.block_best(values) == (widened(values).max(), False)
            for place in {0, 1 % n, n // 2, n - 1}:
                for nan in (np.float32("nan"), -np.float32("nan")):
                    spoiled = block.copy()
                    spoiled[place] = nan
                    assert blocks_numba.block_best(as_kernel_input(spoiled, dtype))[1], (n, place)


def test_bound_of_the_nth_is_reached_by_n_and_seldom_many_more():
    """Ties, infinities and values of both signs; n from 1 to all."""
    generator = np.random.default_rng(0)
    for values in (
        generator.normal(0, 3, 501),
        np.round(generator.normal(0, 2, 300)),
        np.zeros(64),
        np.where(generator.random(300) < 0.5, -INFINITY, generator.normal(0, 1, 300)),
        np.array([INFINITY, 1e-45, 0.0, -0.0, -1e-45, -INFINITY]),
    ):
        values = values.astype(np.float32)
        for n in range(1, len(values) + 1):
            bound = select_numba.bound_of_nth(values, n)
            best = np.sort(values)[::-1]
            assert n <= (values >= bound).sum()
            assert (values > bound).sum() <= n + n // 4 or bound >= best[n - 1], (n, bound)


def test_steady_state_allocates_nothing_but_the_results():
    """100 calls on mixed batches: compiled code allocates no array, Python no more than the results."""
    rng = np.random.default_rng(4)
    logits = rng.normal(0, 2, (32, 20_000)).astype(np.float32)
    params = random_params(rng, 32, 20_000)
    params.top_p[params.top_p < 1] = 0.9
    for _ in range(3):
        sample_numba.draw(logits, params)
    gc.collect()
    _nrt_python.memsys_enable_stats()
    before = rtsys.get_allocation_stats()
    tracemalloc.start()
    for _ in range(100):
        sample_numba.draw(logits, params)
    current, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    after = rtsys.get_allocation_stats()
    _nrt_python.memsys_disable_stats()
    handles = 100 * 13  # a header for each array argument, made and freed by Numba's own call; no array of ours
    assert after.alloc - before.alloc == handles
    assert after.free - before.free == handles
    assert peak < 20_000
    assert current < 10_000


def test_reference_draws_few_rows():
    """No row of an ordinary batch is left to the reference, with any filter."""
    rng = np.random.default_rng(5)
    before = sample_numba.reference_rows()
    logits = rng.normal(0, 2, (400, 5000)).astype(np.float32)
    for filters in ({}, {"top_k": 50}, {"top_p": 0.95}, {"min_p": 0.05}, {"top_k": 1000, "top_p": 0.5, "min_p": 0.001}):
        params = RowParams.uniform(400, temperature=0.8, **filters)
        params.seed[:] = rng.integers(0, 2**63, 400)
        sample_numba.draw(logits, params, processed=np.empty_like(logits))
    assert sample_numba.reference_rows() == before


def test_callers_in_several_threads_get_their_own_scratch_memory():
    """Three callers at once, each a batch large enough for the pool: the tokens of a lone caller."""
    rng = np.random.default_rng(6)
    logits = rng.normal(0, 2, (16, 30_000)).astype(np.float32)
    params = random_params(rng, 16, 30_000)
    expected = sample_numba.draw(logits, params).tokens
    got = []
    callers = [
        threading.Thread(target=lambda: got.extend(sample_numba.draw(logits, params).tokens for _ in range(5)))
        for _ in range(3)
    ]
    for caller in callers:
        caller.start()
    for caller in callers:
        caller.join()
    assert len(got) == 15
    assert all((tokens == expected).all() for tokens in got)


def test_thread_count_is_bounded_and_checked():
    """At least one, at most Numba's pool; None is the number of CPUs."""
    try:
        assert sample_numba.set_threads(1) == 1
        assert sample_numba.set_threads(10_000) == launch_numba.config.NUMBA_NUM_THREADS
        with pytest.raises(ValueError, match="at least 1, got 0"):
            sample_numba.set_threads(0)
    finally:
        assert 1 <= sample_numba.set_threads() <= launch_numba.config.NUMBA_NUM_THREADS


def test_warm_up_says_what_it_does_and_how_long_it_took():
    """Two lines; the second call finds everything ready."""
    lines = []
    sample_numba.warm_up(1000, np.float32)
    assert sample_numba.warm_up(1000, np.float32, lines.append) < 5
    assert len(lines) == 2
    assert "float32" in lines[0]
    assert "ready after" in lines[1]


def test_cache_folder_is_the_users_and_carries_version_and_digest(monkeypatch, tmp_path):
    """`$XDG_CACHE_HOME/vllm-gumbel/numba-<version>-<digest>`; Numba's own setting stays as it was."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    folder = jit_numba.cache_folder()
    assert folder.parent == tmp_path / "vllm-gumbel"
    assert folder.name.startswith(f"numba-{jit_numba.numba.__version__}-")
    assert not str(launch_numba.config.CACHE_DIR).startswith(str(folder.parent))
