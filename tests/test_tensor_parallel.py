"""Two tensor-parallel workers on a CPU: the same tokens as one, the same unseeded seeds, and no more threads than CPUs.

The default model has 9 heads, which two workers cannot share; a small model of 8 heads with random weights serves.
"""

import os

import pytest
import torch

PROMPTS = ["one two three", "The cat sat on the", "Once upon a time there was", "def add(a, b):"]
SETTINGS = [
    {"temperature": 0.0},
    {"temperature": 1.0, "seed": 1},
    {"temperature": 0.8},  # unseeded: all ranks have to draw one seed
    {"temperature": 1.0, "seed": 2, "top_p": 0.9, "top_k": 100},
    {"temperature": 1.0, "seed": 3, "repetition_penalty": 1.2, "logprobs": 2},
]


@pytest.fixture(scope="module")
def small_model(model_path, tmp_path_factory):
    """A Llama of two layers and eight heads with random weights and the default model's tokenizer."""
    from transformers import AutoTokenizer, LlamaConfig, LlamaForCausalLM

    folder = tmp_path_factory.mktemp("model")
    AutoTokenizer.from_pretrained(model_path).save_pretrained(folder)
    config = LlamaConfig(
        architectures=["LlamaForCausalLM"],
        vocab_size=49152,
        hidden_size=256,
        intermediate_size=512,
        num_hidden_layers=2,
        num_attention_heads=8,
        num_key_value_heads=8,
        head_dim=32,
        max_position_embeddings=512,
        tie_word_embeddings=True,
        bos_token_id=1,
        eos_token_id=2,
        initializer_range=0.1,
    )
    torch.manual_seed(0)
    LlamaForCausalLM(config).save_pretrained(folder)
    return folder


def threads_of_drawing(worker):
    """Return (Numba's threads for a draw, the worker's CPUs), in a worker."""
    from vllm_gumbel.kernels import launch_numba

    return launch_numba.threads(), len(os.sched_getaffinity(0))


def outputs(small_model, workers, monkeypatch):
    """Return token ids of every prompt and setting, and the threads of every worker."""
    from vllm import LLM, SamplingParams

    monkeypatch.setenv("VLLM_ALLOW_INSECURE_SERIALIZATION", "1")  # to send `threads_of_drawing` to the workers
    if workers > 1:
        monkeypatch.setenv("VLLM_CPU_OMP_THREADS_BIND", "|".join(map(str, sorted(os.sched_getaffinity(0))[:workers])))
    llm = LLM(
        str(small_model),
        dtype="float32",
        enforce_eager=True,
        max_model_len=256,
        tensor_parallel_size=workers,
        seed=5,
        additional_config={"sampler": "gumbel"},
    )
    try:
        each = [(prompt, SamplingParams(**setting, max_tokens=16)) for prompt in PROMPTS for setting in SETTINGS]
        got = llm.generate([prompt for prompt, _ in each], [params for _, params in each], use_tqdm=False)
        return [list(out.outputs[0].token_ids) for out in got], llm.collective_rpc(threads_of_drawing)
    finally:
        llm.llm_engine.engine_core.shutdown()


@pytest.mark.skipif(len(os.sched_getaffinity(0)) < 2, reason="two workers need two CPUs")
def test_two_workers_draw_as_one(small_model, monkeypatch):
    alone, threads_alone = outputs(small_model, 1, monkeypatch)
    shared, threads_shared = outputs(small_model, 2, monkeypatch)
    assert shared == alone
    assert len({tuple(ids) for ids in alone}) > len(PROMPTS), "settings and prompts matter"
    assert len(threads_shared) == 2
    for threads, cpus in [*threads_alone, *threads_shared]:
        assert 1 <= threads <= cpus
