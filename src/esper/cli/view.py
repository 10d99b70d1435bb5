"""What a person sees while a command runs, and while a network grows.

On a terminal a progress bar and what belongs to it are drawn anew in place; without one, lines are
printed at a rate that a log can bear.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from types import TracebackType
from typing import Any, Self

from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    ProgressColumn,
    TextColumn,
    TimeElapsedColumn,
    TimeRemainingColumn,
)
from rich.table import Table
from rich.text import Text

from esper.cli.output import safe, tell
from esper.leyline.records import (
    DecisionRecord,
    EpochRecord,
    epoch_line,
    told_round,
    told_worth,
)
from esper.nissa.schema import AlarmRow

STAGE_STYLES = {
    "DORMANT": "dim",
    "GERMINATED": "yellow",
    "TRAINING": "cyan",
    "BLENDING": "magenta",
    "HOLDING": "blue",
    "FOSSILIZED": "green",
    "PRUNED": "red",
    "EMBARGOED": "red",
    "RESETTING": "red",
}

_LINE_EVERY_S = 10.0
_RECENT = 6
_SPARKS = 30
_BLOCKS = "▁▂▃▄▅▆▇█"


class LiveView:
    """Shows how far a run is; use it as a context manager.

    Args:
        console: where to.
        counters: the columns that say how much is done, between the bar and the times.
        title: what is running.
        total: how much there is to do.
        done: how much of it is done already.
        fields: what else the counters show.
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
        self._progress = Progress(
            TextColumn("{task.description}", markup=False),
            BarColumn(),
            *counters,
            TimeElapsedColumn(),
            TextColumn("ETA"),
            TimeRemainingColumn(),
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

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
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


class GrowthView(LiveView):
    """Shows a growing run; use it as a context manager and give it every record."""

    def __init__(
        self, console: Console, epochs: int, done: int, *, title: str, verbose: bool = False
    ) -> None:
        """Show a run of this many epochs, of which some may be done already."""
        counters = (MofNCompleteColumn(), TextColumn("epochs"))
        super().__init__(console, *counters, title=title, total=epochs, done=done)
        self._epochs = epochs
        self._verbose = verbose
        self._events: list[Text] = []
        self._scores: list[float] = []

    def show(self, record: EpochRecord, reasons: Sequence[str] = ()) -> None:
        """Take over one epoch, with the reasons of its decision where they are known."""
        decision = record.decision
        # A gate that is asked every epoch would drown everything else.
        matters = decision is not None and decision.op != "WAIT" and decision.outcome == "done"
        if decision is not None and (matters or self._verbose):
            self._events.append(decision_line(record.epoch, decision))
            self._events += [safe(f"    {reason}") for reason in reasons]
        self._progress.update(self._bar, completed=record.epoch)
        self._scores = [*self._scores, record.val_score][-_SPARKS:]
        if self._live is not None:
            self._draw(self._table(record), *self._events[-_RECENT:])
        else:
            self._print_lines(record)

    def alarm(self, alarm: AlarmRow) -> None:
        """Tell an alarm once; what is only informative, and every repetition, is in the report."""
        if self.is_news(alarm, verbose=self._verbose):
            self.warn(alarm_line(alarm))

    def _table(self, record: EpochRecord) -> Table:
        table = Table(box=None, pad_edge=False)
        for column in ("slot", "stage", "seed", "alpha", "contribution"):
            table.add_column(column, justify="right" if column == "alpha" else "left")
        for slot in record.slots:
            worth = ""
            if slot.contribution is not None:
                worth = told_worth(slot.contribution, slot.contribution_se)
            table.add_row(
                safe(slot.name),
                Text(slot.stage.lower(), style=STAGE_STYLES.get(slot.stage, "")),
                safe(slot.blueprint or ""),
                f"{slot.alpha:.2f}" if slot.blueprint else "",
                worth,
            )
        table.caption = f"{sparkline(self._scores)}  {epoch_line(record)}"
        table.caption_justify = "left"
        return table

    def _print_lines(self, record: EpochRecord) -> None:
        """Print decisions as they happen, and metrics at a rate a log can bear."""
        for event in self._events:
            self._console.print(event, soft_wrap=True)
        self._events.clear()
        now = time.monotonic()
        if self._is_line_due(now, matters=record.epoch in (1, self._epochs)):
            rate = (now - self._started) / max(record.epoch - self._first, 1)
            eta = rate * (self._epochs - record.epoch)
            done = f"epoch {record.epoch}/{self._epochs}"
            tell(self._console, f"{done}  {epoch_line(record)}  ETA {eta:.0f} s")


def sparkline(values: Sequence[float]) -> str:
    """Return a row of bars between the lowest and the highest of some values."""
    if not values:
        return ""
    low, high = min(values), max(values)
    span = (high - low) or 1.0
    return "".join(_BLOCKS[int((len(_BLOCKS) - 1) * (value - low) / span)] for value in values)


def decision_line(epoch: int, decision: DecisionRecord) -> Text:
    """Return a decision in one line."""
    words = [f"epoch {epoch}: {decision.op}"]
    words += [str(word) for word in (decision.slot, decision.blueprint) if word]
    if decision.outcome != "done":
        words.append(f"({decision.reason or decision.outcome})")
    return safe(" ".join(words))


def alarm_line(alarm: AlarmRow, *, unit: str = "epoch") -> str:
    """Return an alarm in one line: when (by epoch or round), what is wrong, and what to try."""
    parts = [alarm.message or str(alarm.monitor)]
    if alarm.advice:
        parts.append(alarm.advice)
    word = "alarm" if alarm.state == "raised" else "alarm over"
    when = told_round(alarm.round) if unit == "round" else alarm.step
    return f"{unit} {when}: {word} ({alarm.severity}): {'. '.join(parts)}"
