"""Grow in several processes: torchrun --nproc-per-node 2 examples/distributed.py.

The garden takes notice of DistributedDataParallel; each process has a Gardener, and rank 0 decides.
"""

from __future__ import annotations

import argparse

import torch
from sklearn.datasets import load_digits
from torch import Tensor, nn
from torch import distributed as dist
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel

import esper


def main() -> None:
    """Train and grow on every rank, and say on the first what became of it."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--epochs", type=int, default=60, help="epochs to train (default: 60)")
    epochs = parser.parse_args().epochs
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()

    digits = load_digits()
    x = torch.tensor(digits.data, dtype=torch.float32) / 16
    y = torch.tensor(digits.target)
    x_train, y_train, x_val, y_val = x[:1200], y[:1200], x[1200:], y[1200:]

    model = nn.Sequential(nn.Linear(64, 6), nn.ReLU(), nn.Linear(6, 6), nn.ReLU(), nn.Linear(6, 10))
    garden = esper.Garden(model, slots=["1", "3"], example_input=x[:2])
    wrapped = DistributedDataParallel(garden)  # the garden, not the model in it
    gardener = esper.Gardener(garden, horizon=epochs)
    gardener.tell(num_classes=10, train_samples=len(x_train), samples_per_epoch=len(x_train))
    optimizer = gardener.optimizer(torch.optim.AdamW, lr=3e-3)

    def evaluate(model: nn.Module) -> tuple[Tensor, Tensor]:
        scores = model(x_val)
        return F.cross_entropy(scores, y_val, reduction="none"), scores.argmax(1) == y_val

    for epoch in range(1, epochs + 1):
        wrapped.train()
        order = torch.randperm(len(x_train), generator=torch.Generator().manual_seed(epoch))
        for batch in order[rank::world].split(64 // world):  # a part of every batch each
            optimizer.zero_grad()
            F.cross_entropy(wrapped(x_train[batch]), y_train[batch]).backward()
            optimizer.step()
        record = gardener.step(evaluate)  # in every process
        if rank == 0 and (record.decision is None or record.decision.op != "WAIT"):
            print(f"epoch {epoch}: {record.val_score:.1f} %, {record.parameters} parameters")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
