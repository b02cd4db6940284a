"""Measures of a generated text by itself, of two texts against each other, and of one against references.

Sequences are tokens where the server shows their ids, else words: runs of what is no space, with the space before them.
BLEU and chrF are sacrebleu's, of single texts (effective order), and ROUGE-L is rouge-score's F with words of any
script, in lower case; all between 0 and 1 as ROUGE is. Between two sides they say how alike the texts are, which is no
quality.
"""

import math
import re
import zlib
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any

from vllm_gumbel.evaluate.records import Record
from vllm_gumbel.kernels.loops import continuations

#: Characters of a text that are compared with another; ROUGE-L takes time with the product of both lengths.
COMPARED_CHARACTERS = 8000

_WORD = re.compile(r"\s*\S+")


class MeasureError(Exception):
    """A measure cannot be computed here; the message says what to install."""


@dataclass(frozen=True)
class Measure:
    """One row of the table.

    Attributes:
        name: short.
        title: with the unit.
        kind: `quality` of a text, `divergence` between the sides, or `speed`.
        better: `higher` or `lower` where that is so by itself; a text with a higher log-probability, say, is not
            better.
    """

    name: str
    title: str
    kind: str
    better: str | None = None


MEASURES = (
    Measure("mean_logprob", "Mean log-probability a token, nats", "quality"),
    Measure("length", "Length, {unit}s", "quality"),
    Measure("distinct_1", "Distinct-1: different {unit}s over all", "quality"),
    Measure("distinct_2", "Distinct-2: different pairs over all", "quality"),
    Measure("distinct_3", "Distinct-3: different triples over all", "quality"),
    Measure("compression", "Compression ratio (zlib; higher repeats more)", "quality"),
    Measure("loop_rate", "Texts that loop at any point", "quality", "lower"),
    Measure("loop_share", "{Unit}s that continue a loop", "quality", "lower"),
    Measure("coherence", "Coherence: likeness of neighbouring windows", "quality"),
    Measure("bleu_reference", "BLEU against the references", "quality", "higher"),
    Measure("chrf_reference", "chrF against the references", "quality", "higher"),
    Measure("rouge_l_reference", "ROUGE-L against the references", "quality", "higher"),
    Measure("bleu", "BLEU between the sides (likeness)", "divergence"),
    Measure("chrf", "chrF between the sides (likeness)", "divergence"),
    Measure("rouge_l", "ROUGE-L between the sides (likeness)", "divergence"),
    Measure("first_token_seconds", "Time to the first token, s", "speed", "lower"),
    Measure("seconds", "Time to the last token, s", "speed", "lower"),
    Measure("tokens_per_second", "{Unit}s a second of one request", "speed", "higher"),
)

NOTE = (
    "Between the sides BLEU, chrF and ROUGE-L (0 to 1, of single texts) say how alike the texts are, which is no "
    "quality; against references they are quality. Other measures of texts, but for loops, have no better direction."
)

#: What a measure is where a text has none, such as the log-probability of a text without tokens.
NONE = math.nan


def words(text: str) -> list[str]:
    """Return the words of a text, each with the space before it."""
    return _WORD.findall(text)


def of_tokens(tokens: Sequence[int]) -> dict[str, float]:
    """Return diversity and loops of a sequence.

    Returns:
        distinct_1 to distinct_3, different n-grams over all; loop_rate, 1 if the text ends, at any point of its
        making, in a loop of three copies or more, else 0; loop_share, the share of tokens that continue such a loop.
    """
    found = {f"distinct_{n}": _distinct(tokens, n) for n in (1, 2, 3)}
    looping = [continuations(tokens[:end]) for end in range(1, len(tokens) + 1)]
    found["loop_rate"] = float(any(looping)) if tokens else NONE
    continued = sum(token in each for each, token in zip(looping, tokens[1:], strict=False))
    found["loop_share"] = continued / (len(tokens) - 1) if len(tokens) > 1 else NONE
    return found


def of_text(record: Record, unit: str, coherence: Callable[[str], float]) -> dict[str, float]:
    """Return every measure of a record's text by itself; `NONE` where there is nothing to measure.

    Args:
        record: with a text.
        unit: of its sequence: `token` or `word`.
        coherence: text -> likeness of its neighbouring windows.
    """
    text = record.output or ""
    sequence = sequence_of(record, unit)
    numbers: dict[Hashable, int] = {}
    tokens = [numbers.setdefault(each, len(numbers)) for each in sequence]
    seconds, first = record.seconds or NONE, record.first_token_seconds
    return {
        "mean_logprob": math.fsum(record.logprobs) / len(record.logprobs) if record.logprobs else NONE,
        "length": float(len(tokens)),
        **of_tokens(tokens),
        "compression": _compression(text),
        "coherence": coherence(text),
        "first_token_seconds": NONE if first is None else first,
        "seconds": seconds,
        "tokens_per_second": len(tokens) / seconds,
    }


def sequence_of(record: Record, unit: str) -> Sequence[Hashable]:
    """Return the tokens of a record's text, or its words."""
    return (record.output_token_ids or []) if unit == "token" else words(record.output or "")


def likeness(text: str, others: Sequence[str]) -> dict[str, float]:
    """Return how alike a text is to the likest of others: BLEU, chrF and ROUGE-L, from 0 to 1; empty ones have none."""
    text, others = text[:COMPARED_CHARACTERS], [other[:COMPARED_CHARACTERS] for other in others]
    others = [other for other in others if other.strip()]
    if not text.strip() or not others:
        return dict.fromkeys(("bleu", "chrf", "rouge_l"), NONE)
    bleu, chrf, rouge = _scorers()
    return {
        "bleu": bleu.sentence_score(text, others).score / 100,
        "chrf": chrf.sentence_score(text, others).score / 100,
        "rouge_l": max(rouge.score(other, text)["rougeL"].fmeasure for other in others),
    }


def against_references(text: str, references: Sequence[str]) -> dict[str, float]:
    """Return the same under the names of the measures against references."""
    return {f"{name}_reference": value for name, value in likeness(text, references).items()}


def check() -> None:
    """Raise `MeasureError` where a package is missing, before anything is asked."""
    _scorers()


def titles(unit: str) -> Mapping[str, Measure]:
    """Return the measures by name, with the unit in their titles."""
    return {
        each.name: Measure(each.name, each.title.format(unit=unit, Unit=unit.capitalize()), each.kind, each.better)
        for each in MEASURES
    }


def _distinct(tokens: Sequence[int], n: int) -> float:
    count = len(tokens) - n + 1
    return len(set(zip(*(tokens[i:] for i in range(n)), strict=False))) / count if count > 0 else NONE


def _compression(text: str) -> float:
    content = text.encode()
    return len(content) / len(zlib.compress(content, 9)) if content else NONE


class _AnyScript:
    """Words of any script in lower case; rouge-score's own tokenizer drops all but a to z."""

    def tokenize(self, text: str) -> list[str]:
        """Return the words."""
        return re.findall(r"\w+", text.lower())


@cache
def _scorers() -> tuple[Any, Any, Any]:
    """Return what computes BLEU, chrF and ROUGE-L.

    Raises:
        MeasureError: a package is missing.
    """
    try:
        from rouge_score import rouge_scorer
        from sacrebleu.metrics import BLEU, CHRF
    except ImportError as error:
        raise MeasureError(f"it needs {error.name}; get it with: pip install 'vllm-gumbel[evaluate]'") from error
    return BLEU(effective_order=True), CHRF(), rouge_scorer.RougeScorer(["rougeL"], tokenizer=_AnyScript())
