"""A baked network is a plain module: the same outputs, and nothing of Esper in it."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor, nn

from esper.kasmina.blueprints.registry import (
    BLUEPRINTS,
    blueprint_by_id,
    register_blueprint,
    selectable,
)
from esper.kasmina.garden import Garden
from esper.kasmina.wrapping import slots_behind
from esper.leyline.errors import SlotError
from esper.leyline.slots import AXES, Axes, Topology
from esper.leyline.stages import SeedStage
from tests.kasmina.gardens import STYLES, Residual, Stack, bring, quick_config, stack_garden, stir

X = torch.randn(5, 4)


class Both(NamedTuple):
    one: Tensor
    other: Tensor


def grow(
    garden: Garden, slot: str, blueprint: str = "mlp_small", style: str = "linear_add"
) -> None:
    bring(garden, slot, SeedStage.HOLDING, blueprint, style=style)
    stir(garden, slot)


def foreign(module: nn.Module) -> set[str]:
    """Packages other than PyTorch and the tests that a module's parts and hooks come from."""
    kinds = {type(part) for part in module.modules()}
    for part in module.modules():
        for name, value in vars(part).items():
            if name.endswith("_hooks") and isinstance(value, dict):
                kinds |= {type(getattr(hook, "__self__", hook)) for hook in value.values()}
    return {kind.__module__ for kind in kinds if kind.__module__.startswith("esper")}


class Past(nn.Linear):
    """A layer on the sum of what came before: causal, so that attention is offered behind it."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x.cumsum(1))


HOSTS: dict[Topology, tuple[Any, tuple[int, ...], str]] = {
    "vector": (lambda: nn.Linear(8, 8), (3, 8), "BC"),
    "sequence": (lambda: Past(8, 8), (3, 5, 8), "BTC"),
    "cnn": (lambda: nn.Conv2d(8, 8, 3, padding=1), (3, 8, 6, 6), "BCHW"),
}

CASES = [
    (topology, blueprint_by_id(index).name) for topology in HOSTS for index in selectable(topology)
]


@pytest.mark.parametrize(("topology", "blueprint"), CASES)
def test_every_blueprint_is_baked_exactly(topology: Topology, blueprint: str) -> None:
    make, shape, axes = HOSTS[topology]
    torch.manual_seed(0)
    x = torch.randn(shape)
    model = nn.Sequential(make(), nn.Tanh())
    garden = Garden(model, ["0"], x, axes=axes, config=quick_config())
    grow(garden, "0", blueprint)
    baked = garden.bake()
    for mode in (True, False):
        garden.train(mode)
        baked.train(mode)
        assert torch.equal(baked(x), garden(x))
    other = torch.randn(2, *shape[1:])
    if topology == "sequence":
        other = torch.randn(2, 9, 8)
    assert torch.equal(baked(other), garden(other))
    assert not foreign(baked)
    assert sum(p.numel() for p in baked.parameters()) == garden.count_parameters()


@pytest.mark.parametrize("style", STYLES)
def test_every_style_is_baked_at_any_amplitude(style: str) -> None:
    garden = stack_garden()
    grow(garden, "b", style=style)
    garden.set_alpha_target("b", 0.5, speed=3)
    garden.tick()
    assert 0 < garden.slots["b"].alpha < 1
    before = garden(X)
    baked = garden.bake()
    assert type(baked) is Stack
    assert torch.equal(baked(X), before)
    # A copy: neither knows of the other.
    with torch.no_grad():
        for parameter in baked.parameters():
            parameter.zero_()
    assert torch.equal(garden(X), before)
    assert len(slots_behind(garden.model)) == 3


@pytest.mark.parametrize("stage", [SeedStage.GERMINATED, SeedStage.TRAINING])
def test_a_seed_that_changes_nothing_is_left_out(stage: SeedStage) -> None:
    garden = stack_garden()
    bring(garden, "b", stage)
    stir(garden, "b")
    baked = garden.bake()
    plain = Stack()
    plain.load_state_dict(baked.state_dict())
    assert torch.equal(plain(X), garden.eval()(X))
    assert baked.state_dict().keys() == plain.state_dict().keys()


@pytest.mark.parametrize("axes", [axes for axes in AXES.values() if not axes.is_usual])
def test_other_orders_of_axes(axes: Axes) -> None:
    class Turned(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.part = nn.Identity()
            self.scale = nn.Parameter(torch.ones(()))

        def forward(self, x: Tensor) -> Tensor:
            out: Tensor = self.part((x * self.scale).permute(axes.inverse).contiguous())
            return out.view(out.shape).permute(axes.order)

    shape = {"vector": (3, 8), "sequence": (3, 5, 8), "cnn": (3, 8, 4, 6)}[axes.topology]
    x = torch.randn(shape)
    garden = Garden(Turned(), ["part"], x, axes=axes.name, config=quick_config())
    grow(garden, "part", "norm")
    assert torch.equal(garden.bake()(x), garden(x))


def test_slots_behind_sequences_tuples_and_in_place_work() -> None:
    class Mixed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.recurrent = nn.LSTM(4, 6, batch_first=True)
            self.block = nn.Sequential(nn.Linear(6, 6), nn.ReLU(inplace=True))

        def forward(self, x: Tensor) -> Tensor:
            out, (last, _) = self.recurrent(x)
            mixed: Tensor = self.block(out)
            return mixed + last[0][:, None] + self.block[0].weight.sum()

    x = torch.randn(3, 5, 4)
    garden = Garden(Mixed(), ["recurrent", "block"], x, axes="BTC", config=quick_config())
    grow(garden, "recurrent", "attention", "gated_gate")
    grow(garden, "block", "mlp")
    baked = garden.bake()
    assert torch.equal(baked(x), garden(x))
    assert type(baked.recurrent) is nn.LSTM
    images = torch.randn(2, 3, 5, 5)
    garden = Garden(Residual(), ["stem", "conv"], images, config=quick_config())
    for slot in ("stem", "conv"):
        grow(garden, slot, "conv_light")
    assert torch.equal(garden.bake()(images), garden(images))


def test_what_cannot_be_taken_apart_is_refused_by_name() -> None:
    class Pair(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(4, 4)

        def forward(self, x: Tensor) -> Both:
            return Both(self.linear(x), x)

    class Host(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.pair = Pair()

        def forward(self, x: Tensor) -> Tensor:
            out: Tensor = self.pair(x).one
            return out

    garden = Garden(Host(), ["pair"], X, config=quick_config())
    grow(garden, "pair")
    with pytest.raises(SlotError, match=r"'pair' returns .* garden\.save"):
        garden.bake()


def test_a_blueprint_with_choices_in_it_is_refused_by_name() -> None:
    @register_blueprint("choosy", topologies=("vector",))
    class Choosy(nn.Module):
        def __init__(self, channels: int, topology: str) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.zeros(channels))

        def forward(self, x: Tensor) -> Tensor:
            return x + self.weight if x.shape[0] > 1 else x - self.weight

    try:
        garden = stack_garden()
        grow(garden, "b", "choosy")
        with pytest.raises(SlotError, match="slot 'b', a Choosy, cannot be traced") as error:
            garden.bake()
        assert "\n" not in str(error.value)
    finally:
        BLUEPRINTS.unregister("choosy")


def test_a_baked_network_trains_as_the_garden_does() -> None:
    garden = stack_garden()
    grow(garden, "b", style="gated_gate")
    baked = garden.bake()
    for model in (garden, baked):
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        for _ in range(3):
            optimizer.zero_grad()
            model(X).square().sum().backward()
            optimizer.step()
    torch.testing.assert_close(baked(X), garden(X), rtol=0, atol=1e-6)


def test_a_baked_network_can_be_grown_in_again_and_baked_again() -> None:
    first = stack_garden()
    grow(first, "b")
    with pytest.raises(SlotError, match=r"garden\.bake\(\)"):
        Garden(first, ["model.b"], X)
    with pytest.raises(SlotError, match=r"garden\.bake\(\)"):
        Garden(first.model, ["b"], X)
    second = Garden(first.bake(), ["a", "b"], X, config=quick_config())
    assert torch.equal(second(X), first(X))
    assert second.count_host_parameters() == first.count_parameters()
    for slot in ("a", "b"):
        grow(second, slot, "lora")
    assert not torch.allclose(second(X), first(X))
    last = second.bake()
    assert torch.equal(last(X), second(X))
    assert {name.partition(".")[2] for name, _ in last.b.named_children()} == {""}
    assert dict(last.b.named_children()).keys() == {"grown", "grown_again"}


FRESH_PROCESS = """
import sys
sys.modules["esper"] = None
import torch
try:
    import esper
except ImportError:
    pass
else:
    sys.exit("Esper is there after all")
model = torch.load(sys.argv[1], weights_only=False)
x, expected = torch.load(sys.argv[2])
assert torch.equal(model(x), expected)
# Weights alone, too, into a network that was loaded as a whole.
model.load_state_dict(model.state_dict())
model(x).sum().backward()
assert not any(name.split(".")[0] == "esper" and module for name, module in sys.modules.items())
"""


def test_it_is_loaded_where_esper_is_not_installed(tmp_path: Path) -> None:
    images = torch.randn(2, 3, 6, 6)
    model = nn.Sequential(nn.Conv2d(3, 8, 3), nn.ReLU(), nn.Flatten(), nn.Linear(128, 2))
    garden = Garden(model, ["0"], images, config=quick_config())
    grow(garden, "0", "conv_heavy", "gated_gate")
    baked = garden.bake()
    torch.save(baked, tmp_path / "baked.pt")
    torch.save((images, baked(images).detach()), tmp_path / "batch.pt")
    assert torch.equal(baked(images), garden(images))
    done = subprocess.run(
        [sys.executable, "-c", FRESH_PROCESS, tmp_path / "baked.pt", tmp_path / "batch.pt"],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr


def test_it_is_exported_as_any_module() -> None:
    garden = stack_garden()
    grow(garden, "b", style="gated_gate")
    baked = garden.bake().eval()
    program = torch.export.export(baked, (X,))
    torch.testing.assert_close(program.module()(X), garden.eval()(X), rtol=0, atol=1e-6)


def test_a_garden_in_another_precision() -> None:
    garden = stack_garden().to(torch.float64)
    grow(garden, "b")
    x = X.double()
    assert torch.equal(garden.bake()(x), garden(x))
    torch.testing.assert_close(garden.bake().float()(X), garden(x).float(), atol=1e-5, rtol=0)


def test_a_blueprint_with_a_function_of_its_own_is_refused_by_name() -> None:
    from esper.kasmina.blueprints.registry import group_count

    @register_blueprint("own_function", topologies=("vector",))
    class OwnFunction(nn.Module):
        def __init__(self, channels: int, topology: str) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.zeros(channels))

        def forward(self, x: Tensor) -> Tensor:
            if isinstance(x, torch.fx.Proxy):
                return x.tracer.create_proxy("call_function", group_count, (x,), {})  # type: ignore[unreachable]
            return x + self.weight

    try:
        garden = stack_garden()
        grow(garden, "b", "own_function")
        with pytest.raises(SlotError, match="a OwnFunction, uses 'group_count' of 'esper'"):
            garden.bake()
    finally:
        BLUEPRINTS.unregister("own_function")
