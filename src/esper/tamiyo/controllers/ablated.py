"""Learned policies that are shown less than they have learned with: do they need it?

*Curves* are the features that depend on what a run has shown (`FeatureSpec.is_curve`): losses,
scores, gradients, contributions. If a policy does as well without its own, it does not watch.
What is legal is as ever, so that every action can be carried out.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from esper.leyline.controller import ControllerContext
from esper.leyline.signals import Signals
from esper.tamiyo.controllers.learned import LearnedController, load_named
from esper.tamiyo.controllers.policy_file import Policy
from esper.tamiyo.controllers.registry import register_controller


class AblatedController(LearnedController):
    """A greedy policy whose observation is changed before it decides."""

    name: str
    """Its name, for messages."""

    def __init__(self, policy: Policy, context: ControllerContext) -> None:
        """Find the curves in the observation of the policy."""
        super().__init__(policy, context, greedy=True)
        parts = self.policy.layout.parts
        specs = [spec for part in parts for spec in part.specs * part.repeats]
        self._is_curve = torch.tensor([spec.is_curve for spec in specs])
        self._is_presence = torch.tensor(
            [
                index == part.presence
                for part in parts
                for _ in range(part.repeats)
                for index in range(len(part.specs))
            ]
        )
        """Flags that say which slots there are and what fits them."""

    @classmethod
    def build(cls, argument: str | None, context: ControllerContext) -> AblatedController:
        """Return the controller for the policy in a folder."""
        return cls(load_named(cls.name, argument), context)

    def _without(self, raw: Tensor, which: Tensor) -> Tensor:
        """Return the observation with the mean of training in these features, bool [D]."""
        return torch.where(which.to(raw.device), self.policy.normalizer.mean, raw)


@register_controller("without_curves")
class WithoutCurves(AblatedController):
    """Sees the network, its task, the clock and its own operations, but no curves."""

    name = "without_curves"

    def _observe(self, signals: Signals, device: torch.device) -> tuple[Tensor, Tensor]:
        raw, blueprints = super()._observe(signals, device)
        return self._without(raw, self._is_curve), blueprints


@register_controller("only_curves")
class OnlyCurves(AblatedController):
    """Sees curves, and which slots there are and what fits them; nothing else."""

    name = "only_curves"

    def _observe(self, signals: Signals, device: torch.device) -> tuple[Tensor, Tensor]:
        raw, blueprints = super()._observe(signals, device)
        kept = self._is_curve | self._is_presence
        return self._without(raw, ~kept), torch.full_like(blueprints, -1)


@register_controller("frozen")
class FrozenCurves(AblatedController):
    """Sees the curves of its first decision in all others."""

    name = "frozen"

    def __init__(self, policy: Policy, context: ControllerContext) -> None:
        """Start without curves."""
        super().__init__(policy, context)
        self._first: Tensor | None = None

    def reset(self, rows: int, device: torch.device | str) -> None:
        """Start at the first step."""
        super().reset(rows, device)
        self._first = None

    def _observe(self, signals: Signals, device: torch.device) -> tuple[Tensor, Tensor]:
        raw, blueprints = super()._observe(signals, device)
        if self._first is None:
            self._first = raw.clone()
        return torch.where(self._is_curve.to(raw.device), self._first, raw), blueprints

    def state_dict(self) -> dict[str, Any]:
        """Return the memory of the policy, and the first observation."""
        first = None if self._first is None else self._first.clone()
        return {**super().state_dict(), "first": first}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue with what `state_dict` returned."""
        super().load_state_dict(state)
        device = self.policy.network.floors.device
        self._first = None if state["first"] is None else state["first"].clone().to(device)


class ShuffledCurves(AblatedController):
    """Sees the curves of another row at the same step, and everything else of its own.

    Curves of a slot are those of the other row's slot in the same place; where that row has none,
    they are those of an empty slot. A row whose episode has ended keeps its last curves.

    It has no name among controllers, because only a proof knows which rows belong together.

    Args:
        policy: the network with its observation statistics and its blueprints.
        context: the slots, blueprints and seed of the run.
        donors: for every row the number of the row whose curves it is shown.
    """

    name = "shuffled"

    def __init__(
        self, policy: Policy, context: ControllerContext, donors: Sequence[int] = ()
    ) -> None:
        """Keep the donors."""
        super().__init__(policy, context)
        self._donors = torch.tensor(donors, dtype=torch.int64)

    @classmethod
    def build(
        cls, argument: str | None, context: ControllerContext, donors: Sequence[int] = ()
    ) -> ShuffledCurves:
        """Return the controller for the policy in a folder."""
        return cls(load_named(cls.name, argument), context, donors)

    def reset(self, rows: int, device: torch.device | str) -> None:
        """Start at the first step."""
        assert len(self._donors) == rows, "every row needs a donor"
        super().reset(rows, device)

    def _observe(self, signals: Signals, device: torch.device) -> tuple[Tensor, Tensor]:
        raw, blueprints = super()._observe(signals, device)
        others = raw[self._donors.to(raw.device)]
        return torch.where(self._is_curve.to(raw.device), others, raw), blueprints
