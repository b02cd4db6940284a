"""A text is written again with the same luck, under its own parameters and under others."""

import re

import pytest

from tests.tiny_llama import write_model, write_text
from vllm_gumbel import cli
from vllm_gumbel.evaluate.likelihood_text import readable
from vllm_gumbel.evaluate.logits import Network
from vllm_gumbel.evaluate.records import Record, Records
from vllm_gumbel.evaluate.replayed_text import first_difference, written

PARAMS = {"temperature": 0.7, "top_p": 0.95, "seed": 3}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return write_model(tmp_path_factory.mktemp("tiny"))


@pytest.fixture(scope="module")
def network(folder):
    return Network(folder)


@pytest.fixture
def file(network, tmp_path):
    with Records(tmp_path / "records.jsonl") as records:
        records.append(write_text(network, 40, **PARAMS, name="one"))
        records.append(write_text(network, 40, **{**PARAMS, "seed": 4}, name="two"))
    return tmp_path / "records.jsonl"


def replay(network, record, most=40, **changed):
    params = {**record.params, **changed}
    return list(written(readable(record.model_copy(update={"params": params}), network), network, most))


def test_the_same_parameters_give_the_same_text(network):
    record = write_text(network, 40, **PARAMS)
    assert replay(network, record) == record.output_token_ids


def test_other_parameters_give_the_text_that_they_would_have_given(network):
    record = write_text(network, 40, **PARAMS)
    other = write_text(network, 40, **{**PARAMS, "temperature": 1.2})
    assert replay(network, record, temperature=1.2) == other.output_token_ids != record.output_token_ids


@pytest.mark.parametrize("kind", ["stop_token_ids", "stop"])
def test_texts_end_where_the_request_says(network, kind):
    """Printable ids only, so that every token is a letter."""
    params = {**PARAMS, "allowed_token_ids": list(range(33, 127))}
    whole = replay(network, write_text(network, 40, **params))
    value = [whole[9]] if kind == "stop_token_ids" else [network.tokenizer.decode([whole[9]])]
    assert replay(network, write_text(network, 1, **params), **{kind: value}) == whole[: whole.index(whole[9]) + 1]


def test_texts_end_with_the_models_own_end_unless_that_is_ignored(network):
    record = write_text(network, 1, **PARAMS, logit_bias={"257": 100})
    assert replay(network, record) == [257]
    assert replay(network, record, most=5, ignore_eos=True) == [257] * 5


def test_texts_end_with_the_context(network):
    record = Record(id="r", params=PARAMS, prompt_token_ids=[65] * 595)
    assert len(replay(network, record.model_copy(update={"output_token_ids": [65]}))) == 5


def test_first_difference():
    assert first_difference([1, 2, 3], [1, 2, 3]) is None
    assert first_difference([1, 2, 3], [1, 5, 3]) == 1
    assert first_difference([1, 2], [1, 2, 3]) == 2


def test_command_shows_both_texts_and_where_they_part(file, folder, capsys, network):
    command = ["replay", str(file), "--id", "two", "--set", "temperature=1.2", "--model", str(folder)]
    assert cli.main(command) == 0
    printed = capsys.readouterr().out
    assert "parameters give all of its 40 tokens" in printed
    record = write_text(network, 40, **{**PARAMS, "seed": 4})
    other = write_text(network, 40, **{**PARAMS, "seed": 4, "temperature": 1.2})
    parted = int(re.search(r"the first (\d+) tokens are equal", printed)[1])
    assert parted == first_difference(record.output_token_ids, other.output_token_ids)


def test_command_says_when_the_record_is_not_the_models(folder, tmp_path, capsys, network):
    with Records(tmp_path / "other.jsonl") as records:
        records.append(write_text(network, 60, **PARAMS, claim={**PARAMS, "seed": 77}))
    assert cli.main(["replay", str(tmp_path / "other.jsonl"), "--set", "top_p=0.5", "--model", str(folder)]) == 1
    assert "is no counterfactual" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("arguments", "reason"),
    [
        ([], "holds 2 records: choose one with --id"),
        (["--id", "three"], "there is no record 'three'"),
        (["--id", "one", "--set", "temperature=hot"], "temperature must be a number"),
        (["--id", "one", "--set", "heat=1"], "heat cannot be replayed"),
        (["--id", "one", "--set", "gumbel_noise_scale=2"], "gumbel_noise_scale must be"),
        (["--id", "one", "--model", "/nonexistent"], "is not the folder of a model"),
    ],
)
def test_wrong_usage_is_refused_in_words(file, folder, arguments, reason, capsys):
    model = [] if "--model" in arguments else ["--model", str(folder)]
    assert cli.main(["replay", str(file), *arguments, *model]) == 2
    assert reason in capsys.readouterr().err


def test_a_setting_without_a_value_is_wrong_usage(file, capsys):
    with pytest.raises(SystemExit, match="2"):
        cli.main(["replay", str(file), "--set", "temperature"])
    assert "must be NAME=VALUE" in capsys.readouterr().err
