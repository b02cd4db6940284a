"""Drawings as inline SVG: text stays text, colours and sizes of type are the page's (`page.css`).

A drawing is `WIDTH` units wide, so that its type is readable on a phone, where a unit is a little less than a pixel.
Series differ in shape and dash as well as in colour: their classes are `one`, `two`, `three`.
"""

import xml.etree.ElementTree as ElementTree
from collections.abc import Sequence
from dataclasses import dataclass

from markupsafe import Markup

from vllm_gumbel.evaluate.plots_scale import Scale
from vllm_gumbel.evaluate.words import MINUS

WIDTH = 400
#: Where the inner part of a plot begins and ends.
LEFT, RIGHT, TOP, BOTTOM = 52.0, 386.0, 28.0, 228.0
HEIGHT = 268
#: Classes of series, in order.
SERIES = ("one", "two", "three")
#: Mean width of a character of a label.
CHARACTER = 6.6

Point = tuple[float, float]


@dataclass(frozen=True)
class Key:
    """One entry of a legend.

    Attributes:
        sign: of it, drawn.
        text: what it stands for.
    """

    sign: Markup
    text: str


class Canvas:
    """A drawing.

    Args:
        name: unique in a page; letters, digits and hyphens.
        title: what is drawn.
        description: what it shows, in words, for those who do not see it.
        height: of it.
    """

    def __init__(self, name: str, title: str, description: str, height: float = HEIGHT) -> None:
        attributes = {"role": "img", "aria-labelledby": f"{name}-title {name}-desc", "class": "plot"}
        self._root = ElementTree.Element("svg", {"viewBox": f"0 0 {WIDTH} {height:g}", **attributes})
        for tag, text in (("title", title), ("desc", description)):
            ElementTree.SubElement(self._root, tag, {"id": f"{name}-{tag}"}).text = text

    def line(self, points: Sequence[Point], style: str) -> None:
        """Draw a line through points."""
        self._add("polyline", style, points=" ".join(f"{x:g},{y:g}" for x, y in points))

    def area(self, points: Sequence[Point], style: str) -> None:
        """Fill what lies between points."""
        self._add("polygon", style, points=" ".join(f"{x:g},{y:g}" for x, y in points))

    def rectangle(self, x: float, y: float, width: float, height: float, style: str) -> None:
        """Draw a rectangle, from its upper left corner."""
        sizes = {"x": x, "y": y, "width": max(width, 0), "height": max(height, 0)}
        self._add("rect", style, **{key: f"{value:.2f}" for key, value in sizes.items()})

    def dot(self, x: float, y: float, style: str, radius: float = 3.0) -> None:
        """Draw a point."""
        self._add("circle", style, cx=f"{x:g}", cy=f"{y:g}", r=f"{radius:g}")

    def cross(self, x: float, y: float, style: str, size: float = 3.5) -> None:
        """Draw a cross."""
        path = f"M{x - size:g},{y - size:g}l{2 * size:g},{2 * size:g}m0,{-2 * size:g}l{-2 * size:g},{2 * size:g}"
        self._add("path", style, d=path)

    def text(self, x: float, y: float, text: str, style: str = "", anchor: str = "start") -> None:
        """Write a line of text, from its baseline."""
        element = self._add("text", style, x=f"{x:g}", y=f"{y:g}")
        element.set("text-anchor", anchor)
        element.text = text

    def axes(self, x: Scale, y: Scale, x_title: str, y_title: str, shares: bool = False) -> None:
        """Draw the grid, ticks and titles of two scales.

        Args:
            x, y: the scales.
            x_title, y_title: of them, with the unit.
            shares: whether y holds shares, shown in percent.
        """
        for tick in y.ticks():
            place = y.at(tick)
            self.line([(LEFT, place), (RIGHT, place)], "grid")
            self.text(LEFT - 6, place + 4, f"{100 * tick:.4g}%" if shares else tick_text(tick), "tick", "end")
        for tick in self._apart(x):
            self.line([(x.at(tick), BOTTOM), (x.at(tick), BOTTOM + 4)], "axis")
            self.text(x.at(tick), BOTTOM + 17, tick_text(tick), "tick", "middle")
        self.line([(LEFT, BOTTOM), (RIGHT, BOTTOM)], "axis")
        self.titles(x_title, y_title)

    def titles(self, x_title: str, y_title: str) -> None:
        """Write the titles of both axes; that of y stands above, to be read without turning one's head."""
        self.text(2, 14, y_title, "name")
        self.text((LEFT + RIGHT) / 2, BOTTOM + 36, x_title, "name", "middle")

    def markup(self) -> Markup:
        """Return the drawing, with everything in it escaped."""
        return Markup(ElementTree.tostring(self._root, encoding="unicode"))

    def _add(self, tag: str, style: str, **attributes: str) -> ElementTree.Element:
        element = ElementTree.SubElement(self._root, tag, attributes)
        if style:
            element.set("class", style)
        return element

    @staticmethod
    def _apart(x: Scale) -> list[float]:
        """Return the ticks of a horizontal scale whose labels do not touch."""
        kept: list[float] = []
        free = -1e9
        for tick in x.ticks():
            half = CHARACTER * len(tick_text(tick)) / 2 + 3
            if x.at(tick) - half >= free:
                kept.append(tick)
                free = x.at(tick) + half
        return kept


def sign(shape: str, style: str) -> Markup:
    """Return what stands for a series in a legend: `line`, `box`, `dot` or `cross`, of a class."""
    shapes = {
        "line": '<line x1="1" y1="7" x2="23" y2="7" class="{}"/>',
        "box": '<rect x="6" y="2" width="12" height="10" class="{}"/>',
        "dot": '<circle cx="12" cy="7" r="4" class="{}"/>',
        "cross": '<path d="M8,3l8,8m0,-8l-8,8" class="{}"/>',
    }
    return Markup('<svg viewBox="0 0 24 14" class="sign" aria-hidden="true">{}</svg>').format(
        Markup(shapes[shape]).format(style)
    )


def tick_text(value: float) -> str:
    """Return a tick's label, short."""
    sizes = ((1e9, "G"), (1e6, "M"), (1e3, "k"), (0.0, ""))
    size, suffix = next(each for each in sizes if abs(value) >= each[0])
    text = f"{value / (size or 1):.6g}".replace("e-0", "e-").replace("-", MINUS)
    return f"{text}{suffix}"
