"""Files of records: what a killed run leaves, what is refused and in which words, and who may read them."""

import json
import math
import os
import resource
import stat

import pytest

from vllm_gumbel.evaluate.records import Record, RecordError, Records, read, write_json

ONE = Record(
    id="a/0", prompt="Café 🦉\x00\n", params={"temperature": 0.5, "seed": 3}, output="fine", output_token_ids=[1, 2]
)
TWO = ONE.model_copy(update={"id": "b/0"})


@pytest.fixture
def path(tmp_path):
    return tmp_path / "records.jsonl"


def write(path, *records):
    with Records(path) as file:
        for record in records:
            file.append(record)


def mode(path):
    return stat.S_IMODE(path.stat().st_mode)


def test_what_is_written_is_read_by_its_owner_only(path):
    before = os.umask(0)
    try:
        write(path, ONE)
    finally:
        os.umask(before)
    write(path, TWO)
    assert list(read(path)) == [ONE, TWO]
    assert mode(path) == 0o600
    assert path.read_text().isascii()


def test_a_file_that_others_could_read_is_closed_to_them(path):
    path.touch(0o644)
    path.chmod(0o644)
    write(path, ONE)
    assert mode(path) == 0o600


@pytest.mark.parametrize("cut", [1, 10, 60])
def test_the_rest_of_a_killed_runs_last_line_is_dropped(path, cut):
    write(path, ONE, TWO)
    whole = path.read_bytes()
    path.write_bytes(whole[:-cut] if cut > 1 else whole[:-2])
    assert list(read(path)) == [ONE]
    write(path, TWO)
    assert list(read(path)) == [ONE, TWO]


@pytest.mark.parametrize(
    ("line", "reason"),
    [
        ("{", "line 2: no JSON"),
        ("[" * 100_000, "line 2: nested too deeply"),
        ("[]", "line 2: the record: "),
        ('{"id": "c"}', "line 2: params: Field required"),
        ('{"id": "c", "params": {}, "outptu": ""}', "line 2: outptu: Extra inputs"),
        ('{"id": "c", "params": {}, "record_version": 2}', "line 2: record_version: "),
        ('{"id": "c", "params": {}, "output_token_ids": [-1]}', "line 2: output_token_ids.0: "),
        ('{"id": "c", "params": {}, "seconds": NaN}', "line 2: seconds: "),
        ('{"id": "a/0", "params": {}}', "line 2: id 'a/0' is that of line 1 too"),
    ],
)
def test_a_broken_line_is_an_error_that_names_it(path, line, reason):
    write(path, ONE)
    path.write_text(f"{path.read_text()}{line}\n{TWO.model_dump_json()}\n")
    with pytest.raises(RecordError) as refused:
        list(read(path))
    assert str(refused.value).startswith(f"{path}, {reason}")


def test_bytes_that_are_no_text_are_named(path):
    write(path, ONE)
    path.write_bytes(path.read_bytes() + b'{"id": "\xff"}\n')
    with pytest.raises(RecordError, match=r"line 2: no text in UTF-8"):
        list(read(path))


def test_files_that_cannot_be_used_are_named(tmp_path):
    with pytest.raises(RecordError, match=r"none.jsonl cannot be read: No such file"):
        list(read(tmp_path / "none.jsonl"))
    with pytest.raises(RecordError, match="cannot be written: Is a directory"):
        Records(tmp_path)
    with pytest.raises(RecordError, match="cannot be written: No such file"):
        write_json(tmp_path / "none" / "result.json", {})


def test_a_line_that_there_is_no_room_for_is_an_error_in_words(path):
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    with Records(path) as file:
        file.append(ONE)
        resource.setrlimit(resource.RLIMIT_FSIZE, (path.stat().st_size + 10, before[1]))
        try:
            with pytest.raises(RecordError, match=r"records.jsonl cannot be written: File too large"):
                file.append(TWO)
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, before)
        assert list(read(path)) == [ONE]
        file.append(TWO)
    assert list(read(path)) == [ONE, TWO]


def test_redaction_leaves_no_text_and_no_token():
    redacted = ONE.redacted().model_dump_json()
    assert "Café" not in redacted
    assert "fine" not in redacted
    assert json.loads(redacted)["output_token_ids"] is None
    assert ONE.redacted().params == ONE.params


def test_results_are_written_whole_without_what_json_lacks(tmp_path):
    path = tmp_path / "result.json"
    path.write_text("old")
    write_json(path, {"a": [1.5, math.nan, (math.inf, "x")], "b": {"c": -math.inf}})
    assert json.loads(path.read_text()) == {"a": [1.5, None, [None, "x"]], "b": {"c": None}}
    assert mode(path) == 0o600
    assert [each.name for each in tmp_path.iterdir()] == ["result.json"]
    with pytest.raises(TypeError):
        write_json(path, {"a": object()})
    assert json.loads(path.read_text())["b"] == {"c": None}
