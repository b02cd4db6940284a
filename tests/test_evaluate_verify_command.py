"""`vllm-gumbel verify` prints and writes its verdicts, keeps what it has, and refuses in words."""

import json

import pytest

from tests.tiny_llama import write_model, write_text
from vllm_gumbel import cli
from vllm_gumbel.evaluate.logits import Network
from vllm_gumbel.evaluate.records import Record, Records

CLAIM = {"temperature": 0.7, "top_p": 0.95}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return write_model(tmp_path_factory.mktemp("tiny"))


@pytest.fixture(scope="module")
def texts(folder):
    """Texts by name: honest, of another seed, too short, without a seed."""
    network = Network(folder)
    return {
        "honest": write_text(network, 60, **CLAIM, seed=1, name="honest"),
        "other": write_text(network, 60, **CLAIM, seed=2, claim={**CLAIM, "seed": 3}, name="other"),
        "short": write_text(network, 1, **CLAIM, seed=4, name="short"),
        "seedless": Record(id="seedless", params={}, prompt_token_ids=[65], output_token_ids=[66]),
    }


@pytest.fixture
def verify(folder, texts, tmp_path):
    """Return a function that verifies texts by name and returns the exit code."""

    def run(*names, options=()):
        file = tmp_path / "-".join(names)
        with Records(file) as records:
            for name in names:
                records.append(texts[name])
        return cli.main(["verify", str(file), "--model", str(folder), "--tolerance", "0.01", *options])

    return run


@pytest.mark.parametrize(
    ("names", "code"),
    [
        (("honest",), 0),
        (("honest", "short"), 3),
        (("honest", "seedless", "short"), 2),
        (("honest", "other", "seedless"), 1),
    ],
)
def test_exit_code_is_that_of_the_worst_verdict(verify, names, code, capsys):
    assert verify(*names) == code
    printed = capsys.readouterr().out
    words = {"honest": "matches", "other": "differs", "short": "undecided", "seedless": "unreadable"}
    for name in names:
        assert f"{words[name]:10} {name}: " in printed


def test_file_holds_what_was_found_for_its_owner_only(verify, tmp_path):
    out = tmp_path / "found.json"
    assert verify("honest", "other", "seedless", options=["--json", str(out)]) == 1
    assert out.stat().st_mode & 0o777 == 0o600
    found = json.loads(out.read_text())
    assert (found["kind"], found["version"], found["alpha"]) == ("verification", 1, 1e-3)
    honest, other, seedless = found["records"]
    assert [each["verdict"] for each in found["records"]] == ["matches", "differs", "unreadable"]
    assert (honest["tokens"], honest["matched"], len(honest["positions"])) == (60, 60, 60)
    assert set(honest["positions"][0]) == {"token", "text", "match", "margin", "rank", "probability", "kept"}
    assert honest["evidence_for"] > 3 > 0 > other["evidence_for"]
    assert other["evidence_against"] > 3
    assert other["alternatives"][0]["family"] == "seed"
    assert "another seed" in other["explanation"]
    assert seedless["evidence_for"] is None
    totals = found["totals"]
    assert [totals[name] for name in ("records", "matches", "differs", "undecided", "unreadable")] == [3, 1, 1, 0, 1]
    assert totals["chance_of_so_many"] == pytest.approx(1 - 0.999**2)


def test_redacted_output_holds_no_text_and_no_token(verify, tmp_path, texts, capsys, folder):
    out = tmp_path / "found.json"
    verify("honest", "other", options=["--json", str(out), "--redact", "--per-token"])
    found = json.loads(out.read_text())
    for record in found["records"]:
        for position in record["positions"]:
            assert not {"token", "text"} & set(position)
    printed = capsys.readouterr().out
    network = Network(folder)
    for token in set(texts["honest"].output_token_ids):
        text = repr(network.tokenizer.decode([token]))
        assert len(text) < 4 or text not in printed


def test_tokens_are_shown_one_by_one(verify, capsys):
    verify("other", options=["--per-token"])
    lines = capsys.readouterr().out.splitlines()
    assert sum("<- certain" in line for line in lines) == 1
    assert sum(line.split()[:1] == ["59"] for line in lines) == 1


def test_what_stands_before_a_broken_line_is_verified(texts, folder, tmp_path, capsys):
    file = tmp_path / "broken"
    line = json.dumps(texts["honest"].model_dump(exclude_defaults=True))
    file.write_text(f"{line}\nno json\n{line}\n")
    assert cli.main(["verify", str(file), "--model", str(folder)]) == 2
    said = capsys.readouterr()
    assert "matches" in said.out
    assert "line 2" in said.err


def test_a_truncated_last_line_is_left_out(texts, folder, tmp_path):
    file = tmp_path / "truncated"
    line = json.dumps(texts["honest"].model_dump(exclude_defaults=True))
    file.write_text(f"{line}\n{line[:100]}")
    assert cli.main(["verify", str(file), "--model", str(folder)]) == 0


def test_several_files_are_told_apart(texts, folder, tmp_path, capsys):
    for name in ("a", "b"):
        with Records(tmp_path / f"{name}.jsonl") as records:
            records.append(texts["honest"])
    assert cli.main(["verify", *map(str, tmp_path.glob("?.jsonl")), "--model", str(folder)]) == 0
    printed = capsys.readouterr().out
    assert "a: honest" in printed
    assert "b: honest" in printed


def test_calibration_names_a_tolerance(verify, capsys):
    assert verify("honest", options=["--calibrate"]) == 0
    assert "use --tolerance" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("arguments", "reason"),
    [
        (["nowhere.jsonl"], "cannot be read"),
        (["empty"], "the files hold no record"),
        (["one", "--model", "/nonexistent"], "is not the folder of a model"),
        (["one", "--model", "."], "cannot be loaded"),
    ],
)
def test_unusable_files_and_models_are_refused(texts, tmp_path, monkeypatch, arguments, reason, capsys):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "empty").write_text("")
    with Records(tmp_path / "one") as records:
        records.append(texts["honest"])
    assert cli.main(["verify", *arguments]) == 2
    assert reason in capsys.readouterr().err


@pytest.mark.parametrize("option", [["--alpha", "0"], ["--alpha", "1"], ["--tolerance", "0"], ["--precision", "int8"]])
def test_wrong_options_are_wrong_usage(option):
    with pytest.raises(SystemExit, match="2"):
        cli.main(["verify", "file", *option])
