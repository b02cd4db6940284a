"""The kinds of plots of a page, each a function from numbers to a drawing.

Numbers must be finite; what a logarithmic scale cannot show is put at its lower end by whoever calls.
"""

import itertools
from collections.abc import Sequence
from dataclasses import dataclass

from markupsafe import Markup

from vllm_gumbel.evaluate.plots_canvas import (
    BOTTOM,
    CHARACTER,
    LEFT,
    RIGHT,
    SERIES,
    TOP,
    WIDTH,
    Canvas,
    Point,
    tick_text,
)
from vllm_gumbel.evaluate.plots_scale import Scale, logarithmic, straight

#: Height of a row of horizontal bars, and of one of ranges.
BAR, RANGE = 24, 46
#: Characters of a bar's label that are shown at most.
LABEL = 30
#: Ratio from which on a scale of positions is logarithmic.
LONG = 30


@dataclass(frozen=True)
class Names:
    """What a drawing is called.

    Attributes:
        key: unique in a page; letters, digits and hyphens.
        title: what is drawn.
        says: what it shows, in words.
        x, y: titles of the axes, with units.
    """

    key: str
    title: str
    says: str
    x: str = ""
    y: str = ""


@dataclass(frozen=True)
class Spot:
    """A point with what may be said beside it.

    Attributes:
        x, y: values.
        label: beside it; nothing for none.
        style: class of its sign; one that begins with `cross` is drawn as a cross.
    """

    x: float
    y: float
    label: str = ""
    style: str = "one"


def curve(names: Names, points: Sequence[Point], band: Sequence[tuple[float, float, float]]) -> Markup:
    """Draw a share that falls in steps over positions, with the band of its interval.

    Args:
        names: of the drawing.
        points: position and share, positions rising and above 0.
        band: position, lower and upper bound; may have fewer positions.
    """
    canvas = _canvas(names)
    first, last = points[0][0], points[-1][0]
    scale = logarithmic if first > 0 and last / first > LONG else straight
    x, y = scale(first, last, LEFT, RIGHT), Scale(0, 1, BOTTOM, TOP)
    canvas.axes(x, y, names.x, names.y, shares=True)
    if band:
        upper = _steps([(x.at(at), y.at(high)) for at, _, high in band])
        lower = _steps([(x.at(at), y.at(low)) for at, low, _ in band])
        canvas.area([*upper, *reversed(lower)], "band one")
    canvas.line(_steps([(x.at(at), y.at(share)) for at, share in points]), "line one")
    return canvas.markup()


def histogram(
    names: Names,
    bins: Sequence[str],
    series: Sequence[Sequence[float]],
    expected: tuple[float, float, float] | None = None,
) -> Markup:
    """Draw shares by bin, one bar a series.

    Args:
        names: of the drawing.
        bins: their labels.
        series: up to three, each with the share in every bin.
        expected: the share that each bin should have, with the bounds of what chance makes of it; None for none.
    """
    canvas = _canvas(names)
    y = straight(0, max([1e-9, *itertools.chain(*series), *(expected or ())]), BOTTOM, TOP)
    slot = (RIGHT - LEFT) / len(bins)
    _bin_axis(canvas, names, bins, y)
    if expected is not None:
        _, low, high = expected
        canvas.rectangle(LEFT, y.at(high), RIGHT - LEFT, y.at(max(low, 0)) - y.at(high), "chance")
    gap = 0.12 * slot
    width = (slot - gap) / len(series)
    for style, shares in zip(SERIES, series, strict=False):
        for i, value in enumerate(shares):
            left, top = LEFT + i * slot + gap / 2 + SERIES.index(style) * width, y.at(value)
            canvas.rectangle(left, top, width - (len(series) > 1), BOTTOM - top, f"bar {style}")
    if expected is not None:
        canvas.line([(LEFT, y.at(expected[0])), (RIGHT, y.at(expected[0]))], "expected")
    return canvas.markup()


def scatter(names: Names, spots: Sequence[Spot], *, both_logarithmic: bool = False, diagonal: bool = False) -> Markup:
    """Draw points; with the diagonal on which x equals y."""
    canvas = _canvas(names)
    xs, ys = [spot.x for spot in spots], [spot.y for spot in spots]
    if diagonal:
        xs = ys = [*xs, *ys]
    scale = logarithmic if both_logarithmic else straight
    x, y = scale(min(xs), max(xs), LEFT, RIGHT), scale(min(ys), max(ys), BOTTOM, TOP)
    canvas.axes(x, y, names.x, names.y)
    if diagonal:
        canvas.line([(x.at(x.low), y.at(y.low)), (x.at(x.high), y.at(y.high))], "expected")
    taken: list[tuple[float, float, float]] = []
    for spot in spots:
        place = (x.at(spot.x), y.at(spot.y))
        _mark(canvas, place, spot.style)
        if spot.label:
            _label(canvas, place, spot.label, taken)
    return canvas.markup()


def bars(names: Names, rows: Sequence[tuple[str, float, str]], line_at: float | None = None) -> Markup:
    """Draw horizontal bars from 0.

    Args:
        names: of the drawing.
        rows: label, value of at least 0, and what is written behind the bar.
        line_at: value at which a line is drawn; None for none.
    """
    start, end = 176.0, 346.0
    top = 22.0 if names.x else 4.0
    canvas = Canvas(names.key, names.title, names.says, top + BAR * len(rows) + 8)
    x = Scale(0, max([line_at or 0, *(value for _, value, _ in rows)]) or 1, start, end)
    canvas.text(2, 14, names.x, "name")
    bottom = top + BAR * len(rows)
    for i, (label, value, text) in enumerate(rows):
        middle = top + BAR * (i + 0.5)
        shown = label if len(label) <= LABEL else f"{label[: LABEL - 1]}\N{HORIZONTAL ELLIPSIS}"
        canvas.text(start - 8, middle + 4, shown, "tick", "end")
        canvas.rectangle(start, middle - 7, x.at(value) - start, 14, "bar one")
        canvas.text(x.at(value) + 5, middle + 4, text, "value")
    canvas.line([(start, top), (start, bottom)], "axis")
    if line_at is not None:
        canvas.line([(x.at(line_at), top), (x.at(line_at), bottom)], "expected")
    return canvas.markup()


def ranges(names: Names, rows: Sequence[tuple[str, Sequence[float]]]) -> Markup:
    """Draw quantiles, one row each: a thin line from the first to the last, a thick one between those next to them.

    Args:
        names: of the drawing.
        rows: label and rising values, the same number in each row.
    """
    top = 26.0
    bottom = top + RANGE * len(rows)
    canvas = Canvas(names.key, names.title, names.says, bottom + 44)
    x = straight(min(0, *(min(values) for _, values in rows)), max(max(values) for _, values in rows), 12, RIGHT)
    for tick in x.ticks(5):
        canvas.line([(x.at(tick), top), (x.at(tick), bottom)], "grid")
        canvas.text(x.at(tick), bottom + 17, tick_text(tick), "tick", "middle")
    canvas.text(WIDTH / 2, bottom + 36, names.x, "name", "middle")
    for i, (label, values) in enumerate(rows):
        style = SERIES[i % len(SERIES)]
        middle = top + RANGE * i + 30
        canvas.text(12, middle - 14, label, "name")
        canvas.line([(x.at(values[0]), middle), (x.at(values[-1]), middle)], f"line {style}")
        inner = values[1:-1]
        if inner:
            canvas.rectangle(x.at(inner[0]), middle - 6, x.at(inner[-1]) - x.at(inner[0]), 12, f"bar {style}")
        if len(values) % 2:
            centre = x.at(values[len(values) // 2])
            canvas.line([(centre, middle - 9), (centre, middle + 9)], "median")
    return canvas.markup()


def stems(names: Names, values: Sequence[tuple[float, float, bool]], decided: float | None = None) -> Markup:
    """Draw a value for each position: what agrees as a bar, what does not as a cross.

    Args:
        names: of the drawing.
        values: position, value and whether it agrees.
        decided: position at which a dashed line is drawn; None for none.
    """
    canvas = _canvas(names)
    positions, sizes = [each[0] for each in values], [each[1] for each in values]
    x = straight(min(positions), max(positions) + 1, LEFT, RIGHT)
    y = straight(min(0, *sizes), max(0, *sizes), BOTTOM, TOP)
    canvas.axes(x, y, names.x, names.y)
    canvas.line([(LEFT, y.at(0)), (RIGHT, y.at(0))], "axis")
    for at, value, agrees in values:
        if agrees:
            canvas.line([(x.at(at), y.at(0)), (x.at(at), y.at(value))], "stem one")
        else:
            canvas.line([(x.at(at), y.at(0)), (x.at(at), y.at(value))], "stem two")
            canvas.cross(x.at(at), y.at(value), "cross two")
    if decided is not None:
        canvas.line([(x.at(decided), TOP), (x.at(decided), BOTTOM)], "expected")
    return canvas.markup()


def interval_bar(low: float, value: float, high: float) -> Markup:
    """Draw an interval on its own scale with 0 in the middle, small enough for a cell; the cell beside it says it."""
    x = Scale(-1, 1, 4, 116)
    largest = max(abs(low), abs(high), abs(value)) or 1
    ends = [x.at(each / largest) for each in (low, value, high)]
    style = "clear" if low > 0 or high < 0 else "open"
    return Markup(
        '<svg viewBox="0 0 120 16" class="interval {}" aria-hidden="true"><line x1="60" y1="1" x2="60" y2="15"'
        ' class="axis"/><line x1="{}" y1="8" x2="{}" y2="8" class="span"/><circle cx="{}" cy="8" r="3.2"/></svg>'
    ).format(style, ends[0], ends[2], ends[1])


def _canvas(names: Names) -> Canvas:
    return Canvas(names.key, names.title, names.says)


def _steps(points: Sequence[Point]) -> list[Point]:
    """Return the corners of a line that holds each value until the next point."""
    corners = [points[0]]
    for (_, before), (at, value) in itertools.pairwise(points):
        corners += [(at, before), (at, value)]
    return corners


def _bin_axis(canvas: Canvas, names: Names, bins: Sequence[str], y: Scale) -> None:
    """Draw the axes of a histogram, with as many labels of bins as there is room for."""
    for tick in y.ticks():
        canvas.line([(LEFT, y.at(tick)), (RIGHT, y.at(tick))], "grid")
        canvas.text(LEFT - 6, y.at(tick) + 4, f"{100 * tick:.4g}%", "tick", "end")
    slot = (RIGHT - LEFT) / len(bins)
    widest = max(len(label) for label in bins) * CHARACTER + 4
    every = max(1, round(widest / slot + 0.5))
    for i, label in enumerate(bins):
        if i % every == 0:
            canvas.text(LEFT + (i + 0.5) * slot, BOTTOM + 17, label, "tick", "middle")
    canvas.line([(LEFT, BOTTOM), (RIGHT, BOTTOM)], "axis")
    canvas.titles(names.x, names.y)


def _mark(canvas: Canvas, place: Point, style: str) -> None:
    if style.startswith("cross"):
        canvas.cross(*place, style)
    else:
        canvas.dot(*place, f"dot {style}")


def _label(canvas: Canvas, place: Point, label: str, taken: list[tuple[float, float, float]]) -> None:
    """Write a label beside a point, unless another one is there already."""
    width = CHARACTER * len(label)
    anchor, x = ("start", place[0] + 6) if place[0] + 6 + width <= WIDTH - 2 else ("end", place[0] - 6)
    left = x if anchor == "start" else x - width
    for y in (place[1] - 5, place[1] + 13):
        if TOP <= y <= BOTTOM and all(abs(y - b) > 12 or left > right or left + width < a for a, right, b in taken):
            taken.append((left, left + width, y))
            canvas.text(x, y, label, "label", anchor)
            return
