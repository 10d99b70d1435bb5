"""The heuristic controller: germinate on a plateau, keep seeds that pay, prune the others.

There is one seed at a time. The rules compare gains with thresholds in points. A gain of accuracy
is in points already. Where the score is a negative loss, whose scale depends on the task, 1 % of
the loss at germination counts as one point.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from esper.leyline.actions import LifecycleOp
from esper.leyline.config import Config, option
from esper.leyline.controller import ControllerContext, pace, shortened
from esper.leyline.reasons import Why, describe_progress
from esper.leyline.stages import (
    ALPHA_TARGETS,
    COOLDOWN_STAGES,
    LIVE_STAGES,
    SPEED_TICKS,
    TEMPO_EPOCHS,
    AlphaCurve,
    AlphaMode,
    BlendStyle,
    SeedStage,
)
from esper.tamiyo.controllers.registry import (
    LOSS_POINTS,
    WAIT,
    RowController,
    RowView,
    Verdict,
    describe_resting,
    describe_waiting,
    read_settings,
    register_controller,
    unit_of,
)


@dataclass(slots=True)
class SeedMemory:
    """The scores that a live seed is compared with."""

    stage: int
    """Its stage at the last decision."""
    germination_score: float
    """Score at the decision that germinated it."""
    stage_score: float
    """Score at the decision that began its stage."""


PRUNE_PENALTY = 2.0  # Penalty of a blueprint for each pruned seed.
PENALTY_DECAY = 0.5  # Share of a penalty that is left an epoch later.
PENALTY_FLOOR = 0.1  # A penalty below this is dropped.


@dataclass(slots=True)
class RowMemory:
    """The memory of one row."""

    score: float | None = None
    """Score at the last decision."""
    last_prune: int | None = None
    """Epoch of the last prune by this controller."""
    position: int = 0
    """Position in the rotation at which the search for the next blueprint starts."""
    penalised_turns: int = 0
    """How often a blueprint was chosen although all were penalised."""
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

    def decay_penalties(self) -> None:
        """Decay the penalties by one epoch and drop small ones."""
        decayed = {each: value * PENALTY_DECAY for each, value in self.penalties.items()}
        self.penalties = {each: value for each, value in decayed.items() if value >= PENALTY_FLOOR}

    def to_plain(self) -> dict[str, Any]:
        """Return the memory as numbers, lists and mappings with text keys."""
        return {
            **asdict(self),
            "penalties": [[blueprint, value] for blueprint, value in self.penalties.items()],
            "seeds": [{"slot": slot, **asdict(seed)} for slot, seed in self.seeds.items()],
        }

    @classmethod
    def from_plain(cls, plain: dict[str, Any]) -> RowMemory:
        """Return the memory from the result of `to_plain`."""
        copies = [dict(seed) for seed in plain["seeds"]]
        seeds = {seed.pop("slot"): SeedMemory(**seed) for seed in copies}
        return cls(**{**plain, "penalties": dict(plain["penalties"]), "seeds": seeds})


_BY_PROGRESS = (Why.NOT_SETTLED, Why.NO_PLATEAU, Why.EARLY, Why.TOO_LATE)
"""Reasons that are followed by the trend of the loss."""


@dataclass(frozen=True, kw_only=True)
class HeuristicConfig(Config):
    """The constants of the heuristic; times are meant for runs of 60 epochs or more.

    In a shorter run they are shortened in proportion, and harm has to be as much greater.
    """

    rotation: tuple[str, ...] = option(
        (
            "conv_light",
            "conv_heavy",
            "mlp_small",
            "attention",
            "norm",
            "depthwise",
            "lora",
            "mlp",
            "lora_large",
        ),
        "Blueprints in the order in which they are tried; those that do not fit are passed over.",
    )
    min_epoch: int = option(5, "First epoch at which a seed may be germinated.", minimum=0)
    plateau_epochs: int = option(
        3, "Epochs without progress after which a seed is germinated.", minimum=0
    )
    rest_epochs: int = option(5, "Epochs between a prune and the next germination.", minimum=0)
    trial_epochs: int = option(
        5, "Epochs a seed stays in a stage before it can be pruned for doing harm.", minimum=0
    )
    prune_below: float = option(
        -2.0, "A seed whose stage has changed the score by less than these points is pruned."
    )
    fossilize_above: float = option(
        0.5, "A holding seed worth more than these points is fossilized, any other pruned."
    )
    ransom_contribution: float = option(
        0.1,
        "A holding seed that contributes more than these points although the score has fallen "
        "since its germination has only made the host depend on it, and is pruned.",
    )
    learning_epochs: int = option(
        15,
        "Epochs a seed lives at least before it is judged worth too little; one at full amplitude "
        "from its first step is measured earlier than it can learn.",
        minimum=0,
    )
    measurement_epochs: int = option(
        10, "Epochs a holding seed waits for an ablation at full amplitude.", minimum=0
    )
    penalty_limit: float = option(3.0, "A blueprint penalised this much is passed over.", minimum=0)


@register_controller("heuristic")
class HeuristicController(RowController[RowMemory]):
    """Germinates on plateaus, one seed at a time, and keeps a seed only if it pays."""

    memory = RowMemory

    def __init__(self, context: ControllerContext, config: HeuristicConfig | None = None) -> None:
        super().__init__()
        self.config = config or HeuristicConfig()
        self._rotation = context.find_blueprints(self.config.rotation)
        self._inert_epochs_of = context.inert_epochs_of

    @classmethod
    def build(cls, argument: str | None, context: ControllerContext) -> HeuristicController:
        """Return the controller; `argument` may set constants, as in 'plateau_epochs=5'."""
        return cls(context, read_settings("heuristic", argument, HeuristicConfig))

    def state_dict(self) -> dict[str, Any]:
        """Return the memory of every row as plain data."""
        return {"rows": [memory.to_plain() for memory in self._rows]}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore the memory of every row."""
        self._rows = [RowMemory.from_plain(row) for row in state["rows"]]

    def decide(self, row: RowView, memory: RowMemory) -> Verdict:
        """Advance or judge the first live seed; without one, germinate if it is time."""
        memory.observe(row)
        memory.decay_penalties()
        slot = next((slot for slot, stage in enumerate(row.stage) if stage in LIVE_STAGES), None)
        if slot is None:
            return self._germinate(row, memory)
        if row.alpha_mode[slot] == AlphaMode.DOWN:
            return WAIT, describe_waiting(row, slot)  # it is being pruned already
        stage = row.stage[slot]
        if stage == SeedStage.GERMINATED:
            return _at(LifecycleOp.ADVANCE, slot, row)
        if stage == SeedStage.HOLDING:
            return self._judge(row, slot, memory)
        if self._does_harm(row, slot, memory):
            lost = self._points(row.score - memory.seeds[slot].stage_score, slot, memory)
            change = f"{lost:+.2f} {unit_of(row.score)}"
            why = f"{Why.HARM} ({change} in {row.epochs_in_stage[slot]} epochs)"
            return self._prune(row, slot, memory, why)
        if stage == SeedStage.BLENDING and not row.is_fully_blended(slot):
            return WAIT, describe_waiting(row, slot)
        # Whether a training seed is ready is the gate's business: it is asked every epoch.
        return _at(LifecycleOp.ADVANCE, slot, row)

    def _germinate(self, row: RowView, memory: RowMemory) -> Verdict:
        """Germinate the next blueprint once the host has settled and stopped improving."""
        config = self.config
        legal = row.legal[LifecycleOp.GERMINATE]

        def within(epochs: int) -> int:
            return shortened(epochs, row.horizon)

        rested = memory.last_prune is None or row.epoch - memory.last_prune >= within(
            config.rest_epochs
        )
        slot = legal.index(True) if any(legal) else 0
        fitting = self._fitting(row.fits[slot])
        inert = max((self._inert_epochs_of(slot, each) for each in fitting), default=0)
        obstacles = (
            (not rested, f"{Why.RESTING} (epoch {memory.last_prune})"),
            (not row.stabilized, Why.NOT_SETTLED),
            (row.epoch < within(config.min_epoch), Why.EARLY),
            (any(stage in COOLDOWN_STAGES for stage in row.stage), describe_resting(row)),
            (not any(legal), f"{Why.FULL} (0 of {len(legal)})"),
            (row.plateau_epochs < within(config.plateau_epochs), Why.NO_PLATEAU),
            # A seed that cannot be blended in any more would end as it began.
            (row.horizon - row.epoch <= inert, Why.TOO_LATE),
        )
        for is_in_the_way, why in obstacles:
            if is_in_the_way:
                progress = describe_progress(row.loss_history, row.epoch, row.horizon)
                return WAIT, f"{why} ({progress})" if why in _BY_PROGRESS else why
        tempo = max(epochs for epochs in TEMPO_EPOCHS if epochs <= max(within(5), TEMPO_EPOCHS[0]))
        return {
            "op": LifecycleOp.GERMINATE,
            "slot": slot,
            "blueprint": self._next_blueprint(row.fits[slot], memory),
            "style": BlendStyle.SIGMOID_ADD,
            "tempo": TEMPO_EPOCHS.index(tempo),
            "alpha_target": ALPHA_TARGETS.index(1.0),
        }, ""

    def _order(self, fits: Sequence[bool]) -> list[int]:
        """Return all blueprints: the rotation, then the others, such as registered ones."""
        return self._rotation + [each for each in range(len(fits)) if each not in self._rotation]

    def _fitting(self, fits: Sequence[bool]) -> list[int]:
        """Return the blueprints that fit; those outside the rotation only where none of it does."""
        of_rotation = [each for each in self._rotation if fits[each]]
        return of_rotation or [each for each in self._order(fits) if fits[each]]

    def _next_blueprint(self, fits: Sequence[bool], memory: RowMemory) -> int:
        """Return the next fitting blueprint of the rotation that is not penalised too much."""
        order, fitting = self._order(fits), self._fitting(fits)
        ahead = order[memory.position :] + order[: memory.position]
        limit = self.config.penalty_limit
        welcome = [
            each for each in ahead if each in fitting and memory.penalties.get(each, 0.0) < limit
        ]
        if welcome:
            chosen = welcome[0]
        else:
            by_penalty = sorted(fitting, key=lambda each: memory.penalties.get(each, 0.0))
            chosen = by_penalty[memory.penalised_turns % len(by_penalty)]
            memory.penalised_turns += 1
        memory.position = (order.index(chosen) + 1) % len(order)
        return chosen

    def _does_harm(self, row: RowView, slot: int, memory: RowMemory) -> bool:
        """Return whether the score has fallen too far since the seed's stage began."""
        gain = row.score - memory.seeds[slot].stage_score
        return (
            row.epochs_in_stage[slot] >= shortened(self.config.trial_epochs, row.horizon)
            # In a short run an epoch is worth more: scores move as much further by themselves.
            and self._points(gain, slot, memory) < self.config.prune_below * pace(row.horizon)
        )

    def _judge(self, row: RowView, slot: int, memory: RowMemory) -> Verdict:
        """Fossilize or prune a holding seed."""
        config = self.config
        contribution = self._points(row.contribution[slot], slot, memory)
        improvement = self._points(row.score - memory.seeds[slot].germination_score, slot, memory)
        measured = not math.isnan(contribution)
        # An ablation older than the stage was made at a part of the amplitude and says too little.
        current = measured and row.counterfactual_age[slot] <= row.epochs_in_stage[slot]
        patience = shortened(config.measurement_epochs, row.horizon)
        if not current and row.epochs_in_stage[slot] < patience:
            return WAIT, describe_waiting(row, slot)
        is_ransom = measured and contribution > config.ransom_contribution and improvement < 0
        value = contribution if measured else improvement
        if value > config.fossilize_above and not is_ransom:
            return _at(LifecycleOp.FOSSILIZE, slot, row)
        if row.age[slot] < shortened(config.learning_epochs, row.horizon):
            return WAIT, describe_waiting(row, slot)
        if is_ransom:
            why = (
                f"{Why.RANSOM} (it contributes {contribution:+.2f} {unit_of(row.score)}, and the "
                f"score changed by {improvement:+.2f} since it was germinated)"
            )
            return self._prune(row, slot, memory, why)
        worth = f"{value:+.2f} {unit_of(row.score)}"
        needed = f"more than {config.fossilize_above:+.2f} is needed"
        return self._prune(row, slot, memory, f"{Why.WORTHLESS} ({worth}; {needed})")

    def _prune(self, row: RowView, slot: int, memory: RowMemory, why: str) -> Verdict:
        """Prune a seed at once and penalise its blueprint; wait if that is illegal."""
        choice, _ = _at(LifecycleOp.PRUNE, slot, row)
        if choice is WAIT:
            return WAIT, describe_waiting(row, slot)
        memory.last_prune = row.epoch
        blueprint = row.blueprint[slot]
        penalty = memory.penalties.get(blueprint, 0.0) + PRUNE_PENALTY
        memory.penalties[blueprint] = penalty
        return {
            **choice,
            "alpha_speed": SPEED_TICKS.index(0),
            "alpha_curve": AlphaCurve.LINEAR,
        }, why

    def _points(self, gain: float, slot: int, memory: RowMemory) -> float:
        """Return a gain of score in points; for losses see the docstring of the module."""
        reference = memory.seeds[slot].germination_score
        return gain if reference >= 0 else gain * LOSS_POINTS / -reference


def _at(op: LifecycleOp, slot: int, row: RowView) -> Verdict:
    """Return this op on this slot, or WAIT if it is illegal."""
    return (
        ({"op": op, "slot": slot}, "")
        if row.legal[op][slot]
        else (WAIT, describe_waiting(row, slot))
    )
