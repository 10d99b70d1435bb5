"""Adapters in two real processes (gloo): placed alike, trained alike, and never moved."""

from __future__ import annotations

from datetime import timedelta
from pathlib import Path

import torch
from torch import distributed as dist
from torch.nn.parallel import DistributedDataParallel

from esper.growth.adapters.adapt import Adapt
from esper.leyline.errors import UsageError
from tests.growth.adapters.test_adapt import adamw, loss_of, make, train
from tests.growth.two_processes import WORLD, leave, run_in_two


def play(folder: str, rank: int) -> None:
    """Go through the whole life of adapters as one of two processes."""
    torch.set_num_threads(1)
    dist.init_process_group(
        "gloo",
        init_method=f"file://{folder}/meeting",
        rank=rank,
        world_size=WORLD,
        timeout=timedelta(seconds=60),
    )
    model = make()
    # Whoever seeds every process by its rank gets the same adapters nevertheless.
    torch.manual_seed(rank)
    adapters = Adapt(model, 500)
    adapters.measure(range(3), lambda step: loss_of(model, WORLD * step + rank))
    wrapped = DistributedDataParallel(model)
    optimizer = adamw(adapters)
    for step in range(5):
        loss_of(wrapped, WORLD * step + rank).backward()
        optimizer.step()
        optimizer.zero_grad()
        adapters.step(optimizer)
    print("ranks", sorted(adapters.ranks.items()))
    print("sum", [round(float(p.detach().double().sum()), 10) for p in adapters.parameters()])
    # One process has no finite gradient; none waits for it in vain.
    odd = Adapt(make(), 500)
    factor = float("nan") if rank else 1.0
    odd.measure(range(2), lambda step: factor * loss_of(odd.model, step))
    print("one", sorted(odd.ranks.items()))
    late = Adapt(make(), 500)
    optimizer = torch.optim.SGD(late.parameters(), lr=0.0)
    for step in range(6):
        (loss_of(late.model, step) * (float("nan") if rank and step < 2 else 1.0)).backward()
        late.step(optimizer)
    print("late", late.history[-1]["step"], sorted(late.ranks.items()))
    moving = Adapt(make(), 500, total_steps=20)
    try:
        train(moving, adamw(moving), 0, 20)
    except UsageError as error:
        print("refused", error, flush=True)
    # One that leaves while the other still talks to it may leave that one hanging.
    dist.barrier()
    leave()


def test_two_processes_have_the_same_adapters(tmp_path: Path) -> None:
    ended = run_in_two(__name__, tmp_path)
    assert [code for code, _, _ in ended] == [0, 0], ended[0][2] + ended[1][2]
    first, second = (out.splitlines() for _, out, _ in ended)
    assert first == second
    assert [line.split()[0] for line in first] == ["ranks", "sum", "one", "late", "refused"]
    assert first[3].startswith("late 6 ")
    assert "total_steps=" in first[4]
