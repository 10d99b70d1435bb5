from __future__ import annotations

import json
import math

import pytest

from esper.scripts.cli.output import err_console, out_console, points, print_json, safe


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("plain ü …", "plain ü …"),
        ("\x1b[31mred", "\\x1b[31mred"),
        ("a\nb\tc", "a\\x0ab\\x09c"),
        ("\x9b31m", "\\x9b31m"),
        ("\u202eevil", "\\x202eevil"),
        ("\udcff", "\\xdcff"),
        ("[bold]not markup[/]", "[bold]not markup[/]"),
        (7, "7"),
    ],
)
def test_text_can_neither_style_nor_steer(text: object, shown: str) -> None:
    assert safe(text).plain == shown
    assert str(safe(text)).isprintable()


def test_markup_in_a_value_is_printed_as_it_is(capsys: pytest.CaptureFixture[str]) -> None:
    out_console().print(safe("[red]x[/red] :snake:"))
    assert capsys.readouterr().out == "[red]x[/red] :snake:\n"


def test_json_is_strict_and_plain_ascii(capsys: pytest.CaptureFixture[str]) -> None:
    document = {
        "nan": math.nan,
        "inf": [math.inf, -math.inf, 1.5],
        "pair": (1, None),
        "text": "ü\x1b[31m\udcff",
        3: {"deep": {"nan": math.nan}},
    }
    print_json(document)
    out = capsys.readouterr().out
    assert out.isascii()
    assert "\x1b" not in out
    assert json.loads(out) == {
        "nan": None,
        "inf": [None, None, 1.5],
        "pair": [1, None],
        "text": "ü\x1b[31m\udcff",
        "3": {"deep": {"nan": None}},
    }


def test_points() -> None:
    assert points(97.256) == "97.26"
    assert points(None) == "–"


def test_results_and_progress_have_places_of_their_own(capsys: pytest.CaptureFixture[str]) -> None:
    out_console().print("result")
    err_console().print("progress")
    assert capsys.readouterr() == ("result\n", "progress\n")


def test_the_width_is_the_terminals_or_what_the_environment_says(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.delenv("COLUMNS", raising=False)
    assert out_console().width == 120
    monkeypatch.setenv("COLUMNS", "60")
    assert out_console().width == 60
