"""What does the default bring to frozen networks, and does it matter what it tries first?

    python research/strangers/frozen_cnn.py [--seeds 8] [--epochs 20]

Small networks are trained on digits, frozen, and grown for other data: a plain CNN and an encoder
for mirrored digits, and a residual CNN, trained on digits 0 to 4, for digits 5 to 9. The arms are
the rule `trial`, to which the default controller leaves frozen hosts; the rule as it was before;
and each of the two changes alone. It takes about ten minutes on one core.
"""

from __future__ import annotations

import argparse
import statistics
import warnings

import torch
from sklearn.datasets import load_digits
from torch import Tensor, nn
from torch.nn import functional as F

import esper

Batches = list[tuple[Tensor, Tensor]]
ARMS = {
    "trial": "trial",
    "only other blueprints": "trial:frozen_learning_epochs={before}",
    "only more time": "trial:identities=[]",
    "before": "trial:identities=[],frozen_learning_epochs={before}",
}
"""Controllers by arm. Before, a seed had a quarter of the run to learn."""


class Residual(nn.Module):
    """Two convolutions beside a path that skips them."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.first = nn.Conv2d(width, width, 3, padding=1)
        self.norm = nn.GroupNorm(4, width)
        self.second = nn.Conv2d(width, width, 3, padding=1)

    def forward(self, x: Tensor) -> Tensor:
        """Return the activation plus that of the convolutions."""
        return F.relu(x + self.second(F.relu(self.norm(self.first(x)))))


def plain() -> nn.Module:
    """Return a CNN of three plain layers."""
    layers = [nn.Sequential(nn.Conv2d(16, 16, 3, padding=1), nn.ReLU()) for _ in range(3)]
    return _network(16, layers, 10)


def residual() -> nn.Module:
    """Return a CNN of three residual blocks."""
    return _network(24, [Residual(24) for _ in range(3)], 5)


class Encoder(nn.Module):
    """Two encoder layers over the rows of an image."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Linear(8, 32)
        self.place = nn.Parameter(0.02 * torch.randn(8, 32))
        layers = [nn.TransformerEncoderLayer(32, 4, 64, 0.0, batch_first=True) for _ in range(2)]
        self.layers = nn.ModuleList(layers)
        self.head = nn.Linear(32, 10)

    def forward(self, x: Tensor) -> Tensor:
        """Return the scores of the classes."""
        x = self.embed(x[:, 0]) + self.place
        for layer in self.layers:
            x = layer(x)
        scores: Tensor = self.head(x.mean(1))
        return scores


def _network(width: int, blocks: list[nn.Module], classes: int) -> nn.Module:
    stem = nn.Sequential(nn.Conv2d(1, width, 3, padding=1), nn.ReLU())
    pool = nn.Sequential(nn.AdaptiveAvgPool2d(1), nn.Flatten())
    return nn.Sequential(stem, *blocks, pool, nn.Linear(width, classes))


def digits(first: int, last: int, *, is_mirrored: bool = False) -> tuple[Batches, Batches]:
    """Return training and validation batches of the digits from `first` to `last`."""
    found = load_digits()
    x = torch.tensor(found.images, dtype=torch.float32)[:, None] / 16
    y = torch.tensor(found.target)
    chosen = ((y >= first) & (y <= last)).nonzero().flatten()
    chosen = chosen[torch.randperm(len(chosen), generator=torch.Generator().manual_seed(0))]
    x, y = x[chosen], y[chosen] - first
    x = x.flip(-1) if is_mirrored else x
    half = len(x) * 5 // 9
    return (
        list(zip(x[:half].split(64), y[:half].split(64), strict=True)),
        list(zip(x[half:].split(256), y[half:].split(256), strict=True)),
    )


CASES = {
    "plain, mirrored digits": (plain, digits(0, 9), digits(0, 9, is_mirrored=True)),
    "encoder, mirrored digits": (Encoder, digits(0, 9), digits(0, 9, is_mirrored=True)),
    "residual, digits 5 to 9": (residual, digits(0, 4), digits(5, 9)),
}


def train(model: nn.Module, batches: Batches, epochs: int = 10) -> None:
    """Train a network on its first data."""
    optimizer = torch.optim.AdamW(model.parameters(), 3e-3)
    for _ in range(epochs):
        for x, y in batches:
            optimizer.zero_grad()
            F.cross_entropy(model(x), y).backward()
            optimizer.step()


def main() -> None:
    """Print the validation scores by network and arm."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--seeds", type=int, default=8)
    parser.add_argument("--epochs", type=int, default=20)
    given = parser.parse_args()
    warnings.simplefilter("ignore")
    for case, (make, first, other) in CASES.items():
        scores: dict[str, list[float]] = {arm: [] for arm in ("frozen", *ARMS)}
        grew: dict[str, list[str]] = {arm: [] for arm in ARMS}
        for seed in range(given.seeds):
            torch.manual_seed(seed)
            model = make()
            train(model, first[0])
            model.requires_grad_(False)
            state = {name: value.clone() for name, value in model.state_dict().items()}
            for arm, controller in ARMS.items():
                again = make().requires_grad_(False)
                again.load_state_dict(state)
                grown = esper.grow(
                    again,
                    train=other[0],
                    val=other[1],
                    epochs=given.epochs,
                    controller=controller.format(before=given.epochs // 4),
                    max_growth=2.0,
                    seed=seed,
                )
                scores[arm].append(grown.summary.val_score)
                grew[arm].append(str(grown).partition("grew ")[2])
            scores["frozen"].append(grown.history[0].val_score)
        for arm, values in scores.items():
            shown = ", ".join(f"{value:.1f}" for value in values)
            print(f"{case}: {arm} {statistics.fmean(values):.1f} ({shown})")
        for arm, lines in grew.items():
            print(*(f"    {arm}: {line}" for line in lines), sep="\n")


if __name__ == "__main__":
    main()
