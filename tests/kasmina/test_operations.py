"""Operations by hand: names in, a command out, a result in words."""

from __future__ import annotations

import math

import pytest
import torch
from torch import nn

from esper.kasmina.blueprints.kin import KIN
from esper.kasmina.blueprints.registry import blueprint_names
from esper.kasmina.lifecycle import Applied, Outcome
from esper.kasmina.operations import (
    OperationResult,
    check_number,
    check_target,
    describe_result,
    make_command,
    parse_choice,
)
from esper.kasmina.slots.placement import Placement
from esper.kasmina.state import GateConfig, describe_failure, empty_state
from esper.leyline.actions import LifecycleOp
from esper.leyline.errors import SlotError, UnknownNameError, UsageError
from esper.leyline.rules import Refusal
from esper.leyline.stages import (
    STYLE_OF_ALGORITHM,
    STYLE_SPECS,
    AlphaAlgorithm,
    AlphaCurve,
    BlendStyle,
    SeedStage,
)
from tests.kasmina.gardens import Stack, bring, measure, stack_garden
from tests.plots import record_epoch


def applied(outcome: Outcome, refusal: Refusal = Refusal.NONE) -> Applied:
    return Applied(torch.tensor([int(outcome)]), torch.tensor([int(refusal)]))


def test_a_command_has_one_row_of_values() -> None:
    command = make_command(
        LifecycleOp.SET_ALPHA_TARGET,
        2,
        style=BlendStyle.GATED_GATE,
        target=0.7,
        speed=3,
        curve=AlphaCurve.COSINE,
    )
    assert command.op.tolist() == [LifecycleOp.SET_ALPHA_TARGET]
    assert command.slot.tolist() == [2]
    assert command.algorithm.tolist() == [AlphaAlgorithm.GATE]
    assert command.ramp.tolist() == [AlphaCurve.LINEAR]
    assert command.target.tolist() == [0.7]
    assert command.target.dtype == torch.float64
    assert command.speed.tolist() == [3]
    assert command.curve.tolist() == [AlphaCurve.COSINE]


def test_without_a_style_a_command_has_the_placeholder() -> None:
    command = make_command(LifecycleOp.GERMINATE, 0)
    assert command.algorithm.tolist() == [AlphaAlgorithm.ADD]
    assert command.ramp.tolist() == [AlphaCurve.SIGMOID]


def describe(op: LifecycleOp, outcome: Outcome, refusal: Refusal = Refusal.NONE) -> OperationResult:
    return describe_result(
        empty_state(1, 2),
        make_command(op, 1),
        applied(outcome, refusal),
        [Placement(name, name, "BC", (2, 4), "bidirectional") for name in ("head", "stem")],
        GateConfig(),
    )


def test_what_took_effect_is_true_and_has_no_reason() -> None:
    result = describe(LifecycleOp.PRUNE, Outcome.DONE)
    assert result
    assert result.ok
    assert (result.op, result.slot, result.reason) == (LifecycleOp.PRUNE, "stem", "")


@pytest.mark.parametrize("refusal", [refusal for refusal in Refusal if refusal])
def test_every_refusal_is_said_in_words(refusal: Refusal) -> None:
    result = describe(LifecycleOp.ADVANCE, Outcome.ILLEGAL, refusal)
    assert not result
    assert result.reason == f"ADVANCE at stem: {refusal.text}"
    assert "\n" not in result.reason


@pytest.mark.parametrize("op", [LifecycleOp.GERMINATE, LifecycleOp.ADVANCE, LifecycleOp.FOSSILIZE])
def test_a_closed_gate_is_said_in_words(op: LifecycleOp) -> None:
    result = describe(op, Outcome.GATE_FAILED)
    assert not result.ok
    assert (
        result.reason
        == f"{op.name} at stem: {describe_failure(empty_state(1, 2), 1, GateConfig())}"
    )


def test_choices_are_found_by_name_in_any_case_or_by_themselves() -> None:
    assert parse_choice(BlendStyle, "Gated_Gate", "style") is BlendStyle.GATED_GATE
    assert parse_choice(AlphaCurve, AlphaCurve.COSINE, "curve") is AlphaCurve.COSINE


def test_a_wrong_choice_names_the_nearest() -> None:
    with pytest.raises(UnknownNameError, match="unknown style 'linearadd', did you mean"):
        parse_choice(BlendStyle, "linearadd", "style")
    with pytest.raises(UsageError, match="curve must be one of linear, cosine"):
        parse_choice(AlphaCurve, 1, "curve")  # type: ignore[arg-type]


@pytest.mark.parametrize("value", [0, 1, 0.5])
def test_numbers_within_their_range_pass(value: float) -> None:
    check_number("x", value, 0, 1)


@pytest.mark.parametrize("value", [-0.1, 1.1, math.nan, math.inf, "1", None, True])
def test_numbers_out_of_range_are_refused(value: float) -> None:
    with pytest.raises(UsageError, match="x must be 0 to 1, got"):
        check_number("x", value, 0, 1)


def test_an_open_range_says_so() -> None:
    with pytest.raises(UsageError, match="tempo must be 1 or more, got 0"):
        check_number("tempo", 0, 1)


@pytest.mark.parametrize("value", [1.5, 2.0, math.inf, math.nan, True, "2"])
def test_whole_numbers_are_not_rounded_in_silence(value: float) -> None:
    with pytest.raises(UsageError, match="tempo must be a whole number, 1 or more, got"):
        check_number("tempo", value, 1, whole=True)
    check_number("tempo", 3, 1, whole=True)


@pytest.mark.parametrize("algorithm", AlphaAlgorithm)
def test_the_style_of_an_algorithm_goes_on_with_it(algorithm: AlphaAlgorithm) -> None:
    assert STYLE_SPECS[STYLE_OF_ALGORITHM[algorithm]].algorithm is algorithm


def test_an_amplitude_to_aim_at_is_above_0_and_at_most_1() -> None:
    check_target(0.01)
    check_target(1)
    with pytest.raises(SlotError, match="prune the seed to take it out"):
        check_target(0.0)
    with pytest.raises(UsageError, match="alpha_target must be 0 to 1, got"):
        check_target(1.5)


def test_an_empty_slot() -> None:
    view = stack_garden().slots["a"]
    assert (view.name, view.axes) == ("a", "BC")
    assert (view.stage, view.blueprint, view.alpha) == (SeedStage.DORMANT, None, 0.0)
    assert (view.parameters, view.age, view.epochs_in_stage) == (0, 0, 0)
    assert view.contribution is None
    assert view.contribution_se is None
    assert repr(view) == "<slot a: DORMANT>"


def test_a_grown_slot() -> None:
    garden = stack_garden()
    view = garden.slots["b"]
    bring(garden, "b", SeedStage.HOLDING, "lora", style="gated_gate")
    measure(garden, "b", 1.5)
    assert (view.stage, view.blueprint) == (SeedStage.HOLDING, "lora")
    assert (view.alpha, view.alpha_target) == (1.0, 1.0)
    assert view.parameters == sum(p.numel() for p in garden.slot_parameters("b"))
    assert view.contribution == 1.5
    assert view.contribution_se is None
    assert repr(view) == "<slot b: HOLDING, lora, alpha=1.00>"


def test_a_view_follows_its_garden() -> None:
    garden = stack_garden()
    view = garden.slots["a"]
    bring(garden, "a", SeedStage.TRAINING)
    record_epoch(garden, 50.0)
    assert (view.stage, view.age, view.epochs_in_stage) == (SeedStage.TRAINING, 1, 1)


# -- seeds that are at full amplitude from the first step ------------------------------------------


def freeze(model: nn.Module) -> None:
    for parameter in model.parameters():
        parameter.requires_grad_(False)


def adapters(model: nn.Module, rule: str = "auto") -> list[list[str]]:
    """Return, for every slot, the blueprints that are immediate there."""
    garden = stack_garden(model, lifecycle={"immediate": rule})
    names = blueprint_names()
    return [[names[i] for i in row.nonzero().flatten()] for row in garden.table.immediate]


def test_in_frozen_parts_of_a_model_what_starts_as_the_identity_is_immediate() -> None:
    model = Stack()
    assert adapters(model) == [[KIN]] * 3
    freeze(model.a)
    first, *others = adapters(model)
    assert {"lora", "lora_large", "mlp", "norm", KIN} <= set(first)
    assert others == [[KIN]] * 2
    assert adapters(model, "none") == [[]] * 3
    assert adapters(model, "all") == [first] * 3


def test_an_adapter_learns_from_the_loss_in_the_first_step() -> None:
    model = Stack()
    freeze(model)
    garden = stack_garden(model)
    x = torch.randn(8, 4)
    before = garden(x)
    assert garden.germinate("b", "lora")
    view = garden.slots["b"]
    assert (view.stage, view.alpha) == (SeedStage.BLENDING, 1.0)
    assert torch.equal(garden(x), before), "it changes nothing at its start"
    optimizer = torch.optim.SGD(garden.slot_parameters("b"), lr=0.1)
    loss = (garden(x) - torch.randn(8, 4)).square().mean()
    loss.backward()
    optimizer.step()
    assert not torch.equal(garden(x), before)
    assert garden.advance("b")
    assert view.stage is SeedStage.HOLDING


def test_a_seed_is_asked_to_be_immediate_in_any_model() -> None:
    garden = stack_garden()
    assert garden.germinate("a", "mlp", immediate=True)
    assert garden.slots["a"].alpha == 1.0
    model = Stack()
    freeze(model)
    garden = stack_garden(model)
    assert garden.germinate("a", "mlp", immediate=False)
    assert garden.slots["a"].stage is SeedStage.GERMINATED
