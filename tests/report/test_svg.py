from __future__ import annotations

import xml.etree.ElementTree as ElementTree

import pytest

from esper.report.svg import Scale, element, label, number, round_ticks, tick_labels, tooltip


def test_elements_escape_what_they_are_given() -> None:
    made = element("g", tooltip('<&"'), label("a<b"), class_='x" y', text_anchor="end", r=1.50)
    root = ElementTree.fromstring(made)
    assert root.attrib == {"class": 'x" y', "text-anchor": "end", "r": "1.5"}
    assert [child.text for child in root] == ['<&"', "a<b"]


def test_coordinates_are_short() -> None:
    assert [number(value) for value in (1.0, -0.001, 2.346, 10)] == ["1", "0", "2.35", "10"]


def test_scale_maps_both_ends() -> None:
    scale = Scale(2.0, 4.0, 100.0, 0.0)
    assert [scale(value) for value in (2.0, 3.0, 4.0)] == [100.0, 50.0, 0.0]


@pytest.mark.parametrize(
    ("low", "high", "most", "whole", "texts"),
    [
        (54.2, 99.8, 5, False, ["60", "70", "80", "90"]),
        (0, 60, 7, True, ["0", "10", "20", "30", "40", "50", "60"]),
        (0, 1, 7, True, ["0", "1"]),
        (0, 12, 6, True, ["0", "2", "4", "6", "8", "10", "12"]),
        (0, 150, 6, True, ["0", "25", "50", "75", "100", "125", "150"]),
        (-0.31, 0.31, 3, False, ["−0.25", "0.00", "0.25"]),
        (0, 4e9, 2, False, ["0", "2e+09", "4e+09"]),
    ],
)
def test_ticks_are_round(low: float, high: float, most: int, whole: bool, texts: list[str]) -> None:
    assert tick_labels(round_ticks(low, high, most, whole=whole)) == texts
