"""The one step of growth, over rows: apply, tick, train, measure, govern, signals.

A `RowGroup` holds networks that grow side by side, one per row, and all that is remembered about
them. Its parts are pure functions over [rows, slots]; an `Engine` moves the weights. There is no
other step than `RowGroup.step`. A population has one group for each stack of rows. A `Gardener` has
a group of one row, whose owner trains between the two halves of the step: `act` and `live`.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

import torch
from torch import Tensor

from esper.kasmina.blueprints.registry import blueprint_names
from esper.kasmina.budget import (
    NO_BUDGET,
    affordable_flops,
    plan_portions,
    share_left,
    training_flops,
)
from esper.kasmina.contribution import (
    Measured,
    compare_rows,
    count_ablations,
    participating,
    plan_ablations,
    values_in_points,
)
from esper.kasmina.engine import Engine, EpochResult, EvaluatedEngine, RemoteEngine, RowWeights
from esper.kasmina.lifecycle import Applied
from esper.kasmina.signals import (
    GovernorConfig,
    GovernorState,
    Panic,
    Rates,
    RowFacts,
    TrackerConfig,
    TrackerState,
    govern,
    read_signals,
    start_governing,
    start_tracking,
    track_epoch,
    unknown_rates,
)
from esper.kasmina.slot_table import SlotTable
from esper.kasmina.state import SlotState, check_state
from esper.leyline.actions import Command, LifecycleOp
from esper.leyline.config import Config, option
from esper.leyline.errors import CheckpointError
from esper.leyline.signals import Signals
from esper.leyline.stages import SeedStage
from esper.utils.process import Pending
from esper.utils.storage import check_like, check_range

Remembered = TypeVar("Remembered", SlotState, TrackerState, GovernorState, Measured, Signals)

Measure = Callable[[Tensor, Tensor | None], Pending[Measured]]
"""(participating seeds bool [R, S], rows bool [R] or None for all) -> what the rows show."""

_BY_ROW = ("last_op", "last_success", "panic", "safe_epoch", "train_loss", "spent", "seen")
"""Attributes of a group with one number per row, saved with it."""


@dataclass(frozen=True, kw_only=True)
class RowConfig(Config):
    """How rows are measured and watched over, whoever trains them."""

    ablate_every: int = option(1, "Measure contributions at every this many epochs.", minimum=1)
    tracker: TrackerConfig = option(TrackerConfig, "When a host counts as stuck or settled.")
    governor: GovernorConfig = option(
        GovernorConfig, "When a network goes back to its last safe state."
    )


def measure_by_ablation(
    engine: EvaluatedEngine, members: Tensor, which: Tensor | None
) -> Pending[Measured]:
    """Evaluate networks in every configuration of their participating seeds, and compare."""
    rows = members.tolist()
    chosen = [True] * len(rows) if which is None else which.tolist()
    plans = [plan_ablations(row)[: None if c else 0] for row, c in zip(rows, chosen, strict=True)]
    loss, correct = engine.measure(plans)
    return compare_rows(members, plans, loss, values_in_points(loss, correct))


class RowGroup:
    """Rows on one engine.

    Args:
        engine: trains the rows and moves their weights.
        keys: names of the rows' random streams, one for each.
        config: how they are measured and watched over.
        table: their slots; only the group changes it during a step.
        facts: fixed facts of every row's task.
        rates: the learning rates of epochs to come.
        measure: how rows are measured; `measure_by_ablation` for networks.
        rests_at_horizon: whether a row stops changing after its horizon, whatever the actions, so
            that rows with different horizons can run together.
    """

    def __init__(
        self,
        engine: Engine,
        keys: Sequence[int],
        config: RowConfig,
        *,
        table: SlotTable,
        measure: Measure,
        facts: RowFacts,
        rates: Rates = unknown_rates,
        rests_at_horizon: bool = False,
    ) -> None:
        """Start at epoch 0, with nothing grown."""
        self.engine = engine
        self.keys = list(keys)
        self.config = config
        self.table = table
        self.device = table.device
        rows = len(self.keys)
        self.tracker: TrackerState = start_tracking(rows, config.tracker, self.device)
        self.governor: GovernorState = start_governing(rows, self.device)
        self.last_op = self._full(int(LifecycleOp.WAIT))
        self.last_success = torch.ones(rows, dtype=torch.bool, device=self.device)
        self.panic = self._full(int(Panic.NONE))
        """int64 [R], a `Panic`: why the governor acted in the last step."""
        self.non_finite_seeds = torch.zeros_like(table.enabled)
        """bool [R, S]: seeds pruned in the last step because their gradients were not finite."""
        self.train_loss = torch.full((rows,), math.nan, dtype=torch.float64, device=self.device)
        self.spent = self._full(0)
        """int64 [R], FLOPs that a row with a budget has spent."""
        self.seen = self._full(0)
        """int64 [R], samples that a row with a budget was trained on."""
        self.measured: Measured | None = None
        """Measurements of the last epoch; not part of snapshots."""
        self.facts = facts
        self._rates = rates
        self._rests_at_horizon = rests_at_horizon
        self._measure = measure
        self._training: Pending[EpochResult] | None = None
        """The epoch that has begun."""
        self._planned: list[int] = []
        """Samples that it trains on, by row."""
        self._safe: list[RowWeights] = []
        self.safe_epoch = self._full(0)
        """int64 [R], the epoch after which each row was last known to be safe."""

    @property
    def rows(self) -> int:
        """Number of rows."""
        return len(self.keys)

    @property
    def state(self) -> SlotState:
        """State of the slots, tensors [R, S]."""
        return self.table.state

    @property
    def rolled_back(self) -> Tensor:
        """Bool [R], the rows that went back to their last safe state in the last step."""
        return self.panic != int(Panic.NONE)

    @property
    def at_rest(self) -> Tensor:
        """Bool [R], the rows that have reached their horizon and no longer change."""
        return (self.tracker.epoch >= self.facts.horizon) & self._rests_at_horizon

    @property
    def facts(self) -> RowFacts:
        """What is known of every row's task before it lives."""
        return self._facts

    @facts.setter
    def facts(self, facts: RowFacts) -> None:
        self._facts = facts
        self._has_budget = bool((facts.compute != NO_BUDGET).any())
        self._limit_growth()

    @property
    def flops(self) -> Tensor:
        """Int64 [R], operations of one sample's forward pass through each row as it is now."""
        return self.table.costs.host_flops + self.table.flops().sum(1)

    def allowances(self) -> list[int]:
        """Return the FLOPs that each row may train with before its next decision.

        That is what is left of its share of the budget once the evaluation that ends the epoch is
        paid for; 0 or less where nothing is left, and without a budget.
        """
        taken = self.spent + self._evaluation_flops()
        return share_left(self.facts, self.tracker.epoch + 1, taken)

    # -- the step ----------------------------------------------------------------------------------

    def step(self, command: Command) -> Signals:
        """Apply one action per row, train and measure the next epoch, and return the signals."""
        self.act(command)
        self.live()
        return self.signals()

    def act(self, command: Command) -> Applied:
        """Apply one action per row, and tick: amplitudes, cooldowns and automatic gates move on."""
        table, before, resting = self.table, self.state, self.at_rest
        op = torch.where(resting, int(LifecycleOp.WAIT), command.op.to(self.device))
        command = dataclasses.replace(command, op=op)
        with table.undone_by_error(self._build):
            applied = table.apply(command)
            table.tick()
            table.state = keep_rows(resting, before, table.state)
            self._build()
        self.last_op = torch.where(resting, self.last_op, op)
        self.last_success = torch.where(resting, self.last_success, applied.took_effect)
        fossil = int(SeedStage.FOSSILIZED)
        fossilized = ((self.state.stage == fossil) & (before.stage != fossil)).any(1)
        self._keep_safe(fossilized & ~resting)
        return applied

    def live(self) -> None:
        """Train one epoch, measure it, roll back rows that went wrong, and record the rest."""
        resting = self.at_rest
        trained, self._training = self._training or self._train(), None
        due, members = self._due(), self._members()
        flops, evaluation = self.flops, self._evaluation_flops()
        # Start both before waiting for either: a device measures while the first is read.
        measuring = self._measure(members, ~resting if bool(resting.any()) else None)
        result, measured = trained(), measuring()
        # From here on no user code runs, so the group changes as a whole.
        planned = torch.tensor(self._planned, device=self.device)
        samples = planned if result.samples is None else result.samples
        self._charge(~resting, training_flops(flops, samples) + evaluation, samples)
        tracker, governor, shown = self.tracker, self.governor, self.measured
        measured, good = self._govern(measured, resting)
        self.non_finite_seeds = self._prune_non_finite(result, good & ~resting)
        before = self.state
        members = members & good[:, None]
        sampled = result.sampled & good[:, None] & ~self.non_finite_seeds
        self.train_loss = torch.where(resting, self.train_loss, result.loss)
        self.table.record_epoch(measured.score, result.gradients, sampled)
        self.table.record_contributions(measured, members, due)
        self.tracker = track_epoch(self.tracker, measured.loss, measured.score, self.config.tracker)
        self.table.state = keep_rows(resting, before, self.state)
        self.tracker = keep_rows(resting, tracker, self.tracker)
        self.governor = keep_rows(resting, governor, self.governor)
        self.measured = measured if shown is None else keep_rows(resting, shown, measured)
        if self.config.governor.is_on:
            due = self.tracker.epoch % self.config.governor.snapshot_every == 0
            self._keep_safe(due & good & ~resting)
        self._limit_growth()

    def signals(self, twin_score: Tensor | None = None) -> Signals:
        """Return what a controller sees, on the group's device."""
        unknown = torch.full((self.rows,), math.nan, device=self.device)
        return read_signals(
            self.table,
            self.tracker,
            self.facts,
            train_loss=self.train_loss,
            spent=self.spent,
            rates=self._rates,
            last_op=self.last_op,
            last_success=self.last_success,
            rolled_back=self.rolled_back,
            twin_score=unknown if twin_score is None else twin_score,
        )

    # -- what is remembered ------------------------------------------------------------------------

    def start(self, state: SlotState | None = None) -> None:
        """Build the seeds of the present or given state, and keep it as the safe state."""
        if state is not None:
            self.table.state = state
        self._build()
        if self.config.governor.is_on:
            self._safe = self._read_at_rest(range(self.rows))
            self.safe_epoch = self.tracker.epoch.clone()

    def begin(self) -> None:
        """Start training the next epoch without waiting for its end."""
        self._training = self._train()

    def memory(self, rows: Sequence[int] | None = None) -> dict[str, Any]:
        """Return the trackers and safe states of some rows (all by default), without networks."""
        chosen = list(range(self.rows)) if rows is None else list(rows)
        index = torch.tensor(chosen, dtype=torch.int64, device=self.device)
        return {
            "keys": [self.keys[row] for row in chosen],
            "tracker": self.tracker.select(index).state_dict(),
            "governor": self.governor.select(index).state_dict(),
            **{name: getattr(self, name)[index] for name in _BY_ROW},
            "safe": [self._safe[row].to_tree() for row in chosen if self._safe],
        }

    def recall(self, saved: dict[str, Any]) -> None:
        """Restore what `memory` returned for as many rows; networks stay as they are."""

        def here(tree: dict[str, Tensor]) -> dict[str, Tensor]:
            return {name: value.clone().to(self.device) for name, value in tree.items()}

        mine = self.memory()
        # Rows that were saved before there were budgets have none.
        saved = {"spent": mine["spent"], "seen": mine["seen"], **saved}
        for name in ("tracker", "governor", *_BY_ROW):
            check_like(saved[name], mine[name], name)
        check_range(saved["tracker"]["epoch"], 0, 2**53, "tracker.epoch")
        safe = [RowWeights.from_tree(tree) for tree in saved["safe"]]
        needed = self.rows if self.config.governor.is_on else 0
        if len(safe) != needed:
            raise CheckpointError(
                f"the saved state is damaged: there are {len(safe)} rows to go back to where "
                f"{needed} are needed; use another copy of it"
            )
        self.tracker = TrackerState.from_state_dict(here(saved["tracker"]))
        self.governor = GovernorState.from_state_dict(here(saved["governor"]))
        for name in _BY_ROW:
            setattr(self, name, saved[name].clone().to(self.device))
        self._safe = safe
        self._limit_growth()

    def snapshot(self, rows: Sequence[int] | None = None) -> dict[str, Any]:
        """Return the whole state of some rows (all by default) as plain data and tensors."""
        chosen = list(range(self.rows)) if rows is None else list(rows)
        return {
            **self.memory(chosen),
            "state": self.state.select(chosen).state_dict(),
            "weights": [weights.to_tree() for weights in self._read(chosen)],
        }

    def restore(self, saved: dict[str, Any]) -> None:
        """Restore what `snapshot` returned for as many rows."""
        state = check_state(saved["state"], self.state, len(blueprint_names()))
        self.recall(saved)
        self.table.state = state.to(self.device)
        for row, tree in enumerate(saved["weights"]):
            self.engine.write(row, RowWeights.from_tree(tree), self.state.select([row]))
        self._build()

    # -- inside ------------------------------------------------------------------------------------

    def _full(self, value: int) -> Tensor:
        return torch.full((self.rows,), value, dtype=torch.int64, device=self.device)

    def _train(self) -> Pending[EpochResult]:
        portions = plan_portions(
            self.facts, self.tracker.epoch + 1, self.seen, self.flops, self.allowances()
        )
        self._planned = [portion.samples for portion in portions]
        return self.engine.train(portions)

    def _evaluation_flops(self) -> Tensor:
        """Return int64 [R]: what it takes to measure rows with a budget as they are now."""
        if not self._has_budget:
            return torch.zeros_like(self.spent)
        counts = [count_ablations(each) for each in self._members().sum(1).tolist()]
        configurations = torch.tensor(counts, dtype=torch.int64, device=self.device)
        return self.facts.val_samples * self.flops * configurations

    def _due(self) -> Tensor:
        """Return bool [R]: rows whose seeds are measured in this epoch."""
        return (self.tracker.epoch % self.config.ablate_every == 0) & ~self.at_rest

    def _members(self) -> Tensor:
        """Return bool [R, S]: the seeds that are measured in this epoch."""
        return participating(self.state) & self._due()[:, None]

    def _charge(self, which: Tensor, cost: Tensor, samples: Tensor) -> None:
        """Take what training on some samples and measuring cost rows, bool [R], off budgets."""
        if not self._has_budget:
            return
        paying = which & (self.facts.compute != NO_BUDGET)
        self.spent = self.spent + torch.where(paying, cost, 0)
        self.seen = self.seen + torch.where(paying, samples, 0)

    def _limit_growth(self) -> None:
        """Let rows grow only as far as the rest of their budget pays for."""
        if self._has_budget:
            self.table.affordable = affordable_flops(self.facts, self.tracker.epoch, self.spent)

    def _govern(self, measured: Measured, resting: Tensor) -> tuple[Measured, Tensor]:
        """Roll back rows that panic; return the measurements then, and bool [R], the other rows."""
        if not self.config.governor.is_on:
            return measured, torch.ones_like(self.last_success)
        self.governor, self.panic = govern(
            self.governor, measured.loss, self.facts.chance_loss, self.config.governor
        )
        self.panic = torch.where(resting, int(Panic.NONE), self.panic)
        bad = self.rolled_back
        if bool(bad.any()):
            measured = self._roll_back(bad, measured)
        return measured, ~bad

    def _prune_non_finite(self, result: EpochResult, which: Tensor) -> Tensor:
        """Prune seeds in TRAINING whose gradients are not finite; return which, bool [R, S].

        Such a seed does not touch the loss, so only its gradients show it. A blended seed shows in
        the loss of its row, which rolls back as a whole. `which` is bool [R].
        """
        is_young = self.state.stage == int(SeedStage.TRAINING)
        is_finite = torch.isfinite(result.gradients.norm)
        broken = result.sampled & is_young & ~is_finite & which[:, None]
        if not self.config.governor.is_on:
            return torch.zeros_like(broken)
        if bool(broken.any()):
            self.table.remove(broken)
            self._build()
        return broken

    def _roll_back(self, bad: Tensor, measured: Measured) -> Measured:
        """Restore host and fossils of rows from their safe state; return the measurements then."""
        fossil = self.state.stage == int(SeedStage.FOSSILIZED)
        self.table.remove(bad[:, None] & ~fossil)
        for row in bad.nonzero().flatten().tolist():
            # New seeds draw from new random streams: that count does not go back.
            count = self.engine.read(row).germinations
            weights = dataclasses.replace(self._safe[row], germinations=count)
            self.engine.write(row, weights, self.state.select([row]))
        self._build()
        nobody = torch.zeros_like(self.state.occupied)
        again = self._measure(nobody, bad)()
        self._charge(bad, self.facts.val_samples * self.flops, torch.zeros_like(self.seen))
        return dataclasses.replace(
            measured,
            loss=torch.where(bad, again.loss, measured.loss),
            score=torch.where(bad, again.score, measured.score),
            interaction=torch.where(bad[:, None, None], 0.0, measured.interaction),
        )

    def _keep_safe(self, which: Tensor) -> None:
        """Keep copies of rows, bool [R], to roll back to."""
        if not self.config.governor.is_on:
            return
        rows = which.nonzero().flatten().tolist()
        for row, weights in zip(rows, self._read_at_rest(rows), strict=True):
            self._safe[row] = weights
        self.safe_epoch = torch.where(which, self.tracker.epoch, self.safe_epoch)

    def _read_at_rest(self, rows: Sequence[int]) -> list[RowWeights]:
        """Return host and fossils of rows, without optimizer state."""
        return self.engine.read_at_rest(rows, self.state.stage == int(SeedStage.FOSSILIZED))

    def _read(self, rows: Sequence[int]) -> list[RowWeights]:
        if isinstance(self.engine, RemoteEngine):
            return self.engine.read_rows(rows)
        return [self.engine.read(row) for row in rows]

    def _build(self) -> None:
        """Let the engine follow the state, and record the sizes of seeds."""
        self.table.resize(self.engine.sync(self.state))


def keep_rows(which: Tensor, old: Remembered, new: Remembered) -> Remembered:
    """Return the new record with the old values in the rows at `which`."""
    if not bool(which.any()):
        return new

    def chosen(name: str) -> Tensor:
        here, there = getattr(old, name), getattr(new, name)
        return torch.where(which.view(-1, *[1] * (there.dim() - 1)), here, there)

    return dataclasses.replace(new, **{f.name: chosen(f.name) for f in dataclasses.fields(new)})
