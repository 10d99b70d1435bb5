from __future__ import annotations

import random
from collections.abc import Iterator
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.optim import SGD
from torch.utils.data import DataLoader, Dataset, Subset, TensorDataset

from esper.growth.fingerprints import data_contents, fingerprint, function_contents, model_contents

X, Y = torch.arange(40.0).reshape(10, 4), torch.arange(10) % 3


def changed(before: dict[str, str], after: dict[str, str]) -> list[str]:
    """Names of what is there twice and differs."""
    return [name for name in before if after.get(name, before[name]) != before[name]]


def test_a_batch_is_known_by_what_it_holds() -> None:
    batch = {"x": torch.arange(4), "y": (torch.ones(2, 2), "text")}
    same = {"x": torch.arange(4), "y": (torch.ones(2, 2), "text")}
    assert fingerprint(batch) == fingerprint(same)
    assert fingerprint(batch) != fingerprint({**batch, "x": torch.arange(4).float()})
    assert fingerprint(torch.zeros(2, 3)) != fingerprint(torch.zeros(3, 2))
    assert fingerprint(np.zeros(3)) != fingerprint(np.ones(3))


# -------------------------------------------------------------------------------------------- data


class Pictures(Dataset[Any]):
    """Samples that are augmented at random, with labels that are not."""

    def __init__(self, shift: int = 0, size: int = 100) -> None:
        self.shift, self.size = shift, size

    def __len__(self) -> int:
        return self.size

    def __getitem__(self, index: int) -> Any:
        noise = torch.rand(()).item() + random.random() + float(np.random.rand())
        return torch.full((3,), index + noise), (index + self.shift) % 3


class Epochs:
    """Batches whose order depends on the epoch alone."""

    def __init__(self, targets: Tensor = Y) -> None:
        self.targets, self.epoch = targets, 0

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch

    def __iter__(self) -> Iterator[Any]:
        order = torch.randperm(10, generator=torch.Generator().manual_seed(self.epoch))
        yield X[order], self.targets[order]


class OnlyOnce:
    """Batches that differ each time they are read, and say how often that was."""

    def __init__(self) -> None:
        self.reads = 0

    def __len__(self) -> int:
        return 7

    def __iter__(self) -> Iterator[Any]:
        self.reads += 1
        yield X, Y


def loader(x: Tensor, y: Tensor, **options: Any) -> DataLoader[Any]:
    return DataLoader(TensorDataset(x, y), batch_size=2, shuffle=True, **options)


@pytest.mark.parametrize(
    ("before", "after", "names"),
    [
        ([(X, Y)] * 4, [(X, Y)] * 2, ["number of t batches", "t inputs", "t targets"]),
        ([(X, Y)], [(X + 1, Y)], ["t inputs"]),
        ([(X, Y)], [(X, 2 - Y)], ["t targets"]),
        ([{"x": X, "labels": Y}], [{"x": X, "labels": 2 - Y}], ["t targets"]),
        (loader(X, Y), loader(X, 2 - Y), ["t targets"]),
        (loader(X, Y), loader(X[:5], Y[:5]), ["number of t batches", "t inputs", "t targets"]),
        (
            DataLoader(Subset(TensorDataset(X, Y), [1, 2])),
            DataLoader(Subset(TensorDataset(X, Y), [1, 3])),
            ["t inputs", "t targets"],
        ),
        (loader(X, Y), DataLoader(TensorDataset(X, Y), 2), ["order of t samples"]),
        (
            DataLoader(TensorDataset(X, Y), 5),
            DataLoader(TensorDataset(X, Y), 9),
            ["size of t batches"],
        ),
        (DataLoader(Pictures()), DataLoader(Pictures(shift=1)), ["t targets"]),
        (DataLoader(Pictures()), DataLoader(Pictures()), []),
        (Epochs(), Epochs(2 - Y), ["t targets"]),
        (Epochs(), Epochs(), []),
    ],
)
def test_other_data_is_named(before: Any, after: Any, names: list[str]) -> None:
    assert changed(data_contents("t", before), data_contents("t", after)) == names


def test_data_is_not_disturbed() -> None:
    own = OnlyOnce()
    shuffled = loader(X, Y, generator=torch.Generator().manual_seed(1))
    torch.manual_seed(5)
    random.seed(5)
    np.random.seed(5)
    drawn = [torch.rand(2).tolist(), random.random(), np.random.rand()]
    order = [batch[1].tolist() for batch in shuffled]
    assert shuffled.generator is not None
    shuffled.generator.manual_seed(1)
    torch.manual_seed(5)
    random.seed(5)
    np.random.seed(5)
    for data in (own, shuffled, DataLoader(Pictures()), iter([(X, Y)]), None):
        data_contents("t", data)
    assert own.reads == 0
    assert [torch.rand(2).tolist(), random.random(), np.random.rand()] == drawn
    assert [batch[1].tolist() for batch in shuffled] == order


def test_data_that_fails_is_left_to_whoever_uses_it() -> None:
    class Broken(Pictures):
        def __getitem__(self, index: int) -> Any:
            raise RuntimeError("no such picture")

    assert data_contents("t", DataLoader(Broken())).keys() == {
        *("number of t batches", "number of t samples", "choice of t samples"),
        *("size of t batches", "order of t samples"),
    }


# ------------------------------------------------------------------------------------------- model


class Net(nn.Module):
    """Calls a method and a function of its own file."""

    def __init__(self, act: Any = None, p: float = 0.0, heads: int = 2) -> None:
        super().__init__()
        self.act = act or nn.ReLU()
        self.drop = nn.Dropout(p)
        self.heads = heads

    def forward(self, x: Tensor) -> Tensor:
        return self.inner(x)

    def inner(self, x: Tensor) -> Tensor:
        return helper(self.drop(self.act(x)))


def helper(x: Tensor) -> Tensor:
    return x * 2


class Tanh(Net):
    def inner(self, x: Tensor) -> Tensor:
        return helper(torch.tanh(x))


def test_another_module_or_attribute_is_named() -> None:
    before = model_contents(Net())
    assert changed(before, model_contents(Net())) == []
    found = changed(before, model_contents(Net(nn.Tanh())))
    assert found == ["module 'act' of the model", "modules of the model"]
    assert model_contents(Net(nn.Tanh()))["module 'act' of the model"] == "Tanh()"
    assert "module 'drop' of the model" in changed(before, model_contents(Net(p=0.5)))
    assert "model itself" in changed(before, model_contents(Net(heads=4)))
    assert changed(model_contents(Net(F.relu)), model_contents(Net(torch.tanh))) == [
        *("model itself", "modules of the model"),
    ]


class Bare(nn.Module):
    """A weight whose shape no attribute tells."""

    def __init__(self, size: int) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(size))


def test_the_shape_of_a_weight_is_named() -> None:
    found = changed(model_contents(Bare(2)), model_contents(Bare(3)))
    assert found == [
        "shape of 'scale' in the model",
        "shapes of the model's weights",
        "number of trainable parameters of the model",
    ]


def test_weights_and_mode_do_not_count() -> None:
    one, other = nn.Linear(2, 2), nn.Linear(2, 2).eval()
    assert changed(model_contents(one), model_contents(other)) == []


def test_other_code_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    before = model_contents(Net())
    [code] = [name for name in before if name.startswith("code of the model")]

    def other(x: Tensor) -> Tensor:
        return x * 3

    with monkeypatch.context() as patch:
        patch.setattr(Net, "inner", Tanh.inner)
        assert changed(before, model_contents(Net())) == [code]
    with monkeypatch.context() as patch:
        patch.setitem(globals(), "helper", other)
        assert changed(before, model_contents(Net())) == [code]
    assert changed(before, model_contents(Net())) == []


def test_another_loss_or_optimizer_is_noticed() -> None:
    def loss(weight: float) -> Any:
        return lambda outputs, targets: weight * F.cross_entropy(outputs, targets)

    def contents(value: Any) -> dict[str, str]:
        return function_contents("loss", value)

    assert contents(loss(1.0)) == contents(loss(1.0)) != contents(loss(2.0))
    smooth = nn.CrossEntropyLoss(label_smoothing=0.1)
    assert changed(contents(nn.CrossEntropyLoss()), contents(smooth)) == ["loss"]
    weights = [nn.Parameter(torch.zeros(1))]
    assert contents(SGD(weights, lr=0.1)) != contents(SGD(weights, lr=0.2))
    # These are known by their names, which are settings.
    assert contents("regression") == contents(None) == contents(partial(SGD, lr=1)) == {}
