"""Rules that decide when to deepen: a schedule, or what the training loss says."""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean
from typing import Any, Protocol, runtime_checkable

import torch
from torch import Tensor

from esper.growth.depth.blocks import Order, mean_over_processes
from esper.leyline.config import Config, option
from esper.leyline.errors import ConfigError, UsageError, unknown_name

# ---- Training losses, averaged over windows of a run


WINDOWS = 100
"""Windows of a run."""
_STEPS = 100
"""Steps of a window where the length of the run is not known."""


class LossWindows:
    """(FLOPs spent, mean loss) of the windows that are over, and the sum of the one that is not."""

    def __init__(self) -> None:
        """Begin with no loss."""
        self.over: list[tuple[float, float]] = []
        self.since_growth = 0
        self._sum: Tensor | None = None
        self._count, self._steps = 0, 0

    def add(
        self, loss: Tensor | float | None, total_steps: int | None, flops: Callable[[], float]
    ) -> bool:
        """Add a step, with its loss where that is known; return whether a window has ended.

        Only then the device is waited for.
        """
        self._steps += 1
        if loss is not None:
            value = torch.as_tensor(loss).detach().float()
            self._sum = value if self._sum is None else self._sum.to(value.device) + value
            self._count += 1
        if self._steps < (_STEPS if total_steps is None else total_steps // WINDOWS):
            return False
        if self._sum is not None:
            self.over.append((flops(), float(mean_over_processes(self._sum / self._count))))
            self.since_growth += 1
        self._sum, self._count, self._steps = None, 0, 0
        return True

    def state_dict(self) -> dict[str, Any]:
        """Return everything as plain numbers."""
        return {
            "over": [list(window) for window in self.over],
            "since_growth": self.since_growth,
            "sum": None if self._sum is None else float(self._sum),
            "count": self._count,
            "steps": self._steps,
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore what `state_dict` returned."""
        self.over = [(flops, loss) for flops, loss in state["over"]]
        self.since_growth, self._count = state["since_growth"], state["count"]
        self._steps = state["steps"]
        total = state["sum"]
        self._sum = None if total is None else torch.tensor(total, dtype=torch.float32)


LAST_DOUBLING = 0.4
"""Share of the run at which the default schedule wakes the last blocks (research/log.md)."""
LATEST = 0.6
"""Share of the run by which rules that judge by the loss have woken all blocks."""
Decision = int | Mapping[str, int] | None
"""Blocks to be awake, in every stack or by stack; None changes nothing."""


@dataclass(frozen=True, slots=True)
class Progress:
    """What a controller of depth sees after an optimizer step."""

    step: int
    """Optimizer steps done."""
    total_steps: int | None
    """Optimizer steps of the whole run, where that is known."""
    awake: Mapping[str, int]
    """Blocks awake, by stack."""
    blocks: Mapping[str, int]
    """All blocks, by stack."""
    doubled: Mapping[str, int]
    """Blocks awake after the next doubling, by stack; the same as `awake` once all are."""
    flops: float
    """Training FLOPs spent so far."""
    flops_per_step: float
    """Training FLOPs of a step with the blocks awake now."""
    flops_per_step_doubled: float
    """Training FLOPs of a step after the next doubling."""
    losses: Sequence[tuple[float, float]]
    """(FLOPs spent, mean training loss) of every window of 1 % of the run, oldest first."""
    windows_since_growth: int
    """How many of them were trained with the blocks awake now."""


@runtime_checkable
class DepthController(Protocol):
    """Decides after every optimizer step how many blocks are to be awake.

    `state_dict()` and `load_state_dict()` are called too, where a controller has them.
    """

    def __call__(self, progress: Progress) -> Decision:
        """Return the number of blocks to be awake, or None to go on as it is."""


class Schedule:
    """Wakes blocks at given steps; by default doubles them until all are awake.

    Doublings are spaced evenly, the last one at 40 % of the run: at 20 % and 40 % from a quarter.
    """

    def __init__(self, at: Mapping[int, Decision] | None = None) -> None:
        """Take {step: blocks}, or double."""
        for step in at or {}:
            if not isinstance(step, int) or isinstance(step, bool) or step < 1:
                raise UsageError(
                    f"at={{step: blocks}} counts steps from 1, got {step!r}; a share of the run is "
                    "int(share * total_steps)"
                )
        self.at = None if at is None else dict(sorted(at.items()))

    def moments(
        self,
        total_steps: int | None,
        awake: Mapping[str, int],
        double: Callable[[Mapping[str, int]], Mapping[str, int]],
    ) -> dict[int, Decision]:
        """Return {step: blocks} for a run that starts with these blocks awake."""
        if self.at is not None:
            return dict(self.at)
        if total_steps is None:
            raise UsageError(
                "say how long the run is, so that blocks wake in time: Deepen(..., total_steps=N), "
                "or when they do: at={step: blocks}"
            )
        stages = []
        while (deeper := double(awake)) != awake:
            stages.append(awake := deeper)
        return {
            max(1, round(LAST_DOUBLING * number / len(stages) * total_steps)): stage
            for number, stage in enumerate(stages, 1)
        }

    def steps_for(
        self,
        flops: float,
        start: Mapping[str, int],
        per_step: Callable[[Mapping[str, int]], float],
        *,
        double: Callable[[Mapping[str, int]], Mapping[str, int]],
        resolve: Callable[[Decision, Mapping[str, int]], Mapping[str, int]],
    ) -> int:
        """Return how many steps a budget of FLOPs buys, by what a step costs with blocks awake."""

        def cost(steps: int) -> float:
            spent, awake, last = 0.0, start, 0
            for step, decision in sorted(self.moments(steps, start, double).items()):
                spent += (min(step, steps) - last) * per_step(awake)
                awake, last = resolve(decision, awake), min(step, steps)
            return spent + (steps - last) * per_step(awake)

        least, most = 0, int(flops / per_step(start))
        while least < most:
            middle = (least + most + 1) // 2
            least, most = (middle, most) if cost(middle) <= flops else (least, middle - 1)
        return least


class Plateau:
    """Doubles when the loss of the last windows is hardly below that of the windows before.

    Args:
        windows: number of windows, each 1 % of the run, that are compared with as many before.
        least: relative gain from the ones to the others below which blocks are woken.
    """

    def __init__(self, windows: int = 5, least: float = 0.01) -> None:
        """Choose how patient to be."""
        self._windows = windows
        self._least = least

    def __call__(self, progress: Progress) -> Decision:
        """Return twice the blocks on a plateau, and at the latest at 60 % of the run."""
        if _is_due(progress):
            return progress.doubled
        if progress.windows_since_growth < 2 * self._windows:
            return None
        losses = [loss for _, loss in progress.losses]
        after = fmean(losses[-self._windows :])
        before = fmean(losses[-2 * self._windows : -self._windows])
        return progress.doubled if before - after < self._least * abs(before) else None


class Slope:
    """Doubles when a FLOP buys so much less than it did that a deeper network's would buy more.

    What a FLOP buys is the fall of the loss over the FLOPs spent on it. A doubled network starts
    afresh, and its step costs more: so blocks are woken when a FLOP buys less of what it bought
    when these blocks were new than the share that a step costs now of a step then.

    Args:
        windows: number of windows, each 1 % of the run, over which a fall is measured.
    """

    def __init__(self, windows: int = 4) -> None:
        """Choose how patient to be."""
        self._windows = windows

    def __call__(self, progress: Progress) -> Decision:
        """Return twice the blocks when that pays, and at the latest at 60 % of the run."""
        if _is_due(progress):
            return progress.doubled
        since, each = progress.windows_since_growth, self._windows
        if since < 3 * each:
            return None
        own = progress.losses[-since:]
        new, now = self._bought(own[: 2 * each]), self._bought(own[-2 * each :])
        share = progress.flops_per_step / progress.flops_per_step_doubled
        return progress.doubled if now <= share * max(new, 0.0) else None

    def _bought(self, losses: Sequence[tuple[float, float]]) -> float:
        """Return the fall of the loss per FLOP from the first half of these windows to the last."""
        each = self._windows
        (before, high), (after, low) = (
            (fmean(flops for flops, _ in half), fmean(loss for _, loss in half))
            for half in (losses[:each], losses[each:])
        )
        return (high - low) / (after - before)


def _is_due(progress: Progress) -> bool:
    """Return whether blocks must wake now, so that all are awake at 60 % of the run."""
    assert progress.total_steps is not None
    doublings = max(
        math.ceil(math.log2(blocks / progress.awake[name]))
        for name, blocks in progress.blocks.items()
    )
    share = LATEST / 2.0 ** max(0, doublings - 1)
    return progress.step >= share * progress.total_steps


RULES: dict[str, Callable[[], Any]] = {"schedule": Schedule, "plateau": Plateau, "slope": Slope}


def make_rule(controller: str | DepthController, at: Mapping[int, Decision] | None) -> Any:
    """Return the rule of this name, or a controller of the caller's own."""
    if at is not None and controller != "schedule":
        raise UsageError("at= is for controller='schedule'; another controller decides by itself")
    if controller == "schedule":
        return Schedule(at)
    if isinstance(controller, str):
        if controller not in RULES:
            raise unknown_name("controller of depth", controller, RULES)
        return RULES[controller]()
    if not callable(controller):
        raise UsageError(
            "a controller of depth is called with the progress and returns the number of blocks to "
            f"be awake or None; got a {type(controller).__name__}"
        )
    return controller


# ---- DeepenConfig: how `esper.grow` deepens a network


Blocks = int | tuple[tuple[str, int], ...]
"""Blocks awake: in every stack, or (stack, blocks) by stack."""


@dataclass(frozen=True, kw_only=True)
class DeepenConfig(Config):
    """Which blocks of a network sleep at first, and when they wake."""

    start: Blocks | None = option(
        None,
        "Blocks awake at first, in every stack or by stack; if empty a quarter, or as many as the "
        "weights have.",
    )
    at: tuple[tuple[int | float, Blocks], ...] | None = option(
        None,
        "{when: blocks} for the schedule; when is a step, from 1, or a share of the run, as in "
        "{0.2: 6, 0.4: 12}. If empty, blocks double until all are awake, last at 40 % of the run.",
    )
    controller: str | DepthController = option(
        "schedule", "Who decides when blocks wake: schedule, plateau, slope; in Python a function."
    )
    order: Order = option("stack", "Of copies: a b c a b c (stack) or a a b b c c (interleave).")
    stacks: tuple[str, ...] = option(
        (), "Names of the stacks, as esper.find_stacks gives them; all that are found if empty."
    )
    weights: str | dict | None = option(  # type: ignore[type-arg]
        None,
        "State of a finished network with `start` blocks to go on from: a file, or the folder of a "
        "run; in Python a state_dict too.",
    )

    def __post_init__(self) -> None:
        """Take mappings as people write them, and check what no type can say."""
        for name, value in (("start", _pairs(self.start)), ("at", _moments(self.at))):
            object.__setattr__(self, name, value)
        if isinstance(self.stacks, str):
            object.__setattr__(self, "stacks", (self.stacks,))
        if isinstance(self.weights, os.PathLike):
            object.__setattr__(self, "weights", os.fspath(self.weights))
        elif isinstance(self.weights, Mapping):
            object.__setattr__(self, "weights", dict(self.weights))
        super().__post_init__()
        for when, _ in self.at or ():
            if not (when >= 1 if isinstance(when, int) else 0.0 < when < 1.0):
                raise ConfigError(
                    f"DeepenConfig.at has {when!r}; name a step, a whole number from 1, or a share "
                    "of the run between 0 and 1, as in {0.2: 6, 0.4: 12}"
                )

    @classmethod
    def of(cls, asked: bool | Mapping[str, Any] | DeepenConfig | None) -> DeepenConfig | None:
        """Return the settings that `deepen=` stands for; None where nothing is deepened."""
        if asked is None or asked is False:
            return None
        if isinstance(asked, cls):
            return asked
        if asked is True or isinstance(asked, Mapping):
            return cls.from_mapping({} if asked is True else asked)
        raise UsageError(
            "deepen= takes True, a mapping such as {'start': 3} or a DeepenConfig, got "
            f"{type(asked).__name__}"
        )

    @property
    def rule(self) -> str:
        """The name of who decides."""
        if isinstance(self.controller, str):
            return self.controller
        return str(getattr(self.controller, "__qualname__", type(self.controller).__qualname__))

    def steps(self, total: int) -> dict[int, Decision] | None:
        """Return {step: blocks} in a run of this many steps; None for the default schedule."""
        if self.at is None:
            return None
        return {
            when if isinstance(when, int) else max(1, round(when * total)): as_decision(blocks)
            for when, blocks in self.at
        }

    def to_mapping(self) -> dict[str, Any]:
        """Return plain data; of a function its name, and of a state_dict how large it is."""
        told = {**super().to_mapping(), "controller": self.rule}
        if isinstance(self.weights, dict):
            told["weights"] = f"a state_dict of {len(self.weights)} entries"
        return told


def as_decision(blocks: Blocks | None) -> Decision:
    """Return blocks in the form in which `Deepen` takes them."""
    return dict(blocks) if isinstance(blocks, tuple) else blocks


def _pairs(blocks: Any) -> Any:
    return tuple(blocks.items()) if isinstance(blocks, Mapping) else blocks


def _moments(at: Any) -> Any:
    """Return {when: blocks} as pairs in their order; what is no such thing is left to the check."""
    pairs = at.items() if isinstance(at, Mapping) else at
    if not isinstance(at, Mapping | list | tuple) or not all(_is_pair(pair) for pair in pairs):
        return at
    return tuple((when, _pairs(blocks)) for when, blocks in pairs)


def _is_pair(value: Any) -> bool:
    return isinstance(value, list | tuple) and len(value) == 2
