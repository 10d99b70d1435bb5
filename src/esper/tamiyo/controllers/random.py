"""The controller that acts at random: the control that shows what acting as such is worth."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from esper.leyline.actions import CAUSAL_HEADS, HEAD_NAMES, LifecycleOp
from esper.leyline.controller import ControllerContext
from esper.leyline.errors import EmptyMaskError
from esper.leyline.randomness import generator
from esper.leyline.rules import Masks
from esper.leyline.signals import Signals
from esper.tamiyo.controllers.choices import Choice, head_mask, pack_choices
from esper.tamiyo.controllers.registry import refuse_argument, register_controller


@register_controller("random")
class RandomController:
    """Draws the op uniformly from the legal ones, then uniformly every head that op uses.

    A draw depends on the seed, the row and the step alone, so a row acts the same whatever the
    number of rows, and a restored controller goes on with the draws it would have made.
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
    """Return a random legal choice of a row: of this op, or of any if None.

    Args:
        masks: what is legal, on the CPU.
        row: whose choice it is.
        op: what to do; it must be legal.
        keys: name of the stream of this draw.
    """
    stream = generator(*keys, "policy")
    # One number per head, used or not: a head's draw must not depend on which others are used.
    uniform = torch.rand(len(HEAD_NAMES), generator=stream, dtype=torch.float64).tolist()
    draws = dict(zip(HEAD_NAMES, uniform, strict=True))
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
