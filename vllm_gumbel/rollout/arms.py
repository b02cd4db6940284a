"""Which arm draws a request: a stable hash of what identifies it, against the share of requests an arm gets."""

import re
from hashlib import blake2b

#: What the frontend makes of a request's id: the index of the completion before it, if there are several, and 8
#: hexadecimal digits behind it.
_INTERNAL = re.compile(r"(?:\d+_)?(.+?)(?:-[0-9a-f]{8})?", re.DOTALL)


def identity(rollout_key: str | int | None, request_id: str) -> str:
    """Return what a request's arm depends on: its `gumbel_rollout_key`, else its own id as the client knows it.

    The completions of one request have one identity, and so have two requests with one key, a user's say.
    """
    if rollout_key is not None:
        return f"key {rollout_key}"
    found = _INTERNAL.fullmatch(request_id)
    return f"request {found[1] if found else request_id}"


def place(identity: str, purpose: str) -> float:
    """Return a number in [0, 1), the same for equal arguments and as good as independent for different ones.

    An arm that gets the identities below a share keeps all of them when the share grows.

    Args:
        identity: of a request.
        purpose: what is decided, at most 16 bytes; different purposes decide independently.
    """
    digest = blake2b(identity.encode(errors="surrogatepass"), digest_size=8, person=purpose.encode()).digest()
    return float((int.from_bytes(digest, "big") >> 11) / 2**53)
