"""The stages of a rollout, and how shares and durations are written on a command line."""

import re
from dataclasses import dataclass

from vllm_gumbel.metrics.catalogue import GUMBEL, SHADOW

#: Seconds of each unit of a duration.
UNITS = {"h": 3600.0, "m": 60.0, "s": 1.0}
LONGEST_SECONDS = 604_800

_NUMBER = r"\d+(?:\.\d+)?"


class StageError(ValueError):
    """A text is no share, duration or list of stages; the message says why."""


@dataclass(frozen=True)
class Stage:
    """What a server is set to for a while.

    Attributes:
        fraction: share of the requests that the gumbel arm gets, in [0, 1].
        shadow: share of the others that are drawn in shadow, in [0, 1].
    """

    fraction: float
    shadow: float = 0.0

    @property
    def name(self) -> str:
        """What it is called in tables."""
        return f"{100 * self.fraction:g}%{' with shadow' if self.shadow else ''}"

    @property
    def arms(self) -> tuple[str, ...]:
        """The arms that are judged: those in which something of ours draws."""
        return (GUMBEL,) * (self.fraction > 0) + (SHADOW,) * (self.shadow > 0 and self.fraction < 1)


#: What a server is set to while nothing of ours draws.
NOTHING = Stage(0.0)


def parse_fraction(text: str) -> float:
    """Return a share that is written as a number from 0 to 1, or in percent: 0.05 or 5%.

    Raises:
        StageError: it is no such share.
    """
    percent = text.strip().endswith("%")
    number = text.strip().removesuffix("%").strip()
    if not re.fullmatch(_NUMBER, number, re.ASCII):
        raise StageError(f"{text!r} is no share: a number from 0 to 1, or a percentage like 5%")
    share = float(number) / 100 if percent else float(number)
    if share > 1:
        raise StageError(f"a share must be from 0 to 1 or, with a percent sign, from 0% to 100%, got {text!r}")
    return share


def parse_stages(text: str) -> tuple[Stage, ...]:
    """Return the stages of a list like `0:shadow,1,5,25,50,100`: percentages, each above the one before.

    Raises:
        StageError: the list or one of its stages is none; the message says which and why.
    """
    stages: list[Stage] = []
    for entry in text.split(","):
        number, _, word = entry.strip().partition(":")
        if not number:
            raise StageError(f"{text!r} has an empty stage; stages are percentages like 0:shadow,1,5,25,50,100")
        if not re.fullmatch(_NUMBER, number, re.ASCII) or float(number) > 100:
            raise StageError(f"stage {entry.strip()!r}: {number!r} is no percentage from 0 to 100")
        if word != "shadow" and ":" in entry:
            raise StageError(f"stage {entry.strip()!r}: only `shadow` may follow the colon, got {word!r}")
        stage = Stage(float(number) / 100, 1.0 if word else 0.0)
        if not stage.arms:
            raise StageError(f"stage {entry.strip()!r}: nothing of ours would draw, so nothing can be judged")
        if stages and stage.fraction <= stages[-1].fraction:
            raise StageError(f"stage {entry.strip()!r} is not above {stages[-1].name}, the one before it")
        stages.append(stage)
    return tuple(stages)


def parse_duration(text: str) -> float:
    """Return the seconds of a duration like `10m`, `90s`, `1h` or `1h30m`.

    Raises:
        StageError: it is no duration, 0, or more than a week.
    """
    parts = re.fullmatch(rf"(?:({_NUMBER})h)?(?:({_NUMBER})m)?(?:({_NUMBER})s)?", text.strip(), re.ASCII)
    if parts is None or not text.strip():
        raise StageError(f"{text!r} is no duration: numbers with units, like 10m, 90s or 1h30m")
    seconds = sum(float(number) * unit for number, unit in zip(parts.groups(), UNITS.values(), strict=True) if number)
    if not 0 < seconds <= LONGEST_SECONDS:
        raise StageError(f"a duration must be above 0 and at most a week, got {text!r}")
    return seconds


def spoken(seconds: float) -> str:
    """Return a duration as `parse_duration` takes it, to a tenth of a second."""
    hours, rest = divmod(round(seconds, 1), 3600)
    minutes, rest = divmod(rest, 60)
    parts = [f"{value:g}{unit}" for value, unit in ((hours, "h"), (minutes, "m"), (round(rest, 1), "s")) if value]
    return "".join(parts) or "0s"
