"""`vllm-gumbel compare` of a model that it serves itself with the real server of the other tests."""

import json

import pytest

from tests.serving import MODEL_FLAGS
from vllm_gumbel.cli import main
from vllm_gumbel.evaluate.records import read


@pytest.fixture(scope="module")
def asked(tmp_path_factory):
    """A file with two texts, a chat, and a prompt that no context is long enough for."""
    path = tmp_path_factory.mktemp("prompts") / "prompts.jsonl"
    lines = [
        {"id": "story", "task": "story", "prompt": "Once upon a time 🙂"},
        {"id": "sea", "task": "story", "prompt": "The sea at night"},
        {"id": "chat", "task": "chat", "messages": [{"role": "user", "content": "Name three birds."}]},
        {"id": "long", "task": "story", "prompt": "word " * 3000},
    ]
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return path


def compared(out, *arguments):
    code = main(["compare", "--out", str(out), "--tokens", "24", "--seeds", "2", *map(str, arguments)])
    assert code == 0
    return json.loads((out / "comparison.json").read_text())


def test_folder_and_server_with_one_model_draw_the_same_tokens(server, model_path, asked, tmp_path):
    """In float32 equal prompts, seeds and salts give equal tokens on two servers with other batches and chunks."""
    out = tmp_path / "out"
    sides = ("--baseline", model_path, "--baseline-serve", " ".join(MODEL_FLAGS), "--candidate", server.url)
    found = compared(out, "--prompts", asked, *sides)
    assert found["coupled"]
    assert found["baseline"]["noise_version"] == found["candidate"]["noise_version"] == 1
    assert found["agreement"]["share"] == 1
    assert found["pairs"] == 6
    assert found["failed"] == {"baseline": 2, "candidate": 2}
    assert "maximum context length" in found["failures"]["candidate"][0][1]
    for role in ("baseline", "candidate"):
        for record in read(out / f"{role}.jsonl"):
            if record.error is None:
                assert len(record.logprobs) == len(record.output_token_ids) <= 24
                assert record.prompt_token_ids
                assert record.noise == "gumbel"
                assert 0 < record.first_token_seconds <= record.seconds
    asked_again = compared(out, "--prompts", asked, *sides)
    assert asked_again["agreement"] == found["agreement"]


def test_half_of_the_noise_shows_as_a_higher_log_probability(server, asked, tmp_path):
    sides = ("--baseline", server.url, "--candidate", server.url, "--candidate-set", "gumbel_noise_scale=0.5")
    found = compared(tmp_path / "out", "--task", "story", "--task", "code", *sides)
    assert found["pairs"] == 48
    row = next(row for row in found["measures"] if row["name"] == "mean_logprob")
    assert row["low"] > 0.3
    assert 0.3 < found["agreement"]["share"] < 0.95
