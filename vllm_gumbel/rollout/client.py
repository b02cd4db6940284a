"""Reads and changes the rollout of a running server through its endpoint `/gumbel/rollout`."""

import json
import math
from dataclasses import dataclass
from typing import Any

from vllm_gumbel.rollout.web import Answer, TalkError, WebError, ask
from vllm_gumbel.text import shorten

PATH = "/gumbel/rollout"

#: The environment variable that holds the key, at the server and here.
KEY_VARIABLE = "GUMBEL_ADMIN_KEY"

_HINTS = {
    401: f"the server refuses the key: {KEY_VARIABLE} or --key-file must hold that of the server's {KEY_VARIABLE}",
    403: f"the server has no {KEY_VARIABLE} in its environment, so nobody may change it",
    404: "the endpoint is not loaded: name vllm_gumbel_rollout in the server's VLLM_PLUGINS",
}


class ControlError(TalkError):
    """The endpoint cannot be reached or refuses; the message never holds the key."""


@dataclass(frozen=True)
class State:
    """What a server says of its rollout.

    Attributes:
        fraction: share of the requests without a choice of their own that the gumbel arm is to get.
        shadow: share of the default arm's requests that are drawn in shadow.
        breaker_open: whether new requests go to the default arm, whatever the fraction.
        breaker_reason: why; None while it is closed.
        workers: how many answered.
    """

    fraction: float
    shadow: float
    breaker_open: bool
    breaker_reason: str | None
    workers: int

    def __str__(self) -> str:
        """Return it in words."""
        breaker = f"open: {self.breaker_reason}" if self.breaker_open else "closed"
        return f"fraction {self.fraction:g}, shadow {self.shadow:g}, breaker {breaker}, workers {self.workers}"


class Control:
    """The endpoint of one server.

    Args:
        server: its base address.
        key: the administrator's.
        timeout: seconds that an answer may take; a change is answered when it has reached all workers.

    Raises:
        ControlError: the key cannot be sent.
    """

    def __init__(self, server: str, key: str, timeout: float = 30.0) -> None:
        self.address = f"{server}{PATH}"
        self._timeout = timeout
        if not key or not key.isascii() or not key.isprintable() or " " in key:
            raise ControlError(f"the key must be printable ASCII without spaces; is {KEY_VARIABLE} set?")
        self._headers = {"Authorization": f"Bearer {key}", "Content-Type": "application/json"}

    def state(self) -> State:
        """Return the state.

        Raises:
            ControlError: there is no answer, or a refusal.
        """
        return self._ask(None)

    def change(
        self, *, fraction: float | None = None, shadow: float | None = None, close_breaker: bool = False
    ) -> State:
        """Change what is given, and return the state after that reached all workers.

        Raises:
            ControlError: as `state`; what the server has then is not known.
        """
        wanted = {"fraction": fraction, "shadow": shadow, "breaker": "close" if close_breaker else None}
        given = {field: value for field, value in wanted.items() if value is not None}
        return self._ask(json.dumps(given).encode())

    def _ask(self, body: bytes | None) -> State:
        try:
            answer = ask(self.address, headers=self._headers, body=body, timeout=self._timeout)
        except WebError as error:
            raise ControlError(str(error), passing=True) from None
        if answer.status != 200:
            raise ControlError(f"{self.address}: {_refusal(answer)}", passing=answer.status >= 500)
        try:
            return _parsed(answer.content)
        except (TypeError, KeyError, ValueError):
            raise ControlError(
                f"{self.address}: the answer is no state of a rollout: {shorten(answer.content)}"
            ) from None


def _refusal(answer: Answer) -> str:
    """Return in words why the server did not do it."""
    if answer.status in _HINTS:
        return _HINTS[answer.status]
    said = answer.content.get("error") if isinstance(answer.content, dict) else None
    if isinstance(said, str):
        return f"the server answers {answer.status}: {shorten(said)}"
    return f"the server answers {answer.status} {answer.reason}"


def _parsed(content: Any) -> State:
    """Return the state that an answer holds."""
    breaker, workers = content["breaker"], content["workers"]
    shares = [content[name] for name in ("fraction", "shadow")]
    for share in shares:
        if isinstance(share, bool) or not isinstance(share, int | float) or not 0 <= share <= 1 or math.isnan(share):
            raise ValueError(share)
    if not isinstance(breaker["open"], bool) or isinstance(workers, bool) or not isinstance(workers, int):
        raise TypeError(breaker)
    reason = None if breaker["reason"] is None else str(breaker["reason"])
    return State(float(shares[0]), float(shares[1]), breaker["open"], reason, workers)
