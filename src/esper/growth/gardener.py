"""Gardener: a controller at work on one model, in its owner's own training loop.

Once per epoch, `step` measures the network with its ablations, shows the controller the signals,
carries its action out and ticks the lifecycle. The epoch that follows trains what was decided.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from esper.kasmina.blueprints.registry import blueprint_names
from esper.kasmina.contribution import (
    estimate_contributions,
    participating,
    plan_ablations,
    values_in_points,
)
from esper.kasmina.evaluation import Evaluate, Evaluator, as_evaluator
from esper.kasmina.garden import Garden
from esper.kasmina.operations import OperationResult
from esper.kasmina.optimizer import CarriedOptimizer, make_optimizer
from esper.kasmina.signals import (
    TrackerConfig,
    TrackerState,
    read_signals,
    start_tracking,
    track_epoch,
)
from esper.leyline.actions import (
    HEAD_NAMES,
    Actions,
    LifecycleOp,
    describe_action,
    head_values,
)
from esper.leyline.config import Config, option
from esper.leyline.controller import Controller, ControllerContext
from esper.leyline.errors import NonFiniteError, UsageError
from esper.leyline.records import DecisionRecord, EpochRecord, SlotRecord, copy_fields
from esper.leyline.signals import Signals
from esper.tamiyo.controllers import make_controller


def slot_records(garden: Garden) -> tuple[SlotRecord, ...]:
    """Return every slot of a garden as it is now."""
    return tuple(
        copy_fields(SlotRecord, view, stage=view.stage.name) for view in garden.slots.values()
    )


def describe_decision(
    actions: Actions, result: OperationResult, slot_names: Sequence[str]
) -> DecisionRecord:
    """Return a decision with the arguments its op uses; the others are None."""
    chosen: dict[str, Any] = describe_action(
        {head: int(actions[head][0]) for head in HEAD_NAMES},
        head_values(slot_names, blueprint_names()),
    )
    return DecisionRecord(**chosen, outcome=result.outcome.name.lower(), reason=result.reason)


DEFAULT_CONTROLLER = "heuristic"


@dataclass(frozen=True, kw_only=True)
class GardenerConfig(Config):
    """How often a gardener measures, and what it tells the controller."""

    ablate_every: int = option(1, "Measure contributions at every this many epochs.", minimum=1)
    param_budget: int = option(
        500_000, "Parameters that count as a full budget in the observation.", minimum=1
    )
    tracker: TrackerConfig = option(TrackerConfig, "When a host counts as stuck or settled.")


class Gardener:
    """Drives one garden with one controller.

    Args:
        garden: what grows.
        controller: a name such as 'heuristic', 'wait', 'random', 'schedule:FILE', or an object
            with the `Controller` protocol.
        horizon: epochs of the whole run; decisions follow all but the last.
        max_seeds: most seeds alive or fossilized at once, 0 without a limit.
        max_parameters: most trainable parameters of the grown network, 0 without a limit.
        max_added_flops: most operations per sample that seeds may add, 0 without a limit.
        ablate_every: measure contributions at every this many epochs.
        seed: seed of controllers that draw.
        config: further settings.
    """

    def __init__(
        self,
        garden: Garden,
        controller: str | Controller = DEFAULT_CONTROLLER,
        horizon: int = 60,
        *,
        max_seeds: int | None = None,
        max_parameters: int | None = None,
        max_added_flops: int | None = None,
        ablate_every: int | None = None,
        seed: int = 0,
        config: GardenerConfig | None = None,
    ) -> None:
        """Bring controller and garden together; nothing is measured yet."""
        if horizon < 1:
            raise UsageError(f"horizon must be at least 1 epoch, got {horizon}")
        config = config or GardenerConfig()
        self.config = config if ablate_every is None else config.replace(ablate_every=ablate_every)
        self.garden = garden
        _limit(garden, max_seeds, max_parameters, max_added_flops)
        self.horizon = horizon
        context = ControllerContext(
            slot_names=garden.slot_names, blueprint_names=blueprint_names(), seed=seed
        )
        self.controller = make_controller(controller, context)
        self.controller.reset(1, "cpu")
        self.history: list[EpochRecord] = []
        self.carried: CarriedOptimizer | None = None
        self._tracker: TrackerState = start_tracking(1, self.config.tracker)
        self._last_op = int(LifecycleOp.WAIT)
        self._last_success = True
        self._clock = time.monotonic()

    @property
    def epoch(self) -> int:
        """Epochs measured so far."""
        return int(self._tracker.epoch[0])

    def optimizer(
        self,
        factory: Callable[..., Optimizer],
        params: Iterable[Any] | None = None,
        **options: Any,
    ) -> Optimizer:
        """Return `factory(params, **options)`, kept in step with growth.

        Without `params` it covers the whole garden. Make it once; parameters of seeds join and
        leave its groups by themselves.
        """
        if self.carried is not None:
            raise UsageError("this gardener has an optimizer already; make one per gardener")
        self.carried = make_optimizer(self.garden, factory, params, options)
        return self.carried.optimizer

    def step(
        self,
        evaluate: Evaluate | Evaluator,
        *,
        train_loss: float | None = None,
        twin_score: float | None = None,
        is_own_twin: bool = False,
        before_action: Callable[[], None] | None = None,
    ) -> EpochRecord:
        """Measure the epoch that was trained, decide, act; return what happened.

        `evaluate(model)` returns `(loss[M], correct[M] or None)` for the validation samples in a
        fixed order; without correctness the score is the negative loss. A caller that trains a
        twin gives its score (or says that the network has not acted yet and is its own twin), and
        may fork the network in `before_action`, called before any action but WAIT.
        """
        if self.epoch >= self.horizon:
            raise UsageError(
                f"the horizon of {self.horizon} epochs is reached; give the Gardener a longer one"
            )
        loss, score = self._measure(as_evaluator(evaluate))
        twin_score = float(score) if is_own_twin else twin_score
        self._tracker = track_epoch(self._tracker, loss, score, self.config.tracker)
        slots = slot_records(self.garden)
        parameters = self.garden.count_parameters()
        decision = None
        if self.epoch < self.horizon:
            decision = self._decide(self.signals(twin_score), before_action)
        now = time.monotonic()
        record = EpochRecord(
            epoch=self.epoch,
            train_loss=train_loss,
            val_loss=float(loss),
            val_score=float(score),
            twin_score=twin_score,
            stabilized=bool(self._tracker.stabilized[0]),
            plateau_epochs=int(self._tracker.plateau_epochs[0]),
            parameters=parameters,
            slots=slots,
            decision=decision,
            seconds=now - self._clock,
        )
        self._clock = now
        self.history.append(record)
        if self.carried is not None:
            self.carried.start_epoch()
        return record

    def signals(self, twin_score: float | None = None) -> Signals:
        """Return what the controller sees now."""

        def one(value: int) -> Tensor:
            return torch.tensor([value], dtype=torch.int64)

        return read_signals(
            self.garden.state,
            self._tracker,
            enabled=torch.ones((1, len(self.garden.slot_names)), dtype=torch.bool),
            max_epochs=one(self.horizon),
            host_params=one(self.garden.count_host_parameters()),
            budget=one(self.config.param_budget),
            last_op=one(self._last_op),
            last_success=torch.tensor([self._last_success]),
            rolled_back=torch.tensor([False]),
            twin_score=torch.tensor([math.nan if twin_score is None else twin_score]),
        )

    def state_dict(self) -> dict[str, Any]:
        """Return everything a growing run needs to continue: garden, optimizer, memory, history."""
        return {
            "garden": dict(self.garden.state_dict()),
            "optimizer": None if self.carried is None else self.carried.state_dict(),
            "controller": self.controller.state_dict(),
            "tracker": self._tracker.state_dict(),
            "last_op": self._last_op,
            "last_success": self._last_success,
            "history": [record.to_mapping() for record in self.history],
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore what `state_dict` returned; make the optimizer first, as in the saved run."""
        if state["optimizer"] is not None and self.carried is None:
            raise UsageError("make the optimizer by gardener.optimizer(...) before restoring")
        self.garden.load_state_dict(state["garden"])
        if self.carried is not None and state["optimizer"] is not None:
            self.carried.load_state_dict(state["optimizer"])
        self.controller.load_state_dict(state["controller"])
        self._tracker = TrackerState.from_state_dict(state["tracker"])
        self._last_op = int(state["last_op"])
        self._last_success = bool(state["last_success"])
        self.history = [EpochRecord.from_mapping(record) for record in state["history"]]
        self._clock = time.monotonic()

    def _measure(self, evaluator: Evaluator) -> tuple[Tensor, Tensor]:
        """Evaluate with ablations when they are due; return loss and score, float64 [1]."""
        members = participating(self.garden.state)[0]
        due = self.epoch % self.config.ablate_every == 0
        if not due:
            members = torch.zeros_like(members)
        configurations = plan_ablations(members.tolist())
        losses, correct = evaluator.measure(self.garden, configurations)
        values = values_in_points(losses, correct).cpu()
        loss = losses[0].to(torch.float64).mean().cpu()[None]
        score = values[0].mean()[None]
        if not bool(torch.isfinite(loss).all()):
            raise NonFiniteError("the validation loss is not finite; lower the learning rate")
        self.garden.record_epoch(float(score))
        if due:
            # Also without members: what two seeds once gained together is not true for ever.
            names = self.garden.slot_names
            self.garden.record_contributions(
                estimate_contributions(configurations, values, members.tolist(), names)
            )
        return loss, score

    def _decide(self, signals: Signals, before_action: Callable[[], None] | None) -> DecisionRecord:
        actions = self.controller.act(signals, self.garden.masks())
        if before_action is not None and int(actions["op"][0]) != int(LifecycleOp.WAIT):
            before_action()
        result = self.garden.act(actions)
        self.garden.tick()
        self._last_op = int(actions["op"][0])
        self._last_success = result.ok
        return describe_decision(actions, result, self.garden.slot_names)


def _limit(
    garden: Garden,
    max_seeds: int | None,
    max_parameters: int | None,
    max_added_flops: int | None,
) -> None:
    """Write growth limits into the garden's configuration, where legality reads them."""
    config = garden.config
    if max_seeds is not None:
        rules = config.lifecycle.rules.replace(max_seeds=max_seeds)
        config = config.replace(lifecycle=config.lifecycle.replace(rules=rules))
    if max_parameters is not None:
        config = config.replace(max_parameters=max_parameters)
    if max_added_flops is not None:
        config = config.replace(max_added_flops=max_added_flops)
    garden.config = config
