"""Where words go: results to standard output, progress and complaints to standard error."""

from __future__ import annotations

import io
import json
import os
import select
import sys
import threading
import time
from collections.abc import Callable, Container, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
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
from rich.table import Table
from rich.text import Text

from esper.leyline.errors import EsperError, UsageError
from esper.leyline.reasons import format_gain, format_score, round_number
from esper.nissa.schema import AlarmRow

_LONGEST_LINE = 900


class _Results(Console):
    """A console whose reader may go away: `main` says what that means."""

    def on_broken_pipe(self) -> None:
        raise BrokenPipeError


class _Progress(Console):
    """A console whose reader may go away: the work goes on without one."""

    def on_broken_pipe(self) -> None:
        self.quiet = True
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stderr.fileno())


def out_console() -> Console:
    """Return the console of results; output that is no terminal gets room for whole tables."""
    if isinstance(sys.stdout, io.TextIOWrapper):
        # What the terminal's alphabet lacks is shown as a code, not a crash.
        sys.stdout.reconfigure(errors="backslashreplace")
    is_known = sys.stdout.isatty() or "COLUMNS" in os.environ
    return _Results(width=None if is_known else 120, highlight=False)


def err_console() -> Console:
    """Return the console of progress."""
    return _Progress(stderr=True, highlight=False)


def somebody_reads() -> bool:
    """Return whether standard output has a reader; only of a pipe can it be known that it has not.

    Whoever writes learns it from the next line; this is for long work between two lines.
    """
    if not hasattr(select, "poll"):  # Windows
        return True
    poll = select.poll()
    try:
        poll.register(sys.stdout.fileno(), select.POLLERR)
    except (OSError, ValueError):  # not a file
        return True
    return not poll.poll(0)


def tell(console: Console, text: object) -> None:
    """Print a line whole, however narrow the terminal, so that paths in it can be copied."""
    console.print(safe(text), soft_wrap=True)


def new_table(
    title: object,
    columns: Iterable[str],
    *,
    numbers: Container[str] = (),
    whole: Container[str] = (),
) -> Table:
    """Return a table without rows; `numbers` are set right, `whole` columns stay on one line."""
    table = Table(title=safe(title), title_justify="left")
    for name in columns:
        table.add_column(
            name, justify="right" if name in numbers else "left", no_wrap=name in whole
        )
    return table


def find_store(folder: str) -> Path:
    """Return the store of a run, or say which folder would have one."""
    from esper.nissa.database import store_path
    from esper.nissa.listing import RESULTS, describe_run

    path = store_path(folder)
    if not os.path.isfile(path):
        played = describe_run(Path(folder))
        if played.kind in RESULTS:
            raise UsageError(
                f"{folder} is of `esper {played.kind}`, which keeps no run.db; what came of it is "
                f"in its {RESULTS[played.kind]}"
            )
        raise UsageError(f"{folder} has no run.db; give the folder of a run (see `esper runs`)")
    return path


def listed(lines: Mapping[str, str]) -> str:
    """Return names with a line about each, below one another."""
    width = max(map(len, lines), default=0)
    return "\n".join(f"  {name:<{width}}  {line}" for name, line in lines.items())


def name_width(names: Iterable[str]) -> int:
    """Return how wide a column of names must stay, whatever else is squeezed."""
    return min(40, max(map(len, names), default=0))


def print_json(document: Any) -> None:
    """Print one JSON document in ASCII; numbers that are not finite become null."""
    from esper.nissa.columns import plain_data

    print(json.dumps(plain_data(document), indent=2))


def answer(as_json: bool, document: Any, show: Callable[[], object]) -> int:
    """Print the document where JSON was asked for, show it to people otherwise; return 0."""
    if as_json:
        print_json(document)
    else:
        show()
    return 0


def interrupted(again: str, where: str = "") -> int:
    """Say by which command the run is continued; return the exit code."""
    from esper.nissa.recorded import INTERRUPTED

    tell(err_console(), f"interrupted{where}; continue with: {again}")
    return INTERRUPTED


def safe(text: object) -> Text:
    """Return a value as text that can neither style nor steer the terminal."""
    shown = "".join(c if c.isprintable() else f"\\x{ord(c):02x}" for c in str(text))
    return Text(shown)


def one_line(text: object) -> str:
    """Return a message as one printable line; one that is far too long loses its middle."""
    line = safe(" ".join(str(text).split())).plain
    half = _LONGEST_LINE // 2
    return line if len(line) <= _LONGEST_LINE else f"{line[:half]} … {line[-half:]}"


@contextmanager
def naming_resume(command: str) -> Iterator[None]:
    """Within the block a failure also says how the run is continued, where it does not already."""
    try:
        yield
    except EsperError as error:
        if "--resume" in str(error):
            raise
        raise type(error)(f"{error}; what was saved can be continued with: {command}") from error


def points(value: float | None) -> str:
    """Return a score in points, or the loss that it is, or a dash."""
    return "–" if value is None else format_score(value)


def gain_text(score: float | None, twin: float | None) -> str:
    """Return how far a score is above the twin's on the same split, or a dash."""
    return "–" if score is None or twin is None else format_gain(score, twin)


# ---- What a person sees while a command runs


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
    when = round_number(alarm.round) if unit == "round" else alarm.step
    return f"{unit} {when}: {word} ({alarm.severity}): {'. '.join(parts)}"
