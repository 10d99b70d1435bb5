"""Operations by hand: names in, a command out; seeds at full amplitude from the first step."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from esper.kasmina.blueprints.kin import KIN
from esper.kasmina.blueprints.registry import blueprint_names
from esper.kasmina.operations import make_command, parse_choice
from esper.leyline.actions import LifecycleOp
from esper.leyline.errors import UnknownNameError, UsageError
from esper.leyline.stages import (
    STYLE_OF_ALGORITHM,
    STYLE_SPECS,
    AlphaAlgorithm,
    AlphaCurve,
    BlendStyle,
    SeedStage,
)
from tests.kasmina.gardens import Stack, stack_garden


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


def test_choices_are_found_by_name_in_any_case_or_by_themselves() -> None:
    assert parse_choice(BlendStyle, "Gated_Gate", "style") is BlendStyle.GATED_GATE
    assert parse_choice(AlphaCurve, AlphaCurve.COSINE, "curve") is AlphaCurve.COSINE


def test_a_wrong_choice_names_the_nearest() -> None:
    with pytest.raises(UnknownNameError, match="unknown style 'linearadd', did you mean"):
        parse_choice(BlendStyle, "linearadd", "style")
    with pytest.raises(UsageError, match="curve must be one of linear, cosine"):
        parse_choice(AlphaCurve, 1, "curve")  # type: ignore[arg-type]


@pytest.mark.parametrize("algorithm", AlphaAlgorithm)
def test_the_style_of_an_algorithm_goes_on_with_it(algorithm: AlphaAlgorithm) -> None:
    assert STYLE_SPECS[STYLE_OF_ALGORITHM[algorithm]].algorithm is algorithm


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


def test_what_is_immediate_follows_what_is_frozen_later() -> None:
    model = Stack()
    garden = stack_garden(model)
    before = garden.table.immediate.clone()
    freeze(model.b)
    after = garden.table.immediate
    assert torch.equal(after[0], before[0])
    assert int(after[1].sum()) > int(before[1].sum())


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
