"""A random LoRA adapter for the default model, and a tiny random model that vLLM serves on a CPU."""

import json
from pathlib import Path

from tests.tiny_llama import END, write_model

RANK = 8

#: Ids of the tiny model.
VOCAB = END + 1


def write_adapter(folder: Path, model: Path) -> Path:
    """Write an adapter, as peft does, that changes what a Llama says, and return its folder."""
    import torch
    from safetensors.torch import save_file

    config = json.loads((model / "config.json").read_text())
    hidden, head = (
        config["hidden_size"],
        config.get("head_dim") or config["hidden_size"] // config["num_attention_heads"],
    )
    sizes = {"q_proj": head * config["num_attention_heads"], "v_proj": head * config["num_key_value_heads"]}
    generator, weights = torch.Generator().manual_seed(0), {}
    for layer in range(config["num_hidden_layers"]):
        for module, size in sizes.items():
            name = f"base_model.model.model.layers.{layer}.self_attn.{module}"
            weights[f"{name}.lora_A.weight"] = torch.randn(RANK, hidden, generator=generator) * 0.05
            weights[f"{name}.lora_B.weight"] = torch.randn(size, RANK, generator=generator) * 0.05
    folder.mkdir(parents=True)
    save_file(weights, folder / "adapter_model.safetensors")
    settings = {"peft_type": "LORA", "r": RANK, "lora_alpha": 2 * RANK, "target_modules": list(sizes)}
    (folder / "adapter_config.json").write_text(json.dumps(settings))
    return folder


def write_small_model(folder: Path, seed: int) -> Path:
    """Write the tiny Llama with heads of a size that vLLM's attention knows, and return its folder.

    It has no ids past those of the tokenizer: stock draws such, ours never does.
    """
    return write_model(folder, seed, head_dim=32, vocab_size=VOCAB)
