"""Tally: what a training run has come to over its finished rounds.

It counts decisions and the fates of seeds, follows the share of episodes that paid, averages the
last rounds, and tells which of them had the best policy so far. Curiosity, imitation and the
curriculum go by the share of successes.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from esper.simic.agent.config import ExplorationConfig
from esper.simic.training.outcome import RoundOutcome

ROLLING_ROUNDS = 10
"""Rounds over which scores and merits are averaged."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Standing:
    """Where a run stands after a round."""

    score_rolling: float
    """Mean final score of the last ten rounds."""
    merit_rolling: float
    """Mean gain over the twin (return, where there is no twin) of the last ten rounds."""
    is_best: bool
    """Whether no earlier round had a higher `merit_rolling`."""


class Tally:
    """Adds up finished rounds.

    Args:
        exploration: says what a success is, and how fast its share follows the rounds.
        blueprint_names: names of the blueprints, in action order.
    """

    def __init__(self, exploration: ExplorationConfig, blueprint_names: Sequence[str]) -> None:
        """Start without a round."""
        self._exploration, self._blueprint_names = exploration, tuple(blueprint_names)
        self.env_steps = 0
        """Decisions of all rows."""
        self.success = 0.0
        """Running share of episodes that paid."""
        self.fates: dict[str, dict[str, int]] = {}
        """Seeds germinated, fossilized and pruned, by blueprint."""
        self._merits: list[float] = []
        self._scores: list[float] = []
        self._best = -math.inf

    @property
    def score_rolling(self) -> float | None:
        """Mean final score of the last ten rounds; None before the first."""
        return _mean(self._scores) if self._scores else None

    @property
    def merit_rolling(self) -> float | None:
        """Mean gain (return, where there is no twin) of these rounds; None before the first."""
        return _mean(self._merits) if self._merits else None

    def add(self, outcome: RoundOutcome) -> Standing:
        """Count a finished round; return where the run stands after it."""
        self.env_steps += outcome.env_steps
        self._follow_success(outcome)
        self._count_fates(outcome)
        gain = outcome.gain_mean
        _push(self._scores, outcome.score_mean)
        _push(self._merits, outcome.return_mean if gain is None else gain)
        merit = _mean(self._merits)
        # Until the average spans all its rounds, the newest policy is the best known.
        is_best = len(self._merits) < ROLLING_ROUNDS or merit > self._best
        if is_best:
            self._best = merit if len(self._merits) == ROLLING_ROUNDS else -math.inf
        return Standing(score_rolling=_mean(self._scores), merit_rolling=merit, is_best=is_best)

    def state_dict(self) -> dict[str, Any]:
        """Return all counts as plain data."""
        return {
            "env_steps": self.env_steps,
            "success": self.success,
            "merits": list(self._merits),
            "scores": list(self._scores),
            "best": None if math.isinf(self._best) else self._best,
            "fates": {name: dict(counts) for name, counts in self.fates.items()},
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore what `state_dict` returned; other entries are left alone."""
        self.env_steps, self.success = int(state["env_steps"]), float(state["success"])
        self._merits, self._scores = list(state["merits"]), list(state["scores"])
        self._best = -math.inf if state["best"] is None else float(state["best"])
        self.fates = {name: dict(counts) for name, counts in state["fates"].items()}

    def _follow_success(self, outcome: RoundOutcome) -> None:
        exploration = self._exploration
        share = float((outcome.returns > exploration.success_return).double().mean())
        # The first round has no share before it to be averaged with.
        keep = exploration.success_momentum if outcome.round else 0.0
        self.success = keep * self.success + (1.0 - keep) * share

    def _count_fates(self, outcome: RoundOutcome) -> None:
        for name, counts in outcome.blueprint_fates(self._blueprint_names).items():
            known = self.fates.setdefault(name, dict.fromkeys(counts, 0))
            for fate, count in counts.items():
                known[fate] += count


def _push(recent: list[float], value: float) -> None:
    """Add a value to the last ten."""
    recent.append(value)
    del recent[:-ROLLING_ROUNDS]


def _mean(values: list[float]) -> float:
    return sum(values) / len(values)
