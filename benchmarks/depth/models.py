"""The three networks of the depth cells: a byte-level GPT, a residual CNN and a small ViT.

Each is built at its final depth; `awake` says how many blocks of each stack run. The blocks behind
them cost nothing until they are filled with copies.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional as F

Runner = Callable[[nn.Module, Tensor], Tensor]


def run_block(block: nn.Module, x: Tensor) -> Tensor:
    """Run one block as it is; what blends new blocks in takes the place of this function."""
    out: Tensor = block(x)
    return out


@dataclass(frozen=True)
class Size:
    """Width, heads, context or image side, vocabulary or classes, first standard deviation."""

    dim: int
    heads: int
    length: int
    classes: int
    init: float = 0.02


class TransformerBlock(nn.Module):
    """Attention, then a two-layer MLP, each behind an RMSNorm and inside a residual path."""

    def __init__(self, dim: int, heads: int, is_causal: bool) -> None:
        super().__init__()
        self.heads, self.is_causal = heads, is_causal
        self.n1, self.n2 = nn.RMSNorm(dim), nn.RMSNorm(dim)
        self.qkv, self.out = nn.Linear(dim, 3 * dim, bias=False), nn.Linear(dim, dim, bias=False)
        self.up, self.down = (
            nn.Linear(dim, 4 * dim, bias=False),
            nn.Linear(4 * dim, dim, bias=False),
        )

    def forward(self, x: Tensor) -> Tensor:
        batch, length, dim = x.shape
        shape = (batch, length, 3, self.heads, dim // self.heads)
        q, k, v = self.qkv(self.n1(x)).view(shape).permute(2, 0, 3, 1, 4)
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=self.is_causal)
        x = x + self.out(mixed.transpose(1, 2).reshape(batch, length, dim))
        return x + self.down(F.gelu(self.up(self.n2(x))))

    @torch.no_grad()
    def initialize(self, spread: float, depth: int) -> None:
        """Draw first weights; what writes into the residual path is smaller in deeper networks."""
        for layer in (self.qkv, self.up):
            nn.init.normal_(layer.weight, std=spread)
        for layer in (self.out, self.down):
            nn.init.normal_(layer.weight, std=spread / math.sqrt(2 * depth))
        for norm in (self.n1, self.n2):
            nn.init.ones_(norm.weight)

    @torch.no_grad()
    def silence(self) -> None:
        """Make the block the identity."""
        nn.init.zeros_(self.out.weight)
        nn.init.zeros_(self.down.weight)


class ConvBlock(nn.Module):
    """Two 3x3 convolutions, each behind BatchNorm and ReLU, inside a residual path."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.b1, self.b2 = nn.BatchNorm2d(channels), nn.BatchNorm2d(channels)
        self.c1 = nn.Conv2d(channels, channels, 3, padding=1, bias=False)
        self.c2 = nn.Conv2d(channels, channels, 3, padding=1, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.c2(F.relu(self.b2(self.c1(F.relu(self.b1(x))))))

    def initialize(self, spread: float, depth: int) -> None:
        for module in (self.b1, self.b2, self.c1, self.c2):
            module.reset_parameters()

    @torch.no_grad()
    def silence(self) -> None:
        nn.init.zeros_(self.c2.weight)


class Network(nn.Module):
    """What the three networks share: stacks of equal depth of which some blocks are awake."""

    awake: int
    run: Runner = staticmethod(run_block)

    def stack_names(self) -> list[str]:
        """Return the names of the stacks."""
        raise NotImplementedError

    def stacks(self) -> list[nn.ModuleList]:
        """Return the stacks."""
        return [self.get_submodule(name) for name in self.stack_names()]  # type: ignore[misc]

    def training_flops(self, awake: int) -> float:
        """Return the FLOPs of a training step for one sequence or image, by formula."""
        raise NotImplementedError


class Transformer(Network):
    """What the GPT and the ViT share: embedded tokens through a stack of blocks."""

    def __init__(self, size: Size, depth: int, is_causal: bool) -> None:
        super().__init__()
        self.size, self.awake = size, depth
        make = (TransformerBlock(size.dim, size.heads, is_causal) for _ in range(depth))
        self.blocks = nn.ModuleList(make)
        self.norm = nn.RMSNorm(size.dim)
        self.head = nn.Linear(size.dim, size.classes, bias=False)
        nn.init.normal_(self.head.weight, std=size.init)
        for block in self.blocks:
            block.initialize(size.init, depth)

    def stack_names(self) -> list[str]:
        return ["blocks"]

    def through(self, x: Tensor) -> Tensor:
        for block in self.blocks[: self.awake]:
            x = self.run(block, x)
        return x


class GPT(Transformer):
    """A byte-level language model with learned positions."""

    def __init__(self, size: Size, depth: int) -> None:
        super().__init__(size, depth, is_causal=True)
        self.embed, self.position = (
            nn.Embedding(size.classes, size.dim),
            nn.Embedding(size.length, size.dim),
        )
        for table in (self.embed, self.position):
            nn.init.normal_(table.weight, std=size.init)

    def forward(self, ids: Tensor) -> Tensor:
        x = self.embed(ids) + self.position.weight[: ids.shape[1]]
        return self.head(self.norm(self.through(x)))

    def training_flops(self, awake: int) -> float:
        dim, length = self.size.dim, self.size.length
        weights = awake * 12 * dim * dim + self.size.classes * dim
        # A causal pair of products looks at half of the positions: 2 x length x dim forwards.
        return length * (6.0 * weights + awake * 6 * length * dim)


class ViT(Transformer):
    """Patches of 2x2 pixels, learned positions, the mean over all tokens."""

    def __init__(self, size: Size, depth: int) -> None:
        super().__init__(size, depth, is_causal=False)
        self.tokens = (size.length // 2) ** 2
        self.patch = nn.Conv2d(3, size.dim, 2, 2)
        self.position = nn.Parameter(size.init * torch.randn(self.tokens, size.dim))

    def forward(self, images: Tensor) -> Tensor:
        x = self.patch(images).flatten(2).transpose(1, 2) + self.position
        return self.head(self.norm(self.through(x)).mean(1))

    def training_flops(self, awake: int) -> float:
        dim, tokens = self.size.dim, self.tokens
        weights = awake * 12 * dim * dim + 12 * dim
        return tokens * (6.0 * weights + awake * 12 * tokens * dim) + 6 * dim * self.size.classes


class ResNet(Network):
    """A stem, three stages of `depth` blocks, each stage twice as wide at half the side."""

    def __init__(self, size: Size, depth: int) -> None:
        super().__init__()
        self.size, self.awake = size, depth
        self.widths = (size.dim, 2 * size.dim, 4 * size.dim)
        self.stem = nn.Conv2d(3, size.dim, 3, padding=1, bias=False)
        self.stages = nn.ModuleList(
            nn.ModuleList(ConvBlock(width) for _ in range(depth)) for width in self.widths
        )
        pairs = zip(self.widths, self.widths[1:], strict=False)
        self.shrink = nn.ModuleList(nn.Conv2d(a, b, 2, 2, bias=False) for a, b in pairs)
        self.norm, self.head = (
            nn.BatchNorm2d(self.widths[-1]),
            nn.Linear(self.widths[-1], size.classes),
        )

    def stack_names(self) -> list[str]:
        return [f"stages.{at}" for at in range(len(self.stages))]

    def forward(self, images: Tensor) -> Tensor:
        x = self.stem(images)
        for at, stage in enumerate(self.stages):
            for block in stage[: self.awake]:
                x = self.run(block, x)
            if at < len(self.shrink):
                x = self.shrink[at](x)
        return self.head(F.relu(self.norm(x)).mean((2, 3)))

    def training_flops(self, awake: int) -> float:
        side, macs = self.size.length, self.size.length**2 * 27 * self.size.dim
        for at, width in enumerate(self.widths):
            macs += awake * 18 * width * width * (side >> at) ** 2
        for at, (narrow, wide) in enumerate(zip(self.widths, self.widths[1:], strict=False)):
            macs += 4 * narrow * wide * (side >> at + 1) ** 2
        return 6.0 * (macs + self.widths[-1] * self.size.classes)


NETWORKS: dict[str, type] = {"gpt": GPT, "vit": ViT, "resnet": ResNet}
