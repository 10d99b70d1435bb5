"""Measure the overhead of Deepen: steps with sleeping and with all blocks, over plain networks."""

from __future__ import annotations

import argparse
import time
from statistics import median
from typing import Any

from benchmarks.table import print_table


def main(arguments: list[str]) -> int:
    import torch
    from torch import nn
    from torch.nn import functional as F

    from esper.growth.depth.deepen import Deepen

    parser = argparse.ArgumentParser(
        prog="python -m benchmarks deepen_overhead", description=__doc__
    )
    parser.add_argument("--width", type=int, default=32)
    parser.add_argument("--rounds", type=int, default=100)
    options = parser.parse_args(arguments)
    torch.set_num_threads(1)
    x = torch.randn(16, 64, options.width)

    def make(layers: int, **how: Any) -> Any:
        layer = nn.TransformerEncoderLayer(
            options.width, 2, 4 * options.width, dropout=0.0, batch_first=True, norm_first=True
        )
        model = nn.TransformerEncoder(layer, layers, enable_nested_tensor=False)
        optimizer = torch.optim.AdamW(model.parameters())
        return model, optimizer, Deepen(model, optimizer, example=x, **how) if how else None

    def step(model: Any, optimizer: Any, depth: Any) -> float:
        started = time.process_time()
        loss = F.mse_loss(model(x), x)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        if depth is not None:
            depth.step(loss)
        return time.process_time() - started

    far = 10**9
    arms = {
        "3 layers": make(3),
        "3 of 12 awake, schedule": make(12, start=3, at={far: 12}),
        "3 of 12 awake, slope": make(12, start=3, controller="slope", total_steps=far),
        "12 layers": make(12),
        "12 of 12 awake, finished": make(12, start=12, total_steps=far),
    }
    for arm in arms.values():
        step(*arm)
    # Interleaved, and the median of the ratios: a slow moment hits all of a round.
    rounds = [{name: step(*arm) for name, arm in arms.items()} for _ in range(options.rounds)]
    rows, plain = [], ""
    for name, (_, _, depth) in arms.items():
        plain = name if depth is None else plain
        ratio = median(one[name] / one[plain] for one in rounds)
        rows.append([name, f"{1e3 * median(one[name] for one in rounds):.3f} ms", f"{ratio:.4f}"])
    print_table(["network", "training step", "over the plain one"], rows)
    return 0
