from __future__ import annotations

import io

import pytest
from rich.console import Console
from rich.progress import TextColumn

from esper.nissa.schema import AlarmRow
from esper.scripts.cli.output import AlarmRelay, LiveView, sparkline


def make_view(*, terminal: bool) -> tuple[LiveView, io.StringIO]:
    stream = io.StringIO()
    console = Console(file=stream, force_terminal=terminal, width=90, color_system=None)
    counter = TextColumn("{task.completed} of {task.total} {task.fields[unit]}", markup=False)
    return LiveView(console, counter, title="work", total=8, done=3, unit="parts"), stream


def test_a_terminal_sees_bar_counters_and_times() -> None:
    view, stream = make_view(terminal=True)
    with view:
        view._draw("what belongs to it")
    for words in ("work", "3 of 8 parts", "ETA", "what belongs to it"):
        assert words in stream.getvalue()


def test_without_a_terminal_nothing_is_drawn() -> None:
    view, stream = make_view(terminal=False)
    with view:
        view._draw("what belongs to it")
    assert stream.getvalue() == ""


@pytest.mark.parametrize("terminal", [True, False])
def test_a_warning_is_text_and_is_not_wrapped(terminal: bool) -> None:
    view, stream = make_view(terminal=terminal)
    with view:
        view.warn("[red] " + 100 * "x" + "\x1b[2J")
    assert "[red] " + 100 * "x" + "\\x1b[2J" in stream.getvalue()


def test_lines_come_at_a_rate_that_a_log_can_bear() -> None:
    view, _ = make_view(terminal=False)
    began = view._started
    asked = [(1.0, False), (2.0, True), (11.0, False), (12.0, False), (13.0, False)]
    due = [view._is_line_due(began + at, matters=matters) for at, matters in asked]
    assert due == [False, True, False, True, False]


def test_a_sparkline_spans_lowest_to_highest() -> None:
    assert sparkline([]) == ""
    assert sparkline([3.0, 3.0]) == "▁▁"
    assert sparkline([0.0, 50.0, 100.0]) == "▁▄█"


def test_an_alarm_that_comes_before_the_view_is_not_lost() -> None:
    alarms = AlarmRelay()
    told: list[AlarmRow] = []
    first, second = (AlarmRow(monitor=name, severity="warning") for name in ("a", "b"))
    alarms(first)
    alarms.show_by(told.append)
    alarms(second)
    assert told == [first, second]
