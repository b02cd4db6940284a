"""Server-wide settings: where they come from, which wins, and what a refusal says."""

import json

import pytest

from vllm_gumbel import SamplerSettings
from vllm_gumbel.settings import SettingsError, load, parse

FIELDS = list(SamplerSettings.model_fields)

#: Per field: its default, a value in the environment with what it means, and one given.
SOURCES = {
    "backend": ("auto", ("reference", "reference"), "auto"),
    "threads": (None, ("3", 3), 2),
    "on_bad_row": ("stop", ("lowest", "lowest"), "stop"),
    "salt": (0, ("-5", -5), 2**64 - 1),
    "presets": ({}, ('{"calm": 0.3}', {"calm": 0.3}), {"calm": 0.5}),
    "request_defaults": (
        {},
        ('{"gumbel_noise_scale": 0.5}', {"gumbel_noise_scale": 0.5}),
        {"gumbel_noise_scale": 0.25},
    ),
    "noise": ("own", ("stock", "stock"), "own"),
    "verification": ("exact", ("rejection", "rejection"), "exact"),
    "on_unsupported_vllm": ("refuse", ("stock", "stock"), "refuse"),
    "metrics": (True, ("false", False), True),
    "metrics_address": (None, ("0.0.0.0:9100", "0.0.0.0:9100"), "127.0.0.1:9200"),
    "watch": (0.125, ("0.5", 0.5), 0),
    "watch_loops": (True, ("false", False), True),
    "watch_glitches": (True, ("0", False), True),
    "watch_frequencies": (True, ("no", False), True),
    "watch_time": (True, ("off", False), True),
    "improbable_below": (1e-6, ("1e-4", 1e-4), 0.5),
    "token_profile": (None, ("a.json", "a.json"), "b.json"),
    "rollout_fraction": (1.0, ("0.25", 0.25), 0),
    "rollout_shadow": (0.0, ("1", 1), 0.5),
    "rollout_state": (None, ("a.json", "a.json"), "b.json"),
    "breaker_rate": (0.001, ("0", 0), 0.05),
}


@pytest.fixture(autouse=True)
def clean_environment(monkeypatch):
    for name in FIELDS:
        monkeypatch.delenv(f"GUMBEL_{name.upper()}", raising=False)


@pytest.mark.parametrize("given", [None, {}])
def test_defaults_hold_when_nothing_is_set(given):
    assert parse(given).model_dump() == {name: default for name, (default, _, _) in SOURCES.items()}


@pytest.mark.parametrize("field", FIELDS)
def test_given_wins_over_environment_and_environment_over_default(field, monkeypatch):
    default, (text, meant), given = SOURCES[field]
    monkeypatch.setenv(f"GUMBEL_{field.upper()}", text)
    expected = {name: each[0] for name, each in SOURCES.items()}
    assert parse(None).model_dump() == expected | {field: meant}
    assert parse({field: given}).model_dump() == expected | {field: given}
    assert meant != default


def test_other_variables_of_the_prefix_are_ignored(monkeypatch):
    monkeypatch.setenv("GUMBEL_SAMPLER", "gumbel")
    monkeypatch.setenv("GUMBEL_OF_SOMEBODY_ELSE", "1")
    assert parse({"salt": 3}).salt == 3


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"sale": 1}, f"unknown key 'sale'; known: {', '.join(FIELDS)}"),
        ({"backend": "fortran"}, "backend: Input should be 'auto'"),
        ({"backend": None}, "backend: Input should be 'auto'"),
        ({"threads": 0}, "threads: Input should be greater than or equal to 1, got 0"),
        ({"threads": "all"}, "threads: Input should be a valid integer"),
        ({"threads": True}, "threads: Input should be a valid integer, got True"),
        ({"on_bad_row": 1}, "on_bad_row: Input should be 'stop' or 'lowest', got 1"),
        ({"salt": "x"}, "salt: Input should be a valid integer, unable to parse string as an integer, got 'x'"),
        ({"salt": [1]}, "salt: Input should be a valid integer, got [1]"),
        ({"salt": None}, "salt: Input should be a valid integer, got None"),
        ({"salt": 1.5}, "salt: Input should be a valid integer, got a number with a fractional part, got 1.5"),
        ({"salt": float("nan")}, "salt: Input should be a finite number, got nan"),
        ({"salt": float("inf")}, "salt: Input should be a finite number, got inf"),
        ({"salt": 2**64}, "salt: Input should be less than 18446744073709551616, got 18446744073709551616"),
        ({"salt": -(2**63) - 1}, "salt: Input should be greater than or equal to -9223372036854775808, got -9223"),
        ({"salt": True}, "salt: Input should be a valid integer, got True"),
        ({"_env_prefix": "MY_"}, "unknown key '_env_prefix'; known: "),
        ({1: 2}, "unknown key 1; known: "),
        ({True: "x"}, "unknown key True; known: "),  # what YAML makes of `on: x`
        ({"metrics": "perhaps"}, "metrics: Input should be a valid boolean, unable to interpret input, got 'perhaps'"),
    ],
)
def test_refusal_names_field_rule_and_value(given, said):
    with pytest.raises(SettingsError) as refused:
        parse(given)
    assert str(refused.value).startswith(f"sampler config: {said}")
    ((key, value),) = given.items()
    assert str(refused.value).endswith(f"got {value!r}" if key in FIELDS else f"; known: {', '.join(FIELDS)}")


#: (settings, what the refusal says and the value that it ends with); a default is refused by the rules for requests.
REFUSED_OBJECTS = [
    ({"presets": [1]}, "presets: Input should be a valid dictionary", [1]),
    ({"presets": None}, "presets: Input should be a valid dictionary", None),
    ({"presets": {"Calm": 0.3}}, "presets.Calm.[key]: String should match pattern", "Calm"),
    ({"presets": {"calm down": 0.3}}, "presets.calm down.[key]: String should match pattern", "calm down"),
    ({"presets": {"": 0.3}}, "presets..[key]: String should match pattern", ""),
    ({"presets": {1: 0.3}}, "presets.1.[key]: Input should be a valid string", 1),
    ({"presets": {"calm": 0.001}}, "presets.calm: Input should be 0 or a number from 0.01 to 2", 0.001),
    ({"presets": {"calm": -1}}, "presets.calm: Input should be 0 or a number from 0.01 to 2", -1),
    ({"presets": {"calm": 2.01}}, "presets.calm: Input should be 0 or a number from 0.01 to 2", 2.01),
    ({"presets": {"calm": float("nan")}}, "presets.calm: Input should be 0 or a number from 0.01 to 2", float("nan")),
    ({"presets": {"calm": float("inf")}}, "presets.calm: Input should be 0 or a number from 0.01 to 2", float("inf")),
    ({"presets": {"calm": True}}, "presets.calm: Input should be a valid number", True),
    ({"presets": {"calm": "0.3"}}, "presets.calm: Input should be a valid number", "0.3"),
    ({"request_defaults": 3}, "request_defaults: Input should be a valid dictionary", 3),
    (
        {"request_defaults": {"gumbel_salt": 3}},
        "request_defaults: gumbel_salt is set for all requests by the setting",
        3,
    ),
    (
        {"request_defaults": {"gumbel_pepper": 3}},
        "request_defaults: gumbel_pepper is not a known parameter (known: ",
        3,
    ),
    ({"request_defaults": {"temperature": 3}}, "request_defaults: temperature is not a known parameter (known: ", 3),
    ({"request_defaults": {"gumbel_top_n": 0}}, "request_defaults: gumbel_top_n must be an integer from 1 to ", 0),
    ({"request_defaults": {"gumbel_top_n": None}}, "request_defaults: gumbel_top_n must be an integer from 1", None),
    (
        {"presets": {"calm": 1}, "request_defaults": {"gumbel_preset": "x"}},
        "request_defaults: gumbel_preset must be one of creative, factual, calm",
        "x",
    ),
    (
        {"request_defaults": {"gumbel_sampler": "default", "gumbel_tail_boost": 0.5}},
        "request_defaults: gumbel_tail_boost contradicts gumbel_sampler 'default': ",
        0.5,
    ),
    (
        {"presets": {"best": 0}, "request_defaults": {"gumbel_preset": "best", "gumbel_hybrid_steps": 4}},
        "request_defaults: gumbel_hybrid_steps contradicts temperature 0: ",
        4,
    ),
]


@pytest.mark.parametrize(("given", "said", "value"), REFUSED_OBJECTS)
def test_refusal_of_presets_and_defaults_names_setting_rule_and_value(given, said, value):
    with pytest.raises(SettingsError) as refused:
        parse(given)
    assert str(refused.value).startswith(f"sampler config: {said}")
    assert str(refused.value).endswith(f", got {value!r}")


def test_presets_and_defaults_are_merged_name_by_name(monkeypatch):
    monkeypatch.setenv("GUMBEL_PRESETS", '{"calm": 0.3, "hot": 1.9}')
    monkeypatch.setenv("GUMBEL_REQUEST_DEFAULTS", '{"gumbel_preset": "calm", "gumbel_top_n": 5}')
    settings = parse({"presets": {"calm": 0}, "request_defaults": {"gumbel_top_n": 7}})
    assert settings.rules.presets == {"creative": 1.0, "factual": 0.7, "calm": 0, "hot": 1.9}
    assert settings.rules.defaults == {"gumbel_preset": "calm", "gumbel_top_n": 7}


def test_variable_that_is_no_json_is_refused_by_its_setting(monkeypatch):
    monkeypatch.setenv("GUMBEL_PRESETS", '{"calm": 0.3')
    with pytest.raises(SettingsError, match=r"field \"presets\".*line 1 column.*, got '\{\"calm\": 0.3'$"):
        parse(None)


def test_long_value_is_shortened():
    with pytest.raises(SettingsError) as refused:
        parse({"salt": "x" * 10_000})
    assert len(str(refused.value)) < 250


def test_refusal_names_every_problem_at_once():
    with pytest.raises(SettingsError, match=r"^sampler config: salt: .*; unknown key 'sale'; known: "):
        parse({"salt": "x", "sale": 1})


def test_bad_environment_is_refused_by_field(monkeypatch):
    monkeypatch.setenv("GUMBEL_SALT", "much")
    with pytest.raises(SettingsError, match=r"salt: Input should be a valid integer.*got 'much'"):
        parse(None)


@pytest.mark.parametrize("salt", [-(2**63), -1, 2**64 - 1])
def test_salt_is_accepted_to_both_ends_of_its_range(salt):
    assert parse({"salt": salt}).salt == salt


def test_settings_cannot_be_changed():
    with pytest.raises(ValueError, match="frozen"):
        parse(None).salt = 1


@pytest.mark.parametrize("text", ['{"salt": 4, "metrics": false}', '  \n{"salt": 4,\n "metrics": false}\n'])
def test_json_text_is_its_object(text):
    assert load(text) == {"salt": 4, "metrics": False}


@pytest.mark.parametrize(
    ("name", "content"),
    [
        ("a.json", '{"salt": 4, "metrics": false}'),
        ("a b.yaml", "salt: 4\nmetrics: no\n"),
        ("a.yml", "{salt: 4, metrics: no}"),
    ],
)
def test_file_is_read_by_its_suffix(name, content, tmp_path, monkeypatch):
    (tmp_path / name).write_text(content)
    monkeypatch.setenv("HOME", str(tmp_path))
    for path in (tmp_path / name, f"~/{name}", f" {tmp_path / name}\n"):
        assert load(str(path)) == {"salt": 4, "metrics": False}


@pytest.mark.parametrize("text", ["", "gumbel", "[1]", "4", '"salt"', "settings.toml", "settings", "salt=4"])
def test_text_that_is_neither_object_nor_file_is_refused(text):
    with pytest.raises(SettingsError) as refused:
        load(text)
    rule = "sampler config must be a JSON object or the path of a .json or .yaml file"
    assert str(refused.value) == f"{rule}, got {text!r}"


@pytest.mark.parametrize("name", ["absent.json", "absent.yaml", "folder.yml"])
def test_unreadable_file_is_refused_by_its_path(name, tmp_path):
    (tmp_path / "folder.yml").mkdir()
    reason = "Is a directory" if name == "folder.yml" else "No such file or directory"
    with pytest.raises(SettingsError) as refused:
        load(str(tmp_path / name))
    assert str(refused.value) == f"sampler config file {tmp_path / name} cannot be read: {reason}"


def test_file_that_is_no_text_is_refused_by_its_path(tmp_path):
    (tmp_path / "a.json").write_bytes(b"\xff\xfe{")
    with pytest.raises(SettingsError) as refused:
        load(str(tmp_path / "a.json"))
    assert str(refused.value).startswith(f"sampler config file {tmp_path / 'a.json'} ")


def test_home_of_nobody_is_refused():
    with pytest.raises(SettingsError, match="~no-such-user"):
        load("~no-such-user/a.json")


@pytest.mark.parametrize(
    ("name", "content"),
    [("a.json", '{"salt": 4'), ("a.json", "salt: 4"), ("a.json", ""), ("a.yaml", "salt: [4"), ("a.yml", "a: b: c")],
)
def test_malformed_file_is_refused_by_its_path(name, content, tmp_path):
    (tmp_path / name).write_text(content)
    with pytest.raises(SettingsError) as refused:
        load(str(tmp_path / name))
    assert str(refused.value).startswith(f"sampler config file {tmp_path / name} is malformed: ")


@pytest.mark.parametrize("text", ['{"salt": 4', "{salt: 4}", '{"salt": 4} {}', "{"])
def test_malformed_text_is_refused_with_the_place(text):
    with pytest.raises(SettingsError, match=r"^sampler config is malformed: .*line 1 column"):
        load(text)


@pytest.mark.parametrize(
    ("name", "content", "kind"),
    [("a.json", "[1]", "list"), ("a.json", "3", "int"), ("a.yaml", "- salt", "list"), ("a.yaml", "", "NoneType")],
)
def test_file_without_an_object_is_refused(name, content, kind, tmp_path):
    (tmp_path / name).write_text(content)
    with pytest.raises(SettingsError) as refused:
        load(str(tmp_path / name))
    assert str(refused.value) == f"sampler config file {tmp_path / name} must be an object of settings, got {kind}"


def test_table_covers_every_field_with_variable_default_and_description(monkeypatch):
    rows = SamplerSettings.table()
    assert [row[0] for row in rows] == FIELDS == list(SOURCES)
    for field, variable, default, description in rows:
        expected, (text, meant), _ = SOURCES[field]
        assert default == ("unset" if expected is None else json.dumps(expected))
        assert len(description) > 20
        monkeypatch.setenv(variable, text)
        assert parse(None).model_dump()[field] == meant, "the variable that the table names is the one that is read"
