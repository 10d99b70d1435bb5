"""What was recorded lately: the window every monitor looks at.

The window is a function of the records alone, so a resumed run, which fills it from the store,
sees what an uninterrupted one would see.
"""

from __future__ import annotations

from collections import deque

from esper.nissa.columns import Row
from esper.nissa.schema import (
    EpisodeRow,
    EpochRow,
    RoundRow,
    RunRow,
    StageRow,
    UpdateHeadRow,
    UpdateRow,
)

WINDOW = 256
"""Records of each kind that are kept."""


class Recent:
    """The last records of a run, newest last."""

    def __init__(self, run: RunRow | None = None) -> None:
        """Start with nothing."""
        self.run = run or RunRow()
        self.rounds: deque[RoundRow] = deque(maxlen=WINDOW)
        self.updates: deque[UpdateRow] = deque(maxlen=WINDOW)
        """The last optimisation epoch of each update."""
        self.heads: dict[str, deque[UpdateHeadRow]] = {}
        """Per head, its state at the end of each update."""
        self.epochs: deque[EpochRow] = deque(maxlen=WINDOW)
        self.episodes: deque[EpisodeRow] = deque(maxlen=WINDOW)
        self.stages: dict[str, StageRow] = {}
        """The occupied slots at the last epoch, by name."""
        self._stages_at = (-1, -1)

    @property
    def progress(self) -> float | None:
        """Share of the planned rounds that the newest update or round has reached."""
        if not self.run.rounds:
            return None
        newest = [rows[-1].round for rows in (self.rounds, self.updates) if rows]
        return (max(newest) + 1) / self.run.rounds if newest else None

    def add(self, record: Row) -> None:
        """Take in a record."""
        if isinstance(record, EpochRow):
            self.epochs.append(record)
        elif isinstance(record, StageRow):
            if self._stages_at != (record.round, record.step):
                self._stages_at = (record.round, record.step)
                self.stages.clear()
            self.stages[str(record.slot)] = record
        elif isinstance(record, UpdateHeadRow):
            rows = self.heads.setdefault(record.head, deque(maxlen=WINDOW))
            if rows and rows[-1].round == record.round:
                rows.pop()
            rows.append(record)
        elif isinstance(record, UpdateRow):
            if record.is_last:
                self.updates.append(record)
        elif isinstance(record, RoundRow):
            self.rounds.append(record)
        elif isinstance(record, EpisodeRow):
            self.episodes.append(record)
