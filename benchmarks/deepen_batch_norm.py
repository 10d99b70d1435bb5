"""Measure how far validation dips after blocks with BatchNorm wake, and for how many steps."""

from __future__ import annotations

import argparse
from statistics import median

from benchmarks.table import print_table

AFTER = (0, 1, 2, 5, 10, 20, 40)
"""Steps after a wake at which the network is measured."""


def main(arguments: list[str]) -> int:
    import torch
    from sklearn.datasets import load_digits
    from torch import Tensor, nn
    from torch.nn import functional as F
    from torch.optim.swa_utils import update_bn

    from esper.growth.depth.deepen import Deepen

    parser = argparse.ArgumentParser(
        prog="python -m benchmarks deepen_batch_norm", description=__doc__
    )
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--epochs", type=int, default=10)
    parser.add_argument("--rate", type=float, default=1e-3)
    options = parser.parse_args(arguments)
    torch.set_num_threads(1)

    class Residual(nn.Module):
        def __init__(self, channels: int) -> None:
            super().__init__()
            self.conv1 = nn.Conv2d(channels, channels, 3, padding=1, bias=False)
            self.conv2 = nn.Conv2d(channels, channels, 3, padding=1, bias=False)
            self.norm1, self.norm2 = nn.BatchNorm2d(channels), nn.BatchNorm2d(channels)

        def forward(self, x: Tensor) -> Tensor:
            inner = torch.relu(self.norm1(self.conv1(x)))
            return torch.relu(x + self.norm2(self.conv2(inner)))

    def make() -> nn.Sequential:
        blocks = nn.Sequential(*(Residual(16) for _ in range(8)))
        stem = nn.Sequential(nn.Conv2d(1, 16, 3, padding=1, bias=False), nn.BatchNorm2d(16))
        pool = nn.Sequential(nn.AdaptiveAvgPool2d(1), nn.Flatten())
        return nn.Sequential(stem, blocks, pool, nn.Linear(16, 10))

    images, labels = load_digits(return_X_y=True)
    x = torch.tensor(images, dtype=torch.float32).view(-1, 1, 8, 8) / 16
    y = torch.tensor(labels)

    def accuracy(model: nn.Module, part: Tensor) -> float:
        model.eval()
        with torch.no_grad():
            score = float((model(x[part]).argmax(1) == y[part]).float().mean())
        model.train()
        return score

    found: dict[tuple[int, str], list[tuple[float, float]]] = {}

    def run(seed: int) -> None:
        torch.manual_seed(seed)
        order = torch.randperm(len(x))
        train, val = order[:1440], order[1440:]
        batches = [
            part
            for _ in range(options.epochs)
            for part in train[torch.randperm(len(train))].split(32)
        ]
        wakes = {round(0.2 * len(batches)): 4, round(0.4 * len(batches)): 8}
        model = make()
        optimizer = torch.optim.AdamW(model.parameters(), lr=options.rate)
        depth = Deepen(model, optimizer, start=2, at=wakes, example=x[:32])
        # Weights are read to put them back, not to save them.
        depth.saves.stop()

        def measure(wake: int, when: str) -> None:
            as_it_is = accuracy(model, val)
            kept = {name: value.clone() for name, value in model.state_dict().items()}
            update_bn([x[part] for part in batches[:8]], model)
            found.setdefault((wake, when), []).append((as_it_is, accuracy(model, val)))
            model.load_state_dict(kept)

        for step, part in enumerate(batches, 1):
            F.cross_entropy(model(x[part]), y[part]).backward()
            optimizer.step()
            optimizer.zero_grad()
            if step in wakes:
                measure(len(depth.history) + 1, "before depth.step()")
            depth.step()
            since = step - depth.history[-1]["step"] if depth.history else -1
            if since in AFTER:
                measure(len(depth.history), f"{since} steps later" if since else "after it")
        measure(2, "at the end")

    for seed in range(options.seeds):
        run(seed)
    rows = [
        [wake, when, *(_text([pair[column] for pair in pairs]) for column in (0, 1))]
        for (wake, when), pairs in found.items()
    ]
    print_table(["wake", "measured", "validation accuracy", "after update_bn"], rows)
    return 0


def _text(scores: list[float]) -> str:
    return f"{median(scores):.3f} ({min(scores):.3f} to {max(scores):.3f})"
