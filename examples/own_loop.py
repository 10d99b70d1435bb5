"""Keep your own training loop: a Garden to grow in, a Gardener to decide, any optimizer.

Run it with `python examples/own_loop.py`; `--epochs` sets the length.
"""

from __future__ import annotations

import argparse

import torch
from sklearn.datasets import load_digits
from torch import Tensor, nn
from torch.nn import functional as F

import esper


def main() -> None:
    """Train and grow, and say what every seed was worth."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--epochs", type=int, default=60, help="epochs to train (default: 60)")
    epochs = parser.parse_args().epochs
    torch.set_num_threads(1)  # a network this small is fastest so
    torch.manual_seed(0)

    digits = load_digits()
    x = torch.tensor(digits.data, dtype=torch.float32) / 16
    y = torch.tensor(digits.target)
    x_train, y_train, x_val, y_val = x[:1200], y[:1200], x[1200:], y[1200:]

    model = nn.Sequential(nn.Linear(64, 6), nn.ReLU(), nn.Linear(6, 6), nn.ReLU(), nn.Linear(6, 10))

    # Slots are names of submodules; one example batch tells their kind and width.
    garden = esper.Garden(model, slots=["1", "3"], example_input=x[:2])
    gardener = esper.Gardener(garden, controller="heuristic", horizon=epochs, max_parameters=3000)

    # New parameters join its group, so a scheduler made now drives them later too.
    optimizer = gardener.optimizer(torch.optim.AdamW, lr=3e-3)
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, epochs)

    def evaluate(model: nn.Module) -> tuple[Tensor, Tensor]:
        """Loss and correctness of every validation sample, always in the same order."""
        scores = model(x_val)
        return F.cross_entropy(scores, y_val, reduction="none"), scores.argmax(1) == y_val

    for epoch in range(1, epochs + 1):
        garden.train()
        for batch in torch.randperm(len(x_train)).split(64):
            loss = F.cross_entropy(garden(x_train[batch]), y_train[batch])
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
        scheduler.step()
        record = gardener.step(evaluate, train_loss=loss.item())  # measures, decides, acts
        seeds = [f"{slot.blueprint} {slot.stage}" for slot in record.slots if slot.blueprint]
        print(f"epoch {epoch}: {record.val_score:.1f} %, {record.parameters} parameters", *seeds)

    for name, worth in esper.evaluate_contributions(garden, evaluate).leave_one_out.items():
        print(f"the seed at {name} is worth {worth} points")


if __name__ == "__main__":
    main()
