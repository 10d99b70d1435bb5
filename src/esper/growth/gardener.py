"""Gardener: a controller at work on one model, in its owner's own training loop.

A gardener is a group of one row (`esper.kasmina.row_group`) whose engine is the owner's loop. Once
per epoch, `step` takes the second half of the group's step and the first half of the next: the
epoch that was trained is measured with its ablations and judged by the governor, the controller
sees the signals, its action is carried out and the lifecycle ticks. The epoch that follows trains
what was decided.
"""

from __future__ import annotations

import dataclasses
import math
import time
from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from esper.growth.batches import Batches
from esper.growth.config import (
    DEFAULT_CONTROLLER,
    GardenerConfig,
    controller_context,
    learned_limits,
    startup_warning,
)
from esper.growth.engine import OwnersEngine, Ranks
from esper.kasmina.evaluation import Evaluate, Evaluator, as_evaluator
from esper.kasmina.garden import Garden
from esper.kasmina.optimizer import CarriedOptimizer, make_optimizer
from esper.kasmina.row_group import RowGroup, measure_by_ablation
from esper.kasmina.signals import Panic, Rates
from esper.kasmina.slot_table import describe_decision, slot_records
from esper.kasmina.slots.probe import map_tensors
from esper.leyline.actions import LifecycleOp, decode_actions
from esper.leyline.config import check_value
from esper.leyline.controller import Controller
from esper.leyline.errors import NonFiniteError, UsageError, unknown_name, warn
from esper.leyline.reasons import Explaining, Why, why_not_grown, why_not_learned
from esper.leyline.records import DecisionRecord, DeepeningRecord, DepthRecord, EpochRecord
from esper.leyline.rules import why_full
from esper.leyline.signals import Signals
from esper.tamiyo.controllers import make_controller

MOST_ROLLBACKS = 3  # Rollbacks in a row after which growing one network gives up.

_TOLD = ("num_classes", "chance_loss", "train_samples", "samples_per_epoch")
"""What a gardener can be told of its task."""

MEMORY = "gardener"
"""Where the `state_dict` of a gardener's optimizer has what the gardener remembers."""


class Gardener:
    """Drives one garden with one controller.

    When the validation loss is not finite, explodes, or falls back to guessing, the governor
    restores host and fossilized seeds as they were in the last safe epoch (a copy is taken every
    few epochs), removes what was still growing, clears the controller's memory and goes on; the
    reason stands in the epoch's record. After several rollbacks in a row it gives up with an error.

    A garden wrapped by `DistributedDataParallel` has a gardener in every process; call `step` in
    all of them. Rank 0 measures and decides, all act, and the topologies are compared.

    Args:
        garden: what grows.
        controller: 'tamiyo', the learned one that comes along, 'heuristic', 'wait', 'random',
            'schedule:FILE', or an object with the `Controller` protocol.
        horizon: epochs of the whole run; decisions follow all but the last.
        max_growth: most parameters and operations of the grown network, as a multiple of the
            model's, such as 2.0 or "2x"; the garden's, 0 (no limit), by default.
        max_seeds: most seeds alive or fossilized at once; likewise.
        max_parameters: most trainable parameters of the grown network; likewise. Where there is no
            limit and the controller learned under one, as 'tamiyo' did, that one holds.
        max_added_flops: most operations per sample that seeds may add; likewise.
        ablate_every: measure contributions at every this many epochs; 1 by default.
        seed: seed of controllers that draw.
        config: further settings, such as what counts as a plateau (page Settings, below
            `growth.gardener`). Gradients are not clipped: that is for your own loop to do.
        rates: the learning rates that the owner's epochs will have; by default what the optimizer
            has when it is looked at.
    """

    def __init__(
        self,
        garden: Garden,
        controller: str | Controller = DEFAULT_CONTROLLER,
        horizon: int = 60,
        *,
        max_growth: float | str | None = None,
        max_seeds: int | None = None,
        max_parameters: int | None = None,
        max_added_flops: int | None = None,
        ablate_every: int | None = None,
        seed: int = 0,
        config: GardenerConfig | None = None,
        rates: Rates | None = None,
    ) -> None:
        """Bring controller and garden together; nothing is measured yet."""
        if not isinstance(garden, Garden):
            raise UsageError(
                f"a gardener needs a Garden, got {type(garden).__name__}; make one by "
                "esper.Garden(model, slots, example_input)"
            )
        check_value("horizon", horizon, int, minimum=1)
        config = config or GardenerConfig()
        self.config = config if ablate_every is None else config.replace(ablate_every=ablate_every)
        self.garden = garden
        garden.config = garden.config.limited(
            max_growth=max_growth,
            max_seeds=max_seeds,
            max_parameters=max_parameters,
            max_added_flops=max_added_flops,
        )
        self.horizon = horizon
        self.tracker = self.config.tracker
        """When the host counts as stuck or settled in a run of this length."""
        if self.config.fits_horizon:
            lifecycle = garden.config.lifecycle.fitted(horizon)
            garden.config = garden.config.replace(lifecycle=lifecycle)
            self.tracker = self.tracker.fitted(horizon)
        self.controller = make_controller(controller, controller_context(garden, seed))
        garden.config = garden.config.limited(**learned_limits(self.controller, garden))
        self.controller.reset(1, "cpu")
        warning = startup_warning(self.controller, garden, self.tracker, horizon)
        if warning is not None:
            warn(warning)
        self.history: list[EpochRecord] = []
        self._ranks = Ranks(garden, val_is_sharded=self.config.val_is_sharded)
        self._engine = OwnersEngine(garden, self._ranks)
        self._group = RowGroup(
            self._engine,
            [seed],
            self.config.replace(tracker=self.tracker),
            table=garden.table,
            facts=self.config.task_facts(horizon),
            rates=rates or self._engine.rates,
            measure=partial(measure_by_ablation, self._engine),
        )
        self._group.start()
        self._rollbacks = 0
        """How many epochs in a row went back."""
        self.warns_at_end = True
        """Whether the last step warns of a network that has not learned anything."""
        self._clock = time.monotonic()

    def tell(self, **facts: float) -> None:
        """Let the controller know of the task what the settings do not say.

        A learned controller judges by it how much there is to gain. `esper.grow` and the callbacks
        of trainers find it out; whoever has a loop of their own says it in the settings, or here
        before the first step.

        Args:
            facts: `num_classes`, `chance_loss`, `train_samples`, `samples_per_epoch`, as in
                `GardenerConfig`.
        """
        unknown = [name for name in facts if name not in _TOLD]
        if unknown:
            raise unknown_name("fact", unknown[0], _TOLD)
        self.config = self.config.with_task_facts(**facts)
        self._group.facts = self.config.task_facts(self.horizon)

    @property
    def epoch(self) -> int:
        """Epochs measured so far."""
        return int(self._group.tracker.epoch[0])

    @property
    def why(self) -> tuple[str, ...]:
        """Why it did not learn, or nothing grew, or not to the end, once the run is over."""
        return why_not_grown(self.history, chance_loss=self.chance_loss)

    @property
    def chance_loss(self) -> float | None:
        """Loss of a network that only guesses; None where nobody knows."""
        loss = float(self._group.facts.chance_loss[0])
        return None if math.isnan(loss) else loss

    @property
    def carried(self) -> CarriedOptimizer | None:
        """The optimizer that is kept in step with growth, once it was made."""
        return self._engine.carried

    def optimizer(
        self,
        factory: Callable[..., Optimizer],
        params: Iterable[Any] | None = None,
        **options: Any,
    ) -> Optimizer:
        """Return `factory(params, **options)`, kept in step with growth.

        Without `params` it covers the whole garden. Make it once; parameters of seeds join and
        leave its groups by themselves. Its `state_dict()` names its parameters and holds what the
        gardener remembers, and its `load_state_dict` takes both back: whoever saves and loads the
        garden and its optimizer, in this order, continues exactly.
        """
        if self._engine.carried is not None:
            raise UsageError("this gardener has an optimizer already; make one per gardener")
        self._engine.carried = make_optimizer(self.garden, factory, params, options)
        # Weights loaded since the gardener was made are what a first bad epoch goes back to.
        self._group.start()
        optimizer = self._engine.carried.optimizer
        optimizer.register_state_dict_post_hook(self._add_memory)
        optimizer.register_load_state_dict_pre_hook(self._take_memory)
        return optimizer

    def recalibrate(self, batches: Batches) -> int:
        """Take the running statistics of BatchNorm layers anew; call it before `step`.

        A seed that comes, goes or changes its amplitude leaves them behind, and an evaluation by
        them is wrong by whole points. `esper.grow` and the callbacks of trainers do this by
        themselves. Training does not notice, and layers that are kept in eval mode are left alone.
        The batches are held until the next `step`, in which every ablation is measured with
        statistics of its own.

        Args:
            batches: training batches, as `esper.grow` takes them, or of inputs alone; no more than
                `config.statistics_samples` samples are read, but one batch at least. In a model
                without such layers none are.

        Returns:
            The number of samples that the statistics are taken from.
        """
        return self._engine.recalibrate_from(batches, self.config.statistics_samples)

    def recalibrate_on(self, inputs: Sequence[Any]) -> int:
        """Do what `recalibrate` does, on these batches of inputs, where the garden is."""
        return self._engine.recalibrate(inputs)

    def step(
        self,
        evaluate: Evaluate | Evaluator,
        *,
        train_loss: float | None = None,
        twin_score: float | None = None,
        is_own_twin: bool = False,
        on_measured: Callable[[float], None] | None = None,
        before_action: Callable[[], None] | None = None,
    ) -> EpochRecord:
        """Measure the epoch that was trained, decide, act; return what happened.

        `evaluate(model)` returns `(loss[M], correct[M] or None)` for the validation samples in a
        fixed order; without correctness the score is the negative loss. A caller that trains a
        twin gives its score (or says that the network has not acted yet and is its own twin), and
        may fork the network in `before_action`, called before any action but WAIT. `on_measured`
        is called with the score while the network is still what was measured. In a model with
        BatchNorm, `recalibrate` comes first.
        """
        if self.epoch >= self.horizon:
            raise UsageError(
                f"the horizon of {self.horizon} epochs is reached; give the Gardener a longer one"
            )
        group = self._group
        evaluator = as_evaluator(evaluate)
        train_loss = self._ranks.mean(train_loss)
        self._engine.finish_epoch(evaluator, train_loss)
        # Its owner may have acted on the garden by hand, and trains it by an optimizer of choice.
        self.garden.notice_training()
        if self.config.statistics_samples:
            self._engine.warn_of_statistics(self.epoch + 1)
        group.live()
        # What follows the garden, such as an average of its weights, remembers the epoch too.
        self.garden.sync(group.state)
        measured = group.measured
        assert measured is not None
        rollback = self._judge()
        loss, score = float(measured.loss), float(measured.score)
        statistics = self._engine.forget_batches()
        if on_measured is not None:
            on_measured(score)
        twin_score = score if is_own_twin else twin_score
        slots = slot_records(self.garden.slots)
        parameters, flops = self.sizes()
        depth = self._depth_now()
        decision = None
        if self.epoch < self.horizon:
            decision = self._decide(self.signals(twin_score), before_action)
        if depth is not None:
            depth = dataclasses.replace(depth, deepenings=self._take_deepenings())
            decision = depth.deepenings[0].decision if depth.deepenings else decision
        now = time.monotonic()
        record = EpochRecord(
            epoch=self.epoch,
            train_loss=train_loss,
            val_loss=loss,
            val_score=score,
            twin_score=twin_score,
            stabilized=bool(group.tracker.stabilized[0]),
            plateau_epochs=int(group.tracker.plateau_epochs[0]),
            parameters=parameters,
            flops=flops,
            slots=slots,
            decision=decision,
            seconds=now - self._clock,
            rollback=rollback,
            statistics_samples=statistics,
            depth=depth,
        )
        self._clock = now
        self.history.append(record)
        if self.carried is not None:
            self.carried.start_epoch()
        if self.warns_at_end and self.epoch >= self.horizon:
            problem = why_not_learned(self.history, self.chance_loss)
            if problem:
                warn(problem)
        return record

    def sizes(self) -> tuple[int, int]:
        """Return the trainable parameters and the operations per sample of the network as it is."""
        return self.garden.count_parameters(), self.garden.count_flops()

    def as_in(self, epoch: int | None = None) -> AbstractContextManager[None]:
        """Return a context in which the garden's `state_dict` fits what took part in an epoch.

        Without one that is what takes part in it now.
        """
        return nullcontext()

    def signals(self, twin_score: float | None = None) -> Signals:
        """Return what the controller sees now."""
        unknown = math.nan if twin_score is None else twin_score
        return self._group.signals(torch.tensor([unknown]))

    def state_dict(self) -> dict[str, Any]:
        """Return everything a growing run needs to continue: garden, optimizer, memory, history."""
        return {
            "garden": dict(self.garden.state_dict()),
            "optimizer": None if self.carried is None else self.carried.state_dict(),
            **self.memory(),
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore what `state_dict` returned; make the optimizer first, as in the saved run."""
        if state["optimizer"] is not None and self.carried is None:
            raise UsageError("make the optimizer by gardener.optimizer(...) before restoring")
        self.garden.load_state_dict(state["garden"])
        if self.carried is not None and state["optimizer"] is not None:
            self.carried.load_state_dict(state["optimizer"])
        self.recall(state)

    def memory(self) -> dict[str, Any]:
        """Return what a gardener remembers beside its garden and its optimizer."""
        return {
            "controller": self.controller.state_dict(),
            "rows": self._group.memory(),
            "rollbacks": self._rollbacks,
            "history": [record.to_mapping() for record in self.history],
        }

    def recall(self, state: dict[str, Any]) -> None:
        """Take over what `memory` returned; garden and optimizer are left alone."""
        self.controller.load_state_dict(state["controller"])
        self._group.recall(state["rows"])
        self._rollbacks = int(state["rollbacks"])
        self.history = [EpochRecord.from_mapping(record) for record in state["history"]]
        self._clock = time.monotonic()

    def _depth_now(self) -> DepthRecord | None:
        """Return how deep the network is; None where no blocks sleep and wake."""
        return None

    def _take_deepenings(self) -> tuple[DeepeningRecord, ...]:
        """Return which blocks woke since the last epoch was measured."""
        return ()

    def _add_memory(self, optimizer: Optimizer, state: dict[str, Any]) -> None:
        state[MEMORY] = self.memory()

    def _take_memory(self, optimizer: Optimizer, state: dict[str, Any]) -> None:
        if MEMORY in state:
            # Trainers move all of a saved optimizer to their device.
            self.recall(map_tensors(state[MEMORY], Tensor.cpu))

    def _judge(self) -> str | None:
        """Return why the network went back, and say so; give up where that does not help."""
        for slot in self._group.non_finite_seeds[0].nonzero().flatten().tolist():
            name = self.garden.slot_names[slot]
            warn(
                f"epoch {self.epoch}: the gradients of the seed in {name!r} are not finite; it was "
                "pruned, and the network goes on without it"
            )
        panic = Panic(int(self._group.panic[0]))
        advice = "lower the learning rate, clip gradients or check the data"
        if panic is Panic.NONE:
            self._rollbacks = 0
            if not bool(torch.isfinite(self._group.tracker.loss_history[0, -1])):
                raise NonFiniteError(f"the validation loss is not finite; {advice}")
            return None
        self._rollbacks += 1
        self.controller.reset(1, "cpu")
        if self._rollbacks >= MOST_ROLLBACKS:
            raise NonFiniteError(
                f"{panic.text} in {self._rollbacks} epochs in a row, each from the last safe "
                f"state; {advice}"
            )
        safe = int(self._group.safe_epoch[0])
        warn(
            f"epoch {self.epoch}: {panic.text}; the network went back to what it was "
            f"{f'after epoch {safe}' if safe else 'at the start'}"
        )
        return panic.name.lower()

    def _decide(self, signals: Signals, before_action: Callable[[], None] | None) -> DecisionRecord:
        actions = self._ranks.from_first(self.controller.act(signals, self.garden.table.masks()))
        op = LifecycleOp(int(actions["op"][0]))
        if before_action is not None and op is not LifecycleOp.WAIT:
            before_action()
        why = self._reason(op)
        command = decode_actions({head: value.cpu() for head, value in actions.items()})
        before = self.garden.state
        applied = self._group.act(command)
        self._ranks.check_topology()
        result = self.garden.describe(before, command, applied)
        if result.ok and op is LifecycleOp.GERMINATE and self.carried is None:
            warn(
                "a seed was planted, but nothing that this gardener knows of trains it; make your "
                "optimizer by gardener.optimizer(torch.optim.AdamW, lr=...)"
            )
        return describe_decision(actions, result, self.garden.slot_names, why)

    def _reason(self, op: LifecycleOp) -> str:
        """Return why the controller waits or prunes, as far as it or the rules can tell."""
        if op not in (LifecycleOp.WAIT, LifecycleOp.PRUNE):
            return ""
        rules = self.garden.config.lifecycle.effective_rules
        if op is LifecycleOp.WAIT and (limit := why_full(self.garden.table.view(), rules)):
            return f"{Why.FULL}: {limit}"
        controller = self.controller
        # Plain text: a record is saved as plain data.
        return str(controller.reasons()[0]) if isinstance(controller, Explaining) else ""
