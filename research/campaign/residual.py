"""Which residual arrangement without batch statistics trains as well as one with batch norm.

Small residual CNNs are trained on CIFAR-10 at 16x16, one after another, under a cosine with 5 %
warm-up. The learning rate of every arrangement is searched by factors of three until the best by
validation has a worse neighbour on both sides, so none lies at the end of a grid.

    python research/campaign/residual.py --data cifar16.npz --out residual.jsonl
    python research/campaign/residual.py --summary residual.jsonl

Every run is a line of JSON. `val` chooses the rate, `test` is what is reported.
"""

from __future__ import annotations

import argparse
import json
import math
import sys
import time
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from itertools import pairwise
from pathlib import Path
from statistics import fmean
from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional as F

WARM_UP = 0.05
CLASSES = 10

Shape = Literal["post", "pre", "pooled", "pooled2"]
"""post: convolutions of stride 2, addition, ReLU (He et al. 2016a). pre: norm and ReLU before each
convolution (2016b). pooled: a convolution that widens, then x + branch(x), then a max pool; the
branch is one convolution, or two."""

NormName = Literal["bn", "gn1", "gn4", "gn8", "none"]


@dataclass(frozen=True)
class Arrangement:
    """One way to build a residual network."""

    shape: Shape
    norm: NormName
    standardise: bool = False
    """Whether weights are standardised (Qiao et al. 2019)."""
    start: Literal["one", "zero", "scalar"] = "one"
    """Gain at the end of a branch at first; scalar is one learned factor from 0 (SkipInit)."""

    @property
    def name(self) -> str:
        """A name for tables."""
        norm = f"ws {self.norm}" if self.standardise else self.norm
        start = {"one": "", "zero": ", zero gain", "scalar": ", zero scalar"}[self.start]
        return f"{self.shape}, {norm}{start}"


ARRANGEMENTS: tuple[Arrangement, ...] = (
    Arrangement("post", "bn"),
    Arrangement("post", "gn1"),
    Arrangement("pooled", "gn1"),
    Arrangement("pooled", "bn"),
    Arrangement("post", "gn4"),
    Arrangement("post", "gn4", standardise=True),
    Arrangement("pooled", "gn4"),
    Arrangement("pooled", "gn4", standardise=True),
    Arrangement("pooled", "gn1", standardise=True),
    Arrangement("pooled", "gn8", standardise=True),
    Arrangement("pooled", "none", standardise=True, start="scalar"),
    Arrangement("pooled", "gn4", standardise=True, start="zero"),
    Arrangement("pooled", "bn", standardise=True),
    Arrangement("post", "gn1", standardise=True),
    Arrangement("pooled", "gn1", start="zero"),
    Arrangement("pooled", "gn1", start="scalar"),
    Arrangement("pooled2", "gn4", standardise=True),
    Arrangement("pre", "gn4", standardise=True),
)


class StandardConv(nn.Conv2d):
    """A convolution whose filters have mean 0 and unit gain."""

    def forward(self, x: Tensor) -> Tensor:
        """Convolve with the standardised weights."""
        variance, mean = torch.var_mean(self.weight, (1, 2, 3), correction=0, keepdim=True)
        fan_in = self.weight[0].numel()
        weight = (self.weight - mean) * torch.rsqrt(variance * fan_in + 1e-8)
        return F.conv2d(x, weight, self.bias, self.stride, self.padding)


class Network(nn.Module):
    """A residual network of three stages, 8-16-32 channels by default."""

    def __init__(self, how: Arrangement, width: int = 8, in_channels: int = 3) -> None:
        """Draw the weights from torch's current random state."""
        super().__init__()
        self.how = how
        widths = (width, 2 * width, 4 * width)
        if how.shape in ("post", "pre"):
            self.stem = self._unit(in_channels, width)
            pairs = list(pairwise((width, *widths)))
            self.stages = nn.ModuleList(_Strided(self, a, b) for a, b in pairs)
        else:
            self.stem = nn.Identity()
            pairs = list(pairwise((in_channels, *widths)))
            self.stages = nn.ModuleList(_Pooled(self, a, b) for a, b in pairs)
        self.last = self.norm(widths[-1]) if how.shape == "pre" else nn.Identity()
        self.head = nn.Linear(widths[-1], CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        """Return class scores."""
        x = self.stem(x)
        for stage in self.stages:
            x = stage(x)
        if self.how.shape == "pre":
            x = F.relu(self.last(x))
        scores: Tensor = self.head(x.mean((2, 3)))
        return scores

    def conv(self, inputs: int, outputs: int, kernel: int = 3, stride: int = 1) -> nn.Module:
        """Return a convolution; without a norm it has a bias."""
        kind = StandardConv if self.how.standardise else nn.Conv2d
        bias = self.how.norm == "none"
        return kind(inputs, outputs, kernel, stride, padding=kernel // 2, bias=bias)

    def norm(self, channels: int) -> nn.Module:
        """Return the norm of this arrangement."""
        name = self.how.norm
        if name == "none":
            return nn.Identity()
        if name == "bn":
            return nn.BatchNorm2d(channels)
        size = channels if name == "gn1" else int(name[2:])
        return nn.GroupNorm(channels // min(size, channels), channels)

    def _unit(self, inputs: int, outputs: int) -> nn.Module:
        if self.how.shape == "pre":
            return self.conv(inputs, outputs)
        return nn.Sequential(self.conv(inputs, outputs), self.norm(outputs), nn.ReLU())

    def end(self, branch: list[nn.Module]) -> nn.Module:
        """Return the branch with its end as it starts."""
        last = branch[-1]
        if self.how.start == "zero":
            assert isinstance(last, nn.BatchNorm2d | nn.GroupNorm), "a zero gain needs a norm"
            nn.init.zeros_(last.weight)
        if self.how.start == "scalar":
            branch = [*branch, _Scalar()]
        return nn.Sequential(*branch)


class _Scalar(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.factor = nn.Parameter(torch.zeros(()))

    def forward(self, x: Tensor) -> Tensor:
        return self.factor * x


class _Strided(nn.Module):
    def __init__(self, net: Network, inputs: int, outputs: int) -> None:
        super().__init__()
        stride = 1 if inputs == outputs else 2
        self.is_pre = net.how.shape == "pre"
        one, two = net.conv(inputs, outputs, stride=stride), net.conv(outputs, outputs)
        self.first = nn.Identity()
        self.short: nn.Module = nn.Identity()
        if self.is_pre:
            self.first = nn.Sequential(net.norm(inputs), nn.ReLU())  # type: ignore[assignment]
            branch = [one, net.norm(outputs), nn.ReLU(), two]
            if stride > 1:
                self.short = net.conv(inputs, outputs, 1, stride)
        else:
            branch = [one, net.norm(outputs), nn.ReLU(), two, net.norm(outputs)]
            if stride > 1:
                self.short = nn.Sequential(net.conv(inputs, outputs, 1, stride), net.norm(outputs))
        self.branch = net.end(branch)

    def forward(self, x: Tensor) -> Tensor:
        inner = self.first(x)
        if self.is_pre:
            short = x if isinstance(self.short, nn.Identity) else self.short(inner)
            return short + self.branch(inner)
        return F.relu(self.short(inner) + self.branch(inner))


class _Pooled(nn.Module):
    def __init__(self, net: Network, inputs: int, outputs: int) -> None:
        super().__init__()
        self.widen = nn.Sequential(net.conv(inputs, outputs), net.norm(outputs), nn.ReLU())
        branch = [net.conv(outputs, outputs), net.norm(outputs)]
        if net.how.shape == "pooled2":
            branch = [*branch, nn.ReLU(), net.conv(outputs, outputs), net.norm(outputs)]
        self.branch = net.end(branch)

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.widen(x)
        return F.max_pool2d(F.relu(hidden + self.branch(hidden)), 2)


@dataclass(frozen=True)
class Data:
    """Images and labels of the three parts."""

    train: tuple[Tensor, Tensor]
    val: tuple[Tensor, Tensor]
    test: tuple[Tensor, Tensor]


def load(path: Path, train: int, held_out: int, test: int, device: torch.device) -> Data:
    """Read the first images, standardise each channel, and set the last of them aside."""
    with np.load(path) as file:
        arrays = {name: file[name] for name in ("x_train", "y_train", "x_test", "y_test")}
    pixels = torch.from_numpy(arrays["x_train"][:train]).float()
    mean = pixels.mean((0, 2, 3), keepdim=True)
    deviation = pixels.std((0, 2, 3), keepdim=True)
    x = ((pixels - mean) / deviation).to(device)
    x_test = ((torch.from_numpy(arrays["x_test"][:test]).float() - mean) / deviation).to(device)
    y = torch.from_numpy(arrays["y_train"][:train].astype(np.int64)).to(device)
    y_test = torch.from_numpy(arrays["y_test"][:test].astype(np.int64)).to(device)
    kept = train - held_out
    return Data((x[:kept], y[:kept]), (x[kept:], y[kept:]), (x_test, y_test))


@dataclass(frozen=True)
class Settings:
    """What all runs share."""

    epochs: int
    batch: int
    device: torch.device


def train(
    how: Arrangement, rate: float, seed: int, data: Data, settings: Settings
) -> dict[str, Any]:
    """Train one network and return its scores."""
    torch.manual_seed(1_000 + seed)
    net = Network(how).to(settings.device)
    x, y = data.train
    per_epoch = len(x) // settings.batch
    steps = per_epoch * settings.epochs
    warm = max(1, round(WARM_UP * steps))
    optimizer = torch.optim.SGD(net.parameters(), rate, momentum=0.9, weight_decay=5e-4)
    order = torch.Generator().manual_seed(77_000 + seed)
    started, step, running = time.perf_counter(), 0, math.nan
    for _ in range(settings.epochs):
        net.train()
        places = torch.randperm(len(x), generator=order).to(settings.device)
        for batch in places[: per_epoch * settings.batch].split(settings.batch):
            passed = max(0.0, (step - warm) / max(1, steps - warm))
            share = (step + 1) / warm if step < warm else 0.5 * (1 + math.cos(math.pi * passed))
            optimizer.param_groups[0]["lr"] = rate * share
            loss = F.cross_entropy(net(x[batch]), y[batch])
            optimizer.zero_grad()
            loss.backward()  # type: ignore[no-untyped-call]
            nn.utils.clip_grad_norm_(net.parameters(), 1.0)
            optimizer.step()
            step += 1
            value = float(loss.detach())
            running = value if math.isnan(running) else 0.95 * running + 0.05 * value
        if not math.isfinite(running):
            break
    net.eval()
    return {
        "arrangement": how.name,
        **asdict(how),
        "rate": rate,
        "seed": seed,
        "epochs": settings.epochs,
        "train_size": len(x),
        "val": accuracy(net, data.val),
        "test": accuracy(net, data.test),
        "train_loss": running,
        "parameters": sum(p.numel() for p in net.parameters()),
        "seconds": round(time.perf_counter() - started, 1),
    }


@torch.no_grad()
def accuracy(net: nn.Module, part: tuple[Tensor, Tensor]) -> float:
    """Return the share of right answers in points."""
    x, y = part
    parts = zip(x.split(500), y.split(500), strict=True)
    right = sum(int((net(images).argmax(1) == labels).sum()) for images, labels in parts)
    return 100 * right / len(y)


def rate_to_try(scores: dict[float, float], first: Sequence[float], factor: float) -> float | None:
    """Return the next learning rate: the first ones, then beyond the end that is best."""
    for rate in first:
        if rate not in scores:
            return rate
    best, rates = max(scores, key=lambda rate: scores[rate]), sorted(scores)
    if best == rates[-1]:
        return best * factor
    if best == rates[0]:
        return best / factor
    return None


def summarise(path: Path) -> None:
    """Print the best rate of every arrangement with its scores, by images and epochs."""
    groups: dict[tuple[int, int, str], dict[float, list[dict[str, Any]]]] = defaultdict(
        lambda: defaultdict(list)
    )
    for line in path.read_text(encoding="utf-8").splitlines():
        record = json.loads(line)
        key = (record["train_size"], record["epochs"], record["arrangement"])
        groups[key][record["rate"]].append(record)
    rows = []
    for (size, epochs, name), by_rate in groups.items():
        means = {rate: fmean(r["val"] for r in runs) for rate, runs in by_rate.items()}
        best = max(means, key=lambda rate: means[rate])
        runs = by_rate[best]
        edge = "*" if best in (min(means), max(means)) else ""
        test, loss = (fmean(run[what] for run in runs) for what in ("test", "train_loss"))
        tried = ", ".join(f"{rate:.3g}: {means[rate]:.1f}" for rate in sorted(means))
        cells = (size, epochs, name, f"{best:.3g}{edge}", len(runs), f"{test:.1f}")
        cells += (f"{means[best]:.1f}", f"{loss:.2f}", runs[0]["parameters"], tried)
        rows.append((size, test, cells))
    header = ["images", "epochs", "arrangement", "rate", "seeds", "test", "val", "train loss"]
    header += ["parameters", "val by rate"]
    print(f"| {' | '.join(header)} |")
    print("|---" * len(header) + "|")
    for _, _, cells in sorted(rows, key=lambda row: (row[0], -row[1])):
        print(f"| {' | '.join(map(str, cells))} |")


def main(arguments: Sequence[str]) -> int:
    """Run the study, or print what one found."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--data", type=Path, default=Path("campaign_data/cifar16.npz"))
    parser.add_argument("--out", type=Path, default=Path("residual.jsonl"))
    parser.add_argument("--summary", type=Path, help="print the table of this file and end")
    parser.add_argument("--only", nargs="+", help="parts of names; all by default")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--train", type=int, default=10_000, help="images, held out incl.")
    parser.add_argument("--held-out", type=int, default=2_000)
    parser.add_argument("--test", type=int, default=5_000)
    parser.add_argument("--epochs", type=int, default=10)
    parser.add_argument("--batch", type=int, default=128)
    parser.add_argument("--seeds", type=int, nargs="+", default=[0])
    parser.add_argument("--rates", type=float, nargs="+", default=[0.1, 0.3])
    parser.add_argument("--no-search", action="store_true", help="only these rates")
    parser.add_argument("--factor", type=float, default=3.0, help="from one rate to the next")
    options = parser.parse_args(arguments)
    if options.summary is not None:
        summarise(options.summary)
        return 0
    torch.set_num_threads(1)
    settings = Settings(options.epochs, options.batch, torch.device(options.device))
    data = load(options.data, options.train, options.held_out, options.test, settings.device)
    chosen = [
        how
        for how in ARRANGEMENTS
        if options.only is None or any(part == how.name for part in options.only)
    ]
    with options.out.open("a", encoding="utf-8") as file:
        for how in chosen:
            scores: dict[float, float] = {}
            while (rate := rate_to_try(scores, options.rates, options.factor)) is not None:
                if options.no_search and rate not in options.rates:
                    break
                runs = [train(how, rate, seed, data, settings) for seed in options.seeds]
                scores[rate] = fmean(run["val"] for run in runs)
                file.writelines(json.dumps(run) + "\n" for run in runs)
                file.flush()
                test = fmean(run["test"] for run in runs)
                seconds = sum(run["seconds"] for run in runs)
                print(
                    f"{how.name} at {rate:.3g}: val {scores[rate]:.1f} test {test:.1f}, "
                    f"{seconds:.0f} s",
                    flush=True,
                )
    summarise(options.out)
    return 0


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
