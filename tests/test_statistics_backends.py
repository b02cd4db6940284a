"""Row statistics of every backend against the reference: kept sets exactly, numbers within stated tolerances."""

import math
import os
import subprocess
import sys

import numpy as np
import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from tests.rows import INFINITY, NAN, random_params
from tests.test_numba_equality import DTYPES, as_dtype, make_rows
from tests.test_statistics import NAMES, mixed_batch
from vllm_gumbel.kernels import dispatch, launch_numba, sample_numba, sample_reference
from vllm_gumbel.kernels import statistics_numba as ours
from vllm_gumbel.kernels import statistics_reference as reference
from vllm_gumbel.kernels import statistics_torch as device
from vllm_gumbel.kernels.contract import RowParams, Stream
from vllm_gumbel.kernels.jit_numba import jit
from vllm_gumbel.kernels.row_nucleus_numba import fine_mass


def assert_close(*, found, right, right_below, right_above):
    """Assert that a backend's statistics are the reference's within the tolerances it states.

    `right_below` and `right_above` are the reference's for thresholds 1e-4 lower and higher.
    """
    np.testing.assert_array_equal(found.kept, right.kept)
    for name in ("log_total", "surprisal", "entropy", "score", "log_probability"):
        np.testing.assert_allclose(getattr(found, name), getattr(right, name), rtol=0, atol=3e-5, err_msg=name)
    np.testing.assert_allclose(found.variance, right.variance, rtol=1e-4, atol=1e-4)
    low, high = right_below.improbable_mass, right_above.improbable_mass
    np.testing.assert_array_equal(np.isnan(found.improbable_mass), np.isnan(low))
    law = found.kept > 0
    assert (found.improbable_mass >= low * (1 - 1e-3) - 1e-9)[law].all()
    assert (found.improbable_mass <= high * (1 + 1e-3) + 1e-9)[law].all()


def compare(backend, logits, params, tokens, rows, *, below=1e-6, **options):
    """Assert that a function's statistics are the reference's, and return them."""
    with np.errstate(all="ignore"):
        right, right_below, right_above = (
            reference.statistics(logits, params, tokens, rows, improbable_below=min(1.0, below * factor), **options)
            for factor in (1, 1 - 1e-4, 1 + 1e-4)
        )
    found = backend(logits, params, tokens, rows, improbable_below=below, **options)
    assert_close(found=found, right=right, right_below=right_below, right_above=right_above)
    return found


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("vocabulary", [1, 7, 256, 257, 1025, 4097])
def test_numba_equals_the_reference_on_mixed_batches(vocabulary, dtype):
    """Parameters at and past their ends, bad rows, padding, streams; some of the rows, in any order and twice."""
    rng = np.random.default_rng([vocabulary, DTYPES.index(dtype)])
    for batch in range(12 if vocabulary < 4000 else 5):
        usable = int(rng.integers(1, vocabulary + 2)) if batch % 2 else None
        stream, below = Stream(int(rng.integers(4))), (1e-6, 1e-3, 1 / vocabulary, 0.0, 1.0)[batch % 5]
        logits, params, tokens = mixed_batch(rng, 30, vocabulary, dtype, usable, stream)
        rows = rng.integers(0, 30, 25)
        compare(ours.statistics, logits, params, tokens, rows, below=below, usable_vocab=usable, stream=stream)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_numba_finds_the_nucleus_of_large_rows_by_itself(dtype, monkeypatch):
    """49,152 ids, flat and peaked: nuclei of 1 to nearly all of them, exact to the id, without the reference's help."""
    rng = np.random.default_rng(4)
    shares = np.array([1e-6, 0.3, 0.6, 0.9, 0.95, 0.99, 0.999, 1 - 2**-24], np.float32)
    flat, peaked = rng.normal(0, 1, (8, 49_152)), rng.normal(0, 2.5, (8, 49_152))
    peaked[np.arange(8)[:, None], rng.integers(49_152, size=(8, 5))] += 12
    logits = as_dtype(np.concatenate([flat, peaked]), dtype)
    params = RowParams.uniform(16, temperature=0.8)
    params.top_p[:], params.min_p[::3] = np.tile(shares, 2), 1e-4
    tokens = sample_numba.draw(logits, params).tokens
    right = [
        reference.statistics(logits, params, tokens, np.arange(16), improbable_below=b) for b in (1e-6, 9e-7, 2e-6)
    ]
    monkeypatch.setattr(reference, "statistics", None)
    found = ours.statistics(logits, params, tokens, np.arange(16))
    assert_close(found=found, right=right[0], right_below=right[1], right_above=right[2])
    assert found.kept[0] == 1
    assert found.kept[7] > 49_000 > found.kept[3] > 1000


@jit(inline=True)
def fine_masses_of(differences, masses):
    """Write the float64 mass of every difference."""
    for i in range(len(differences)):
        masses[i] = fine_mass(differences[i])


def test_fine_masses_are_exponentials():
    """100,000 of them within 2^-50, which decides nuclei of thousands of ids; exactly 1 at 0, no less than e^-700."""
    differences = np.concatenate([np.linspace(-700, 0, 50_001), -np.logspace(-20, 2, 50_000)])
    masses = np.empty_like(differences)
    fine_masses_of(differences, masses)
    assert np.abs(masses / np.exp(differences) - 1).max() < 2.0**-50
    fine_masses_of(np.array([0.0, -1e4, -INFINITY]), masses)
    assert masses[0] == 1
    np.testing.assert_allclose(masses[1:3], math.exp(-700), rtol=1e-12)


def test_numba_leaves_to_the_reference_what_rounding_decides():
    """Masses that do not add up exactly, in tied pairs: the share of every prefix as top_p, and its neighbours."""
    logits = np.repeat(np.linspace(0, -6, 400), 2).astype(np.float32)
    mass = np.cumsum(np.exp(logits.astype(np.float64)))
    params = RowParams.uniform(800)
    params.top_p[:] = (mass / mass[-1]).astype(np.float32)
    batch, rows = np.broadcast_to(logits, (800, 800)), np.arange(0, 800, 3)
    for step in (-1, 0, 1):
        nudged = np.nextafter(params.top_p, np.float32(2 * step)) if step else params.top_p
        compare(ours.statistics, batch, RowParams(**(vars(params) | {"top_p": nudged})), np.zeros(800, np.int64), rows)


@pytest.mark.parametrize("top_p", [0.25, 0.5, 0.75, 1e-6, 0.0, 1 - 2**-24])
@pytest.mark.parametrize("vocabulary", [1, 8, 257, 1024])
def test_numba_cuts_equal_logits_exactly(vocabulary, top_p, monkeypatch):
    """vllm-ascend#13847: masses of 1 add up exactly, so the reference is not needed for sums that hit top_p."""
    arguments = np.zeros((1, vocabulary), np.float32), RowParams.uniform(1, top_p=top_p), *np.zeros((2, 1), np.int64)
    right = reference.statistics(*arguments)
    monkeypatch.setattr(reference, "statistics", None)
    assert ours.statistics(*arguments).kept == right.kept == max(1, math.ceil(float(np.float32(top_p)) * vocabulary))


def test_strides_threads_and_batches_change_nothing_in_numba():
    """A view of wider rows, columns apart, 2 threads, one row alone: the same bits; the logits are not written to."""
    rng = np.random.default_rng(6)
    base = as_dtype(make_rows(rng, 40, 9000), "float32")
    base.flags.writeable = False
    view, params, rows = base[:, :8000], random_params(rng, 40, 8000), rng.permutation(40)
    tokens = sample_numba.draw(view, params).tokens
    before = launch_numba.threads()
    try:
        launch_numba.set_threads(1)
        expected = ours.statistics(view, params, tokens, rows)
        launch_numba.set_threads(2)
        with np.errstate(all="ignore"):
            alone = [ours.statistics(view, params, tokens, np.array([r])) for r in rows]
            others = [ours.statistics(layout, params, tokens, rows) for layout in (view, np.asfortranarray(view))]
    finally:
        launch_numba.set_threads(before)
    for name in NAMES:
        right = getattr(expected, name)
        np.testing.assert_array_equal(np.concatenate([getattr(one, name) for one in alone]), right)
        for other in others:
            np.testing.assert_array_equal(getattr(other, name), right)


WITHOUT_JIT = """
import numpy as np
from tests.test_statistics_backends import DTYPES, compare, mixed_batch, ours
rng = np.random.default_rng(9)
for vocabulary in (1, 7, 300, 600):
    for dtype in DTYPES:
        batch = mixed_batch(rng, 12, vocabulary, dtype, 500, 0)
        compare(ours.statistics, *batch, np.arange(12), below=1 / vocabulary, usable_vocab=500)
"""


def test_kernels_run_without_the_compiler():
    """`NUMBA_DISABLE_JIT=1`: the same functions as plain Python."""
    environment = os.environ | {"NUMBA_DISABLE_JIT": "1"}
    subprocess.run([sys.executable, "-W", "ignore", "-c", WITHOUT_JIT], check=True, env=environment, timeout=240)


def torch_statistics(logits, params, tokens, rows, *, usable_vocab=None, stream=Stream.TARGET, improbable_below=1e-6):
    """Return what the device's functions give, with the signature of the others."""
    logits, params, tokens = logits[rows], params.take(rows), tokens[rows]
    processed = np.empty(logits.shape, np.float32)
    with np.errstate(all="ignore"):
        sample_reference.draw(logits, params, usable_vocab=usable_vocab, stream=stream, processed=processed)
    tensor = torch.from_numpy(logits.view(np.int16)).view(torch.bfloat16) if logits.dtype == np.uint16 else None
    found = device.statistics(
        torch.from_numpy(processed),
        torch.from_numpy(logits) if tensor is None else tensor,
        torch.from_numpy(tokens),
        torch.from_numpy(params.temperature < 1e-5),
        usable_vocab=usable_vocab,
        improbable_below=improbable_below,
    )
    arrays = {name: values.numpy() for name, values in found._asdict().items()}
    arrays |= {"greedy": params.temperature < 1e-5, "position": params.position, "token": tokens}
    return device.finish(arrays, params.seed, params.salt, stream=stream)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("vocabulary", [1, 7, 257, 4097])
def test_torch_equals_the_reference(vocabulary, dtype):
    """The same batches as for Numba."""
    rng = np.random.default_rng([vocabulary, DTYPES.index(dtype)])
    for batch in range(12 if vocabulary < 4000 else 4):
        usable = int(rng.integers(1, vocabulary + 2)) if batch % 2 else None
        stream, below = Stream(int(rng.integers(4))), (1e-6, 1e-3, 1 / vocabulary, 0.0, 1.0)[batch % 5]
        logits, params, tokens = mixed_batch(rng, 30, vocabulary, dtype, usable, stream)
        params.temperature[params.temperature == np.float32(1e-5)] = 1
        compare(
            torch_statistics, logits, params, tokens, np.arange(30), below=below, usable_vocab=usable, stream=stream
        )


def test_torch_never_asks_for_a_value():
    """On tensors without values: reading one, or a shape that depends on one, fails there, as on GPUs it waits."""
    with FakeTensorMode():
        logits, greedy = torch.empty(3, 50, dtype=torch.bfloat16), torch.empty(3, dtype=torch.bool)
        found = device.statistics(logits.float(), logits, torch.empty(3, dtype=torch.int64), greedy, usable_vocab=40)
        assert {values.shape for values in found} == {(3,)}
        with pytest.raises(Exception, match="_local_scalar_dense"):
            float(found.entropy[0])


def test_scores_of_other_noise_are_unknown():
    """A draw by vLLM's own noise has a surprisal all the same."""
    arrays = {name: np.ones(2) for name in device.DeviceStatistics._fields}
    arrays |= {"greedy": np.array([False, True]), "position": np.arange(2), "token": np.arange(2)}
    words = np.arange(2, dtype=np.uint64)
    assert np.isnan(device.finish(arrays, words, words, own_noise=False).score).all()
    assert np.isnan(device.finish(arrays, words, words).score).tolist() == [False, True]


@pytest.mark.parametrize(
    ("change", "error"),
    [
        ({"tokens": np.zeros(2, np.int32)}, TypeError),
        ({"tokens": np.zeros(3, np.int64)}, ValueError),
        ({"rows": np.zeros(1, np.int32)}, TypeError),
        ({"rows": np.zeros((1, 1), np.int64)}, ValueError),
        ({"rows": np.array([2])}, ValueError),
        ({"rows": np.array([-1])}, ValueError),
        ({"improbable_below": 1.1}, ValueError),
        ({"improbable_below": -0.1}, ValueError),
        ({"improbable_below": NAN}, ValueError),
        ({"logits": np.zeros((2, 5))}, TypeError),
    ],
)
@pytest.mark.parametrize("name", dispatch.BACKENDS)
def test_arguments_off_the_contract_are_refused(name, change, error):
    """By dtype, shape and range."""
    zeros = np.zeros(2, np.int64)
    arguments = {"logits": np.zeros((2, 5), np.float32), "params": RowParams.uniform(2), "tokens": zeros, "rows": zeros}
    assert dispatch.choose(name).statistics(**arguments).kept.tolist() == [5, 5]
    assert len(dispatch.choose(name).statistics(**(arguments | {"rows": zeros[:0]})).kept) == 0
    with pytest.raises(error, match="must"):
        dispatch.choose(name).statistics(**(arguments | change))
