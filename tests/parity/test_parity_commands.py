"""vLLM's commands and modes: a batch from a file, the benchmark of a server, sleep."""

import json
import os
import subprocess

import pytest

from tests.parity.models import write_small_model
from tests.serving import MODEL_FLAGS, ROOT, VLLM

TEMPLATE = "{% for message in messages %}{{ message.content }}{% endfor %}"
ENVIRONMENT = {**os.environ, "PYTHONPATH": str(ROOT)}


def run(*arguments):
    """Run a command of vLLM and return its output; it must end well."""
    command = [str(VLLM), *map(str, arguments)]
    done = subprocess.run(command, cwd=ROOT, env=ENVIRONMENT, capture_output=True, text=True, timeout=600)
    output = done.stdout + done.stderr
    assert done.returncode == 0, output[-4000:]
    return output


def batch(folder, sampler):
    """Return what `vllm run-batch` answers to greedy and seeded chats, and to one that is wrong, by their names."""
    model = folder / "model"
    if not model.exists():
        write_small_model(model, seed=0)
        (folder / "template").write_text(TEMPLATE)
        bodies = {
            "greedy": {"temperature": 0, "max_tokens": 12, "logprobs": True},
            "seeded": {"temperature": 1.0, "seed": 4, "max_tokens": 12},
            "again": {"temperature": 1.0, "seed": 4, "max_tokens": 12},
            "wrong": {"temperature": -1},
        }
        lines = [
            {"custom_id": name, "method": "POST", "url": "/v1/chat/completions", "body": {"model": "tiny", **body}}
            for name, body in bodies.items()
        ]
        messages = [{"role": "user", "content": "Hello"}]
        text = "".join(json.dumps({**each, "body": {**each["body"], "messages": messages}}) + "\n" for each in lines)
        (folder / "in.jsonl").write_text(text)
    files = ("-i", folder / "in.jsonl", "-o", folder / f"{sampler}.jsonl", "--chat-template", folder / "template")
    served = ("--model", model, "--served-model-name", "tiny", "--sampler", sampler, "--max-model-len", "256")
    run("run-batch", *files, *served, *MODEL_FLAGS[:3])
    answers = [json.loads(line) for line in (folder / f"{sampler}.jsonl").read_text().splitlines()]
    return {each["custom_id"]: each["response"] for each in answers}


def test_batch_of_a_file_is_answered_as_by_stock(tmp_path):
    stock, ours = (batch(tmp_path, sampler) for sampler in ("default", "gumbel"))

    def said(answer):
        return answer["body"]["choices"][0]["message"]["content"]

    assert said(ours["greedy"]) == said(stock["greedy"])
    assert said(ours["seeded"]) == said(ours["again"]) != said(ours["greedy"])
    assert {name: each["status_code"] for name, each in ours.items()} == {
        name: each["status_code"] for name, each in stock.items()
    }


def test_benchmark_of_a_server_ends_as_with_stock(pair, model_path, tmp_path):
    """`vllm bench serve`: both answer all of it, with the same greedy texts."""
    reports = []
    for name, server in (("stock", pair.stock), ("ours", pair.ours)):
        asked = ("--dataset-name", "random", "--random-input-len", "20", "--random-output-len", "8")
        where = ("--base-url", server.url, "--model", "smollm2", "--tokenizer", model_path, "--num-prompts", "6")
        kept = ("--save-result", "--save-detailed", "--result-dir", tmp_path, "--result-filename", name)
        run("bench", "serve", *where, *asked, *kept, "--temperature", "0", "--seed", "1", "--ignore-eos")
        reports.append(json.loads((tmp_path / name).read_text()))
    stock, ours = reports
    assert (ours["completed"], ours["total_output_tokens"]) == (6, 6 * 8)
    for what in ("completed", "total_input_tokens", "total_output_tokens", "generated_texts", "errors"):
        assert ours[what] == stock[what], what


@pytest.mark.parametrize("sampler", ["default", "gumbel"])
def test_sleep_is_refused_on_a_cpu_by_vllm_itself(sampler, model_path):
    from vllm.engine.arg_utils import EngineArgs

    asleep = EngineArgs(model=str(model_path), enable_sleep_mode=True, additional_config={"sampler": sampler})
    with pytest.raises(ValueError, match="Sleep mode is not supported on current platform"):
        asleep.create_engine_config()
