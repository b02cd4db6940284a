"""Scales of plots: from values to places, and the values that deserve a tick."""

import math
from dataclasses import dataclass

#: Steps between ticks, of a power of ten.
_STEPS = (1, 2, 5, 10)


@dataclass(frozen=True)
class Scale:
    """A straight or logarithmic scale.

    Attributes:
        low, high: values at its ends.
        start, end: places of these, in units of the drawing.
        logarithmic: whether equal ratios are equally long; then low must be above 0.
    """

    low: float
    high: float
    start: float
    end: float
    logarithmic: bool = False

    def at(self, value: float) -> float:
        """Return the place of a value; one beyond an end lies on it."""
        inside = min(max(value, self.low), self.high)
        if self.logarithmic:
            share = math.log(inside / self.low) / math.log(self.high / self.low)
        else:
            share = (inside - self.low) / (self.high - self.low)
        return round(self.start + share * (self.end - self.start), 2)

    def ticks(self, most: int = 6) -> list[float]:
        """Return round values within the scale."""
        if self.logarithmic:
            return _decades(self.low, self.high, most)
        step = next(
            step
            for exponent in range(math.floor(math.log10(self.high - self.low)) - 2, 400)
            for step in (factor * 10.0**exponent for factor in _STEPS[:3])
            if (self.high - self.low) / step <= most
        )
        first, last = math.ceil(self.low / step - 1e-9), math.floor(self.high / step + 1e-9)
        return [i * step for i in range(first, last + 1)]


def straight(low: float, high: float, start: float, end: float) -> Scale:
    """Return a scale that holds two values and ends on round ones."""
    if high - low < 1e-12 * max(abs(low), abs(high), 1e-290):
        low, high = low - 0.5 * max(abs(low), 1e-12), high + 0.5 * max(abs(high), 1e-12)
    ticks = Scale(low, high, start, end).ticks()
    step = ticks[1] - ticks[0] if len(ticks) > 1 else high - low
    low, high = step * math.floor(low / step + 1e-9), step * math.ceil(high / step - 1e-9)
    return Scale(low, high, start, end)


def logarithmic(low: float, high: float, start: float, end: float) -> Scale:
    """Return a logarithmic scale that holds two values above 0, with some room."""
    room = max((high / low) ** 0.03, 1.05)
    return Scale(low / room, high * room, start, end, logarithmic=True)


def _decades(low: float, high: float, most: int) -> list[float]:
    """Return powers of ten, every so many; with 2 and 5 times them where there are few."""
    first, last = math.floor(math.log10(low)), math.ceil(math.log10(high))
    every = max(1, math.ceil((last - first) / most))
    factors = (1, 2, 5) if last - first <= 2 else (1,)
    values = [factor * 10.0**exponent for exponent in range(first, last + 1, every) for factor in factors]
    return [value for value in values if low <= value <= high]
