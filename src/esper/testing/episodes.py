"""Episodes without networks: seeds live by the real rules, measurements are made up.

`ImaginedRows` carries actions out with Kasmina's own lifecycle and takes scores, contributions and
interactions from its caller, so that a test can tell any story. `random_episode` tells random ones.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from esper.kasmina.contribution import participating, record_contributions
from esper.kasmina.gates import GateConfig
from esper.kasmina.lifecycle import (
    LifecycleConfig,
    apply_command,
    record_epoch,
    remove_seeds,
    rule_view,
    tick,
)
from esper.kasmina.signals import (
    TrackerConfig,
    TrackerState,
    read_signals,
    start_tracking,
    track_epoch,
)
from esper.kasmina.state import SlotState, empty_state
from esper.leyline.actions import Actions, LifecycleOp, decode_actions, placeholder_actions
from esper.leyline.blueprints import NOOP, NUM_BLUEPRINTS
from esper.leyline.rules import Masks, build_masks
from esper.leyline.signals import Signals
from esper.leyline.stages import SeedStage
from esper.simic.rewards.contract import Transition
from esper.tamiyo.controllers.random import RandomController

HOST_PARAMS = 10_000
BUDGET = 500_000

LIVELY = LifecycleConfig(gates=GateConfig(min_training_epochs=1), embargo_ticks=2)
"""A lifecycle in which random actions reach every stage within a short episode."""

_ROLLBACKS = 0.01
"""Share of random steps that are rolled back."""
_SPARED = 0.8
"""Share of random prunes that are left out."""


class ImaginedRows:
    """Rows whose epochs are imagined.

    Args:
        rows: number of rows.
        slots: slots of each row.
        horizon: epochs of an episode, one number or int64 [R].
        lifecycle: the constants of a seed's life.
        seed_params: int64 [B], parameters of a seed by its blueprint; by default they grow with
            the id.
    """

    def __init__(
        self,
        rows: int,
        slots: int,
        horizon: int | Tensor,
        *,
        lifecycle: LifecycleConfig = LIVELY,
        seed_params: Tensor | None = None,
    ) -> None:
        """Lay out the rows; `reset` starts them."""
        self.rows, self.num_slots, self.lifecycle = rows, slots, lifecycle
        self.horizon = torch.as_tensor(horizon).expand(rows).clone()
        self.enabled = torch.ones((rows, slots), dtype=torch.bool)
        self.fits = (torch.arange(NUM_BLUEPRINTS) != NOOP).expand(rows, slots, -1)
        sizes = 500 * torch.arange(NUM_BLUEPRINTS) if seed_params is None else seed_params
        # The last entry answers for the id -1 of an empty slot.
        self._sizes = torch.cat((sizes, torch.zeros(1, dtype=torch.int64)))
        self.state: SlotState = empty_state(rows, slots)
        self.tracker: TrackerState = start_tracking(rows, TrackerConfig())
        self._last_op = torch.full((rows,), int(LifecycleOp.WAIT), dtype=torch.int64)
        self._last_success = torch.ones(rows, dtype=torch.bool)
        self._rolled_back = torch.zeros(rows, dtype=torch.bool)

    def reset(self, score: Tensor | float, loss: Tensor | float | None = None) -> Signals:
        """Start empty hosts and live the first epoch."""
        fresh = ImaginedRows(self.rows, self.num_slots, self.horizon)
        self.state, self.tracker = fresh.state, fresh.tracker
        self._last_op, self._last_success = fresh._last_op, fresh._last_success
        self._rolled_back = fresh._rolled_back
        self._record(self._over_rows(score), self._loss(score, loss))
        return self.signals()

    def step(
        self,
        actions: Actions,
        *,
        score: Tensor | float,
        loss: Tensor | float | None = None,
        contribution: Tensor | float = 0.0,
        interaction: Tensor | None = None,
        rolled_back: Tensor | None = None,
    ) -> Signals:
        """Carry out one action per row and live an epoch with these measurements.

        Args:
            actions: {head: int64 [R]}.
            score: points after the epoch, one number or [R].
            loss: validation loss after it; by default it falls with the score.
            contribution: of the seeds that can be measured then, one number or [R, S].
            interaction: [R, S, S], symmetric; none by default.
            rolled_back: bool [R], rows in which the governor removes what is not fossilized.
        """
        command = decode_actions(actions)
        state, applied = apply_command(
            self.state, command, enabled=self.enabled, fits=self.fits, config=self.lifecycle
        )
        self.state = tick(state, self.lifecycle)
        self._last_op, self._last_success = command.op.clone(), applied.took_effect
        nobody = torch.zeros(self.rows, dtype=torch.bool)
        self._rolled_back = nobody if rolled_back is None else rolled_back
        fossil = self.state.stage == int(SeedStage.FOSSILIZED)
        self.state = remove_seeds(self.state, self._rolled_back[:, None] & ~fossil)
        sizes = torch.where(self.state.has_module, self._sizes[self.state.blueprint], 0)
        self.state = self.state.where(torch.ones_like(self.state.occupied), params=sizes)
        self._record(self._over_rows(score), self._loss(score, loss))
        members = participating(self.state)
        worth = torch.as_tensor(contribution, dtype=torch.float64).expand(members.shape)
        shared = torch.zeros((self.rows, self.num_slots, self.num_slots), dtype=torch.float64)
        if interaction is not None:
            pairs = members[:, :, None] & members[:, None, :]
            shared = torch.where(pairs, interaction.to(torch.float64), 0.0)
        self.state = record_contributions(
            self.state, members, worth, torch.full_like(worth, 0.1), shared
        )
        return self.signals()

    def masks(self) -> Masks:
        """Return what is legal now."""
        view = rule_view(self.state, self.enabled, self.fits)
        return build_masks(view, self.lifecycle.effective_rules)

    def signals(self) -> Signals:
        """Return what a controller sees now."""
        return read_signals(
            self.state,
            self.tracker,
            enabled=self.enabled,
            max_epochs=self.horizon,
            host_params=torch.full((self.rows,), HOST_PARAMS),
            budget=torch.full((self.rows,), BUDGET),
            last_op=self._last_op,
            last_success=self._last_success,
            rolled_back=self._rolled_back,
            twin_score=torch.full((self.rows,), math.nan),
        )

    def _record(self, score: Tensor, loss: Tensor) -> None:
        self.tracker = track_epoch(self.tracker, loss, score, TrackerConfig())
        self.state = record_epoch(self.state, score)

    def _over_rows(self, value: Tensor | float) -> Tensor:
        return torch.as_tensor(value, dtype=torch.float64).expand(self.rows)

    def _loss(self, score: Tensor | float, loss: Tensor | float | None) -> Tensor:
        """Return the loss, by default one that falls with the score."""
        return 2.3 - 0.02 * self._over_rows(score) if loss is None else self._over_rows(loss)


def random_episode(
    rows: int, slots: int, steps: int, generator: torch.Generator
) -> tuple[Signals, list[Transition]]:
    """Return the first signals and all transitions of random episodes with random actions.

    Horizons differ between the rows, and now and then a row is rolled back; such rows live on and
    are not active any more. Scores, contributions, interactions and the twins' scores are noise.
    """

    def noise(scale: float, *shape: int) -> Tensor:
        return scale * torch.randn(shape, generator=generator, dtype=torch.float64)

    horizon = torch.randint(steps // 2 + 1, steps + 2, (rows,), generator=generator)
    horizon[0] = steps + 1
    scores = 50 + noise(1.0, steps + 1, rows).cumsum(0)
    twins = (scores + noise(1.0, steps + 1, rows)).float()
    world = ImaginedRows(rows, slots, horizon)
    controller = RandomController(int(torch.randint(2**31, (1,), generator=generator)))
    first = before = world.reset(scores[0])
    active = torch.ones(rows, dtype=torch.bool)
    transitions = []
    for step in range(1, steps + 1):
        actions = _sparing(controller.act(before, world.masks()), generator)
        shared = noise(1.0, rows, slots, slots)
        after = world.step(
            actions,
            score=scores[step],
            contribution=noise(2.0, rows, slots),
            interaction=shared + shared.transpose(1, 2),
            rolled_back=torch.rand(rows, generator=generator) < _ROLLBACKS,
        )
        transition = Transition(
            before=before,
            actions=actions,
            after=after,
            twin_before=twins[step - 1],
            twin_after=twins[step],
            is_last=after.epoch == after.max_epochs,
            active=active,
        )
        transitions.append(transition)
        before, active = after, active & ~transition.ended
    return first, transitions


def _sparing(actions: Actions, generator: torch.Generator) -> dict[str, Tensor]:
    """Return the actions with most prunes left out: few seeds would live long enough."""
    rows = len(actions["op"])
    spared = (actions["op"] == int(LifecycleOp.PRUNE)) & (
        torch.rand(rows, generator=generator) < _SPARED
    )
    waiting = placeholder_actions(rows)
    return {head: torch.where(spared, waiting[head], value) for head, value in actions.items()}
