"""The server's endpoints and how it serves: answers, streams, batches, beams and adapters, as stock's."""

from concurrent.futures import ThreadPoolExecutor

from tests.parity.pair import same
from tests.test_server import LONG_PROMPT

CHAT = [{"role": "user", "content": "What is the capital of France?"}]
GREEDY = {"temperature": 0, "max_tokens": 24}
SEEDED = {"temperature": 1.0, "seed": 11, "max_tokens": 24}


def test_chat_is_stocks(pair):
    answer = pair.alike("/v1/chat/completions", messages=CHAT, **GREEDY)
    assert "Paris" in answer["choices"][0]["message"]["content"]


def test_completions_of_several_prompts_are_stocks(pair):
    """As text and as tokens."""
    answer = pair.alike(prompt=["The sky is", "Grass is", "Snow is"], **GREEDY)
    assert [choice["index"] for choice in answer["choices"]] == [0, 1, 2]
    tokens = pair.alike(prompt=[choice["prompt_token_ids"] for choice in answer["choices"]], **GREEDY)
    assert [each["text"] for each in tokens["choices"]] == [each["text"] for each in answer["choices"]]


def test_responses_are_stocks(pair):
    body = {"input": "What is the capital of France?", "temperature": 0, "max_output_tokens": 24}
    answer = pair.alike("/v1/responses", **body)
    assert "Paris" in answer["output"][-1]["content"][0]["text"]
    stock, ours = pair.events("/v1/responses", **body)
    deltas = [each["delta"] for each in ours if each["type"] == "response.output_text.delta"]
    assert "".join(deltas) == answer["output"][-1]["content"][0]["text"]
    assert {each["type"] for each in ours} == {each["type"] for each in stock}


def test_streams_say_what_whole_answers_say(pair):
    """Greedy as stock's, with its logprobs; seeded as ours without a stream."""
    greedy = {"prompt": "1, 2, 3,", **GREEDY, "return_token_ids": True, "logprobs": 1}
    whole = pair.alike(**greedy)
    for events in pair.events(**greedy, stream_options={"include_usage": True}):
        choices = [event["choices"][0] for event in events if event["choices"]]
        assert [token for choice in choices for token in choice["token_ids"]] == whole["choices"][0]["token_ids"]
        assert "".join(choice["text"] for choice in choices) == whole["choices"][0]["text"]
        values = [value for choice in choices for value in choice["logprobs"]["token_logprobs"]]
        same(ours=values, stock=whole["choices"][0]["logprobs"]["token_logprobs"])
        assert events[-1]["usage"].items() <= whole["usage"].items()
    body = {"messages": CHAT, **SEEDED}
    _, ours = pair.events("/v1/chat/completions", **body)
    text = "".join(event["choices"][0]["delta"].get("content") or "" for event in ours if event["choices"])
    _, whole = pair.post("/v1/chat/completions", body)
    assert text == whole["choices"][0]["message"]["content"]


def test_beams_are_stocks(pair):
    body = {"prompt": "Once upon a time", "use_beam_search": True, "n": 3, "temperature": 0, "max_tokens": 12}
    answer = pair.alike(**body)
    assert len({choice["text"] for choice in answer["choices"]}) == 3
    assert pair.alike(**body, length_penalty=2.0)["choices"]


def test_adapter_speaks_as_for_stock(pair):
    """A random adapter; one kind of request at a time, since on a CPU vLLM 0.32 lets it act on a whole batch."""
    body = {"prompt": "The capital of France is", **GREEDY}
    assert pair.choice(**body)["token_ids"] != pair.choice(**body, model="tuned")["token_ids"]
    drawn = {**body, **SEEDED, "model": "tuned"}
    assert pair.ours.tokens(**drawn) == pair.ours.tokens(**drawn) != pair.ours.tokens(**{**drawn, "model": "smollm2"})


def test_prompt_in_chunks_and_from_the_cache_gives_stocks_text(pair):
    """A prompt of more than three chunks, at once and again, when its prefix is cached."""
    body = {"prompt": LONG_PROMPT, **GREEDY}
    cached = [server.metric("vllm:prefix_cache_hits_total") for server in pair]
    first, again = pair.choice(**body)["token_ids"], pair.choice(**body)["token_ids"]
    assert first == again
    for server, before in zip(pair, cached, strict=True):
        assert server.metric("vllm:prefix_cache_hits_total") > before
    drawn = {**body, **SEEDED}  # which ends the engine of stock
    assert pair.ours.tokens(**drawn) == pair.ours.tokens(**drawn)


def test_preempted_texts_are_stocks(pair):
    """More requests at once than the cache has room for: both preempt, and say the same."""
    bodies = [
        {"prompt": f"{number} bottles", "temperature": 0, "max_tokens": 96, "ignore_eos": True} for number in range(14)
    ]
    texts = []
    for server in pair:
        before = server.metric("vllm:num_preemptions_total")
        with ThreadPoolExecutor(len(bodies)) as pool:
            texts.append(list(pool.map(lambda body, server=server: server.tokens(**body), bodies)))
        assert server.metric("vllm:num_preemptions_total") > before, "the case is only hard if requests are preempted"
    assert texts[0] == texts[1]
