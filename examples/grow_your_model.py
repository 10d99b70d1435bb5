"""Grow a network of your own in one call: a small residual network on 8x8 digits.

Run it with `python examples/grow_your_model.py`; `--epochs` sets the length, `--out` the report.
"""

import argparse
from functools import partial

import torch
from sklearn.datasets import load_digits
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

import esper


class Block(nn.Module):
    """Two convolutions with a way around them."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.body = nn.Sequential(
            nn.Conv2d(width, width, 3, padding=1), nn.GroupNorm(1, width), nn.ReLU(),
            nn.Conv2d(width, width, 3, padding=1), nn.GroupNorm(1, width),
        )  # fmt: skip

    def forward(self, x: Tensor) -> Tensor:
        """Return the input with what the convolutions make of it."""
        return torch.relu(x + self.body(x))


class SmallResNet(nn.Module):
    """Nothing in here knows about growing."""

    def __init__(self, width: int = 4, classes: int = 10) -> None:
        super().__init__()
        self.stem, self.pool = nn.Conv2d(1, width, 3, padding=1), nn.MaxPool2d(2)
        self.layer1, self.layer2 = Block(width), Block(width)
        self.head = nn.Linear(width, classes)

    def forward(self, images: Tensor) -> Tensor:
        """Return the scores of ten classes."""
        hidden = self.layer2(self.pool(self.layer1(self.stem(images))))
        return self.head(hidden.mean((-2, -1)))


def digit_loaders() -> list[DataLoader]:
    """1,000 digits to train on, 400 to decide by, 397 to judge by; only training is shuffled."""
    digits = load_digits()
    images = torch.tensor(digits.images, dtype=torch.float32)[:, None] / 16
    data = TensorDataset(images, torch.tensor(digits.target))
    train, *others = torch.utils.data.random_split(data, [1000, 400, 397])
    return [DataLoader(train, 64, shuffle=True), *(DataLoader(other, 200) for other in others)]


def main() -> None:
    """Train, grow and report."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--epochs", type=int, default=50, help="epochs to train (default: 50)")
    parser.add_argument("--out", default="runs/example.html", help="page to write")
    options = parser.parse_args()
    torch.set_num_threads(1)  # a network this small is fastest so
    torch.manual_seed(0)
    train, val, test = digit_loaders()
    grown = esper.grow(
        SmallResNet(), slots=["layer1", "layer2"], train=train, val=val, test=test,
        epochs=options.epochs, optimizer=partial(torch.optim.AdamW, lr=3e-3),
        on_epoch=lambda epoch: print(f"epoch {epoch.epoch}: {epoch.val_score:.1f} %"),
    )  # fmt: skip
    result = grown.summary
    print(f"{result.parameters_before} parameters became {result.parameters_after},")
    print(f"{result.test_score:.1f} % of the test digits are right")
    for seed in result.seeds:
        print(f"epoch {seed.germinated}: {seed.blueprint} germinated at {seed.slot}, {seed.fate}")
    print(f"report: {grown.report(options.out)}")


if __name__ == "__main__":
    main()
