"""GardenConfig: how seeds live in a garden, and how far it may grow."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from esper.kasmina.blueprints.registry import BLUEPRINTS, blueprint_names
from esper.kasmina.costs import parse_factor
from esper.kasmina.lifecycle import LifecycleConfig
from esper.kasmina.seedbed import TrainingMode
from esper.leyline.config import Config, option


@dataclass(frozen=True, kw_only=True)
class GardenConfig(Config):
    """How seeds live in a garden, and how far it may grow."""

    lifecycle: LifecycleConfig = option(LifecycleConfig, "The life of a seed.")
    training_mode: TrainingMode = option(
        "straight_through", "How a seed in TRAINING learns while the host is left alone."
    )
    max_growth: float = option(
        0.0,
        "Most parameters and operations of the grown network, as a multiple of the host's; the two "
        "limits below win over it; 0 is no limit.",
    )
    max_parameters: int = option(
        0, "Most trainable parameters of the grown network; 0 is no limit.", minimum=0
    )
    max_added_flops: int = option(
        0, "Most operations per sample that seeds may add; 0 is no limit.", minimum=0
    )
    immediate: bool = option(
        True,
        "Whether a `kin`, a copy of a block, is at full amplitude from the first step; otherwise "
        "it trains alone first and is blended in, as every other seed.",
    )
    seed: int = option(0, "Seed of the initial weights of seeds.", minimum=0)

    def __post_init__(self) -> None:
        """Check what no range of numbers can say."""
        object.__setattr__(self, "max_growth", parse_factor(self.max_growth))
        super().__post_init__()

    def limited(
        self,
        *,
        max_growth: float | str | None = None,
        max_seeds: int | None = None,
        max_parameters: int | None = None,
        max_added_flops: int | None = None,
    ) -> GardenConfig:
        """Return the same with these limits of growth; None leaves one as it is.

        A factor takes the place of limits on parameters and operations that stood here before.
        """
        if max_growth is not None:
            max_parameters = max_parameters or 0
            max_added_flops = max_added_flops or 0
        limits: dict[str, Any] = {
            "max_growth": max_growth,
            "max_parameters": max_parameters,
            "max_added_flops": max_added_flops,
        }
        if max_seeds is not None:
            rules = self.lifecycle.rules.replace(max_seeds=max_seeds)
            limits["lifecycle"] = self.lifecycle.replace(rules=rules)
        return self.replace(**{name: value for name, value in limits.items() if value is not None})

    def immediate_blueprints(self) -> tuple[int, ...]:
        """Return the ids of blueprints whose seeds are at full amplitude from the first step."""
        blueprints = map(BLUEPRINTS.get, blueprint_names())
        return tuple(b.id for b in blueprints if b.immediate and self.immediate)
