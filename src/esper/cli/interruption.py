"""Stopping on purpose: SIGINT and SIGTERM let the step in progress finish and be saved."""

from __future__ import annotations

import signal
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType

INTERRUPTED = 130
"""Exit code of a run that was stopped and can be continued."""


@contextmanager
def stop_signals() -> Iterator[list[int]]:
    """Within the block SIGINT and SIGTERM are noted in the list, and work goes on until it looks.

    Raises:
        KeyboardInterrupt: A second signal came: whoever sent it does not want to wait.
    """
    noted: list[int] = []

    def note(number: int, frame: FrameType | None) -> None:
        if noted:
            raise KeyboardInterrupt
        noted.append(number)

    before = {number: signal.signal(number, note) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield noted
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
