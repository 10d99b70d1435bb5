"""Small networks with stacks, and plain loops that train them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

VOCABULARY, WIDTH, LENGTH = 13, 8, 6


class Block(nn.Module):
    """A block of a transformer, with dropout where asked for."""

    def __init__(self, dropout: float = 0.0) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.qkv, self.out = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.up, self.down = nn.Linear(WIDTH, 2 * WIDTH), nn.Linear(2 * WIDTH, WIDTH)
        self.dropout = nn.Dropout(dropout)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.qkv(self.norm1(x)).chunk(3, -1)
        x = x + self.dropout(self.out(F.scaled_dot_product_attention(q, k, v, is_causal=True)))
        return x + self.dropout(self.down(F.gelu(self.up(self.norm2(x)))))


class GPT(nn.Module):
    """A language model; `run` may call the blocks in another way."""

    def __init__(self, layers: int = 4, dropout: float = 0.0) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCABULARY, WIDTH)
        self.blocks = nn.ModuleList(Block(dropout) for _ in range(layers))
        self.head = nn.Linear(WIDTH, VOCABULARY)
        self.run: Callable[[nn.Module, Tensor], Tensor] | None = None

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embed(tokens)
        for block in self.blocks:
            x = block(x) if self.run is None else self.run(block, x)
        return self.head(x)


class Residual(nn.Module):
    """A block of a residual network."""

    def __init__(self, channels: int, stride: int = 1) -> None:
        super().__init__()
        self.conv = nn.Conv2d(channels, channels, 3, stride, 1, bias=False)
        self.norm = nn.BatchNorm2d(channels)
        self.short = nn.Conv2d(channels, channels, 1, stride) if stride > 1 else nn.Identity()

    def forward(self, x: Tensor) -> Tensor:
        return torch.relu(self.short(x) + self.norm(self.conv(x)))


class ResNet(nn.Module):
    """Two stages of residual blocks; the second begins with a stride."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Conv2d(1, 4, 3, 1, 1)
        self.stage1 = nn.Sequential(*(Residual(4) for _ in range(4)))
        self.stage2 = nn.Sequential(Residual(4, stride=2), *(Residual(4) for _ in range(3)))
        self.head = nn.Linear(4, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.stage2(self.stage1(self.stem(x))).mean((2, 3)))


def make_gpt(layers: int = 4, dropout: float = 0.0, seed: int = 0) -> GPT:
    torch.manual_seed(seed)
    return GPT(layers, dropout)


def make_resnet() -> ResNet:
    torch.manual_seed(0)
    return ResNet()


def tokens(step: int, rows: int = 4) -> Tensor:
    return torch.randint(
        VOCABULARY, (rows, LENGTH + 1), generator=torch.Generator().manual_seed(step)
    )


def images(step: int) -> tuple[Tensor, Tensor]:
    draw = torch.Generator().manual_seed(step)
    return torch.randn(6, 1, 8, 8, generator=draw), torch.randint(3, (6,), generator=draw)


def text_loss(model: Any, step: int) -> Tensor:
    batch = tokens(step)
    return F.cross_entropy(model(batch[:, :-1]).flatten(0, 1), batch[:, 1:].flatten())


def image_loss(model: Any, step: int) -> Tensor:
    x, y = images(step)
    return F.cross_entropy(model(x), y)


def train(
    model: Any,
    optimizers: Any,
    first: int,
    last: int,
    *,
    depth: Any = None,
    loss_of: Callable[[Any, int], Tensor] = text_loss,
) -> list[float]:
    """Train from step `first` to before `last`; return the losses."""
    optimizers = optimizers if isinstance(optimizers, list) else [optimizers]
    losses = []
    for step in range(first, last):
        loss = loss_of(model, step)
        loss.backward()
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
        if depth is not None:
            depth.step(loss)
        losses.append(loss.item())
    return losses
