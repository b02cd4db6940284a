"""What requests with `gumbel_return_info` were drawn with, so that an unseeded one can be drawn again.

Nothing that vLLM hands back to a client has room for it: a sampler returns tokens and logprobs, of which every number
is shown as what it is, and the dictionaries of an output, `kv_transfer_params` say, are filled by the scheduler. So the
worker remembers, and `seeds` asks it, by the name of a method that `collective_rpc` finds on the worker; a function
could only be sent where vLLM may unpickle what it is sent.
"""

import re
from typing import TYPE_CHECKING, Any, NamedTuple

if TYPE_CHECKING:
    from vllm import LLM

#: What the frontend makes of a request's number: the completion's index before it, if there are several, and 8
#: characters behind it.
_INTERNAL = re.compile(r"(?:(\d+)_)?(\d+)(?:-\w{8})?")


class Replay(NamedTuple):
    """What one completion was drawn with; both numbers are such that a request over the OpenAI API may give them.

    Attributes:
        seed: for `SamplingParams.seed`.
        salt: for the key `gumbel_salt`.
    """

    seed: int
    salt: int


def seeds(llm: "LLM") -> dict[str, dict[int, Replay]]:
    """Return what requests that set `gumbel_return_info` were drawn with; the last 10,000 of them.

    Args:
        llm: an engine with the sampler `gumbel` and vLLM's model runner V1.

    Returns:
        `RequestOutput.request_id` -> `CompletionOutput.index` -> seed and salt. With equal logits the same request with
        these gets the same tokens.
    """
    found: dict[str, dict[int, Replay]] = {}
    for told in llm.collective_rpc("gumbel_seeds"):
        for name, (seed, salt) in told.items():
            parts = _INTERNAL.fullmatch(name)
            index, request = (0, name) if parts is None else (int(parts[1] or 0), parts[2])
            found.setdefault(request, {})[index] = Replay(seed, salt)
    return found


def told(runner: Any) -> dict[str, tuple[int, int]]:
    """Return, request -> seed and salt, what the batch of a model runner remembers; runs in the worker."""
    remembered = getattr(getattr(runner, "input_batch", None), "told", {})  # V2 has no such batch, and refuses the key
    return {name: (_as_seed(seed), salt) for name, (seed, salt) in remembered.items()}


def _as_seed(word: int) -> int:
    """Return the seed below 2^63, which is what the OpenAI API takes, with the bits of a 64-bit word.

    Not -1, which vLLM takes for no seed.
    """
    return word - 2**64 if 2**63 <= word < 2**64 - 1 else word
