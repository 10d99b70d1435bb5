"""DeepenConfig: how `esper.grow` deepens a network."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from esper.growth.depth.copying import Order
from esper.growth.depth.rules import Decision, DepthController
from esper.leyline.config import Config, option
from esper.leyline.errors import ConfigError, UsageError

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
