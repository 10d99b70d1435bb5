"""Models, losses and batches as users have them when something is wrong with them."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

SAMPLES, FEATURES, CLASSES, BATCH = 33, 4, 3, 8


class Net(nn.Module):
    """A network of two layers with a slot between them."""

    def __init__(self, *, norm: bool = False, scores: int = CLASSES) -> None:
        super().__init__()
        middle = nn.BatchNorm1d(8) if norm else nn.Identity()
        self.body = nn.Sequential(nn.Linear(FEATURES, 8), middle, nn.ReLU())
        self.head = nn.Linear(8, scores)

    def forward(self, x: Tensor) -> Any:
        return self.head(self.body(x))


class Changed(Net):
    """The network with another end."""

    def __init__(self, change: Callable[[Tensor], Any]) -> None:
        super().__init__()
        self.change = change

    def forward(self, x: Tensor) -> Any:
        return self.change(super().forward(x))


class Bare(nn.Module):
    """A network without parameters."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Identity()

    def forward(self, x: Tensor) -> Tensor:
        return self.body(x)[:, :CLASSES]


class Failing(Net):
    """The network that fails when it has been trained on some batches."""

    def __init__(self, *, in_training: bool) -> None:
        super().__init__()
        self.in_training, self.trained = in_training, 0

    def forward(self, x: Tensor) -> Any:
        self.trained += self.training
        if self.trained > 4 and self.training == self.in_training:
            raise KeyError("no such\nembedding")
        return super().forward(x)


class InPlace(Net):
    """The network that spoils what its own gradient needs."""

    def forward(self, x: Tensor) -> Tensor:
        inner = self.body(x)
        outputs: Tensor = self.head(inner)
        inner.mul_(2)
        return outputs


def plain() -> nn.Module:
    return Net()


def frozen() -> nn.Module:
    return Net().requires_grad_(False)


def bare() -> nn.Module:
    return Bare()


def normed() -> nn.Module:
    return Net(norm=True)


def few_scores() -> nn.Module:
    return Net(scores=2)


def detached() -> nn.Module:
    return Changed(Tensor.detach)


def rounded() -> nn.Module:
    return Changed(Tensor.long)


def spoiled() -> nn.Module:
    return Changed(lambda outputs: outputs * float("nan"))


def silent() -> nn.Module:
    return Changed(lambda outputs: None)


def in_place() -> nn.Module:
    return InPlace()


def fails_in_training() -> nn.Module:
    return Failing(in_training=True)


def fails_in_evaluation() -> nn.Module:
    return Failing(in_training=False)


def unreal() -> nn.Module:
    with torch.device("meta"):
        return Net()


class Loader:
    """Batches, one of which cannot be read."""

    def __init__(self, at: int) -> None:
        self._at = at

    def __iter__(self) -> Iterator[tuple[Tensor, Tensor]]:
        for number, batch in enumerate(batches()):
            if number == self._at:
                raise FileNotFoundError("img_0003.png")
            yield batch


def data() -> tuple[Tensor, Tensor]:
    """Return samples, and labels of which every class has some."""
    y = torch.arange(SAMPLES) % CLASSES
    noise = torch.randn(SAMPLES, FEATURES, generator=torch.Generator().manual_seed(0))
    return noise + y[:, None], y


def batches(
    change: Callable[[Tensor, Tensor], tuple[Any, Any]] = lambda x, y: (x, y),
) -> list[tuple[Any, Any]]:
    """Return batches of the data, changed; the last one has one sample."""
    x, y = change(*data())
    return [(x[i : i + BATCH], y[i : i + BATCH]) for i in range(0, SAMPLES, BATCH)]


def labelled(at: int, label: int) -> list[tuple[Any, Any]]:
    """Return batches in which one sample has another label."""
    return batches(lambda x, y: (x, torch.where(torch.arange(SAMPLES) == at, label, y)))


EMPTY = (torch.zeros(0, FEATURES), torch.zeros(0, dtype=torch.int64))


@dataclass(frozen=True)
class Case:
    """Something awkward, and what is said about it."""

    says: str | None
    """A pattern of the one line; None where growing goes on."""
    model: Callable[[], nn.Module] = plain
    options: dict[str, Any] = field(default_factory=dict)
    """Other arguments of `grow`."""
    by_command: str | None = None
    """What the command says of such a model, where that differs; models alone are tried there."""


NOTHING_LEARNS = "the loss does not depend on the model's parameters.*detached, rounded or constant"
TOO_SMALL = (
    r"training batch 5 .*\[1, 4\].*ValueError.*\(awkward.py:\d+ in forward\); a batch of one"
)
LABELS = "out of bounds.*; labels must be 0, 1, 2, ... and less than the number of scores"
META = "on the meta device, which holds no numbers"

CASES: dict[str, Case] = {
    "a frozen model": Case(None, frozen),
    "a model without parameters": Case(None, bare),
    "one with an optimizer": Case(
        "the optimizer cannot be made.*empty parameter list", bare, {"optimizer": torch.optim.SGD}
    ),
    "batch norm with a last batch of one": Case(
        TOO_SMALL, normed, by_command=r"training batch \d+ .*\[1, 4\].*; a batch of one sample"
    ),
    "fewer scores than classes": Case(
        "labels go from 0 to 2, but the model has 2 outputs, for classes 0 to 1", few_scores
    ),
    "outputs that are detached": Case(NOTHING_LEARNS, detached),
    "outputs that are whole numbers": Case(NOTHING_LEARNS, rounded),
    "outputs that are NaN": Case("was not finite in 3 epochs in a row", spoiled),
    "no outputs": Case("the model returns NoneType, neither a tensor nor", silent),
    "work in place": Case("training batch 1 .*modified by an inplace operation", in_place),
    "a model that fails in training": Case(
        r"epoch \d+: training batch \d+ \(\[\d+, 4\], \[\d+\]\) failed: KeyError: "
        r"'no such\\nembedding' \(awkward.py:\d+ in forward\)",
        fails_in_training,
    ),
    "a model that fails in evaluation": Case(
        r"validation batch \d+ \(\[\d+, 4\], \[\d+\]\) failed: KeyError: .*in forward\)",
        fails_in_evaluation,
    ),
    "a model on meta": Case(f"'body.0.weight' of the model is {META}", unreal),
    "a constant loss": Case(NOTHING_LEARNS, options={"loss": lambda o, t: torch.tensor(1.0)}),
    "a constant for each": Case(NOTHING_LEARNS, options={"loss": lambda o, t: torch.ones(len(t))}),
    "a count as loss": Case(
        "the loss is int64, which has no gradient",
        options={"loss": lambda o, t: (o.argmax(1) != t).sum()},
    ),
    "a bool for each": Case(
        "the loss is bool, which has no gradient",
        options={"loss": lambda o, t: o.argmax(1) != t},
    ),
    "a complex loss": Case("the loss is complex64", options={"loss": lambda o, t: o.sum() * 1j}),
    "a loss that is no tensor": Case(
        "must return a tensor.*returned a float", options={"loss": lambda o, t: 1.0}
    ),
    "a loss that fails": Case(
        r"the loss cannot be taken of outputs.*ZeroDivisionError: .*\(awkward.py:\d+ in <lambda>\)",
        options={"loss": lambda o, t: 1 / 0},
    ),
    "a label beyond the classes": Case(
        f"epoch 1: training batch 4 .*{LABELS}", options={"train": labelled(30, 7)}
    ),
    "a negative label": Case(
        f"epoch 1: training batch 3 .*{LABELS}", options={"train": labelled(20, -3)}
    ),
    "a label beyond in validation": Case(
        f"validation batch 4 .*{LABELS}", options={"val": labelled(30, 7)}
    ),
    "labels that are no tensor": Case(
        "training batch 1 .*must be Tensor", options={"train": [(data()[0], ["a"] * SAMPLES)]}
    ),
    "labels that are real numbers": Case(
        "training batch 1 .*target dtype.*; class labels are whole numbers of 64 bits",
        options={"train": batches(lambda x, y: (x, y.float()))},
    ),
    "an empty batch": Case(
        r"epoch 1: training batch 6 \(\[0, 4\], \[0\]\) has no sample; leave it out",
        options={"train": [*batches(), EMPTY]},
    ),
    "an empty batch in validation": Case(None, options={"val": [EMPTY, *batches(), EMPTY]}),
    "only empty batches in validation": Case(
        "the validation set is empty", options={"val": [EMPTY]}
    ),
    "no batch": Case("the training set is empty", options={"train": []}),
    "samples on meta": Case(
        f"training batch 1 .*{META}", options={"train": batches(lambda x, y: (x.to("meta"), y))}
    ),
    "labels on meta": Case(
        f"validation batch 1 .*{META}", options={"val": batches(lambda x, y: (x, y.to("meta")))}
    ),
    "samples of another width": Case(
        r"training batch 1 \(\[8, 3\], \[8\]\) failed.*shapes cannot be multiplied",
        options={"train": batches(lambda x, y: (x[:, :3], y))},
    ),
    "samples of another type": Case(
        "training batch 1 .*must have the same dtype.*; the weights are torch.float32",
        options={"train": batches(lambda x, y: (x.half(), y))},
    ),
    "fewer labels than samples": Case(
        r"training batch 1 \(\[8, 4\], \[7\]\) failed: ValueError",
        options={"train": [(x, y[:7]) for x, y in batches()]},
    ),
    "a batch that is nothing": Case("got a NoneType", options={"train": [None]}),
    "a loader that fails": Case(
        r"training batch 3 cannot be read: FileNotFoundError: img_0003.png \(awkward.py:\d+ in",
        options={"train": Loader(2)},
    ),
    "a loader that fails at once": Case(
        "the first validation batch cannot be read: FileNotFoundError", options={"val": Loader(0)}
    ),
    "a loader that fails in validation": Case(
        "validation batch 3 cannot be read: FileNotFoundError", options={"val": Loader(2)}
    ),
    "an optimizer that fails": Case(
        r"the optimizer cannot be made.*ZeroDivisionError.*\(awkward.py:\d+ in <lambda>\)",
        options={"optimizer": lambda parameters: 1 / 0},
    ),
}
