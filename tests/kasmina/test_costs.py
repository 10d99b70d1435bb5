"""What a seed would cost, and what fits within the limits of growth."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from esper.kasmina.blueprints.registry import (
    BLUEPRINTS,
    blueprint_names,
    register_blueprint,
    selectable,
)
from esper.kasmina.costs import (
    NO_LIMIT,
    SlotCosts,
    fitting_blueprints,
    gate_flops,
    gate_parameters,
    row_costs,
    seed_flops,
    seed_parameters,
    slot_costs,
    slot_flops,
)
from esper.kasmina.flops import count_flops
from esper.kasmina.garden import Garden
from esper.kasmina.slot import GateNetwork, Slot
from esper.kasmina.state import SlotState, empty_state
from esper.leyline.actions import LifecycleOp
from esper.leyline.errors import EsperWarning
from esper.leyline.rules import Refusal
from esper.leyline.slots import TOPOLOGIES, USUAL_AXES, Topology
from esper.leyline.stages import AlphaAlgorithm, SeedStage
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


@pytest.mark.parametrize(
    ("topology", "shape"), [("vector", (1, 4)), ("sequence", (1, 6, 8)), ("cnn", (1, 8, 5, 4))]
)
def test_what_costs_say_is_what_networks_have(topology: Topology, shape: tuple[int, ...]) -> None:
    slot = Slot("a", USUAL_AXES[topology], (3, *shape[1:]))
    costs = slot_costs([slot])
    gate = GateNetwork(slot.channels, topology)
    assert int(costs.slot_channels) == slot.channels
    assert int(costs.slot_positions) == {"vector": 1, "sequence": 6, "cnn": 20}[topology]
    assert TOPOLOGIES[int(costs.slot_topology)] == topology
    assert int(costs.gate_params) == sum(p.numel() for p in gate.parameters())
    assert int(costs.gate_flops) == flops_of(gate, shape) > 0
    for choice, name in enumerate(blueprint_names()):
        if choice not in selectable(topology):
            assert int(costs.seed_params[0, choice]) == int(costs.seed_flops[0, choice]) == -1
            continue
        seed = BLUEPRINTS.get(name).build(slot.channels, topology)
        size = sum(p.numel() for p in seed.parameters() if p.requires_grad)
        assert int(costs.seed_params[0, choice]) == size + int(costs.gate_params), name
        used = flops_of(seed, shape) + int(costs.gate_flops)
        assert int(costs.seed_flops[0, choice]) == used, name


def flops_of(module: nn.Module, shape: tuple[int, ...]) -> int:
    """Counted on real numbers."""
    return count_flops(module, torch.randn(shape)).total


def test_attention_counts_on_a_cpu_as_it_does_without_numbers() -> None:
    attention = BLUEPRINTS.get("attention")
    seed = attention.build(8, "sequence")
    # Four projections, and two products of every token with every token.
    expected = 2 * (4 * 6 * 8 * 8 + 2 * 6 * 6 * 8)
    assert flops_of(seed, (1, 6, 8)) == expected == seed_flops(attention, "sequence", (1, 6, 8))


class Exponential(nn.Module):
    """Multiplies by an exponential, which has no formula."""

    def __init__(self, channels: int, topology: Topology) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(channels, channels))

    def forward(self, x: Tensor) -> Tensor:
        return x @ torch.linalg.matrix_exp(self.weight)


def test_a_seed_whose_operations_cannot_be_counted_is_named() -> None:
    register_blueprint("exponential", topologies=("vector",))(Exponential)
    try:
        with pytest.warns(
            EsperWarning,
            match="aten::linalg_matrix_exp in blueprint 'exponential' cannot be counted: limits",
        ):
            costs = slot_costs([Slot("a", "BC", (2, 4))])
        seed = BLUEPRINTS.get("exponential")
        assert int(costs.seed_flops[0, seed.id] - costs.gate_flops) == 2 * 4 * 4
    finally:
        BLUEPRINTS.unregister("exponential")


def rows_of(blueprints: list[list[int]], algorithm: AlphaAlgorithm) -> SlotState:
    """Rows with holding seeds of these blueprints, -1 for none."""
    chosen = torch.tensor(blueprints)
    state = empty_state(*chosen.shape)
    return state.where(
        chosen >= 0,
        stage=torch.full_like(chosen, int(SeedStage.HOLDING)),
        blueprint=chosen,
        algorithm=torch.full_like(chosen, int(algorithm)),
    )


def fits_of(state: SlotState, costs: SlotCosts, **limits: list[int]) -> Tensor:
    """What fits hosts of 100 parameters and 1000 operations."""
    tensors = {name: torch.tensor(value) for name, value in limits.items()}
    rows = row_costs(state.rows, costs, host_params=100, host_flops=1_000, **tensors)
    return fitting_blueprints(state, rows)


def test_without_limits_everything_for_the_topology_fits() -> None:
    slots = [Slot("a", "BC", (2, 4)), Slot("b", "BCHW", (2, 4, 3, 3))]
    fits = fits_of(empty_state(2, 2), slot_costs(slots))
    for index, slot in enumerate(slots):
        assert fits[0, index].nonzero().flatten().tolist() == list(selectable(slot.topology))
    assert torch.equal(fits[0], fits[1])


@pytest.mark.parametrize("what", ["param", "flop"])
def test_a_limit_lets_in_exactly_what_fits_row_by_row(what: str) -> None:
    costs = slot_costs([Slot("a", "BC", (2, 4))])
    host, table = (100, costs.seed_params) if what == "param" else (1_000, costs.seed_flops)
    needed = int(table[0, LORA.id])
    limits = [host + needed - 1, host + needed, NO_LIMIT]
    fits = fits_of(empty_state(3, 1), costs, **{f"{what}_limit": limits})
    assert fits[:, 0, LORA.id].tolist() == [False, True, True]
    for choice in selectable("vector"):
        assert bool(fits[0, 0, choice]) == (int(table[0, choice]) < needed)


@pytest.mark.parametrize("algorithm", [AlphaAlgorithm.ADD, AlphaAlgorithm.GATE])
def test_a_limit_of_operations_counts_what_has_grown_and_every_gate(
    algorithm: AlphaAlgorithm,
) -> None:
    costs = slot_costs([Slot("a", "BC", (2, 4)), Slot("b", "BC", (2, 4))])
    one = seed_flops(LORA, "vector", (2, 4)) + gate_flops("vector", (2, 4))
    state = rows_of([[LORA.id, -1], [LORA.id, -1]], algorithm)
    fits = fits_of(state, costs, flop_limit=[1_000 + 2 * one - 1, 1_000 + 2 * one])
    assert fits[:, 1, LORA.id].tolist() == [False, True]
    has_gate = algorithm is AlphaAlgorithm.GATE
    grown = seed_flops(LORA, "vector", (2, 4)) + has_gate * gate_flops("vector", (2, 4))
    assert slot_flops(state, costs).tolist() == [[grown, 0]] * 2


def test_a_garden_never_grows_beyond_its_parameters_even_when_a_gate_is_added_later() -> None:
    size = seed_parameters(LORA, 4, "vector")
    limit = stack_garden().count_parameters() + size
    garden = stack_garden(max_parameters=limit)
    bring(garden, "a", SeedStage.BLENDING, "lora")
    # The room of its gate stays reserved: nothing else fits.
    result = garden.germinate("b", "norm")
    assert not result
    assert Refusal.NOTHING_FITS.text in result.reason
    assert not bool(garden.table.masks().op[0, LifecycleOp.GERMINATE])
    assert garden.set_alpha_target("a", 0.5, speed=0, style="gated_gate")
    assert garden.count_parameters() == limit


def test_a_garden_says_that_a_blueprint_does_not_fit() -> None:
    garden = stack_garden(max_parameters=stack_garden().count_parameters() + 100)
    assert not garden.germinate("a", "mlp")
    assert Refusal.BLUEPRINT_DOES_NOT_FIT.text in garden.germinate("a", "mlp").reason
    assert garden.germinate("a", "norm")


def test_a_garden_never_uses_more_operations_than_allowed() -> None:
    gate = gate_flops("vector", (2, 4))
    one = seed_flops(LORA, "vector", (2, 4)) + gate
    # A norm costs no multiplications that are counted, but the gate it may be given does.
    garden = stack_garden(max_added_flops=one + gate)
    host = garden.count_flops()
    assert host == garden.host_flops > 0
    bring(garden, "a", SeedStage.BLENDING, "lora")
    refused = garden.germinate("b", "lora")
    assert Refusal.BLUEPRINT_DOES_NOT_FIT.text in refused.reason
    assert garden.germinate("b", "norm")
    assert garden.set_alpha_target("a", 0.5, speed=0, style="gated_gate")
    assert garden.count_flops() == host + one


def test_frozen_host_parameters_do_not_count() -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    for parameter in model[0].parameters():
        parameter.requires_grad_(False)
    garden = Garden(model, ["1"], torch.zeros(2, 4), config=quick_config())
    assert garden.count_parameters() == garden.count_host_parameters() == 20


@pytest.mark.parametrize("limit", ["max_parameters", "max_added_flops"])
def test_zero_is_no_limit(limit: str) -> None:
    garden = stack_garden(**{limit: 0})
    assert bool(garden.table.fits()[0, 0, list(selectable("vector"))].all())
