from __future__ import annotations

import math
import re

import pytest

from esper.nissa.report.chart import (
    Band,
    Chart,
    Line,
    Point,
    chart_of,
    describe_chart,
    draw_area,
    draw_chart,
    draw_panels,
    draw_path,
    known_points,
    make_point,
    thin,
    value_text,
)
from esper.nissa.report.markup import Scale
from esper.nissa.report.panels import Line as PanelLine
from esper.nissa.report.panels import Panel, Points
from tests.nissa.report.reading import having, parse, told, written


def line(values: list[float | None], name: str = "mean", kind: str = "c1") -> Line:
    points = [None if value is None else (float(at), value) for at, value in enumerate(values)]
    return Line(name=name, points=points, kind=kind)


def draw(chart: Chart) -> str:
    picture = draw_chart(chart)
    return picture.replace("<svg ", '<svg xmlns="http://www.w3.org/2000/svg" ', 1)


def test_a_single_line_is_named_by_the_title_and_tells_its_last_value() -> None:
    root = parse(draw(Chart(title="Value loss", lines=[line([0.5, 0.25, 0.125])])))
    texts = written(root)
    assert texts[0] == "Value loss"
    assert "0.125" in texts
    assert len(having(root, "line", "c1")) == 1
    assert "round 1: mean 0.250" in told(root)


def test_several_lines_and_bands_are_named() -> None:
    low, high = line([-1.0, -0.5]).points, line([1.0, 1.5]).points
    chart = Chart(
        title="Return",
        lines=[line([0.0, 0.5]), line([None, 0.75], "greedy", "c2")],
        bands=[Band(name="5 to 95 %", low=low, high=high)],
        reference=0.0,
    )
    root = parse(draw(chart))
    texts = written(root)
    assert {"mean 0.500", "greedy 0.750", "5 to 95 %"} <= set(texts)
    assert len(having(root, "reference")) == 1
    assert "round 1: mean 0.500, greedy 0.750, 5 to 95 % −0.500 to 1.50" in told(root)
    assert describe_chart(chart) == (
        "mean: 0.000 in round 0, 0.500 in round 1; greedy: 0.750 in round 1, 0.750 in round 1; "
        "5 to 95 %: −0.500 to 1.50 in round 1."
    )


def test_shares_are_percent_and_stay_above_nothing() -> None:
    chart = Chart(title="WAIT", lines=[line([0.9, 0.995])], is_share=True, floor=0.0, ceiling=1.0)
    root = parse(draw(chart))
    assert "99.50 %" in written(root)
    assert "100 %" in written(root)
    assert not any("−" in text for text in written(root))


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (0.0, "0.000"),
        (0.000123, "1.2e−4"),
        (-0.5, "−0.500"),
        (3.14159, "3.14"),
        (12345.6, "12,346"),
    ],
)
def test_values_have_the_digits_they_deserve(value: float, text: str) -> None:
    assert value_text(Chart(title=""), value) == text


@pytest.mark.parametrize("values", [[], [None], [math.nan], [2.0], [2.0, 2.0]])
def test_charts_of_little_or_nothing(values: list[float | None]) -> None:
    known = [value if value is not None and value == value else None for value in values]
    chart = Chart(title="KL", lines=[line(known)])
    assert chart.is_empty is (not any(known))
    parse(draw(chart))


def test_many_rounds_stay_a_small_picture() -> None:
    chart = Chart(title="KL", lines=[line([math.sin(at) for at in range(20_000)])])
    picture = draw(chart)
    assert len(picture) < 20_000
    # The greatest and the least survive thinning.
    assert "0.841" in describe_chart(Chart(title="", lines=[line([0.0, math.sin(1)])]))


def test_titles_are_text() -> None:
    root = parse(draw(Chart(title="<b>&\x07", lines=[line([1.0, 2.0], "<i>")])))
    assert written(root)[0] == "<b>&\\x07"


PLAIN = Scale(0.0, 1.0, 0.0, 1.0)


@pytest.mark.parametrize("value", [None, math.nan, math.inf, -math.inf, 1e16])
def test_what_cannot_be_drawn_is_a_gap(value: float | None) -> None:
    assert make_point(3, value) is None
    assert make_point(3, 2) == (3.0, 2.0)
    assert known_points([None, (1.0, 2.0)]) == [(1.0, 2.0)]


def test_a_gap_begins_a_new_line_and_a_lone_point_is_a_dot() -> None:
    points: list[Point | None] = [(0, 0), (1, 1), None, (3, 3)]
    path = draw_path("curve", points, PLAIN, PLAIN)
    assert 'd="M0 0L1 1M3 3h0"' in path


def test_an_area_is_closed_and_has_the_gaps_of_both_curves() -> None:
    low: list[Point | None] = [(0, 0), (1, 0), None, (3, 0), (4, 0)]
    high: list[Point | None] = [(0, 2), (1, 2), (2, 2), (3, 2), (4, 2)]
    area = draw_area("band", low, high, PLAIN, PLAIN)
    assert re.findall(r"M[^MZ]*Z", area) == ["M0 2L1 2L1 0L0 0Z", "M3 2L4 2L4 0L3 0Z"]


def test_thinning_keeps_the_ends_of_the_range() -> None:
    points = [(float(at), math.sin(at / 7)) for at in range(5000)]
    kept = thin(points, 200)
    assert len(kept) <= 200
    assert max(value for _, value in kept) == max(value for _, value in points)
    assert min(value for _, value in kept) == min(value for _, value in points)
    assert thin(points[:100], 200) == points[:100]


# ------------------------------------------------------------------------------- from panels


def points(columns: list[str], *rows: list[object]) -> Points:
    return {"columns": columns, "rows": [list(row) for row in rows], "every": 1}


def test_a_panel_becomes_lines_and_bands_in_the_order_of_its_axis() -> None:
    curve = PanelLine(name="mean", column="mean", low="low", high="high")
    rare = PanelLine(name="greedy", column="greedy", is_joined=True, is_dashed=True)
    panel = Panel(key="k", group="g", title="Gain", table="rounds", lines=(curve, rare), unit="s")
    columns = ["round", "mean", "low", "high", "greedy"]
    chart = chart_of(panel, points(columns, [1, 2.0, 1.0, 3.0, 9.0], [0, 1.0, 0.0, 2.0, None]))
    # A store has the index of a round; people count from 1.
    assert chart.lines[0].points == [(1.0, 1.0), (2.0, 2.0)]
    assert (chart.lines[1].points, chart.lines[1].kind) == ([(2.0, 9.0)], "c2 dashed")
    assert chart.bands[0].high == [(1.0, 2.0), (2.0, 3.0)]
    assert (chart.axis, chart.unit) == ("round", "s")


def test_a_panel_by_name_has_a_line_for_each_the_op_first() -> None:
    panel = Panel(
        key="k",
        group="g",
        title="t",
        table="x",
        by="head",
        lines=(PanelLine(name="", column="kl"),),
    )
    chart = chart_of(
        panel, points(["round", "head", "kl"], [0, "alpha_curve", 1.0], [0, "op", 2.0])
    )
    assert [line.name for line in chart.lines] == ["op", "alpha curve"]


def test_a_panel_of_a_column_of_names_leaves_out_what_is_never_there() -> None:
    panel = Panel(key="k", group="g", title="t", table="x", each=("terms", "mean"))
    rows = [[0, {"rent": {"mean": -1.0}, "none": {"mean": 0.0}, "gain": {"mean": 3.0}}], [1, None]]
    chart = chart_of(panel, points(["step", "terms"], *rows))
    assert [line.name for line in chart.lines] == ["gain", "rent"]
    assert chart.axis == "epoch"


def test_panels_without_points_are_left_out() -> None:
    panel = Panel(key="k", group="g", title="t", table="x", lines=(PanelLine(name="", column="a"),))
    assert draw_panels([panel], {}) == ""
    assert draw_panels([panel], {"x": points(["round", "a"], [0, None])}) == ""
