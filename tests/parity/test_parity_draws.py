"""What is drawn: greedy tokens are stock's; others follow the same filters with noise of their own, and repeat."""

import math

import pytest

PROMPTS = ["The capital of France is", "Once upon a time", "def add(a, b):", "1, 2, 3,", "Dear diary,"]
DRAWN = {"prompt": "Once upon a time", "max_tokens": 24, "ignore_eos": True, "seed": 7}

#: Draws that a filter leaves no choice, at a temperature at which there would be one.
LONE = [{"top_k": 1}, {"top_p": 1e-9}, {"min_p": 1.0}, {"top_k": 40, "top_p": 1e-9}]


def drawn_places(server, **body):
    """Return, for every token of a text at temperature 1, its logprob and those of the 20 best, descending."""
    answer = server.complete(**{**DRAWN, "temperature": 1.0, "logprobs": 20, **body})
    assert answer.status_code == 200, answer.text
    logprobs = answer.json()["choices"][0]["logprobs"]
    best = [sorted(each.values(), reverse=True)[:20] for each in logprobs["top_logprobs"]]
    return list(zip(logprobs["token_logprobs"], best, strict=True))


def test_greedy_text_is_stocks(pair):
    for prompt in PROMPTS:
        assert len(pair.choice(prompt=prompt, temperature=0, max_tokens=24)["token_ids"]) > 3


@pytest.mark.parametrize("filters", LONE, ids=str)
def test_text_that_a_filter_leaves_no_choice_is_stocks(pair, filters):
    greedy = pair.choice(prompt="Once upon a time", temperature=0, max_tokens=16, ignore_eos=True)
    lone = pair.choice(**{**DRAWN, "temperature": 1.5, "max_tokens": 16, **filters})
    assert lone["token_ids"] == greedy["token_ids"]


def test_temperature_moves_both_from_the_greedy_text_and_more_the_hotter(pair):
    """Mean logprob of a text: near the best at 0.2, far below at 2; for stock as for ours."""
    for server in pair:
        cold, hot = ([own for own, _ in drawn_places(server, temperature=temperature)] for temperature in (0.2, 2.0))
        assert sum(cold) / 24 > sum(hot) / 24 + 2


def test_top_k_holds_for_both(pair):
    for server in pair:
        places = drawn_places(server, top_k=4)
        assert all(own >= best[3] - 1e-4 for own, best in places)
        assert any(own < best[0] - 1e-4 for own, best in places), "the case is hard only if others are drawn"


def test_top_p_holds_for_both(pair):
    for server in pair:
        places = drawn_places(server, top_p=0.6)
        for own, best in places:
            assert sum(math.exp(each) for each in best if each > own + 1e-4) < 0.6
        assert any(own < best[0] - 1e-4 for own, best in places)


def test_min_p_holds_for_both(pair):
    for server in pair:
        places = drawn_places(server, min_p=0.2)
        assert all(own >= best[0] + math.log(0.2) - 1e-4 for own, best in places)
        assert any(own < best[0] - 1e-4 for own, best in places)


def test_seed_repeats_a_text_and_another_seed_does_not(pair):
    """For stock too, whose noise is another one: so no seeded text of ours is stock's."""
    texts = [[server.tokens(**{**DRAWN, "temperature": 1.0, "seed": seed}) for seed in (7, 7, 8)] for server in pair]
    for first, again, other in texts:
        assert first == again
        assert first != other
    assert texts[0][0] != texts[1][0]


def test_completions_of_one_request_are_as_many_and_as_different(pair):
    """n: where nothing is left to draw they are stock's, else they differ, and those of a seed repeat."""
    lone = pair.alike(**{**DRAWN, "temperature": 1.0, "n": 3, "top_k": 1})
    assert [choice["index"] for choice in lone["choices"]] == [0, 1, 2]
    for server in pair:
        first, again = (
            [choice["token_ids"] for choice in server.complete(**DRAWN, temperature=1.0, n=3).json()["choices"]]
            for _ in range(2)
        )
        assert first == again
        assert len({tuple(tokens) for tokens in first}) == 3
    assert "n must be 1 when using greedy sampling" in pair.refused(**{**DRAWN, "temperature": 0, "n": 2})
