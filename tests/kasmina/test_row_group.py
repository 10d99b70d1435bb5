from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import pytest
import torch
from torch import Tensor

from esper.kasmina import slot_table
from esper.kasmina.budget import Portion
from esper.kasmina.contribution import Measured
from esper.kasmina.lifecycle import LifecycleConfig
from esper.kasmina.row_group import RowConfig, RowGroup
from esper.kasmina.signals import GovernorConfig, Panic, row_facts
from esper.kasmina.state import GateConfig, SlotState, empty_state
from esper.lab.imagined import ImaginedEngine
from esper.leyline.actions import Command, LifecycleOp, decode_actions, placeholder_actions
from esper.leyline.errors import EsperError
from esper.leyline.rules import Masks, RulesConfig, RuleView, build_masks
from esper.leyline.slots import NUM_BLUEPRINTS
from esper.leyline.stages import SeedStage
from esper.utils.process import Pending
from tests.kasmina.gardens import plain_table
from tests.plots import same

ROWS, SLOTS = 3, 2
EAGER = LifecycleConfig(gates=GateConfig(kind="permissive"))


class Recording(ImaginedEngine):
    """Notes in which order it is used; can refuse to build a seed."""

    def __init__(self) -> None:
        super().__init__(ROWS, SLOTS, 100, torch.full((NUM_BLUEPRINTS,), 7))
        self.events: list[str] = []
        self.refuses = False
        self.portions: list[Portion] = []

    def sync(self, state: SlotState) -> Tensor:
        self.events.append("sync")
        if self.refuses and bool(state.has_module.any()):
            raise RuntimeError("no such layer")
        return super().sync(state)

    def train(self, portions: Sequence[Portion]):  # type: ignore[no-untyped-def]
        self.events.append(f"train {[portion.epoch for portion in portions]}")
        self.portions = list(portions)
        training = super().train(portions)

        def wait():  # type: ignore[no-untyped-def]
            self.events.append("trained")
            return training()

        return wait


class World:
    """A group whose losses and contributions a test says."""

    def __init__(self, config: RowConfig) -> None:
        self.engine = Recording()
        self.loss = torch.full((ROWS,), 0.5, dtype=torch.float64)
        self.worth = 1.0
        self.asked: list[tuple[list[bool], bool]] = []
        self.group = RowGroup(
            self.engine,
            range(ROWS),
            config,
            table=plain_table(empty_state(ROWS, SLOTS), 100, EAGER),
            facts=row_facts(ROWS, horizon=60, budget=500),
            measure=self.measure,
        )
        self.group.start()
        self.engine.events.clear()

    def measure(self, members: Tensor, which: Tensor | None) -> Pending[Measured]:
        self.engine.events.append("measure" if which is None else "measure again")
        self.asked.append((members.any(1).tolist(), which is not None))
        again = torch.full((ROWS,), 0.4, dtype=torch.float64)
        worth = torch.full((ROWS, SLOTS), self.worth, dtype=torch.float64)
        loss = self.loss if which is None else again
        pairs = torch.zeros((ROWS, SLOTS, SLOTS), dtype=torch.float64)
        shown = Measured(loss, 100 * (1 - loss), worth, 0.1 * worth, pairs)

        def wait() -> Measured:
            self.engine.events.append("measured")
            return shown

        return wait


def do(op: LifecycleOp = LifecycleOp.WAIT, row: int = 0, **choices: int) -> Command:
    actions = placeholder_actions(ROWS)
    actions["op"][row] = int(op)
    for head, choice in choices.items():
        actions[head][row] = choice
    return decode_actions(actions)


def test_a_step_applies_ticks_trains_measures_and_tells() -> None:
    world = World(RowConfig())
    world.group.live()
    world.engine.events.clear()
    signals = world.group.step(do(LifecycleOp.GERMINATE, slot=1, blueprint=2))
    # What runs by itself has all of its work before anybody waits for some of it.
    assert world.engine.events == ["sync", "train [2, 2, 2]", "measure", "trained", "measured"]
    assert signals.epoch.tolist() == [2] * ROWS
    assert signals.last_op.tolist() == [1, 0, 0]
    assert signals.stage[0].tolist() == [-1, int(SeedStage.GERMINATED)]
    assert signals.slot_params[0].tolist() == [0, 7]
    assert signals.params.tolist() == [107, 100, 100]


def test_an_epoch_that_was_begun_is_lived_once() -> None:
    world = World(RowConfig())
    world.group.begin()
    world.group.live()
    assert world.engine.events == ["train [1, 1, 1]", "measure", "trained", "measured"]
    world.group.live()
    assert world.engine.events[4] == "train [2, 2, 2]"


def test_a_seed_that_cannot_be_built_was_never_germinated() -> None:
    world = World(RowConfig())
    world.group.live()
    world.engine.refuses = True
    before = world.group.state
    with pytest.raises(RuntimeError, match="no such layer"):
        world.group.act(do(LifecycleOp.GERMINATE, slot=0, blueprint=2))
    assert same(world.group.state.state_dict(), before.state_dict())
    assert world.group.last_op.tolist() == [0] * ROWS
    world.engine.refuses = False
    assert bool(world.group.step(do()).last_success.all())


def test_debugging_finds_a_mask_that_allowed_what_is_refused(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("ESPER_DEBUG", "1")
    world = World(RowConfig())
    world.group.live()
    # What the masks forbid is refused, and that is all.
    forbidden = do(LifecycleOp.FOSSILIZE, slot=1)
    assert world.group.step(forbidden).last_success.tolist() == [False, True, True]
    assert bool(world.group.step(do(LifecycleOp.GERMINATE, slot=0, blueprint=2)).last_success.all())

    def permissive(view: RuleView, config: RulesConfig) -> Masks:
        masks = build_masks(view, config)
        return dataclasses.replace(masks, slot_by_op=torch.ones_like(masks.slot_by_op))

    monkeypatch.setattr(slot_table, "build_masks", permissive)
    with pytest.raises(EsperError, match="row 0: FOSSILIZE at slot 1 was refused although its mas"):
        world.group.act(forbidden)
    monkeypatch.delenv("ESPER_DEBUG")
    assert not bool(world.group.step(forbidden).last_success[0])


def blend_all(world: World) -> None:
    """Bring a seed of every row into BLENDING."""
    world.group.live()
    for row in range(ROWS):
        world.group.step(do(LifecycleOp.GERMINATE, row, slot=0, blueprint=2, tempo=2))
    everybody = placeholder_actions(ROWS)
    everybody["op"][:] = int(LifecycleOp.ADVANCE)
    for _ in range(20):
        if bool((world.group.state.stage[:, 0] == int(SeedStage.BLENDING)).all()):
            break
        world.group.step(decode_actions(everybody))
    assert world.group.state.stage[:, 0].tolist() == [int(SeedStage.BLENDING)] * ROWS


def test_contributions_are_measured_at_every_so_many_epochs() -> None:
    world = World(RowConfig(ablate_every=3))
    blend_all(world)
    world.asked.clear()
    epochs = []
    for _ in range(6):
        world.worth += 1
        epochs.append(int(world.group.tracker.epoch[0]))
        world.group.step(do())
    asked = [any(members) for members, _ in world.asked]
    assert asked == [epoch % 3 == 0 for epoch in epochs]
    ages = world.group.state.counterfactual_age[:, 0]
    assert ages.tolist() == [(6 - 1 - max(i for i, due in enumerate(asked) if due))] * ROWS


def test_a_row_that_goes_wrong_goes_back_alone() -> None:
    world = World(RowConfig())
    blend_all(world)
    world.loss = torch.tensor([0.5, torch.nan, 0.5], dtype=torch.float64)
    world.asked.clear()
    signals = world.group.step(do())
    assert signals.rolled_back.tolist() == [False, True, False]
    assert world.group.panic.tolist() == [0, int(Panic.NOT_FINITE), 0]
    assert [again for _, again in world.asked] == [False, True]
    # What it shows is the network that goes on.
    assert signals.val_loss.tolist() == pytest.approx([0.5, 0.4, 0.5])
    stages = world.group.state.stage[:, 0].tolist()
    assert stages[0] == stages[2] == int(SeedStage.BLENDING)
    assert not bool(world.group.state.has_module[1].any())
    world.loss = torch.full((ROWS,), 0.5, dtype=torch.float64)
    assert not bool(world.group.step(do()).rolled_back.any())


def test_rows_are_safe_every_few_epochs_unless_they_are_wrong_then() -> None:
    world = World(RowConfig(governor=GovernorConfig(snapshot_every=2)))
    for epoch in range(1, 7):
        bad = torch.nan if epoch == 4 else 0.5
        world.loss = torch.tensor([0.5, bad, 0.5], dtype=torch.float64)
        world.group.live()
        rows = world.group.safe_epoch.tolist()
        assert rows[0] == rows[2] == epoch - epoch % 2
        assert rows[1] == (2 if epoch in (4, 5) else rows[0])


def test_without_a_governor_nothing_goes_back() -> None:
    world = World(RowConfig(governor=GovernorConfig(is_on=False)))
    world.loss = torch.full((ROWS,), torch.nan, dtype=torch.float64)
    world.group.live()
    assert not bool(world.group.rolled_back.any())
    assert world.group.memory()["safe"] == []


def test_what_is_remembered_is_recalled() -> None:
    world, other = (World(RowConfig()) for _ in range(2))
    blend_all(world)
    world.loss = torch.tensor([0.5, torch.nan, 0.5], dtype=torch.float64)
    world.group.step(do())
    other.group.restore(world.group.snapshot())
    world.loss = other.loss
    assert other.group.panic.tolist() == world.group.panic.tolist()
    for _ in range(3):
        one, two = world.group.step(do()), other.group.step(do())
        assert torch.equal(one.val_score, two.val_score)
        assert torch.equal(one.stage, two.stage)
        assert torch.equal(one.contribution.nan_to_num(), two.contribution.nan_to_num())
