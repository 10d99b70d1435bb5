"""`Problem`: rows of an imagined host, with the real lifecycle and a price for every seed.

A problem says what a seed is worth when it is germinated (`price`); everything else is here. One
seed at a time may live. It costs a fee to germinate one, it pays its worth when it is fossilized,
and nothing else pays. A seed's worth shows in its contribution as soon as it is blended.
"""

from __future__ import annotations

import copy
from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Any, ClassVar, Self, TypedDict, Unpack

import torch
from torch import Tensor

from esper.kasmina.contribution import Measured
from esper.kasmina.costs import row_costs
from esper.kasmina.lifecycle import LifecycleConfig
from esper.kasmina.row_group import RowConfig, RowGroup
from esper.kasmina.signals import GovernorConfig, TrackerState, row_facts
from esper.kasmina.slot_table import SlotTable
from esper.kasmina.state import GateConfig, SlotState
from esper.lab.imagined import ImaginedEngine, imagined_costs
from esper.leyline.actions import Actions, LifecycleOp, decode_actions
from esper.leyline.errors import UsageError
from esper.leyline.rules import Masks
from esper.leyline.signals import Signals
from esper.leyline.slots import BUILTIN_BLUEPRINTS
from esper.simic.rewards.contract import RewardStep, Transition
from esper.utils.process import Pending

BLUEPRINTS: tuple[int, ...] = (1, 2, 3, 4, 5, 6, 7)
"""The blueprints that fit a slot: the seven of a convolutional host."""

POINTS = 5.0
"""Points of validation score that a worth of 1 shows as."""

_HOST_PARAMS = 1_000
_SEED_PARAMS: dict[str, int] = {
    "noop": 0,
    "conv_light": 200,
    "attention": 60,
    "norm": 10,
    "depthwise": 80,
    "bottleneck": 150,
    "conv_small": 40,
    "conv_heavy": 400,
    "lora": 50,
    "lora_large": 200,
    "mlp_small": 300,
    "mlp": 600,
    "flex_attention": 90,
}
"""Sizes that tell blueprints of one kind apart, as those of real seeds do."""
_CONTRIBUTION_ERROR = 0.1
_HOST_RANGE = (50.0, 80.0)
"""Score of the imagined host before its first epoch and in the long run."""


class Layout(TypedDict, total=False):
    """How the rows of a problem are laid out; what is not said is as in the problem's own."""

    device: torch.device | str
    """Where everything is computed."""
    steps: int
    """Decisions of an episode."""
    lifecycle: LifecycleConfig
    """The constants of a seed's life, with permissive gates; one seed at a time lives, whatever it
    says."""
    slots: int
    """Number of slots."""
    blueprints: Sequence[int]
    """Ids of the blueprints that fit every slot."""
    fee: float
    """What a germination costs."""


class Problem(ABC):
    """Rows that all face the same prices.

    Args:
        rows: number of rows; every one is the same problem.
        seed: what the prices are drawn from.
        layout: what differs from the problem's own `layout`.
    """

    name: ClassVar[str]
    layout: ClassVar[Layout] = {
        "device": "cpu",
        "steps": 30,
        "lifecycle": LifecycleConfig(gates=GateConfig(min_training_epochs=2)),
        "slots": 3,
        "blueprints": BLUEPRINTS,
        "fee": 0.0,
    }
    """The real lifecycle with a short TRAINING, so that a seed can be fossilized in 30 steps."""

    def __init__(self, rows: int = 64, *, seed: int = 0, **layout: Unpack[Layout]) -> None:
        """Lay out the rows; `reset` starts them."""
        chosen: Layout = {**self.layout, **layout}
        lifecycle = chosen["lifecycle"]
        if lifecycle.gates.kind != "permissive":
            raise UsageError("a problem needs permissive gates: its hosts have nothing to judge")
        self.rows, self.seed, self.num_slots = rows, seed, chosen["slots"]
        self.device = torch.device(chosen["device"])
        self.steps, self.fee = chosen["steps"], chosen["fee"]
        self.lifecycle = lifecycle.replace(rules=lifecycle.rules.replace(max_seeds=1))
        self.blueprints = tuple(chosen["blueprints"])
        self.reward = ProblemReward(self)
        """What the rows are paid; a reward like any other."""
        self._group: RowGroup | None = None

    def with_rows(self, rows: int) -> Self:
        """Return the same problem with another number of rows, not started yet."""
        other = copy.copy(self)
        other.rows = rows
        other.reward = ProblemReward(other)
        other._group = None
        return other

    # ------------------------------------------------------------------- what a problem decides

    scaffold: int = -1
    """Blueprint whose life prepares that of others; none by default."""
    scaffold_life: int = 0
    """Epochs it must have lived to do so."""

    @abstractmethod
    def price(self, blueprint: Tensor, slot: Tensor, step: Tensor, scaffolded: Tensor) -> Tensor:
        """Return the worth of seeds, float64 [N].

        Args:
            blueprint: int64 [N], what is germinated.
            slot: int64 [N], where.
            step: int64 [N], at which decision.
            scaffolded: int64 [N], the decision at which the first scaffold had ended, -1 for none.
        """

    def seed_sizes(self) -> Tensor:
        """Return int64 [B]: the parameters of a seed, by its blueprint."""
        return torch.tensor([_SEED_PARAMS[name] for name in BUILTIN_BLUEPRINTS])

    def payoff(self, worth: Tensor) -> Tensor:
        """Return all that is ever paid for fossilizing seeds of this worth."""
        return worth

    def remember(self, before: SlotState, step: Tensor) -> None:  # noqa: B027  (most need none)
        """Take note of what a step changed, where worths depend on the past."""

    def pay(self, germinated: Tensor, fossilized: Tensor, own: Tensor) -> Tensor:
        """Return what was paid, by term, float64 [R, terms]; `own` is the worth of the seed."""
        gain = torch.where(fossilized, own, 0.0)
        fee = -self.fee * germinated.to(gain.dtype)
        return torch.stack([gain, fee, torch.zeros_like(gain)], dim=1)

    # -------------------------------------------------------------------------- the environment

    def reset(self, row_seeds: Sequence[int] | None = None) -> Signals:
        """Start every row afresh and live one epoch; rows are alike, whatever their seeds."""
        if row_seeds is not None and len(row_seeds) != self.rows:
            raise UsageError(f"row_seeds must have {self.rows} entries, got {len(row_seeds)}")
        self._start()
        self.group.live()
        return self.signals()

    def step(self, actions: Actions) -> Signals:
        """Carry out one action per row and live through the epoch that follows."""
        group = self.group
        command = decode_actions(actions)
        if len(command.op) != self.rows:
            raise UsageError(f"{self.rows} rows need as many actions, got {len(command.op)}")
        before, now = group.state, group.tracker.epoch - 1
        done = group.act(command).took_effect
        slot = command.slot.clamp(0, self.num_slots - 1)
        germinated = done & (command.op == int(LifecycleOp.GERMINATE))
        fossilized = done & (command.op == int(LifecycleOp.FOSSILIZE))
        own = self.worth.gather(1, slot[:, None]).squeeze(1)
        price = self.price(command.blueprint, slot, now, self.scaffolded)
        self.worth.scatter_(1, slot[:, None], torch.where(germinated, price, own)[:, None])
        self.paid = self.pay(germinated, fossilized, own)
        self.remember(before, now)
        group.live()
        return self.signals()

    @property
    def group(self) -> RowGroup:
        """The rows themselves."""
        if self._group is None:
            raise UsageError("the problem has no rows yet; call reset() first")
        return self._group

    @property
    def state(self) -> SlotState:
        """The lifecycle of every row."""
        return self.group.state

    @property
    def tracker(self) -> TrackerState:
        """What is remembered of every host."""
        return self.group.tracker

    def signals(self) -> Signals:
        """Return what a controller sees."""
        return self.group.signals(self._host_score(self.tracker.epoch))

    def masks(self) -> Masks:
        """Return what is legal now."""
        return self.group.table.masks()

    def panics(self) -> Tensor:
        """Return int64 [R]: why the governor took a row back in the last epoch, a `Panic`."""
        return self.group.panic

    def snapshot(self) -> dict[str, Any]:
        """Return the state of every row as plain data and tensors."""
        tensors = {name: getattr(self, name).clone() for name in _TENSORS}
        return {"rows": self.group.snapshot(), **tensors}

    def restore(self, saved: dict[str, Any]) -> Signals:
        """Go back to a snapshot."""
        if len(saved["worth"]) != self.rows:
            raise UsageError(f"the snapshot has {len(saved['worth'])} rows, not {self.rows}")
        self._start()
        self.group.restore(saved["rows"])
        for name in _TENSORS:
            setattr(self, name, saved[name].clone().to(self.device))
        return self.signals()

    def close(self) -> None:  # noqa: B027  (there is nothing to close)
        """Nothing is held that must be freed."""

    # --------------------------------------------------------------------------------- internals

    def _start(self) -> None:
        """Lay the rows out, with nothing grown and nothing lived yet."""
        rows, slots, device = self.rows, self.num_slots, self.device
        costs = imagined_costs(slots, self.seed_sizes(), self.blueprints)
        self._group = RowGroup(
            ImaginedEngine(rows, slots, _HOST_PARAMS, self.seed_sizes(), device),
            range(rows),
            RowConfig(governor=GovernorConfig(is_on=False)),
            table=SlotTable(
                row_costs(rows, costs, host_params=_HOST_PARAMS, device=device), self.lifecycle
            ),
            facts=row_facts(rows, horizon=self.steps + 1, budget=10 * _HOST_PARAMS, device=device),
            measure=self._measure,
        )
        self.worth = torch.zeros((rows, slots), dtype=torch.float64, device=device)
        self.scaffolded = torch.full((rows,), -1, dtype=torch.int64, device=device)
        self.pending = torch.zeros(rows, dtype=torch.float64, device=device)
        self.paid = torch.zeros((rows, len(TERMS)), dtype=torch.float64, device=device)

    def _measure(self, members: Tensor, which: Tensor | None) -> Pending[Measured]:
        """Imagine an epoch: the host learns a little, and every blended seed shows its worth."""
        state = self.state
        shown = POINTS * self.worth * state.alpha * state.has_module
        score = self._host_score(self.tracker.epoch + 1) + shown.sum(1)
        measured = Measured(
            loss=1 - score / 100,
            score=score,
            worth=shown,
            error=torch.full_like(shown, _CONTRIBUTION_ERROR),
            interaction=torch.zeros_like(state.interaction),
        )
        return lambda: measured

    def _host_score(self, epoch: Tensor) -> Tensor:
        """Return float64 [R]: what the host alone scores at an epoch."""
        low, high = _HOST_RANGE
        return high - (high - low) * torch.exp(-epoch.to(torch.float64) / 10)


_TENSORS = ("worth", "scaffolded", "paid", "pending")
TERMS = ("gain", "action", "hindsight")
"""What pays, under the names that rewards have in the store."""


class ProblemReward:
    """Pays what a problem says its last step was worth."""

    needs_twin = False

    def __init__(self, problem: Problem) -> None:
        """Read the payments of this problem."""
        self.problem = problem

    def reset(self, signals: Signals) -> None:
        """Nothing is remembered: the problem itself does."""

    def step(self, transition: Transition) -> RewardStep:
        """Return the payments of the step that led to `transition.after`."""
        paid = torch.where(transition.active[:, None], self.problem.paid, 0.0).to(torch.float32)
        return RewardStep(terms=dict(zip(TERMS, paid.unbind(1), strict=True)))

    def state_dict(self) -> dict[str, Any]:
        """Return nothing: what was paid is in the problem's snapshot."""
        return {}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Take nothing over."""
