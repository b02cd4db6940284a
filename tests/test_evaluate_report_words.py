"""What a page says in words: every figure is one of the input, rounded, and no verdict is more than was found."""

import itertools
import random
import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests import report_examples as examples
from tests.test_evaluate_report import MAKERS
from vllm_gumbel.evaluate import words
from vllm_gumbel.evaluate.report_command import page_of
from vllm_gumbel.evaluate.report_source import _shape

_FIGURE = re.compile(r"(?<![\w.])[\u2212+]?\d[\d,]*(?:\.\d+)?(?:e\u2212?\d+)?%?")
_CODES = {"version", "exit_code", "look", "noise_version"}


def page(content):
    return page_of(_shape(content).model_validate(content))


def said(content):
    """Return the findings of a page."""
    made = page(content)
    return [made.lead.text, *(finding.text for finding in made.findings)]


def shuffled(content, chance, key=None):
    """Return content with other numbers, and without digits in its texts."""
    if isinstance(content, dict):
        return {re.sub(r"\d", "", k) if key == "settings" else k: shuffled(v, chance, k) for k, v in content.items()}
    if isinstance(content, list):
        return [shuffled(each, chance, key) for each in content]
    if isinstance(content, str):
        return re.sub(r"\d", "", content)
    if isinstance(content, bool) or content is None or key in _CODES:
        return content
    if isinstance(content, int):
        return max(0, round(content * chance.uniform(0.5, 2)))
    return content * chance.uniform(0.5, 1)


def numbers(content):
    """Yield every number of content, and how many there are of whatever there are several of."""
    if isinstance(content, dict | list):
        yield len(content)
        for each in content.values() if isinstance(content, dict) else content:
            yield from numbers(each)
    elif isinstance(content, int | float) and not isinstance(content, bool):
        yield content


def is_of(figure, known):
    """Return whether a figure in words is a known number, rounded to as many digits as are shown."""
    text = figure.replace("\u2212", "-").replace(",", "").rstrip("%")
    mantissa, _, exponent = text.partition("e")
    digits = len(mantissa.partition(".")[2]) - int(exponent or 0)
    factors = (100.0,) if figure.endswith("%") else (1.0, 1e6)
    half = 0.5001 * 10.0**-digits
    return any(abs(abs(float(text)) - abs(each) * factor) <= half for each in known for factor in factors)


@pytest.mark.parametrize("kind", MAKERS)
@pytest.mark.parametrize("seed", range(20))
def test_every_figure_of_the_words_is_of_the_input(kind, seed):
    content = shuffled(MAKERS[kind](), random.Random(seed))
    known = list(numbers(content))
    if kind == "verification":
        totals = content["totals"]
        totals["matched"] = min(totals["matched"], totals["tokens"])
        known.append(totals["matched"] / totals["tokens"])
        known += [sum(r["verdict"] == verdict for r in content["records"]) for verdict in ("matches", "differs")]
    figures = [figure for text in said(content) for figure in _FIGURE.findall(text)]
    assert len(figures) >= (6 if kind in ("comparison", "study") else 3)
    assert [figure for figure in figures if not is_of(figure, known)] == []


def test_a_figure_that_is_not_of_the_input_is_noticed():
    known = [0.945, 2903]
    assert all(is_of(figure, known) for figure in ("94.5%", "0.945", "2,903", "0.94", "\u22120.945"))
    assert not any(is_of(figure, known) for figure in ("94.6%", "0.944", "2,904", "94.5", "9.45e\u22122", "0.0945"))


def lead(content):
    made = page(content)
    return made.lead.text, made.lead.mark


def test_comparison_says_which_measures_differ_and_which_way():
    assert lead(examples.comparison()) == ("Two measures of quality out of 4 differ, one for the worse.", "bad")
    text = " ".join(said(examples.comparison()))
    assert "Mean log-probability a token, nats: 0.079 lower (\u22121.99 against \u22121.91; 95% interval" in text
    assert "Distinct pairs of tokens, share: 0.013 lower, which is worse (0.858 against 0.871; 95% interval" in text
    assert "Time to the last token, s: 0.2 lower, which is better" in text
    assert "loop" not in text


def test_comparison_without_a_difference_says_no_more_than_that():
    measures = [each | {"low": -1.0, "high": 1.0} for each in examples.MEASURES]
    content = examples.comparison(measures=measures)
    assert lead(content) == ("No difference of quality is shown by any of four measures.", "")
    assert any("does not show that both sides are equal" in limit for limit in page(content).limits)


@pytest.mark.parametrize(("better", "mark"), [("higher", "bad"), ("lower", ""), (None, "")])
def test_only_a_worse_candidate_is_marked(better, mark):
    content = examples.comparison(measures=[examples.MEASURES[1] | {"better": better}])
    assert lead(content)[1] == mark


@pytest.mark.parametrize(("low", "shown"), [(1.9, True), (0.9, False), (None, False)])
def test_saving_is_claimed_only_where_it_is_shown(low, shown):
    content = examples.comparison(measures=[examples.MEASURES[0] | {"variance_reduction_low": low}])
    (text,) = (text for text in said(content) if "divides the variance" in text)
    assert ("no saving is shown" in text) is not shown


def test_uncoupled_comparison_claims_no_savings():
    content = examples.comparison(coupled=False, coupling="the candidate has another sampler")
    text = " ".join(said(content))
    assert "The candidate has another sampler." in text
    assert "variance" not in text
    assert "same seeds" not in text


@pytest.mark.parametrize(
    ("verdicts", "words", "mark"),
    [
        (["matches", "matches"], "Two texts: each came from this model with its seed.", "good"),
        (["matches", "differs"], "One text of 2 did not come from this model as claimed.", "bad"),
        (["matches", "undecided"], "One text of 2 came from this model with its seed; the others are not", "unsure"),
        (["undecided"], "No texts of 1 came from this model", "unsure"),
        ([], "There was no record to verify.", "unsure"),
    ],
)
def test_verification_says_what_its_verdicts_say(verdicts, words, mark):
    records = [examples.verified(i, verdict) for i, verdict in enumerate(verdicts)]
    text, given_mark = lead(examples.verification(records=records))
    assert text.startswith(words)
    assert given_mark == mark


def test_verification_names_the_first_texts_that_differ_and_counts_the_others():
    records = [examples.verified(i, "differs", explanation=f"reason {i}") for i in range(7)]
    said = [finding.text for finding in page(examples.verification(records=records)).findings]
    assert [text for text in said if "reason" in text] == [f"{records[i]['id']}: reason {i}." for i in range(5)]
    assert "Two further texts: the table of records says why." in said
    one_more = [finding.text for finding in page(examples.verification(records=records[:5])).findings]
    assert not [text for text in one_more if "further" in text]


@pytest.mark.parametrize(
    ("code", "words", "mark"),
    [
        (0, "All stages are passed.", "good"),
        (1, "A gate failed", "bad"),
        (2, "could not go on", "unsure"),
        (3, "without a decision", "unsure"),
        (130, "interrupted", "unsure"),
        (None, "had not ended", "unsure"),
    ],
)
def test_rollout_says_how_it_ended(code, words, mark):
    text, given_mark = lead(examples.rollout(exit_code=code))
    assert words in text
    assert given_mark == mark


def test_rollout_names_the_gate_that_failed_with_what_it_saw():
    assert any(
        text.startswith("100%, look 1: gumbel repetition failed. 3 of 24,000 tokens")
        for text in said(examples.rollout())
    )


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (None, "\u2013"),
        (0.0, "0"),
        (-0.0789, "\u22120.0789"),
        (12.0, "12"),
        (12.345, "12.3"),
        (999.96, "1,000"),
        (31_200, "31,200"),
        (1e-6, "1e\u22126"),
        (1.5e20, "1.5e20"),
    ],
)
def test_numbers_are_short(value, text):
    assert words.number(value) == text


@given(st.floats(0, 1))
def test_no_share_is_rounded_to_all_or_nothing(share):
    text = words.percent(share)
    if share in (0, 1):
        assert text == f"{100 * share:.0f}%"
    elif 1e-9 < share < 1 - 1e-9:
        assert 0 < float(text[:-1]) < 100
        assert abs(float(text[:-1]) / 100 - share) <= 0.0005


@given(st.text(st.characters(codec=None), max_size=300), st.integers(1, 200))
def test_clean_texts_hold_no_control_and_are_short(text, limit):
    shown = words.clean(text, limit)
    shown.encode()
    assert not re.search("[\x00-\x08\x0b-\x1f\x7f-\x9f]", shown)
    assert len(shown) <= limit + 25
    assert (f"({len(text):,} characters)" in shown) == (len(text) > limit) or "characters)" in text


def test_lists_and_counts_read_like_words():
    assert words.listed(["a"]) == "a"
    assert words.listed(["a", "b", "c"]) == "a, b and c"
    counts = [words.counted(n, "text") for n in (0, 1, 2, 12, 13, 1300)]
    assert counts == ["no texts", "one text", "two texts", "twelve texts", "13 texts", "1,300 texts"]
    assert not list(itertools.filterfalse(str.isprintable, counts))
