"""Rules that decide when to wake blocks: a schedule, or the training loss."""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from numbers import Integral
from statistics import fmean
from typing import Any, Protocol, runtime_checkable

import torch
from torch import Tensor

from esper.growth.depth.blocks import Order, mean_over_processes
from esper.leyline.config import Config, option
from esper.leyline.errors import ConfigError, UsageError, unknown_name, warn
from esper.tamiyo.controllers.slope import LATEST, find_falls

# ---- Training losses, averaged over windows of a run


WINDOWS = 100
"""Number of windows in a run."""
_STEPS = 100
"""Steps of a window if the length of the run is unknown."""


class LossWindows:
    """(FLOPs spent, mean loss) of past windows, and the sum of the current one."""

    def __init__(self) -> None:
        """Begin with no loss."""
        self.over: list[tuple[float, float]] = []
        self.since_growth = 0
        self._sum: Tensor | None = None
        self._count, self._steps = 0, 0
        self._has_warned = False

    def add(
        self,
        loss: Tensor | float | None,
        total_steps: int | None,
        flops: Callable[[], float],
        *,
        is_needed: bool,
    ) -> bool:
        """Add a step, with its loss if known; return whether a window has ended.

        Only at the end of a window the CPU waits for the device.
        """
        self._steps += 1
        if loss is not None:
            value = torch.as_tensor(loss).detach().float()
            self._sum = value if self._sum is None else self._sum.to(value.device) + value
            self._count += 1
        if self._steps < (_STEPS if total_steps is None else total_steps // WINDOWS):
            return False
        if self._sum is None and is_needed:
            raise UsageError(
                "this controller needs the training loss, and no step of the last 1 % of the run "
                "gave one; write depth.step(loss)"
            )
        if self._sum is not None:
            mean = float(mean_over_processes(self._sum / self._count))
            self.over.append((flops(), mean))
            self.since_growth += 1
            self._warn_if_not_finite(mean)
        self._sum, self._count, self._steps = None, 0, 0
        return True

    def _warn_if_not_finite(self, mean: float) -> None:
        if math.isfinite(mean) or self._has_warned:
            return
        self._has_warned = True
        warn(
            f"the mean training loss of the last steps given to depth.step(loss) is {mean}, so the "
            "controller cannot compare losses; 'plateau' and 'slope' then only wake blocks at the "
            f"latest time, the last by {LATEST:.0%} of the run. Check the loss and the learning "
            "rate, and give no losses that are not finite"
        )

    def state_dict(self) -> dict[str, Any]:
        """Return plain numbers."""
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
Decision = int | Mapping[str, int] | None
"""Blocks to be awake, in every stack or by stack; None changes nothing."""


@dataclass(frozen=True, slots=True)
class Progress:
    """What a depth controller sees after an optimizer step."""

    step: int
    """Optimizer steps done."""
    total_steps: int | None
    """Optimizer steps of the whole run; None if unknown."""
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
    """Number of windows since blocks last woke."""


@runtime_checkable
class DepthController(Protocol):
    """Decides after every optimizer step how many blocks to have awake.

    If a controller has `state_dict()` and `load_state_dict()`, they are saved and restored.
    """

    def __call__(self, progress: Progress) -> Decision:
        """Return the number of blocks to have awake, or None to change nothing."""


def check_total_steps(steps: int | None, rule: object) -> int | None:
    """Return the length of a run; refuse one below 1, or none if the rule needs it."""
    if steps is None and isinstance(rule, Plateau | Slope):
        name = type(rule).__name__.lower()
        raise UsageError(f"controller={name!r} needs the length of the run; write total_steps=N")
    if steps is None:
        return None
    if not _is_whole(steps) or steps < 1:
        is_plain = isinstance(steps, int | float | str)
        got = repr(steps) if is_plain else f"a {type(steps).__name__}"
        raise UsageError(
            f"total_steps is the number of optimizer steps of the whole run, got {got}; write "
            "total_steps=epochs * len(loader)"
        )
    return int(steps)


def _is_whole(value: object) -> bool:
    if isinstance(value, float):
        return value.is_integer()
    return isinstance(value, Integral) and not isinstance(value, bool)


def warn_past_end(step: int, total_steps: int | None, rule: object) -> None:
    """Warn on the first step past the end of the run, if the rule depends on its length."""
    if total_steps is not None and step == total_steps + 1 and not _ignores_length(rule):
        warn(
            f"depth.step() counts step {step:,}, but total_steps={total_steps:,}, so blocks woke "
            "too early; call depth.step() once after each optimizer.step(), not after each batch "
            "that only accumulates gradients, and write total_steps= the optimizer steps of the "
            "whole run: epochs * batches // accumulation"
        )


def warn_of_short_resume(step: int, total_steps: int | None, rule: object) -> None:
    """Warn if a run is resumed past its end, if the rule depends on its length."""
    if total_steps is not None and step > total_steps and not _ignores_length(rule):
        warn(
            f"this state was saved after step {step:,}, but total_steps={total_steps:,}, so all "
            "blocks wake at the next step; write total_steps= the optimizer steps of the whole "
            "run, including those before the state was saved"
        )


def _ignores_length(rule: object) -> bool:
    return isinstance(rule, Schedule) and rule.at is not None


class Schedule:
    """Wakes blocks at given steps; by default doubles them until all are awake.

    Doublings come at equal distances, the last at 40 % of the run: from a quarter at 20 % and 40 %.
    """

    def __init__(self, at: Mapping[int, Decision] | None = None) -> None:
        """Take {step: blocks}; None doubles."""
        for step in at or {}:
            if not isinstance(step, int) or isinstance(step, bool) or step < 1:
                raise UsageError(
                    f"at={{step: blocks}} needs whole steps from 1, got {step!r}; for a share of "
                    "the run write int(share * total_steps)"
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
                "the schedule needs the length of the run; write Deepen(..., total_steps=N), or "
                "at={step: blocks}"
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
        """Return the number of steps within a budget of FLOPs; `per_step` gives their cost."""

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
    """Doubles when the loss of the last windows is hardly lower than that of the ones before.

    Args:
        windows: number of windows, each 1 % of the run, to compare with as many before them.
        least: relative fall of the loss between both below which blocks wake.
    """

    def __init__(self, windows: int = 5, least: float = 0.01) -> None:
        """Choose the windows and the fall."""
        self._windows = windows
        self._least = least

    def __call__(self, progress: Progress) -> Decision:
        """Return twice the blocks on a plateau; all are awake by 60 % of the run."""
        if _is_due(progress):
            return progress.doubled
        if progress.windows_since_growth < 2 * self._windows:
            return None
        losses = [loss for _, loss in progress.losses]
        after = fmean(losses[-self._windows :])
        before = fmean(losses[-2 * self._windows : -self._windows])
        return progress.doubled if before - after < self._least * abs(before) else None


class Slope:
    """Doubles when a doubled network would likely lower the loss more per FLOP.

    The rule expects a doubled network to learn as fast per step as this one did just after its
    blocks woke. It doubles when the fall of the loss per FLOP, now over then, is below the cost of
    a step now over that of a step after doubling. The controller `slope` does the same with copies.

    Args:
        windows: number of windows, each 1 % of the run, over which a fall is measured.
    """

    def __init__(self, windows: int = 4) -> None:
        """Choose the windows."""
        self._windows = windows

    def __call__(self, progress: Progress) -> Decision:
        """Return twice the blocks when that pays; all are awake by 60 % of the run."""
        if _is_due(progress):
            return progress.doubled
        since = progress.windows_since_growth
        falls = find_falls(progress.losses[-since:] if since else (), self._windows)
        share = progress.flops_per_step / progress.flops_per_step_doubled
        return progress.doubled if falls is not None and falls.is_below(share) else None


def _is_due(progress: Progress) -> bool:
    """Return whether blocks must wake now, so that all are awake by 60 % of the run."""
    assert progress.total_steps is not None
    doublings = max(
        math.ceil(math.log2(blocks / progress.awake[name]))
        for name, blocks in progress.blocks.items()
    )
    share = LATEST / 2.0 ** max(0, doublings - 1)
    return progress.step >= share * progress.total_steps


RULES: dict[str, Callable[[], Any]] = {"schedule": Schedule, "plateau": Plateau, "slope": Slope}


def make_rule(controller: str | DepthController, at: Mapping[int, Decision] | None) -> Any:
    """Return the rule of this name, or the user's own controller."""
    if at is not None and controller != "schedule":
        raise UsageError(
            f"at= needs controller='schedule', got {controller!r}; leave out one of them"
        )
    if controller == "schedule":
        return Schedule(at)
    if isinstance(controller, str):
        if controller not in RULES:
            raise unknown_name("depth controller", controller, RULES)
        return RULES[controller]()
    if not callable(controller):
        raise UsageError(
            "a depth controller is a function from a Progress to the number of blocks awake, got a "
            f"{type(controller).__name__}"
        )
    return controller


# ---- Settings of `esper.grow(deepen=...)`


Blocks = int | tuple[tuple[str, int], ...]
"""Number of blocks awake: in every stack, or (stack, blocks) by stack."""


@dataclass(frozen=True, kw_only=True)
class DeepenConfig(Config):
    """Which blocks of a network sleep at first, and when they wake."""

    start: Blocks | None = option(
        None,
        "Blocks awake at first, in every stack or by stack; empty: a quarter, or as many as the "
        "weights have.",
    )
    at: tuple[tuple[int | float, Blocks], ...] | None = option(
        None,
        "{when: blocks} for the schedule, where `when` is a step from 1 or a share of the run, as "
        "in {0.2: 6, 0.4: 12}. Empty: blocks double, the last time at 40 % of the run.",
    )
    controller: str | DepthController = option(
        "schedule",
        "Who decides when blocks wake: schedule, plateau, slope, or in Python a function.",
    )
    order: Order = option(
        "stack", "Copies in the order a b c a b c (stack) or a a b b c c (interleave)."
    )
    stacks: tuple[str, ...] = option(
        (), "Names of the stacks, as esper.find_stacks gives them; empty: all."
    )
    weights: str | dict | None = option(  # type: ignore[type-arg]
        None,
        "Weights of a finished network with `start` blocks: a file or a run folder, or in Python a "
        "state_dict.",
    )

    def __post_init__(self) -> None:
        """Convert mappings to tuples, and check the range of `at`."""
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
                    f"DeepenConfig.at has {when!r}; write a step (1 or more) or a share of the run "
                    "(between 0 and 1), as in {0.2: 6, 0.4: 12}"
                )

    @classmethod
    def of(cls, asked: bool | Mapping[str, Any] | DeepenConfig | None) -> DeepenConfig | None:
        """Return the settings for a value of `deepen=`; None if nothing is deepened."""
        if asked is None or asked is False:
            return None
        if isinstance(asked, cls):
            return asked
        if asked is True or isinstance(asked, Mapping):
            return cls.from_mapping({} if asked is True else asked)
        raise UsageError(
            "deepen= takes True, a mapping such as {'start': 3}, or a DeepenConfig, got "
            f"{type(asked).__name__}"
        )

    @property
    def rule(self) -> str:
        """Name of the controller."""
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
        """Return plain data: a function by its name, a state_dict by its size."""
        plain = {**super().to_mapping(), "controller": self.rule}
        if isinstance(self.weights, dict):
            plain["weights"] = f"a state_dict of {len(self.weights)} entries"
        return plain


def as_decision(blocks: Blocks | None) -> Decision:
    """Return blocks in the form that `Deepen` takes."""
    return dict(blocks) if isinstance(blocks, tuple) else blocks


def _pairs(blocks: Any) -> Any:
    return tuple(blocks.items()) if isinstance(blocks, Mapping) else blocks


def _moments(at: Any) -> Any:
    """Return {when: blocks} as pairs in order; other values are left to the type check."""
    pairs = at.items() if isinstance(at, Mapping) else at
    if not isinstance(at, Mapping | list | tuple) or not all(_is_pair(pair) for pair in pairs):
        return at
    return tuple((when, _pairs(blocks)) for when, blocks in pairs)


def _is_pair(value: Any) -> bool:
    return isinstance(value, list | tuple) and len(value) == 2
