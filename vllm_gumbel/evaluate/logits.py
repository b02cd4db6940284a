"""A model's logits, by transformers: along a text that exists, or token by token.

A text is fed in pieces with the keys and values of the pieces before it, so that never more than `PIECE` rows of logits
exist at once, whatever the length; logits are handed out as float32, row by row.
"""

import contextlib
import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from vllm_gumbel.evaluate.replayed import Vocabulary

Row = npt.NDArray[np.float32]

#: Tokens that are fed at once.
PIECE = 256

PRECISIONS = ("float32", "bfloat16", "float16")


class ModelError(Exception):
    """A model cannot be loaded, or not be asked this; the message says why."""


class Network:
    """A causal language model with its tokenizer.

    Args:
        folder: of the model.
        precision: in which it computes.

    Attributes:
        folder: as given.
        precision: as given.
        tokenizer: transformers' own.
        own_precision: in which the weights are stored, which a server uses if it is told nothing else.
        context: the longest sequence that it takes; None if it does not say.
        vocabulary: what reading a record takes.

    Raises:
        ModelError: a package is missing, or the folder holds no such model.
    """

    def __init__(self, folder: Path | str, precision: str = "float32") -> None:
        self.folder, self.precision = Path(folder), precision
        try:
            import torch
            from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer
        except ImportError as error:
            raise ModelError(f"it needs {error.name}; get it with: pip install 'vllm-gumbel[model]'") from error
        if not self.folder.is_dir():
            raise ModelError(f"{folder} is not the folder of a model")
        try:
            config: Any = AutoConfig.from_pretrained(self.folder)
            self.tokenizer: Any = AutoTokenizer.from_pretrained(self.folder)
            self._model: Any = AutoModelForCausalLM.from_pretrained(self.folder, dtype=getattr(torch, precision))
        except Exception as error:  # transformers, tokenizers and safetensors raise what they like
            raise ModelError(f"{folder} cannot be loaded: {error}") from error
        self._model.eval()
        text = config.get_text_config()
        self.own_precision = str(getattr(config, "dtype", None) or "float32").removeprefix("torch.")
        self.context: int | None = getattr(text, "max_position_embeddings", None)
        size = int(self._model.get_output_embeddings().weight.shape[0])
        known = max(self.tokenizer.get_vocab().values(), default=size - 1) + 1
        self.vocabulary = Vocabulary(size, min(size, known), self._ends(config), self._tokens_of)

    def rows(self, prompt: Sequence[int], output: Sequence[int]) -> Iterator[Row]:
        """Yield, for every token of `output`, the logits that it was drawn from: float32 [vocab].

        Args:
            prompt: ids before it, at least one.
            output: ids of the text.

        Raises:
            ModelError: the model takes no sequence of that length.
        """
        fed = [*prompt, *output][:-1]
        self._require_room(len(fed))
        first, session = len(prompt) - 1, self.session()
        for start in range(0, len(fed), PIECE):
            piece = fed[start : start + PIECE]
            wanted = start + len(piece) - max(first, start)
            yield from session.feed(piece, last=max(wanted, 0))

    def session(self) -> "Session":
        """Return an empty sequence, to be continued."""
        return Session(self._model)

    def next_rows(self, prompt: Sequence[int], session: "Session") -> Row:
        """Feed a whole prompt, piece by piece, and return the logits after it."""
        self._require_room(len(prompt))
        rows: list[Row] = []
        for start in range(0, len(prompt), PIECE):
            rows = session.feed(prompt[start : start + PIECE], last=1)
        return rows[-1]

    def _require_room(self, length: int) -> None:
        if self.context is not None and length > self.context:
            raise ModelError(f"{length:,} tokens are longer than the model's context of {self.context:,}")

    def _tokens_of(self, text: str) -> list[int]:
        return list(self.tokenizer.encode(text, add_special_tokens=False))

    def _ends(self, config: Any) -> frozenset[int]:
        """Return the ids that end a text: the configuration's, the tokenizer's, those for generation."""
        given = [config.get_text_config().eos_token_id, self.tokenizer.eos_token_id]
        with contextlib.suppress(OSError, ValueError):  # not every model has one
            given.append(json.loads((self.folder / "generation_config.json").read_text()).get("eos_token_id"))
        flat = [each for ids in given for each in (ids if isinstance(ids, list) else [ids])]
        return frozenset(each for each in flat if isinstance(each, int))


class Session:
    """A sequence that is being fed to a model.

    Args:
        model: transformers' own.
    """

    def __init__(self, model: Any) -> None:
        self._model = model
        self._past: Any = None

    def feed(self, ids: Sequence[int], *, last: int) -> list[Row]:
        """Continue the sequence and return the logits after each of the `last` tokens of `ids`."""
        import torch

        with torch.inference_mode():
            answer = self._model(
                torch.tensor([list(ids)]), past_key_values=self._past, use_cache=True, logits_to_keep=max(last, 1)
            )
            self._past = answer.past_key_values
            return list(answer.logits[0].float().numpy()[-last:]) if last else []
