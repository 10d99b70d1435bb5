"""`LiveView`: what all views of a running command share.

On a terminal a progress bar and what belongs to it are drawn anew in place; without one, lines are
printed at a rate that a log can bear.
"""

from __future__ import annotations

import time
from types import TracebackType
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

from esper.cli.output import safe

_LINE_EVERY_S = 10.0


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

    def warn(self, line: str) -> None:
        """Print a line at once, above what is live; any thread may call it."""
        self._console.print(safe(line), soft_wrap=True)

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
