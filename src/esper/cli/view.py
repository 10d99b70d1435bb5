"""What a person sees while a command runs.

On a terminal a progress bar and what belongs to it are drawn anew in place; without one, lines are
printed at a rate that a log can bear.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from typing import Any, Self

from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.progress import (
    BarColumn,
    Progress,
    ProgressColumn,
    TextColumn,
    TimeElapsedColumn,
    TimeRemainingColumn,
)

from esper.cli.output import safe, tell
from esper.leyline.records import told_round
from esper.nissa.schema import AlarmRow

_LINE_EVERY_S = 10.0
_BLOCKS = "▁▂▃▄▅▆▇█"


class LiveView:
    """Shows how far a run is; use it as a context manager.

    Args:
        console: where to.
        counters: the columns that say how much is done, between the bar and the times.
        title: what is running.
        total: how much there is to do.
        done: how much of it is done already.
        fields: what else the counters show; `eta` among them is shown for what the bar would say.
    """

    def __init__(
        self,
        console: Console,
        *counters: ProgressColumn,
        title: str,
        total: float,
        done: float,
        **fields: Any,
    ) -> None:
        """Begin to count the time."""
        self._console = console
        self._started = time.monotonic()
        self._lined = self._started
        self._first = done
        self._told: set[tuple[str | None, ...]] = set()
        eta = TextColumn("{task.fields[eta]}", markup=False)
        self._progress = Progress(
            TextColumn("{task.description}", markup=False),
            BarColumn(),
            *counters,
            TimeElapsedColumn(),
            TextColumn("ETA"),
            eta if "eta" in fields else TimeRemainingColumn(),
            console=console,
        )
        self._bar = self._progress.add_task(safe(title).plain, total=total, **fields)
        self._progress.update(self._bar, completed=done)
        self._live = Live(console=console, refresh_per_second=8) if console.is_terminal else None

    def __enter__(self) -> Self:
        if self._live is not None:
            self._live.update(self._progress)
            self._live.start()
        return self

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        if self._live is not None:
            self._live.stop()

    def is_news(self, alarm: AlarmRow, *, verbose: bool) -> bool:
        """Return whether to tell an alarm: each once, and what only informs where asked for.

        The report has all of them, with every repetition and its end.
        """
        key = (alarm.monitor, alarm.subject, alarm.severity)
        is_told = verbose or alarm.severity in ("warning", "critical")
        if alarm.state != "raised" or not is_told or key in self._told:
            return False
        self._told.add(key)
        return True

    def warn(self, line: str) -> None:
        """Print a line at once, above what is live; any thread may call it."""
        tell(self._console, line)

    def _draw(self, *parts: RenderableType) -> None:
        """Draw the bar and these parts below it; for a terminal."""
        if self._live is not None:
            self._live.update(Group(self._progress, *parts))

    def _is_line_due(self, now: float, *, matters: bool) -> bool:
        """Return whether to print a line now, and count from here if so."""
        is_due = matters or now - self._lined >= _LINE_EVERY_S
        if is_due:
            self._lined = now
        return is_due


class AlarmRelay:
    """Takes alarms from when a run is opened, and hands them on once there is a view of it."""

    def __init__(self) -> None:
        """Keep what comes."""
        self._early: list[AlarmRow] = []
        self._show: Callable[[AlarmRow], None] | None = None
        self._lock = threading.Lock()

    def __call__(self, alarm: AlarmRow) -> None:
        """Take an alarm; any thread may call it."""
        with self._lock:
            if self._show is None:
                self._early.append(alarm)
            else:
                self._show(alarm)

    def show_by(self, show: Callable[[AlarmRow], None]) -> None:
        """Have alarms shown, those that came before too."""
        with self._lock:
            self._show = show
            for alarm in self._early:
                show(alarm)
            self._early = []


def sparkline(values: Sequence[float]) -> str:
    """Return a row of bars between the lowest and the highest of some values."""
    if not values:
        return ""
    low, high = min(values), max(values)
    span = (high - low) or 1.0
    return "".join(_BLOCKS[int((len(_BLOCKS) - 1) * (value - low) / span)] for value in values)


def alarm_line(alarm: AlarmRow, *, unit: str = "epoch") -> str:
    """Return an alarm in one line: when (by epoch or round), what is wrong, and what to try."""
    parts = [alarm.message or str(alarm.monitor)]
    if alarm.advice:
        parts.append(alarm.advice)
    word = "alarm" if alarm.state == "raised" else "alarm over"
    when = told_round(alarm.round) if unit == "round" else alarm.step
    return f"{unit} {when}: {word} ({alarm.severity}): {'. '.join(parts)}"
