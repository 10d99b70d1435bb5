from __future__ import annotations

import io
import re
from collections.abc import Sequence
from dataclasses import replace

import pytest
from rich.console import Console

from esper.leyline.records import EpochRecord
from esper.nissa.schema import AlarmRow
from esper.scripts.cli.output import alarm_line
from esper.scripts.cli.views import GrowthView
from tests.nissa.report.runs import growing_run
from tests.nissa.report.test_stacks import history as deepened

HISTORY = growing_run()


def show(
    title: str = "growing digits",
    *,
    terminal: bool,
    verbose: bool = False,
    history: Sequence[EpochRecord] = HISTORY,
) -> str:
    stream = io.StringIO()
    console = Console(file=stream, force_terminal=terminal, width=70, color_system=None)
    with GrowthView(console, 60, 0, title=title, verbose=verbose) as view:
        for record in history:
            view.show(record)
    return stream.getvalue()


def test_a_terminal_shows_bar_slots_and_decisions() -> None:
    text = show(terminal=True)
    for word in ("growing digits", "60/60", "ETA", "r0c1", "fossilized", "conv_light", "1.00"):
        assert word in text
    assert "+1.87 ± 0.42" in text
    assert "epoch 44: FOSSILIZE r0c1" in text
    assert "val score" in text
    assert "█" in text


def test_blocks_that_wake_are_shown_as_bars() -> None:
    text = show(terminal=True, history=deepened())
    assert re.search(r"h +████ 4 of 4", text)
    assert "epoch 2: DEEPEN h (schedule: 1 to 2 blocks)" in text
    assert "slot" not in text
    assert "1 of 4 blocks" in show(terminal=False, history=deepened())


@pytest.mark.parametrize("title", ["[/x] [red]", ":snake:", "{task.speed}", "a\x1b[31mb\nc"])
def test_a_title_is_shown_as_text(title: str) -> None:
    text = show(title, terminal=True)
    shown = title.replace("\x1b", "\\x1b").replace("\n", "\\x0a")
    assert shown in text
    assert "\x1b[31m" not in text


def test_without_a_terminal_there_are_plain_lines_that_are_not_wrapped() -> None:
    text = show(terminal=False)
    lines = text.splitlines()
    assert lines[0].startswith("epoch 1/60  val score ")
    assert lines[-1].startswith("epoch 60/60  val score ")
    assert all("parameters" in line for line in (lines[0], lines[-1]))
    assert "epoch 6: GERMINATE r0c0 norm" in lines
    refused = "epoch 10: ADVANCE r0c0 (G2: 3 of 5 epochs in training)"
    assert refused not in lines
    assert refused in show(terminal=False, verbose=True).splitlines()
    assert not any("WAIT" in line for line in lines)
    assert "\x1b" not in text


def test_every_decision_is_shown_when_asked_for() -> None:
    lines = show(terminal=False, verbose=True).splitlines()
    assert sum(": WAIT" in line for line in lines) == 59 - 11


def test_a_resumed_run_counts_the_time_from_where_it_began() -> None:
    stream = io.StringIO()
    with GrowthView(Console(file=stream, width=200), 60, 58, title="x") as view:
        view.show(HISTORY[58])
        view.show(HISTORY[59])
    assert "epoch 60/60" in stream.getvalue()
    assert "ETA 0 s" in stream.getvalue()


@pytest.mark.parametrize("terminal", [True, False])
def test_an_alarm_is_a_line_at_once(terminal: bool) -> None:
    alarm = AlarmRow(
        step=60, monitor="m", severity="warning", message="it grew \x1b[31m", advice="Set a limit."
    )
    stream = io.StringIO()
    console = Console(file=stream, force_terminal=terminal, width=200, color_system=None)
    with GrowthView(console, 60, 0, title="x") as view:
        view.show(HISTORY[-1])
        view.warn(alarm_line(alarm))
    assert "epoch 60: alarm (warning): it grew \\x1b[31m. Set a limit." in stream.getvalue()
    over = AlarmRow(step=7, severity="info", state="cleared", message="m is over")
    assert alarm_line(over) == "epoch 7: alarm over (info): m is over"


@pytest.mark.parametrize("verbose", [False, True])
def test_an_alarm_is_told_once(verbose: bool) -> None:
    stream = io.StringIO()
    console = Console(file=stream, width=200)
    first = AlarmRow(step=3, monitor="m", severity="warning", state="raised", message="it fell")
    over = AlarmRow(step=4, monitor="m", severity="info", state="cleared", message="m is over")
    with GrowthView(console, 60, 0, title="x", verbose=verbose) as view:
        for alarm in (first, over, replace(first, step=9), replace(first, step=9, subject="a")):
            view.alarm(alarm)
        view.alarm(replace(first, monitor="n", severity="info"))
    lines = stream.getvalue().splitlines()
    assert len(lines) == (3 if verbose else 2)
    assert lines[0] == "epoch 3: alarm (warning): it fell"
