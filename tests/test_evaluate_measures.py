"""Measures of texts: by hand where that is possible, else by what they must tell apart."""

import math
import zlib

import pytest

from vllm_gumbel.evaluate import coherence, measures
from vllm_gumbel.evaluate.records import Record

SEA = (
    "The sea was calm and the ship sailed slowly along the coast. Waves broke on the rocks below the lighthouse. "
    "Fishermen pulled their nets out of the salt water and steered their boats back into the harbour. "
)
BANK = (
    "The central bank raised interest rates again in order to bring inflation down. Investors sold shares and bought "
    "government bonds. Economists expect lower growth, more unemployment and smaller profits for many companies. "
)


def record(text, **others):
    return Record(id="a/0", params={}, output=text, **others)


def test_words_keep_the_whole_text_but_for_spaces_at_its_end():
    assert measures.words("  two words\n") == ["  two", " words"]
    assert measures.words(" \n") == []


def test_sequence_measures_by_hand():
    found = measures.of_tokens([1, 2, 1, 2, 1, 2, 1])
    assert found["distinct_1"] == pytest.approx(2 / 7)
    assert found["distinct_2"] == pytest.approx(2 / 6)
    assert found["distinct_3"] == pytest.approx(2 / 5)
    assert found["loop_rate"] == 1, "1, 2 stands there three times"
    assert found["loop_share"] == pytest.approx(1 / 6), "of the six tokens after the first, only the last continues it"
    left = measures.of_tokens([3, 3, 3, 7])
    assert (left["loop_rate"], left["loop_share"]) == (1, 0)
    assert measures.of_tokens([1, 2, 3])["loop_rate"] == 0


def test_measures_of_a_record_by_hand():
    text = "one two one two three"
    given = record(text, output_token_ids=[5, 6, 5, 6], logprobs=[-1.0, -2.0, -3.0, -2.0], seconds=2.0)
    found = measures.of_text(given, "token", lambda text: 0.5)
    assert found["mean_logprob"] == -2
    assert found["length"] == 4
    assert found["tokens_per_second"] == 2
    assert found["coherence"] == 0.5
    assert math.isnan(found["first_token_seconds"])
    assert found["compression"] == pytest.approx(len(text) / len(zlib.compress(text.encode(), 9)))
    assert measures.of_text(given, "word", lambda text: 0.5)["length"] == 5


def test_empty_text_has_a_length_and_nothing_else():
    found = measures.of_text(record("", output_token_ids=[]), "token", lambda text: math.nan)
    assert {name for name, value in found.items() if not math.isnan(value)} == {"length"}
    assert all(math.isnan(value) for value in measures.likeness("", ["a"]).values())
    assert all(math.isnan(value) for value in measures.likeness("a", ["", " "]).values())


def test_likeness_is_one_for_equal_texts_and_small_for_others():
    assert measures.likeness(SEA, [SEA]) == pytest.approx({"bleu": 1, "chrf": 1, "rouge_l": 1})
    other = measures.likeness(SEA, [BANK])
    assert all(value < 0.5 for value in other.values())
    assert measures.likeness(SEA, [BANK, SEA]) == pytest.approx({"bleu": 1, "chrf": 1, "rouge_l": 1})
    assert set(measures.against_references(SEA, [SEA])) == {"bleu_reference", "chrf_reference", "rouge_l_reference"}


def test_rouge_by_hand_in_any_script():
    # Longest common subsequence 3 of 4 and 5 words: F is 2 * 3 / (4 + 5).
    assert measures.likeness("das ist ein Haus", ["das ist kein großes Haus"])["rouge_l"] == pytest.approx(6 / 9)
    assert measures.likeness("дом стоит", ["дом стоит"])["rouge_l"] == 1


@pytest.mark.parametrize("text", ["🙂" * 50, "a\x00b", "\u2028x", "x" * 100_000, "\ud83d\ude42"[:0] + "é"])
def test_strange_texts_are_measured(text):
    found = measures.of_text(record(text, seconds=1.0), "word", coherence.measure())
    assert found["compression"] > 0
    assert measures.likeness(text, [text])["chrf"] > 0.99


def test_coherence_tells_a_text_that_stays_with_its_subject_from_one_that_jumps():
    measure = coherence.measure()
    staying, jumping = SEA * 6, (SEA + BANK) * 3
    assert measure(staying) > measure(jumping) + 0.05
    assert -1 <= measure(jumping) < measure(staying) <= 1
    assert math.isnan(measure("too short"))


def test_windows_are_of_forty_words_and_the_last_has_at_least_twenty():
    assert [len(window.split()) for window in coherence.windows("w " * 99)] == [40, 40]
    assert [len(window.split()) for window in coherence.windows("w " * 100)] == [40, 40, 20]
    assert "".join(coherence.windows(SEA * 2)) == (SEA * 2).rstrip()


def test_missing_package_is_named(monkeypatch):
    monkeypatch.setitem(__import__("sys").modules, "sacrebleu.metrics", None)
    measures._scorers.cache_clear()
    with pytest.raises(measures.MeasureError, match=r"vllm-gumbel\[evaluate\]"):
        measures.check()
    measures._scorers.cache_clear()
    monkeypatch.setattr(coherence, "PACKAGE", "no_such_package")
    coherence._loaded.cache_clear()
    with pytest.raises(coherence.CoherenceUnavailable, match=r"no_such_package.*vllm-gumbel\[evaluate\]"):
        coherence.measure()
    coherence._loaded.cache_clear()
