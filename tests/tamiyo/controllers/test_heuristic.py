"""Scripted episodes through every branch of the heuristic."""

from __future__ import annotations

import json
import math
from dataclasses import replace

import pytest

from esper.leyline.actions import LifecycleOp
from esper.leyline.controller import ControllerContext
from esper.leyline.errors import ConfigError, UnknownNameError, UsageError
from esper.leyline.rules import RulesConfig
from esper.leyline.stages import (
    ALPHA_TARGETS,
    COOLDOWN_STAGES,
    SPEED_TICKS,
    TEMPO_EPOCHS,
    AlphaMode,
    BlendStyle,
    SeedStage,
)
from esper.tamiyo.controllers.heuristic import HeuristicConfig, HeuristicController, RowMemory
from esper.tamiyo.controllers.registry import read_rows
from esper.testing.controllers import random_signals
from esper.utils.randomness import generator
from tests.tamiyo.controllers.scenes import CONTEXT, Scene, Slot, blueprint_id, take_rows

WAIT, GERMINATE = LifecycleOp.WAIT, LifecycleOp.GERMINATE
ADVANCE, PRUNE, FOSSILIZE = LifecycleOp.ADVANCE, LifecycleOp.PRUNE, LifecycleOp.FOSSILIZE


def heuristic(**options: object) -> HeuristicController:
    controller = HeuristicController(CONTEXT, HeuristicConfig(**options))
    controller.reset(1, "cpu")
    return controller


def seen(controller: HeuristicController, stage: SeedStage, **scores: float) -> Scene:
    """Show a seed's germination and the beginning of its stage; return the scene to go on with.

    `germination` and `start` are the scores at the decisions that began the seed and the stage.
    """
    empty = Scene(score=scores.get("germination", 50.0), plateau=0)
    empty.act(controller)
    before = Slot(stage=SeedStage.GERMINATED)
    Scene(score=scores.get("start", scores.get("germination", 50.0)), slots=[before]).act(
        controller
    )
    full = stage == SeedStage.HOLDING
    slot = Slot(stage=stage, alpha=float(full), target=float(full), in_stage=1)
    return Scene(slots=[slot])


class TestGermination:
    def test_on_a_plateau_of_a_settled_host(self) -> None:
        action = Scene().act(heuristic())
        assert action["op"] == GERMINATE
        assert action["slot"] == 0
        assert action["blueprint"] == blueprint_id("conv_light")
        assert action["style"] == BlendStyle.SIGMOID_ADD
        assert TEMPO_EPOCHS[action["tempo"]] == 5
        assert ALPHA_TARGETS[action["alpha_target"]] == 1.0

    @pytest.mark.parametrize(
        ("plateau", "op"), [(0, WAIT), (2, WAIT), (3, GERMINATE), (9, GERMINATE)]
    )
    def test_needs_three_epochs_of_plateau(self, plateau: int, op: LifecycleOp) -> None:
        assert Scene(plateau=plateau).op(heuristic()) == op

    def test_a_seed_at_full_amplitude_at_once_is_never_too_late(self) -> None:
        names = CONTEXT.blueprint_names
        for immediate in ((), ((True,) * len(names),) * 3):
            context = replace(CONTEXT, inert_epochs=11, immediate=immediate)
            controller = HeuristicController(context)
            controller.reset(1, "cpu")
            assert Scene(epoch=50).op(controller) == (GERMINATE if immediate else WAIT)

    def test_needs_a_settled_host(self) -> None:
        assert Scene(stabilized=False).op(heuristic()) == WAIT

    @pytest.mark.parametrize(("epoch", "op"), [(4, WAIT), (5, GERMINATE)])
    def test_not_before_epoch_five(self, epoch: int, op: LifecycleOp) -> None:
        assert Scene(epoch=epoch).op(heuristic()) == op

    def test_needs_a_free_slot(self) -> None:
        fossils = [Slot(stage=SeedStage.FOSSILIZED, alpha=1.0) for _ in range(3)]
        assert Scene(slots=fossils).op(heuristic()) == WAIT
        fossils[1] = Slot()
        action = Scene(slots=fossils).act(heuristic())
        assert (action["op"], action["slot"]) == (GERMINATE, 1)

    @pytest.mark.parametrize("stage", COOLDOWN_STAGES)
    def test_waits_while_a_slot_cools_down(self, stage: SeedStage) -> None:
        assert Scene(slots=[Slot(), Slot(stage=stage)]).op(heuristic()) == WAIT

    def test_waits_at_the_limit_of_seeds(self) -> None:
        scene = Scene(
            slots=[Slot(), Slot(stage=SeedStage.FOSSILIZED)], rules=RulesConfig(max_seeds=1)
        )
        assert scene.op(heuristic()) == WAIT

    def test_rests_for_five_epochs_after_its_own_prune(self) -> None:
        controller = heuristic()
        scene = seen(controller, SeedStage.TRAINING)
        scene.epoch, scene.score, scene.slots[0].in_stage = 20, 40.0, 5
        assert scene.op(controller) == PRUNE
        # The rule is the heuristic's own: a slot elsewhere may be free at once.
        for epoch, op in ((21, WAIT), (24, WAIT), (25, GERMINATE)):
            assert Scene(epoch=epoch).op(controller) == op


class TestRotation:
    @staticmethod
    def blueprints(controller: HeuristicController, count: int, **scene: object) -> list[str]:
        ids = [Scene(**scene).act(controller)["blueprint"] for _ in range(count)]
        return [CONTEXT.blueprint_names[index] for index in ids]

    def test_of_convolutional_slots(self) -> None:
        order = ["conv_light", "conv_heavy", "attention", "norm", "depthwise"]
        assert self.blueprints(heuristic(), 7) == [*order, *order[:2]]

    def test_of_sequences_and_vectors(self) -> None:
        sequence = ["mlp_small", "attention", "norm", "lora", "mlp", "lora_large"]
        vector = ["mlp_small", "norm", "lora", "mlp", "lora_large"]
        assert self.blueprints(heuristic(), 7, topology="sequence") == [*sequence, "mlp_small"]
        assert self.blueprints(heuristic(), 6, topology="vector") == [*vector, "mlp_small"]

    def test_goes_on_over_slots_of_different_kinds(self) -> None:
        controller = heuristic()
        assert self.blueprints(controller, 2) == ["conv_light", "conv_heavy"]
        assert self.blueprints(controller, 1, topology="vector") == ["mlp_small"]
        assert self.blueprints(controller, 1) == ["attention"]

    def test_falls_back_to_whatever_fits(self) -> None:
        fitting = ("flex_attention", "bottleneck")
        chosen = self.blueprints(heuristic(), 3, fitting=fitting)
        assert chosen == ["bottleneck", "flex_attention", "bottleneck"]

    def test_passes_over_what_is_penalised_too_much(self) -> None:
        controller = heuristic(penalty_limit=0.75, rest_epochs=0)
        scene = seen(controller, SeedStage.TRAINING)
        scene.score, scene.slots[0].in_stage = 40.0, 5
        scene.slots[0].blueprint = "conv_heavy"
        assert scene.op(controller) == PRUNE
        # 2 halves to 1 and is passed over; the rotation had begun at its start.
        assert self.blueprints(controller, 1) == ["conv_light"]
        # Half of that at its next turn: welcome again, from where the rotation stands.
        assert self.blueprints(controller, 5) == [
            "conv_heavy",
            "attention",
            "norm",
            "depthwise",
            "conv_light",
        ]

    def test_two_prunes_in_a_row_exclude_a_blueprint(self) -> None:
        controller = heuristic(penalty_limit=1.1, rest_epochs=0)
        for _ in range(2):
            scene = seen(controller, SeedStage.TRAINING)
            scene.score, scene.slots[0].in_stage = 40.0, 5
            assert scene.op(controller) == PRUNE
        # The first has halved at each of three decisions; one prune alone would be 1 by the next.
        left = [[blueprint_id("conv_light"), 2.25]]
        assert controller.state_dict()["rows"][0]["penalties"] == left
        assert self.blueprints(controller, 1) == ["conv_heavy"]

    def test_takes_turns_by_penalty_when_all_are_penalised(self) -> None:
        controller = heuristic(penalty_limit=0.0, rest_epochs=0)
        for blueprint in ("conv_light", "norm"):
            scene = seen(controller, SeedStage.TRAINING)
            scene.score, scene.slots[0].in_stage = 40.0, 5
            scene.slots[0].blueprint = blueprint
            assert scene.op(controller) == PRUNE
        chosen = self.blueprints(controller, 4, fitting=("conv_light", "norm"))
        assert chosen == ["conv_light", "norm", "conv_light", "norm"]

    def test_penalties_halve_every_epoch_and_vanish(self) -> None:
        controller = heuristic()
        scene = seen(controller, SeedStage.TRAINING)
        scene.score, scene.slots[0].in_stage = 40.0, 5
        scene.act(controller)
        seen_penalties = []
        for _ in range(6):
            seen_penalties.append(controller.state_dict()["rows"][0]["penalties"])
            Scene(plateau=0).act(controller)
        light = blueprint_id("conv_light")
        expected = [[[light, value]] for value in (2.0, 1.0, 0.5, 0.25, 0.125)]
        assert seen_penalties == [*expected, []]


class TestLiveSeed:
    def test_germinated_advances(self) -> None:
        assert Scene(slots=[Slot(stage=SeedStage.GERMINATED, age=0)]).op(heuristic()) == ADVANCE

    def test_germinated_is_not_blamed_for_a_falling_score(self) -> None:
        controller = heuristic()
        scene = seen(controller, SeedStage.GERMINATED)
        scene.score, scene.slots[0].in_stage = 30.0, 9
        assert scene.op(controller) == ADVANCE

    def test_waits_where_advance_is_off(self) -> None:
        scene = Scene(
            slots=[Slot(stage=SeedStage.GERMINATED)], rules=RulesConfig(advance_allowed=False)
        )
        assert scene.op(heuristic()) == WAIT

    def test_the_first_live_seed_decides(self) -> None:
        slots = [
            Slot(stage=SeedStage.FOSSILIZED),
            Slot(stage=SeedStage.BLENDING, alpha=0.5, target=1.0, mode=AlphaMode.UP),
            Slot(stage=SeedStage.HOLDING, contribution=3.0, counterfactual_age=0),
        ]
        assert Scene(slots=slots).op(heuristic()) == WAIT
        slots[1] = Slot()
        action = Scene(slots=slots).act(heuristic())
        assert (action["op"], action["slot"]) == (FOSSILIZE, 2)

    def test_a_seed_on_its_way_out_is_left_alone(self) -> None:
        slot = Slot(stage=SeedStage.BLENDING, alpha=0.5, mode=AlphaMode.DOWN, in_stage=9)
        assert Scene(slots=[slot, Slot()]).op(heuristic()) == WAIT
        slot = Slot(stage=SeedStage.HOLDING, alpha=1.0, mode=AlphaMode.DOWN, in_stage=9)
        slot.contribution, slot.counterfactual_age = 3.0, 0
        assert Scene(slots=[slot, Slot()]).op(heuristic()) == WAIT

    def test_training_advances_until_the_gate_passes(self) -> None:
        controller = heuristic()
        scene = seen(controller, SeedStage.TRAINING)
        for epoch in range(1, 12):
            scene.slots[0].in_stage = epoch
            assert scene.op(controller) == ADVANCE
            scene.last_op, scene.last_success = ADVANCE, False

    @pytest.mark.parametrize(
        ("in_stage", "score", "op"),
        [(5, 57.9, PRUNE), (4, 40.0, ADVANCE), (5, 58.0, ADVANCE), (9, 90.0, ADVANCE)],
    )
    def test_training_is_pruned_for_harm_since_the_stage_began(
        self, in_stage: int, score: float, op: LifecycleOp
    ) -> None:
        controller = heuristic()
        scene = seen(controller, SeedStage.TRAINING, germination=70.0, start=60.0)
        scene.score, scene.slots[0].in_stage = 60.5, 1
        assert scene.op(controller) == ADVANCE  # the first look is not the baseline
        scene.score, scene.slots[0].in_stage = score, in_stage
        action = scene.act(controller)
        assert action["op"] == op
        if op == PRUNE:
            assert SPEED_TICKS[action["alpha_speed"]] == 0

    def test_waits_where_the_prune_is_illegal(self) -> None:
        controller = heuristic()
        scene = seen(controller, SeedStage.TRAINING)
        scene.rules = RulesConfig(min_prune_age=10)
        scene.score, scene.slots[0].in_stage, scene.slots[0].age = 30.0, 6, 6
        assert scene.op(controller) == WAIT
        assert controller.state_dict()["rows"][0]["penalties"] == []
        scene.slots[0].age = 10
        assert scene.op(controller) == PRUNE

    def test_blending_advances_at_full_amplitude_only(self) -> None:
        controller = heuristic()
        scene = seen(controller, SeedStage.BLENDING)
        slot = scene.slots[0]
        slot.mode, slot.alpha, slot.target = AlphaMode.UP, 0.9, 1.0
        assert scene.op(controller) == WAIT
        slot.alpha = 1.0
        assert scene.op(controller) == WAIT
        slot.mode, slot.alpha, slot.target = AlphaMode.HOLD, 0.7, 0.7
        assert scene.op(controller) == WAIT
        slot.alpha = 1.0
        assert scene.op(controller) == WAIT
        slot.alpha = slot.target = 1.0
        assert scene.op(controller) == ADVANCE

    def test_blending_is_pruned_for_harm_once_alpha_rests(self) -> None:
        controller = heuristic()
        scene = seen(controller, SeedStage.BLENDING, start=60.0)
        slot = scene.slots[0]
        scene.score, slot.in_stage = 50.0, 5
        slot.mode, slot.alpha, slot.target = AlphaMode.UP, 0.9, 1.0
        assert scene.op(controller) == WAIT
        slot.mode, slot.alpha = AlphaMode.HOLD, 1.0
        assert scene.op(controller) == PRUNE


class TestHolding:
    @staticmethod
    def holding(controller: HeuristicController, **slot: float) -> Scene:
        scene = seen(controller, SeedStage.HOLDING, germination=50.0)
        scene.score = 51.0
        for name, value in {"counterfactual_age": 0, **slot}.items():
            setattr(scene.slots[0], name, value)
        return scene

    @pytest.mark.parametrize(
        ("contribution", "op"), [(0.6, FOSSILIZE), (0.5, PRUNE), (0.0, PRUNE), (-3.0, PRUNE)]
    )
    def test_keeps_what_contributes(self, contribution: float, op: LifecycleOp) -> None:
        controller = heuristic()
        assert self.holding(controller, contribution=contribution).op(controller) == op
        if op == PRUNE:
            told = f"({contribution:+.2f} points; more than +0.50 is needed)"
            assert controller.reasons()[0].endswith(told)

    @pytest.mark.parametrize(("contribution", "score"), [(0.0, 51.0), (5.0, 49.9)])
    def test_a_seed_has_time_to_learn_before_it_is_pruned(
        self, contribution: float, score: float
    ) -> None:
        for age, op in ((2, WAIT), (14, WAIT), (15, PRUNE)):
            controller = heuristic()
            scene = self.holding(controller, contribution=contribution, age=age)
            scene.score = score
            assert scene.op(controller) == op

    def test_a_failed_gate_is_tried_again(self) -> None:
        controller = heuristic()
        scene = self.holding(controller, contribution=2.0)
        for _ in range(4):
            assert scene.op(controller) == FOSSILIZE
            scene.last_op, scene.last_success = FOSSILIZE, False

    def test_prunes_a_seed_that_holds_the_host_to_ransom(self) -> None:
        controller = heuristic()
        scene = self.holding(controller, contribution=5.0)
        scene.score = 49.9  # below the score at germination
        assert scene.op(controller) == PRUNE
        scene = self.holding(heuristic(), contribution=5.0)
        scene.score = 49.9
        controller = heuristic(ransom_contribution=6.0)
        seen(controller, SeedStage.HOLDING, germination=50.0)
        assert scene.op(controller) == FOSSILIZE

    def test_waits_for_a_measurement(self) -> None:
        controller = heuristic()
        scene = self.holding(controller, contribution=math.nan, counterfactual_age=-1)
        for epoch in range(1, 10):
            scene.slots[0].in_stage = epoch
            assert scene.op(controller) == WAIT
        scene.slots[0].contribution, scene.slots[0].counterfactual_age = 0.7, 0
        assert scene.op(controller) == FOSSILIZE

    @pytest.mark.parametrize(("score", "op"), [(50.6, FOSSILIZE), (50.4, PRUNE), (40.0, PRUNE)])
    def test_without_a_measurement_the_improvement_decides(
        self, score: float, op: LifecycleOp
    ) -> None:
        controller = heuristic()
        scene = self.holding(controller, contribution=math.nan, in_stage=10)
        scene.score = score
        assert scene.op(controller) == op

    def test_a_measurement_from_before_the_stage_is_too_old(self) -> None:
        controller = heuristic()
        scene = self.holding(controller, contribution=0.0, counterfactual_age=3, in_stage=2)
        assert scene.op(controller) == WAIT
        scene.slots[0].in_stage = 3
        assert scene.op(controller) == PRUNE

    def test_waits_where_the_prune_is_illegal(self) -> None:
        controller = heuristic()
        scene = self.holding(controller, contribution=0.0)
        scene.slots[0].mode = AlphaMode.UP
        assert scene.op(controller) == WAIT


class TestLossScores:
    """Gains of a negative loss count as shares of the loss at germination."""

    @pytest.mark.parametrize("unit", [1e-3, 1.0, 1e3])
    @pytest.mark.parametrize(("share", "op"), [(0.006, FOSSILIZE), (0.004, PRUNE), (-0.1, PRUNE)])
    def test_holding(self, unit: float, share: float, op: LifecycleOp) -> None:
        controller = heuristic()
        scene = seen(controller, SeedStage.HOLDING, germination=-2.0 * unit)
        scene.score = -1.9 * unit
        scene.slots[0].contribution = 2.0 * unit * share
        scene.slots[0].counterfactual_age = 0
        assert scene.op(controller) == op

    @pytest.mark.parametrize(("loss", "op"), [(2.03, ADVANCE), (2.05, PRUNE)])
    def test_training(self, loss: float, op: LifecycleOp) -> None:
        controller = heuristic()
        scene = seen(controller, SeedStage.TRAINING, germination=-2.0)
        scene.score, scene.slots[0].in_stage = -loss, 5
        assert scene.op(controller) == op


class TestMemory:
    def test_rows_have_their_own(self) -> None:
        """Three rows at different points of their lives act as three controllers would."""
        together = HeuristicController(CONTEXT)
        apart = [HeuristicController(CONTEXT) for _ in range(3)]
        together.reset(3, "cpu")
        for controller in apart:
            controller.reset(1, "cpu")
        stream = generator(11, "rows")
        for _ in range(60):
            signals, masks = random_signals(3, 3, stream)
            actions = together.act(signals, masks)
            for row, controller in enumerate(apart):
                only = slice(row, row + 1)
                alone = controller.act(take_rows(signals, only), take_rows(masks, only))
                assert all(int(alone[head]) == int(actions[head][row]) for head in actions)

    def test_survives_json(self) -> None:
        controller = heuristic()
        scene = seen(controller, SeedStage.TRAINING)
        scene.score, scene.slots[0].in_stage = 40.0, 5
        assert scene.op(controller) == PRUNE
        Scene(slots=[Slot(), Slot(stage=SeedStage.BLENDING)]).act(controller)
        state = controller.state_dict()
        restored = heuristic()
        restored.load_state_dict(json.loads(json.dumps(state)))
        assert restored.state_dict() == state

    def test_a_new_seed_in_an_old_slot_has_a_new_baseline(self) -> None:
        controller = heuristic()
        seen(controller, SeedStage.TRAINING, germination=90.0).act(controller)
        Scene(slots=[Slot(stage=SeedStage.PRUNED)], score=50.0).act(controller)
        scene = seen(controller, SeedStage.TRAINING, germination=50.0)
        scene.score, scene.slots[0].in_stage = 49.0, 6
        assert scene.op(controller) == ADVANCE

    def test_a_rollback_clears_the_row(self) -> None:
        controller = heuristic()
        scene = seen(controller, SeedStage.TRAINING)
        scene.score, scene.slots[0].in_stage = 40.0, 5
        assert scene.op(controller) == PRUNE
        action = Scene(rolled_back=True, epoch=21).act(controller)
        assert action["op"] == GERMINATE
        assert action["blueprint"] == blueprint_id("conv_light")

    def test_must_be_reset_for_the_rows_it_is_shown(self) -> None:
        with pytest.raises(UsageError, match=r"call reset\(1, device\) first"):
            Scene().act(HeuristicController(CONTEXT))


class TestConfig:
    def test_every_option_is_explained(self) -> None:
        assert all(text.endswith(".") for text in HeuristicConfig.describe().values())

    def test_is_checked(self) -> None:
        with pytest.raises(ConfigError, match=r"HeuristicConfig\.penalty_limit"):
            HeuristicConfig(penalty_limit=-1.0)

    def test_the_rotation_names_known_blueprints(self) -> None:
        with pytest.raises(UnknownNameError, match="did you mean 'conv_light'"):
            heuristic(rotation=("conv_lihgt",))

    def test_registered_blueprints_can_be_rotated(self) -> None:
        names = (*CONTEXT.blueprint_names, "mine")
        context = ControllerContext(slot_names=("a",), blueprint_names=names)
        HeuristicController(context, HeuristicConfig(rotation=("mine",)))


def test_a_whole_life() -> None:
    """Germinate, train, blend, hold and fossilize, then go on to the next slot."""
    controller = heuristic()
    slot, other = Slot(), Slot()
    scene = Scene(slots=[slot, other], score=50.0)
    assert scene.act(controller)["op"] == GERMINATE
    slot.stage, slot.age, scene.score, scene.plateau = SeedStage.GERMINATED, 1, 50.1, 0
    assert scene.op(controller) == ADVANCE
    slot.stage, slot.in_stage = SeedStage.TRAINING, 1
    assert scene.op(controller) == ADVANCE
    slot.stage, slot.mode, slot.alpha, slot.target = SeedStage.BLENDING, AlphaMode.UP, 0.2, 1.0
    assert scene.op(controller) == WAIT
    slot.mode, slot.alpha = AlphaMode.HOLD, 1.0
    assert scene.op(controller) == ADVANCE
    slot.stage, slot.contribution, slot.counterfactual_age = SeedStage.HOLDING, 2.0, 0
    scene.score = 53.0
    assert scene.op(controller) == FOSSILIZE
    slot.stage = SeedStage.FOSSILIZED
    assert scene.op(controller) == WAIT
    scene.plateau = 3
    action = scene.act(controller)
    assert (action["op"], action["slot"]) == (GERMINATE, 1)
    assert action["blueprint"] == blueprint_id("conv_heavy")


def observe(memory: RowMemory, score: float, stage: SeedStage) -> None:
    scene = Scene(slots=[Slot(stage=stage)], score=score)
    memory.observe(read_rows(scene.signals(), scene.masks())[0])


def test_baselines_are_the_scores_at_the_decisions_that_began_them() -> None:
    memory = RowMemory()
    observe(memory, 50.0, SeedStage.DORMANT)
    assert memory.seeds == {}
    observe(memory, 51.0, SeedStage.GERMINATED)
    observe(memory, 52.0, SeedStage.TRAINING)
    observe(memory, 53.0, SeedStage.TRAINING)
    seed = memory.seeds[0]
    assert (seed.germination_score, seed.stage_score) == (50.0, 51.0)
    observe(memory, 54.0, SeedStage.BLENDING)
    assert (seed.germination_score, seed.stage_score) == (50.0, 53.0)
    observe(memory, 55.0, SeedStage.FOSSILIZED)
    assert memory.seeds == {}


def test_a_seed_seen_first_is_measured_from_then_on() -> None:
    memory = RowMemory()
    observe(memory, 50.0, SeedStage.BLENDING)
    assert memory.seeds[0].germination_score == 50.0


def test_plain_data_comes_back() -> None:
    memory = RowMemory(last_prune=3, position=2, penalised_turns=1, penalties={4: 0.5})
    observe(memory, 50.0, SeedStage.BLENDING)
    assert RowMemory.from_plain(memory.to_plain()) == memory
    assert RowMemory.from_plain(RowMemory().to_plain()) == RowMemory()


def test_every_reason_has_a_figure() -> None:
    controller = heuristic()
    scene = seen(controller, SeedStage.BLENDING)
    scene.slots[0].alpha, scene.slots[0].target, scene.slots[0].in_stage = 0.4, 1.0, 2
    assert scene.op(controller) == WAIT
    assert controller.reasons() == [
        "a seed was developing (blending for 2 epochs, at 40% of full amplitude)"
    ]
    scene.epoch, scene.score, scene.slots[0].in_stage = 20, 40.0, 5
    assert scene.op(controller) == PRUNE
    assert controller.reasons() == ["it did harm (-10.00 points in 5 epochs)"]
    assert Scene(epoch=21).op(controller) == WAIT
    assert controller.reasons() == ["a seed had just been pruned (epoch 20)"]
    cooling = Scene(epoch=30, slots=[Slot(), Slot(stage=COOLDOWN_STAGES[0])])
    assert cooling.op(controller) == WAIT
    assert controller.reasons() == ["a seed had just been pruned (1 of 2 slots cooling down)"]
