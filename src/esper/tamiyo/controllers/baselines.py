"""Baseline controllers: wait, random, periodic and plateau."""

from __future__ import annotations

import copy
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from esper.leyline.actions import CAUSAL_HEADS, HEAD_NAMES, LifecycleOp
from esper.leyline.config import Config, option
from esper.leyline.controller import ControllerContext
from esper.leyline.errors import EmptyMaskError
from esper.leyline.rules import Masks
from esper.leyline.signals import Signals
from esper.leyline.stages import LIVE_STAGES, SeedStage
from esper.tamiyo.controllers.registry import (
    WAIT,
    Choice,
    RowController,
    RowView,
    Verdict,
    advance_seeds,
    draw_heads,
    first_untried,
    head_mask,
    pack_choices,
    read_rows,
    read_settings,
    refuse_argument,
    register_controller,
)


@register_controller("wait")
class WaitController:
    """Waits in every row at every step; it has no memory."""

    @classmethod
    def build(cls, argument: str | None, context: ControllerContext) -> WaitController:
        """Return the controller; it takes no argument."""
        refuse_argument("wait", argument)
        return cls()

    def reset(self, rows: int, device: torch.device | str) -> None:
        """Do nothing: there is nothing to forget."""

    def act(self, signals: Signals, masks: Masks) -> dict[str, Tensor]:
        """Return WAIT for every row."""
        return pack_choices([WAIT] * masks.rows, masks)

    def state_dict(self) -> dict[str, Any]:
        """Return the empty memory."""
        return {}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Do nothing: there is nothing to restore."""


# ---- Random legal actions: the control experiment for acting at all


@register_controller("random")
class RandomController:
    """Draws the op uniformly from the legal ones, then uniformly every head that the op uses.

    A draw depends only on the seed, the row and the step. So a row does not depend on the number of
    rows, and a restored controller continues with the same draws.
    """

    def __init__(self, seed: int = 0) -> None:
        """Create the controller; `seed` names its stream of draws."""
        self._seed = seed
        self._step = 0

    @classmethod
    def build(cls, argument: str | None, context: ControllerContext) -> RandomController:
        """Return the controller for this run's seed; it takes no argument."""
        refuse_argument("random", argument)
        return cls(context.seed)

    def reset(self, rows: int, device: torch.device | str) -> None:
        """Start again at the first step."""
        self._step = 0

    def act(self, signals: Signals, masks: Masks) -> dict[str, Tensor]:
        """Return one random legal action per row."""
        on_cpu = masks.to("cpu")
        choices = [
            draw_choice(on_cpu, row, None, (self._seed, row, self._step))
            for row in range(masks.rows)
        ]
        self._step += 1
        return pack_choices(choices, masks)

    def state_dict(self) -> dict[str, Any]:
        """Return the number of steps taken."""
        return {"step": self._step}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue after the given number of steps."""
        self._step = int(state["step"])


def draw_choice(masks: Masks, row: int, op: LifecycleOp | None, keys: tuple[int, ...]) -> Choice:
    """Return a random legal choice of a row.

    Args:
        masks: what is legal, on the CPU.
        row: index of the row.
        op: a legal op; None draws one.
        keys: keys of the random stream.
    """
    # One number per head, used or not, so that a head's draw does not depend on other heads.
    draws = dict(zip(HEAD_NAMES, draw_heads(*keys).tolist(), strict=True))
    chosen = _pick(masks.op[row], draws["op"], "op", row) if op is None else int(op)
    choice = {"op": chosen}
    # CAUSAL_HEADS names the slot before the blueprint, whose mask depends on it.
    for head in CAUSAL_HEADS[LifecycleOp(chosen)][1:]:
        mask = head_mask(masks, row, head, chosen, choice.get("slot", 0))
        choice[head] = _pick(mask, draws[head], head, row)
    return choice


def _pick(mask: Tensor, draw: float, head: str, row: int) -> int:
    """Return the allowed index that a draw from [0, 1) falls on."""
    allowed: list[int] = mask.nonzero().flatten().tolist()
    if not allowed:
        raise EmptyMaskError(f"row {row} allows no choice of {head!r}; a mask must allow one")
    return allowed[min(int(draw * len(allowed)), len(allowed) - 1)]


# ---- A random seed every few epochs: the control experiment for choosing when


@dataclass(frozen=True, kw_only=True)
class PeriodicConfig(Config):
    """The constant of the periodic controller."""

    every: int = option(10, "Epochs from one germination to the next.", minimum=1)


@register_controller("periodic")
class PeriodicController:
    """Germinates a random legal seed every few epochs, and advances and fossilizes all of them.

    A draw depends only on the seed, the row and the epoch.
    """

    def __init__(self, seed: int = 0, config: PeriodicConfig | None = None) -> None:
        """Create the controller; `seed` names its stream of draws."""
        self.config = config or PeriodicConfig()
        self._seed = seed
        self._tried: list[dict[str, int] | None] = []

    @classmethod
    def build(cls, argument: str | None, context: ControllerContext) -> PeriodicController:
        """Return the controller for this run's seed; `argument` may be 'every=K'."""
        return cls(context.seed, read_settings("periodic", argument, PeriodicConfig))

    def reset(self, rows: int, device: torch.device | str) -> None:
        """Forget what was tried last."""
        self._tried = [None] * rows

    def act(self, signals: Signals, masks: Masks) -> dict[str, Tensor]:
        """Return an ADVANCE or FOSSILIZE if one is legal, else a germination if it is due."""
        on_cpu = masks.to("cpu")
        choices = []
        for index, row in enumerate(read_rows(signals, masks)):
            tried = self._tried[index]
            has_failed = tried is not None and row.last_op == tried["op"] and not row.last_success
            options = advance_seeds(row, range(len(row.stage)))
            if row.epoch % self.config.every == 0 and any(row.legal[LifecycleOp.GERMINATE]):
                key = (self._seed, index, row.epoch)
                options.append(draw_choice(on_cpu, index, LifecycleOp.GERMINATE, key))
            chosen: Choice | None = first_untried(options, tried if has_failed else None)
            self._tried[index] = None if chosen is None else dict(chosen)
            choices.append(WAIT if chosen is None else chosen)
        return pack_choices(choices, masks)

    def state_dict(self) -> dict[str, Any]:
        """Return the last choices."""
        return {"tried": copy.deepcopy(self._tried)}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore the last choices."""
        self._tried = copy.deepcopy(state["tried"])


# ---- The plateau rule: add a seed when the score stops rising, keep it if the score then rose


MOST_FAILURES = 2  # Seeds that did not help after which no more are added.


@dataclass(frozen=True, kw_only=True)
class PlateauConfig(Config):
    """The constants of the plateau rule."""

    patience: int = option(5, "Epochs without progress after which a seed is added.", minimum=1)
    trial: int = option(
        3, "Epochs at full amplitude in which a seed has to better the best score.", minimum=0
    )
    blueprints: tuple[str, ...] = option(
        ("conv_heavy", "mlp", "attention"),
        "What is added: the first that fits the slot. Copies of blocks, [kin], are doubled on the "
        "next plateau, the shallowest stage first.",
    )


@dataclass(slots=True)
class _Memory:
    """The memory of one row."""

    reference: float | None = None
    """Best score when the seed on trial was germinated."""
    failures: int = 0
    kept: list[int] = field(default_factory=list)
    """Slots of copies that have helped; they are not fossilized, so that they can be doubled."""


@register_controller("plateau")
class PlateauController(RowController[_Memory]):
    """Adds one seed at a time on plateaus, deepest slot first; keeps what raised the score."""

    memory = _Memory

    def __init__(self, context: ControllerContext, config: PlateauConfig | None = None) -> None:
        super().__init__()
        self.config = config or PlateauConfig()
        self._blueprints = context.find_blueprints(self.config.blueprints)

    @classmethod
    def build(cls, argument: str | None, context: ControllerContext) -> PlateauController:
        """Return the controller; `argument` may set constants, as in 'patience=3'."""
        return cls(context, read_settings("plateau", argument, PlateauConfig))

    def decide(self, row: RowView, memory: _Memory) -> Verdict:
        """Germinate on a plateau, advance the seed, and judge it after its trial."""
        return self._choose(row, memory), ""

    def _choose(self, row: RowView, memory: _Memory) -> Choice:
        live = [slot for slot, stage in enumerate(row.stage) if stage in LIVE_STAGES]
        on_trial = [slot for slot in live if slot not in memory.kept]
        if not on_trial:
            return self._germinate(row, memory)
        slot = on_trial[0]
        if row.stage[slot] != SeedStage.HOLDING:
            return next(iter(advance_seeds(row, [slot])), WAIT)
        if row.epochs_in_stage[slot] < self.config.trial:
            return WAIT
        has_helped = memory.reference is not None and row.best_score > memory.reference
        if has_helped and row.copies[slot]:
            memory.kept.append(slot)
            return WAIT
        # A prune would also take the copies that helped before the last doubling.
        is_doubled = row.copies[slot] > 1
        op = LifecycleOp.FOSSILIZE if has_helped or is_doubled else LifecycleOp.PRUNE
        if not row.legal[op][slot]:
            return WAIT
        if not has_helped:
            memory.failures += 1
        return {"op": op, "slot": slot}

    def _germinate(self, row: RowView, memory: _Memory) -> Choice:
        if memory.failures >= MOST_FAILURES or row.plateau_epochs < self.config.patience:
            return WAIT
        # Copies differ only where some can be doubled: elsewhere the deepest free slot is first.
        for slot in sorted(range(len(row.stage)), key=lambda slot: (row.copies[slot], -slot)):
            if not row.legal[LifecycleOp.GERMINATE][slot]:
                continue
            for blueprint in self._blueprints:
                if row.fits[slot][blueprint]:
                    memory.reference = row.best_score
                    memory.kept = [one for one in memory.kept if one != slot]
                    return {"op": LifecycleOp.GERMINATE, "slot": slot, "blueprint": blueprint}
        return WAIT
