"""Output of the commands: results to standard output, progress and errors to standard error."""

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
    """A console that raises when its reader has closed the pipe; `main` handles it."""

    def on_broken_pipe(self) -> None:
        raise BrokenPipeError


class _Progress(Console):
    """A console that falls silent when its reader has closed the pipe."""

    def on_broken_pipe(self) -> None:
        self.quiet = True
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stderr.fileno())


def out_console() -> Console:
    """Return the console for results; without a terminal it is wide enough for tables."""
    if isinstance(sys.stdout, io.TextIOWrapper):
        # Characters that the encoding lacks are shown as escapes.
        sys.stdout.reconfigure(errors="backslashreplace")
    is_known = sys.stdout.isatty() or "COLUMNS" in os.environ
    return _Results(width=None if is_known else 120, highlight=False)


def err_console() -> Console:
    """Return the console for progress."""
    return _Progress(stderr=True, highlight=False)


def somebody_reads() -> bool:
    """Return whether standard output still has a reader; False only for a closed pipe.

    Long queries ask this before they print anything.
    """
    if not hasattr(select, "poll"):  # Windows
        return True
    poll = select.poll()
    try:
        poll.register(sys.stdout.fileno(), select.POLLERR)
    except (OSError, ValueError):  # not a file
        return True
    return not poll.poll(0)


def print_line(console: Console, text: object) -> None:
    """Print a line without wrapping, so that paths in it can be copied."""
    console.print(safe(text), soft_wrap=True)


def new_table(
    title: object,
    columns: Iterable[str],
    *,
    numbers: Container[str] = (),
    whole: Container[str] = (),
) -> Table:
    """Return an empty table; `numbers` are right-aligned, `whole` columns are not wrapped."""
    table = Table(title=safe(title), title_justify="left")
    for name in columns:
        table.add_column(
            name, justify="right" if name in numbers else "left", no_wrap=name in whole
        )
    return table


def find_store(folder: str) -> Path:
    """Return the path of a run's store.

    Raises:
        UsageError: There is none.
    """
    from esper.nissa.database import store_path
    from esper.nissa.listing import RESULTS, describe_run

    path = store_path(folder)
    if not os.path.isfile(path):
        played = describe_run(Path(folder))
        if played.kind in RESULTS:
            raise UsageError(
                f"{folder} was written by `esper {played.kind}`, which has no run.db; its results "
                f"are in {RESULTS[played.kind]}"
            )
        report = Path(folder, "report.html")
        if report.is_file():
            raise UsageError(f"{folder} has no run.db, but a finished report: open {report}")
        raise UsageError(f"{folder} has no run.db; give the folder of a run (see `esper runs`)")
    return path


def listed(lines: Mapping[str, str]) -> str:
    """Return names and descriptions, one per line."""
    width = max(map(len, lines), default=0)
    return "\n".join(f"  {name:<{width}}  {line}" for name, line in lines.items())


def name_width(names: Iterable[str]) -> int:
    """Return the least width of a column of names."""
    return min(40, max(map(len, names), default=0))


def print_json(document: Any) -> None:
    """Print one JSON document in ASCII; numbers that are not finite become null."""
    from esper.nissa.columns import plain_data

    print(json.dumps(plain_data(document), indent=2))


def answer(as_json: bool, document: Any, show: Callable[[], object]) -> int:
    """Print the document as JSON, or call `show`; return exit code 0."""
    if as_json:
        print_json(document)
    else:
        show()
    return 0


def interrupted(again: str, where: str = "") -> int:
    """Print the command that continues the run; return the exit code."""
    from esper.nissa.recorded import INTERRUPTED

    print_line(err_console(), f"interrupted{where}; continue with: {again}")
    return INTERRUPTED


def safe(text: object) -> Text:
    """Return a value as text without markup and control characters."""
    shown = "".join(c if c.isprintable() else f"\\x{ord(c):02x}" for c in str(text))
    return Text(shown)


def one_line(text: object) -> str:
    """Return a message as one printable line; a very long one loses its middle."""
    line = safe(" ".join(str(text).split())).plain
    half = _LONGEST_LINE // 2
    return line if len(line) <= _LONGEST_LINE else f"{line[:half]} … {line[-half:]}"


@contextmanager
def naming_resume(command: str) -> Iterator[None]:
    """Within the block, add to errors the command that continues the run."""
    try:
        yield
    except EsperError as error:
        if "--resume" in str(error):
            raise
        raise type(error)(f"{error}; continue from the last checkpoint with: {command}") from error


def points(value: float | None) -> str:
    """Return a score in points, or as a loss, or a dash if there is none."""
    return "–" if value is None else format_score(value)


def gain_text(score: float | None, twin: float | None) -> str:
    """Return the gain over the twin on the same split, or a dash."""
    return "–" if score is None or twin is None else format_gain(score, twin)


# ---- Progress


_LINE_EVERY_S = 10.0
_BLOCKS = "▁▂▃▄▅▆▇█"


class LiveView:
    """Shows the progress of a run; use it as a context manager.

    Args:
        console: Where to show it.
        counters: Columns between the bar and the times.
        title: What is running.
        total: How much there is to do.
        done: How much of it is done already.
        fields: Further fields of the counters; `eta` replaces the bar's own estimate.
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
        """Start the clock."""
        self._console = console
        self._started = time.monotonic()
        self._lined = self._started
        self._first = done
        self._shown: set[tuple[str | None, ...]] = set()
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
        """Return whether to show an alarm: each once, informative ones only with `verbose`.

        The report has all of them.
        """
        key = (alarm.monitor, alarm.subject, alarm.severity)
        is_shown = verbose or alarm.severity in ("warning", "critical")
        if alarm.state != "raised" or not is_shown or key in self._shown:
            return False
        self._shown.add(key)
        return True

    def warn(self, line: str) -> None:
        """Print a line above the live display; any thread may call it."""
        print_line(self._console, line)

    def _draw(self, *parts: RenderableType) -> None:
        """Draw the bar with these parts below it, in a terminal."""
        if self._live is not None:
            self._live.update(Group(self._progress, *parts))

    def _is_line_due(self, now: float, *, matters: bool) -> bool:
        """Return whether to print a line now; if so, restart the interval."""
        is_due = matters or now - self._lined >= _LINE_EVERY_S
        if is_due:
            self._lined = now
        return is_due


class AlarmRelay:
    """Buffers the alarms of a run until there is a view to show them."""

    def __init__(self) -> None:
        """Start with an empty buffer."""
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
        """Show all alarms with this function, the buffered ones first."""
        with self._lock:
            self._show = show
            for alarm in self._early:
                show(alarm)
            self._early = []


def sparkline(values: Sequence[float]) -> str:
    """Return a sparkline of some values."""
    if not values:
        return ""
    low, high = min(values), max(values)
    span = (high - low) or 1.0
    return "".join(_BLOCKS[int((len(_BLOCKS) - 1) * (value - low) / span)] for value in values)


def alarm_line(alarm: AlarmRow, *, unit: str = "epoch") -> str:
    """Return an alarm in one line: when, what is wrong, what to try."""
    parts = [alarm.message or str(alarm.monitor)]
    if alarm.advice:
        parts.append(alarm.advice)
    word = "alarm" if alarm.state == "raised" else "alarm over"
    when = round_number(alarm.round) if unit == "round" else alarm.step
    return f"{unit} {when}: {word} ({alarm.severity}): {'. '.join(parts)}"
