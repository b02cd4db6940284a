"""What a request may set: refused by name, rule and value, or accepted to the ends of the range."""

import pytest

from vllm_gumbel import GumbelParams
from vllm_gumbel.params import SEED_RANGE, ParamsError, check_seed

RULE = "must be an integer from -2^63 to 2^64 - 1"
UNKNOWN = "is not a known parameter (known: gumbel_salt)"


@pytest.mark.parametrize(
    ("key", "value", "said"),
    [
        ("gumbel_salt", "7", f"{RULE}, got '7'"),
        ("gumbel_salt", "", f"{RULE}, got ''"),
        ("gumbel_salt", b"7", f"{RULE}, got b'7'"),
        ("gumbel_salt", True, f"{RULE}, got True"),
        ("gumbel_salt", False, f"{RULE}, got False"),
        ("gumbel_salt", None, f"{RULE}, got None"),
        ("gumbel_salt", 1.0, f"{RULE}, got 1.0"),
        ("gumbel_salt", 0.5, f"{RULE}, got 0.5"),
        ("gumbel_salt", float("nan"), f"{RULE}, got nan"),
        ("gumbel_salt", float("inf"), f"{RULE}, got inf"),
        ("gumbel_salt", float("-inf"), f"{RULE}, got -inf"),
        ("gumbel_salt", [], f"{RULE}, got []"),
        ("gumbel_salt", [1], f"{RULE}, got [1]"),
        ("gumbel_salt", {"a": 1}, f"{RULE}, got {{'a': 1}}"),
        ("gumbel_salt", 2**64, f"{RULE}, got 18446744073709551616"),
        ("gumbel_salt", -(2**63) - 1, f"{RULE}, got -9223372036854775809"),
        ("gumbel_salt", 10**300, f"{RULE}, got 1{'0' * 79}... (301 characters)"),
        pytest.param("gumbel_salt", 10**5000, f"{RULE}, got ", id="integer that Python does not print"),
        ("gumbel_salt", "x" * 10_000, f"{RULE}, got 'xxx"),
        ("gumbel_salt", [0.25] * 1000, f"{RULE}, got [0.25, "),
        ("gumbel_pepper", 1, f"{UNKNOWN}, got 1"),
        ("gumbel_", 1, f"{UNKNOWN}, got 1"),
        ("gumbel_SALT", 1, f"{UNKNOWN}, got 1"),
        ("gumbel_pepper", "x" * 10_000, f"{UNKNOWN}, got 'xxx"),
    ],
)
def test_refusal_names_key_rule_and_value(key, value, said):
    """vllm#45116: values that are no number are refused, not repaired; the text a client gets back stays short."""
    with pytest.raises(ParamsError) as refused:
        GumbelParams.from_extra_args({"of_somebody_else": object(), key: value})
    assert str(refused.value).startswith(f"{key} {said}")
    assert len(str(refused.value)) < 250
    assert refused.value.key == key
    assert refused.value.value is value
    assert isinstance(refused.value, ValueError), "vLLM makes a 400 of a ValueError"


@pytest.mark.parametrize("salt", [SEED_RANGE[0], -1, 0, 1, 2**63 - 1, 2**63, SEED_RANGE[1]])
def test_salt_is_accepted_to_both_ends_of_its_range(salt):
    assert GumbelParams.from_extra_args({"gumbel_salt": salt}).gumbel_salt == salt


def test_range_is_that_of_a_signed_or_unsigned_word():
    assert SEED_RANGE == (-(2**63), 2**64 - 1)


@pytest.mark.parametrize(
    "extra_args", [None, {}, {"salt": "x", "": None}, {"Gumbel_salt": "x", "not_gumbel_salt": [1], "gumbel": 1, 3: 4}]
)
def test_keys_of_others_pass(extra_args):
    assert GumbelParams.from_extra_args(extra_args) == GumbelParams()
    assert GumbelParams().gumbel_salt is None


def test_two_bad_keys_are_refused_by_the_first():
    with pytest.raises(ParamsError, match=r"^gumbel_a is not a known parameter"):
        GumbelParams.from_extra_args({"gumbel_a": 1, "gumbel_salt": "x"})


def test_params_cannot_be_changed_after_validation():
    params = GumbelParams.from_extra_args({"gumbel_salt": 1})
    with pytest.raises(ValueError, match="frozen"):
        params.gumbel_salt = "x"


@pytest.mark.parametrize("seed", [None, SEED_RANGE[0], -1, 0, 2**63, SEED_RANGE[1]])
def test_seed_within_a_word_is_accepted(seed):
    check_seed(seed)


@pytest.mark.parametrize("seed", [SEED_RANGE[0] - 1, SEED_RANGE[1] + 1, 10**300, float("nan"), float("inf")])
def test_seed_outside_a_word_is_refused(seed):
    with pytest.raises(ParamsError, match=r"^seed must be an integer from -2\^63 to 2\^64 - 1, got ") as refused:
        check_seed(seed)
    assert refused.value.key == "seed"
