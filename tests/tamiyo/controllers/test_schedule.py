from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import TypeAlias

import pytest

from esper.leyline.actions import PLACEHOLDERS, LifecycleOp
from esper.leyline.errors import EsperWarning, UsageError
from esper.leyline.stages import (
    SPEED_TICKS,
    AlphaAlgorithm,
    AlphaCurve,
    AlphaMode,
    BlendStyle,
    SeedStage,
)
from esper.tamiyo.controllers.schedule import ScheduleController, parse_schedule
from tests.tamiyo.controllers.scenes import CONTEXT, Scene, Slot, blueprint_id, join_rows

WAIT, GERMINATE = LifecycleOp.WAIT, LifecycleOp.GERMINATE
ADVANCE, PRUNE, FOSSILIZE = LifecycleOp.ADVANCE, LifecycleOp.PRUNE, LifecycleOp.FOSSILIZE


Follow: TypeAlias = Callable[[str], ScheduleController]


@pytest.fixture
def follow(tmp_path: Path) -> Follow:
    """Return a controller for the given YAML, reset for one row."""

    def build(text: str) -> ScheduleController:
        path = tmp_path / "plan.yaml"
        path.write_text(text)
        controller = ScheduleController.build(str(path), CONTEXT)
        controller.reset(1, "cpu")
        return controller

    return build


def step(scene: Scene, controller: ScheduleController, success: bool = True) -> LifecycleOp:
    """Act, note the outcome for the next step, and let an epoch pass."""
    op = scene.op(controller)
    scene.last_op, scene.last_success = op, success or op == WAIT
    scene.epoch += 1
    return op


def test_entries_are_done_in_order_from_their_epoch_on(follow: Follow) -> None:
    controller = follow(
        """
        - {epoch: 3, op: germinate, slot: r0c1, blueprint: norm}
        - {epoch: 3, op: advance, slot: r0c1}
        - {epoch: 7, op: advance, slot: r0c1}
        - {epoch: 1, op: fossilize, slot: 1}
        """
    )
    scene = Scene(epoch=1)
    assert [step(scene, controller) for _ in range(2)] == [WAIT, WAIT]
    assert step(scene, controller) == GERMINATE
    scene.slots[1] = Slot(stage=SeedStage.GERMINATED)
    assert step(scene, controller) == ADVANCE
    scene.slots[1].stage = SeedStage.BLENDING
    assert [step(scene, controller) for _ in range(2)] == [WAIT, WAIT]
    assert scene.epoch == 7
    assert step(scene, controller) == ADVANCE
    scene.slots[1].stage = SeedStage.HOLDING
    assert step(scene, controller) == FOSSILIZE
    scene.slots[1].stage = SeedStage.FOSSILIZED
    assert [step(scene, controller) for _ in range(3)] == [WAIT] * 3


def test_what_was_left_out_takes_its_default(follow: Follow) -> None:
    controller = follow("- {epoch: 0, op: germinate, slot: 2, blueprint: depthwise}")
    action = Scene().act(controller)
    assert (action["slot"], action["blueprint"]) == (2, blueprint_id("depthwise"))
    for head in ("style", "tempo", "alpha_target"):
        assert action[head] == PLACEHOLDERS[head]


def test_a_masked_entry_waits_and_holds_up_the_rest(follow: Follow) -> None:
    controller = follow(
        """
        - {epoch: 1, op: prune, slot: 0, alpha_speed: 3, alpha_curve: COSINE}
        - {epoch: 1, op: germinate, slot: 1, blueprint: norm}
        """
    )
    moving = Slot(stage=SeedStage.BLENDING, mode=AlphaMode.UP, alpha=0.5, target=1.0)
    scene = Scene(slots=[moving, Slot()], epoch=1)
    assert [step(scene, controller) for _ in range(3)] == [WAIT] * 3
    moving.mode, moving.alpha = AlphaMode.HOLD, 1.0
    action = scene.act(controller)
    assert action["op"] == PRUNE
    assert SPEED_TICKS[action["alpha_speed"]] == 3
    assert action["alpha_curve"] == AlphaCurve.COSINE


def test_a_failed_gate_is_tried_again(follow: Follow) -> None:
    controller = follow(
        """
        - {epoch: 1, op: advance, slot: 0}
        - {epoch: 1, op: advance, slot: 0}
        """
    )
    scene = Scene(slots=[Slot(stage=SeedStage.TRAINING)], epoch=1)
    assert [step(scene, controller, success=False) for _ in range(4)] == [ADVANCE] * 4
    assert controller.state_dict()["rows"][0]["next"] == 0
    assert step(scene, controller, success=True) == ADVANCE
    scene.slots[0].stage = SeedStage.BLENDING
    assert step(scene, controller) == ADVANCE
    assert controller.state_dict()["rows"][0]["next"] == 1


def test_success_of_another_action_is_not_its_own(follow: Follow) -> None:
    """Whoever carries actions out may have put a WAIT in its place."""
    controller = follow("- {epoch: 1, op: advance, slot: 0}")
    scene = Scene(slots=[Slot(stage=SeedStage.TRAINING)])
    assert scene.op(controller) == ADVANCE
    scene.last_op, scene.last_success = WAIT, True
    assert scene.op(controller) == ADVANCE


@pytest.mark.parametrize(
    ("algorithm", "style"),
    [
        (AlphaAlgorithm.ADD, BlendStyle.SIGMOID_ADD),
        (AlphaAlgorithm.MULTIPLY, BlendStyle.LINEAR_MULTIPLY),
        (AlphaAlgorithm.GATE, BlendStyle.GATED_GATE),
    ],
)
def test_a_new_alpha_target_keeps_the_algorithm(
    follow: Follow, algorithm: AlphaAlgorithm, style: BlendStyle
) -> None:
    controller = follow("- {epoch: 1, op: set_alpha_target, slot: 0, alpha_target: 0.7}")
    slot = Slot(stage=SeedStage.HOLDING, algorithm=int(algorithm))
    assert Scene(slots=[slot]).act(controller)["style"] == style


def test_a_new_alpha_target_with_a_style_changes_it(follow: Follow) -> None:
    controller = follow(
        "- {epoch: 1, op: set_alpha_target, slot: 0, alpha_target: 0.7, style: linear_add}"
    )
    slot = Slot(stage=SeedStage.HOLDING, algorithm=int(AlphaAlgorithm.GATE))
    assert Scene(slots=[slot]).act(controller)["style"] == BlendStyle.LINEAR_ADD


def test_a_blueprint_that_does_not_fit_waits_with_a_warning(follow: Follow) -> None:
    controller = follow("- {epoch: 1, op: germinate, slot: 0, blueprint: lora}")
    with pytest.warns(EsperWarning, match=r"entry 1 waits: blueprint 'lora' .* slot 'r0c0'"):
        assert Scene().op(controller) == WAIT
    # No warning where something else is in the way as well.
    assert Scene(slots=[Slot(stage=SeedStage.TRAINING)]).op(controller) == WAIT
    assert Scene(topology="vector").op(controller) == GERMINATE


def test_rows_go_at_their_own_pace(follow: Follow) -> None:
    controller = follow(
        """
        - {epoch: 1, op: advance, slot: 0}
        - {epoch: 1, op: fossilize, slot: 0}
        """
    )
    controller.reset(2, "cpu")

    def act(scenes: list[Scene]) -> list[int]:
        signals = join_rows([scene.signals() for scene in scenes])
        masks = join_rows([scene.masks() for scene in scenes])
        return controller.act(signals, masks)["op"].tolist()

    scenes = [Scene(slots=[Slot(stage=SeedStage.BLENDING)]) for _ in range(2)]
    assert act(scenes) == [ADVANCE, ADVANCE]
    scenes[0].last_op, scenes[0].slots[0].stage = ADVANCE, SeedStage.HOLDING
    scenes[1].last_op, scenes[1].last_success = ADVANCE, False
    assert act(scenes) == [FOSSILIZE, ADVANCE]
    assert [row["next"] for row in controller.state_dict()["rows"]] == [1, 0]


def test_a_state_of_a_longer_schedule_leaves_nothing_to_do(follow: Follow) -> None:
    controller = follow("- {epoch: 1, op: fossilize, slot: 0}")
    row = {"next": 9, "tended": [], "tried": None, "was_entry": False}
    controller.load_state_dict({"rows": [row]})
    assert Scene(slots=[Slot(stage=SeedStage.HOLDING)]).op(controller) == WAIT


def test_must_be_reset_for_the_rows_it_is_shown(follow: Follow) -> None:
    controller = follow("- {epoch: 1, op: advance, slot: 0}")
    controller.reset(4, "cpu")
    with pytest.raises(UsageError, match=r"call reset\(1, device\) first"):
        Scene().act(controller)


class TestGrow:
    """Seeds that are brought up without being told."""

    def test_a_seed_is_advanced_and_fossilized_by_itself(self, follow: Follow) -> None:
        controller = follow("- {epoch: 10%, op: grow, slot: 100%, blueprint: norm}")
        scene = Scene(epoch=1, horizon=20)
        assert step(scene, controller) == WAIT
        action = scene.act(controller)
        assert (action["op"], action["slot"]) == (GERMINATE, 2)
        scene.last_op, scene.epoch = GERMINATE, 3
        scene.slots[2] = Slot(stage=SeedStage.GERMINATED)
        assert step(scene, controller) == ADVANCE
        scene.slots[2].stage = SeedStage.TRAINING
        assert [step(scene, controller, success=False) for _ in range(2)] == [ADVANCE] * 2
        moving = Slot(stage=SeedStage.BLENDING, mode=AlphaMode.UP, alpha=0.5, target=1.0)
        scene.slots[2] = moving
        assert step(scene, controller) == WAIT
        moving.mode, moving.alpha = AlphaMode.HOLD, 1.0
        assert step(scene, controller) == ADVANCE
        moving.stage = SeedStage.HOLDING
        assert step(scene, controller) == FOSSILIZE
        moving.stage = SeedStage.FOSSILIZED
        assert step(scene, controller) == WAIT

    def test_a_seed_held_back_by_its_gate_does_not_hold_up_the_next(self, follow: Follow) -> None:
        controller = follow(
            """
            - {epoch: 0, op: grow, slot: 0, blueprint: norm}
            - {epoch: 0, op: grow, slot: 1, blueprint: norm}
            """
        )
        scene = Scene(epoch=1)
        assert step(scene, controller) == GERMINATE
        scene.slots[0] = Slot(stage=SeedStage.HOLDING, alpha=1.0, target=1.0)
        assert step(scene, controller, success=False) == FOSSILIZE
        action = scene.act(controller)
        assert (action["op"], action["slot"]) == (GERMINATE, 1)

    def test_what_can_never_be_done_is_passed_over(self, follow: Follow) -> None:
        controller = follow(
            """
            - {epoch: 0, op: grow, slot: 0, blueprint: norm}
            - {epoch: 0, op: grow, slot: 1, blueprint: lora}
            - {epoch: 0, op: grow, slot: 2, blueprint: [lora, norm]}
            """
        )
        taken = Slot(stage=SeedStage.FOSSILIZED, alpha=1.0, target=1.0)
        scene = Scene(slots=[taken, Slot(), Slot()])
        with pytest.warns(EsperWarning, match="entry 2 is passed over: blueprint 'lora'"):
            action = scene.act(controller)
        assert (action["slot"], action["blueprint"]) == (2, blueprint_id("norm"))

    def test_an_amplitude_below_one_is_left_alone(self, follow: Follow) -> None:
        controller = follow("- {epoch: 0, op: grow, slot: 0, blueprint: norm, alpha_target: 0.7}")
        scene = Scene()
        assert step(scene, controller) == GERMINATE
        scene.slots[0] = Slot(stage=SeedStage.BLENDING, alpha=0.7, target=0.7)
        assert [step(scene, controller) for _ in range(3)] == [WAIT] * 3

    def test_a_slot_that_a_host_lacks_is_passed_over(self) -> None:
        entries = parse_schedule(
            [
                {"epoch": 0, "op": "grow", "slot": "r0c2", "blueprint": "norm"},
                {"epoch": 0, "op": "grow", "slot": "100%", "blueprint": "norm"},
            ],
            CONTEXT,
        )
        controller = ScheduleController([entries], CONTEXT)
        controller.reset(1, "cpu")
        action = Scene(slots=[Slot(), Slot()]).act(controller)
        assert (action["op"], action["slot"]) == (GERMINATE, 1)


def test_every_row_may_have_a_schedule_of_its_own() -> None:
    plans = [
        parse_schedule([{"epoch": 0, "op": "grow", "slot": slot, "blueprint": "norm"}], CONTEXT)
        for slot in (0, 2)
    ]
    controller = ScheduleController([plans[0], (), plans[1]], CONTEXT)
    controller.reset(3, "cpu")
    scenes = [Scene() for _ in range(3)]
    actions = controller.act(
        join_rows([scene.signals() for scene in scenes]),
        join_rows([scene.masks() for scene in scenes]),
    )
    assert actions["op"].tolist() == [GERMINATE, WAIT, GERMINATE]
    assert actions["slot"][[0, 2]].tolist() == [0, 2]
    with pytest.raises(UsageError, match="3 schedules need as many rows"):
        controller.reset(2, "cpu")


def test_an_entry_for_all_slots_is_done_in_each_before_the_next_entry(follow: Follow) -> None:
    controller = follow(
        """
        - {epoch: 2, op: germinate, slot: all, blueprint: norm}
        - {epoch: 2, op: prune, slot: r0c1}
        """
    )
    scene = Scene(epoch=2)
    done = []
    for _ in range(4):
        choice = scene.act(controller)
        op = LifecycleOp(choice["op"])
        done.append((op, choice["slot"]))
        if op == GERMINATE:
            scene.slots[choice["slot"]] = Slot(SeedStage.HOLDING, alpha=1.0, target=1.0)
        scene.last_op, scene.last_success = op, True
        scene.epoch += 1
    assert done == [(GERMINATE, 2), (GERMINATE, 1), (GERMINATE, 0), (PRUNE, 1)]
