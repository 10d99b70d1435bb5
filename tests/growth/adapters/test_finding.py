"""Which weights of a model can be adapted, and what is said of others."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.utils import parametrize

from esper.growth.adapters.adapt import Adapt
from esper.growth.adapters.finding import check_modules, find_weights
from esper.leyline.errors import EsperWarning, UsageError


def tied() -> nn.Module:
    model = nn.ModuleDict({"embed": nn.Embedding(5, 4), "head": nn.Linear(4, 5, bias=False)})
    model["head"].weight = model["embed"].weight
    return model


def normed() -> nn.Module:
    return nn.ModuleDict({"head": parametrize_weight(nn.Linear(4, 5))})


def parametrize_weight(layer: nn.Module) -> nn.Module:
    return nn.utils.parametrizations.weight_norm(layer)


def quantised() -> nn.Module:
    layer = nn.Linear(4, 5)
    layer.weight = nn.Parameter(torch.zeros(5, 4, dtype=torch.int8), requires_grad=False)
    return nn.ModuleDict({"head": layer})


@pytest.mark.parametrize(
    ("make", "told"),
    [
        (tied, r"head\.weight cannot be adapted: it is tied to another weight"),
        (normed, r"head\.weight cannot be adapted: it already has a parametrization"),
        (quantised, r"head\.weight cannot be adapted: the weight of a Linear is quantised"),
    ],
)
def test_what_cannot_be_adapted_says_why(make: Any, told: str) -> None:
    with pytest.raises(UsageError, match=told):
        find_weights(make()).choose("head")
    with pytest.raises(UsageError, match=r"no weight that can be adapted.*head\.weight: "):
        find_weights(make()).choose("auto")


def test_targets_are_modules_or_ends_of_their_names() -> None:
    model = nn.ModuleDict(
        {"a": nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2)), "b": nn.Linear(2, 2)}
    )
    found = find_weights(model)
    assert list(found.choose("a.1")) == ["a.1.weight"]
    assert list(found.choose(["1", "b"])) == ["a.1.weight", "b.weight"]
    assert list(find_weights(model, ["b"]).weights) == ["a.0.weight", "a.1.weight"]
    with pytest.raises(UsageError, match=r"names 'c'"):
        found.choose("c")
    assert not parametrize.is_parametrized(model["b"])


class Recurrent(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.gru, self.cell, self.head = nn.GRU(4, 8), nn.LSTMCell(8, 8), nn.Linear(8, 2)


def test_recurrent_layers_are_said_to_be_left_out() -> None:
    with pytest.raises(UsageError, match=r"gru\.weight_ih_l0 cannot .* an nn\.GRU, and recurrent"):
        Adapt(Recurrent(), 500, targets="gru")
    told = r"gru \(nn\.GRU\) and 1 more stay frozen.* write trainable=\['head', 'gru', 'cell'\]$"
    model = nn.ModuleDict({**dict(Recurrent().named_children()), "tail": nn.Linear(2, 2)})
    with pytest.warns(EsperWarning, match=told) as seen:
        Adapt(model, 500, trainable="head")
    assert len(seen) == 1
    # Whoever names layers knows what is left out.
    Adapt(Recurrent(), 500, targets="head")
    Adapt(Recurrent(), 500, trainable=["gru", "cell"])


@pytest.mark.parametrize(
    ("trainable", "told"),
    [
        ("head", r"'head', but head\.weight is tied to embed\.weight, .*=\['head', 'embed'\]$"),
        ("embed", r"'embed', but embed\.weight is tied to head\.weight"),
    ],
)
def test_a_module_with_a_tied_weight_is_trained_with_the_other_one_only(
    trainable: str, told: str
) -> None:
    with pytest.raises(UsageError, match=told):
        check_modules(tied(), trainable)
    assert check_modules(tied(), ["head", "embed"]) == ["head", "embed"]
