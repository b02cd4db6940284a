"""What a request may set: refused by name, rule and value, or accepted to the ends of the range.

`test_keys_pairs.py` has the combinations.
"""

import re
from pathlib import Path

import pytest

from vllm_gumbel import GumbelParams
from vllm_gumbel.params import (
    CONTRADICTIONS,
    MOST_INT32,
    PRESETS,
    SEED_RANGE,
    Asked,
    ParamsError,
    ServerRules,
    check_seed,
)

NAN, INFINITY = float("nan"), float("inf")
UNKNOWN = f"is not a known parameter (known: {', '.join(GumbelParams.model_fields)})"

#: The rule of every key, as a refusal prints it.
RULES = {
    "gumbel_sampler": "must be 'gumbel' or 'default'",
    "gumbel_rollout_key": "must be a text of 1 to 256 characters, or an integer from -2^63 to 2^64 - 1",
    "gumbel_salt": "must be an integer from -2^63 to 2^64 - 1",
    "gumbel_preset": "must be one of creative, factual",
    "gumbel_temperature_rule": "must be 'none' or 'log_vocab'",
    "gumbel_hybrid_steps": "must be an integer from 0 to 2147483647",
    "gumbel_top_n": "must be an integer from 1 to 2147483647",
    "gumbel_tail_boost": "must be a number from 0 to 10",
    "gumbel_repetition_offset": "must be a number from 0 to 100",
    "gumbel_noise_scale": "must be a number from 0 to 1",
    "gumbel_return_info": "must be true or false",
}
WORDS = ["gumbel_sampler", "gumbel_preset", "gumbel_temperature_rule"]
INTEGERS = ["gumbel_salt", "gumbel_hybrid_steps", "gumbel_top_n"]
NUMBERS = ["gumbel_tail_boost", "gumbel_repetition_offset", "gumbel_noise_scale"]

#: Wrong for every key: no number, word or switch at all, or one in another form.
WRONG = [
    None,
    "",
    "7",
    "0.5",
    "1e3",
    "true",
    "nan",
    b"7",
    [],
    [1],
    [0.5],
    ["gumbel"],
    {"a": 1},
    (1,),
    NAN,
    INFINITY,
    -INFINITY,
]
WRONG += [10**300, -(10**300), 1e308, -1e308, 2 + 1j]

#: Wrong for every key but the one that takes any text.
ROLLOUT_KEY = "gumbel_rollout_key"
WRONG_ELSEWHERE = ["7", "0.5", "1e3", "true", "nan"]

#: Wrong for some.
BOOLEANS = [True, False]
PAST_THE_ENDS = {
    "gumbel_rollout_key": [SEED_RANGE[0] - 1, SEED_RANGE[1] + 1, 1.0, 0.5, "x" * 257],
    "gumbel_salt": [SEED_RANGE[0] - 1, SEED_RANGE[1] + 1, 1.0, 0.5],
    "gumbel_hybrid_steps": [-1, MOST_INT32 + 1, 2.0, 0.5],
    "gumbel_top_n": [0, -1, MOST_INT32 + 1, 5.0],
    "gumbel_tail_boost": [-1e-9, 10.0001, 11, -1],
    "gumbel_repetition_offset": [-1e-9, 100.0001, 101, -1],
    "gumbel_noise_scale": [-1e-9, 1.0000001, 2, -1],
    "gumbel_return_info": [2, -1, 1.0, 0.0],
    "gumbel_sampler": ["Gumbel", "gumbel ", "stock", 0, 1],
    "gumbel_preset": ["Creative", "creative,factual", 0, 1, 0.7],
    "gumbel_temperature_rule": ["log", "None", 0, 1, 0.1],
}

#: Accepted to both ends.
RIGHT = {
    "gumbel_sampler": ["gumbel", "default"],
    "gumbel_rollout_key": ["x", " ", "\0", "\U0001f600" * 256, SEED_RANGE[0], 0, SEED_RANGE[1]],
    "gumbel_salt": [SEED_RANGE[0], -1, 0, 1, 2**63 - 1, 2**63, SEED_RANGE[1]],
    "gumbel_preset": ["creative", "factual"],
    "gumbel_temperature_rule": ["none", "log_vocab"],
    "gumbel_hybrid_steps": [0, 1, MOST_INT32],
    "gumbel_top_n": [1, 1000, MOST_INT32],
    "gumbel_tail_boost": [0, 0.0, 0.5, 1, 10, 10.0],
    "gumbel_repetition_offset": [0, 0.1, 100],
    "gumbel_noise_scale": [0, 0.5, 1, 1.0],
    "gumbel_return_info": [True, False],
}


def every_refusal():
    """Return one (key, value) per value that is refused for its own sake."""
    cases = [(key, value) for key in RULES for value in WRONG if value not in WRONG_ELSEWHERE or key != ROLLOUT_KEY]
    cases += [(key, value) for key in RULES if key != "gumbel_return_info" for value in BOOLEANS]
    return cases + [(key, value) for key, values in PAST_THE_ENDS.items() for value in values]


@pytest.mark.parametrize(("key", "value"), every_refusal(), ids=lambda each: repr(each)[:30])
def test_refusal_names_key_rule_and_value(key, value):
    """vllm#45116: values that are no number are refused, not repaired."""
    with pytest.raises(ParamsError) as refused:
        GumbelParams.from_extra_args({"of_somebody_else": object(), key: value})
    assert str(refused.value).startswith(f"{key} {RULES[key]}, got {repr(value)[:70]}")
    assert refused.value.key == key
    assert refused.value.value is value
    assert isinstance(refused.value, ValueError), "vLLM makes a 400 of a ValueError"


@pytest.mark.parametrize(
    ("key", "value", "said"),
    [
        ("gumbel_salt", 10**300, f"{RULES['gumbel_salt']}, got 1{'0' * 79}... (301 characters)"),
        pytest.param(
            "gumbel_salt", 10**5000, f"{RULES['gumbel_salt']}, got a int that cannot be printed", id="10^5000"
        ),
        pytest.param(
            "gumbel_tail_boost", 10**5000, f"{RULES['gumbel_tail_boost']}, got a int", id="10^5000 as a number"
        ),
        ("gumbel_salt", "x" * 10_000, f"{RULES['gumbel_salt']}, got 'xxx"),
        ("gumbel_preset", "x" * 10_000, f"{RULES['gumbel_preset']}, got 'xxx"),
        ("gumbel_noise_scale", [0.25] * 1000, f"{RULES['gumbel_noise_scale']}, got [0.25, "),
        ("gumbel_pepper", 1, f"{UNKNOWN}, got 1"),
        ("gumbel_", 1, f"{UNKNOWN}, got 1"),
        ("gumbel_SALT", 1, f"{UNKNOWN}, got 1"),
        ("gumbel_pepper", "x" * 10_000, f"{UNKNOWN}, got 'xxx"),
    ],
)
def test_refusal_stays_short_whatever_the_client_sent(key, value, said):
    with pytest.raises(ParamsError) as refused:
        GumbelParams.from_extra_args({key: value})
    assert str(refused.value).startswith(f"{key} {said}")
    assert len(str(refused.value)) < 450


@pytest.mark.parametrize("key", ["gumbel_\ud800", "gumbel_\n", f"gumbel_{'x' * 10_000}"])
def test_refusal_shows_a_key_so_that_it_can_be_sent_and_logged(key):
    with pytest.raises(ParamsError) as refused:
        GumbelParams.from_extra_args({key: 1})
    assert UNKNOWN in str(refused.value)
    assert len(str(refused.value).encode()) < 450
    assert str(refused.value).isprintable()
    assert refused.value.key == key


@pytest.mark.parametrize(("key", "value"), [(key, value) for key, values in RIGHT.items() for value in values])
def test_value_is_accepted_to_both_ends_of_its_range(key, value):
    assert getattr(GumbelParams.from_extra_args({key: value}), key) == value


@pytest.mark.parametrize(("sent", "meant"), [(1, True), (0, False)])
def test_switch_is_taken_as_the_openai_api_hands_it_on(sent, meant):
    """JSON's true and false are 1 and 0 in `vllm_xargs`."""
    assert GumbelParams.from_extra_args({"gumbel_return_info": sent}).gumbel_return_info is meant


def test_cases_cover_every_key():
    assert list(RULES) == list(RIGHT) == list(GumbelParams.model_fields)
    assert set(PAST_THE_ENDS) == set(RULES) == {*WORDS, *INTEGERS, *NUMBERS, "gumbel_return_info", ROLLOUT_KEY}
    assert {name: field.description for name, field in GumbelParams.model_fields.items()} == RULES


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


def test_presets_of_a_server_add_to_what_is_there():
    rules = ServerRules({**PRESETS, "wild": 1.8, "factual": 0.2})
    params = GumbelParams.from_extra_args({"gumbel_preset": "wild"}, rules=rules)
    assert params.temperature(1.0, 100, rules) == 1.8
    factual = GumbelParams.from_extra_args({"gumbel_preset": "factual"}, rules=rules)
    assert factual.temperature(1.0, 100, rules) == 0.2, "in place of ours"
    for value in ("tame", None, 7, ["wild"]):
        with pytest.raises(ParamsError, match="must be one of creative, factual, wild, got ") as refused:
            GumbelParams.from_extra_args({"gumbel_preset": value}, rules=rules)
        assert str(refused.value).endswith(f"got {value!r}")


@pytest.mark.parametrize(
    ("keys", "given", "expected"),
    [
        ({}, 0.6, 0.6),
        ({"gumbel_preset": "factual"}, 1.0, 0.7),
        ({"gumbel_temperature_rule": "log_vocab"}, 0.5, 0.5 * 2.08027),
        ({"gumbel_preset": "factual", "gumbel_temperature_rule": "log_vocab"}, 1.0, 0.7 * 2.08027),
    ],
)
def test_temperature_follows_preset_and_rule(keys, given, expected):
    """At V = 49,152 the rule more than doubles it: 1 + 0.1 ln V = 2.0803."""
    assert GumbelParams.from_extra_args(keys, given).temperature(given, 49_152) == pytest.approx(expected, rel=1e-5)


@pytest.mark.parametrize(("given", "n", "expected"), [(0, None, 0), (-1, 7, 7), (0, 7, 7), (5, 7, 5), (9, 7, 7)])
def test_of_top_k_and_top_n_the_smaller_holds(given, n, expected):
    assert GumbelParams(gumbel_top_n=n).top_k(given) == expected


@pytest.mark.parametrize("temperature", [0.0, 1e-6, 0.5, 1.5])
def test_preset_wants_the_temperature_left_alone(temperature):
    with pytest.raises(ParamsError, match=r"^gumbel_preset contradicts temperature: .*, got 'creative'$"):
        GumbelParams.from_extra_args({"gumbel_preset": "creative"}, temperature)


def test_every_contradiction_names_two_things_that_exist():
    for rule in CONTRADICTIONS:
        assert rule.key in GumbelParams.model_fields
        assert rule.other.split()[0] in {*GumbelParams.model_fields, "temperature"}
        assert set(rule.others) <= set(GumbelParams.model_fields)
        assert not rule.holds(Asked(GumbelParams(), 1.0, 1.0))


def test_readme_shows_the_table_of_keys():
    readme = (Path(__file__).resolve().parent.parent / "README.md").read_text()
    section = readme.split("<!-- params -->")[1].split("\n#")[0]
    rows = [line for line in section.splitlines() if re.match(r"\| `gumbel_", line)]
    assert rows == ["| " + " | ".join((f"`{row[0]}`", *row[1:])) + " |" for row in GumbelParams.table()]


@pytest.mark.parametrize("seed", [None, SEED_RANGE[0], -1, 0, 2**63, SEED_RANGE[1]])
def test_seed_within_a_word_is_accepted(seed):
    check_seed(seed)


@pytest.mark.parametrize("seed", [SEED_RANGE[0] - 1, SEED_RANGE[1] + 1, 10**300, float("nan"), float("inf")])
def test_seed_outside_a_word_is_refused(seed):
    with pytest.raises(ParamsError, match=r"^seed must be an integer from -2\^63 to 2\^64 - 1, got ") as refused:
        check_seed(seed)
    assert refused.value.key == "seed"
