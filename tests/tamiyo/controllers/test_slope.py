from __future__ import annotations

import dataclasses
import json

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

import esper
from esper.leyline.actions import LifecycleOp
from esper.leyline.errors import UsageError
from esper.leyline.reasons import ADVICE, Why
from esper.leyline.stages import SeedStage
from esper.tamiyo.controllers import make_controller
from esper.tamiyo.controllers.slope import SlopeConfig, SlopeController, find_falls
from tests.tamiyo.controllers.scenes import CONTEXT, Scene, Slot, blueprint_id

WAIT, GERMINATE = LifecycleOp.WAIT, LifecycleOp.GERMINATE
ADVANCE, FOSSILIZE = LifecycleOp.ADVANCE, LifecycleOp.FOSSILIZE
COPYING = dataclasses.replace(CONTEXT, copies=("conv_light",))
"""Scenes know the built-in blueprints alone, so that one of them stands for copies."""


def rule(**options: object) -> SlopeController:
    controller = SlopeController(COPYING, SlopeConfig(**{"windows": 1, **options}))
    controller.reset(1, "cpu")
    return controller


def copied(copies: int = 1, **options: object) -> Slot:
    fields = {"stage": SeedStage.BLENDING, "alpha": 1.0, "target": 1.0, **options}
    return Slot(copies=copies, **fields)  # type: ignore[arg-type]


def lived(
    controller: SlopeController, losses: list[float], epoch: int = 1, **options: object
) -> tuple[dict[str, int], str]:
    """Show one loss after the other; return the last action with its reason."""
    options = {"seed_flops": (1_000,) * 3, **options}
    for number, loss in enumerate(losses):
        scene = Scene(epoch=epoch + number, loss=loss, **options)  # type: ignore[arg-type]
        action = scene.act(controller)
    return action, controller.reasons()[0]


def test_a_network_without_a_block_to_copy_says_what_it_lacks() -> None:
    action, why = lived(rule(), [9.0, 8.0, 7.5], seed_flops=(-1,) * 3, fitting=("norm",))
    assert action["op"] == WAIT
    assert why == "no block could be copied (0 of 3 slots follow one with a residual path)"
    assert "x + f(x)" in ADVICE[Why.NO_COPY]
    # Where a limit is what forbids a copy, it says that.
    _, why = lived(rule(), [9.0, 8.0, 7.5], seed_flops=(-1, 1_000, -1), fitting=("norm",))
    assert why == "no slot could take a seed (0 of 3)"


class TestWhen:
    def test_a_flop_buys_less_now_than_the_ratio_of_costs_allows(self) -> None:
        # At first an epoch bought 1. A step after doubling costs twice as much.
        action, why = lived(rule(), [9.0, 8.0, 7.4])
        assert action["op"] == WAIT
        assert why == (
            "a deeper network would not have paid yet (a FLOP bought 60% of what it bought at "
            "first, and a step after doubling costs 2.00 times as much, 57 epochs left)"
        )
        action, why = lived(rule(), [9.0, 8.0, 7.5])
        assert (action["op"], why) == (GERMINATE, "")
        assert action["blueprint"] == blueprint_id("conv_light")

    def test_dear_copies_must_wait_longer_than_cheap_ones(self) -> None:
        losses = [9.0, 8.0, 7.3]
        assert lived(rule(), losses)[0]["op"] == WAIT
        assert lived(rule(), losses, seed_flops=(250,) * 3)[0]["op"] == GERMINATE
        assert lived(rule(margin=1.5), losses)[0]["op"] == GERMINATE

    def test_not_before_three_windows_at_a_depth(self) -> None:
        action, why = lived(rule(windows=2), [9.0, 8.0, 8.0, 8.0, 8.0])
        assert action["op"] == WAIT
        assert why == "it was too early in the run (5 of 6 epochs at this depth)"

    def test_a_rising_loss_is_no_reason_to_grow_unless_told(self) -> None:
        losses = [9.0, 8.0, 8.5]
        action, why = lived(rule(), losses)
        assert action["op"] == WAIT
        assert why.startswith("its loss was rising (a FLOP raised the validation loss")
        assert lived(rule(rising=True), losses)[0]["op"] == GERMINATE

    def test_the_training_loss_if_told(self) -> None:
        controller = rule(loss="training")
        for epoch, (loss, train_loss) in enumerate([(9.0, 9.0), (8.0, 8.0), (8.0, 7.0)], 1):
            scene = Scene(epoch=epoch, loss=loss, train_loss=train_loss, seed_flops=(1_000,) * 3)
            assert scene.op(controller) == WAIT
        assert Scene(epoch=4, loss=1.0, train_loss=7.0, seed_flops=(9,) * 3).op(controller) == (
            GERMINATE
        )
        # One that is not known is no loss of 0.
        assert lived(rule(loss="training"), [9.0, 8.0, 7.5])[1].startswith("it was too early")

    def test_not_late_in_the_run(self) -> None:
        flat = [9.0, 8.0, 8.0]
        assert lived(rule(), flat, epoch=34)[0]["op"] == GERMINATE
        action, why = lived(rule(), flat, epoch=35)
        assert action["op"] == WAIT
        assert why == "too few epochs were left for a seed (23 epochs left)"
        assert lived(rule(latest=0.7), flat, epoch=35)[0]["op"] == GERMINATE

    def test_by_flops_where_there_is_a_budget(self) -> None:
        # Two epochs bought as much as one, but the second one cost three times as much.
        for spent, op in ((200, WAIT), (400, GERMINATE)):
            controller = rule()
            for epoch, (taken, loss) in enumerate([(0, 9.0), (100, 8.0), (spent, 7.0)], 1):
                scene = Scene(
                    epoch=epoch, loss=loss, compute=(1_000, taken), seed_flops=(1_000,) * 3
                )
                found = scene.op(controller)
            assert found == op

    def test_another_depth_begins_another_curve(self) -> None:
        controller = rule()
        assert lived(controller, [9.0, 8.0, 7.5])[0]["op"] == GERMINATE
        grown = [copied(), Slot(), Slot()]
        action, why = lived(controller, [7.5, 7.0], epoch=4, slots=grown)
        assert action["op"] == WAIT
        assert "(2 of 3 epochs at this depth)" in why
        assert lived(controller, [7.0], epoch=6, slots=grown)[0]["op"] == GERMINATE


class TestWhere:
    def test_the_shallowest_stage_first_and_of_those_the_cheapest(self) -> None:
        flat = [9.0, 8.0, 8.0]
        costs = (300, 200, 400)
        action, _ = lived(rule(), flat, seed_flops=costs)
        assert (action["op"], action["slot"]) == (GERMINATE, 1)
        slots = [Slot(), copied(), Slot()]
        assert lived(rule(), flat, seed_flops=costs, slots=slots)[0]["slot"] == 0

    def test_a_stage_that_holds_copies_is_doubled(self) -> None:
        flat = [9.0, 8.0, 8.0]
        slots = [copied(3), copied(1), copied(1)]
        action, _ = lived(rule(), flat, seed_flops=(400, 300, 200), slots=slots)
        assert (action["op"], action["slot"]) == (GERMINATE, 2)

    def test_or_the_cheapest_block_if_told(self) -> None:
        # Three copies are doubled by four blocks, which cost 400, so that one is the cheapest.
        slots = [copied(3), Slot(), Slot()]
        costs = (400, 150, 200)
        controller = rule(order="cheap")
        action, _ = lived(controller, [9.0, 8.0, 8.0], seed_flops=costs, slots=slots)
        assert action["slot"] == 0

    def test_nowhere_else_where_copies_do_not_fit(self) -> None:
        action, why = lived(rule(), [9.0, 8.0, 8.0], fitting=("norm",))
        assert (action["op"], why) == (WAIT, "no slot could take a seed (0 of 3)")


class TestWhatHasGrown:
    def test_is_kept_at_the_end_so_that_it_is_not_ablated_any_more(self) -> None:
        slots = [copied(), copied(stage=SeedStage.HOLDING), Slot()]
        controller = rule()
        assert Scene(epoch=30, slots=slots).op(controller) == WAIT
        late = Scene(epoch=37, slots=slots)
        assert (late.act(controller)["op"], late.act(controller)["slot"]) == (ADVANCE, 0)
        # A gate may refuse; then it is the turn of another.
        late.last_op, late.last_success = ADVANCE, False
        action = late.act(controller)
        assert (action["op"], action["slot"]) == (FOSSILIZE, 1)

    def test_is_no_more_than_allowed(self) -> None:
        slots = [copied(3), copied(1), Slot()]
        flat = [9.0, 8.0, 8.0]
        assert lived(rule(doublings=4), flat, slots=slots)[0]["op"] == GERMINATE
        action, _ = lived(rule(doublings=3), flat, slots=slots)
        assert action["op"] == ADVANCE
        fossils = [copied(each.copies, stage=SeedStage.FOSSILIZED) for each in slots[:2]]
        _, why = lived(rule(doublings=3), flat, slots=[*fossils, Slot()])
        assert why == "no slot could take a seed (this rule doubles 3 times)"

    def test_is_advanced_where_copies_enter_like_other_seeds(self) -> None:
        slots = [copied(stage=SeedStage.TRAINING, alpha=0.0, target=0.0), Slot(), Slot()]
        assert lived(rule(), [9.0], slots=slots)[0]["op"] == ADVANCE


def test_falls_need_three_windows() -> None:
    curve = [[0.0, 9.0], [1.0, 8.0], [3.0, 7.0]]
    assert find_falls(curve[:2], 1) is None
    found = find_falls(curve, 1)
    assert found is not None
    assert (found.first, found.now) == (1.0, 0.5)
    assert found.is_below(0.5)
    assert not found.is_below(0.49)


def test_settings_follow_a_colon_and_memory_is_plain_data() -> None:
    made = make_controller("slope:windows=4,order=cheap", COPYING)
    assert isinstance(made, SlopeController)
    assert (made.config.windows, made.config.order) == (4, "cheap")
    controller, other = rule(), rule()
    lived(controller, [9.0, 8.0])
    other.load_state_dict(json.loads(json.dumps(controller.state_dict())))
    assert lived(other, [7.5], epoch=3)[0]["op"] == GERMINATE


def test_without_copies_there_is_nothing_to_decide() -> None:
    with pytest.raises(UsageError, match=r"population\.copies=true"):
        make_controller("slope", CONTEXT)


class Step(nn.Module):
    """A block with a residual path."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        return x + torch.tanh(self.linear(x))


def test_a_users_network_becomes_deeper() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 8), Step(), nn.Linear(8, 2))
    x = torch.randn(128, 4)
    y = (x[:, 0] * x[:, 1] > 0).long()
    loader = DataLoader(TensorDataset(x, y), batch_size=32)
    grown = esper.grow(
        model,
        ["1"],
        train=loader,
        val=loader,
        epochs=16,
        controller="slope:latest=0.8,margin=1.5",
        max_growth=20.0,
        twin=False,
        keep="last",
    )
    ops = [one.decision.op for one in grown.history if one.decision is not None]
    assert ops.count("GERMINATE") >= 2
    copies = 2 ** ops.count("GERMINATE") - 1
    each = sum(parameter.numel() for parameter in Step().parameters())
    assert grown.history[-1].parameters == grown.history[0].parameters + copies * each
