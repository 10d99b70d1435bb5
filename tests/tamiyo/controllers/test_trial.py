from __future__ import annotations

import json
from dataclasses import replace

import pytest

from esper.leyline.actions import LifecycleOp
from esper.leyline.errors import ConfigError, UnknownNameError
from esper.leyline.stages import COOLDOWN_STAGES, SeedStage
from esper.tamiyo.controllers.trial import TrialConfig, TrialController, middle_first
from tests.tamiyo.controllers.scenes import CONTEXT, Scene, Slot, blueprint_id

WAIT, GERMINATE = LifecycleOp.WAIT, LifecycleOp.GERMINATE
ADVANCE, PRUNE, FOSSILIZE = LifecycleOp.ADVANCE, LifecycleOp.PRUNE, LifecycleOp.FOSSILIZE


def rule(**options: object) -> TrialController:
    controller = TrialController(CONTEXT, TrialConfig(**options))
    controller.reset(1, "cpu")
    return controller


def held(**options: object) -> Scene:
    """Return a scene whose middle slot has a seed at full amplitude."""
    options = {"contribution": 2.0, "counterfactual_age": 0, "in_stage": 1, **options}
    seed = Slot(stage=SeedStage.HOLDING, alpha=1.0, target=1.0, **options)  # type: ignore[arg-type]
    return Scene(slots=[Slot(), seed, Slot()])


@pytest.mark.parametrize(
    ("slots", "order"), [(1, [0]), (2, [1, 0]), (3, [1, 0, 2]), (4, [2, 1, 3, 0])]
)
def test_slots_nearest_the_middle_come_first(slots: int, order: list[int]) -> None:
    assert middle_first(slots) == order


class TestGermination:
    def test_of_the_first_blueprint_that_fits_in_the_middle(self) -> None:
        action = Scene(plateau=0, stabilized=False).act(rule())
        assert (action["op"], action["slot"]) == (GERMINATE, 1)
        assert action["blueprint"] == blueprint_id("conv_heavy")
        assert Scene(topology="sequence").act(rule())["blueprint"] == blueprint_id("mlp")

    @pytest.mark.parametrize(
        ("epoch", "op", "why"),
        [(7, WAIT, "too early"), (8, GERMINATE, ""), (36, GERMINATE, ""), (37, WAIT, "too few")],
    )
    def test_within_a_part_of_the_run(self, epoch: int, op: LifecycleOp, why: str) -> None:
        controller = rule()
        assert Scene(epoch=epoch).op(controller) == op
        assert why in controller.reasons()[0]
        assert "left)" in controller.reasons()[0] or not why

    def test_late_where_the_seed_is_at_full_amplitude_at_once(self) -> None:
        known = tuple(name in ("mlp", "lora") for name in CONTEXT.blueprint_names)
        context = replace(CONTEXT, inert_epochs=3, immediate=(known,) * 3)
        scene = Scene(epoch=2, horizon=4, is_frozen=True)
        for topology, op in (("cnn", WAIT), ("sequence", GERMINATE)):
            controller = TrialController(context)
            controller.reset(1, "cpu")
            scene.topology = topology
            assert scene.op(controller) == op
        controller = TrialController(replace(CONTEXT, inert_epochs=3))
        controller.reset(1, "cpu")
        assert scene.op(controller) == WAIT
        assert "too few epochs were left" in controller.reasons()[0]

    def test_at_once_in_a_frozen_host(self) -> None:
        assert Scene(epoch=1, is_frozen=True).op(rule()) == GERMINATE

    def test_in_a_frozen_host_of_what_can_be_immediate_first(self) -> None:
        known = tuple(name in ("bottleneck", "norm", "mlp") for name in CONTEXT.blueprint_names)
        none = (False,) * len(known)
        controller = TrialController(replace(CONTEXT, immediate=(known, none, known)))
        controller.reset(1, "cpu")

        def next_seed(**options: object) -> tuple[int, str]:
            action = Scene(**options).act(controller)  # type: ignore[arg-type]
            return int(action["slot"]), CONTEXT.blueprint_names[int(action["blueprint"])]

        # Not the middle slot, where nothing can be immediate.
        assert next_seed(is_frozen=True) == (0, "bottleneck")
        assert next_seed(is_frozen=True, fitting=("norm", "conv_light")) == (0, "norm")
        assert next_seed(is_frozen=True, fitting=("conv_light",)) == (1, "conv_light")
        # A blueprint of the rule's own list that can be immediate is enough.
        assert next_seed(is_frozen=True, topology="sequence") == (0, "mlp")
        assert next_seed(is_frozen=True, topology="sequence", fitting=("norm",)) == (0, "norm")
        assert next_seed() == (1, "conv_heavy")
        # Such seeds start slowly.
        assert next_seed(is_frozen=True, epoch=1, horizon=15) == (1, "conv_heavy")
        assert next_seed(is_frozen=True, epoch=1, horizon=16) == (0, "bottleneck")

    @pytest.mark.parametrize("stage", COOLDOWN_STAGES)
    def test_not_while_a_slot_cools_down(self, stage: SeedStage) -> None:
        assert Scene(slots=[Slot(), Slot(stage=stage)]).op(rule()) == WAIT

    def test_not_beyond_the_seeds_that_it_keeps(self) -> None:
        fossil = Slot(stage=SeedStage.FOSSILIZED, alpha=1.0)
        one, two = [Slot(), fossil, Slot()], [fossil, fossil, Slot()]
        assert Scene(slots=one).act(rule())["slot"] == 0
        controller = rule()
        assert Scene(slots=two).op(controller) == WAIT
        assert controller.reasons() == ["no slot could take a seed (this rule keeps 2)"]

    def test_waits_where_nothing_fits(self) -> None:
        assert Scene(fitting=("norm",)).op(rule()) == WAIT


class TestJudging:
    @pytest.mark.parametrize(
        ("contribution", "se", "op"),
        [
            (2.0, 0.5, FOSSILIZE),
            (0.6, 0.0, FOSSILIZE),
            (0.4, 0.0, PRUNE),
            (2.0, 1.5, PRUNE),
            (-1.0, 0.1, PRUNE),
        ],
    )
    def test_what_contributes_is_kept(
        self, contribution: float, se: float, op: LifecycleOp
    ) -> None:
        controller = rule()
        assert held(contribution=contribution, se=se).op(controller) == op
        if op == PRUNE:
            needed = max(0.5, 2 * se)
            told = f"({contribution:+.2f} ± {se:.2f} points; more than {needed:+.2f} is needed)"
            assert controller.reasons()[0].endswith(told)

    @pytest.mark.parametrize(("age", "op"), [(2, WAIT), (14, WAIT), (15, PRUNE)])
    def test_a_seed_has_time_to_learn_before_it_is_pruned(self, age: int, op: LifecycleOp) -> None:
        controller = rule()
        assert held(contribution=0.0, age=age).op(controller) == op
        assert held(contribution=2.0, age=age).op(controller) == FOSSILIZE

    @pytest.mark.parametrize(("age", "op"), [(4, WAIT), (14, WAIT), (15, PRUNE)])
    def test_short_runs_leave_seeds_in_a_frozen_host_as_much_time(
        self, age: int, op: LifecycleOp
    ) -> None:
        scene = held(contribution=0.0, age=age)
        scene.horizon, scene.is_frozen = 20, True
        assert scene.op(rule()) == op
        scene.is_frozen = False
        assert scene.op(rule()) == (WAIT if age < 5 else PRUNE)

    @pytest.mark.parametrize(("score", "op"), [(-1.0, FOSSILIZE), (-100.0, PRUNE)])
    def test_losses_count_as_shares_of_themselves(self, score: float, op: LifecycleOp) -> None:
        scene = held(contribution=0.02)
        scene.score = score
        controller = rule()
        assert scene.op(controller) == op
        if op == PRUNE:
            assert "(+0.02 ± 0.00 % of the loss; more than +0.50 " in controller.reasons()[0]

    def test_it_waits_for_an_ablation_at_full_amplitude(self) -> None:
        controller = rule(measurement_epochs=4)
        assert held(counterfactual_age=3).op(controller) == WAIT
        assert held(counterfactual_age=9, in_stage=4).op(controller) == PRUNE
        assert "not measured in 4 epochs" in controller.reasons()[0]

    def test_what_was_pruned_is_not_tried_there_again(self) -> None:
        controller = rule()
        assert held(contribution=0.0, blueprint="conv_heavy").op(controller) == PRUNE
        action = Scene().act(controller)
        assert (action["slot"], action["blueprint"]) == (1, blueprint_id("conv_light"))
        assert Scene(rolled_back=True).act(controller)["blueprint"] == blueprint_id("conv_heavy")

    def test_seeds_on_their_way_are_advanced(self) -> None:
        training = Slot(stage=SeedStage.TRAINING)
        assert Scene(slots=[training]).op(rule()) == ADVANCE


def test_its_memory_is_plain_data() -> None:
    controller, other = rule(), rule()
    assert held(contribution=0.0, blueprint="conv_heavy").op(controller) == PRUNE
    other.load_state_dict(json.loads(json.dumps(controller.state_dict())))
    assert Scene().act(other) == Scene().act(controller)


def test_unknown_constants_are_refused() -> None:
    with pytest.raises(UnknownNameError, match="did you mean 'conv_heavy'"):
        rule(blueprints=("conv_hevy",))
    with pytest.raises(ConfigError, match="seeds"):
        TrialConfig(seeds=0)
