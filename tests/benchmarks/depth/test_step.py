"""A step that is replayed as a CUDA graph trains as one that is launched kernel by kernel."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from benchmarks.depth import step
from benchmarks.depth.cells import CELLS, Job
from benchmarks.depth.models import GPT, Size
from benchmarks.depth.step import TrainingStep
from benchmarks.depth.training import grow

SIZE = Size(dim=32, heads=2, length=16, classes=64)


def train(device: str, steps: int = 12) -> tuple[list[float], Tensor]:
    """Train two blocks, then four, and return the losses and the first block's weights."""
    torch.manual_seed(0)
    network = GPT(SIZE, 4).to(device)
    network.awake = 2
    is_fused = device == "cuda"
    optimizer = torch.optim.AdamW(
        network.parameters(), 1e-2, fused=is_fused, capturable=is_fused, weight_decay=0.1
    )
    training = TrainingStep(network, optimizer, 1.0, 1e-2)
    ids = torch.randint(0, 64, (steps, 8, 17), generator=torch.Generator().manual_seed(1))
    losses = []
    for at, batch in enumerate(ids.to(device)):
        if at == steps // 2:
            grow(network, optimizer, 4, Job("small", CELLS["small"].grown, 1e-2))
            training.renew()
        training.set_rate(1e-2 * (1 - at / steps))
        losses.append(float(training(batch[:, :-1], batch[:, 1:])))
    return losses, network.blocks[3].up.weight.detach().cpu()


@pytest.mark.parametrize("rate", [0.0, 1e-3])
def test_a_step_trains_at_the_rate_that_was_set(rate: float) -> None:
    torch.manual_seed(0)
    network = GPT(SIZE, 1)
    before = network.head.weight.detach().clone()
    training = TrainingStep(network, torch.optim.SGD(network.parameters(), 1.0), None, 1.0)
    training.set_rate(rate)
    ids = torch.randint(0, 64, (2, 17))
    training(ids[:, :-1], ids[:, 1:])
    change = (network.head.weight.detach() - before).abs().max()
    assert 0.0 <= float(change) <= 10 * rate
    assert bool(change > 0) == bool(rate)


@pytest.mark.gpu
def test_replayed_steps_are_those_launched_one_by_one(monkeypatch: pytest.MonkeyPatch) -> None:
    with torch.cuda.stream(torch.cuda.Stream()):
        replayed, weights = train("cuda")
        monkeypatch.setattr(step, "_STEPS_BEFORE_CAPTURE", 1_000)
        launched, expected = train("cuda")
    assert replayed == pytest.approx(launched, rel=1e-4)
    torch.testing.assert_close(weights, expected, rtol=1e-3, atol=1e-4)
