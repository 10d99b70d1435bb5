"""A cohort: rows that share host architecture and data, with everything remembered about them.

It carries out a step in the order of the design: apply, tick, train, validate with ablations, then
trackers, gradient statistics and governor. All of it is Kasmina's functions over [rows, slots]; the
engine underneath only moves weights.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from esper.kasmina.contribution import (
    participating,
    plan_ablations,
    record_contributions,
    values_in_points,
)
from esper.kasmina.governor import GovernorState, govern, start_governing
from esper.kasmina.gradients import record_gradients
from esper.kasmina.lifecycle import (
    apply_command,
    record_epoch,
    remove_seeds,
    rule_view,
    tick,
)
from esper.kasmina.signals import TrackerState, read_signals, start_tracking, track_epoch
from esper.kasmina.state import SlotState, empty_state
from esper.leyline.actions import Command, LifecycleOp
from esper.leyline.rules import RuleView
from esper.leyline.signals import Signals
from esper.leyline.stages import SeedStage
from esper.population.ablations import Measured, compare
from esper.population.engine import Engine, PopulationConfig, RemoteEngine, RowWeights
from esper.tasks.task import Task


class Cohort:
    """Rows of one task on one engine."""

    def __init__(
        self,
        task: Task,
        keys: Sequence[int],
        engine: Engine,
        fits: Tensor,
        config: PopulationConfig,
        horizon: int,
    ) -> None:
        """Start at epoch 0; `fits` is bool [S, B], `keys` name the rows' random streams."""
        self.task = task
        self.keys = list(keys)
        self.engine = engine
        self.config = config
        self.horizon = horizon
        rows, slots = len(keys), len(engine.slots)
        self.enabled = torch.ones((rows, slots), dtype=torch.bool)
        self.fits = fits.expand(rows, *fits.shape)
        self.state: SlotState = empty_state(rows, slots)
        self.tracker: TrackerState = start_tracking(rows, config.tracker)
        self.governor: GovernorState = start_governing(rows, config.governor)
        self.last_op = torch.full((rows,), int(LifecycleOp.WAIT), dtype=torch.int64)
        self.last_success = torch.ones(rows, dtype=torch.bool)
        self.rolled_back = torch.zeros(rows, dtype=torch.bool)
        self.train_loss = torch.full((rows,), math.nan, dtype=torch.float64)
        self._safe: list[RowWeights] = []

    @property
    def rows(self) -> int:
        """Number of rows."""
        return len(self.keys)

    def view(self) -> RuleView:
        """Return what legality depends on."""
        return rule_view(self.state, self.enabled, self.fits)

    def assume(self, state: SlotState) -> None:
        """Take over a lifecycle state; seeds that are new in it are drawn, and rows are safe."""
        self.state = self._sized(state)
        self._safe = self._snapshot_rows(range(self.rows))

    def act(self, command: Command) -> None:
        """Carry out one action per row; `live` through the epoch that follows."""
        before = self.state.stage
        state, applied = apply_command(
            self.state,
            command,
            enabled=self.enabled,
            fits=self.fits,
            config=self.config.lifecycle,
        )
        self.last_op, self.last_success = command.op.clone(), applied.took_effect
        fossil = int(SeedStage.FOSSILIZED)
        fossilized = ((state.stage == fossil) & (before != fossil)).any(1)
        self.state = self._sized(tick(state, self.config.lifecycle))
        self._keep_safe(fossilized)

    def announce(self) -> None:
        """Let the next epoch begin elsewhere, so that other cohorts need not wait for its end."""
        if isinstance(self.engine, RemoteEngine):
            self.engine.announce(self._next_epochs())

    def signals(self) -> Signals:
        """Return what a controller sees, on the CPU."""

        def full(value: int) -> Tensor:
            return torch.full((self.rows,), value, dtype=torch.int64)

        return read_signals(
            self.state,
            self.tracker,
            enabled=self.enabled,
            max_epochs=full(self.horizon),
            host_params=full(self.engine.host_params),
            budget=full(self.task.config.param_budget),
            last_op=self.last_op,
            last_success=self.last_success,
            rolled_back=self.rolled_back,
            twin_score=torch.full((self.rows,), math.nan),
        )

    def snapshot(self, rows: Sequence[int] | None = None) -> dict[str, Any]:
        """Return everything about some rows (all by default) as plain data and tensors."""
        chosen = list(range(self.rows)) if rows is None else list(rows)
        index = torch.tensor(chosen, dtype=torch.int64)
        return {
            "keys": [self.keys[row] for row in chosen],
            "state": self.state.select(index).state_dict(),
            "tracker": {k: v[index] for k, v in self.tracker.state_dict().items()},
            "governor": self.governor.select(index).state_dict(),
            "last_op": self.last_op[index],
            "last_success": self.last_success[index],
            "rolled_back": self.rolled_back[index],
            "train_loss": self.train_loss[index],
            "weights": [weights.to_tree() for weights in self._read(chosen)],
            "safe": [self._safe[row].to_tree() for row in chosen],
        }

    def restore(self, saved: dict[str, Any]) -> None:
        """Take over what `snapshot` returned for as many rows as this cohort has."""
        self.state = SlotState.from_state_dict(saved["state"])
        self.tracker = TrackerState.from_state_dict(saved["tracker"])
        self.governor = GovernorState.from_state_dict(saved["governor"])
        self.last_op, self.last_success = saved["last_op"], saved["last_success"]
        self.rolled_back, self.train_loss = saved["rolled_back"], saved["train_loss"]
        self._safe = [RowWeights.from_tree(tree) for tree in saved["safe"]]
        for row, tree in enumerate(saved["weights"]):
            self.engine.write(row, RowWeights.from_tree(tree), self.state.select([row]))
        self.state = self._sized(self.state)

    def live(self) -> None:
        """Train one epoch, measure it and take it over."""
        result = self.engine.train(self._next_epochs())
        self.train_loss, sampled = result.loss, result.sampled
        members = participating(self.state)
        plans = [plan_ablations(row) for row in members.tolist()]
        loss, correct = self.engine.measure(plans)
        measured = compare(members, plans, loss, values_in_points(loss, correct))
        self.governor, panic = govern(
            self.governor, measured.loss, self.task.config.baseline_loss, self.config.governor
        )
        self.rolled_back = (panic != 0) & self.config.governor.is_on
        if bool(self.rolled_back.any()):
            measured = self._roll_back(measured)
            good = ~self.rolled_back[:, None]
            members, sampled = members & good, sampled & good
        self.state = record_epoch(self.state, measured.score)
        self.state = record_gradients(self.state, sampled, result.gradients)
        self.state = record_contributions(
            self.state, members, measured.worth, measured.error, measured.interaction
        )
        self.tracker = track_epoch(self.tracker, measured.loss, measured.score, self.config.tracker)
        if self.config.governor.is_on:
            due = self.tracker.epoch % self.config.governor.snapshot_every == 0
            self._keep_safe(due & ~self.rolled_back)

    def _next_epochs(self) -> list[int]:
        epochs: list[int] = (self.tracker.epoch + 1).tolist()
        return epochs

    def _keep_safe(self, which: Tensor) -> None:
        """Take snapshots of rows, bool [R], to go back to."""
        rows = which.nonzero().flatten().tolist()
        for row, weights in zip(rows, self._snapshot_rows(rows), strict=True):
            self._safe[row] = weights

    def _snapshot_rows(self, rows: Sequence[int]) -> list[RowWeights]:
        """Return host and fossils of rows: what a rollback goes back to."""
        return self.engine.read_at_rest(rows, self.state.stage == int(SeedStage.FOSSILIZED))

    def _read(self, rows: Sequence[int]) -> list[RowWeights]:
        if isinstance(self.engine, RemoteEngine):
            return self.engine.read_rows(rows)
        return [self.engine.read(row) for row in rows]

    def _roll_back(self, measured: Measured) -> Measured:
        """Bring rows back to host and fossils as they were, at rest; return what they show now."""
        bad = self.rolled_back
        fossil = self.state.stage == int(SeedStage.FOSSILIZED)
        self.state = remove_seeds(self.state, bad[:, None] & ~fossil)
        for row in bad.nonzero().flatten().tolist():
            # New seeds go on drawing from new streams: that count does not go back.
            count = self.engine.read(row).germinations
            weights = dataclasses.replace(self._safe[row], germinations=count)
            self.engine.write(row, weights, self.state.select([row]))
        self.state = self._sized(self.state)
        everything = torch.ones((1, self.state.num_slots), dtype=torch.bool)
        plans = [everything if is_bad else everything[:0] for is_bad in bad.tolist()]
        losses, correct = self.engine.measure(plans)
        values = values_in_points(losses, correct)
        loss, score = measured.loss.clone(), measured.score.clone()
        loss[bad] = losses.to(torch.float64).mean(1).cpu()
        score[bad] = values.mean(1).cpu()
        interaction = torch.where(bad[:, None, None], 0.0, measured.interaction)
        return dataclasses.replace(measured, loss=loss, score=score, interaction=interaction)

    def _sized(self, state: SlotState) -> SlotState:
        """Let the engine follow the state and take over the sizes of what lives."""
        sizes = self.engine.sync(state)
        return state.where(torch.ones_like(state.occupied), params=sizes)
