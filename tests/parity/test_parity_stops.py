"""What ends a text: at temperature 0 with stock's tokens, text, reason and place."""

GREEDY = {"prompt": "1, 2, 3,", "temperature": 0, "max_tokens": 24}
QUESTION = {"messages": [{"role": "user", "content": "What is the capital of France?"}], "temperature": 0}


def test_stop_strings_end_both_at_one_place(pair):
    """With and without the string itself in the text; a string over several tokens."""
    whole = pair.choice(**GREEDY)
    for words in ("7", ["9, 10", "6, 7"], ", 8"):
        without = pair.choice(**GREEDY, stop=words)
        within = pair.choice(**GREEDY, stop=words, include_stop_str_in_output=True)
        assert without["finish_reason"] == "stop"
        assert without["stop_reason"] in ([words] if isinstance(words, str) else words)
        assert within["text"] == without["text"] + without["stop_reason"]
        assert whole["text"].startswith(within["text"])


def test_stop_token_ids_end_both_at_one_place(pair):
    whole = pair.choice(**GREEDY)["token_ids"]
    wanted = whole[9]
    ended = pair.choice(**GREEDY, stop_token_ids=[wanted])
    assert ended["token_ids"] == whole[: whole.index(wanted) + 1]
    assert ended["stop_reason"] == wanted


def test_end_of_sequence_ends_both_unless_it_is_ignored(pair):
    path = "/v1/chat/completions"
    short = pair.alike(path, **QUESTION, max_tokens=60)
    assert short["choices"][0]["finish_reason"] == "stop"
    long = pair.alike(path, **QUESTION, max_tokens=60, ignore_eos=True)
    assert long["usage"]["completion_tokens"] == 60 > short["usage"]["completion_tokens"]


def test_min_tokens_puts_off_the_end_and_the_stops(pair):
    path = "/v1/chat/completions"
    short = pair.alike(path, **QUESTION, max_tokens=60)["usage"]["completion_tokens"]
    long = pair.alike(path, **QUESTION, max_tokens=60, min_tokens=short + 9)
    assert long["usage"]["completion_tokens"] >= short + 9
    comma = pair.choice(**GREEDY)["token_ids"][2]
    assert len(pair.choice(**GREEDY, stop_token_ids=[comma], min_tokens=7)["token_ids"]) > 7


def test_max_tokens_is_the_length(pair):
    for tokens in (1, 2, 17):
        choice = pair.choice(**{**GREEDY, "max_tokens": tokens})
        assert (len(choice["token_ids"]), choice["finish_reason"]) == (tokens, "length")


def test_repetition_that_is_detected_ends_both_at_one_place(pair):
    body = {"prompt": "1, 2, 1, 2, 1, 2,", "temperature": 0, "max_tokens": 40, "ignore_eos": True}
    whole = pair.choice(**body)
    ended = pair.choice(**body, repetition_detection={"max_pattern_size": 8, "min_pattern_size": 1, "min_count": 4})
    assert len(ended["token_ids"]) < len(whole["token_ids"]) == 40
    assert ended["finish_reason"] == "repetition"


def test_thinking_budget_ends_a_thought(pair):
    """The thought begins in the prompt; when the budget is used up its end is written, whatever the model would say."""
    question, start, end = (tokens_of(pair, text) for text in ("Is 7 a prime number?\n", "<think>", "</think>"))
    body = {"prompt": [*question, *start], "max_tokens": 20, "temperature": 0, "ignore_eos": True}
    free, bound = pair.choice(**body)["token_ids"], pair.choice(**body, thinking_token_budget=6)["token_ids"]
    place = next(i for i, (one, other) in enumerate(zip(free, bound, strict=True)) if one != other)
    assert 6 <= place <= 8, "vLLM's budget is exact to two tokens"
    assert bound[place : place + len(end)] == end
    seeded = {**body, "temperature": 1.0, "seed": 3, "thinking_token_budget": 6}
    assert pair.ours.tokens(**seeded)[place : place + len(end)] == end


def tokens_of(pair, text):
    """Return the tokens of a text."""
    body = {"model": "smollm2", "prompt": text, "add_special_tokens": False}
    return pair.ours.client.post("/tokenize", json=body).json()["tokens"]
