"""Measure how much the best depth and the best moment of growing differ between training problems.

    python research/arena/headroom.py prepare --cifar cifar16.npz --fashion fashion14.npz \
        --text python=python.txt --text stories=stories.txt --out arena.npz
    python research/arena/headroom.py run --data arena.npz --out results.jsonl
    python research/arena/headroom.py summary results.jsonl

Texts that are computed need no files; on a CPU rows run fastest one by one:

    python research/arena/headroom.py prepare --computed facts:600 mirrors:6 --out texts.npz
    python research/arena/headroom.py run --texts facts:600 mirrors:6 --budgets 6000 --rows 1 \
        --data texts.npz --out results.jsonl

So do images, of which `echo/LEVEL` is computed:

    python research/arena/headroom.py run --images fashion fashion/marked echo/2 --budgets 20000 \
        --rows 1 --data arena.npz --out results.jsonl

A *member* is a kind of network (residual CNN, ViT, GPT), a data set, a number of samples, a share
of wrong labels, a level of input noise, a number of classes, and a budget of training FLOPs. Every
*plan* spends the whole budget: a network of 1, 2, 4 or 8 blocks from the start, or one that begins
with one block and doubles at fixed shares of the budget by copying its blocks with their optimizer
state. The learning rate warms up over 2 % of the budget, is constant, and falls to 0 over the last
fifth. The score is the clean test error (bits per byte for text) of the weights with the best
validation loss; validation labels are wrong as often as training labels.

Rows of one kind and depth train as one stack: the weights of a network are one row of a matrix
[rows, parameters], and a step is a CUDA graph. Plain PyTorch on purpose: this script decides
whether an arena is worth building before it is built.
"""

from __future__ import annotations

import argparse
import itertools
import json
import math
import sys
import time
from collections import defaultdict
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional as F

DEPTHS = (1, 2, 4, 8)


def name_plan(shares: tuple[float, ...]) -> str:
    """Return the name of the plan that doubles at these shares of the budget."""
    return "1" + "".join(f">{2 ** (i + 1)}@{share}" for i, share in enumerate(shares))


PLANS: dict[str, tuple[tuple[float, int], ...]] = {
    **{f"{depth}": ((0.0, depth),) for depth in DEPTHS},
    **{
        name_plan(shares): ((0.0, 1), *((s, 2 ** (i + 1)) for i, s in enumerate(shares)))
        for shares in (
            (0.1,), (0.3,), (0.6,),
            (0.05, 0.1), (0.1, 0.3), (0.2, 0.4), (0.3, 0.6),
            (0.03, 0.06, 0.12), (0.1, 0.2, 0.4), (0.2, 0.4, 0.6),
        )
    },
}  # fmt: skip
"""By name: from which share of the budget on the network has how many blocks."""

BATCH, TOKENS, EVALUATIONS, WARMUP, DECAY = 16, 64, 60, 0.02, 0.2
VALIDATION, TEST = 512, 2048
RATES = {"cnn": 4e-3, "vit": 2e-3, "gpt": 4e-3}
WIDTHS = {"cnn": 8, "vit": 32, "gpt": 32}
HEADS = 2
IMAGES = ("cifar", "fashion", "cifar/marked", "fashion/marked", "cifar/pointed", "fashion/pointed")
"""`marked` and `pointed` are four small images each, of which one counts: see `compose`."""
LAGS = {"1": (1, 2, 3, 4, 5), "2": (2, 4, 6, 8, 10), "3": (7, 8, 9, 10, 11)}
"""Distances of `echo` by level. One block sees 7 pixels, two see 11, four 19."""
TEXTS = ("python", "stories", "chain", "sums", "repeats", "links")


@dataclass(frozen=True)
class Member:
    """A training problem: network, data and budget."""

    kind: str
    data: str
    samples: int
    wrong: float
    """Share of labels (images) or of bytes (text) that are replaced by random ones."""
    noise: float
    """Standard deviation of the noise added to images, in units of their own."""
    classes: int
    steps: int
    """The budget, in training steps of the network with one block."""

    @property
    def label(self) -> str:
        """Return a short name."""
        extra = f" s{self.noise:g} c{self.classes}" if self.kind != "gpt" else ""
        return f"{self.kind} {self.data} n{self.samples} w{self.wrong:g}{extra} b{self.steps}"


def draw_members(seed: int, count: int) -> list[Member]:
    """Draw `count` different members of every kind; the same numbers of every budget."""
    found = []
    for kind in RATES:
        is_text = kind == "gpt"
        budgets = (3000, 8000, 20000) if is_text else (5000, 15000, 45000)
        draw = np.random.default_rng([seed, list(RATES).index(kind)])
        for number in range(count):
            found.append(
                Member(
                    kind=kind,
                    data=str(draw.choice(TEXTS if is_text else IMAGES)),
                    samples=int(draw.choice([20000, 100000] if is_text else [2000, 20000, 20000])),
                    wrong=float(draw.choice([0.0, 0.3] if is_text else [0.0, 0.3, 0.6])),
                    noise=0.0 if is_text else float(draw.choice([0.0, 0.0, 1.0])),
                    classes=256 if is_text else int(draw.choice([2, 10, 10])),
                    steps=budgets[number % len(budgets)],
                )
            )
    return found


def list_texts(names: list[str], budgets: list[int]) -> list[Member]:
    """Return a member for every text, `NAME` or `NAME~SHARE` of wrong bytes, and budget."""
    found = []
    for name, steps in itertools.product(names, budgets):
        data, _, wrong = name.partition("~")
        found.append(
            Member("gpt", data, samples=50_000, wrong=float(wrong or 0), noise=0.0, classes=256,
                   steps=steps)
        )  # fmt: skip
    return found


def list_images(names: list[str], budgets: list[int]) -> list[Member]:
    """Return a member for every set of images and budget, for a CNN and ten classes."""
    return [
        Member("cnn", name, samples=20_000, wrong=0.0, noise=0.0, classes=10, steps=steps)
        for name, steps in itertools.product(names, budgets)
    ]


def list_grid(budgets: list[int]) -> list[Member]:
    """Return members that differ in one hidden fact at a time, each with all budgets."""
    found = []
    for kind in RATES:
        is_text = kind == "gpt"
        plain = {
            "data": "stories" if is_text else "fashion",
            "samples": 20000,
            "wrong": 0.0,
            "noise": 0.0,
            "classes": 256 if is_text else 10,
        }
        changes: list[dict[str, Any]] = [{}, {"wrong": 0.3}]
        changes += [{"data": data} for data in (TEXTS if is_text else IMAGES)]
        for change in changes:
            if change.get("data") == plain["data"]:
                continue
            for steps in budgets:
                found.append(Member(kind=kind, steps=steps, **{**plain, **change}))
    return found


# ---- Networks: a row of numbers each


@dataclass(frozen=True)
class Part:
    """A tensor of a network's weights and how it is initialised."""

    name: str
    shape: tuple[int, ...]
    scale: float
    """Standard deviation of random weights; 0: zeros, and -1: ones."""


def list_parts(kind: str) -> tuple[list[Part], list[Part]]:
    """Return the weights outside the blocks and those of one block."""
    c = WIDTHS[kind]

    def linear(name: str, inputs: int, outputs: int, gain: float = 1.0) -> Part:
        return Part(name, (inputs, outputs), gain / math.sqrt(inputs))

    if kind == "cnn":
        outside = [linear("stem", 27, c), Part("scale", (c,), -1), Part("shift", (c,), 0)]
        block = [
            *(Part(f"scale{i}", (c,), -1) for i in (1, 2)),
            *(Part(f"shift{i}", (c,), 0) for i in (1, 2)),
            linear("conv1", 9 * c, c, math.sqrt(2)),
            linear("conv2", 9 * c, c, 0.5),
        ]
        return [*outside, linear("head", c, 10)], block
    inputs, outputs = (256, 256) if kind == "gpt" else (12, 10)
    embed = Part("embed", (inputs, c), 0.5 if kind == "gpt" else 1 / math.sqrt(inputs))
    outside = [embed, Part("places", (TOKENS, c), 0.1), Part("norm", (c,), -1)]
    block = [
        *(Part(f"norm{i}", (c,), -1) for i in (1, 2)),
        linear("qkv", c, 3 * c),
        linear("out", c, c, 0.5),
        linear("up", c, 4 * c),
        linear("down", 4 * c, c, 0.5),
    ]
    return [*outside, linear("head", c, outputs)], block


def make_network(kind: str, seed: int, blocks: int) -> Tensor:
    """Return one network's weights; its first blocks do not depend on how many there are."""

    def make(parts: list[Part], draw: torch.Generator) -> list[Tensor]:
        made = []
        for part in parts:
            flat = torch.randn(math.prod(part.shape), generator=draw) * max(part.scale, 0.0)
            made.append(flat + 1.0 if part.scale < 0 else flat)
        return made

    outside, block = list_parts(kind)
    pieces = make(outside, torch.Generator().manual_seed(seed))
    for number in range(blocks):
        pieces += make(block, torch.Generator().manual_seed(1000 * (seed + 1) + number))
    return torch.cat(pieces)


def deepen(flat: Tensor, kind: str, blocks: int) -> Tensor:
    """Return twice as many blocks: copies of all stand behind them."""
    size = sum(math.prod(part.shape) for part in list_parts(kind)[1])
    return torch.cat([flat, flat[-blocks * size :]])


def split_weights(flat: Tensor, kind: str, blocks: int) -> tuple[dict[str, Tensor], list[Any]]:
    """Return views of [rows, parameters]: those outside the blocks, and those of each block."""
    outside, block = list_parts(kind)
    parts = outside + block * blocks
    pieces = flat.split([math.prod(part.shape) for part in parts], 1)
    views = [piece.view(-1, *part.shape) for piece, part in zip(pieces, parts, strict=True)]
    names, n = [part.name for part in block], len(block)
    rest = views[len(outside) :]
    each = [dict(zip(names, rest[i : i + n], strict=True)) for i in range(0, len(rest), n)]
    return dict(zip([part.name for part in outside], views, strict=False)), each


def decay_mask(kind: str, blocks: int) -> Tensor:
    """Return 1 for weights of matrices, which decay, and 0 for the others."""
    outside, block = list_parts(kind)
    return torch.cat(
        [
            torch.full((math.prod(part.shape),), float(len(part.shape) > 1))
            for part in outside + block * blocks
        ]
    )


def block_cost(kind: str) -> tuple[float, float]:
    """Return multiplications of one sample's forward pass: outside the blocks, and of one block."""
    c = WIDTHS[kind]
    if kind == "cnn":
        return 256 * 27 * c + 10 * c, 256 * 18 * c * c
    outside = TOKENS * c * (256 if kind == "gpt" else 12)
    return outside, TOKENS * (12 * c * c + 2 * TOKENS * c)


def forward(kind: str, flat: Tensor, blocks: int, x: Tensor) -> Tensor:
    """Return logits [R, B, K] of images [R, B, 3, 16, 16], or [R, B, T, K] of bytes [R, B, T]."""
    rows, batch = x.shape[:2]
    half = torch.bfloat16 if flat.is_cuda else torch.float32
    w, each = split_weights(flat.to(half), kind, blocks)
    if kind == "cnn":
        x = _convolve(x.to(half), w["stem"])
        for b in each:
            y = torch.relu(_normalise(x, b["scale1"], b["shift1"]))
            y = _normalise(_convolve(y, b["conv1"]), b["scale2"], b["shift2"])
            x = x + _convolve(torch.relu(y), b["conv2"])
        return torch.relu(_normalise(x, w["scale"], w["shift"])).mean((3, 4)) @ w["head"]
    if kind == "gpt":
        index = x + 256 * torch.arange(rows, device=x.device)[:, None, None]
        x = F.embedding(index, w["embed"].flatten(0, 1))
    else:
        x = x.to(half).reshape(rows, batch, 3, 8, 2, 8, 2).permute(0, 1, 3, 5, 2, 4, 6)
        x = _times(x.reshape(rows, batch, TOKENS, 12), w["embed"])
    x = x + w["places"][:, None]
    for b in each:
        q, k, v = (
            _heads(part) for part in _times(_layer_norm(x, b["norm1"]), b["qkv"]).chunk(3, -1)
        )
        y = F.scaled_dot_product_attention(q, k, v, is_causal=kind == "gpt")
        x = x + _times(y.transpose(1, 2).reshape(x.shape), b["out"])
        x = x + _times(F.gelu(_times(_layer_norm(x, b["norm2"]), b["up"])), b["down"])
    x = _layer_norm(x, w["norm"])
    return _times(x, w["head"]) if kind == "gpt" else x.mean(2) @ w["head"]


def _times(x: Tensor, weight: Tensor) -> Tensor:
    return (x.flatten(1, 2) @ weight).view(*x.shape[:3], -1)


def _heads(x: Tensor) -> Tensor:
    rows, batch, tokens, width = x.shape
    return x.reshape(rows * batch, tokens, HEADS, width // HEADS).transpose(1, 2)


def _layer_norm(x: Tensor, scale: Tensor) -> Tensor:
    return F.layer_norm(x, x.shape[-1:]) * scale[:, None, None]


def _convolve(x: Tensor, weight: Tensor) -> Tensor:
    """Convolve images [R, B, C, H, W] by kernels [R, 9 C, D], each row by its own.

    A grouped convolution with a group for every row is several times slower, and so are nine
    shifted copies: their backward pass is a hundred small kernels.
    """
    rows, batch, channels, height, width = x.shape
    if rows == 1:  # the library's own convolution is three times as fast on a CPU
        kernel = weight[0].mT.reshape(-1, channels, 3, 3)
        return F.conv2d(x[0], kernel, padding=1)[None]
    columns = F.unfold(x.flatten(0, 1), 3, padding=1).view(rows, batch, -1, height * width)
    out = weight.mT[:, None] @ columns
    return out.view(rows, batch, -1, height, width)


def _normalise(x: Tensor, scale: Tensor, shift: Tensor) -> Tensor:
    """Normalise all channels of a sample together, whatever the batch is."""
    x = F.layer_norm(x, x.shape[2:])
    return x * scale[:, None, :, None, None] + shift[:, None, :, None, None]


# ---- Data


def read_images(file: Any, name: str) -> list[np.ndarray]:
    """Return training images and labels, then test images and labels, of a data set."""
    data, _, how = name.partition("/")
    if data == "echo":
        return [*make_echo(how, 20_000, seed=1), *make_echo(how, 4_000, seed=2)]
    found: list[np.ndarray] = []
    for part in ("", "test_"):
        x, y = file[f"{data}.{part}x"], file[f"{data}.{part}y"]
        found += compose(x, y, how) if how else (x, y)
    return found


def compose(x: np.ndarray, y: np.ndarray, how: str) -> tuple[np.ndarray, np.ndarray]:
    """Return images [N, 3, 16, 16] of four small images each; the label is that of one of them.

    `marked`: the small image that counts has a red corner. `pointed`: the colour of the whole
    image's first corner says which one counts, so this has to be known at a distance.
    """
    draw = np.random.default_rng(5)
    count = len(x)
    small = x.reshape(count, 3, 8, 2, 8, 2).mean((3, 5)).astype(np.uint8)
    four = draw.integers(count, size=(count, 4))
    grid = small[four].reshape(count, 2, 2, 3, 8, 8).transpose(0, 3, 1, 4, 2, 5)
    made = np.ascontiguousarray(grid).reshape(count, 3, 16, 16)
    chosen = draw.integers(4, size=count)
    row, column = 8 * (chosen // 2), 8 * (chosen % 2)
    colours = np.array([[255, 0, 0], [0, 255, 0], [0, 0, 255], [255, 255, 255]], np.uint8)
    for i in range(count):
        if how == "marked":
            made[i, :, row[i] : row[i] + 2, column[i] : column[i] + 2] = colours[0][:, None, None]
        else:
            made[i, :, :2, :2] = colours[chosen[i]][:, None, None]
    return made, y[four[np.arange(count), chosen]]


def make_echo(level: str, count: int, seed: int) -> tuple[np.ndarray, np.ndarray]:
    """Return images [N, 3, 16, 16] of noise that repeats itself, and how it does.

    Each image is noise plus the same noise moved right or down by one of five distances: ten
    classes. A network has to see both ends of that distance at once.
    """
    draw = np.random.default_rng(seed)
    labels = draw.integers(10, size=count)
    lags = np.array(LAGS[level])[labels % 5]
    noise = draw.normal(0, 1, (count, 32, 32)).astype(np.float32)
    grey = np.empty((count, 16, 16), np.float32)
    for image, lag in enumerate(lags):
        down, right = (lag, 0) if labels[image] >= 5 else (0, lag)
        moved = noise[image, down : down + 16, right : right + 16]
        grey[image] = noise[image, :16, :16] + moved
    x = 110 + 50 * grey[:, None] + draw.normal(0, 10, (count, 3, 16, 16))
    return np.clip(x, 0, 255).astype(np.uint8), labels


class Data:
    """Samples of all members of one kind, on the device."""

    def __init__(self, path: Path, kind: str, members: list[Member], device: torch.device) -> None:
        self.kind, self.members, self.device = kind, members, device
        self.counts = torch.tensor([member.samples for member in members]).to(device)
        with np.load(path) as file:
            names = sorted({member.data for member in members})
            if kind == "gpt":
                self._open_text({n: (file[f"{n}.x"], file[f"{n}.test"]) for n in names})
            else:
                self._open_images({name: read_images(file, name) for name in names})
        self.window = torch.arange(TOKENS + 1, device=device)

    def _open_text(self, texts: dict[str, tuple[np.ndarray, np.ndarray]]) -> None:
        most = (max(member.samples for member in self.members) + 1) * TOKENS + 1
        train = torch.zeros(len(self.members), most, dtype=torch.uint8)
        held = (VALIDATION + TEST) // 4 * TOKENS + 1
        held_out = torch.zeros(len(self.members), held, dtype=torch.uint8)
        for number, member in enumerate(self.members):
            draw = np.random.default_rng(1000 + number)
            text, test = texts[member.data]
            self.counts[number] = count = min(member.samples, len(text) // TOKENS - 2)
            size = (count + 1) * TOKENS + 1
            start = int(draw.integers(len(text) - size))
            mine = np.concatenate([text[start : start + size], test[:held]])
            wrong = draw.random(len(mine)) < member.wrong
            wrong[size + VALIDATION // 4 * TOKENS + 1 :] = False  # the test is clean
            mine = np.where(wrong, draw.permutation(mine), mine)
            train[number, :size] = torch.from_numpy(mine[:size])
            held_out[number] = torch.from_numpy(mine[size:])
        self.train, self.held = train.to(self.device), held_out.to(self.device)

    def _open_images(self, sets: dict[str, list[np.ndarray]]) -> None:
        pixels, self.places, self.labels, offset = [], [], [], 0
        starts = {}
        for name, (x, y, test_x, test_y) in sets.items():
            starts[name] = (offset, y, offset + len(x), test_y)
            pixels += [x, test_x]
            offset += len(x) + len(test_x)
        self.pixels = torch.from_numpy(np.concatenate(pixels)).to(self.device)
        most = max(member.samples for member in self.members)
        size = most + VALIDATION + TEST
        places = np.zeros((len(self.members), size), np.int64)
        labels = np.zeros((len(self.members), size), np.int64)
        for number, member in enumerate(self.members):
            draw = np.random.default_rng(1000 + number)
            first, y, first_test, test_y = starts[member.data]
            classes = draw.permutation(10)[: member.classes]
            order = np.full(10, -1)
            order[classes] = np.arange(member.classes)
            mine = draw.permutation(np.flatnonzero(order[y] >= 0))
            count = min(member.samples, len(mine))
            self.counts[number] = count
            held = np.flatnonzero(order[test_y] >= 0)
            # A problem of few classes has fewer held-out images: those it has are repeated.
            cut = min(VALIDATION, len(held) // 4)
            held = np.concatenate([np.resize(held[:cut], VALIDATION), np.resize(held[cut:], TEST)])
            places[number, :count], places[number, most:] = first + mine[:count], first_test + held
            told = np.concatenate([order[y][mine[:count]], order[test_y][held]])
            wrong = draw.random(len(told)) < member.wrong
            wrong[count + VALIDATION :] = False  # the test is clean
            told = np.where(wrong, draw.integers(member.classes, size=len(told)), told)
            labels[number, :count], labels[number, most:] = told[:count], told[count:]
        self.most = most
        self.places = torch.from_numpy(places).to(self.device)
        self.labels = torch.from_numpy(labels).to(self.device)
        noise = torch.tensor([member.noise for member in self.members]).to(self.device)
        self.noise = noise[:, None, None, None, None]

    def read(self, numbers: Tensor, which: Tensor) -> tuple[Tensor, Tensor]:
        """Return training inputs and targets: samples `which` [R, B] of members `numbers` [R]."""
        if self.kind == "gpt":
            # Windows begin anywhere, so that no position always has the same part of a line.
            shift = (torch.rand(which.shape, device=self.device) * TOKENS).long()
            at = (which * TOKENS + shift)[..., None] + self.window
            windows = self.train[numbers[:, None, None], at].long()
            return windows[..., :-1], windows[..., 1:]
        x, y = self._images(numbers, which)
        # Half of the images are mirrored, and all are shifted alike by up to two pixels.
        mirrored = torch.rand(*x.shape[:2], 1, 1, 1, device=self.device) < 0.5
        x = torch.where(mirrored, x.flip(-1), x)
        pixels = torch.arange(16, device=self.device)
        down, right = (torch.rand(2, 1, device=self.device) * 5).long() - 2
        x = x.index_select(3, (pixels + down).clamp(0, 15))
        return x.index_select(4, (pixels + right).clamp(0, 15)), y

    def _images(self, numbers: Tensor, which: Tensor) -> tuple[Tensor, Tensor]:
        x = (self.pixels[self.places[numbers[:, None], which]].float() - 110) / 70
        x = x + self.noise[numbers] * torch.randn_like(x)
        return x, self.labels[numbers[:, None], which]

    def read_held_out(self, numbers: Tensor, start: int, end: int) -> tuple[Tensor, Tensor]:
        """Return inputs and targets of held-out samples: validation first, then test."""
        if self.kind == "gpt":
            which = torch.arange(start // 4, end // 4, device=self.device)
            at = which[:, None] * TOKENS + self.window
            windows = self.held[numbers][:, at].long()
            return windows[..., :-1], windows[..., 1:]
        which = torch.arange(self.most + start, self.most + end, device=self.device)
        return self._images(numbers, which.expand(len(numbers), -1))


# ---- Training rows that have the same number of blocks


@dataclass
class Row:
    """One network of one plan, and how far it is."""

    member: Member
    plan: str
    seed: int
    number: int
    """Of the member, in the tables of samples."""
    rate: float = 1.0
    """Factor of the kind's learning rate."""
    state: Tensor | None = None
    """Weights and both moments of AdamW, [3, parameters]."""
    taken: int = 0
    """Optimizer steps so far."""
    spent: float = 0.0
    """FLOPs so far, as a share of the budget."""
    best: float = math.inf
    kept: Tensor | None = None
    """Weights where the validation loss was best, and how many blocks they have."""
    kept_blocks: int = 0
    curve: list[tuple[float, ...]] = field(default_factory=list)
    """Share of the budget, training loss, validation loss and error, gradient norm."""

    def share_of_step(self, blocks: int) -> float:
        """Return the share of the budget that a step takes."""
        outside, one = block_cost(self.member.kind)
        return (outside + blocks * one) / (outside + one) / self.member.steps

    def end_of(self, blocks: int) -> float:
        """Return the share of the budget up to which the plan has so many blocks."""
        plan = PLANS[self.plan]
        depths = [depth for _, depth in plan]
        later = depths.index(blocks) + 1
        return plan[later][0] if later < len(plan) else 1.0

    def steps_at(self, blocks: int) -> int:
        """Return how many steps the plan takes with so many blocks."""
        return max(1, round((self.end_of(blocks) - self.spent) / self.share_of_step(blocks)))


def train_stage(rows: list[Row], blocks: int, data: Data) -> None:
    """Train rows with so many blocks, each up to its own share of the budget."""
    kind, device, count = data.kind, data.device, len(rows)
    flat, m, v = torch.stack([row.state.to(device) for row in rows]).unbind(1)  # type: ignore[union-attr]
    flat, m, v = flat.contiguous().requires_grad_(True), m.contiguous(), v.contiguous()
    mask = 0.05 * decay_mask(kind, blocks).to(device)
    number = torch.tensor([row.number for row in rows], device=device)
    taken = torch.tensor([row.taken for row in rows], device=device, dtype=torch.float32)
    steps = torch.tensor([row.steps_at(blocks) for row in rows])
    cost = torch.tensor([row.share_of_step(blocks) for row in rows], dtype=torch.float64)
    spent = torch.tensor([row.spent for row in rows], dtype=torch.float64)
    rates = RATES[kind] * torch.tensor([row.rate for row in rows], dtype=torch.float64)
    which = torch.zeros(count, BATCH, dtype=torch.int64, device=device)
    rate = torch.zeros(count, 1, device=device)
    seen = torch.zeros(count, 2, device=device)
    """Sums of training losses and gradient norms since they were read last."""

    def step() -> None:
        x, y = data.read(number, which)
        logits = forward(kind, flat, blocks, x)
        loss = F.cross_entropy(logits.float().flatten(0, -2), y.flatten(), reduction="none")
        each = loss.view(count, -1).mean(1)
        (grad,) = torch.autograd.grad(each.sum(), flat)
        with torch.no_grad():
            norm = grad.norm(dim=1, keepdim=True)
            seen.add_(torch.where(rate > 0, torch.stack([each, norm[:, 0]], 1), 0.0))
            grad.mul_(1.0 / norm.clamp(min=1.0))
            active = (rate > 0).float()
            m.lerp_(grad, 0.1 * active)
            v.lerp_(grad.square_(), 0.02 * active)
            taken.add_(active[:, 0])
            one = 1 - 0.9 ** taken.clamp(min=1)
            two = 1 - 0.98 ** taken.clamp(min=1)
            move = (m / one[:, None]) / ((v / two[:, None]).sqrt_() + 1e-8)
            flat.sub_(rate * (move + mask * flat))

    graph = None
    if device.type == "cuda":
        stream = torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):  # the rate is 0, so nothing changes
            for _ in range(2):
                step()
        torch.cuda.current_stream().wait_stream(stream)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            step()

    draw = torch.Generator(device).manual_seed(int(number.sum()) + blocks)
    counts = data.counts[number][:, None]
    longest = int(steps.max())
    ending = spent + cost * steps
    due = [1 + int(EVALUATIONS * float(share) + 1e-9) for share in spent]
    read_at, closed = [0] * count, [False] * count
    stride = max(1, int((1 / EVALUATIONS / cost).min() / 2))
    for at in range(longest):
        share = spent + cost * (at + 1)
        factor = torch.minimum(share / WARMUP, (1.0 - share) / DECAY).clamp(0.0, 1.0)
        # The last step of a run has a rate too.
        factor = factor.clamp(min=1e-3) * (at < steps)
        rate.copy_((rates * factor).float()[:, None], non_blocking=True)
        which.copy_((torch.rand(count, BATCH, device=device, generator=draw) * counts).long())
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
            if not closed[i] and (each >= due[i] / EVALUATIONS - 1e-9 or at + 1 >= steps[i])
        ]
        if not ready:
            continue
        chosen = flat.detach()[ready]
        losses, errors = measure(data, chosen, blocks, number[ready], 0, VALIDATION)
        sums = seen[ready].tolist()
        seen[ready] = 0.0
        for place, i in enumerate(ready):
            row, now = rows[i], min(at + 1, int(steps[i]))
            closed[i] = at + 1 >= int(steps[i])
            due[i] = 1 + int(EVALUATIONS * float(share[i]) + 1e-9)
            trained, norm = (each / max(now - read_at[i], 1) for each in sums[place])
            read_at[i] = now
            row.curve.append((float(share[i]), trained, losses[place], errors[place], norm))
            if losses[place] < row.best:
                row.best, row.kept_blocks = losses[place], blocks
                row.kept = chosen[place].clone()
    states = torch.stack([flat.detach(), m, v], 1)
    for i, row in enumerate(rows):
        row.state, row.taken, row.spent = states[i].clone(), int(taken[i]), float(ending[i])


@torch.no_grad()
def measure(
    data: Data, flat: Tensor, blocks: int, numbers: Tensor, start: int, end: int
) -> tuple[list[float], list[float]]:
    """Return the mean loss and the share of errors of every row on held-out samples."""
    losses = torch.zeros(len(flat), device=flat.device)
    errors = torch.zeros_like(losses)
    parts = 256
    with torch.random.fork_rng(devices=[flat.device] if flat.is_cuda else []):
        torch.manual_seed(7)  # images get the same noise every time
        for at in range(start, end, parts):
            x, y = data.read_held_out(numbers, at, min(at + parts, end))
            logits = forward(data.kind, flat, blocks, x)
            loss = F.cross_entropy(logits.float().flatten(0, -2), y.flatten(), reduction="none")
            weight = min(parts, end - at) / (end - start)
            losses += loss.view(len(flat), -1).mean(1) * weight
            errors += (logits.argmax(-1) != y).float().flatten(1).mean(1) * weight
    return losses.tolist(), errors.tolist()


def score(rows: list[Row], data: Data) -> dict[int, tuple[float, float]]:
    """Return test loss and error of the weights that every row kept, by the row's id."""
    found = {}
    for blocks in DEPTHS:
        which = [row for row in rows if row.kept_blocks == blocks]
        for begin in range(0, len(which), 128):
            part = which[begin : begin + 128]
            flat = torch.stack([row.kept for row in part])  # type: ignore[misc]
            numbers = torch.tensor([row.number for row in part], device=data.device)
            both = measure(data, flat, blocks, numbers, VALIDATION, VALIDATION + TEST)
            found |= {id(row): pair for row, *pair in zip(part, *both, strict=True)}
    return found  # type: ignore[return-value]


def play(rows: list[Row], data: Data, most: int, out: Path, deadline: float) -> None:
    """Train rows of one kind to the end of their budgets; write them down."""
    waiting: dict[int, list[Row]] = defaultdict(list)
    for row in rows:
        blocks = PLANS[row.plan][0][1]
        weights = make_network(data.kind, row.seed, blocks)
        row.state = torch.stack([weights, *[torch.zeros_like(weights)] * 2])
        waiting[blocks].append(row)
    for blocks in DEPTHS:
        # Rows that take about as many steps go together.
        queue = sorted(waiting[blocks], key=lambda row: row.steps_at(blocks))
        while queue:
            longest = queue[-1].steps_at(blocks)
            part = [row for row in queue[-most:] if row.steps_at(blocks) > 0.5 * longest]
            queue = queue[: -len(part)]
            started = time.monotonic()
            train_stage(part, blocks, data)
            print(
                f"{data.kind}: {len(part)} rows of {blocks} blocks, {longest} steps at most, "
                f"{time.monotonic() - started:.1f} s",
                flush=True,
            )
            finished = [row for row in part if row.end_of(blocks) >= 1.0]
            scores = score(finished, data)
            for row in part:
                if id(row) not in scores:
                    assert row.state is not None
                    row.state = torch.stack([deepen(p, data.kind, blocks) for p in row.state])
                    waiting[2 * blocks].append(row)
                    continue
                write(row, scores[id(row)], out)
                row.state = row.kept = None
            if time.monotonic() > deadline:
                print("out of time; what is finished is written", flush=True)
                return


def write(row: Row, scores: tuple[float, float], out: Path) -> None:
    """Append a finished row to the results."""
    record = {
        **asdict(row.member),
        "label": row.member.label,
        "plan": row.plan,
        "seed": row.seed,
        "rate": row.rate,
        "kept_blocks": row.kept_blocks,
        "test_loss": scores[0],
        "test_error": scores[1],
        "score": scores[0] / math.log(2) if row.member.kind == "gpt" else scores[1],
        "val_loss": row.best,
        "curve": [[float(f"{v:.4g}") for v in point] for point in row.curve],
    }
    with out.open("a", encoding="utf-8") as file:
        file.write(json.dumps(record) + "\n")


def run(options: argparse.Namespace) -> None:
    """Train every plan of every member that is not in the results yet."""
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    torch.backends.cuda.matmul.allow_tf32 = True
    if options.texts:
        members = list_texts(options.texts, options.budgets)
    elif options.images:
        members = list_images(options.images, options.budgets)
    elif options.grid:
        members = list_grid(options.budgets)
    else:
        members = draw_members(options.draw, options.members)
    if options.steps:
        members = [Member(**{**asdict(m), "steps": options.steps}) for m in members]
    done = set()
    if options.out.exists():
        for line in options.out.read_text("utf-8").splitlines():
            one = json.loads(line)
            done.add((one["label"], one["plan"], one["seed"], one["rate"]))
    deadline = time.monotonic() + options.seconds
    for kind in options.kinds or RATES:
        mine = [member for member in members if member.kind == kind]
        if not mine:
            continue
        data = Data(options.data, kind, mine, device)
        rows = [
            Row(member, plan, seed, number, rate)
            for number, member in enumerate(mine)
            for plan, seed, rate in itertools.product(
                options.plans or PLANS, options.only_seeds or range(options.seeds), options.rates
            )
            if (member.label, plan, seed, rate) not in done
        ]
        if rows and time.monotonic() < deadline:
            play(rows, data, options.rows, options.out, deadline)


def prepare(options: argparse.Namespace) -> None:
    """Write all data into one file: 20,000 images of a set, 8 million bytes of a text at most."""
    found: dict[str, Any] = {}
    for name, path in (("cifar", options.cifar), ("fashion", options.fashion)):
        if path is None:
            continue
        with np.load(path) as file:
            for part, count in (("train", 20000), ("test", 4000)):
                x = file[f"x_{part}"][:count]
                if x.shape[1] == 1:
                    x = np.pad(x, ((0, 0), (0, 0), (1, 1), (1, 1))).repeat(3, 1)
                ending = "" if part == "train" else "test_"
                found[f"{name}.{ending}x"] = x
                found[f"{name}.{ending}y"] = file[f"y_{part}"][:count]
    texts = {}
    for named in options.text:
        name, _, path = named.partition("=")
        texts[name] = np.frombuffer(Path(path).read_bytes(), np.uint8)[:8_000_000]
    for named in options.computed:
        texts[named] = _compute_text(named)
    if "stories" in texts:
        texts |= _draw_texts(texts["stories"])
    for name, text in texts.items():
        held = 100_000
        found[f"{name}.x"], found[f"{name}.test"] = text[:-held], text[-held:]
    np.savez_compressed(options.out, **found)


def _compute_text(named: str) -> np.ndarray:
    """Return a text of Esper's own tasks, such as `sources`, or `facts:600` at a level."""
    # Imported here, because a machine without Esper can run members on files that it was given.
    from esper.lab.tasks import get_task

    name, _, level = named.partition(":")
    changes = {"level": int(level)} if level else {}
    return get_task(name, **changes).read(None).x.reshape(-1)


def _draw_texts(stories: np.ndarray) -> dict[str, np.ndarray]:
    """Return the texts of the first maps."""
    draw, texts = np.random.default_rng(0), {}
    texts["chain"] = _draw_chain(stories, draw)
    sums = draw.integers(0, 1000, (500_000, 2))
    lines = [f"{a}+{b}={a + b}\n" if a > b else f"{a}*{b % 10}={a * (b % 10)}\n" for a, b in sums]
    texts["sums"] = np.frombuffer("".join(lines).encode(), np.uint8)
    texts["repeats"] = _draw_repeats(draw)
    texts["links"] = _draw_links(draw)
    return texts


def _draw_chain(text: np.ndarray, draw: np.random.Generator) -> np.ndarray:
    """Return text in which each byte depends on the two before it alone, as often as in `text`."""
    followers: dict[tuple[int, int], list[int]] = defaultdict(list)
    for a, b, c in zip(text[:-2], text[1:-1], text[2:], strict=True):
        followers[int(a), int(b)].append(int(c))
    made, choices = [int(text[0]), int(text[1])], draw.random(4_000_000)
    for choice in choices:
        options = followers.get((made[-2], made[-1])) or [32]
        made.append(options[int(choice * len(options))])
    return np.array(made, np.uint8)


def _draw_repeats(draw: np.random.Generator) -> np.ndarray:
    """Return lines of eight words that are drawn from three random words of five letters."""
    words = draw.integers(97, 123, (120_000, 3, 5), dtype=np.uint8)
    chosen = draw.integers(3, size=(120_000, 8))
    lines = np.full((120_000, 8, 6), 32, np.uint8)
    lines[..., :5] = words[np.arange(120_000)[:, None], chosen]
    lines[:, -1, 5] = 10
    return lines.reshape(-1)


def _draw_links(draw: np.random.Generator) -> np.ndarray:
    """Return lines of four variables, some named after others, and the values of all four."""
    lines = []
    for _ in range(200_000):
        names = [chr(97 + i) for i in draw.permutation(26)[:4]]
        values: dict[str, str] = {}
        said = []
        for i, name in enumerate(names):
            source = names[int(draw.integers(i))] if i and draw.random() < 0.7 else ""
            values[name] = values[source] if source else str(draw.integers(10))
            said.append(f"{name}={source or values[name]}")
        asked = [names[i] for i in draw.permutation(4)]
        lines.append(",".join(said) + ":" + ",".join(f"{n}{values[n]}" for n in asked) + "\n")
    return np.frombuffer("".join(lines).encode(), np.uint8)


def read_scores(path: Path) -> dict[str, dict[str, dict[int, float]]]:
    """Return scores by member, plan and seed; the best rate of those that were tried is taken."""
    found: dict[str, dict[str, dict[int, float]]] = defaultdict(lambda: defaultdict(dict))
    for line in path.read_text("utf-8").splitlines():
        one = json.loads(line)
        found[one["label"]][one["plan"]][one["seed"]] = one["score"]
    return found


def summarise(options: argparse.Namespace) -> None:
    """Print what decisions are worth: the best in hindsight against the best single one."""
    found = read_scores(options.results)
    plans = [p for p in PLANS if all(p in arms for arms in found.values())]
    seeds = min(len(arms[plan]) for arms in found.values() for plan in plans)
    rows = [
        [[s for _, s in sorted(arms[plan].items())[:seeds]] for plan in plans]
        for arms in found.values()
    ]
    logs = np.log(np.array(rows))  # members, plans, seeds
    if "1" in plans:
        print_gains(list(found), plans, logs)
    print_headroom(list(found), plans, logs)


def print_gains(labels: list[str], plans: list[str], logs: np.ndarray) -> None:
    """Print by how many percent each plan lowers the score of never growing, for every seed."""
    gains = 100 * -np.expm1(logs - logs[:, [plans.index("1")]]) + 0.0  # no -0.0
    print("| member | " + " | ".join(plans) + " |\n|" + "---|" * (len(plans) + 1))
    for label, row in sorted(zip(labels, gains, strict=True), key=lambda pair: pair[0]):
        print(f"| {label} |", " | ".join(", ".join(f"{g:+.1f}" for g in each) for each in row), "|")
    means = 100 * -np.expm1((logs - logs[:, [plans.index("1")]]).mean((0, 2))) + 0.0
    print("| mean |", " | ".join(f"{mean:+.1f}" for mean in means), "|\n")


def print_headroom(labels: list[str], plans: list[str], logs: np.ndarray) -> None:
    """Print each member's best plan and the value of hindsight, chosen and scored on two halves."""
    seeds = logs.shape[2]
    halves = [(list(range(0, seeds, 2)), list(range(1, seeds, 2)))]
    halves.append(halves[0][::-1])
    own, single = [], []
    for choose, judge in halves if seeds > 1 else [([0], [0])]:
        best = logs[:, :, choose].mean(2).argmin(1)
        one = logs[:, :, choose].mean((0, 2)).argmin()
        own.append(logs[np.arange(len(logs)), best][:, judge].mean(1))
        single.append(logs[:, one][:, judge].mean(1))
    gain = np.mean(single, 0) - np.mean(own, 0)
    means = logs.mean(2)
    for label, mean, won in zip(labels, means, gain, strict=True):
        statics = " ".join(
            f"{p}:{math.exp(mean[i]):.4f}" for i, p in enumerate(plans) if len(p) < 2
        )
        grown = [(m, p) for m, p in zip(mean, plans, strict=True) if ">" in p]
        best = f"grown {min(grown)[1]:22} {math.exp(min(grown)[0]):.4f}, " if grown else ""
        print(f"{label:40} static {statics}  {best}hindsight {won:+.3f}")
    print("\nmean log score of every plan over members:")
    for plan, value in sorted(zip(plans, means.mean(0), strict=True), key=lambda pair: pair[1]):
        print(f"  {plan:28} {value:+.4f}")
    error = gain.std(ddof=1) / math.sqrt(len(gain))
    print(
        "\nhindsight (chosen on half of the seeds, scored on the others) over the best single "
        f"plan: {100 * gain.mean():.1f} % ± {100 * error:.1f} of the score, "
        f"{len(gain)} members, {seeds} seeds"
    )


def main() -> int:
    """Run the chosen verb."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    verbs = parser.add_subparsers(dest="verb", required=True)
    made = verbs.add_parser("prepare", help="write all data into one file")
    made.add_argument("--cifar", type=Path)
    made.add_argument("--fashion", type=Path)
    made.add_argument("--text", action="append", default=[], metavar="NAME=FILE")
    made.add_argument("--computed", nargs="+", default=[], metavar="NAME[:LEVEL]")
    made.add_argument("--out", type=Path, required=True)
    played = verbs.add_parser("run", help="train what is not in the results yet")
    played.add_argument("--data", type=Path, required=True)
    played.add_argument("--out", type=Path, required=True)
    played.add_argument("--draw", type=int, default=0, help="seed of the members")
    played.add_argument("--members", type=int, default=8, help="of every kind")
    played.add_argument(
        "--grid", action="store_true", help="members that differ in one fact at a time instead"
    )
    played.add_argument(
        "--budgets",
        type=int,
        nargs="+",
        default=[2000, 8000, 24000],
        help="of the grid and of texts, in steps",
    )
    played.add_argument(
        "--texts", nargs="+", metavar="NAME[~WRONG]", help="members on these texts instead"
    )
    played.add_argument("--images", nargs="+", metavar="NAME", help="or on these images")
    played.add_argument("--seeds", type=int, default=4)
    played.add_argument("--only-seeds", type=int, nargs="+", help="these seeds instead")
    played.add_argument("--rows", type=int, default=512, help="networks side by side")
    played.add_argument("--kinds", nargs="+", choices=tuple(RATES))
    played.add_argument("--plans", nargs="+", choices=tuple(PLANS))
    played.add_argument("--steps", type=int, default=0, help="another budget, to try things out")
    played.add_argument(
        "--rates", type=float, nargs="+", default=[1.0], help="factors of the kind's learning rate"
    )
    played.add_argument("--seconds", type=float, default=1e9)
    told = verbs.add_parser("summary", help="print what decisions are worth")
    told.add_argument("results", type=Path)
    options = parser.parse_args()
    {"prepare": prepare, "run": run, "summary": summarise}[options.verb](options)
    return 0


if __name__ == "__main__":
    sys.exit(main())
