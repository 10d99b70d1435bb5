"""Which norm, optimizer, schedule and learning rate suit small convolutional hosts.

Plain and residual CNNs are trained on CIFAR-10 at 16x16, many at once: models that share an
architecture and a norm are stacked, and every row has its own optimizer, learning rate, schedule
and seed. A convolution is one gather of patches and one batched matrix product; a step is one
captured graph on a CUDA device.

    python research/campaign/norms.py --data cifar16.npz --out norms.jsonl --seconds 420
    python research/campaign/norms.py --summary norms.jsonl

Every checkpoint of every model is a line of JSON. `val` chooses the learning rate, `test` is what
is reported. Batch norm is scored three ways: with running averages (`test`), with the statistics
of the scored set itself (`test_batch`), and with those of 1,024 fixed validation images
(`test_fixed`).
Residual networks are also scored with the residual branch of their second block switched off.
"""

from __future__ import annotations

import argparse
import gc
import json
import math
import sys
import time
import traceback
from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, NamedTuple

import numpy as np
import torch
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.nn import functional as F

EPS = 1e-5
CLASSES = 10
FIXED_SAMPLES = 1024
WARM_UP = 0.05
T_95 = (0.0, 12.706, 4.303, 3.182, 2.776, 2.571, 2.447, 2.365, 2.306, 2.262)
"""Two-sided 95 % quantiles of Student's t, by degrees of freedom."""

Mode = Literal["train", "running", "batch", "fixed"]


# --- what is compared --------------------------------------------------------------------------


@dataclass(frozen=True)
class Norm:
    """A norm: over which of batch, positions and channels of a group, centred or not."""

    group: int | None
    """Channels of a group; None is all of them, and 0 is no norm at all."""
    over_batch: bool = False
    over_positions: bool = True
    centred: bool = True
    standardise_weights: bool = False
    threshold: bool = False
    """Whether the ReLU's threshold is learned, as filter response normalization has it."""
    eps: float = EPS


NORMS: dict[str, Norm] = {
    "gn1": Norm(group=None),
    "gn4": Norm(group=4),
    "bn": Norm(group=1, over_batch=True),
    "ws_gn4": Norm(group=4, standardise_weights=True),
    "frn": Norm(group=1, centred=False, threshold=True, eps=1e-6),
    "gn8": Norm(group=8),
    "ln": Norm(group=None, over_positions=False),
    "rms": Norm(group=None, over_positions=False, centred=False),
    "rms4": Norm(group=4, centred=False),
    "none": Norm(group=0),
    "gn2": Norm(group=2),
    "instance": Norm(group=1),
    "frn_relu": Norm(group=1, centred=False, eps=1e-6),
    "ws_gn1": Norm(group=None, standardise_weights=True),
}

SGD_RATES = tuple(float(x) for x in np.geomspace(0.01, 0.8, 6))
ADAM_RATES = tuple(float(x) for x in np.geomspace(3e-4, 3e-2, 6))


@dataclass(frozen=True)
class Recipe:
    """An optimizer with its schedule."""

    optimizer: Literal["sgd", "adamw"]
    clip: float
    """Gradient norm of a model to which it is clipped; infinity where it is not."""
    schedule: Literal["cosine", "constant"]

    @property
    def name(self) -> str:
        """A name for tables."""
        clip = "-clip" if math.isfinite(self.clip) else ""
        return f"{self.optimizer}{clip}/{self.schedule}"

    @property
    def rates(self) -> tuple[float, ...]:
        """The learning rates tried."""
        return SGD_RATES if self.optimizer == "sgd" else ADAM_RATES

    @property
    def weight_decay(self) -> float:
        """The customary weight decay of this optimizer."""
        return 5e-4 if self.optimizer == "sgd" else 0.01


FREE = math.inf
MAIN = (
    Recipe("sgd", 1.0, "cosine"),
    Recipe("adamw", FREE, "cosine"),
    Recipe("sgd", 1.0, "constant"),
)
OTHER = (
    Recipe("sgd", FREE, "cosine"),
    Recipe("adamw", FREE, "constant"),
    Recipe("sgd", FREE, "constant"),
)
RECIPES = {recipe.name: recipe for recipe in (*MAIN, *OTHER)}

ARCHITECTURES: dict[str, tuple[str, int]] = {
    "plain16": ("plain", 16),
    "plain8": ("plain", 8),
    "res8": ("residual", 8),
    "res16": ("residual", 16),
}

FIRST = ("gn1", "gn4", "bn", "ws_gn4", "frn")
REST = ("ln", "gn8", "none", "rms", "rms4", "gn2", "instance", "frn_relu", "ws_gn1")


def default_order() -> list[tuple[str, str, tuple[Recipe, ...]]]:
    """Return the stacks, those that matter most first."""
    return [
        *(("plain16", norm, MAIN) for norm in FIRST),
        *(("plain16", norm, MAIN) for norm in REST[:6]),
        *(("res8", norm, MAIN) for norm in ("gn4", "bn", "gn1", "ws_gn4", "frn")),
        *(("plain16", norm, OTHER) for norm in FIRST),
        *(("plain8", norm, MAIN) for norm in ("gn4", "bn", "gn1", "ws_gn4", "frn")),
        *(("plain16", norm, MAIN) for norm in REST[6:]),
        *(("res16", norm, MAIN) for norm in ("gn4", "bn", "gn1", "ws_gn4", "frn")),
        *(("plain8", norm, MAIN) for norm in REST),
        *(("plain16", norm, OTHER) for norm in REST),
        *(("plain8", norm, OTHER) for norm in FIRST),
        *(("res8", norm, MAIN) for norm in REST),
    ]


# --- layers of stacked models ------------------------------------------------------------------
# Activations are [models, batch, height, width, channels]; all parameters lead with the models.


def patches(x: Tensor, kernel: int, stride: int) -> Tensor:
    """Return [models, batch * height' * width', kernel * kernel * channels]."""
    models, batch, height, width, channels = x.shape
    pad = kernel // 2
    if pad:
        x = F.pad(x, (0, 0, pad, pad, pad, pad))
    x = x.contiguous()
    down, across = (height - 1) // stride + 1, (width - 1) // stride + 1
    steps = x.stride()
    view = x.as_strided(
        (models, batch, down, across, kernel, kernel, channels),
        (steps[0], steps[1], stride * steps[2], stride * steps[3], steps[2], steps[3], steps[4]),
    )
    return view.reshape(models, batch * down * across, kernel * kernel * channels)


class Convolution(torch.autograd.Function):
    """A convolution without bias; weights are [models, kernel * kernel * channels, out]."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, kernel: int, stride: int) -> Tensor:
        """Return the convolved activations."""
        models, batch, height, width, _ = x.shape
        columns = patches(x, kernel, stride)
        weight = weight.to(x.dtype)
        ctx.save_for_backward(columns, weight)
        ctx.shape, ctx.kernel, ctx.stride = x.shape, kernel, stride
        down, across = (height - 1) // stride + 1, (width - 1) // stride + 1
        return torch.bmm(columns, weight).view(models, batch, down, across, -1)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        """Return the gradients of activations and weights."""
        columns, weight = ctx.saved_tensors
        models, batch, height, width, channels = ctx.shape
        kernel, stride = ctx.kernel, ctx.stride
        _, _, down, across, out = gradient.shape
        flat = gradient.reshape(models, batch * down * across, out)
        # The sum over all positions is long and its result small: in parts it fills the device.
        parts = math.gcd(flat.shape[1], 16)
        split = (models * parts, flat.shape[1] // parts, -1)
        for_weight = torch.bmm(columns.view(*split).transpose(1, 2), flat.view(*split))
        for_weight = for_weight.view(models, parts, -1, out).sum(1, dtype=torch.float32)
        if not ctx.needs_input_grad[0]:
            return None, for_weight, None, None
        spread = torch.bmm(flat, weight.transpose(1, 2))
        if kernel == 1 and stride == 1:
            return spread.view(ctx.shape), for_weight, None, None
        spread = spread.view(models, batch, down, across, kernel, kernel, channels)
        pad = kernel // 2
        grown = spread.new_zeros(models, batch, height + 2 * pad, width + 2 * pad, channels)
        for row in range(kernel):
            for column in range(kernel):
                grown[
                    :,
                    :,
                    row : row + stride * (down - 1) + 1 : stride,
                    column : column + stride * (across - 1) + 1 : stride,
                ] += spread[:, :, :, :, row, column]
        inner = grown[:, :, pad : pad + height, pad : pad + width]
        return inner, for_weight, None, None


class Statistics(NamedTuple):
    """Mean and variance by which a norm works, broadcastable to the grouped activation."""

    mean: Tensor | None
    variance: Tensor


def grouped(x: Tensor, group: int | None) -> Tensor:
    """View activations as [models, batch, positions, groups, channels of a group]."""
    models, batch, height, width, channels = x.shape
    size = channels if group is None else min(group, channels)
    return x.reshape(models, batch, height * width, channels // size, size)


def reduced(norm: Norm) -> tuple[int, ...]:
    """Return the dimensions of the grouped activation over which statistics are taken."""
    return tuple(
        dim
        for dim, is_reduced in ((1, norm.over_batch), (2, norm.over_positions), (4, True))
        if is_reduced
    )


def measure(x: Tensor, norm: Norm) -> Statistics:
    """Return the statistics of grouped activations, in full precision."""
    dims = reduced(norm)
    count = math.prod(x.shape[dim] for dim in dims)
    wide = torch.promote_types(x.dtype, torch.float32)
    # Over positions first, channel by channel: that is one quick pass; the rest is small.
    far = tuple(dim for dim in dims if dim != 4) or dims
    near = tuple(dim for dim in dims if dim not in far)
    square = torch.linalg.vector_norm(x, 2, far, keepdim=True, dtype=wide).square()
    mean = x.sum(far, keepdim=True, dtype=wide) if norm.centred else None
    if near:
        square = square.sum(near, keepdim=True)
        mean = None if mean is None else mean.sum(near, keepdim=True)
    if mean is None:
        return Statistics(None, square / count)
    mean = mean / count
    return Statistics(mean, (square / count - mean.square()).clamp_min(0.0))


def scaled(
    x: Tensor, statistics: Statistics, eps: float, gamma: Tensor, beta: Tensor | None
) -> Tensor:
    """Return grouped activations standardised, times gamma, plus beta; both [M, 1, 1, G, K]."""
    scale = torch.rsqrt(statistics.variance + eps) * gamma
    if statistics.mean is not None:
        shift = -statistics.mean * scale
        shift = shift if beta is None else shift + beta
    elif beta is not None:
        shift = beta
    else:
        return x * scale.to(x.dtype)
    return torch.addcmul(shift.to(x.dtype), x, scale.to(x.dtype))


class Standardise(torch.autograd.Function):
    """Any of the norms, with its scale and shift, on grouped activations."""

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, gamma: Tensor, beta: Tensor, norm: Norm, keep: dict[str, Statistics]
    ) -> Tensor:
        """Return the standardised activations, and keep their statistics."""
        statistics = measure(x, norm)
        keep["last"] = statistics
        ctx.save_for_backward(x, gamma, statistics.variance, statistics.mean)
        ctx.norm = norm
        return scaled(x, statistics, norm.eps, gamma, beta)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        """Return the gradients of activations, scale and shift."""
        x, gamma, variance, mean = ctx.saved_tensors
        norm: Norm = ctx.norm
        dims = reduced(norm)
        count = math.prod(x.shape[dim] for dim in dims)
        wide = torch.promote_types(x.dtype, torch.float32)
        unit = scaled(x, Statistics(mean, variance), norm.eps, torch.ones_like(gamma), None)
        product = gradient * unit
        if norm.over_positions:
            # Sums over positions serve the parameters and the statistics alike.
            plain = gradient.sum(2, keepdim=True, dtype=wide)
            by_unit = product.sum(2, keepdim=True, dtype=wide)
            rest = tuple(dim for dim in dims if dim != 2)
            mean_plain = (plain * gamma).sum(rest, keepdim=True) / count
            mean_unit = (by_unit * gamma).sum(rest, keepdim=True) / count
            for_gamma, for_beta = by_unit.sum(1, keepdim=True), plain.sum(1, keepdim=True)
        else:
            narrow = gamma.to(x.dtype)
            mean_plain = (gradient * narrow).sum(dims, keepdim=True, dtype=wide) / count
            mean_unit = (product * narrow).sum(dims, keepdim=True, dtype=wide) / count
            for_gamma = product.sum((1, 2), keepdim=True, dtype=wide)
            for_beta = gradient.sum((1, 2), keepdim=True, dtype=wide)
        inverse = torch.rsqrt(variance + norm.eps)
        for_x = gradient * (inverse * gamma).to(x.dtype)
        for_x = torch.addcmul(for_x, unit, (-inverse * mean_unit).to(x.dtype))
        if norm.centred:
            for_x = for_x - (inverse * mean_plain).to(x.dtype)
        return for_x, for_gamma, for_beta, None, None


@dataclass
class Layer:
    """Where one convolution and its norm have their parameters, and what the norm remembers."""

    name: str
    kernel: int
    stride: int
    inputs: int
    outputs: int
    running: Statistics | None = None
    fixed: Statistics | None = None


class Network:
    """Many models of one architecture and norm; forward and parameters, nothing of training."""

    def __init__(
        self,
        architecture: str,
        norm_name: str,
        seeds: Sequence[int],
        device: torch.device,
        dtype: torch.dtype,
        in_channels: int = 3,
    ) -> None:
        """Draw the weights of every model from its seed; equal seeds start equal."""
        self.kind, width = ARCHITECTURES[architecture]
        self.norm, self.dtype, self.device = NORMS[norm_name], dtype, device
        self.models = len(seeds)
        self.layers: dict[str, Layer] = {}
        self.shapes: dict[str, tuple[int, ...]] = {}
        self._starts: dict[str, tuple[str, float]] = {}
        widths = (width, 2 * width, 4 * width)
        if self.kind == "plain":
            for index, (before, after) in enumerate(
                zip((in_channels, *widths), widths, strict=False)
            ):
                self._convolution(f"block{index}", 3, 1, before, after)
        else:
            self._convolution("stem", 3, 1, in_channels, width)
            for index, (before, after) in enumerate(zip((width, *widths), widths, strict=False)):
                stride = 1 if before == after else 2
                self._convolution(f"res{index}.a", 3, stride, before, after)
                self._convolution(f"res{index}.b", 3, 1, after, after)
                if before != after:
                    self._convolution(f"res{index}.short", 1, stride, before, after)
        bound = widths[-1] ** -0.5
        self._parameter("head.weight", (widths[-1], CLASSES), "uniform", bound)
        self._parameter("head.bias", (CLASSES,), "uniform", bound)
        sizes = [math.prod(shape) for shape in self.shapes.values()]
        self.size = sum(sizes)
        by_seed = {seed: self._draw(seed) for seed in dict.fromkeys(seeds)}
        self.flat = torch.stack([by_seed[seed] for seed in seeds]).to(device)
        """float32 [models, parameters]: every parameter of every model."""
        self.parameters: dict[str, Tensor] = {}
        start = 0
        for (name, shape), size in zip(self.shapes.items(), sizes, strict=True):
            part = self.flat[:, start : start + size].view(self.models, *shape)
            # A leaf of its own that shares its storage with `flat`, which the optimizer changes.
            self.parameters[name] = part.detach().requires_grad_()
            start += size
        self._keep: dict[str, Statistics] = {}

    def _parameter(self, name: str, shape: tuple[int, ...], kind: str, scale: float) -> None:
        self.shapes[name] = shape
        self._starts[name] = (kind, scale)

    def _convolution(self, name: str, kernel: int, stride: int, inputs: int, outputs: int) -> None:
        fan_in = kernel * kernel * inputs
        self.layers[name] = Layer(name, kernel, stride, inputs, outputs)
        # Torch's own start; without a norm the scale that keeps the signal's size under ReLU.
        bound = math.sqrt(6.0 / fan_in) if self.norm.group == 0 else fan_in**-0.5
        self._parameter(f"{name}.weight", (fan_in, outputs), "uniform", bound)
        if self.norm.group != 0:
            self._parameter(f"{name}.gamma", (outputs,), "constant", 1.0)
        self._parameter(f"{name}.beta", (outputs,), "constant", 0.0)
        if self.norm.threshold and not name.endswith("short"):
            self._parameter(f"{name}.threshold", (outputs,), "constant", 0.0)

    def _draw(self, seed: int) -> Tensor:
        generator = torch.Generator().manual_seed(1_000 + seed)
        parts = []
        for name, shape in self.shapes.items():
            kind, scale = self._starts[name]
            if kind == "uniform":
                parts.append((torch.rand(shape, generator=generator) * 2 - 1) * scale)
            else:
                parts.append(torch.full(shape, scale))
        return torch.cat([part.flatten() for part in parts])

    def forward(self, x: Tensor, mode: Mode, rows: slice, *, ablated: bool = False) -> Tensor:
        """Return scores [rows, batch, classes] of images [rows, batch, height, width, channels]."""
        if self.kind == "plain":
            for name in self.layers:
                hidden = self._normed(self._convolved(x, name, rows), name, mode, rows)
                # Pooling before the threshold is the same function, on a quarter of the values.
                x = self._activated(self._pooled(hidden), name, rows)
        else:
            x = self._activated(self._block(x, "stem", mode, rows), "stem", rows)
            for index in range(3):
                name = f"res{index}"
                short = x
                if f"{name}.short" in self.layers:
                    short = self._block(x, f"{name}.short", mode, rows)
                if not (ablated and index == 1):
                    inner = self._activated(
                        self._block(x, f"{name}.a", mode, rows), f"{name}.a", rows
                    )
                    short = short + self._block(inner, f"{name}.b", mode, rows)
                x = self._activated(short, f"{name}.b", rows)
        pooled = x.mean((2, 3), dtype=torch.float32)
        weight, bias = self._of("head.weight", rows), self._of("head.bias", rows)
        return torch.baddbmm(bias.unsqueeze(1), pooled, weight)

    def keep_running(self, momentum: float = 0.1) -> None:
        """Prepare running averages; only batch norm has any."""
        for layer in self.layers.values():
            shape = (self.models, 1, 1, layer.outputs, 1)
            if self.norm.over_batch and layer.running is None:
                zeros = torch.zeros(shape, device=self.device)
                layer.running = Statistics(zeros, torch.ones(shape, device=self.device))
                layer.fixed = Statistics(zeros.clone(), torch.ones(shape, device=self.device))
        self._momentum = momentum

    def state(self) -> list[Tensor]:
        """Return every tensor that training changes."""
        tensors = [self.flat]
        for layer in self.layers.values():
            for statistics in (layer.running, layer.fixed):
                if statistics is not None:
                    tensors += [each for each in statistics if each is not None]
        return tensors

    def _of(self, name: str, rows: slice) -> Tensor:
        parameter = self.parameters[name]
        return parameter if rows == slice(None) else parameter[rows]

    def _block(self, x: Tensor, name: str, mode: Mode, rows: slice) -> Tensor:
        return self._normed(self._convolved(x, name, rows), name, mode, rows)

    def _convolved(self, x: Tensor, name: str, rows: slice) -> Tensor:
        layer, weight = self.layers[name], self._of(f"{name}.weight", rows)
        if self.norm.standardise_weights:
            variance, mean = torch.var_mean(weight, 1, correction=0, keepdim=True)
            # A fan-in's worth of unit weights would make the output that much larger.
            scale = torch.rsqrt(variance + 1e-8) * weight.shape[1] ** -0.5
            weight = (weight - mean) * scale
        out: Tensor = Convolution.apply(x, weight, layer.kernel, layer.stride)
        return out

    def _normed(self, x: Tensor, name: str, mode: Mode, rows: slice) -> Tensor:
        norm, layer = self.norm, self.layers[name]
        beta = self._of(f"{name}.beta", rows)
        if norm.group == 0:
            return x + beta[:, None, None, None].to(x.dtype)
        view = grouped(x, norm.group)
        shape = (x.shape[0], 1, 1, *view.shape[3:])
        gamma = self._of(f"{name}.gamma", rows).view(shape)
        beta = beta.view(shape)
        if norm.over_batch and mode in ("running", "fixed"):
            known = layer.running if mode == "running" else layer.fixed
            assert known is not None, "call keep_running() first"
            assert known.mean is not None, "batch norm is centred"
            use = Statistics(known.mean[rows], known.variance[rows])
            return scaled(view, use, norm.eps, gamma, beta).view(x.shape)
        out = Standardise.apply(view, gamma, beta, norm, self._keep)
        if norm.over_batch:
            seen = self._keep["last"]
            target = layer.running if mode == "train" else layer.fixed
            if target is not None and target.mean is not None and seen.mean is not None:
                share = self._momentum if mode == "train" else 1.0
                with torch.no_grad():
                    target.mean[rows].lerp_(seen.mean, share)
                    target.variance[rows].lerp_(seen.variance, share)
        result: Tensor = out.view(x.shape)
        return result

    def _activated(self, x: Tensor, name: str, rows: slice) -> Tensor:
        if not self.norm.threshold:
            return F.relu(x)
        threshold = self._of(f"{name}.threshold", rows)[:, None, None, None]
        return torch.maximum(x, threshold.to(x.dtype))

    def _pooled(self, x: Tensor) -> Tensor:
        models, batch, height, width, channels = x.shape
        flat = x.reshape(models * batch, height, width, channels).permute(0, 3, 1, 2)
        small = F.max_pool2d(flat, 2).permute(0, 2, 3, 1)
        return small.reshape(models, batch, height // 2, width // 2, channels)


# --- training ----------------------------------------------------------------------------------


@dataclass(frozen=True)
class Row:
    """One model of a stack."""

    recipe: Recipe
    rate: float
    seed: int


def make_rows(recipes: Iterable[Recipe], seeds: int, rates: int | None) -> list[Row]:
    """Return the rows of a stack: SGD first, so that each optimizer has one slice."""
    rows = [
        Row(recipe, rate, seed)
        for recipe in recipes
        for rate in (recipe.rates if rates is None else spread(recipe.rates, rates))
        for seed in range(seeds)
    ]
    return sorted(rows, key=lambda row: row.recipe.optimizer != "sgd")


def spread(values: Sequence[float], count: int) -> list[float]:
    """Return some of the values, evenly chosen."""
    places = np.linspace(0, len(values) - 1, min(count, len(values)) + 2)[1:-1]
    return [values[round(place)] for place in places]


def rate_table(rows: Sequence[Row], steps: int) -> Tensor:
    """Return float32 [steps, rows]: the learning rate of every row at every step."""
    step = torch.arange(steps, dtype=torch.float64)
    warm = max(1, round(WARM_UP * steps))
    cosine = 0.5 * (1 + torch.cos(math.pi * (step - warm) / max(1, steps - warm)))
    cosine = torch.where(step < warm, (step + 1) / warm, cosine)
    curves = {"cosine": cosine, "constant": torch.ones_like(step)}
    return torch.stack([row.rate * curves[row.recipe.schedule] for row in rows], 1).float()


def order_table(seeds: int, samples: int, batch: int, epochs: int) -> Tensor:
    """Return int64 [steps, seeds, batch]: which samples each seed sees at every step."""
    per_epoch = samples // batch
    by_seed = []
    for seed in range(seeds):
        generator = torch.Generator().manual_seed(77_000 + seed)
        passes = [
            torch.randperm(samples, generator=generator)[: per_epoch * batch].view(per_epoch, batch)
            for _ in range(epochs)
        ]
        by_seed.append(torch.cat(passes))
    return torch.stack(by_seed, 1)


@dataclass
class Data:
    """Images [samples, height, width, channels] and labels, on the device."""

    train: Tensor
    train_labels: Tensor
    val: Tensor
    val_labels: Tensor
    test: Tensor
    test_labels: Tensor


def load(
    path: Path, train: int, held_out: int, test: int, device: torch.device, dtype: torch.dtype
) -> Data:
    """Read the images, standardise each channel, and set the last of the training part aside."""
    with np.load(path) as file:
        raw = {name: file[name] for name in ("x_train", "y_train", "x_test", "y_test")}
    raw = {name: value[: test if name.endswith("test") else train] for name, value in raw.items()}
    pixels = raw["x_train"].astype(np.float32) / 255
    mean, deviation = pixels.mean((0, 2, 3)), pixels.std((0, 2, 3))

    def images(name: str) -> Tensor:
        values = raw[name].astype(np.float32).transpose(0, 2, 3, 1) / 255
        return torch.from_numpy((values - mean) / deviation).to(device, dtype)

    x, y = images("x_train"), torch.from_numpy(raw["y_train"].astype(np.int64)).to(device)
    kept = len(x) - held_out
    return Data(
        train=x[:kept].contiguous(),
        train_labels=y[:kept].contiguous(),
        val=x[kept:].contiguous(),
        val_labels=y[kept:].contiguous(),
        test=images("x_test"),
        test_labels=torch.from_numpy(raw["y_test"].astype(np.int64)).to(device),
    )


def varied(x: Tensor, pad: int = 2) -> Tensor:
    """Return images [batch, height, width, channels] shifted and mirrored at random."""
    batch, height, width, _ = x.shape
    device = x.device
    mirrored = torch.rand(batch, 1, 1, 1, device=device) < 0.5
    x = torch.where(mirrored, x.flip(2), x)
    x = F.pad(x, (0, 0, pad, pad, pad, pad))
    down = torch.randint(2 * pad + 1, (batch, 1, 1), device=device)
    across = torch.randint(2 * pad + 1, (batch, 1, 1), device=device)
    rows = down + torch.arange(height, device=device).view(1, -1, 1)
    columns = across + torch.arange(width, device=device).view(1, 1, -1)
    return x[torch.arange(batch, device=device).view(-1, 1, 1), rows, columns]


class Trainer:
    """Trains a stack; the whole step reads its inputs from tables by a counter on the device."""

    def __init__(
        self, network: Network, rows: Sequence[Row], data: Data, batch: int, epochs: int, vary: bool
    ) -> None:
        """Make the tables and the optimizers' state."""
        device = network.device
        self.network, self.data, self.vary = network, data, vary
        seeds = max(row.seed for row in rows) + 1
        self.order = order_table(seeds, len(data.train), batch, epochs).to(device)
        self.steps = len(self.order)
        self.rates = rate_table(rows, self.steps).to(device)
        self.seed_of_row = torch.tensor([row.seed for row in rows], device=device)
        self.decay = torch.tensor([row.recipe.weight_decay for row in rows], device=device)
        self.clip = torch.tensor([row.recipe.clip for row in rows], device=device)
        self.has_sgd = sum(row.recipe.optimizer == "sgd" for row in rows)
        self.first = torch.zeros_like(network.flat)
        self.second = torch.zeros_like(network.flat[self.has_sgd :])
        self.clock = torch.zeros(1, dtype=torch.int64, device=device)
        self.losses = torch.zeros(len(rows), device=device)
        """Running average of every row's training loss."""
        self._graph: torch.cuda.CUDAGraph | None = None
        network.keep_running()

    def capture(self) -> None:
        """Record the step as a graph, and leave all state as it was."""
        state = [*self.network.state(), self.first, self.second, self.clock, self.losses]
        saved = [tensor.clone() for tensor in state]
        side = torch.cuda.Stream()
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            for _ in range(3):
                self._step()
        torch.cuda.current_stream().wait_stream(side)
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            self._step()
        for tensor, value in zip(state, saved, strict=True):
            tensor.copy_(value)
        self._graph = graph

    def step(self) -> None:
        """Train every model on its next batch."""
        if self._graph is None:
            self._step()
        else:
            self._graph.replay()

    def _step(self) -> None:
        network, data = self.network, self.data
        chosen = self.order.index_select(0, self.clock)[0]
        x = data.train[chosen]
        if self.vary:
            x = varied(x.flatten(0, 1)).view(x.shape)
        x, targets = x[self.seed_of_row], data.train_labels[chosen][self.seed_of_row]
        scores = network.forward(x, "train", slice(None))
        each = F.cross_entropy(scores.flatten(0, 1), targets.flatten(), reduction="none")
        losses = each.view(targets.shape).mean(1)
        found = torch.autograd.grad(losses.sum(), list(network.parameters.values()))
        with torch.no_grad():
            gradient = torch.cat([part.flatten(1) for part in found], 1)
            self._update(gradient)
            self.losses.lerp_(losses.detach(), 0.05)
            self.clock.add_(1)

    def _update(self, gradient: Tensor) -> None:
        size = torch.linalg.vector_norm(gradient, dim=1)
        # Without a limit the ratio is infinite, and the factor is 1.
        gradient = gradient * (self.clip / (size + 1e-6)).clamp_max(1.0).unsqueeze(1)
        rate = self.rates.index_select(0, self.clock)[0].unsqueeze(1)
        flat, first, sgd = self.network.flat, self.first, self.has_sgd
        decay = self.decay.unsqueeze(1)
        if sgd:
            with_decay = gradient[:sgd] + decay[:sgd] * flat[:sgd]
            first[:sgd].mul_(0.9).add_(with_decay)
            flat[:sgd].sub_(rate[:sgd] * first[:sgd])
        if sgd < len(flat):
            mine, step = gradient[sgd:], (self.clock + 1).double()
            first[sgd:].lerp_(mine, 0.1)
            self.second.mul_(0.999).addcmul_(mine, mine, value=0.001)
            mean = first[sgd:] / (1 - 0.9**step).float()
            square = self.second / (1 - 0.999**step).float()
            flat[sgd:].mul_(1 - rate[sgd:] * decay[sgd:])
            flat[sgd:].sub_(rate[sgd:] * mean / (square.sqrt() + 1e-8))


@torch.no_grad()
def accuracy(
    network: Network,
    x: Tensor,
    labels: Tensor,
    mode: Mode,
    *,
    ablated: bool = False,
    at_once: int = 40_000,
) -> list[float]:
    """Return every model's accuracy in percent; statistics of the set see all of it at once."""
    found = []
    rows = max(1, at_once // len(x)) if mode == "batch" else min(network.models, 32)
    size = len(x) if mode == "batch" else max(1, at_once // rows)
    for start in range(0, network.models, rows):
        part = slice(start, min(start + rows, network.models))
        count = part.stop - part.start
        right = torch.zeros(count, device=x.device, dtype=torch.int64)
        for place in range(0, len(x), size):
            images = x[place : place + size].unsqueeze(0).expand(count, -1, -1, -1, -1)
            scores = network.forward(images, mode, part, ablated=ablated)
            right += (scores.argmax(2) == labels[place : place + size]).sum(1)
        found.append(right)
    return [100.0 * value / len(x) for value in torch.cat(found).tolist()]


def evaluate(network: Network, data: Data, *, is_last: bool) -> dict[str, list[float]]:
    """Return every model's scores by every way of scoring it."""
    sets = {"val": (data.val, data.val_labels), "test": (data.test, data.test_labels)}
    scores = {name: accuracy(network, *pair, "running") for name, pair in sets.items()}
    some = data.val[:FIXED_SAMPLES], data.val_labels[:FIXED_SAMPLES]
    has_batch = network.norm.over_batch
    if has_batch:
        scores |= {f"{name}_batch": accuracy(network, *p, "batch") for name, p in sets.items()}
        # The statistics of the last set scored by its own are kept: those of the fixed images.
        scores["val1024_batch"] = accuracy(network, *some, "batch")
        scores["test_fixed"] = accuracy(network, *sets["test"], "fixed")
    if is_last and network.kind == "residual":
        scores["ablated_test"] = accuracy(network, *sets["test"], "running", ablated=True)
        scores["ablated_val1024"] = accuracy(network, *some, "running", ablated=True)
        if has_batch:
            scores["ablated_test_batch"] = accuracy(network, *sets["test"], "batch", ablated=True)
            scores["ablated_val1024_batch"] = accuracy(network, *some, "batch", ablated=True)
    return scores


class Settings(NamedTuple):
    """How a study runs."""

    batch: int
    epochs: int
    checkpoints: tuple[int, ...]
    seeds: int
    rates: int | None
    device: torch.device
    dtype: torch.dtype
    vary: bool
    use_graph: bool


def study(
    architecture: str,
    norm: str,
    recipes: Sequence[Recipe],
    data: Data,
    settings: Settings,
    write: Callable[[dict[str, Any]], None],
    deadline: float,
) -> float | None:
    """Train one stack and write its checkpoints; return images a second, None if time ran out."""
    device = settings.device
    rows = make_rows(recipes, settings.seeds, settings.rates)
    network = Network(architecture, norm, [row.seed for row in rows], device, settings.dtype)
    trainer = Trainer(network, rows, data, settings.batch, settings.epochs, settings.vary)
    if device.type == "cuda" and settings.use_graph:
        try:
            trainer.capture()
        except RuntimeError as error:
            print(f"  no graph: {error}", flush=True)
            torch.cuda.synchronize()
            # A failed capture may leave anything behind: begin again without one.
            network = Network(architecture, norm, [r.seed for r in rows], device, settings.dtype)
            trainer = Trainer(network, rows, data, settings.batch, settings.epochs, settings.vary)
    per_epoch = trainer.steps // settings.epochs
    at = {epoch * per_epoch: epoch for epoch in settings.checkpoints}
    trained, began = 0.0, time.perf_counter()
    for step in range(1, trainer.steps + 1):
        trainer.step()
        if step % 50 == 0 or step in at:
            settle(device)
            if step not in at and time.monotonic() > deadline:
                print(f"  out of time at step {step} of {trainer.steps}", flush=True)
                return None
        if step not in at:
            continue
        trained += time.perf_counter() - began
        scores = evaluate(network, data, is_last=step == trainer.steps)
        losses = trainer.losses.tolist()
        speed = step * settings.batch * len(rows) / trained
        for index, row in enumerate(rows):
            write(
                {
                    "arch": architecture,
                    "norm": norm,
                    "recipe": row.recipe.name,
                    "lr": row.rate,
                    "weight_decay": row.recipe.weight_decay,
                    "seed": row.seed,
                    "epoch": at[step],
                    "epochs": settings.epochs,
                    "augmented": settings.vary,
                    "parameters": network.size,
                    "loss": losses[index] if math.isfinite(losses[index]) else None,
                    "images_per_s": round(speed),
                    **{name: round(values[index], 3) for name, values in scores.items()},
                }
            )
        best = max(scores["test"])
        print(
            f"  epoch {at[step]:3}: best test {best:.1f}, {speed / 1e6:.3f} million images/s",
            flush=True,
        )
        settle(device)
        began = time.perf_counter()
    return speed


def settle(device: torch.device) -> None:
    """Wait for the device."""
    if device.type == "cuda":
        torch.cuda.synchronize()


# --- summary -----------------------------------------------------------------------------------


def interval(values: Sequence[float]) -> tuple[float, float]:
    """Return the mean and half the width of its 95 % interval."""
    mean = sum(values) / len(values)
    if len(values) < 2:
        return mean, math.nan
    deviation = math.sqrt(sum((value - mean) ** 2 for value in values) / (len(values) - 1))
    quantile = T_95[len(values) - 1] if len(values) <= len(T_95) else 1.96
    return mean, quantile * deviation / math.sqrt(len(values))


def shown(values: Sequence[float]) -> str:
    """Return a mean with its interval as text."""
    mean, half = interval(values)
    return f"{mean:.1f}" if math.isnan(half) else f"{mean:.1f} ± {half:.1f}"


def summarise(path: Path) -> None:
    """Print Markdown tables of what a study wrote."""
    groups: dict[tuple[str, str, str], dict[int, dict[float, list[dict[str, Any]]]]] = {}
    with path.open(encoding="utf-8") as file:
        for line in file:
            try:
                each = json.loads(line)
            except json.JSONDecodeError:
                # The last line of a run that was ended.
                continue
            key = (each["arch"], each["norm"], each["recipe"])
            by_epoch = groups.setdefault(key, defaultdict(lambda: defaultdict(list)))
            by_epoch[each["epoch"]][each["lr"]].append(each)
    epochs = sorted({epoch for found in groups.values() for epoch in found})
    if not epochs:
        print("nothing was recorded")
        return
    print("The learning rate is the best by validation at the last checkpoint reached; ± is a")
    print("95 % interval over seeds. Rates marked * lie at the end of the grid.\n")
    table = []
    extra = []
    for (arch, norm, recipe), found in groups.items():
        last = max(found)
        by_rate = found[last]
        means = {rate: interval([e["val"] for e in each])[0] for rate, each in by_rate.items()}
        best = max(means, key=lambda rate: means[rate])
        near = sorted(means.values(), reverse=True)
        mark = "*" if len(means) > 1 and best in (min(means), max(means)) else ""
        cells = [
            shown([e["test"] for e in found[epoch][best]]) if best in found.get(epoch, {}) else "–"
            for epoch in epochs
        ]
        chosen = by_rate[best]
        losses = [e["loss"] for e in chosen if e["loss"] is not None]
        table.append(
            [
                arch,
                norm,
                recipe,
                f"{best:.4g}{mark}",
                *cells,
                f"{means[best]:.1f}",
                f"{means[best] - near[-1]:.1f}",
                f"{sum(losses) / len(losses):.2f}" if losses else "–",
                str(chosen[0]["parameters"]),
                f"{chosen[0]['images_per_s'] / 1e6:.2f}",
            ]
        )
        others = [
            f"{name} {shown([e[name] for e in chosen])}"
            for name in chosen[0]
            if name.startswith(("test_", "val_", "val1024", "ablated"))
        ]
        if others:
            extra.append([arch, norm, recipe, "; ".join(others)])
    final = 3 + len(epochs)

    def rank(row: list[str]) -> tuple[str, float]:
        return row[0], 0.0 if row[final] == "–" else -float(row[final].split(" ")[0])

    ordered = sorted(table, key=rank)
    header = ["net", "norm", "recipe", "lr", *(f"test at {epoch}" for epoch in epochs)]
    header += ["val", "val: best − worst lr", "train loss", "parameters", "M images/s"]
    print_table(header, ordered)
    if extra:
        print("\nOther ways of scoring the same models, at the last checkpoint:\n")
        print_table(["net", "norm", "recipe", "scores"], extra)


def print_table(header: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
    """Print a Markdown table."""
    print("| " + " | ".join(header) + " |")
    print("|" + "|".join(["---"] * len(header)) + "|")
    for row in rows:
        print("| " + " | ".join(row) + " |")


# --- command line ------------------------------------------------------------------------------


def self_test(device: torch.device) -> None:
    """Compare convolution, norms and gradients with torch's own on one model."""
    torch.manual_seed(0)
    wide = torch.float64
    x = torch.randn(2, 5, 6, 6, 8, dtype=wide, device=device, requires_grad=True)
    for kernel, stride in ((3, 1), (3, 2), (1, 2), (1, 1)):
        w = torch.randn(2, kernel**2 * 8, 7, dtype=wide, device=device, requires_grad=True)
        ours = Convolution.apply(x, w, kernel, stride)
        theirs = torch.stack(
            [
                F.conv2d(
                    x[m].permute(0, 3, 1, 2),
                    w[m].view(kernel, kernel, 8, 7).permute(3, 2, 0, 1),
                    stride=stride,
                    padding=kernel // 2,
                ).permute(0, 2, 3, 1)
                for m in range(2)
            ]
        )
        probe = torch.randn_like(ours)
        got = torch.autograd.grad((ours * probe).sum(), (x, w))
        want = torch.autograd.grad((theirs * probe).sum(), (x, w))
        for a, b in ((ours, theirs), *zip(got, want, strict=True)):
            difference = float((a - b).detach().abs().max())
            # The weights' gradient is summed in single precision.
            assert difference < 1e-3, f"convolution {kernel}/{stride}: {difference}"
    for name, norm in NORMS.items():
        if norm.group == 0:
            continue
        view = grouped(x, norm.group).detach().requires_grad_()
        shape = (2, 1, 1, *view.shape[3:])
        gamma = torch.randn(shape, device=device, dtype=wide, requires_grad=True)
        beta = torch.randn(shape, device=device, dtype=wide, requires_grad=True)
        ours = Standardise.apply(view, gamma, beta, norm, {})
        dims = reduced(norm)
        mean = view.mean(dims, keepdim=True) if norm.centred else torch.zeros((), device=device)
        square = (view - mean).square().mean(dims, keepdim=True)
        theirs = (view - mean) * torch.rsqrt(square + norm.eps) * gamma + beta
        probe = torch.randn_like(ours)
        got = torch.autograd.grad((ours * probe).sum(), (view, gamma, beta))
        want = torch.autograd.grad((theirs * probe).sum(), (view, gamma, beta))
        for a, b in ((ours, theirs), *zip(got, want, strict=True)):
            difference = float((a - b).detach().abs().max())
            assert difference < 1e-3, f"norm {name}: {difference}"
    print("self-test passed", flush=True)


def parse(arguments: Sequence[str]) -> argparse.Namespace:
    """Return the options."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--data", type=Path, default=Path("campaign_data/cifar16.npz"))
    parser.add_argument("--out", type=Path, default=Path("norms.jsonl"))
    parser.add_argument("--summary", type=Path, help="print tables of this file and end")
    parser.add_argument("--self-test", action="store_true", help="check the arithmetic first")
    parser.add_argument("--seconds", type=float, default=420.0, help="stop by then")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--precision", choices=("bf16", "fp32"), default=None)
    parser.add_argument("--arch", nargs="+", choices=sorted(ARCHITECTURES), help="only these")
    parser.add_argument("--norm", nargs="+", choices=sorted(NORMS), help="only these")
    parser.add_argument("--recipe", nargs="+", choices=sorted(RECIPES), help="only these")
    parser.add_argument("--train", type=int, default=20_000, help="training images, held out incl.")
    parser.add_argument("--held-out", type=int, default=2_000)
    parser.add_argument("--test", type=int, default=10_000)
    parser.add_argument("--batch", type=int, default=128)
    parser.add_argument("--epochs", type=int, default=30)
    parser.add_argument("--checkpoints", type=int, nargs="+", default=[5, 15, 30])
    parser.add_argument("--seeds", type=int, default=4)
    parser.add_argument("--rates", type=int, default=None, help="only so many rates of each grid")
    parser.add_argument("--crop-flip", action="store_true", help="vary training images")
    parser.add_argument("--no-graph", action="store_true")
    return parser.parse_args(arguments)


def main(arguments: Sequence[str]) -> int:
    """Run the study, or print what one found."""
    options = parse(arguments)
    if options.summary is not None:
        summarise(options.summary)
        return 0
    started = time.monotonic()
    deadline = started + options.seconds
    device = torch.device(options.device)
    precision = options.precision or ("bf16" if device.type == "cuda" else "fp32")
    if device.type == "cuda":
        torch.backends.cuda.matmul.allow_tf32 = True
        torch.backends.cuda.matmul.allow_bf16_reduced_precision_reduction = False
        print(torch.cuda.get_device_name(), f"torch {torch.__version__}", flush=True)
    if options.self_test:
        self_test(device)
    dtype = torch.bfloat16 if precision == "bf16" else torch.float32
    data = load(options.data, options.train, options.held_out, options.test, device, dtype)
    print(f"{len(data.train)} training images, {precision} on {device}", flush=True)
    marks = {epoch for epoch in options.checkpoints if epoch < options.epochs}
    settings = Settings(
        batch=options.batch,
        epochs=options.epochs,
        checkpoints=(*sorted(marks), options.epochs),
        seeds=options.seeds,
        rates=options.rates,
        device=device,
        dtype=dtype,
        vary=options.crop_flip,
        use_graph=not options.no_graph,
    )
    stacks = []
    for arch, norm, recipes in default_order():
        chosen = [r for r in recipes if options.recipe is None or r.name in options.recipe]
        wanted = (options.arch is None or arch in options.arch) and (
            options.norm is None or norm in options.norm
        )
        if wanted and chosen:
            stacks.append((arch, norm, chosen))
    speeds: dict[str, float] = {}
    options.out.parent.mkdir(parents=True, exist_ok=True)
    with options.out.open("a", encoding="utf-8") as file:

        def write(record: dict[str, Any]) -> None:
            file.write(json.dumps(record) + "\n")
            file.flush()

        for number, (arch, norm, recipes) in enumerate(stacks, start=1):
            left = deadline - time.monotonic()
            rows = len(make_rows(recipes, settings.seeds, settings.rates))
            images = rows * settings.epochs * len(data.train)
            expected = images / speeds[arch] if arch in speeds else 0.0
            if left < 3 or left < 0.9 * expected:
                print(f"skipped {arch} {norm}: {left:.0f} s left, needs {expected:.0f}", flush=True)
                continue
            names = ", ".join(recipe.name for recipe in recipes)
            print(
                f"[{time.monotonic() - started:5.0f} s] {number}/{len(stacks)} {arch} {norm}: "
                f"{names}; {rows} models",
                flush=True,
            )
            try:
                speed = study(arch, norm, recipes, data, settings, write, deadline)
            except Exception:
                # One stack that fails must not cost the others.
                print(traceback.format_exc(limit=-6), flush=True)
                speed = None
            if speed is not None:
                speeds[arch] = speed
            gc.collect()
            if device.type == "cuda":
                torch.cuda.empty_cache()
    print(f"done after {time.monotonic() - started:.0f} s\n", flush=True)
    summarise(options.out)
    return 0


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
