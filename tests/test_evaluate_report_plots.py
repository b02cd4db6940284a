"""The drawings of a page: values stand where they belong, ticks are round, and nothing lies outside."""

import math
import re
import xml.etree.ElementTree as ElementTree

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests import report_examples as examples
from vllm_gumbel.evaluate import plots
from vllm_gumbel.evaluate.plots import Names, Spot
from vllm_gumbel.evaluate.plots_canvas import BOTTOM, LEFT, RIGHT, TOP, WIDTH, tick_text
from vllm_gumbel.evaluate.plots_scale import Scale, logarithmic, straight
from vllm_gumbel.evaluate.report_server import quantile

NAMES = Names("key", "a title", "what it says", "x", "y")
SIZES = st.floats(-1e9, 1e9).filter(lambda value: value == 0 or abs(value) > 1e-9)


def elements(drawing, tag, style=None):
    """Return the elements of a drawing with a tag and a class."""
    found = ElementTree.fromstring(str(drawing)).iter(tag)
    return [each for each in found if style is None or style in each.get("class", "")]


def places(drawing, tag, style):
    """Return the points of the first such line or area."""
    return [tuple(map(float, pair.split(","))) for pair in elements(drawing, tag, style)[0].get("points").split()]


@given(SIZES, SIZES)
def test_straight_scales_hold_their_values_and_have_ticks(a, b):
    low, high = sorted((a, b))
    scale = straight(low, high, LEFT, RIGHT)
    room = 1e-8 * max(abs(low), abs(high))
    assert scale.low <= low + room
    assert scale.high >= high - room
    assert LEFT <= scale.at(low) <= scale.at(high) <= RIGHT
    assert 2 <= len(scale.ticks()) <= 9


@given(st.floats(1e-9, 1e9), st.floats(1, 1e9))
def test_logarithmic_scales_hold_their_values(low, ratio):
    scale = logarithmic(low, low * ratio, LEFT, RIGHT)
    assert LEFT < scale.at(low) <= scale.at(low * ratio) < RIGHT
    assert all(scale.low <= tick <= scale.high for tick in scale.ticks())


def test_equal_ratios_are_equally_long():
    scale = Scale(1, 1000, 0, 300, logarithmic=True)
    assert [scale.at(value) for value in (1, 10, 100, 1000)] == [0, 100, 200, 300]
    assert [scale.at(value) for value in (0.1, 5000)] == [0, 300]
    assert Scale(1, 1000, 0, 300, logarithmic=True).ticks() == [1, 10, 100, 1000]
    assert straight(0, 0.37, 0, 100).ticks() == pytest.approx([0, 0.1, 0.2, 0.3, 0.4])


@pytest.mark.parametrize(
    ("value", "text"),
    [(0, "0"), (0.05, "0.05"), (1e-5, "1e\u22125"), (1500, "1.5k"), (-20, "\u221220"), (3e6, "3M"), (2e9, "2G")],
)
def test_ticks_are_short(value, text):
    assert tick_text(value) == text


def test_curve_falls_in_steps_within_its_band():
    drawing = plots.curve(NAMES, [(1, 1.0), (2, 0.5), (4, 0.25)], [(1, 0.9, 1.0), (2, 0.4, 0.6), (4, 0.2, 0.3)])
    line = places(drawing, "polyline", "line one")
    assert line[0] == (LEFT, TOP)
    assert line[-1][1] == pytest.approx(BOTTOM - 0.25 * (BOTTOM - TOP))
    assert line[1] == (line[2][0], line[0][1])
    band = places(drawing, "polygon", "band one")
    assert len(band) == 2 * len(line)
    assert all(upper[1] <= y <= lower[1] for upper, (_, y), lower in zip(band, line, band[::-1], strict=False))


def test_bars_of_a_histogram_are_as_high_as_their_shares():
    drawing = plots.histogram(NAMES, ["a", "b", "c"], [[0.5, 0.3, 0.2], [0.1, 0.1, 0.4]], (0.25, 0.2, 0.3))
    heights = [float(each.get("height")) for each in elements(drawing, "rect", "bar")]
    unit = heights[0] / 0.5
    assert heights == pytest.approx([unit * share for share in (0.5, 0.3, 0.2, 0.1, 0.1, 0.4)], abs=0.02)
    (chance,) = elements(drawing, "rect", "chance")
    assert float(chance.get("height")) == pytest.approx(unit * 0.1, abs=0.02)
    (_, y), _ = places(drawing, "polyline", "expected")
    assert y == pytest.approx(BOTTOM - unit * 0.25, abs=0.02)


def test_points_on_the_diagonal_are_drawn_on_it():
    spots = [Spot(x, x) for x in (1e-5, 1e-3, 0.1)]
    drawing = plots.scatter(NAMES, spots, both_logarithmic=True, diagonal=True)
    (x0, y0), (x1, y1) = places(drawing, "polyline", "expected")
    for each in elements(drawing, "circle"):
        x, y = float(each.get("cx")), float(each.get("cy"))
        assert (x - x0) / (x1 - x0) == pytest.approx((y - y0) / (y1 - y0), abs=1e-4)


def test_labels_of_points_do_not_lie_on_each_other():
    drawing = plots.scatter(NAMES, [Spot(1 + i / 1e6, 2, f"label {i}") for i in range(20)] + [Spot(3, 4)])
    assert 1 <= len(elements(drawing, "text", "label")) <= 2


def test_bars_are_as_long_as_their_values_and_labels_are_short():
    drawing = plots.bars(NAMES, [("one", 1.0, "1"), ("x" * 99, 2.0, "2"), ("none", 0.0, "0")], line_at=2.0)
    first, second, none = (float(each.get("width")) for each in elements(drawing, "rect", "bar"))
    assert second == pytest.approx(2 * first, abs=0.02)
    assert none == 0
    assert all(len(each.text) <= 40 for each in elements(drawing, "text"))


def test_ranges_have_their_median_where_it_is():
    drawing = plots.ranges(NAMES, [("a", [0, 25, 50, 75, 100]), ("b", [0, 0, 0, 0, 100])])
    medians = [float(each.get("points").split(",")[0]) for each in elements(drawing, "polyline", "median")]
    assert medians == pytest.approx([(12 + RIGHT) / 2, 12])


def test_stems_tell_what_agrees_from_what_does_not_without_colour():
    drawing = plots.stems(NAMES, [(0, 1.0, True), (1, -0.5, False), (2, 2.0, True)], decided=1)
    assert len(elements(drawing, "path", "cross")) == 1
    assert len(elements(drawing, "polyline", "stem")) == 3


@pytest.mark.parametrize(("bounds", "style"), [((-2, -1, -0.5), "clear"), ((-1, 0.1, 1), "open"), ((0, 0, 0), "open")])
def test_small_interval_is_filled_only_if_zero_lies_outside(bounds, style):
    assert f"interval {style}" in plots.interval_bar(*bounds)


@given(st.lists(st.tuples(st.floats(0, 1e6), st.floats(0, 1e6)), min_size=1, max_size=20))
def test_nothing_is_drawn_outside(pairs):
    drawings = [
        plots.scatter(NAMES, [Spot(x, y, "some label") for x, y in pairs]),
        plots.bars(NAMES, [("label", x, "1,000,000") for x, _ in pairs]),
        plots.ranges(NAMES, [("label", sorted(pair)) for pair in pairs]),
        plots.stems(NAMES, [(x, y, True) for x, y in pairs]),
        plots.histogram(NAMES, [str(x) for x, _ in pairs], [[y for _, y in pairs]]),
    ]
    for drawing in drawings:
        for attribute in ("cx", "x", "x1", "x2"):
            for text in re.findall(rf'\b{attribute}="([^"]+)"', drawing):
                assert 0 <= float(text) <= WIDTH
        for text in re.findall(r'points="([^"]+)"', drawing):
            assert all(0 <= float(pair.split(",")[0]) <= WIDTH for pair in text.split())


def test_quantiles_lie_on_a_line_through_their_bucket():
    buckets = [(1.0, 10.0), (2.0, 10.0), (math.inf, 0.0)]
    assert [quantile(buckets, share) for share in (0.25, 0.5, 0.75, 1.0)] == [0.5, 1.0, 1.5, 2.0]
    assert quantile([(1.0, 0.0), (math.inf, 5.0)], 0.5) == 1.0
    assert quantile([(0.5, 0.0), (1.0, 0.0)], 0.5) == 1.0


def test_examples_have_every_kind_of_drawing():
    assert len(examples.CURVE) > 2
