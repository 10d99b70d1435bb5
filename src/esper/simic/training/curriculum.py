"""Curriculum: which stage a run is in, and when it goes on to the next."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from esper.simic.training.config import StageConfig


class Curriculum:
    """The place of a run in its stages, which come one after another; the last does not end.

    Args:
        stages: the stages of the run, at least one.
    """

    def __init__(self, stages: Sequence[StageConfig]) -> None:
        """Start with the first stage."""
        self._stages = tuple(stages)
        self.stage = 0
        """Stage that the next round belongs to, from 0."""
        self._rounds_in_stage = 0

    def known_rounds(self, left: int) -> int:
        """Return how many of the rounds left are sure to belong to this stage, the next included.

        Args:
            left: rounds to be played, at least one.
        """
        stage = self._stages[self.stage]
        if stage.success:
            return 1
        if stage.rounds:
            return max(1, min(left, stage.rounds - self._rounds_in_stage))
        return left

    def add_round(self, success: float) -> None:
        """Count a finished round, and go on to the next stage where this one is over.

        Args:
            success: running share of episodes that paid, after the round.
        """
        self._rounds_in_stage += 1
        stage = self._stages[self.stage]
        is_over = 0 < stage.rounds <= self._rounds_in_stage
        is_over = is_over or 0 < stage.success <= success
        if is_over and self.stage + 1 < len(self._stages):
            self.stage += 1
            self._rounds_in_stage = 0

    def state_dict(self) -> dict[str, Any]:
        """Return the place as plain data."""
        return {"stage": self.stage, "rounds_in_stage": self._rounds_in_stage}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore what `state_dict` returned; other entries are left alone."""
        # The stages may have become fewer since.
        self.stage = min(int(state["stage"]), len(self._stages) - 1)
        self._rounds_in_stage = int(state["rounds_in_stage"])
