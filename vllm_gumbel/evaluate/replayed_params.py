"""Which of vLLM's sampling parameters decide over tokens, which do not, and which cannot be replayed."""

import math
from collections.abc import Mapping, Sequence
from typing import Any

from vllm_gumbel.params import PREFIX


class ClaimError(ValueError):
    """A record's parameters cannot be replayed; the message says which and why."""


#: Parameters that `replayed.Claim` reads.
REPLAYED = frozenset(
    {
        "allowed_token_ids",
        "bad_words",
        "frequency_penalty",
        "logit_bias",
        "min_p",
        "min_tokens",
        "presence_penalty",
        "repetition_penalty",
        "seed",
        "stop_token_ids",
        "temperature",
        "top_k",
        "top_p",
    }
)

#: Parameters that say when a text ends or what is shown of it: no token depends on them.
WITHOUT_EFFECT = frozenset(
    {
        "add_special_tokens",
        "detokenize",
        "echo",
        "flat_logprobs",
        "ignore_eos",
        "include_stop_str_in_output",
        "logprobs",
        "max_completion_tokens",
        "max_tokens",
        "model",
        "n",
        "output_kind",
        "prompt_logprobs",
        "return_token_ids",
        "skip_special_tokens",
        "spaces_between_special_tokens",
        "stop",
        "stream",
        "stream_options",
        "top_logprobs",
        "truncate_prompt_tokens",
        "user",
    }
)

#: Parameters that change tokens in a way that is not known here -> why.
REFUSED = {
    "structured_outputs": "a grammar decided which tokens could come",
    "response_format": "a grammar decided which tokens could come",
    "thinking_token_budget": "vLLM forced tokens",
    "trace_decode_token_ids": "vLLM forced tokens",
    "use_beam_search": "beam search draws nothing",
}


def refuse_what_cannot_be_replayed(params: Mapping[str, Any]) -> None:
    """Raise `ClaimError` for a parameter that may decide over tokens and cannot be replayed."""
    for name, value in params.items():
        if name in REPLAYED or name in WITHOUT_EFFECT or name.startswith(PREFIX) or value is None:
            continue
        reason = REFUSED.get(name, "nobody knows here what it does")
        raise ClaimError(f"{name} cannot be replayed: {reason}")


def number(params: Mapping[str, Any], name: str, default: float, least: float, most: float) -> float:
    """Return a parameter, a number from `least` to `most`; raise `ClaimError` for another value."""
    value = params.get(name)
    if value is None:
        return default
    if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
        raise ClaimError(f"{name} must be a number, got {value!r}")
    if not least <= value <= most:
        raise ClaimError(f"{name} must be a number from {least:g} to {most:g}, got {value!r}")
    return float(value)


def whole(params: Mapping[str, Any], name: str, default: int, least: int = 0) -> int:
    """Return a parameter, an integer of at least `least`; raise `ClaimError` for another value."""
    value = params.get(name)
    if value is None:
        return default
    if isinstance(value, bool) or not isinstance(value, int) or value < least:
        raise ClaimError(f"{name} must be an integer of at least {least}, got {value!r}")
    return value


def sequence(params: Mapping[str, Any], name: str) -> Sequence[Any]:
    """Return a parameter, a list, empty if it is not set; raise `ClaimError` for another value."""
    value = params.get(name)
    if value is None:
        return ()
    if not isinstance(value, list | tuple):
        raise ClaimError(f"{name} must be a list, got {value!r}")
    return value
