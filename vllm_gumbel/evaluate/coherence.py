"""How much a long text stays with its subject: the likeness of neighbouring windows.

A text is cut into windows of 40 words. Each becomes the direction of the mean of its tokens' vectors, and the measure
is the mean cosine of neighbours. The vectors are those of `wordllama`: a table of 32,000 tokens with 256 numbers,
trained so that means of them are near where texts mean alike, which that package carries inside its wheel; nothing is
downloaded.

What it cannot see: the order of words, logic, truth. Repetition counts as coherence, so it must be read beside the loop
rate and the compression ratio. The table knows English best. Only texts of 60 words or more have it.
"""

import importlib.util
import itertools
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from vllm_gumbel.evaluate.measures import NONE, words

PACKAGE = "wordllama"
HOW = "get it with: pip install 'vllm-gumbel[evaluate]'"
TABLE, TOKENIZER = "weights/l2_supercat_256.safetensors", "tokenizers/l2_supercat_tokenizer_config.json"

NOTE = (
    f"Coherence: the mean cosine of neighbouring windows of 40 words, each the mean of {PACKAGE}'s vectors (256 "
    "numbers a token, from its wheel). It is blind to the order of words, to logic and truth, takes repetition for "
    "coherence, and knows English best; texts of fewer than 60 words have none."
)

WINDOW_WORDS = 40
#: Words that the last window needs to count.
LEAST_WORDS = 20


class CoherenceUnavailable(Exception):  # noqa: N818  (it says what is the case)
    """There is no table of vectors here; the message says what to install."""


def measure() -> Callable[[str], float]:
    """Return the measure: text -> mean cosine of neighbouring windows, NaN for a text of fewer than two.

    Raises:
        CoherenceUnavailable: a package is missing, or carries no table.
    """
    tokenizer, table = _loaded()

    def of(text: str) -> float:
        vectors = [_vector(window, tokenizer, table) for window in windows(text)]
        cosines = [float(a @ b) for a, b in itertools.pairwise(vectors)]
        return float(np.mean(cosines)) if cosines else NONE

    return of


def windows(text: str) -> list[str]:
    """Return the windows of a text, one after the other."""
    found = words(text)
    starts = range(0, len(found), WINDOW_WORDS)
    cut = [found[start : start + WINDOW_WORDS] for start in starts]
    return ["".join(window) for window in cut if len(window) >= LEAST_WORDS]


def _vector(text: str, tokenizer: Any, table: npt.NDArray[np.float32]) -> npt.NDArray[np.float32]:
    """Return the direction of a window's mean vector, float32 [width]; zeros where there is none."""
    ids = tokenizer.encode(text, add_special_tokens=False).ids
    mean = table[ids].mean(axis=0) if ids else np.zeros(table.shape[1], np.float32)
    length = np.linalg.norm(mean)
    return mean / length if length > 0 else mean


@cache
def _loaded() -> tuple[Any, npt.NDArray[np.float32]]:
    """Return tokenizer and table of the package, which is not imported: it would bring what downloads."""
    spec = importlib.util.find_spec(PACKAGE)
    if spec is None or not spec.submodule_search_locations:
        raise CoherenceUnavailable(f"it needs {PACKAGE}; {HOW}")
    folder = Path(next(iter(spec.submodule_search_locations)))
    try:
        from safetensors import SafetensorError
        from safetensors.numpy import load_file
        from tokenizers import Tokenizer
    except ImportError as error:
        raise CoherenceUnavailable(
            f"it needs {error.name}; get it with: pip install 'vllm-gumbel[evaluate]'"
        ) from error
    try:
        (table,) = load_file(folder / TABLE).values()
        tokenizer = Tokenizer.from_file(str(folder / TOKENIZER))
    except (OSError, ValueError, SafetensorError) as error:
        raise CoherenceUnavailable(f"the table of {PACKAGE} cannot be read: {error}") from error
    tokenizer.no_padding()
    tokenizer.no_truncation()
    return tokenizer, table.astype(np.float32)
