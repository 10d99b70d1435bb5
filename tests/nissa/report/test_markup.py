from __future__ import annotations

import math
import xml.etree.ElementTree as ElementTree

import pytest

from esper.nissa.report import markup
from esper.nissa.report.markup import (
    Scale,
    counted,
    element,
    escaped,
    format_contribution,
    format_count,
    format_duration,
    format_measure,
    format_number,
    format_share,
    label,
    number,
    round_ticks,
    shortened,
    tick_labels,
    tooltip,
    visible,
    width_in_em,
)


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


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("plain é 深 🌱", "plain é 深 🌱"),
        ("a\nb\tc", r"a\x0ab\x09c"),
        ("\x1b[0m", r"\x1b[0m"),
        ("\u202eabc", r"\u202eabc"),
        ("\udcff", r"\udcff"),
        ("\ufffe", r"\ufffe"),
        ("\U0001ffff", r"\U0001ffff"),
        ("\u2028", r"\u2028"),
    ],
)
def test_unprintable_characters_become_escapes(text: str, shown: str) -> None:
    assert visible(text) == shown


def test_kept_characters_and_long_texts() -> None:
    assert visible("a\nb\x07", keep="\n") == "a\nb\\x07"
    assert visible("x" * 5000, limit=3) == "xxx… (5,000 characters)"
    assert shortened("conv_light", 10) == "conv_light"
    assert shortened("conv_lighter", 10) == "conv_ligh…"


def test_markup_and_quotes_are_escaped() -> None:
    assert escaped("<a b=\"c\" d='e'>&") == "&lt;a b=&quot;c&quot; d=&#x27;e&#x27;&gt;&amp;"


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (None, "not measured"),
        (math.nan, "not finite"),
        (-math.inf, "not finite"),
        (96.2, "96.20"),
        (2.0, "2.000"),
        (-0.1234, "−0.1234"),
        (0.0, "0.00"),
        (-0.00001, "0.0000"),
        (-12_345_678.0, "−1.235e+07"),
    ],
)
def test_numbers_have_honest_digits(value: float | None, text: str) -> None:
    assert format_number(value) == text


@pytest.mark.parametrize(
    ("value", "error", "text"),
    [
        (None, None, "not measured"),
        (None, 0.1, "not measured"),
        (math.nan, math.nan, "not measured"),
        (1.2, 0.31, "+1.20 ± 0.31"),
        (-0.0123, 0.00456, "−0.0123 ± 0.0046"),
        (0.0, 0.2, "0.00 ± 0.20"),
        (0.5, None, "+0.50 ± unknown"),
        (0.5, 0.0, "+0.50 ± 0.00"),
    ],
)
def test_contribution_has_its_error(value: float | None, error: float | None, text: str) -> None:
    assert format_contribution(value, error) == text


def test_counts_and_durations() -> None:
    assert format_count(1_234_567) == "1,234,567"
    assert [counted(number, "seed") for number in (0, 1, 2)] == ["no seeds", "1 seed", "2 seeds"]
    assert [format_duration(seconds) for seconds in (3.14, 74.2, 7260.0, math.nan)] == [
        "3.1 s",
        "1 min 14 s",
        "2 h 1 min",
        "unknown",
    ]


def test_wide_characters_need_more_room() -> None:
    assert width_in_em("深") > width_in_em("a")


@pytest.mark.parametrize(
    ("part", "whole", "text"),
    [
        (0.0, 1.0, "0 %"),
        (1.0, 1.0, "100 %"),
        (0.06, 1.0, "6.0 %"),
        (0.9999, 1.0, "99.99 %"),
        (0.99999, 1.0, "100 %"),
        (0.00001, 1.0, "0 %"),
        (1, 300, "0.33 %"),
        (None, 1.0, "not measured"),
        (1.0, 0.0, "not measured"),
        (math.inf, 1.0, "not finite"),
    ],
)
def test_shares_tell_more_close_to_their_ends(part: float | None, whole: float, text: str) -> None:
    assert format_share(part, whole) == text


@pytest.mark.parametrize(
    ("value", "text"),
    [(None, "not measured"), (math.nan, "not finite"), (0.0001, "1.0e−4"), (-0.0, "0.000")],
)
def test_measures_of_any_size_are_short(value: float | None, text: str) -> None:
    assert format_measure(value) == text


def test_what_python_finds_printable_is_shown_as_it_is() -> None:
    printable = [character for character in map(chr, range(0x110000)) if character.isprintable()]
    assert [character for character in printable if markup._printable(character) != character] == []
