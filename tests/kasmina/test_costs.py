"""What a seed would cost, and what fits within the limits of growth."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from esper.kasmina.blending import GateNetwork
from esper.kasmina.blueprints.registry import BLUEPRINTS, blueprint_by_id, selectable
from esper.kasmina.costs import fitting_blueprints, gate_parameters, seed_flops, seed_parameters
from esper.kasmina.garden import Garden
from esper.kasmina.slot import Slot
from esper.leyline.actions import LifecycleOp
from esper.leyline.rules import REFUSAL_TEXTS, Refusal
from esper.leyline.stages import SeedStage
from tests.kasmina.gardens import bring, quick_config, stack_garden

LORA = BLUEPRINTS.get("lora")


def gate_size(channels: int) -> int:
    return sum(p.numel() for p in GateNetwork(channels, "vector").parameters())


def test_a_seed_costs_its_own_parameters_and_room_for_a_gate() -> None:
    assert gate_parameters(4, "vector") == gate_size(4)
    assert seed_parameters(LORA, 4, "vector") == 16 * 4 + gate_size(4)


def test_operations_are_counted_per_sample() -> None:
    # Two matrices, a multiplication and an addition each; the batch does not count.
    assert seed_flops(LORA, "vector", (32, 4)) == 2 * 2 * 4 * 8
    assert seed_flops(LORA, "vector", (1, 4)) == seed_flops(LORA, "vector", (32, 4))
    conv = BLUEPRINTS.get("conv_light")
    assert seed_flops(conv, "cnn", (8, 4, 5, 5)) == 2 * 9 * 4 * 4 * 25


def test_without_limits_everything_for_the_topology_fits() -> None:
    slots = [Slot("a", "vector", (2, 4)), Slot("b", "cnn", (2, 4, 3, 3))]
    fits = fitting_blueprints(slots, [-1, -1], parameters=None, flops=None)
    for index, slot in enumerate(slots):
        assert fits[0, index].nonzero().flatten().tolist() == list(selectable(slot.topology))
    assert not bool(fits[0, :, 0].any())


def test_a_limit_of_parameters_lets_in_exactly_what_fits() -> None:
    slots = [Slot("a", "vector", (2, 4))]
    size = seed_parameters(LORA, 4, "vector")
    for room, fitting in ((size - 1, False), (size, True)):
        fits = fitting_blueprints(slots, [-1], parameters=room, flops=None)
        assert bool(fits[0, 0, LORA.id]) is fitting
        for choice in selectable("vector"):
            needed = seed_parameters(blueprint_by_id(choice), 4, "vector")
            assert bool(fits[0, 0, choice]) == (needed <= room)


def test_a_limit_of_operations_counts_what_has_grown_already() -> None:
    slots = [Slot("a", "vector", (2, 4)), Slot("b", "vector", (2, 4))]
    one = seed_flops(LORA, "vector", (2, 4))
    for limit, fitting in ((2 * one - 1, False), (2 * one, True)):
        fits = fitting_blueprints(slots, [LORA.id, -1], parameters=None, flops=limit)
        assert bool(fits[0, 1, LORA.id]) is fitting


def test_a_garden_never_grows_beyond_its_parameters_even_when_a_gate_is_added_later() -> None:
    size = seed_parameters(LORA, 4, "vector")
    limit = stack_garden().count_parameters() + size
    garden = stack_garden(max_parameters=limit)
    bring(garden, "a", SeedStage.BLENDING, "lora")
    # The room of its gate stays reserved: nothing else fits.
    result = garden.germinate("b", "norm")
    assert not result
    assert REFUSAL_TEXTS[Refusal.NOTHING_FITS] in result.reason
    assert not bool(garden.masks().op[0, LifecycleOp.GERMINATE])
    assert garden.set_alpha_target("a", 0.5, speed=0, style="gated_gate")
    assert garden.count_parameters() == limit


def test_a_garden_says_that_a_blueprint_does_not_fit() -> None:
    garden = stack_garden(max_parameters=stack_garden().count_parameters() + 100)
    assert not garden.germinate("a", "mlp")
    assert REFUSAL_TEXTS[Refusal.BLUEPRINT_DOES_NOT_FIT] in garden.germinate("a", "mlp").reason
    assert garden.germinate("a", "norm")


def test_a_garden_never_uses_more_operations_than_allowed() -> None:
    one = seed_flops(LORA, "vector", (2, 4))
    garden = stack_garden(max_added_flops=one)
    bring(garden, "a", SeedStage.BLENDING, "lora")
    assert not garden.germinate("b", "lora")
    # A norm costs no multiplications that are counted.
    assert garden.germinate("b", "norm")


def test_frozen_host_parameters_do_not_count() -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    for parameter in model[0].parameters():
        parameter.requires_grad_(False)
    garden = Garden(model, ["1"], torch.zeros(2, 4), config=quick_config())
    assert garden.count_parameters() == garden.count_host_parameters() == 20


@pytest.mark.parametrize("limit", ["max_parameters", "max_added_flops"])
def test_zero_is_no_limit(limit: str) -> None:
    garden = stack_garden(**{limit: 0})
    assert bool(garden.fits()[0, 0, list(selectable("vector"))].all())
