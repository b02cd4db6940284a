"""Small models with glitch tokens planted in them, on disk as transformers writes models."""

import json

import numpy as np
import torch
from safetensors.torch import save_file
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

WIDTH = 64
NAME = "model.embed_tokens.weight"

#: One character a byte, as byte-level tokenizers write them; two merges, and a token that no merge makes.
TOKENS = [*sorted(pre_tokenizers.ByteLevel.alphabet()), "th", "the", "zq"]
ID = {token: index for index, token in enumerate(TOKENS)}
END, STOP, HOLE, CONTROL, SIZE, ROWS = 259, 260, 261, 262, 263, 270
SPECIAL = {"<end>": END, "<stop>": STOP, "<control>": CONTROL}

#: Bytes that no UTF-8 text holds, an id without a token, a control token, and rows past the tokenizer.
UNUSED = [*(ID[chr(byte)] for byte in (0xC0, 0xC1, *range(0xF5, 0x100))), HOLE, CONTROL, *range(SIZE, ROWS)]

#: Planted: never trained, by direction; never trained, by length; reachable by no text.
TWIN, ZERO, UNREACHABLE = ID["K"], ID["Q"], ID["zq"]


def matrix(unused=UNUSED):
    """Return rows, float64, of a common direction in any measure, and of one of their own; that of unused ids is one.

    The common direction is what the first component takes out: without that, unused rows do not agree.
    """
    generator = np.random.default_rng(5)
    common, direction, *own = generator.standard_normal((ROWS + 2, WIDTH)) / WIDTH**0.5
    weights = 4 * generator.uniform(-1, 1, (ROWS, 1)) * common + own
    for index in [*unused, TWIN] if unused else []:
        weights[index] += 2 * direction + own[index] / 20 - own[index]
    weights[ZERO] /= 1000
    return weights


def byte_level():
    """Return a byte-level tokenizer of `SIZE` ids, one of which is missing."""
    tokenizer = Tokenizer(models.BPE(vocab=ID | SPECIAL, merges=[("t", "h"), ("th", "e")]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(list(SPECIAL))
    return tokenizer


def write_model(path, weights=None, tokenizer=None, config=(), dtype=torch.bfloat16, name=NAME, **more):
    """Write a model to a new folder; what is not given is planted, tied and byte-level.

    Args:
        path: the folder.
        weights: float [rows, width], of the embedding.
        tokenizer: of the `tokenizers` library.
        config: fields of `config.json`; None takes one out.
        dtype: of the embedding.
        name: of the embedding.
        more: other tensors by name.
    """
    path.mkdir()
    weights = torch.tensor(matrix() if weights is None else weights, dtype=dtype)
    save_file({name: weights, **more}, path / "model.safetensors")
    fields = {"tie_word_embeddings": True, "eos_token_id": END, **dict(config)}
    (path / "config.json").write_text(json.dumps({key: value for key, value in fields.items() if value is not None}))
    (path / "generation_config.json").write_text(json.dumps({"eos_token_id": [END, STOP]}))
    PreTrainedTokenizerFast(tokenizer_object=tokenizer or byte_level()).save_pretrained(path)
    return path
