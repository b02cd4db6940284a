"""The input check that every backend shares, and the choice of a backend."""

import numpy as np
import pytest

from vllm_gumbel.kernels import dispatch, sample_reference
from vllm_gumbel.kernels.contract import NO_TOKEN, Draw, Flag, RowParams, check

FIELDS = ("temperature", "top_k", "top_p", "min_p", "seed", "position", "salt")


def changed(name, values):
    """Return parameters of two rows with one field replaced."""
    return RowParams(**(vars(RowParams.uniform(2)) | {name: values}))


@pytest.mark.parametrize(
    ("logits", "error", "message"),
    [
        (np.zeros(10, np.float32), ValueError, r"\[rows, vocab\]"),
        (np.zeros((2, 5, 1), np.float32), ValueError, r"\[rows, vocab\]"),
        (np.zeros((2, 10), np.float64), TypeError, "float32, got float64"),
        (np.zeros((2, 10), np.int16), TypeError, "float32, got int16"),
        (np.zeros((2, 10), np.int32), TypeError, "float32, got int32"),
        (np.zeros((3, 10), np.float32), ValueError, r"shape \(3,\)"),
        (np.zeros((0, 10), np.float32), ValueError, r"shape \(0,\)"),
    ],
)
def test_logits_off_the_contract_are_refused(logits, error, message):
    """By shape and by dtype, with both named; `draw` refuses what `check` refuses."""
    with pytest.raises(error, match=message):
        check(logits, RowParams.uniform(2), None)
    with pytest.raises(error, match=message):
        sample_reference.draw(logits, RowParams.uniform(2))


@pytest.mark.parametrize("name", FIELDS)
def test_parameter_of_another_dtype_is_refused(name):
    """The message names the field and both dtypes."""
    other = {"temperature": np.float64, "top_p": np.float64, "min_p": np.float16, "top_k": np.int64}.get(name, np.int32)
    with pytest.raises(TypeError, match=rf"{name} must be \w+, got {np.dtype(other)}"):
        check(np.zeros((2, 10), np.float32), changed(name, np.ones(2, other)), None)


@pytest.mark.parametrize("name", FIELDS)
@pytest.mark.parametrize("shape", [(1,), (3,), (), (2, 1)])
def test_parameter_of_another_shape_is_refused(name, shape):
    """The message names the field and both shapes."""
    values = np.ones(shape, getattr(RowParams.uniform(2), name).dtype)
    with pytest.raises(ValueError, match=rf"{name} must have shape \(2,\), got"):
        check(np.zeros((2, 10), np.float32), changed(name, values), None)


@pytest.mark.parametrize("usable", [0, -1])
def test_usable_vocabulary_below_one_is_refused(usable):
    """No id at all could be drawn."""
    with pytest.raises(ValueError, match=f"at least 1, got {usable}"):
        check(np.zeros((2, 10), np.float32), RowParams.uniform(2), usable)


@pytest.mark.parametrize(("usable", "limit"), [(None, 10), (1, 1), (9, 9), (10, 10), (11, 10), (2**40, 10)])
def test_check_returns_how_many_ids_may_be_drawn(usable, limit):
    """A tokenizer larger than the head limits nothing."""
    assert check(np.zeros((2, 10), np.float32), RowParams.uniform(2), usable) == limit


def test_batch_of_no_rows_gives_no_tokens():
    """An empty batch is no error; tokens and flags have the dtypes of the contract."""
    drawn = sample_reference.draw(np.zeros((0, 10), np.float32), RowParams.uniform(0))
    assert isinstance(drawn, Draw)
    assert (drawn.tokens.shape, drawn.tokens.dtype) == ((0,), np.int64)
    assert (drawn.flags.shape, drawn.flags.dtype) == ((0,), np.uint8)


def test_uniform_parameters_wrap_seed_and_salt():
    """Seeds of any size and sign, modulo 2^64; the dtypes are those that `check` asks for."""
    params = RowParams.uniform(2, seed=-1, salt=2**64 + 3)
    assert params.seed.tolist() == [2**64 - 1] * 2
    assert params.salt.tolist() == [3, 3]
    assert check(np.zeros((2, 10), np.float32), params, None) == 10


def test_marks_of_a_row_are_distinct_bits():
    """Flags fit a uint8, and no id is taken for the missing one."""
    assert sorted(int(f) for f in Flag) == [1, 2, 4]
    assert NO_TOKEN == -1


# --- dispatch ----------------------------------------------------------------------------------------------------


def test_forced_backend_is_the_one_that_was_named():
    """And its reason says that it was forced."""
    backend = dispatch.choose("reference")
    assert (backend.name, backend.reason) == ("reference", "forced by setting")
    assert backend.draw is sample_reference.draw


def test_unknown_backend_is_refused_and_the_known_ones_are_named():
    """A misspelt name is an error, never a fallback."""
    with pytest.raises(ValueError, match=r"unknown backend 'refrence'; known: auto, .*reference"):
        dispatch.choose("refrence")


def test_automatic_choice_is_the_first_that_loads_and_says_why(monkeypatch):
    """A backend that is missing here is named in the reason, with the error."""
    monkeypatch.setattr(
        dispatch, "BACKENDS", {"fast": "vllm_gumbel.no_such", "reference": dispatch.BACKENDS["reference"]}
    )
    backend = dispatch.choose()
    assert backend.name == "reference"
    assert backend.draw is sample_reference.draw
    assert "fast is missing (No module named 'vllm_gumbel.no_such')" in backend.reason
    assert "reference is the first backend that loads" in backend.reason


def test_forced_backend_that_is_missing_is_an_error(monkeypatch):
    """No quiet fallback to another one."""
    monkeypatch.setitem(dispatch.BACKENDS, "fast", "vllm_gumbel.no_such")
    with pytest.raises(ImportError, match="no_such"):
        dispatch.choose("fast")


def test_no_backend_at_all_is_an_error_that_names_them(monkeypatch):
    """Each with its reason."""
    monkeypatch.setattr(dispatch, "BACKENDS", {"one": "vllm_gumbel.no_one", "two": "vllm_gumbel.no_two"})
    with pytest.raises(ImportError, match=r"one is missing .*no_one.*two is missing .*no_two"):
        dispatch.choose("auto")


def test_every_listed_backend_that_loads_has_a_draw():
    """The reference is always among them."""
    assert "reference" in dispatch.BACKENDS
    assert callable(dispatch.choose("auto").draw)
