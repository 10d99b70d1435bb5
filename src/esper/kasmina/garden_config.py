"""GardenConfig: how seeds live in a garden, and how far it may grow."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from esper.kasmina.costs import Limits
from esper.kasmina.lifecycle import LifecycleConfig
from esper.kasmina.seedbed import TrainingMode
from esper.leyline.config import option


@dataclass(frozen=True, kw_only=True)
class GardenConfig(Limits):
    """How seeds live in a garden, and how far it may grow."""

    lifecycle: LifecycleConfig = option(LifecycleConfig, "The life of a seed.")
    training_mode: TrainingMode = option(
        "straight_through", "How a seed in TRAINING learns while the host is left alone."
    )
    seed: int = option(0, "Seed of the initial weights of seeds.", minimum=0)

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
