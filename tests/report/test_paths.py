from __future__ import annotations

import math
import re

import pytest

from esper.report.paths import Point, draw_area, draw_path, known_points, make_point, thin
from esper.report.svg import Scale

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
