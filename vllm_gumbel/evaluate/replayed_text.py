"""Writes a text again: the model's logits token by token, drawn as a claim says."""

from collections.abc import Iterator, Sequence

from vllm_gumbel.evaluate.likelihood_text import Readable
from vllm_gumbel.evaluate.logits import Network
from vllm_gumbel.evaluate.paired import first_divergence
from vllm_gumbel.evaluate.replayed import drawn, edited
from vllm_gumbel.kernels.contract import NO_TOKEN


def written(text: Readable, network: Network, most: int) -> Iterator[int]:
    """Yield the tokens that a request gets, up to the one that ends it.

    Args:
        text: the request; what its record holds as output is not looked at.
        network: the model.
        most: how many tokens at most; the model's context ends it as well.

    Raises:
        ModelError: the prompt is longer than the context.
    """
    prompt, claim, params = text.tokens.prompt, text.claim, text.record.params
    ends = set(params.get("stop_token_ids") or ())
    if not params.get("ignore_eos"):
        ends |= network.vocabulary.ends
    given = params.get("stop") or []
    stops = [given] if isinstance(given, str) else list(given)
    session = network.session()
    logits = network.next_rows(prompt, session)
    tokens: list[int] = []
    while len(tokens) < most:
        position = len(prompt) + len(tokens) - 1
        token = drawn(edited(logits, claim, prompt, tokens), claim, position, len(tokens))
        if token == NO_TOKEN:
            return
        tokens.append(token)
        yield token
        full = network.context is not None and position + 2 >= network.context
        if token in ends or full or any(stop in network.tokenizer.decode(tokens) for stop in stops):
            return
        (logits,) = session.feed([token], last=1)


def first_difference(first: Sequence[int], second: Sequence[int]) -> int | None:
    """Return the index at which two texts part, None if they are equal."""
    found = first_divergence(first, second, ended_by_length=False)
    return found.equal if found.parted else None
