"""Which ids of a model are glitch tokens: ids that it should not write, and that hint at something wrong if it does.

After Land and Bartolo 2024, "Fishing for Magikarp: Automatically Detecting Under-trained Tokens in Large Language
Models" (arXiv 2405.05417, section 2), three kinds:

- Unreachable: no text is ever tokenised to it, so it occurs in no training text. Its own text, encoded, gives other
  ids; also after a line break, a bracket and a letter, since some tokenizers begin every text with a space.
- Under-trained: an ordinary id whose embedding looks like those of ids that training never touched.
- Special: a control token within a text. Not those with which texts end, which belong there.

Ids that stand for a part of a UTF-8 sequence are of no kind: they have no text of their own, and are written as pieces
of characters. Nor are ids past the tokenizer's size, which the sampler never draws.

How under-trained ids are told. Training lowers the probability of an unused id after every text, so where input and
output share a matrix (tied embeddings), the rows of all unused ids are drawn to one direction. Known unused ids give
it: rows past the tokenizer's size, bytes that UTF-8 does not use, control tokens. Not all of these are unused, so
those count that agree with the one that agrees with most. The indicator of an id is the cosine distance of its row from
their mean, after the first principal component of the matrix, which is common to all ids, has been taken out. Where
the embeddings are not tied, it is the length of the row: weight decay shrinks one that no text uses. That is looked at
with tied embeddings too, since a row near zero has no direction.

The rule. The paper takes the lowest 2% for candidates and lets the model repeat each of them, for which it must run.
Here only clear outliers count: ids whose indicator is below a quarter of the median over ordinary ids. On
SmolLM2-135M-Instruct, converted from 4-bit weights, these are 32 of 49,152 ids, and the model fails to repeat every
one: in the best of four prompts that ask for it, 31 get less than 1% and one 1.6%, where the median of ordinary ids is
29%. The rule leaves some out: of the next 26, up to 0.45 of the median, 23 get less than 2%, but one gets 21%. No
model with untied embeddings has been tried.
"""

import hashlib
import itertools
import json
import logging
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from vllm_gumbel.cache import default_cache
from vllm_gumbel.metrics.embedding import BLOCK_ROWS, ROUNDS, Embedding, EmbeddingError, parts_of, read_json
from vllm_gumbel.metrics.files import written_whole

logger = logging.getLogger("vllm.gumbel")

#: Raise with any change of the rule, so that no older list is used.
RULE_VERSION = 1

#: An indicator below this share of its median is a clear outlier.
CLEAR = 0.25

#: Fewest known unused ids that must agree on a direction.
FEWEST_REFERENCES = 3

#: So many ids at most are taken for references, and so many ordinary ones to compare their agreement with.
_MOST_REFERENCES, _SAMPLE = 512, 4096

#: Ids are also looked for after these, in tokenizers that begin every text with a space.
_PREFIXES = ("\n", "(", "a")

#: Tokens of the bytes that no UTF-8 text holds, as byte-level tokenizers and byte fallback call them.
_UNUSED_BYTES = frozenset(name for byte in (0xC0, 0xC1, *range(0xF5, 0x100)) for name in (chr(byte), f"<0x{byte:02X}>"))

_CHUNK = 4096


class GlitchError(RuntimeError):
    """A model's glitch tokens cannot be found out; the message says why."""


@dataclass(frozen=True)
class Glitches:
    """The glitch tokens of a model; an id is in one list at most.

    Attributes:
        unreachable: ascending.
        undertrained: ascending.
        special: ascending.
        texts: of every listed id.
        indicators: of every listed id, as a share of the median over ordinary ids; of two the smaller.
        partial: number of ids that are parts of UTF-8 sequences, not listed.
        references: number of known unused ids that gave the direction; 0 if none was used.
        tied: whether input and output share the embedding.
        vocab: rows of the embedding.
        fingerprint: of the model's files and of the rule.
    """

    unreachable: list[int]
    undertrained: list[int]
    special: list[int]
    texts: dict[int, str]
    indicators: dict[int, float]
    partial: int
    references: int
    tied: bool
    vocab: int
    fingerprint: str

    def mask(self, vocab: int) -> npt.NDArray[np.bool_]:
        """Return bool [vocab]: which ids are listed."""
        listed = np.zeros(max(vocab, self.vocab), np.bool_)
        listed[[*self.unreachable, *self.undertrained, *self.special]] = True
        return listed[:vocab]


def find(model_folder: Path, on_progress: Callable[[float], None] = lambda share: None) -> Glitches:
    """Return a model's glitch tokens; from the cache, or found out and cached, which takes seconds.

    Args:
        model_folder: with configuration, weights in safetensors and tokenizer.
        on_progress: called with the share of the work that is done, from 0 to 1.

    Raises:
        GlitchError: the folder lacks one of these, or it cannot be read.
    """
    folder = Path(model_folder)
    if not folder.is_dir():
        raise GlitchError(f"{folder} is no folder")
    fingerprint = _fingerprint(folder)
    cached = default_cache() / f"glitches-{fingerprint}.json"
    found = _load(cached)
    if found is None:
        logger.info("vllm-gumbel: looking for glitch tokens in %s, once", folder)
        try:
            found = _find(folder, fingerprint, on_progress)
        except EmbeddingError as error:
            raise GlitchError(str(error)) from error
        _save(found, cached)
    on_progress(1.0)
    return found


def _find(folder: Path, fingerprint: str, on_progress: Callable[[float], None]) -> Glitches:
    embedding = Embedding(folder)
    tokenizer = _tokenizer(folder)
    tokens = {index: token for token, index in tokenizer.get_vocab().items() if index < embedding.rows}
    size = max(tokens, default=-1) + 1

    passes = ROUNDS + 3 if embedding.tied else 1
    steps = len(range(0, size, _CHUNK)) + passes * len(range(0, embedding.rows, BLOCK_ROWS))
    done = itertools.count(1)

    def tick() -> None:
        on_progress(min(next(done) / steps, 1.0))

    embedding.on_block = tick
    stops = _stop_ids(folder, tokenizer)
    control = {index for index, token in tokenizer.added_tokens_decoder.items() if token.special}
    control = {index for index in control.union(tokenizer.all_special_ids) if index < size}
    texts, reached = _round_trips(tokenizer, sorted(tokens), tick)
    partial = {index for index, text in texts.items() if "\ufffd" in text and index not in reached}
    unreachable = set(range(size)) - reached - partial - control - stops
    ordinary = sorted(reached - control - stops)
    unused = {index for index in partial if tokens[index] in _UNUSED_BYTES}
    unused |= control | set(range(embedding.rows)) - set(tokens)
    indicators, references = _indicators(embedding, ordinary, sorted(unused))

    undertrained = [index for index in ordinary if indicators[index] < CLEAR]
    special = sorted(control - stops)
    listed = [*sorted(unreachable), *undertrained, *special]
    return Glitches(
        unreachable=sorted(unreachable),
        undertrained=undertrained,
        special=special,
        texts={index: texts.get(index, "") for index in listed},
        indicators={index: round(float(indicators[index]), 4) for index in listed},
        partial=len(partial),
        references=references,
        tied=embedding.tied,
        vocab=embedding.rows,
        fingerprint=fingerprint,
    )


def _round_trips(tokenizer: Any, ids: Sequence[int], on_chunk: Callable[[], None]) -> tuple[dict[int, str], set[int]]:
    """Return the texts of some ids, and those ids that some text is tokenised to."""

    def encoded(text: Any) -> Any:
        return tokenizer(text, add_special_tokens=False)["input_ids"]

    def decoded(sequences: list[list[int]]) -> list[str]:
        return tokenizer.batch_decode(sequences, skip_special_tokens=False, clean_up_tokenization_spaces=False)

    texts: dict[int, str] = {}
    reached: set[int] = set()
    for start in range(0, len(ids), _CHUNK):
        chunk = ids[start : start + _CHUNK]
        texts.update(zip(chunk, decoded([[index] for index in chunk]), strict=True))
        back = encoded([texts[index] for index in chunk])
        reached.update(index for index, again in zip(chunk, back, strict=True) if again == [index])
        on_chunk()
    for prefix in _PREFIXES:
        left = [index for index in ids if index not in reached]
        sequences = [[*encoded(prefix), index] for index in left]
        back = encoded(decoded(sequences)) if left else []
        reached.update(index for index, there, again in zip(left, sequences, back, strict=True) if again == there)
    return texts, reached


def _indicators(
    embedding: Embedding, ordinary: Sequence[int], unused: Sequence[int]
) -> tuple[npt.NDArray[np.float64], int]:
    """Return the indicator of every id as a share of its median over ordinary ids, and the number of references."""
    lengths = embedding.lengths()
    median = np.median(lengths[ordinary]) if ordinary else np.nan
    if not 0 < median < np.inf:
        raise GlitchError("the embedding holds no numbers that a model could work with")
    shares = lengths / median
    unused = [index for index in unused if shares[index] >= CLEAR]
    if not embedding.tied or len(unused) < FEWEST_REFERENCES:
        return shares, 0

    component = embedding.first_component()

    def directions(rows: npt.NDArray[np.float32]) -> npt.NDArray[np.float32]:
        """Return rows without the first component, of length 1."""
        rows = rows - np.outer(rows @ component, component)
        return rows / np.maximum(np.linalg.norm(rows, axis=1, keepdims=True), np.float32(1e-30))

    candidates = directions(embedding.take(_spread(unused, _MOST_REFERENCES)))
    agreeing = _agreeing(candidates, directions(embedding.take(_spread(ordinary, _SAMPLE))))
    if len(agreeing) < FEWEST_REFERENCES:
        return shares, 0
    unused_direction = agreeing.mean(axis=0)
    unused_direction /= np.linalg.norm(unused_direction)
    distances = np.concatenate([1 - directions(block) @ unused_direction for block in embedding.blocks()])
    return np.minimum(shares, np.maximum(distances, 0) / np.median(distances[ordinary])), len(agreeing)


def _agreeing(candidates: npt.NDArray[np.float32], sample: npt.NDArray[np.float32]) -> npt.NDArray[np.float32]:
    """Return those candidates that lie as near to the most central one as only clear outliers of the sample do.

    Args:
        candidates: float32 [n, width], n > 0, of length 1.
        sample: float32 [m, width], of length 1; ordinary ids.
    """
    distances = 1 - candidates @ candidates.T
    central = np.argmin(np.median(distances, axis=1))
    return candidates[distances[central] < CLEAR * np.median(1 - sample @ candidates[central])]


def _spread(ids: Sequence[int], most: int) -> list[int]:
    """Return at most so many of the ids, evenly spread."""
    return list(ids[:: max(1, -(-len(ids) // most))])


def _tokenizer(folder: Path) -> Any:
    try:
        from transformers import AutoTokenizer
    except ImportError as error:
        raise GlitchError(f"it needs {error.name}; get it with: pip install 'vllm-gumbel[model]'") from error
    try:
        return AutoTokenizer.from_pretrained(folder, local_files_only=True, trust_remote_code=False)
    except Exception as error:  # whatever a library makes of files that are missing or damaged
        raise GlitchError(f"no tokenizer can be loaded from {folder}: {error}") from error


def _stop_ids(folder: Path, tokenizer: Any) -> set[int]:
    """Return the ids with which a text of this model ends."""
    generation = folder / "generation_config.json"
    parts = parts_of(read_json(folder / "config.json")) + ([read_json(generation)] if generation.exists() else [])
    stops = {tokenizer.eos_token_id}
    for part in parts:
        given = part.get("eos_token_id")
        stops.update(given if isinstance(given, list) else [given])
    return stops - {None}


def _fingerprint(folder: Path) -> str:
    """Return a digest of the names, sizes and times of a model's files and of the version of the rule."""
    digest = hashlib.sha256(f"rule {RULE_VERSION}".encode())
    for file in sorted(folder.iterdir()):
        if file.is_file():
            status = file.stat()
            digest.update(f"\n{file.name} {status.st_size} {status.st_mtime_ns}".encode())
    return digest.hexdigest()[:16]


def _load(path: Path) -> Glitches | None:
    """Return what `_save` wrote; None if it did not, or if the file is damaged."""
    try:
        fields = json.loads(path.read_text())
        for name in ("texts", "indicators"):
            fields[name] = {int(index): value for index, value in fields[name].items()}
        return Glitches(**fields)
    except (FileNotFoundError, NotADirectoryError):
        return None
    except (OSError, ValueError, TypeError, KeyError, AttributeError) as error:
        logger.warning("vllm-gumbel: %s is damaged and made anew: %s", path, error)
        return None


def _save(found: Glitches, path: Path) -> None:
    """Cache a list; where that cannot be, it will be made again."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with written_whole(path) as file:
            file.write(json.dumps(asdict(found)).encode())
    except OSError as error:
        logger.warning("vllm-gumbel: the list of glitch tokens cannot be cached: %s", error)
