"""What the heuristic sees of one row, and what it remembers of it.

Signals carry scores, not gains. The memory keeps the score a seed started from: the one seen at
the decision that germinated it, because the signals that first show the seed already include an
epoch of its life. The start of a stage is kept in the same way.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass, field
from typing import Any

from esper.leyline.masks import Masks
from esper.leyline.signals import Signals
from esper.leyline.stages import LIVE_STAGES


@dataclass(frozen=True, slots=True)
class RowView:
    """The signals and masks of one row as plain numbers; lists are over slots."""

    epoch: int
    score: float
    plateau_epochs: int
    stabilized: bool
    rolled_back: bool
    stage: list[int]
    blueprint: list[int]
    alpha_mode: list[int]
    alpha: list[float]
    alpha_target: list[float]
    epochs_in_stage: list[int]
    counterfactual_age: list[int]
    contribution: list[float]
    legal: list[list[bool]]
    """Whether each op is legal at each slot."""
    fits: list[list[bool]]
    """Whether each blueprint fits each slot."""


def read_rows(signals: Signals, masks: Masks) -> list[RowView]:
    """Return one view per row; every tensor is copied from its device once."""
    columns = [
        column.tolist()
        for column in (
            signals.epoch,
            signals.val_score,
            signals.plateau_epochs,
            signals.stabilized,
            signals.rolled_back,
            signals.stage,
            signals.blueprint,
            signals.alpha_mode,
            signals.alpha,
            signals.alpha_target,
            signals.epochs_in_stage,
            signals.counterfactual_age,
            signals.contribution,
            masks.slot_by_op,
            masks.blueprint_by_slot,
        )
    ]
    return [RowView(*values) for values in zip(*columns, strict=True)]


@dataclass(slots=True)
class SeedMemory:
    """The scores a live seed is measured against."""

    stage: int
    """Its stage at the last decision."""
    germination_score: float
    """Score at the decision that germinated it."""
    stage_score: float
    """Score at the decision that began its stage."""


@dataclass(slots=True)
class RowMemory:
    """All that is remembered of one row."""

    score: float | None = None
    """Score at the last decision."""
    last_prune: int | None = None
    """Epoch of the last own prune."""
    position: int = 0
    """Where in the rotation the search for the next blueprint starts."""
    penalised_turns: int = 0
    """How often a blueprint had to be chosen although all were penalised."""
    penalties: dict[int, float] = field(default_factory=dict)
    """Penalty by blueprint id."""
    seeds: dict[int, SeedMemory] = field(default_factory=dict)
    """The live seeds by slot."""

    def observe(self, row: RowView) -> None:
        """Note new seeds, changes of stage and the score."""
        # A seed or stage that is new now was begun at the last decision.
        begun = row.score if self.score is None else self.score
        for slot, stage in enumerate(row.stage):
            seed = self.seeds.get(slot)
            if stage not in LIVE_STAGES:
                self.seeds.pop(slot, None)
            elif seed is None:
                self.seeds[slot] = SeedMemory(stage, begun, begun)
            elif seed.stage != stage:
                seed.stage, seed.stage_score = stage, begun
        self.score = row.score

    def decay_penalties(self, factor: float, floor: float) -> None:
        """Let an epoch pass over the penalties and drop the small ones."""
        decayed = {blueprint: value * factor for blueprint, value in self.penalties.items()}
        self.penalties = {each: value for each, value in decayed.items() if value >= floor}

    def to_plain(self) -> dict[str, Any]:
        """Return the memory as numbers, lists and mappings with text keys."""
        return {
            "score": self.score,
            "last_prune": self.last_prune,
            "position": self.position,
            "penalised_turns": self.penalised_turns,
            "penalties": [[blueprint, value] for blueprint, value in self.penalties.items()],
            "seeds": [{"slot": slot, **asdict(seed)} for slot, seed in self.seeds.items()],
        }

    @classmethod
    def from_plain(cls, plain: dict[str, Any]) -> RowMemory:
        """Return the memory that `to_plain` described."""
        seeds = [dict(seed) for seed in plain["seeds"]]
        return cls(
            score=plain["score"],
            last_prune=plain["last_prune"],
            position=plain["position"],
            penalised_turns=plain["penalised_turns"],
            penalties={blueprint: value for blueprint, value in plain["penalties"]},
            seeds={seed.pop("slot"): SeedMemory(**seed) for seed in seeds},
        )
