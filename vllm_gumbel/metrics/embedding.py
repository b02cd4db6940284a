"""The input embedding of a model, read from its folder in blocks.

Nothing else of the model is read, and never more than a block is held as float32, so that the largest models pass.
"""

import json
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

#: What the matrix is called in the files of transformers' models: the name before the last, `weight`.
INPUT_NAMES = ("embed_tokens", "wte", "embed_in", "word_embeddings", "tok_embeddings", "embeddings")

#: The same of the matrix that gives the logits; absent if it is the input's.
OUTPUT_NAMES = ("lm_head", "embed_out", "output")

#: Types of safetensors that are numbers as they stand; others are codes of a quantisation.
PLAIN_TYPES = ("F64", "F32", "F16", "BF16")

BLOCK_ROWS = 8192

#: Rounds of subspace iteration, and vectors in it. A round divides the error by the ratio of the first variance to the
#: fifth, which is 13 on SmolLM2; where that is near 1, no component stands out and which one is found hardly matters.
ROUNDS, _VECTORS = 6, 4


class EmbeddingError(RuntimeError):
    """The matrix cannot be read; the message says why."""


class Embedding:
    """The input embedding of a model.

    Args:
        folder: of the model.

    Attributes:
        rows: number of rows, the width of the model's logits.
        width: length of a row.
        tied: whether the same matrix gives the logits.
        on_block: called after each block that was read.

    Raises:
        EmbeddingError: there is no such matrix in safetensors, it is quantised, or a file is damaged.
    """

    def __init__(self, folder: Path, on_block: Callable[[], None] = lambda: None) -> None:
        self.on_block = on_block
        config = read_json(folder / "config.json")
        places = {name: file for file in sorted(folder.glob("*.safetensors")) for name in _names(file)}
        found = []
        for name in _called(places, INPUT_NAMES):
            with _opened(places[name]) as tensors:
                matrix = tensors.get_slice(name)
                if len(matrix.get_shape()) == 2:
                    found.append((matrix.get_shape(), matrix.get_dtype(), name))
        if not found:
            raise EmbeddingError(f"{folder} holds no embedding in safetensors that is called {', '.join(INPUT_NAMES)}")
        # Models that also see or hear have more than one; that of the text has most rows.
        (self.rows, self.width), kind, self._name = max(found)
        if kind not in PLAIN_TYPES:
            raise EmbeddingError(f"the embedding in {folder} is quantised ({kind})")
        self._file = places[self._name]
        said = [part["tie_word_embeddings"] for part in parts_of(config) if "tie_word_embeddings" in part]
        self.tied = bool(said[0]) if said else not _called(places, OUTPUT_NAMES)

    def blocks(self) -> Iterator[npt.NDArray[np.float32]]:
        """Yield the matrix in blocks of rows, float32 [n, width], in order."""
        with _opened(self._file) as tensors:
            matrix = tensors.get_slice(self._name)
            for start in range(0, self.rows, BLOCK_ROWS):
                yield matrix[start : min(start + BLOCK_ROWS, self.rows)].float().numpy()
                self.on_block()

    def take(self, ids: Sequence[int]) -> npt.NDArray[np.float32]:
        """Return some rows, float32 [n, width]."""
        with _opened(self._file) as tensors:
            matrix = tensors.get_slice(self._name)
            taken = [matrix[index : index + 1].float().numpy() for index in ids]
        return np.concatenate([np.zeros((0, self.width), np.float32), *taken])

    def lengths(self) -> npt.NDArray[np.float32]:
        """Return the L2 norm of every row, float32 [rows]."""
        return np.concatenate([np.linalg.norm(block, axis=1) for block in self.blocks()])

    def first_component(self) -> npt.NDArray[np.float32]:
        """Return the direction in which the rows vary most, float32 [width], of length 1.

        Source: subspace iteration, e.g. Halko, Martinsson, Tropp 2011 (arXiv 0909.4061), algorithm 4.4.
        """
        total = np.zeros(self.width)
        for block in self.blocks():
            total += block.sum(axis=0, dtype=np.float64)
        mean = total / self.rows
        basis = np.linalg.qr(np.random.default_rng(0).standard_normal((self.width, _VECTORS))).Q
        for _ in range(ROUNDS):
            before = basis
            product = -np.outer(total, mean @ basis)
            for block in self.blocks():
                product += block.T @ (block @ basis.astype(np.float32))
            basis = np.linalg.qr(product).Q
        _, vectors = np.linalg.eigh(before.T @ product)
        return (product @ vectors[:, -1] / np.linalg.norm(product @ vectors[:, -1])).astype(np.float32)


def read_json(path: Path) -> dict[str, Any]:
    """Return the object that a JSON file holds.

    Raises:
        EmbeddingError: the file cannot be read, or holds something else.
    """
    try:
        content = json.loads(path.read_text())
    except (OSError, ValueError) as error:
        raise EmbeddingError(f"{path} cannot be read: {error}") from error
    if not isinstance(content, dict):
        raise EmbeddingError(f"{path} holds no JSON object")
    return content


def parts_of(config: dict[str, Any]) -> list[dict[str, Any]]:
    """Return a model's configuration and, where it can do more than write, that of its text model."""
    return [config, *(part for part in [config.get("text_config")] if isinstance(part, dict))]


def _called(tensors: Iterable[str], names: Sequence[str]) -> list[str]:
    """Return those tensors that are weights of a part with one of the names."""
    return [tensor for tensor in tensors if tensor.endswith(".weight") and tensor.split(".")[-2] in names]


def _names(file: Path) -> list[str]:
    with _opened(file) as tensors:
        return list(tensors.keys())


@contextmanager
def _opened(file: Path) -> Iterator[Any]:
    """Open a file of tensors, and name it in errors."""
    try:
        from safetensors import SafetensorError, safe_open
    except ImportError as error:
        raise EmbeddingError(f"it needs {error.name}; get it with: pip install 'vllm-gumbel[model]'") from error
    try:
        with safe_open(file, "pt") as tensors:
            yield tensors
    except (OSError, SafetensorError) as error:
        raise EmbeddingError(f"{file} cannot be read: {error}") from error
