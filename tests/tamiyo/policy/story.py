"""One host whose life a test tells epoch by epoch: real lifecycle, measurements as told."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import torch

from esper.kasmina.contribution import GradientSample, record_contributions, record_gradients
from esper.kasmina.lifecycle import LifecycleConfig, apply_command, record_epoch, tick
from esper.kasmina.signals import (
    TrackerConfig,
    read_signals,
    row_facts,
    start_tracking,
    track_epoch,
    unknown_rates,
)
from esper.kasmina.state import GateConfig, empty_state
from esper.leyline.actions import LifecycleOp, decode_actions, placeholder_actions
from esper.leyline.rules import Masks
from esper.leyline.signals import Signals
from esper.leyline.slots import NUM_BLUEPRINTS, SlotConfig
from esper.tamiyo.controllers.registry import WAIT, Choice, pack_choices
from esper.tamiyo.policy.features import FEATURE_NAMES, batch_obs_to_features
from tests.kasmina.gardens import plain_table

SLOTS = 3
HOST_PARAMS = 1_000
BUDGET = 10_000


class Story:
    """Gates open after an epoch of training; every blueprint fits everywhere."""

    def __init__(self, horizon: int = 100) -> None:
        self.lifecycle = LifecycleConfig(gates=GateConfig(min_training_epochs=1), embargo_ticks=2)
        self.state = empty_state(1, SLOTS)
        self.tracker = start_tracking(1, TrackerConfig())
        self.horizon = horizon
        self.last_op, self.success = int(LifecycleOp.WAIT), True
        self.told: list[dict[str, float]] = []

    def act(self, op: LifecycleOp, slot: int = 0, **heads: int) -> bool:
        """Apply one action, which must be legal, and tick; return whether it took effect."""
        actions = placeholder_actions(1)
        for head, value in {"op": int(op), "slot": slot, **heads}.items():
            actions[head] = torch.tensor([value])
        self.state, applied = apply_command(
            self.state,
            decode_actions(actions),
            enabled=torch.ones(1, SLOTS, dtype=torch.bool),
            fits=torch.ones(1, SLOTS, NUM_BLUEPRINTS, dtype=torch.bool),
            config=self.lifecycle,
        )
        assert int(applied.refusal[0]) == 0, f"{op.name} at {slot} is not legal here"
        self.state = self.state.where(
            self.state.has_module, params=100 * self.state.blueprint.clamp(min=1)
        )
        self.last_op, self.success = int(op), bool(applied.took_effect[0])
        self.state = tick(self.state, self.lifecycle)
        return self.success

    def epoch(
        self,
        loss: float,
        score: float,
        *,
        gradients: Mapping[int, Mapping[str, Any]] | None = None,
        worth: Mapping[int, float] | None = None,
        together: Mapping[tuple[int, int], float] | None = None,
    ) -> dict[str, float]:
        """Record one epoch and return the observation by name, which is also kept in `told`."""

        def one(value: float) -> torch.Tensor:
            return torch.tensor([value], dtype=torch.float64)

        self.state = record_epoch(self.state, one(score))
        for slot, told in (gradients or {}).items():
            sample = {"norm": 1.0, "health": 1.0, "vanishing": False, "exploding": False, **told}
            sample = {name: torch.tensor([[value]]) for name, value in sample.items()}
            here = torch.zeros(1, SLOTS, dtype=torch.bool)
            here[0, slot] = True
            self.state = record_gradients(
                self.state, here, GradientSample(**sample, ratio=torch.tensor([[1.0]]))
            )
        if worth is not None:
            value = torch.full((1, SLOTS), math.nan, dtype=torch.float64)
            interaction = torch.zeros(1, SLOTS, SLOTS, dtype=torch.float64)
            for slot, points in worth.items():
                value[0, slot] = points
            for (i, j), points in (together or {}).items():
                interaction[0, i, j] = interaction[0, j, i] = points
            members = torch.isfinite(value)
            self.state = record_contributions(
                self.state, members, value, torch.ones_like(value), interaction
            )
        self.tracker = track_epoch(self.tracker, one(loss), one(score), TrackerConfig())
        features, _ = batch_obs_to_features(self.signals(), SlotConfig.default(), "cpu")
        self.told.append(dict(zip(FEATURE_NAMES, features[0].tolist(), strict=True)))
        return self.told[-1]

    def signals(self) -> Signals:
        def one(value: int) -> torch.Tensor:
            return torch.tensor([value])

        return read_signals(
            plain_table(self.state, HOST_PARAMS),
            self.tracker,
            row_facts(1, horizon=self.horizon, budget=BUDGET),
            train_loss=torch.tensor([math.nan]),
            spent=one(0),
            rates=unknown_rates,
            last_op=one(self.last_op),
            last_success=torch.tensor([self.success]),
            rolled_back=torch.tensor([False]),
            twin_score=torch.tensor([math.nan]),
        )


class Plan:
    """A controller that follows {epoch: choice}, waits otherwise, and keeps what it was shown."""

    def __init__(self, choices: Mapping[int, Choice]) -> None:
        self.choices = dict(choices)
        self.seen: list[Signals] = []

    def reset(self, rows: int, device: torch.device | str) -> None:
        self.seen = []

    def act(self, signals: Signals, masks: Masks) -> dict[str, torch.Tensor]:
        self.seen.append(signals)
        return pack_choices([self.choices.get(int(signals.epoch[0]), WAIT)], masks)

    def state_dict(self) -> dict[str, Any]:
        return {}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        pass
