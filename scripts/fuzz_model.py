"""A model whose logits are a table, written as an ordinary Llama, for tests that need equal logits in any batch.

Every token is its own direction of the hidden space, attention and MLP add nothing, and the last layer holds the
table: the logits after a token are that token's row. Each of them is one product and otherwise zeros, so no order of
summation changes a bit, whatever else is in the batch and however prompts are cut into chunks.
"""

from pathlib import Path

import numpy as np
import numpy.typing as npt

from tests.tiny_llama import END, VOCAB, write_model

#: Ids that the tokenizer knows; the model has more, as real ones do.
USABLE = END + 1
HIDDEN = 320
CHAT_TEMPLATE = "{% for message in messages %}{{ message.role }}: {{ message.content }}\n{% endfor %}"


def table(seed: int) -> npt.NDArray[np.float32]:
    """Return float32 [tokens, ids]: flat and peaked rows, half of them full of ties, and improbable padding."""
    rng = np.random.default_rng(seed)
    rows = rng.normal(size=(VOCAB, VOCAB)) * rng.choice([0.3, 1, 3, 8], (VOCAB, 1))
    rows[::2] = np.round(rows[::2] * 2) / 2
    rows[:, ord("a") : ord("z") + 1] += 2
    rows[:, USABLE:] = -80
    return rows.astype(np.float32)


def write_table_model(folder: Path, seed: int = 0) -> Path:
    """Write the model with a tokenizer of bytes and a chat template; equal seeds give equal tables."""
    import torch
    from transformers import AutoTokenizer, LlamaConfig, LlamaForCausalLM

    write_model(folder)  # for its tokenizer; the network is replaced
    tokenizer = AutoTokenizer.from_pretrained(folder)
    tokenizer.chat_template = CHAT_TEMPLATE
    tokenizer.save_pretrained(folder)
    config = LlamaConfig(
        vocab_size=VOCAB,
        hidden_size=HIDDEN,
        intermediate_size=32,
        num_hidden_layers=1,
        num_attention_heads=HIDDEN // 32,
        head_dim=32,
        max_position_embeddings=1024,
        tie_word_embeddings=False,
        bos_token_id=tokenizer.bos_token_id,
        eos_token_id=END,
    )
    model = LlamaForCausalLM(config)
    with torch.no_grad():
        for name, weight in model.named_parameters():
            if name.endswith(("o_proj.weight", "down_proj.weight")):
                weight.zero_()
        model.model.embed_tokens.weight.copy_(torch.eye(VOCAB, HIDDEN))
        model.lm_head.weight.zero_()
        # The norm before the last layer makes this of a direction of length 1.
        length = 1 / (1 / HIDDEN + config.rms_norm_eps) ** 0.5
        model.lm_head.weight[:, :VOCAB] = torch.from_numpy(table(seed)).T / length
    model.save_pretrained(folder)
    return folder
