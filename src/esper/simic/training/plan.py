"""What the rows of a round are, the stage of the curriculum, and the policy's random draws."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from esper.leyline.actions import HEAD_NAMES
from esper.leyline.randomness import derive_seed
from esper.leyline.records import Plain
from esper.simic.training.config import StageConfig

_SEED_BITS = 31
"""Environment seeds stay short enough to be typed in again."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RoundPlan(Plain):
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
        if stage.paid_off:
            return 1
        if stage.rounds:
            return max(1, min(left, stage.rounds - self._rounds_in_stage))
        return left

    def add_round(self, paid_off: float) -> None:
        """Count a finished round, and go on to the next stage where this one is over.

        Args:
            paid_off: running share of episodes that paid off, after the round.
        """
        self._rounds_in_stage += 1
        stage = self._stages[self.stage]
        is_over = 0 < stage.rounds <= self._rounds_in_stage
        is_over = is_over or 0 < stage.paid_off <= paid_off
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


_NUM_HEADS = len(HEAD_NAMES)
_BITS = 24
"""Bits of a draw: what float32 holds exactly, so that none is rounded up to 1."""

# The steps of SplitMix64 (Steele, Lea and Flood 2014).
_GOLDEN = 0x9E3779B97F4A7C15
_MIX = ((30, 0xBF58476D1CE4E5B9), (27, 0x94D049BB133111EB))
_LAST_SHIFT = 31


def draw_uniforms(rows: int, *keys: int | str, device: torch.device | str = "cpu") -> Tensor:
    """Return float32 [rows, heads] from [0, 1); row r depends on the keys and on r alone."""
    seed = derive_seed(*keys)
    place = torch.arange(rows * _NUM_HEADS, dtype=torch.int64, device=device)
    # Hashed twice: neighbouring counters and neighbouring seeds must have nothing in common.
    word = _mix(_mix(place * _signed(_GOLDEN) + seed) + _signed(_GOLDEN))
    uniforms = _shift(word, 64 - _BITS).to(torch.float32) / float(2**_BITS)
    return uniforms.view(rows, _NUM_HEADS)


def _mix(word: Tensor) -> Tensor:
    """Return every 64-bit word scrambled; products wrap around, which is meant."""
    for bits, factor in _MIX:
        word = (word ^ _shift(word, bits)) * _signed(factor)
    return word ^ _shift(word, _LAST_SHIFT)


def _shift(word: Tensor, bits: int) -> Tensor:
    """Return the word shifted to the right with zeros coming in, which int64 does not do."""
    return (word >> bits) & ((1 << (64 - bits)) - 1)


def _signed(word: int) -> int:
    return word - (1 << 64) if word >= 1 << 63 else word
