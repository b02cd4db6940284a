"""A tiny random Llama with a tokenizer of bytes, and texts that it is made to write: a model for tests, in seconds."""

from pathlib import Path

import numpy as np

from vllm_gumbel.evaluate.logits import Network
from vllm_gumbel.evaluate.records import Record
from vllm_gumbel.evaluate.replayed import Claim, drawn, edited

#: Ids of the model; the tokenizer knows 258: every byte, a beginning and an end.
VOCAB, BEGIN, END = 300, 256, 257


def write_model(folder: Path, seed: int = 0, **changed) -> Path:
    """Write the model; equal seeds give equal weights. `changed` are fields of its configuration."""
    import torch
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

    vocabulary = {letter: token for token, letter in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))}
    tokenizer = Tokenizer(models.BPE({**vocabulary, "<s>": BEGIN, "</s>": END}, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, bos_token="<s>", eos_token="</s>").save_pretrained(folder)
    torch.manual_seed(seed)
    fields = {
        "vocab_size": VOCAB,
        "hidden_size": 32,
        "intermediate_size": 64,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "max_position_embeddings": 600,
        "bos_token_id": BEGIN,
        "eos_token_id": END,
    }
    model = LlamaForCausalLM(LlamaConfig(**{**fields, **changed}))
    with torch.no_grad():
        model.lm_head.weight *= 12  # peaked like a language model, not flat
        model.lm_head.weight[END] = 0  # no text ends early
    model.save_pretrained(folder)
    return folder


def write_text(
    network: Network,
    tokens: int,
    *,
    claim: dict | None = None,
    disagreement: float = 0.0,
    name: str = "text",
    prompt: tuple[int, ...] = (72, 101, 108, 108, 111),
    rng: np.random.Generator | None = None,
    **params,
) -> Record:
    """Return a record of a text that the model writes under `params`.

    Args:
        network: the model.
        tokens: how many.
        claim: parameters that the record claims instead.
        disagreement: standard deviation of what a server's logits differ by.
        name: id of the record.
        prompt: ids.
        rng: of that difference.
        params: of the request.
    """
    fields = {"id": name, "prompt_token_ids": list(prompt), "noise": "gumbel", "noise_version": 1}
    real = Claim.of(Record(params=params, **fields), network.vocabulary)
    session, output = network.session(), []
    row = network.next_rows(prompt, session)
    for generated in range(tokens):
        noise = rng.normal(scale=disagreement, size=len(row)) if rng is not None else 0
        changed = edited((row + noise).astype(np.float32), real, prompt, output)
        output.append(drawn(changed, real, len(prompt) + generated - 1, generated))
        (row,) = session.feed([output[-1]], last=1)
    return Record(params=params if claim is None else claim, output_token_ids=output, **fields)
