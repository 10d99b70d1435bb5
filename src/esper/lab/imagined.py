"""Rows without networks: the real lifecycle and rules, with made-up measurements.

An episode of any number of rows takes milliseconds, for benchmarks and for tests of code that reads
signals. `ImaginedRows` takes scores, contributions and interactions from its caller;
`ImaginedHosts` draws them at random. Nothing here trains.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import Tensor

from esper.kasmina.blueprints.registry import drawn_names, selectable
from esper.kasmina.budget import Portion
from esper.kasmina.contribution import GradientSample, Measured
from esper.kasmina.costs import NOT_FOR_THE_SLOT, SlotCosts, row_costs
from esper.kasmina.engine import EpochResult, RowWeights, empty_sample
from esper.kasmina.lifecycle import Applied, LifecycleConfig
from esper.kasmina.row_group import RowConfig, RowGroup
from esper.kasmina.signals import GovernorConfig, row_facts
from esper.kasmina.slot_table import SlotTable
from esper.kasmina.state import GateConfig, SlotState
from esper.leyline.actions import Actions, LifecycleOp, decode_actions, placeholder_actions
from esper.leyline.rules import Masks, is_in
from esper.leyline.signals import Signals
from esper.leyline.slots import NOOP, NUM_BLUEPRINTS
from esper.leyline.stages import SeedStage
from esper.simic.rewards.contract import Transition
from esper.tamiyo.controllers.baselines import RandomController
from esper.utils.process import Pending
from esper.utils.randomness import generator

HOST_PARAMS = 10_000
HOST_FLOPS = 1_000_000
BUDGET = 500_000
HORIZON = 60

LIVELY = LifecycleConfig(gates=GateConfig(min_training_epochs=1), embargo_ticks=2)
"""A lifecycle in which random actions reach every stage within a short episode."""

_QUICK = LifecycleConfig(gates=GateConfig(min_training_epochs=2))
_ROLLBACKS = 0.01
"""Share of random steps that are rolled back."""
_SPARED = 0.8
"""Share of random prunes that are left out."""


def imagined_costs(
    slots: int, seed_params: Tensor, fitting: Sequence[int], *, seed_flops: Tensor | None = None
) -> SlotCosts:
    """Return the costs of seeds at slots without networks; gates are free.

    Args:
        slots: number of slots.
        seed_params: int64 [B], parameters of a seed by its blueprint.
        fitting: ids of the blueprints that fit every slot.
        seed_flops: int64 [B], operations per sample of a seed by its blueprint; none by default.
    """
    nothing = torch.zeros(slots, dtype=torch.int64)
    fits = torch.zeros(len(seed_params), dtype=torch.bool)
    fits[list(fitting)] = True
    params = torch.where(fits, seed_params, NOT_FOR_THE_SLOT)
    flops = torch.zeros_like(seed_params) if seed_flops is None else seed_flops
    return SlotCosts(
        slot_channels=nothing,
        slot_positions=nothing,
        slot_topology=nothing - 1,
        gate_params=nothing,
        gate_flops=nothing,
        seed_params=params.expand(slots, -1),
        seed_flops=torch.where(fits, flops, NOT_FOR_THE_SLOT).expand(slots, -1),
    )


class ImaginedEngine:
    """An engine without networks: seeds have given sizes, and there are no weights.

    Args:
        rows: number of rows.
        slots: slots of each row.
        host_params: parameters of every host.
        seed_params: int64 [B], parameters of a seed by its blueprint.
        device: device of the rows' state.
    """

    def __init__(
        self,
        rows: int,
        slots: int,
        host_params: int,
        seed_params: Tensor,
        device: torch.device | str = "cpu",
    ) -> None:
        """Start with empty slots."""
        self.slots: Sequence[int] = range(slots)
        self.host_params = host_params
        # The last entry answers for the id -1 of an empty slot.
        self._sizes = torch.cat((seed_params, torch.zeros(1, dtype=torch.int64))).to(device)
        sample, sampled = empty_sample(rows, slots)
        self.epoch = EpochResult(
            torch.full((rows,), math.nan, dtype=torch.float64, device=device),
            sample.to(device),
            sampled.to(device),
        )
        """The result of the next epoch; replace it to set gradients."""

    def sync(self, state: SlotState) -> Tensor:
        """Return the sizes of the seeds, int64 [R, S]."""
        return torch.where(state.has_module, self._sizes[state.blueprint], 0)

    def train(self, portions: Sequence[Portion]) -> Pending[EpochResult]:
        """Train nothing."""
        return lambda: self.epoch

    def read(self, row: int) -> RowWeights:
        """Return no weights."""
        return RowWeights({})

    def read_at_rest(self, rows: Sequence[int], seeds: Tensor) -> list[RowWeights]:
        """Return no weights."""
        return [RowWeights({}) for _ in rows]

    def write(self, row: int, weights: RowWeights, state: SlotState) -> None:
        """Replace nothing."""


class _Imagined:
    """Rows without networks: state, masks and signals."""

    _group: RowGroup

    @property
    def state(self) -> SlotState:
        """The lifecycle of every row."""
        return self._group.state

    def masks(self) -> Masks:
        """Return what is legal now."""
        return self._group.table.masks()

    def signals(self) -> Signals:
        """Return what a controller sees now."""
        return self._group.signals()


class ImaginedRows(_Imagined):
    """Rows whose measurements the caller gives.

    Args:
        rows: number of rows.
        slots: slots of each row.
        horizon: epochs of an episode, one number or int64 [R].
        lifecycle: the constants of a seed's life.
        seed_params: int64 [B], parameters of a seed by its blueprint; by default they grow with
            the id.
        seed_flops: int64 [B], operations per sample of a seed; by default they do likewise.
    """

    def __init__(
        self,
        rows: int,
        slots: int,
        horizon: int | Tensor,
        *,
        lifecycle: LifecycleConfig = LIVELY,
        seed_params: Tensor | None = None,
        seed_flops: Tensor | None = None,
    ) -> None:
        """Lay out the rows; `reset` starts them."""
        self.rows, self.num_slots, self.lifecycle = rows, slots, lifecycle
        sizes = 500 * torch.arange(NUM_BLUEPRINTS) if seed_params is None else seed_params
        self._engine = ImaginedEngine(rows, slots, HOST_PARAMS, sizes)
        choices = [index for index in range(NUM_BLUEPRINTS) if index != NOOP]
        flops = 20_000 * torch.arange(NUM_BLUEPRINTS) if seed_flops is None else seed_flops
        costs = imagined_costs(slots, sizes, choices, seed_flops=flops)
        self._costs = row_costs(rows, costs, host_params=HOST_PARAMS, host_flops=HOST_FLOPS)
        self._facts = row_facts(rows, horizon=horizon, budget=BUDGET)
        self._told: Measured
        self._failed = torch.zeros(rows, dtype=torch.bool)
        self._group = self._start()

    def reset(self, score: Tensor | float, loss: Tensor | float | None = None) -> Signals:
        """Start empty hosts and live the first epoch."""
        self._group = self._start()
        self._tell(score, loss, 0.0, None, None)
        self._group.live()
        return self._group.signals()

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
        """Carry out one action per row and run an epoch with these measurements.

        Args:
            actions: {head: int64 [R]}.
            score: points after the epoch, one number or [R].
            loss: validation loss after it; by default it falls with the score.
            contribution: of the seeds that can be measured then, one number or [R, S].
            interaction: [R, S, S], symmetric; none by default.
            rolled_back: bool [R], rows whose loss is not finite: the governor removes what is not
                fossilized, and then they show what was told.
        """
        self._tell(score, loss, contribution, interaction, rolled_back)
        return self._group.step(decode_actions(actions))

    def _start(self) -> RowGroup:
        group = RowGroup(
            self._engine,
            range(self.rows),
            RowConfig(),
            table=SlotTable(self._costs, self.lifecycle),
            facts=self._facts,
            measure=self._measure,
        )
        group.start()
        return group

    def _tell(
        self,
        score: Tensor | float,
        loss: Tensor | float | None,
        contribution: Tensor | float,
        interaction: Tensor | None,
        rolled_back: Tensor | None,
    ) -> None:
        """Set the measurements of the next epoch."""

        def over(value: Tensor | float, *shape: int) -> Tensor:
            return torch.as_tensor(value, dtype=torch.float64).expand(self.rows, *shape)

        slots = self.num_slots
        self._told = Measured(
            over(2.3 - 0.02 * score if loss is None else loss),
            over(score),
            over(contribution, slots),
            over(0.1, slots),
            over(0.0 if interaction is None else interaction, slots, slots),
        )
        nobody = torch.zeros(self.rows, dtype=torch.bool)
        self._failed = nobody if rolled_back is None else rolled_back

    def _measure(self, members: Tensor, which: Tensor | None) -> Pending[Measured]:
        told = self._told
        loss = told.loss if which is not None else torch.where(self._failed, math.nan, told.loss)
        pairs = members[:, :, None] & members[:, None, :]
        interaction = torch.where(pairs, told.interaction, 0.0)
        shown = Measured(loss, told.score, told.worth, told.error, interaction)
        return lambda: shown


class ImaginedHosts(_Imagined):
    """R hosts with S slots each and random measurements.

    Args:
        rows: number of hosts.
        slots: slots of each.
        seed: seed of the measurements.
        enabled: bool [R, S], the slots in use; all by default.
        lifecycle: the constants of a seed's life; by default seeds may blend after two epochs.
    """

    def __init__(
        self,
        rows: int,
        slots: int = 3,
        seed: int = 0,
        *,
        enabled: Tensor | None = None,
        lifecycle: LifecycleConfig = _QUICK,
    ) -> None:
        """Start with empty slots, after a first epoch."""
        self.rows, self.num_slots, self.lifecycle = rows, slots, lifecycle
        self._random = generator(seed, "imagined hosts")
        self._controller = RandomController(seed)
        self._worth = torch.zeros(rows, slots, dtype=torch.float64)
        sizes = 100 * (1 + torch.arange(len(drawn_names())))
        self._engine = ImaginedEngine(rows, slots, HOST_PARAMS, sizes)
        costs = imagined_costs(slots, sizes, selectable("cnn"))
        self._group = RowGroup(
            self._engine,
            range(rows),
            RowConfig(governor=GovernorConfig(is_on=False)),
            table=SlotTable(row_costs(rows, costs, host_params=HOST_PARAMS), lifecycle),
            facts=row_facts(rows, horizon=HORIZON, budget=BUDGET),
            measure=self._measure,
        )
        if enabled is not None:
            self._group.table.enabled = enabled
        self.enabled = self._group.table.enabled
        self.live()

    @property
    def fits(self) -> Tensor:
        """Bool [R, S, B], the blueprints that may be germinated."""
        return self._group.table.fits()

    def random_actions(self, prune_chance: float = 1.0) -> dict[str, Tensor]:
        """Draw one legal action per host: a uniform op, then each head uniformly.

        PRUNE is possible in `prune_chance` of the draws only, as uniform ops would prune nearly
        every seed early.
        """
        masks = self.masks()
        ops = masks.op.clone()
        ops[:, LifecycleOp.PRUNE] &= torch.rand(self.rows, generator=self._random) < prune_chance
        return self._controller.act(self.signals(), replace(masks, op=ops))

    def step(self, actions: Actions) -> Applied:
        """Carry out the actions, tick, and run one epoch; return the results of the actions."""
        applied = self._group.act(decode_actions(actions))
        self.live()
        return applied

    def live(self) -> None:
        """Draw one epoch's measurements and record them."""
        learning = is_in(self.state.stage, (SeedStage.TRAINING, SeedStage.BLENDING))
        unknown = torch.full((self.rows,), math.nan, dtype=torch.float64)
        self._engine.epoch = EpochResult(unknown, self._gradients(), learning)
        self._group.live()

    def _measure(self, members: Tensor, which: Tensor | None) -> Pending[Measured]:
        state, epoch = self.state, self._group.tracker.epoch.to(torch.float64) + 1
        self._worth = torch.where(
            state.has_module, self._worth + self._normal(0.3), self._normal(1.0)
        )
        gain = (state.alpha * self._worth).sum(1)
        noise = self._normal(0.5)[:, 0]
        pairs = self._normal(0.5).unsqueeze(-1) * self._normal(1.0).unsqueeze(-2)
        both = members.unsqueeze(-1) & members.unsqueeze(-2)
        both &= ~torch.eye(self.num_slots, dtype=torch.bool)
        shown = Measured(
            loss=(2.3 * torch.exp(-epoch / 20) - 0.02 * gain + 0.02 * noise).clamp(min=0.01),
            score=(90 * (1 - torch.exp(-epoch / 15)) + gain + noise).clamp(0, 100),
            worth=state.alpha * self._worth,
            error=self._normal(0.2).abs(),
            interaction=torch.where(both, pairs + pairs.transpose(1, 2), 0.0),
        )
        return lambda: shown

    def _gradients(self) -> GradientSample:
        vanishing, exploding = self._normal(1.0) > 1.5, self._normal(1.0) > 2.0
        return GradientSample(
            norm=self._normal(1.0).exp(),
            health=(1 - 0.2 * vanishing.double() - 0.8 * exploding.double()).clamp(0, 1),
            vanishing=vanishing,
            exploding=exploding,
            ratio=self._normal(0.3).exp(),
        )

    def _normal(self, scale: float) -> Tensor:
        shape = (self.rows, self.num_slots)
        return scale * torch.randn(shape, generator=self._random, dtype=torch.float64)


def middle_aged_hosts(rows: int, slots: int = 3, seed: int = 0, epochs: int = 30) -> ImaginedHosts:
    """Return hosts after some epochs of random actions, with few prunes."""
    hosts = ImaginedHosts(rows, slots, seed)
    for _ in range(epochs):
        hosts.step(hosts.random_actions(prune_chance=0.1))
    return hosts


def random_lives(rows: int, epochs: int) -> list[tuple[Signals, Masks]]:
    """Return signals and masks of hosts with random actions, epoch by epoch."""
    hosts, seen = ImaginedHosts(rows), []
    for _ in range(epochs):
        seen.append((hosts.signals(), hosts.masks()))
        hosts.step(hosts.random_actions(prune_chance=0.1))
    return seen


def random_episode(
    rows: int, slots: int, steps: int, generator: torch.Generator
) -> tuple[Signals, list[Transition]]:
    """Return the first signals and all transitions of episodes with random actions.

    Rows have different horizons, and some are rolled back; those are stepped on but not active any
    more. Scores, contributions, interactions and the twins' scores are noise.
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
    """Return the actions without most prunes, so that seeds live long enough."""
    rows = len(actions["op"])
    spared = (actions["op"] == int(LifecycleOp.PRUNE)) & (
        torch.rand(rows, generator=generator) < _SPARED
    )
    waiting = placeholder_actions(rows)
    return {head: torch.where(spared, waiting[head], value) for head, value in actions.items()}
