"""The choice of a sampler, from vLLM's own command line to the configuration that its workers get."""

import copy
import json
import pickle
from itertools import permutations
from pathlib import Path
from types import SimpleNamespace

import pytest
from vllm.config import VllmConfig
from vllm.engine.arg_utils import AsyncEngineArgs, EngineArgs
from vllm.entrypoints.launchers.cli_args import make_arg_parser
from vllm.plugins import load_general_plugins
from vllm.utils.argparse_utils import FlexibleArgumentParser
from vllm.v1.worker.worker_base import WorkerWrapperBase

from vllm_gumbel import SamplerSettings
from vllm_gumbel.integration import choice, compat, plugin
from vllm_gumbel.integration.choice import CarriedSettings, Choice
from vllm_gumbel.integration.registry import SamplerError
from vllm_gumbel.integration.v1 import GumbelSampler
from vllm_gumbel.params import ParamsError
from vllm_gumbel.settings import SettingsError, parse

MODEL = str(Path(__file__).parent)  # any folder: nothing looks into it
SETTINGS = {"on_bad_row": "lowest", "salt": 5}


@pytest.fixture(autouse=True)
def plugins(monkeypatch):
    """Plugins are loaded before the parser is built, as `vllm serve` does; nothing is set in the environment."""
    load_general_plugins()
    for name in ("SAMPLER", *map(str.upper, SamplerSettings.model_fields)):
        monkeypatch.delenv(f"GUMBEL_{name}", raising=False)


def parsed(*flags):
    return make_arg_parser(FlexibleArgumentParser(prog="vllm serve")).parse_args(["--model", MODEL, *flags])


def parse_flags(*flags):
    """Parse flags of `vllm serve` and return the additional configuration of the engine."""
    return AsyncEngineArgs.from_cli_args(parsed(*flags)).additional_config


def chosen_by(*flags):
    return choice.read(parse_flags(*flags))


def refusal(capsys, *flags):
    """Return what `vllm serve` prints while it exits with status 2."""
    with pytest.raises(SystemExit) as ended:
        parse_flags(*flags)
    assert ended.value.code == 2
    return capsys.readouterr().err


@pytest.mark.parametrize("keyword", ["all", "Sampler"])
def test_help_has_a_group_with_both_flags_and_every_setting(keyword, capsys, monkeypatch):
    monkeypatch.setattr(FlexibleArgumentParser, "_search_keyword", None)  # vLLM keeps it on the class
    monkeypatch.setenv("COLUMNS", "2000")
    with pytest.raises(SystemExit) as ended:
        parse_flags(f"--help={keyword}")
    text = f"\n{capsys.readouterr().out}"
    assert ended.value.code == 0
    assert text.count("\nSampler:\n") == 1
    group = text.split("\nSampler:\n")[1]
    assert "--sampler {default,gumbel,module:Class}" in group
    assert "--sampler-config JSON_OR_FILE" in group
    assert "GUMBEL_SAMPLER" in group
    for name, variable, default, description in SamplerSettings.table():
        assert f"- {name} (default {default}; environment {variable}): {description}" in group


def test_without_the_flag_nothing_is_added():
    assert parse_flags() == EngineArgs(model=MODEL).additional_config == {}
    assert parse_flags("--additional-config", '{"of_another": [1]}') == {"of_another": [1]}
    assert chosen_by().is_default
    assert EngineArgs(model=MODEL, additional_config={"a": 1}).additional_config == {"a": 1}


def test_configuration_that_is_no_mapping_is_left_to_its_owner():
    """vLLM allows an object with a hash of its own."""

    class Hashed:
        def compute_hash(self):
            return "x"

    mine = Hashed()
    args = parsed()
    args.additional_config = mine
    assert AsyncEngineArgs.from_cli_args(args).additional_config is mine
    assert choice.read(mine).is_default
    args.sampler = "gumbel"
    with pytest.raises(SamplerError, match="--additional-config"):
        AsyncEngineArgs.from_cli_args(args)


@pytest.mark.parametrize("cls", [EngineArgs, AsyncEngineArgs])
def test_engine_arguments_keep_their_class(cls):
    args = parsed("--sampler", "gumbel")
    assert type(cls.from_cli_args(args)) is cls
    assert cls.from_cli_args(args).additional_config == {"sampler": "gumbel"}


@pytest.mark.parametrize("name", ["default", "gumbel", "vllm.v1.sample.sampler:Sampler"])
def test_flag_names_the_sampler(name):
    assert parse_flags("--sampler", name) == {"sampler": name}
    assert chosen_by(f"--sampler={name}") == Choice(name, SamplerSettings())


def test_settings_come_as_json_file_or_dotted_flags(tmp_path):
    (tmp_path / "a.json").write_text(json.dumps(SETTINGS))
    (tmp_path / "a.yaml").write_text("on_bad_row: lowest\nsalt: 5\n")
    expected = {"sampler": "gumbel", "sampler_config": SETTINGS}
    dotted = ("--sampler-config.salt", "5", "--sampler_config.on_bad_row=lowest")
    for way in (
        ("--sampler-config", json.dumps(SETTINGS)),
        ("--sampler-config", str(tmp_path / "a.json")),
        ("--sampler_config", str(tmp_path / "a.yaml")),
        dotted,
    ):
        assert parse_flags("--sampler", "gumbel", *way) == expected
    assert choice.read(expected).settings == parse(SETTINGS)


def test_configuration_file_of_the_server_may_choose(tmp_path):
    (tmp_path / "server.yaml").write_text(f"model: {MODEL}\nsampler: gumbel\nsampler-config:\n  salt: 5\n")
    parser = make_arg_parser(FlexibleArgumentParser())
    args = parser.parse_args(["--config", str(tmp_path / "server.yaml")])
    assert EngineArgs.from_cli_args(args).additional_config == {"sampler": "gumbel", "sampler_config": {"salt": 5}}


def test_order_of_flags_is_irrelevant_and_keys_of_others_stay():
    flags = [
        ("--sampler", "gumbel"),
        ("--sampler-config", json.dumps(SETTINGS)),
        ("--additional-config", '{"of_another": {"a": [1]}, "sampler": "gumbel"}'),
    ]
    expected = {"of_another": {"a": [1]}, "sampler": "gumbel", "sampler_config": SETTINGS}
    for order in permutations(flags):
        assert parse_flags(*(word for pair in order for word in pair)) == expected


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        (("--sampler", "gumble"), "argument --sampler: unknown sampler 'gumble'; known: default, gumbel"),
        (("--sampler", ""), "argument --sampler: unknown sampler ''; known: default, gumbel"),
        (("--sampler-config", '{"salt": 4'), "argument --sampler-config: sampler config is malformed: "),
        (("--sampler-config", "[1]"), "argument --sampler-config: sampler config must be a JSON object or the path"),
        (("--sampler-config", "no-such.yaml"), "config file no-such.yaml cannot be read: No such file or directory"),
        (("--sampler-config", '{"sale": 4}'), "argument --sampler-config: sampler config: unknown key 'sale'; known: "),
        (("--sampler-config.sale", "4"), "argument --sampler-config: sampler config: unknown key 'sale'; known: "),
        (("--sampler-config", '{"salt": 1.5}'), "argument --sampler-config: sampler config: salt: Input should be a "),
    ],
)
def test_bad_flag_ends_the_start_with_a_message(flags, said, capsys):
    assert said in refusal(capsys, *flags)


@pytest.mark.parametrize(
    ("flag", "key", "value", "other"),
    [("--sampler", "sampler", "gumbel", "default"), ("--sampler-config", "sampler_config", {"salt": 5}, {"salt": 6})],
)
def test_flag_that_contradicts_additional_config_is_refused_with_both(flag, key, value, other):
    text = value if isinstance(value, str) else json.dumps(value)
    with pytest.raises((SamplerError, SettingsError)) as refused:
        parse_flags(flag, text, "--additional-config", json.dumps({key: other}))
    said = f"{flag} says {value!r} and --additional-config says {other!r}: give one of them"
    assert str(refused.value) == said


def test_environment_chooses_where_nothing_else_does(monkeypatch):
    monkeypatch.setenv("GUMBEL_SAMPLER", "gumbel")
    monkeypatch.setenv("GUMBEL_SALT", "9")
    assert chosen_by() == Choice("gumbel", parse({"salt": 9}))
    assert chosen_by("--sampler-config", '{"salt": 1}') == Choice("gumbel", parse({"salt": 1}))
    assert chosen_by("--sampler", "default").is_default
    assert parse_flags() == {}, "it is no flag: what the user gave stays what it was"
    monkeypatch.setenv("GUMBEL_SAMPLER", "gumble")
    with pytest.raises(SamplerError, match="unknown sampler 'gumble'"):
        chosen_by()


@pytest.mark.parametrize(
    ("additional", "error", "said"),
    [
        ({"sampler": 3}, SamplerError, "sampler must be a name, got 3"),
        ({"sampler": None}, SamplerError, "sampler must be a name, got None"),
        ({"sampler": "gumble"}, SamplerError, "unknown sampler 'gumble'"),
        ({"sampler": "gumbel", "sampler_config": "x"}, SettingsError, "must be an object of settings, got 'x'"),
        ({"sampler": "gumbel", "sampler_config": {"sale": 1}}, SettingsError, "unknown key 'sale'"),
        ({"sampler_config": {"sale": 1}}, SettingsError, "unknown key 'sale'"),
    ],
)
def test_bad_choice_of_a_program_is_refused(additional, error, said):
    with pytest.raises(error, match=said):
        choice.read(additional)


def test_settings_reach_a_worker_and_its_environment_does_not(monkeypatch):
    """Through pickle, as vLLM starts its workers, and through copies; the settings are those that were read once."""
    config = VllmConfig(additional_config={"sampler": "gumbel", "of_another": 1})
    choice.carry(Choice("gumbel", parse(SETTINGS)), config)
    monkeypatch.setenv("GUMBEL_SALT", "77")
    monkeypatch.setenv("GUMBEL_SAMPLER", "gumble")
    received = pickle.loads(pickle.dumps(config.additional_config))
    for each in (received, copy.deepcopy(config.additional_config), copy.deepcopy(config).additional_config):
        assert isinstance(each["sampler_config"], CarriedSettings)
        assert each["of_another"] == 1
        assert choice.read(each) == Choice("gumbel", SamplerSettings(**SETTINGS))


def test_key_of_the_compile_cache_does_not_depend_on_settings():
    config = VllmConfig(additional_config={"of_another": 1})
    hashes = set()
    for given in ({}, SETTINGS, {"metrics": False, "backend": "reference"}):
        choice.carry(Choice("gumbel", parse(given)), config)
        assert choice.read(config.additional_config).settings == parse(given)
        hashes.add(config.compute_hash())
    assert len(hashes) == 1
    config.additional_config = {**config.additional_config, "of_another": 2}
    assert config.compute_hash() not in hashes, "what others put there still counts"


def test_register_wraps_once():
    """vLLM loads plugins in every process, and in some of them more than once."""
    owners = [(EngineArgs, "add_cli_args"), (EngineArgs, "from_cli_args"), (EngineArgs, "create_engine_config")]
    owners.append((WorkerWrapperBase, "init_device"))
    before = [owner.__dict__[name] for owner, name in owners]
    for each in before:
        plain = getattr(each, "__func__", each)
        assert plain.wrapped_by_vllm_gumbel
        assert not hasattr(plain.__wrapped__, "wrapped_by_vllm_gumbel"), "wrapped exactly once"
    plugin.register()
    assert [owner.__dict__[name] for owner, name in owners] == before


SUPPORTED = {
    "use_v2_model_runner": False,
    "speculative_config": None,
    "scheduler_config": SimpleNamespace(async_scheduling=True),
    "reasoning_config": SimpleNamespace(enabled=True),
    "watermark_config": None,
}
DRAFTS = {
    "speculative_config": SimpleNamespace(rejection_sample_method="standard"),
    "scheduler_config": SimpleNamespace(async_scheduling=False),
}
SYNTHETIC = {**DRAFTS, "speculative_config": SimpleNamespace(rejection_sample_method="synthetic")}


@pytest.mark.parametrize(
    ("changed", "said"),
    [
        ({"watermark_config": object()}, "remove the watermark configuration, or start without --sampler"),
        # Watermarking brings runner V2 with it, whatever the variable says.
        ({"watermark_config": object(), "use_v2_model_runner": True}, "remove the watermark configuration"),
        ({"speculative_config": object()}, "together with asynchronous scheduling"),
        (DRAFTS, "together with a thinking budget"),
        (
            {**SYNTHETIC, "reasoning_config": None},
            "rejection_sample_method 'synthetic' says how to reject them: remove",
        ),
    ],
)
def test_unsupported_feature_is_refused_with_the_way_out(changed, said):
    compat.require_supported_features(SimpleNamespace(**SUPPORTED))
    compat.require_supported_features(SimpleNamespace(**{**SUPPORTED, **DRAFTS, "reasoning_config": None}))
    with pytest.raises(compat.UnsupportedError, match=r"^sampler 'gumbel' ") as refused:
        compat.require_supported_features(SimpleNamespace(**{**SUPPORTED, **changed}))
    assert said in str(refused.value)


def test_parameters_are_checked_at_admission():
    """The hook through which the server turns a refusal into a 400."""
    GumbelSampler.validate_params(
        SimpleNamespace(extra_args={"gumbel_salt": 1, "other": []}, seed=2**64 - 1, temperature=1.0)
    )
    for arguments, seed, key in (({"gumbel_salt": 0.5}, 1, "gumbel_salt"), (None, 2**64, "seed")):
        with pytest.raises(ParamsError) as refused:
            GumbelSampler.validate_params(SimpleNamespace(extra_args=arguments, seed=seed, temperature=1.0))
        assert refused.value.key == key
