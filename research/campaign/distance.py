"""How far from what the shipped controller learned on is a network? Its observations, standardised.

    python research/campaign/distance.py

Every number that the policy sees of a network is standardised by mean and deviation over its
training. Printed are, for members of its own family, for tasks and for networks that it never saw,
the root mean square over the features of the host at some epochs, and the features that lie
farthest out.
"""

from __future__ import annotations

import sys
import warnings
from collections.abc import Iterator
from pathlib import Path

import torch
from torch import Tensor, nn

sys.path.insert(0, str(Path(__file__).parents[2] / "src"))

import esper
from esper.growth.run import GrowthLoop
from esper.lab.tasks import get_task
from esper.lab.tasks.family import get_family
from esper.lab.tasks.request import task_config, task_run
from esper.tamiyo.controllers.learned import LearnedController
from esper.tamiyo.policy.layout import NUM_HOST

EPOCHS = (1, 4, 10)
Batches = list[tuple[Tensor, Tensor]]


class ViT(nn.Module):
    """Four encoder layers of PyTorch over patches."""

    def __init__(self) -> None:
        super().__init__()
        self.patches = nn.Conv2d(3, 64, 4, 4)
        self.blocks = nn.ModuleList(
            nn.TransformerEncoderLayer(64, 4, 128, 0.0, batch_first=True, norm_first=True)
            for _ in range(4)
        )
        self.head = nn.Linear(64, 10)

    def forward(self, x: Tensor) -> Tensor:
        """Classify images."""
        x = self.patches(x).flatten(2).mT
        for block in self.blocks:
            x = block(x)
        return self.head(x.mean(1))


class Recurrent(nn.Module):
    """A language model of two GRUs."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(50, 64)
        self.first = nn.GRU(64, 64, batch_first=True)
        self.second = nn.GRU(64, 64, batch_first=True)
        self.head = nn.Linear(64, 50)

    def forward(self, x: Tensor) -> Tensor:
        """Predict the next token."""
        return self.head(self.second(self.first(self.embed(x))[0])[0])


def classified(*shape: int) -> Batches:
    """Return random inputs whose class is the largest of ten of their numbers."""
    x = torch.randn(256, *shape, generator=torch.Generator().manual_seed(0))
    y = x.flatten(1)[:, :10].argmax(1)
    return list(zip(x.split(32), y.split(32), strict=True))


def text() -> Batches:
    """Return random tokens."""
    x = torch.randint(0, 50, (256, 17), generator=torch.Generator().manual_seed(0))
    return [(part[:, :-1], part[:, 1:]) for part in x.split(32)]


def strangers() -> Iterator[tuple[str, nn.Module, Batches, dict[str, object]]]:
    """Yield networks that the controller never saw."""
    yield "ViT", ViT(), classified(3, 16, 16), {}
    yield "ViT, max_growth=10", ViT(), classified(3, 16, 16), {"max_growth": 10.0}
    yield "GRU language model", Recurrent(), text(), {"loss": "language"}
    mlp = nn.Sequential(
        *(nn.Linear(20, 64), nn.ReLU(), nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 10))
    )
    yield "MLP", mlp, classified(20), {}


def main() -> None:
    """Play everything and print what is far out."""
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    seen: list[tuple[Tensor, list[str]]] = []
    act = LearnedController.act

    def watched(self: LearnedController, signals: esper.Signals, masks: object) -> object:
        actions = act(self, signals, masks)  # type: ignore[arg-type]
        own, last = self.policy, self._last
        assert last is not None
        labels = own.layout.labels(self._context.slot_names, own.blueprint_names)
        seen.append(((last.raw - own.normalizer.mean)[0] * own.normalizer.scale, list(labels)))
        return actions

    LearnedController.act = watched  # type: ignore[method-assign, assignment]

    def show(name: str) -> None:
        for epoch in EPOCHS:
            z, labels = seen[epoch - 1]
            rms = z[:NUM_HOST].clamp(-10, 10).square().mean().sqrt()
            far = [f"{labels[i]} {z[i]:+.1f}" for i in z.abs().topk(4).indices.tolist()]
            print(f"{name:28} epoch {epoch:2}  host rms {rms:.2f}  farthest: {', '.join(far)}")
        seen.clear()

    def play(name: str, run: GrowthLoop) -> None:
        for _ in zip(range(max(EPOCHS) + 1), run.epochs(), strict=False):
            pass
        show(name)

    for name in ("digits", "digits_mlp"):
        task = get_task(name)
        data = task.load(device="cpu")
        play(name, task_run(task, data, config=task_config(task, twin=False), controller="tamiyo"))
    for members in get_family("image16_family").draw(7, architectures=2, conditions=1):
        task = members[0].task()
        config = task_config(task, twin=False)
        play(
            f"member, {task.name}", task_run(task, task.load(), config=config, controller="tamiyo")
        )
    for name, model, batches, options in strangers():
        torch.manual_seed(0)
        esper.grow(model, train=batches, val=batches[:3], epochs=30, **options)  # type: ignore[arg-type]
        show(name)


if __name__ == "__main__":
    main()
