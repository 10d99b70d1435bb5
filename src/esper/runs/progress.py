"""How far `esper.grow` is, on standard error: one line drawn anew, or one for every epoch."""

from __future__ import annotations

import sys
from typing import TextIO

from esper.leyline.records import EpochRecord, epoch_line

_BAR = 20
_CLEAR = "\r\x1b[2K"


class EpochProgress:
    """Shows every epoch; on a terminal as a bar that stays in its line, else as a line each.

    What a controller did to a seed stays on the screen in either case.

    Args:
        epochs: length of the run.
        stream: where to; standard error by default.
    """

    def __init__(self, epochs: int, stream: TextIO | None = None) -> None:
        """Nothing is shown yet."""
        self._epochs = epochs
        self._stream = sys.stderr if stream is None else stream
        self._is_live = self._stream.isatty()

    def show(self, record: EpochRecord) -> None:
        """Take over one epoch."""
        done = _BAR * record.epoch // self._epochs
        bar = f"{'━' * done}{'╌' * (_BAR - done)} " if self._is_live else ""
        line = f"{bar}epoch {record.epoch}/{self._epochs}  {epoch_line(record)}"
        decision = record.decision
        acted = decision is not None and decision.op != "WAIT" and decision.outcome == "done"
        event = ""
        if decision is not None and acted:
            words = (decision.op.lower(), decision.blueprint, decision.slot)
            event = f"epoch {record.epoch}: {' '.join(word for word in words if word)}\n"
        if not self._is_live:
            self._write(f"{line}\n{event}")
            return
        self._write(f"{_CLEAR}{event}{line}{chr(10) if record.epoch >= self._epochs else ''}")

    def _write(self, text: str) -> None:
        encoding = self._stream.encoding or "utf-8"
        # What the terminal's alphabet lacks is shown as a question mark, not as a crash.
        self._stream.write(text.encode(encoding, "replace").decode(encoding))
        self._stream.flush()


def is_shown(asked: bool | None) -> bool:
    """Return whether to show epochs; where nobody said so, whether somebody watches."""
    return sys.stderr is not None and sys.stderr.isatty() if asked is None else asked
