"""Gardener: lets a controller grow one model in the user's own training loop.

A gardener is a group of one row (`esper.kasmina.row_group`) whose engine is the user's loop. Once
per epoch, `step` runs the second half of the group's step and the first half of the next: it
measures the trained epoch with its ablations, lets the governor judge it, shows the signals to the
controller, carries out the action and ticks the lifecycle. The next epoch trains what was decided.
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
from torch.utils._pytree import tree_map_only

from esper.growth.batches import Batches
from esper.growth.config import (
    DEFAULT_CONTROLLER,
    GardenerConfig,
    controller_context,
    learned_limits,
    startup_warning,
)
from esper.growth.engine import OwnersEngine, Ranks
from esper.kasmina.budget import NO_BUDGET
from esper.kasmina.evaluation import Evaluate, Evaluator, as_evaluator
from esper.kasmina.garden import Garden
from esper.kasmina.optimizer import CarriedOptimizer, make_optimizer
from esper.kasmina.row_group import RowGroup, measure_by_ablation
from esper.kasmina.signals import Panic, Rates
from esper.kasmina.slot_table import describe_decision, slot_records
from esper.leyline.actions import LifecycleOp, decode_actions
from esper.leyline.config import check_config, check_value
from esper.leyline.controller import Controller
from esper.leyline.errors import NonFiniteError, UsageError, unknown_name, warn
from esper.leyline.learning import why_not_learned, why_not_learning
from esper.leyline.reasons import Explaining, Why, why_not_grown
from esper.leyline.records import DecisionRecord, DeepeningRecord, DepthRecord, EpochRecord
from esper.leyline.rules import why_full
from esper.leyline.signals import Signals
from esper.leyline.stages import SeedStage
from esper.tamiyo.controllers import make_controller

MAX_ROLLBACKS = 3
"""Rollbacks in a row after which a gardener gives up."""

_FACTS = ("num_classes", "chance_loss", "train_samples", "samples_per_epoch")
"""Facts about the task that `Gardener.tell` takes."""

MEMORY = "gardener"
"""Key of the gardener's memory in the `state_dict` of its optimizer."""


class Gardener:
    """Grows one garden with one controller.

    When the validation loss is not finite, explodes, or falls back to guessing, the governor
    restores host and fossilized seeds of the last safe epoch (it takes a copy every few epochs),
    removes all other seeds, clears the controller's memory and goes on. The epoch's record holds
    the reason. After three rollbacks in a row the gardener raises an error.

    A garden wrapped by `DistributedDataParallel` has a gardener in every process; call `step` in
    all of them. Rank 0 measures and decides, all act, and the topologies are compared.

    Args:
        garden: what grows.
        controller: 'tamiyo', the learned one that ships; 'trial', 'heuristic', 'wait', 'random',
            'schedule:FILE', or an object with the `Controller` protocol.
        horizon: epochs of the whole run; a decision follows each but the last.
        max_growth: largest size of the grown network, in parameters and operations, as a multiple
            of the model's, such as 2.0 or "2x". By default the garden's own limit; if that is 0
            (no limit), the one that the controller learned under (2.0 for 'tamiyo').
        max_seeds: most seeds alive or fossilized at once; by default the garden's own limit.
        max_parameters: most trainable parameters, instead of `max_growth`.
        max_added_flops: most operations per sample that seeds may add, instead of `max_growth`.
        ablate_every: measure contributions every so many epochs; by default 1.
        seed: seed of random controllers.
        config: further settings, such as what counts as a plateau (page Settings, below
            `growth.gardener`). The gardener does not clip gradients; do that in your loop.
        rates: learning rates of the epochs to come; by default those that the optimizer has.
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
                f"Gardener needs a Garden, got {type(garden).__name__}; write "
                "esper.Garden(model, slots, example_input)"
            )
        check_value("horizon", horizon, int, minimum=1)
        config = check_config(config, GardenerConfig)
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
        """When the host counts as stuck or settled, for a run of this length."""
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
        """Rollbacks in a row so far."""
        self.warns_at_end = True
        """Whether the last step warns if the network has not learned anything."""
        self._clock = time.monotonic()

    def tell(self, **facts: float) -> None:
        """Tell the controller facts about the task that the settings lack; call it before `step`.

        A learned controller uses them to judge how much there is to gain. `esper.grow` and the
        callbacks of trainers find them by themselves.

        Args:
            facts: `num_classes`, `chance_loss`, `train_samples`, `samples_per_epoch`, as in
                `GardenerConfig`.
        """
        for name in facts:
            if name not in _FACTS:
                raise unknown_name("fact", name, _FACTS)
        self.config = self.config.with_task_facts(**facts)
        self._group.facts = self.config.task_facts(self.horizon)

    def limit_compute(self, flops: int, *, batch_samples: int, val_samples: int) -> None:
        """Give the run a budget: its epochs are equal shares of so many training FLOPs.

        Args:
            flops: the budget.
            batch_samples: samples of an optimizer step.
            val_samples: samples by which an epoch is measured.
        """
        self._group.facts = dataclasses.replace(
            self._group.facts,
            compute=torch.tensor([flops]),
            batch_samples=torch.tensor([batch_samples]),
            val_samples=torch.tensor([val_samples]),
        )

    @property
    def allowance(self) -> int:
        """FLOPs that may be spent on training before the next `step`, in a run with a budget."""
        return self._group.allowances()[0]

    @property
    def spent(self) -> int | None:
        """FLOPs that were spent so far, evaluation included; None without a budget."""
        has_budget = int(self._group.facts.compute[0]) != NO_BUDGET
        return int(self._group.spent[0]) if has_budget else None

    @property
    def epoch(self) -> int:
        """Epochs measured so far."""
        return int(self._group.tracker.epoch[0])

    @property
    def why(self) -> tuple[str, ...]:
        """Why the network did not learn or grow, or not completely, once the run is over."""
        return why_not_grown(self.history, chance_loss=self.chance_loss)

    @property
    def chance_loss(self) -> float | None:
        """Loss of a network that only guesses; None if unknown."""
        loss = float(self._group.facts.chance_loss[0])
        return None if math.isnan(loss) else loss

    @property
    def carried(self) -> CarriedOptimizer | None:
        """The optimizer made by `optimizer`, kept in step with growth; None before."""
        return self._engine.carried

    def optimizer(
        self,
        factory: Callable[..., Optimizer],
        params: Iterable[Any] | None = None,
        **options: Any,
    ) -> Optimizer:
        """Return `factory(params, **options)`, kept in step with growth.

        Without `params` it covers the whole garden. Make it once; the gardener adds and removes the
        parameters of seeds. Its `state_dict()` includes the names of its parameters and the
        gardener's memory, and `load_state_dict` restores both. So saving and loading the garden
        and then its optimizer resumes exactly.
        """
        if self._engine.carried is not None:
            raise UsageError("this gardener already has an optimizer; make one Gardener for each")
        self._engine.carried = make_optimizer(self.garden, factory, params, options)
        # A rollback of the first epoch returns to weights loaded since the gardener was made.
        self._group.start()
        optimizer = self._engine.carried.optimizer
        optimizer.register_state_dict_post_hook(self._add_memory)
        optimizer.register_load_state_dict_pre_hook(self._take_memory)
        return optimizer

    def recalibrate(self, batches: Batches) -> int:
        """Recompute the running statistics of BatchNorm layers; call it before `step`.

        They are out of date once a seed comes, goes or changes its amplitude, and an evaluation
        with them is wrong by whole points. `esper.grow` and the callbacks of trainers call this by
        themselves. Training is not affected, and layers in eval mode are left alone. The batches
        are held until the next `step`, which measures every ablation with its own statistics.

        Args:
            batches: training batches, as `esper.grow` takes them, or of inputs alone. At most
                `config.statistics_samples` samples are read, but at least one batch; none in a
                model without BatchNorm.

        Returns:
            The number of samples used.
        """
        return self._engine.recalibrate_from(batches, self.config.statistics_samples)

    def recalibrate_on(self, inputs: Sequence[Any]) -> int:
        """Do what `recalibrate` does, on batches of inputs that are on the garden's device."""
        return self._engine.recalibrate(inputs)

    def step(
        self,
        evaluate: Evaluate | Evaluator,
        *,
        train_loss: float | None = None,
        samples: int | None = None,
        twin_score: float | None = None,
        is_own_twin: bool = False,
        on_measured: Callable[[float], None] | None = None,
        before_action: Callable[[], None] | None = None,
    ) -> EpochRecord:
        """Measure the trained epoch, decide and act; return the record of the epoch.

        In a model with BatchNorm, call `recalibrate` first.

        Args:
            evaluate: `evaluate(model)` returns `(loss[M], correct[M] or None)` for the validation
                samples in a fixed order; without correctness the score is the negative loss.
            train_loss: training loss of the epoch, for the record.
            samples: how many the epoch was trained on; a run with a budget needs it.
            twin_score: validation score of the twin, if one is trained.
            is_own_twin: whether nothing has acted yet, so that the network is its own twin.
            on_measured: called with the score before anything acts.
            before_action: called before any action but WAIT, for instance to fork a twin.
        """
        if self.epoch >= self.horizon:
            raise UsageError(
                f"the horizon of {self.horizon} epochs is reached; write "
                f"Gardener(garden, horizon={2 * self.horizon}) for a longer run"
            )
        group = self._group
        evaluator = as_evaluator(evaluate)
        train_loss = self._ranks.mean(train_loss)
        self._engine.finish_epoch(evaluator, train_loss, samples)
        # The user may have acted on the garden by hand, and may train it with any optimizer.
        self.garden.notice_training()
        if self.config.statistics_samples:
            self._engine.warn_of_statistics(self.epoch + 1)
        group.live()
        # Followers of the garden, such as an average of its weights, take over the epoch too.
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
            training_flops=self.spent if depth is None else depth.flops,
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

    def warn_early(self) -> None:
        """Warn once, early in the run, if the network has learned nothing yet."""
        if not self.garden.count_host_parameters():
            return  # Only its seeds learn.
        problem = why_not_learning(self.history, self.chance_loss, self.horizon)
        if problem and not why_not_learning(self.history[:-1], self.chance_loss, self.horizon):
            warn(problem)

    def sizes(self) -> tuple[int, int]:
        """Return the network's trainable parameters and its operations per sample."""
        return self.garden.count_parameters(), self.garden.count_flops()

    def as_of_epoch(self, epoch: int | None = None) -> AbstractContextManager[None]:
        """Return a context in which the garden's `state_dict` fits the network of an epoch, or now.

        Only a network that is deepened needs one: blocks that slept then are left out.
        """
        return nullcontext()

    def signals(self, twin_score: float | None = None) -> Signals:
        """Return what the controller sees now."""
        unknown = math.nan if twin_score is None else twin_score
        return self._group.signals(torch.tensor([unknown]))

    def state_dict(self) -> dict[str, Any]:
        """Return everything that resuming needs: garden, optimizer, memory, history."""
        return {
            "garden": dict(self.garden.state_dict()),
            "optimizer": None if self.carried is None else self.carried.state_dict(),
            **self.memory(),
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore what `state_dict` returned; make the optimizer first."""
        if state["optimizer"] is not None and self.carried is None:
            raise UsageError(
                "the saved run has an optimizer; call gardener.optimizer(...) before loading it"
            )
        self.garden.load_state_dict(state["garden"])
        if self.carried is not None and state["optimizer"] is not None:
            self.carried.load_state_dict(state["optimizer"])
        self.recall(state)

    def memory(self) -> dict[str, Any]:
        """Return the state of the gardener without its garden and optimizer."""
        return {
            "controller": self.controller.state_dict(),
            "rows": self._group.memory(),
            "rollbacks": self._rollbacks,
            "history": [record.to_mapping() for record in self.history],
        }

    def recall(self, state: dict[str, Any]) -> None:
        """Restore what `memory` returned; garden and optimizer stay as they are."""
        self.controller.load_state_dict(state["controller"])
        self._group.recall(state["rows"])
        self._rollbacks = int(state["rollbacks"])
        self.history = [EpochRecord.from_mapping(record) for record in state["history"]]
        self._clock = time.monotonic()

    def _depth_now(self) -> DepthRecord | None:
        """Return how deep the network is; None where nothing is deepened."""
        return None

    def _take_deepenings(self) -> tuple[DeepeningRecord, ...]:
        """Return which blocks woke since the last call."""
        return ()

    def _add_memory(self, optimizer: Optimizer, state: dict[str, Any]) -> None:
        state[MEMORY] = self.memory()

    def _take_memory(self, optimizer: Optimizer, state: dict[str, Any]) -> None:
        if MEMORY in state:
            # Trainers move all of a saved optimizer to their device.
            self.recall(tree_map_only(Tensor, Tensor.cpu, state[MEMORY]))

    def _judge(self) -> str | None:
        """Return why the network was rolled back, and warn; give up after several in a row."""
        for slot in self._group.non_finite_seeds[0].nonzero().flatten().tolist():
            name = self.garden.slot_names[slot]
            warn(
                f"epoch {self.epoch}: the gradients of the seed in {name!r} are not finite, so it "
                "was pruned; lower the learning rate if that happens again"
            )
        panic = Panic(int(self._group.panic[0]))
        advice = "lower the learning rate, clip gradients or check the data"
        if panic is Panic.NONE:
            self._rollbacks = 0
            if not bool(torch.isfinite(self._group.tracker.loss_history[0, -1])):
                raise NonFiniteError(
                    f"epoch {self.epoch}: the validation loss is not finite; {advice}"
                )
            return None
        self._rollbacks += 1
        self.controller.reset(1, "cpu")
        if self._rollbacks >= MAX_ROLLBACKS:
            raise NonFiniteError(
                f"epoch {self.epoch}: {panic.text} in {self._rollbacks} epochs in a row; {advice}"
            )
        safe = int(self._group.safe_epoch[0])
        warn(
            f"epoch {self.epoch}: {panic.text}; the network was rolled back to "
            f"{f'epoch {safe}' if safe else 'its first weights'}"
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
                f"the new seed in {result.slot!r} is in no optimizer; write "
                "optimizer = gardener.optimizer(torch.optim.AdamW, lr=...)"
            )
        is_new = result.ok and op is LifecycleOp.GERMINATE
        is_immediate = is_new and self.garden.slots[result.slot].stage is SeedStage.BLENDING
        return describe_decision(
            actions, result, self.garden.slot_names, why, is_immediate=is_immediate
        )

    def _reason(self, op: LifecycleOp) -> str:
        """Return why the controller waits or prunes; empty if unknown."""
        if op not in (LifecycleOp.WAIT, LifecycleOp.PRUNE):
            return ""
        rules = self.garden.config.lifecycle.effective_rules
        if op is LifecycleOp.WAIT and (limit := why_full(self.garden.table.view(), rules)):
            return f"{Why.FULL}: {limit}"
        controller = self.controller
        # Records are saved as plain text, not as an enumeration.
        return str(controller.reasons()[0]) if isinstance(controller, Explaining) else ""
