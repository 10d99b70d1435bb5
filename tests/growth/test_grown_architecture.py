from __future__ import annotations

import torch
from torch import Tensor, nn

from esper.growth.grown import describe_host
from esper.kasmina.garden import Garden
from tests.plots import TinyNet


class Backwards(nn.Module):
    """Defines its parts in another order than it calls them; two share their weights."""

    def __init__(self) -> None:
        super().__init__()
        self.last = nn.Linear(6, 3)
        self.inner = nn.ModuleDict({"a": nn.Linear(6, 6), "b": nn.Linear(6, 6)})
        self.first = nn.Linear(4, 6)
        self.inner["b"].weight = self.inner["a"].weight
        self.scale = nn.Parameter(torch.ones(6))

    def forward(self, x: Tensor) -> Tensor:
        hidden: Tensor = self.inner["b"](self.inner["a"](self.first(x))) * self.scale
        scores: Tensor = self.last(hidden)
        return scores


def test_parts_come_in_the_order_in_which_they_are_called() -> None:
    x = torch.randn(5, 4)
    garden = Garden(Backwards(), {"s": "inner.a"}, x)
    parts = describe_host(garden, x)
    assert [part.path for part in parts] == ["first", "inner.a", "inner.b", "last", "(itself)"]
    assert [part.slots for part in parts] == [(), ("s",), (), (), ()]
    assert [part.parameters for part in parts] == [30, 42, 6, 21, 6]
    assert sum(part.parameters for part in parts) == garden.count_host_parameters()
    assert parts[1].shape == (6,)
    assert parts[1].kind == "Linear"


def test_a_slot_within_the_module_of_another_is_a_part_of_its_own() -> None:
    x = torch.randn(2, 4)
    parts = describe_host(Garden(TinyNet(), {"out": "stem", "in": "stem.0"}, x), x)
    assert [(part.path, part.slots) for part in parts[:3]] == [
        ("stem.0", ("in",)),
        ("stem.1", ()),
        ("stem", ("out",)),
    ]


def test_looking_changes_nothing() -> None:
    x = torch.randn(2, 4)
    garden = Garden(TinyNet(dropout=0.5), ["stem"], x).train()
    state = torch.get_rng_state()
    describe_host(garden, x)
    assert garden.training
    assert torch.equal(torch.get_rng_state(), state)
    assert not garden.model.get_submodule("head")._forward_hooks
