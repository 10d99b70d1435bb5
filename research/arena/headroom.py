"""Is there anything to decide? How much the best depth and moment of growing differ over members.

    python research/arena/headroom.py prepare --cifar cifar16.npz --fashion fashion14.npz \
        --text python=python.txt --text stories=stories.txt --out arena.npz
    python research/arena/headroom.py run --data arena.npz --out results.jsonl
    python research/arena/headroom.py summary results.jsonl

A member is a kind of network (residual CNN, ViT, GPT), a data set, so many samples of it, a share
of wrong labels, and a budget of training FLOPs. Every arm spends the whole budget: a network of 1,
2, 4 or 8 blocks from the start, or one that begins with one block and doubles, by copies with their
optimizer state, at some shares of the budget. The rate is constant and falls to 0 over the last
fifth. The score is the test loss where the validation loss was best.

All arms, seeds and members of a kind train as one stack of networks with the same number of blocks:
weights have a leading dimension for rows. A step is a CUDA graph. Plain PyTorch on purpose: it
answers whether an arena is worth building before it is built.
"""

from __future__ import annotations

import argparse
import itertools
import json
import lzma
import math
import sys
import time
from collections import defaultdict
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional as F

Weights = dict[str, Tensor]
"""By name, each [rows, ...]; those of block i begin with `i.`."""

DEPTHS = (1, 2, 4, 8)
PLANS: dict[str, tuple[tuple[float, int], ...]] = {
    **{f"{depth}": ((0.0, depth),) for depth in DEPTHS},
    **{f"1>2@{a}": ((0.0, 1), (a, 2)) for a in (0.1, 0.3, 0.6)},
    **{
        f"1>2@{a}>4@{b}": ((0.0, 1), (a, 2), (b, 4))
        for a, b in ((0.05, 0.1), (0.1, 0.3), (0.2, 0.4), (0.3, 0.6))
    },
    **{
        f"1>2@{a}>4@{b}>8@{c}": ((0.0, 1), (a, 2), (b, 4), (c, 8))
        for a, b, c in ((0.03, 0.06, 0.12), (0.1, 0.2, 0.4), (0.2, 0.4, 0.6))
    },
}
"""By name: from which share of the budget on there are how many blocks."""

BATCH, TOKENS, EVALUATIONS, DECAY = 32, 64, 30, 0.2
VALIDATION, TEST = 512, 2048
RATES = {"cnn": 3e-3, "vit": 2e-3, "gpt": 4e-3}
WIDTHS = {"cnn": 24, "vit": 48, "gpt": 48}
HEADS = 3


@dataclass(frozen=True)
class Member:
    """What a network is trained on, and for how long."""

    kind: str
    data: str
    samples: int
    noise: float
    steps: int
    """The budget, in steps of the network with one block."""

    @property
    def label(self) -> str:
        """Return it in a few words."""
        return f"{self.kind} {self.data} n{self.samples} w{self.noise} b{self.steps}"


def draw_members(seed: int, count: int) -> list[Member]:
    """Return so many members of every kind."""
    draw = np.random.default_rng(seed)
    found = []
    for kind in RATES:
        for _ in range(count):
            data = str(
                draw.choice(["python", "stories"] if kind == "gpt" else ["cifar", "fashion"])
            )
            samples = int(draw.choice([500, 2000, 8000, 20000]))
            noise = 0.0 if kind == "gpt" else float(draw.choice([0.0, 0.3, 0.6]))
            steps = int(draw.choice([300, 1000, 3000, 9000]))
            found.append(Member(kind, data, samples, noise, steps))
    return found


# ---- Networks, many at a time


def make_network(kind: str, seed: int, blocks: int) -> Weights:
    """Return one network; its first block is the same however many there are."""
    made = _make_one(kind, torch.Generator().manual_seed(seed))
    for block in range(1, blocks):
        other = _make_one(kind, torch.Generator().manual_seed(1000 * (seed + 1) + block))
        made |= {f"{block}{name[1:]}": w for name, w in other.items() if name[0] == "0"}
    return made


def _make_one(kind: str, draw: torch.Generator) -> Weights:
    width = WIDTHS[kind]

    def normal(*shape: int, fan: int) -> Tensor:
        return torch.randn(shape, generator=draw) / math.sqrt(fan)

    if kind == "cnn":
        return {
            "stem": normal(27, width, fan=27),
            **{f"0.scale{i}": torch.ones(width) for i in (1, 2)},
            **{f"0.shift{i}": torch.zeros(width) for i in (1, 2)},
            "0.conv1": normal(9 * width, width, fan=9 * width) * math.sqrt(2),
            "0.conv2": normal(9 * width, width, fan=9 * width),
            "norm": torch.ones(width),
            "shift": torch.zeros(width),
            "head": normal(width, 10, fan=width),
        }
    inputs, places, outputs = (256, TOKENS, 256) if kind == "gpt" else (48, 16, 10)
    return {
        "embed": normal(inputs, width, fan=4 if kind == "gpt" else inputs),
        "places": normal(places, width, fan=100),
        **{f"0.norm{i}": torch.ones(width) for i in (1, 2)},
        "0.qkv": normal(width, 3 * width, fan=width),
        "0.out": normal(width, width, fan=4 * width),
        "0.up": normal(width, 4 * width, fan=width),
        "0.down": normal(4 * width, width, fan=8 * width),
        "norm": torch.ones(width),
        "head": normal(width, outputs, fan=width),
    }


def block_cost(kind: str) -> tuple[float, float]:
    """Return multiplications of one sample's forward pass: outside the blocks, and of one block."""
    c = WIDTHS[kind]
    if kind == "cnn":
        return 64 * 27 * c + 10 * c, 64 * 18 * c * c
    tokens = TOKENS if kind == "gpt" else 16
    outside = tokens * c * 256 if kind == "gpt" else tokens * 48 * c + 10 * c
    return outside, tokens * (12 * c * c + 2 * tokens * c)


def forward(kind: str, w: Weights, blocks: int, x: Tensor) -> Tensor:
    """Return logits [R, B, K] of images [R, B, 3, 16, 16], or [R, B, T, K] of bytes [R, B, T]."""
    rows, batch = x.shape[:2]
    if kind == "cnn":
        x = _convolve(x.permute(0, 1, 3, 4, 2), w["stem"], stride=2)
        for i in range(blocks):
            y = torch.relu(_normalise(x, w[f"{i}.scale1"], w[f"{i}.shift1"]))
            y = _normalise(_convolve(y, w[f"{i}.conv1"]), w[f"{i}.scale2"], w[f"{i}.shift2"])
            x = x + _convolve(torch.relu(y), w[f"{i}.conv2"])
        x = torch.relu(_normalise(x, w["norm"], w["shift"])).mean((2, 3))
        return x @ w["head"].to(x.dtype)
    if kind == "gpt":
        index = x + 256 * torch.arange(rows, device=x.device)[:, None, None]
        x = F.embedding(index, w["embed"].flatten(0, 1))
    else:
        x = x.reshape(rows, batch, 3, 4, 4, 4, 4).permute(0, 1, 3, 5, 2, 4, 6)
        x = _times(x.reshape(rows, batch, 16, 48), w["embed"])
    x = x + w["places"][:, None]
    for i in range(blocks):
        q, k, v = _times(_layer_norm(x, w[f"{i}.norm1"]), w[f"{i}.qkv"]).chunk(3, -1)
        q, k, v = (_split(each) for each in (q, k, v))
        y = F.scaled_dot_product_attention(q, k, v, is_causal=kind == "gpt")
        y = y.transpose(1, 2).reshape(x.shape)
        x = x + _times(y, w[f"{i}.out"])
        y = F.gelu(_times(_layer_norm(x, w[f"{i}.norm2"]), w[f"{i}.up"]))
        x = x + _times(y, w[f"{i}.down"])
    x = _layer_norm(x, w["norm"])
    if kind == "gpt":
        return _times(x, w["head"])
    return _times(x.mean(2, keepdim=True), w["head"]).squeeze(2)


def _times(x: Tensor, weight: Tensor) -> Tensor:
    rows, _, _, width = x.shape
    out = x.reshape(rows, -1, width) @ weight.to(x.dtype)
    return out.view(*x.shape[:3], -1)


def _split(x: Tensor) -> Tensor:
    rows, batch, tokens, width = x.shape
    return x.reshape(rows * batch, tokens, HEADS, width // HEADS).transpose(1, 2)


def _layer_norm(x: Tensor, scale: Tensor) -> Tensor:
    return F.layer_norm(x, x.shape[-1:]) * scale[:, None, None].to(x.dtype)


def _convolve(x: Tensor, weight: Tensor, stride: int = 1) -> Tensor:
    """Convolve [R, B, H, W, C] by [R, 9 C, D]: shifted copies side by side, then a matrix product.

    A grouped convolution with a group for every row is several times slower.
    """
    rows, batch, height, width, _ = x.shape
    x = F.pad(x.bfloat16() if x.is_cuda else x, (0, 0, 1, 1, 1, 1))
    shifted = [
        x[:, :, i : i + height : stride, j : j + width : stride] for i in range(3) for j in range(3)
    ]
    flat = torch.cat(shifted, -1).flatten(1, 3)
    out = flat @ weight.to(flat.dtype)
    return out.view(rows, batch, height // stride, width // stride, -1)


def _normalise(x: Tensor, scale: Tensor, shift: Tensor) -> Tensor:
    """Normalise all channels of a sample together, whatever the batch is."""
    x = F.layer_norm(x, x.shape[2:])
    return x * scale[:, None, None, None].to(x.dtype) + shift[:, None, None, None].to(x.dtype)


def deepen(w: Weights, blocks: int) -> Weights:
    """Return twice as many blocks: copies of all stand behind them."""
    copies = {
        f"{int(name.split('.')[0]) + blocks}.{name.partition('.')[2]}": value.clone()
        for name, value in w.items()
        if name[0].isdigit()
    }
    return {**w, **copies}


# ---- Training rows that have the same number of blocks


@dataclass
class Row:
    """One network of one arm, and how far it is."""

    member: Member
    plan: str
    seed: int
    number: int
    """Of the member, in the tables of samples."""
    rate: float = 1.0
    """Factor of the kind's learning rate."""
    weights: Weights | None = None
    first: Weights | None = None
    second: Weights | None = None
    taken: int = 0
    """Optimizer steps so far."""
    spent: float = 0.0
    """FLOPs so far, as a share of the budget."""
    best: float = math.inf
    kept: Weights | None = None
    """Weights where the validation loss was best, and how many blocks they have."""
    kept_blocks: int = 0
    curve: list[tuple[float, float, float, float]] | None = None
    """Share of the budget; losses in training and validation; errors in validation."""

    def share_of_step(self, blocks: int) -> float:
        """Return what share of its budget a step takes."""
        outside, one = block_cost(self.member.kind)
        return (outside + blocks * one) / (outside + one) / self.member.steps

    def stages(self) -> list[tuple[float, float, int]]:
        """Return from which to which share there are how many blocks."""
        plan = PLANS[self.plan]
        ends = [share for share, _ in plan[1:]] + [1.0]
        return [(start, end, blocks) for (start, blocks), end in zip(plan, ends, strict=True)]


class Data:
    """Samples of all data sets on the device, and which of them every member has."""

    def __init__(self, path: Path, members: list[Member], device: torch.device) -> None:
        self.device = device
        with np.load(path) as file:
            self.sets = {name: torch.from_numpy(file[name]).to(device) for name in file.files}
        most = max(member.samples for member in members)
        self.samples = torch.zeros(len(members), most, dtype=torch.int64)
        self.labels = torch.zeros(len(members), most, dtype=torch.int64)
        self.counts = torch.tensor([member.samples for member in members]).to(device)
        for number, member in enumerate(members):
            draw = torch.Generator().manual_seed(1000 + number)
            count = member.samples
            if member.kind == "gpt":
                # One text of so many windows, that begins anywhere.
                size = len(self.sets[f"{member.data}.x"]) - (count + 1) * TOKENS
                if size < 1:
                    raise SystemExit(f"{member.data} has less text than {count} windows")
                start = int(torch.randint(size, (1,), generator=draw))
                self.samples[number, :count] = start + TOKENS * torch.arange(count)
                continue
            whole = self.sets[f"{member.data}.y"].cpu().long()
            chosen = torch.randperm(len(whole), generator=draw)[:count]
            self.samples[number, :count] = chosen
            wrong = torch.rand(count, generator=draw) < member.noise
            random = torch.randint(10, (count,), generator=draw)
            self.labels[number, :count] = torch.where(wrong, random, whole[chosen])
        self.samples, self.labels = self.samples.to(device), self.labels.to(device)
        self.members = members

    def validation(self, kind: str, name: str, numbers: list[int]) -> tuple[Tensor, Tensor]:
        """Return inputs and, for every row, targets that are wrong as often as in training."""
        x, y = self.held_out(kind, name, VALIDATION, 0)
        told = y.expand(len(numbers), *y.shape).clone()
        if kind != "gpt":
            for place, number in enumerate(numbers):
                draw = torch.Generator().manual_seed(5000 + number)
                wrong = torch.rand(len(y), generator=draw) < self.members[number].noise
                random = torch.randint(10, (len(y),), generator=draw)
                told[place] = torch.where(wrong.to(y.device), random.to(y.device), y)
        return x, told

    def read(self, kind: str, name: str, places: Tensor) -> tuple[Tensor, Tensor | None]:
        """Return the inputs at these places, and the next bytes of text."""
        if kind == "gpt":
            windows = self.sets[f"{name}.x"][places[..., None] + self._window].long()
            return windows[..., :-1], windows[..., 1:]
        return (self.sets[f"{name}.x"][places].float() - 110) / 70, None

    @property
    def _window(self) -> Tensor:
        return torch.arange(TOKENS + 1, device=self.device)

    def held_out(self, kind: str, name: str, count: int, skip: int) -> tuple[Tensor, Tensor]:
        """Return samples that nobody trains on."""
        if kind == "gpt":
            # A window has many bytes to be right about.
            first, number = skip // 4, count // 4
            places = torch.arange(first, first + number, device=self.device) * TOKENS
            windows = self.sets[f"{name}.test"][places[:, None] + self._window].long()
            return windows[:, :-1], windows[:, 1:]
        x = (self.sets[f"{name}.test_x"][skip : skip + count].float() - 110) / 70
        return x, self.sets[f"{name}.test_y"][skip : skip + count].long()


def train_stage(rows: list[Row], blocks: int, ends: list[float], data: Data) -> None:
    """Train rows of one kind and data set with so many blocks, each to its own share of budget."""
    kind, name, device = rows[0].member.kind, rows[0].member.data, data.device
    assert all((row.member.kind, row.member.data) == (kind, name) for row in rows)
    count = len(rows)

    def stacked(part: str) -> Weights:
        trees = [getattr(row, part) for row in rows]
        return {key: torch.stack([tree[key].to(device) for tree in trees]) for key in trees[0]}

    w = {key: value.requires_grad_(True) for key, value in stacked("weights").items()}
    m, v = stacked("first"), stacked("second")
    number = torch.tensor([row.number for row in rows], device=device)
    taken = torch.tensor([row.taken for row in rows], device=device, dtype=torch.float64)
    steps = torch.tensor(
        [
            round((end - row.spent) / row.share_of_step(blocks))
            for row, end in zip(rows, ends, strict=True)
        ]
    )
    cost = torch.tensor([row.share_of_step(blocks) for row in rows], dtype=torch.float64)
    spent = torch.tensor([row.spent for row in rows], dtype=torch.float64)
    x_buffer = torch.zeros(count, BATCH, dtype=torch.int64, device=device)
    rate = torch.zeros(count, device=device)
    rates = RATES[kind] * torch.tensor([row.rate for row in rows], dtype=torch.float64)
    seen_loss = torch.zeros(count, device=device)
    use_bf16 = device.type == "cuda"

    def step() -> None:
        places = data.samples[number[:, None], x_buffer]
        x, y = data.read(kind, name, places)
        if y is None:
            y = data.labels[number[:, None], x_buffer]
        with torch.autocast(device.type, torch.bfloat16, enabled=use_bf16):
            logits = forward(kind, w, blocks, x)
        loss = F.cross_entropy(logits.float().flatten(0, -2), y.flatten(), reduction="none")
        each = loss.view(count, -1).mean(1)
        seen_loss.add_(torch.where(rate > 0, each.detach(), 0.0))
        total = each.sum()
        grads = torch.autograd.grad(total, list(w.values()))
        # Clipped row by row.
        norm = sum(g.flatten(1).square().sum(1) for g in grads).sqrt()  # type: ignore[union-attr]
        clip = (1.0 / norm.clamp(min=1.0)).float()
        taken.add_((rate > 0).double())
        b1, b2 = 1 - 0.9**taken, 1 - 0.98**taken
        with torch.no_grad():
            for (key, p), g in zip(w.items(), grads, strict=True):
                shape = (count, *([1] * (p.ndim - 1)))
                active = (rate > 0).view(shape)
                g = g * clip.view(shape)
                m[key].copy_(torch.where(active, 0.9 * m[key] + 0.1 * g, m[key]))
                v[key].copy_(torch.where(active, 0.98 * v[key] + 0.02 * g * g, v[key]))
                one = m[key] / b1.clamp(min=1e-8).float().view(shape)
                two = (v[key] / b2.clamp(min=1e-8).float().view(shape)).sqrt() + 1e-8
                decay = 0.05 if p.ndim > 2 else 0.0
                p.sub_(rate.view(shape) * (one / two + decay * p))

    graph = None
    if device.type == "cuda":
        kept = {k: p.detach().clone() for k, p in w.items()}
        stream = torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            for _ in range(2):
                step()
        torch.cuda.current_stream().wait_stream(stream)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            step()
        with torch.no_grad():
            for key, p in w.items():
                p.copy_(kept[key])
        seen_loss.zero_()

    draw = torch.Generator(device).manual_seed(int(number.sum()) + blocks)
    val_x, val_y = data.validation(kind, name, [row.number for row in rows])
    before = [0] * count
    """At which step of this stage the training loss was read last."""
    counts = data.counts[number][:, None]
    due = [1 + int(EVALUATIONS * float(share) - 1e-9) for share in spent]
    longest = int(steps.max())
    stride = max(1, longest // (2 * EVALUATIONS))
    ending, closed = spent + cost * steps, [False] * count
    for at in range(longest):
        share = spent + cost * (at + 1)
        factor = ((1.0 - share) / DECAY).clamp(0.0, 1.0) * (at < steps)
        # The last step of a run has a rate too.
        factor = torch.where((at < steps) & (share >= 1.0 - 1e-9), 1e-3, factor)
        rate.copy_((rates * factor).float())
        x_buffer.copy_((torch.rand(count, BATCH, device=device, generator=draw) * counts).long())
        if graph is None:
            step()
        else:
            graph.replay()
        if (at + 1) % stride and at + 1 < longest:
            continue
        # A row that has finished stays as it is, so it may be measured a little later.
        share = torch.minimum(share, ending)
        ready = [
            i
            for i, each in enumerate(share.tolist())
            if each >= due[i] / EVALUATIONS - 1e-9 or (at + 1 >= steps[i] and not closed[i])
        ]
        if not ready:
            continue
        chosen = {key: p.detach()[ready] for key, p in w.items()}
        found = measure(kind, chosen, blocks, (val_x, val_y[ready]))
        losses, errors = (each.tolist() for each in found)
        sums = seen_loss[ready].tolist()
        seen_loss[ready] = 0.0
        for place, i in enumerate(ready):
            row = rows[i]
            closed[i] = at + 1 >= int(steps[i])
            due[i] = EVALUATIONS + 1 if closed[i] else 1 + int(EVALUATIONS * float(share[i]) + 1e-9)
            now = min(at + 1, int(steps[i]))
            trained = sums[place] / max(now - before[i], 1)
            before[i] = now
            assert row.curve is not None
            row.curve.append((float(share[i]), trained, losses[place], errors[place]))
            if losses[place] < row.best:
                row.best, row.kept_blocks = losses[place], blocks
                row.kept = {key: value[place].clone() for key, value in chosen.items()}
    for i, row in enumerate(rows):
        row.weights = {key: p[i].detach().clone() for key, p in w.items()}
        row.first = {key: value[i].clone() for key, value in m.items()}
        row.second = {key: value[i].clone() for key, value in v.items()}
        row.taken = int(taken[i])
        row.spent = float(spent[i] + cost[i] * steps[i])


@torch.no_grad()
def measure(
    kind: str, w: Weights, blocks: int, split: tuple[Tensor, Tensor]
) -> tuple[Tensor, Tensor]:
    """Return the mean loss and the share of errors of every row; targets are [rows, samples]."""
    rows = len(w["head"])
    losses, errors, seen = torch.zeros(rows), torch.zeros(rows), 0
    for x, wanted in zip(split[0].split(256), split[1].split(256, 1), strict=True):
        with torch.autocast(x.device.type, torch.bfloat16, enabled=x.device.type == "cuda"):
            logits = forward(kind, w, blocks, x.expand(rows, *x.shape))
        loss = F.cross_entropy(logits.float().flatten(0, -2), wanted.flatten(), reduction="none")
        losses += loss.view(rows, -1).mean(1).cpu() * len(x)
        errors += (logits.argmax(-1) != wanted).float().flatten(1).mean(1).cpu() * len(x)
        seen += len(x)
    return losses / seen, errors / seen


def score(rows: list[Row], data: Data) -> list[tuple[float, float]]:
    """Return test loss and error of the weights that every row kept."""
    found: list[tuple[float, float]] = [(math.nan, math.nan)] * len(rows)
    kind, name = rows[0].member.kind, rows[0].member.data
    x, y = data.held_out(kind, name, TEST, VALIDATION)
    for blocks in DEPTHS:
        which = [i for i, row in enumerate(rows) if row.kept_blocks == blocks]
        if not which:
            continue
        trees = [rows[i].kept or {} for i in which]
        w = {key: torch.stack([tree[key] for tree in trees]) for key in trees[0]}
        losses, errors = measure(kind, w, blocks, (x, y.expand(len(which), *y.shape)))
        for place, i in enumerate(which):
            found[i] = float(losses[place]), float(errors[place])
    return found


def play(rows: list[Row], data: Data, most: int, out: Path, deadline: float) -> None:
    """Train rows of one kind and data set to the end of their budgets; write them down."""
    waiting: dict[int, list[Row]] = defaultdict(list)
    for row in rows:
        blocks = PLANS[row.plan][0][1]
        row.weights = make_network(row.member.kind, row.seed, blocks)
        row.first = {key: torch.zeros_like(value) for key, value in row.weights.items()}
        row.second = {key: torch.zeros_like(value) for key, value in row.weights.items()}
        row.curve = []
        waiting[blocks].append(row)
    for blocks in DEPTHS:
        # Rows that take about as many steps go together.
        def length(row: Row, blocks: int = blocks) -> float:
            end = next(end for _, end, have in row.stages() if have == blocks)
            return (end - row.spent) / row.share_of_step(blocks)

        queue = sorted(waiting[blocks], key=length)
        for begin in range(0, len(queue), most):
            part = queue[begin : begin + most]
            ends = [next(end for _, end, have in r.stages() if have == blocks) for r in part]
            started, longest = time.monotonic(), length(part[-1])
            train_stage(part, blocks, ends, data)
            print(
                f"{part[0].member.kind} {part[0].member.data}: {len(part)} rows of {blocks} "
                f"blocks, {longest:.0f} steps at most, {time.monotonic() - started:.0f} s",
                flush=True,
            )
            finished = [row for row, end in zip(part, ends, strict=True) if end >= 1.0]
            scores = dict(
                zip(map(id, finished), score(finished, data) if finished else [], strict=True)
            )
            for row, end in zip(part, ends, strict=True):
                if end < 1.0:
                    for name in ("weights", "first", "second"):
                        setattr(row, name, deepen(getattr(row, name), blocks))
                    waiting[2 * blocks].append(row)
                    continue
                told = {
                    **asdict(row.member),
                    "label": row.member.label,
                    "plan": row.plan,
                    "seed": row.seed,
                    "rate": row.rate,
                    "kept_blocks": row.kept_blocks,
                    "test_loss": scores[id(row)][0],
                    "test_error": scores[id(row)][1],
                    "score": scores[id(row)][0 if row.member.kind == "gpt" else 1],
                    "val_loss": row.best,
                    "curve": [[round(v, 4) for v in point] for point in row.curve or ()],
                }
                with out.open("a", encoding="utf-8") as file:
                    file.write(json.dumps(told) + "\n")
                row.weights = row.first = row.second = row.kept = None
            if time.monotonic() > deadline:
                print("out of time; what is finished is written", flush=True)
                return


def run(options: argparse.Namespace) -> None:
    """Train every arm of every member that is not in the results yet."""
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    torch.backends.cuda.matmul.allow_tf32 = True
    members = draw_members(options.draw, options.members)
    if options.steps:
        members = [Member(m.kind, m.data, m.samples, m.noise, options.steps) for m in members]
    done = set()
    if options.out.exists():
        for line in options.out.read_text("utf-8").splitlines():
            one = json.loads(line)
            done.add((one["label"], one["plan"], one["seed"], one["rate"]))
    data = Data(options.data, members, device)
    deadline = time.monotonic() + options.seconds
    groups: dict[tuple[str, str], list[Row]] = defaultdict(list)
    for number, member in enumerate(members):
        for plan in options.plans or PLANS:
            for seed, rate in itertools.product(range(options.seeds), options.rates):
                if (member.label, plan, seed, rate) not in done:
                    row = Row(member, plan, seed, number, rate)
                    groups[member.kind, member.data].append(row)
    for (kind, _), rows in groups.items():
        if (not options.kinds or kind in options.kinds) and time.monotonic() < deadline:
            play(rows, data, options.rows, options.out, deadline)


def prepare(options: argparse.Namespace) -> None:
    """Write all data into one file: 20,000 images of each set, four million bytes of each text."""
    found: dict[str, Any] = {}
    for name, path in (("cifar", options.cifar), ("fashion", options.fashion)):
        with np.load(path) as file:
            for part, count in (("train", 20000), ("test", 4000)):
                x = file[f"x_{part}"][:count]
                if x.shape[1] == 1:
                    x = np.pad(x, ((0, 0), (0, 0), (1, 1), (1, 1))).repeat(3, 1)
                ending = "" if part == "train" else "test_"
                found[f"{name}.{ending}x"] = x
                found[f"{name}.{ending}y"] = file[f"y_{part}"][:count]
    for named in options.text:
        name, _, path = named.partition("=")
        raw = Path(path).read_bytes()
        raw = lzma.decompress(raw) if path.endswith(".xz") else raw
        text = np.frombuffer(raw, np.uint8)[:4_000_000]
        held = len(text) // 8
        found[f"{name}.x"], found[f"{name}.test"] = text[:-held], text[-held:]
    np.savez_compressed(options.out, **found)


def summarise(options: argparse.Namespace) -> None:
    """Print what decisions are worth: the best in hindsight against the best single one."""
    scores: dict[str, dict[str, list[float]]] = defaultdict(lambda: defaultdict(list))
    for line in options.results.read_text("utf-8").splitlines():
        one = json.loads(line)
        scores[one["label"]][one["plan"]].append((one["seed"], one["score"]))  # type: ignore[arg-type]
    plans = [p for p in PLANS if all(p in arms for arms in scores.values())]
    seeds = min(len(arms[plan]) for arms in scores.values() for plan in plans)
    table = np.array(
        [
            [[score for _, score in sorted(arms[plan])[:seeds]] for plan in plans]  # type: ignore[misc]
            for arms in scores.values()
        ]
    )  # members, plans, seeds
    logs = np.log(table)
    halves = [(list(range(0, seeds, 2)), list(range(1, seeds, 2)))]
    halves.append(halves[0][::-1])
    own, single = [], []
    for choose, judge in halves if seeds > 1 else [([0], [0])]:
        best = logs[:, :, choose].mean(2).argmin(1)
        one = logs[:, :, choose].mean((0, 2)).argmin()
        own.append(logs[np.arange(len(logs)), best][:, judge].mean(1))
        single.append(logs[:, one][:, judge].mean(1))
    gain = np.mean(single, 0) - np.mean(own, 0)
    best_all = logs.mean(2).argmin(1)
    for label, mean, index, won in zip(scores, logs.mean(2), best_all, gain, strict=True):
        statics = {p: math.exp(mean[plans.index(p)]) for p in plans if p.isdigit()}
        told = " ".join(f"{p}:{value:.4f}" for p, value in statics.items())
        found = f"best {plans[index]:24} {math.exp(mean[index]):.4f}, hindsight {won:+.3f}"
        print(f"{label:34} static {told}  {found}")
    print("\nmean log score of every plan over members:")
    for plan, value in sorted(zip(plans, logs.mean((0, 2)), strict=True), key=lambda pair: pair[1]):
        print(f"  {plan:28} {value:+.4f}")
    error = gain.std(ddof=1) / math.sqrt(len(gain))
    print(
        "\nhindsight (chosen on half of the seeds, scored on the others) over the best single "
        f"plan: {100 * gain.mean():.1f} % ± {100 * error:.1f} of the score, "
        f"{len(gain)} members, {seeds} seeds"
    )


def main() -> int:
    """Find out."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    verbs = parser.add_subparsers(dest="verb", required=True)
    made = verbs.add_parser("prepare")
    made.add_argument("--cifar", type=Path, required=True)
    made.add_argument("--fashion", type=Path, required=True)
    made.add_argument("--text", action="append", default=[], metavar="NAME=FILE")
    made.add_argument("--out", type=Path, required=True)
    played = verbs.add_parser("run")
    played.add_argument("--data", type=Path, required=True)
    played.add_argument("--out", type=Path, required=True)
    played.add_argument("--draw", type=int, default=0, help="seed of the members")
    played.add_argument("--members", type=int, default=8, help="of every kind")
    played.add_argument("--seeds", type=int, default=4)
    played.add_argument("--rows", type=int, default=256, help="networks side by side")
    played.add_argument("--kinds", nargs="+", choices=tuple(RATES))
    played.add_argument("--plans", nargs="+", choices=tuple(PLANS))
    played.add_argument("--steps", type=int, default=0, help="another budget, to try things out")
    played.add_argument(
        "--rates", type=float, nargs="+", default=[1.0], help="factors of the kind's learning rate"
    )
    played.add_argument("--seconds", type=float, default=1e9)
    told = verbs.add_parser("summary")
    told.add_argument("results", type=Path)
    options = parser.parse_args()
    {"prepare": prepare, "run": run, "summary": summarise}[options.verb](options)
    return 0


if __name__ == "__main__":
    sys.exit(main())
