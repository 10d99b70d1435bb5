"""Time limits for questions to a store that somebody else may have made.

A file can be built so that reading one of its tables never ends. SQLite asks a `TimeLimit` every
few thousand instructions whether to go on, so every question ends.
"""

from __future__ import annotations

import sqlite3
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

ANSWER_S = 20.0
"""Longest time that one question of Esper's own to a store may take."""

_CHECK_EVERY = 10_000
"""Instructions of SQLite between two looks at the clock, well under a millisecond."""

_GRACE_S = 0.25


class TimeLimit:
    """Says whether a question may go on; SQLite asks it now and then.

    Ctrl-C arrives here as well: Python notices it as soon as it is asked, and SQLite takes the
    exception for a request to stop.

    Args:
        seconds: how long a question may take; None is no limit.
        is_wanted: asked often whether somebody still waits for the answer.
    """

    def __init__(self, seconds: float | None, is_wanted: Callable[[], bool] | None = None) -> None:
        """Start with the full time."""
        self.seconds = seconds
        self.is_late = self.is_abandoned = False
        self.is_wanted = is_wanted
        self._left = seconds
        self._until: float | None = None
        self.start()

    def start(self) -> None:
        """Begin another question, with the full time."""
        self.is_late = False
        self._left = self.seconds
        self.go_on()

    def pause(self) -> None:
        """Stop the clock while the caller works on what it got."""
        if self._until is not None:
            self._left = self._until - time.monotonic()
            self._until = None

    def go_on(self) -> None:
        """Let the clock run again."""
        self._until = None if self._left is None else time.monotonic() + self._left

    def apply(self, connection: sqlite3.Connection) -> None:
        """Have every further question on a connection ask this limit."""
        connection.set_progress_handler(self, _CHECK_EVERY)

    @contextmanager
    def watching(self, connection: sqlite3.Connection) -> Iterator[None]:
        """Within the block a question also ends in time if SQLite does not ask: it counts so."""
        if self.seconds is None:
            yield
            return

        def end() -> None:
            self.is_late = True
            connection.interrupt()

        timer = threading.Timer(self.seconds + _GRACE_S, end)
        timer.daemon = True
        timer.start()
        try:
            yield
        finally:
            timer.cancel()

    def __call__(self) -> int:
        """Return 1 where the question has to end."""
        self.is_late = self._until is not None and time.monotonic() > self._until
        self.is_abandoned = self.is_wanted is not None and not self.is_wanted()
        return int(self.is_late or self.is_abandoned)
