"""The registry of blueprints: names, ids, topologies, and the how-to page."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from esper.kasmina.blueprints import (
    BLUEPRINTS,
    blueprint_by_id,
    blueprint_names,
    count_parameters,
    register_blueprint,
    selectable,
)
from esper.leyline.errors import UnknownNameError, UsageError
from esper.leyline.slots import BUILTIN_BLUEPRINTS, NOOP, Topology
from esper.leyline.stages import SeedStage
from tests.kasmina.gardens import bring, stack_garden

HOW_TO = Path(__file__).parents[3] / "docs/how-to/add-a-blueprint.md"


class Shift(nn.Module):
    """Adds a learned vector.

    And says no more about it.
    """

    def __init__(self, channels: int, topology: Topology) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(channels))

    def forward(self, x: Tensor) -> Tensor:
        return x + self.weight


@pytest.fixture
def shift() -> Any:
    register_blueprint("shift", topologies=("sequence", "vector"))(Shift)
    yield BLUEPRINTS.get("shift")
    BLUEPRINTS.unregister("shift")


def test_built_in_ids_are_the_positions_of_the_fixed_table() -> None:
    assert blueprint_names()[: len(BUILTIN_BLUEPRINTS)] == BUILTIN_BLUEPRINTS
    for index, name in enumerate(BUILTIN_BLUEPRINTS):
        assert blueprint_by_id(index).name == name
        assert BLUEPRINTS.get(name).id == index


@pytest.mark.parametrize(
    ("topology", "names"),
    [
        (
            "cnn",
            {
                "norm",
                "attention",
                "conv_light",
                "depthwise",
                "bottleneck",
                "conv_small",
                "conv_heavy",
            },
        ),
        (
            "sequence",
            {"norm", "attention", "lora", "lora_large", "mlp_small", "mlp", "flex_attention"},
        ),
        ("vector", {"norm", "lora", "lora_large", "mlp_small", "mlp"}),
    ],
)
def test_each_topology_has_its_set_without_noop(topology: Topology, names: set[str]) -> None:
    chosen = selectable(topology)
    assert {blueprint_names()[index] for index in chosen} == names
    assert NOOP not in chosen


def test_every_blueprint_has_a_sentence() -> None:
    for name in BUILTIN_BLUEPRINTS:
        note = BLUEPRINTS.get(name).note
        assert note.endswith(".")
        assert "\n" not in note


def test_a_registered_blueprint_gets_the_next_id_and_can_be_grown(shift: Any) -> None:
    assert shift.id == len(blueprint_names()) - 1 >= len(BUILTIN_BLUEPRINTS)
    assert shift.note == "Adds a learned vector."
    assert shift.identity_at_start == ("sequence", "vector")
    assert shift.id in selectable("vector")
    assert shift.id not in selectable("cnn")
    garden = stack_garden()
    bring(garden, "a", SeedStage.HOLDING, "shift")
    assert garden.slots["a"].blueprint == "shift"
    assert garden.slots["a"].parameters == 4


def test_a_blueprint_that_is_gone_is_not_selectable(shift: Any) -> None:
    BLUEPRINTS.unregister("shift")
    try:
        assert "shift" not in blueprint_names()
        with pytest.raises(UnknownNameError, match="unknown blueprint 'shift'"):
            stack_garden().germinate("a", "shift")
    finally:
        register_blueprint("shift", topologies=("vector",))(Shift)


@pytest.mark.usefixtures("shift")
def test_a_name_is_taken_once() -> None:
    with pytest.raises(UsageError, match="already registered"):
        register_blueprint("shift", topologies=("vector",))(Shift)
    with pytest.raises(UsageError, match="already registered"):
        register_blueprint("norm", topologies=("vector",))(Shift)


@pytest.mark.parametrize("topologies", [(), ("image",), ("vector", "graph")])
def test_strange_topologies_are_refused(topologies: tuple[str, ...]) -> None:
    with pytest.raises(UsageError, match="needs topologies out of cnn, sequence, vector"):
        register_blueprint("odd", topologies=topologies)(Shift)  # type: ignore[arg-type]
    assert "odd" not in BLUEPRINTS


def test_a_blueprint_is_not_built_where_it_does_not_belong() -> None:
    with pytest.raises(UsageError, match="'conv_light' is for cnn slots, not for a vector slot"):
        BLUEPRINTS.get("conv_light").build(4, "vector")


@pytest.mark.parametrize("index", [-1, 10_000])
def test_ids_out_of_range_are_refused(index: int) -> None:
    with pytest.raises(UsageError, match="blueprint ids are 0 to"):
        blueprint_by_id(index)


def test_counting_parameters_allocates_nothing_and_draws_nothing() -> None:
    before = torch.get_rng_state()
    assert count_parameters(BLUEPRINTS.get("mlp"), 30_001, "vector") == 8 * 30_001**2 + 5 * 30_001
    assert torch.equal(torch.get_rng_state(), before)


@pytest.mark.parametrize("channels", [1, 2, 3, 5, 30, 48])
@pytest.mark.parametrize("topology", ["cnn", "sequence", "vector"])
def test_any_width_can_be_built(channels: int, topology: Topology) -> None:
    shape = {"cnn": (2, channels, 4, 4), "sequence": (2, 3, channels), "vector": (2, channels)}
    x = torch.randn(shape[topology])
    for index in selectable(topology):
        out = blueprint_by_id(index).build(channels, topology)(x)
        assert out.shape == x.shape
        assert bool(out.isfinite().all())


def test_the_how_to_page_works() -> None:
    """Its code blocks run in order, as a reader would type them."""
    blocks = re.findall(r"^```python\n(.*?)^```", HOW_TO.read_text(), re.DOTALL | re.MULTILINE)
    assert len(blocks) == 3
    namespace: dict[str, Any] = {}
    try:
        for block in blocks:
            exec(compile(block, str(HOW_TO), "exec"), namespace)
        assert namespace["garden"].slots["0"].blueprint == "gated_unit"
    finally:
        if "gated_unit" in BLUEPRINTS:
            BLUEPRINTS.unregister("gated_unit")
