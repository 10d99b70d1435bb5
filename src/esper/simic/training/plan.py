"""RoundPlan: what the rows of one round are, drawn from the run's seed and the round alone."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from esper.leyline.randomness import derive_seed

_SEED_BITS = 31
"""Environment seeds stay short enough to be typed in again."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RoundPlan:
    """The rows of a round."""

    round: int
    """From 0."""
    tasks: tuple[str, ...]
    """Name of every row's task."""
    env_seeds: tuple[int, ...]
    """Seed of every row's environment; rows that share one share their twin."""
    slot_names: Mapping[str, tuple[str, ...]]
    """Names of the slots of every task, in action order."""

    @property
    def rows(self) -> int:
        """Number of rows."""
        return len(self.env_seeds)

    def to_mapping(self) -> dict[str, Any]:
        """Return plain data that `from_mapping` reads back."""
        return {
            "round": self.round,
            "tasks": list(self.tasks),
            "env_seeds": list(self.env_seeds),
            "slot_names": {task: list(names) for task, names in self.slot_names.items()},
        }

    @classmethod
    def from_mapping(cls, data: Mapping[str, Any]) -> RoundPlan:
        """Rebuild what `to_mapping` returned."""
        return cls(
            round=int(data["round"]),
            tasks=tuple(data["tasks"]),
            env_seeds=tuple(data["env_seeds"]),
            slot_names={task: tuple(names) for task, names in data["slot_names"].items()},
        )


def draw_env_seeds(
    run_seed: int, round_number: int, counts: Sequence[int], *, rows_per_seed: int, pool: int
) -> tuple[int, ...]:
    """Return the environment seed of every row.

    Args:
        run_seed: seed of the run.
        round_number: the round, from 0.
        counts: rows of every task, in order; rows of different tasks share no seed.
        rows_per_seed: how many rows of a task share one seed.
        pool: number of seeds there are to draw from; 0 is always fresh ones.
    """
    seeds: list[int] = []
    for task, count in enumerate(counts):
        groups = -(-count // rows_per_seed)
        drawn = [_draw(run_seed, round_number, task, group, pool) for group in range(groups)]
        seeds += [drawn[row // rows_per_seed] for row in range(count)]
    return tuple(seeds)


def _draw(run_seed: int, round_number: int, task: int, group: int, pool: int) -> int:
    number = derive_seed(run_seed, round_number, task, group, "environment")
    if pool:
        number = derive_seed(run_seed, number % pool, "environment pool")
    return number >> (63 - _SEED_BITS)
