"""The state of a rollout in one worker: who gets the gumbel arm, who is drawn in shadow, whether the breaker is open.

Every worker has one, and all of a server decide alike: the arm depends on nothing but the request and on what all were
told. What is set at run time may be kept in a file, so that it outlives the server.
"""

import json
import logging
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from vllm_gumbel.metrics.catalogue import DEFAULT, GUMBEL
from vllm_gumbel.metrics.files import written_whole
from vllm_gumbel.rollout.arms import place
from vllm_gumbel.rollout.breaker import Breaker
from vllm_gumbel.settings import SamplerSettings
from vllm_gumbel.text import shorten

logger = logging.getLogger("vllm.gumbel")

#: What the log says behind the reason why the breaker opened.
HOW_TO_CLOSE = (
    "new requests go to vLLM's own sampler. Find the cause, then close it with `vllm-gumbel rollout close URL`, or "
    "restart the server, without its `rollout_state` file if it has one"
)


class ChangeError(ValueError):
    """A change that cannot be made; the message names the field, the rule and the value."""


class Rollout:
    """The state, and what it decides for a request.

    Args:
        settings: what holds until somebody changes it.

    Attributes:
        fraction: share of the requests without a choice of their own that the gumbel arm gets, in [0, 1].
        shadow: share of the default arm's requests that are drawn in shadow, in [0, 1].
        breaker: while it is open, all new requests go to the default arm.
    """

    def __init__(self, settings: SamplerSettings | None = None) -> None:
        settings = settings or SamplerSettings()
        self.fraction, self.shadow = settings.rollout_fraction, settings.rollout_shadow
        self.breaker = Breaker(settings.breaker_rate)
        self._file = None if settings.rollout_state is None else Path(settings.rollout_state)
        self._listeners: list[Callable[[float, float, bool], None]] = []
        if self._file is not None:
            self._read(self._file)

    def arm(self, identity: str, chosen: str | None = None) -> str:
        """Return the arm of a new request.

        Args:
            identity: of the request (`arms.identity`).
            chosen: its own choice.
        """
        if self.breaker.is_open:
            return DEFAULT
        if chosen is not None:
            return chosen
        return GUMBEL if self.fraction == 1 or place(identity, "arm") < self.fraction else DEFAULT

    def is_shadowed(self, identity: str) -> bool:
        """Return whether a new request of the default arm is drawn in shadow; an open breaker stops that too."""
        return self.shadow > 0 and not self.breaker.is_open and place(identity, "shadow") < self.shadow

    def listen(self, listener: Callable[[float, float, bool], None]) -> None:
        """Call a function with fraction, shadow and whether the breaker is open, now and after every change."""
        self._listeners.append(listener)
        listener(self.fraction, self.shadow, self.breaker.is_open)

    def change(self, change: Mapping[str, Any]) -> None:
        """Change the state.

        Args:
            change: as `checked` takes it.

        Raises:
            ChangeError: it is no such change; nothing was changed.
        """
        wanted = checked(change)
        self.fraction = wanted.get("fraction", self.fraction)
        self.shadow = wanted.get("shadow", self.shadow)
        if wanted.get("breaker") == "close":
            self.breaker.close()
        logger.info("vllm-gumbel: rollout: %s", self.status())
        self._changed()

    def count(self, tokens: int, hard: int, kind: str) -> None:
        """Tell the breaker of drawn tokens of the gumbel arm, so many of them hard anomalies of some kind."""
        if self.breaker.add(tokens, hard, kind):
            logger.error("vllm-gumbel: the breaker opened: %s; %s", self.breaker.reason, HOW_TO_CLOSE)
            self._changed()

    def status(self) -> dict[str, Any]:
        """Return the state as the endpoint shows it."""
        return {
            "fraction": self.fraction,
            "shadow": self.shadow,
            "breaker": {"open": self.breaker.is_open, "reason": self.breaker.reason},
        }

    def _changed(self) -> None:
        for listener in self._listeners:
            listener(self.fraction, self.shadow, self.breaker.is_open)
        if self._file is None:
            return
        try:
            with written_whole(self._file) as file:
                file.write(json.dumps(self.status()).encode())
        except OSError as error:
            logger.warning("vllm-gumbel: the rollout's state cannot be kept in %s: %s", self._file, error)

    def _read(self, file: Path) -> None:
        """Take over the state of an earlier server."""
        try:
            kept = json.loads(file.read_text())
            reason = kept["breaker"]["reason"]
            if not (reason is None or isinstance(reason, str)):
                raise ChangeError(f"breaker.reason must be a text or null, got {reason!r}")
            wanted = checked({"fraction": kept["fraction"], "shadow": kept["shadow"]})
        except FileNotFoundError:
            return
        except (OSError, ValueError, KeyError, TypeError) as error:
            self.fraction = self.shadow = 0.0  # what was set is not known, and this can do no harm
            logger.error(
                "vllm-gumbel: the rollout's state in %s is unreadable, so all requests go to vLLM's own sampler until "
                "it is set again: %r",
                file,
                error,
            )
            return
        self.fraction, self.shadow = wanted["fraction"], wanted["shadow"]
        if reason is not None:
            self.breaker.open(reason)
        logger.info("vllm-gumbel: rollout as %s has it: %s", file, self.status())


def checked(change: object) -> dict[str, Any]:
    """Return a change, validated: any of `fraction` and `shadow`, numbers from 0 to 1, and `breaker`, "close".

    Raises:
        ChangeError: it is anything else.
    """
    if not isinstance(change, Mapping) or not change:
        raise ChangeError(f"a change must be an object with any of fraction, shadow, breaker, got {shorten(change)}")
    for field, value in change.items():
        if field in ("fraction", "shadow"):
            if isinstance(value, bool) or not isinstance(value, int | float) or not 0 <= value <= 1:
                raise ChangeError(f"{field} must be a number from 0 to 1, got {shorten(value)}")
        elif field != "breaker":
            raise ChangeError(f"{shorten(field)} is no field of the rollout (known: fraction, shadow, breaker)")
        elif value != "close":
            raise ChangeError(f"breaker must be 'close', got {shorten(value)}")
    return {field: float(value) if field != "breaker" else value for field, value in change.items()}
