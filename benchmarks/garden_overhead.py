"""Measure the overhead of a Garden without seeds over the plain model."""

from __future__ import annotations

import argparse
import time
from statistics import median

from benchmarks.table import print_table


def main(arguments: list[str]) -> int:
    import torch
    from torch.nn import functional as F

    from esper.kasmina.garden import Garden
    from esper.lab.tasks import get_task

    parser = argparse.ArgumentParser(
        prog="python -m benchmarks garden_overhead", description=__doc__
    )
    parser.add_argument("--tasks", nargs="+", default=["digits", "cifar_baseline", "digits_mlp"])
    parser.add_argument("--rounds", type=int, default=30)
    parser.add_argument("--steps", type=int, default=20)
    options = parser.parse_args(arguments)
    torch.set_num_threads(1)
    rows = []
    for name in options.tasks:
        task = get_task(name)
        plain, host = task.build_host(0), task.build_host(0)
        garden = Garden(host, task.slot_paths, task.example_input())
        batch = task.config.batch_size
        x = torch.randn(batch, *task.config.input_shape)
        y = torch.randint(0, task.config.num_classes or 2, (batch,))
        models = {"plain": plain, "garden": garden}
        optimizers = {
            key: torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)
            for key, model in models.items()
        }

        def steps(key: str, models=models, optimizers=optimizers, x=x, y=y) -> float:
            started = time.perf_counter()
            for _ in range(options.steps):
                optimizers[key].zero_grad()
                F.cross_entropy(models[key](x), y).backward()
                optimizers[key].step()
            return (time.perf_counter() - started) / options.steps

        for key in models:
            steps(key)
        # Interleaved, and the median of the ratios: a slow moment hits both sides of a pair.
        pairs = [(steps("plain"), steps("garden")) for _ in range(options.rounds)]
        ratio = median(g / p for p, g in pairs)
        rows.append([name, f"{1e3 * median(p for p, _ in pairs):.3f} ms", f"{ratio:.4f}"])
    print_table(["task", "plain training step", "garden / plain"], rows)
    return 0
