"""`vllm serve` refuses what it cannot serve: in words, before an engine is started, and leaves nothing running."""

import os
import subprocess

import pytest

from tests.serving import MODEL_FLAGS, ROOT, VLLM, free_port, stop


def refused(model, *flags):
    """Return the output of `vllm serve` that ends by itself with an error, and check that its group is empty then."""
    command = [str(VLLM), "serve", str(model), "--port", str(free_port()), *MODEL_FLAGS, *flags]
    process = subprocess.Popen(
        command,
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        text=True,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        start_new_session=True,
    )
    try:
        output, _ = process.communicate(timeout=300)
        assert process.returncode not in (0, None), output
        with pytest.raises(ProcessLookupError):
            os.killpg(process.pid, 0)
    finally:
        stop(process)
    assert "EngineCore" not in output, "no engine was started"
    return output


def test_unknown_sampler_is_refused_with_the_known_names(model_path):
    output = refused(model_path, "--sampler", "gumble")
    assert "argument --sampler: unknown sampler 'gumble'; known: default, gumbel, or module:Class" in output
    assert "Traceback" not in output


def test_what_the_sampler_does_not_serve_is_refused_before_an_engine_starts(model_path):
    """Drafts together with a thinking budget: a configuration that vLLM itself accepts."""
    speculation = '{"method": "ngram", "num_speculative_tokens": 2, "prompt_lookup_max": 3}'
    flags = ("--speculative-config", speculation, "--reasoning-parser", "qwen3")
    output = refused(model_path, "--sampler", "gumbel", *flags)
    assert "sampler 'gumbel' does not verify draft tokens together with a thinking budget: remove" in output
