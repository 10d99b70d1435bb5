"""Stopping on purpose: SIGINT and SIGTERM let the step in progress finish and be saved."""

from __future__ import annotations

import signal
import time
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType

SAME_REQUEST_S = 1.0
"""Signals this close to the first are the same request: `timeout` sends one to a process and one to
its group, batch systems one to every process.
"""

INTERRUPTED = 130
"""Exit code of a run that was stopped and can be continued."""


@contextmanager
def stop_signals() -> Iterator[list[int]]:
    """Within the block SIGINT and SIGTERM are noted in the list, and work goes on until it looks.

    Raises:
        KeyboardInterrupt: Another signal came later: whoever sent it does not want to wait.
    """
    noted: list[int] = []
    first = 0.0

    def note(number: int, frame: FrameType | None) -> None:
        nonlocal first
        now = time.monotonic()
        if not noted:
            noted.append(number)
            first = now
        elif now - first > SAME_REQUEST_S:
            raise KeyboardInterrupt

    before = {number: signal.signal(number, note) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield noted
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
