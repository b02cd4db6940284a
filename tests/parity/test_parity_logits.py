"""What changes logits before the draw: at temperature 0 the tokens are stock's, and others than without it."""

import pytest

GREEDY = {"prompt": "Red, blue, red, blue, red,", "temperature": 0, "max_tokens": 24, "ignore_eos": True}

PENALTIES = [
    {"presence_penalty": 1.5},
    {"presence_penalty": -2.0},
    {"frequency_penalty": 0.7},
    {"repetition_penalty": 1.3},
    {"repetition_penalty": 0.8, "frequency_penalty": 1.0},
    {"presence_penalty": 0.5, "frequency_penalty": 0.5, "repetition_penalty": 1.1},
]


@pytest.fixture(scope="module")
def plain(pair):
    """Return the tokens of the text that nothing changes."""
    return pair.choice(**GREEDY)["token_ids"]


def test_penalties_change_what_they_change_for_stock(pair, plain):
    texts = [pair.choice(**GREEDY, **penalties)["token_ids"] for penalties in PENALTIES]
    assert sum(text != plain for text in texts) >= 4


def test_bad_words_are_said_by_neither(pair, plain):
    """A word of one token, and one of several, whose beginning stays allowed."""
    for words in ([" blue"], [" blue, red"], [" red", " blue", " green"]):
        choice = pair.choice(**GREEDY, bad_words=words)
        assert choice["token_ids"] != plain
        assert not any(word in choice["text"] for word in words)


def test_logit_bias_moves_both(pair, plain):
    banned = pair.choice(**GREEDY, logit_bias={str(plain[0]): -100})
    assert plain[0] not in banned["token_ids"]
    forced = pair.choice(**GREEDY, logit_bias={"42": 100})
    assert set(forced["token_ids"]) == {42}
    small = pair.choice(**GREEDY, logit_bias={str(token): -1.5 for token in set(plain)})
    assert small["token_ids"] != plain


def test_allowed_token_ids_are_all_that_is_said(pair, plain):
    allowed = sorted({*range(300, 340), *plain[:3]})
    choice = pair.choice(**GREEDY, allowed_token_ids=allowed)
    assert set(choice["token_ids"]) <= set(allowed)
    assert set(pair.ours.tokens(**{**GREEDY, "temperature": 1.5, "seed": 1}, allowed_token_ids=allowed)) <= set(allowed)


def test_all_of_them_at_once(pair, plain):
    body = {"bad_words": [" green"], "logit_bias": {"42": 5.0}, "min_tokens": 20, "stop_token_ids": [plain[3]]}
    choice = pair.choice(**GREEDY, **body, repetition_penalty=1.2, frequency_penalty=0.4)
    assert choice["token_ids"] != plain
