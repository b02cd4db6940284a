"""`vllm-gumbel compare` from its arguments to its document, against servers that draw by a known law."""

import json
import os
import signal
import stat
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests.openai_server import OpenAIServer, listening
from vllm_gumbel.evaluate import client, comparison_run
from vllm_gumbel.evaluate.compare_command import add_arguments, run
from vllm_gumbel.evaluate.records import read as read_records

ROOT = Path(__file__).resolve().parent.parent


@pytest.fixture
def impatient(monkeypatch):
    """Make a client wait a thousandth of what it would."""
    monkeypatch.setattr(client.Patience, "first_wait", 0.001, raising=False)
    monkeypatch.setattr(client, "LONGEST_WAIT", 0.01)


@pytest.fixture
def prompts(tmp_path):
    """A file of twelve prompts of two tasks, half of them with references."""
    path = tmp_path / "prompts.jsonl"
    lines = [
        {"id": f"p{i}", "task": "ab"[i % 2], "prompt": f"Story {i}", **({"references": ["w1 w2 w3"]} if i % 2 else {})}
        for i in range(12)
    ]
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return path


def parsed(*arguments):
    import argparse

    parser = argparse.ArgumentParser()
    add_arguments(parser)
    return parser.parse_args(list(map(str, arguments)))


def compared(baseline, candidate, out, *more, code=0):
    """Compare two servers, and return the document."""
    arguments = ("--baseline", baseline.url, "--candidate", candidate.url, "--out", out, "--tokens", 24, *more)
    assert run(parsed(*arguments)) == code
    return json.loads((out / "comparison.json").read_text()) if code == 0 else None


@pytest.fixture
def pair():
    """Two servers with the same noise, of which the second draws one word in ten wrong."""
    with listening(OpenAIServer()) as baseline, listening(OpenAIServer(wrong=10)) as candidate:
        yield baseline, candidate


def measures(found, task=None):
    return {row["name"]: row for row in (found["by_task"][task] if task else found["measures"])}


def test_equal_servers_agree_fully_and_the_same_noise_is_asked_of_both(tmp_path, prompts, pair, capsys):
    baseline, _ = pair
    found = compared(baseline, baseline, tmp_path / "out", "--prompts", prompts, "--seeds", 3)
    assert found["coupled"]
    assert (found["prompts"], found["seeds"], found["pairs"], found["asked"]) == (12, 3, 36, 36)
    agreement = found["agreement"]
    assert agreement["tokens"] == agreement["agree"]
    assert agreement["median_divergence"] is None
    assert all(row["difference"] == 0 for row in found["measures"] if row["kind"] == "quality")
    assert measures(found)["bleu"]["value"] == pytest.approx(1)
    assert measures(found)["bleu"]["independent_value"] < 0.5
    asked = [json.dumps(body, sort_keys=True) for body in baseline.bodies]
    assert all(asked.count(body) == 2 for body in asked)
    salts = {body["vllm_xargs"]["gumbel_salt"] for body in baseline.bodies}
    assert len(salts) == 12
    assert {body["seed"] for body in baseline.bodies} == {0, 1, 2}
    assert "equal noise on both sides" in capsys.readouterr().out


def test_figures_are_those_of_the_records(tmp_path, prompts, pair, capsys):
    out = tmp_path / "out"
    found = compared(*pair, out, "--prompts", prompts, "--seeds", 4)
    records = {
        role: {each.id: each for each in read_records(out / f"{role}.jsonl")} for role in ("baseline", "candidate")
    }
    risk = agree = 0
    for name, ours in records["baseline"].items():
        theirs = records["candidate"][name]
        assert ours.params == theirs.params
        same = 0
        for a, b in zip(ours.output_token_ids, theirs.output_token_ids, strict=False):
            risk += 1
            if a != b:
                break
            same += 1
        agree += same
    assert (found["agreement"]["tokens"], found["agreement"]["agree"]) == (risk, agree)
    # One word in ten is wrong: 0.9 at each position, here of about 48 * 8.
    assert found["agreement"]["share"] == pytest.approx(0.9, abs=0.08)
    by_hand = sum(sum(each.logprobs) / len(each.logprobs) for each in records["candidate"].values()) / 48
    rows = measures(found)
    assert rows["mean_logprob"]["candidate"] == pytest.approx(by_hand)
    assert rows["mean_logprob"]["variance_reduction"] > 1.2
    assert found["tokens_for_interval"]["independent"] > 1.2 * found["tokens_for_interval"]["coupled"]
    assert rows["length"]["texts"] == 48
    assert rows["bleu_reference"]["texts"] == 24
    assert "bleu_reference" not in measures(found, "a")
    assert "bleu_reference" in measures(found, "b")
    assert set(found["by_task"]) == {"a", "b"}
    assert rows["bleu"]["kind"] == "divergence"
    assert rows["bleu"]["difference"] is None
    total = sum(len(each.output_token_ids) for each in records["baseline"].values())
    assert found["token_frequencies"]["baseline_total"] == total
    assert sum(share for _, share, _ in found["token_frequencies"]["tokens"]) == pytest.approx(1)
    assert len(found["examples"]) == 6
    assert found["same_machine"]
    assert "one machine" in " ".join(found["notes"])
    printed = capsys.readouterr().out
    assert "NaN" not in (out / "comparison.json").read_text()
    assert f"{found['agreement']['share']:.1%}" in printed.replace("\n", " ")
    for path in out.iterdir():
        assert stat.S_IMODE(path.stat().st_mode) == 0o600, path


def test_sides_without_common_noise_are_reported_without_savings(tmp_path, prompts, pair):
    with listening(OpenAIServer(noise_version=None)) as plain:
        found = compared(pair[0], plain, tmp_path / "out", "--prompts", prompts, "--seeds", 2)
        assert "vllm_xargs" not in plain.bodies[-1]
        assert "top_k" not in plain.bodies[-1]
    assert not found["coupled"]
    assert "not coupled" in found["coupling"]
    assert found["unit"] == "word"
    assert found["candidate"]["sampler"] is None
    assert all(row["variance_reduction"] is None for row in found["measures"])
    assert found["tokens_for_interval"] is None
    assert "no noise in common" in found["words"]


def test_settings_reach_both_sides_or_one(tmp_path, prompts, pair):
    more = ("--set", "top_k=5", "--candidate-set", "gumbel_noise_scale=0.5", "--temperature", 0.7, "--seeds", 1)
    found = compared(*pair, tmp_path / "out", "--prompts", prompts, *more)
    baseline, candidate = (side.bodies[0] for side in pair)
    assert (baseline["top_k"], candidate["top_k"], baseline["temperature"]) == (5, 5, 0.7)
    assert baseline["min_p"] == 0, "said in full, so that no model's defaults differ"
    assert "gumbel_noise_scale" not in baseline["vllm_xargs"]
    assert candidate["vllm_xargs"]["gumbel_noise_scale"] == 0.5
    assert found["candidate"]["settings"] == {"gumbel_noise_scale": 0.5}
    assert measures(found)["mean_logprob"]["variance_reduction"] is None, "one seed says nothing about seeds"


def test_both_sides_are_asked_together_and_first_in_turn(tmp_path, prompts, pair, monkeypatch):
    asked = []
    real = comparison_run.ask

    async def noted(http, endpoint, prompt, *others):
        asked.append((prompt.id, endpoint.url))
        return await real(http, endpoint, prompt, *others)

    monkeypatch.setattr(comparison_run, "ask", noted)
    compared(*pair, tmp_path / "out", "--prompts", prompts, "--seeds", 2, "--concurrency", 1)
    names = [f"p{i}" for i in range(12)] * 2
    assert [name for name, _ in asked] == [name for name in names for _ in range(2)]
    baseline, candidate = (side.url for side in pair)
    assert [url for _, url in asked] == [baseline, candidate, candidate, baseline] * 12
    assert pair[0].most == pair[1].most == 1


def test_concurrency_is_kept(tmp_path, prompts, pair):
    for side in pair:
        side.seconds = 0.01
    compared(*pair, tmp_path / "out", "--prompts", prompts, "--seeds", 2, "--concurrency", 4)
    assert all(2 <= side.most <= 4 for side in pair)


def test_same_command_again_asks_only_what_is_missing(tmp_path, prompts, pair, impatient, capsys):
    baseline, candidate = pair
    candidate.mood = lambda body, before: "503" if body["prompt"] == "Story 3" else "ok"
    out = tmp_path / "out"
    more = ("--prompts", prompts, "--seeds", 2, "--tries", 2)
    compared(*pair, out, *more, code=2)
    assert "texts are missing; the same command again asks for them" in capsys.readouterr().err
    partial = json.loads((out / "comparison.json").read_text())
    assert (partial["pairs"], partial["missing"]) == (22, {"baseline": 0, "candidate": 2})
    candidate.mood = lambda body, before: "ok"
    before = len(baseline.bodies), len(candidate.bodies)
    found = compared(*pair, out, *more)
    assert (len(baseline.bodies), len(candidate.bodies)) == (before[0], before[1] + 2)
    assert (found["pairs"], found["missing"]) == (24, {"baseline": 0, "candidate": 0})
    compared(*pair, out, *more)
    assert len(candidate.bodies) == before[1] + 2


def test_half_a_last_line_is_dropped_and_asked_again_and_a_broken_one_before_is_an_error(
    tmp_path, prompts, pair, capsys
):
    out = tmp_path / "out"
    more = ("--prompts", prompts, "--seeds", 1)
    whole = compared(*pair, out, *more)
    path = out / "candidate.jsonl"
    content = path.read_text()
    path.write_text(content[:-40])
    asked = len(pair[1].bodies)
    again = compared(*pair, out, *more)
    assert len(pair[1].bodies) == asked + 1
    assert again["agreement"] == whole["agreement"]
    path.write_text("{broken\n" + content)
    compared(*pair, out, *more, code=2)
    assert "candidate.jsonl, line 1: no JSON" in capsys.readouterr().err


def test_another_question_in_the_same_folder_is_refused_in_words(tmp_path, prompts, pair, capsys):
    out = tmp_path / "out"
    compared(*pair, out, "--prompts", prompts, "--seeds", 1)
    asked = len(pair[0].bodies)
    compared(*pair, out, "--prompts", prompts, "--seeds", 2, "--set", "top_k=3", code=2)
    said = capsys.readouterr().err
    assert "holds the answers to another question" in said
    assert "seeds was 1 and is 2" in said
    assert "choose another --out" in said
    assert len(pair[0].bodies) == asked


def test_refusals_are_kept_with_the_servers_words_and_not_repeated(tmp_path, prompts, pair, capsys):
    pair[1].mood = lambda body, before: "400" if body["prompt"] == "Story 5" else "ok"
    out = tmp_path / "out"
    found = compared(*pair, out, "--prompts", prompts, "--seeds", 2)
    assert (found["failed"], found["pairs"]) == ({"baseline": 0, "candidate": 2}, 22)
    refused = [[f"p5/{number}", "/v1/completions: 400 Bad Request: told to say 400"] for number in range(2)]
    assert found["failures"]["candidate"] == refused
    assert "0 of the baseline's and 2 of the candidate's failed" in found["words"]
    assert "told to say 400" in capsys.readouterr().out
    asked = len(pair[1].bodies)
    pair[1].mood = lambda body, before: "ok"
    for _ in range(2):
        assert compared(*pair, out, "--prompts", prompts, "--seeds", 2)["failures"]["candidate"] == refused
        assert len(pair[1].bodies) == asked
        records = (out / "candidate.jsonl").read_text().splitlines(keepends=True)
        (out / "candidate.jsonl").write_text("".join(reversed(records)))  # whichever came first
    mended = compared(*pair, out, "--prompts", prompts, "--seeds", 2, "--retry-failed")
    assert len(pair[1].bodies) == asked + 2
    assert mended["failed"] == {"baseline": 0, "candidate": 0}


def test_side_that_refuses_everything_ends_the_run(tmp_path, pair, capsys):
    pair[1].mood = lambda body, before: "400"
    compared(*pair, tmp_path / "out", "--seeds", 1, code=2)
    said = capsys.readouterr().err
    assert "refuses everything" in said
    assert "told to say 400" in said
    assert len(pair[1].bodies) < 2 * comparison_run.MOST_REFUSALS


def test_wrong_key_ends_the_run_at_once(tmp_path, prompts, pair, capsys, monkeypatch):
    monkeypatch.setenv("OPENAI_API_KEY", "sk-wrong")
    pair[0].mood = lambda body, before: "401"
    compared(*pair, tmp_path / "out", "--prompts", prompts, code=2)
    said = capsys.readouterr().err
    assert "OPENAI_API_KEY" in said
    assert "sk-wrong" not in said
    assert "sk-wrong" not in "".join(path.read_text() for path in (tmp_path / "out").iterdir())


def test_server_that_goes_away_and_comes_back(tmp_path, prompts, impatient, capsys, monkeypatch):
    """The run ends in words when a server is gone for long, keeps what came, and goes on when it is back."""
    monkeypatch.setattr(comparison_run, "MOST_FAILURES", 2)
    out, more = tmp_path / "out", ("--prompts", prompts, "--seeds", 2, "--tries", 2, "--concurrency", 2)
    candidate = OpenAIServer()
    with listening(OpenAIServer()) as baseline:
        with listening(candidate) as served:
            port = int(served.url.rpartition(":")[2])
            candidate.mood = lambda body, before: "ok" if len(candidate.bodies) <= 7 else "hang up"
            compared(baseline, candidate, out, *more, code=2)
        assert "the candidate at" in capsys.readouterr().err
        compared(baseline, candidate, out, *more, code=2)
        assert "no connection" in capsys.readouterr().err
        kept = len(list(read_records(out / "candidate.jsonl")))
        assert 0 < kept <= 7
        candidate.mood = lambda body, before: "ok"
        with listening(candidate, port):
            assert compared(baseline, candidate, out, *more)["pairs"] == 24


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGKILL])
def test_interrupted_run_keeps_what_has_come(tmp_path, prompts, pair, number):
    for side in pair:
        side.seconds = 0.05
    out = tmp_path / "out"
    flags = ["--baseline", pair[0].url, "--candidate", pair[1].url, "--out", out]
    flags += ["--prompts", prompts, "--concurrency", 1]
    code = "import sys; from vllm_gumbel.cli import main; sys.exit(main(sys.argv[1:]))"
    command = [sys.executable, "-c", code, "compare", *map(str, flags), "--tokens", "24"]
    process = subprocess.Popen(
        command,
        cwd=ROOT,
        stderr=subprocess.PIPE,
        stdout=subprocess.DEVNULL,
        text=True,
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),  # a shell's background ignores it
    )
    path = out / "candidate.jsonl"
    while process.poll() is None and (not path.exists() or path.read_bytes().count(b"\n") < 3):
        time.sleep(0.01)
    process.send_signal(number)
    said = process.communicate()[1]
    if number != signal.SIGKILL:
        assert process.returncode == 130
        assert f"what has come is kept in {out}" in said
    assert "Traceback" not in said
    kept = len(list(read_records(path)))
    assert 3 <= kept < 48
    asked = len(pair[1].bodies)
    found = compared(*pair, out, "--prompts", prompts, "--concurrency", 16)
    assert found["pairs"] == 48
    assert len(pair[1].bodies) <= asked + 48 - kept


def test_redaction_leaves_statistics_only_and_the_same_command_shows_them(tmp_path, prompts, pair, capsys):
    out = tmp_path / "out"
    kept = compared(*pair, tmp_path / "kept", "--prompts", prompts)
    found = compared(*pair, out, "--prompts", prompts, "--redact")
    assert found["agreement"] == kept["agreement"]
    assert "examples" not in found
    assert all(token is None for token, _, _ in found["token_frequencies"]["tokens"])
    everything = "".join(path.read_text() for path in out.iterdir())
    assert "w1" not in everything
    assert "Story" not in everything
    assert all(each.output is None and each.seconds for each in read_records(out / "baseline.jsonl"))
    asked = len(pair[0].bodies)
    capsys.readouterr()
    assert compared(*pair, out, "--prompts", prompts, "--redact") == found
    shown = capsys.readouterr()
    assert "done before, with --redact" in shown.err
    assert "Mean log-probability" in shown.out
    assert len(pair[0].bodies) == asked


def test_folder_in_use_is_refused(tmp_path, prompts, pair, capsys):
    import fcntl

    out = tmp_path / "out"
    out.mkdir()
    with (out / ".lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        compared(*pair, out, "--prompts", prompts, code=2)
    assert "another process is writing" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (("--baseline", "no/such/folder"), "--baseline: 'no/such/folder' is neither a folder nor an address"),
        (("--candidate", "ftp://a"), "--candidate: 'ftp://a' is no address"),
        (("--set", "seed=3"), "--set: seed is set by compare itself"),
        (("--prompts", "absent.jsonl"), "absent.jsonl cannot be read: No such file or directory"),
        (("--prompts", "x", "--task", "chat"), "--task chooses among the built-in prompts"),
        (("--baseline", "http://127.0.0.1:1", "--tries", "1"), "no connection"),
    ],
)
def test_wrong_usage_is_said_in_words(tmp_path, capsys, arguments, said):
    plain = ("--baseline", "http://127.0.0.1:1", "--candidate", "http://127.0.0.1:1", "--out", tmp_path / "out")
    assert run(parsed(*plain, *arguments)) == 2
    assert said in capsys.readouterr().err


@pytest.mark.parametrize(
    "arguments",
    [("--set", "top_k"), ("--set", "=3"), ("--seeds", "0"), ("--tokens", "-1"), ("--timeout", "nan"), ("--task", "x")],
)
def test_wrong_values_are_refused_by_the_parser(tmp_path, arguments):
    plain = ("--baseline", "http://a:1", "--candidate", "http://a:1", "--out", tmp_path)
    with pytest.raises(SystemExit):
        parsed(*plain, *arguments)


def test_strange_prompts_are_compared(tmp_path, pair):
    path = tmp_path / "strange.jsonl"
    texts = ["🙂", "\x00", "x" * 100_000, "", "\u2028", "<script>alert(1)</script>", "[bold]"]
    path.write_text("".join(json.dumps({"prompt": text}) + "\n" for text in texts))
    found = compared(*pair, tmp_path / "out", "--prompts", path, "--seeds", 2)
    assert found["pairs"] == 14
    kept = {each.id: each.prompt for each in read_records(tmp_path / "out" / "baseline.jsonl")}
    assert [kept[f"{number}/0"] for number in range(1, 8)] == texts
    assert max(len(each["prompt"]) for each in found["examples"]) <= 2000


def test_permissions_of_others_are_none(tmp_path, prompts, pair):
    os.umask(0o000)
    try:
        compared(*pair, tmp_path / "new" / "out", "--prompts", prompts, "--seeds", 1)
    finally:
        os.umask(0o022)
    assert stat.S_IMODE((tmp_path / "new" / "out").stat().st_mode) == 0o700
