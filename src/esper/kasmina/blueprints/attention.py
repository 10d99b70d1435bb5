"""Attention over channels for images, self-attention for sequences: causal in a causal host."""

from __future__ import annotations

import warnings
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor, nn
from torch.fx import Proxy
from torch.nn import functional as F

from esper.kasmina.blueprints.registry import register_blueprint
from esper.leyline.slots import Topology

_OPEN = 3.0  # sigmoid(3) = 0.95: a fresh squeeze-excite seed lets nearly everything through


class ChannelAttention(nn.Module):
    """Squeeze-and-excite: every channel scaled by what all channels say."""

    def __init__(self, channels: int) -> None:
        """Create the squeeze to a quarter of the width and the excitation back."""
        super().__init__()
        self.squeeze = nn.Linear(channels, max(1, channels // 4), bias=False)
        self.excite = nn.Linear(max(1, channels // 4), channels)
        nn.init.zeros_(self.excite.weight)
        nn.init.constant_(self.excite.bias, _OPEN)
        # A narrow squeeze can start with every unit negative for non-negative activations, and
        # a dead ReLU never recovers: non-negative weights keep it open.
        with torch.no_grad():
            self.squeeze.weight.abs_()

    def forward(self, x: Tensor) -> Tensor:
        """Return the rescaled channels."""
        scale = torch.sigmoid(self.excite(torch.relu(self.squeeze(x.mean((-2, -1))))))
        out: Tensor = x * scale[..., None, None]
        return out


def split_heads(x: Tensor, heads: int) -> Tensor:
    """[B, T, C] -> [B, heads, T, C / heads]."""
    split: Tensor = x.unflatten(-1, (heads, -1))
    return split.transpose(-3, -2)


class Projection(nn.Module):
    """Queries, keys, values and the output projection of self-attention.

    The output projection starts at zero: the seed is the identity, and that projection has a
    gradient at the first batch.
    """

    def __init__(self, channels: int, heads: int = 4) -> None:
        """Create the projections; the number of heads falls to a divisor of the width."""
        super().__init__()
        self.heads = next(n for n in range(heads, 0, -1) if channels % n == 0)
        self.qkv = nn.Linear(channels, 3 * channels)
        self.proj = nn.Linear(channels, channels)
        nn.init.zeros_(self.proj.weight)
        nn.init.zeros_(self.proj.bias)

    def split(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Return queries, keys and values by head."""
        q, k, v = self.qkv(x).chunk(3, -1)
        return split_heads(q, self.heads), split_heads(k, self.heads), split_heads(v, self.heads)

    def join(self, heads: Tensor) -> Tensor:
        """Return the projected output of all heads together."""
        out: Tensor = self.proj(heads.transpose(-3, -2).flatten(-2))
        return out


class SelfAttention(nn.Module):
    """x + projection(attention): a position sees itself and the past, or all positions."""

    is_causal: bool = True
    """Whether positions see no later ones; `Blueprint.build` sets it to what the host is."""

    def __init__(self, channels: int) -> None:
        """Create the projections."""
        super().__init__()
        self.attention = Projection(channels)

    def forward(self, x: Tensor) -> Tensor:
        """Return the activation plus what was attended to."""
        q, k, v = self.attention.split(x)
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=self.is_causal)
        return x + self.attention.join(mixed)


@register_blueprint(
    "attention",
    topologies=("cnn", "sequence"),
    identity_at_start=("sequence",),
    note="Squeeze-and-excite on images (starts at 0.95 x), self-attention on sequences, causal in "
    "causal hosts.",
    kind="attention",
)
class Attention(nn.Module):
    """Channel attention for images, self-attention for sequences."""

    def __init__(self, channels: int, topology: Topology) -> None:
        """Create the kind that fits the slot."""
        super().__init__()
        self.body: nn.Module = (
            ChannelAttention(channels) if topology == "cnn" else SelfAttention(channels)
        )

    def forward(self, x: Tensor) -> Tensor:
        """Return the attended activation."""
        out: Tensor = self.body(x)
        return out


_NARROWEST = 16


@lru_cache(maxsize=8)
def _causal_mask(length: int, device: str) -> Any:
    from torch.nn.attention.flex_attention import create_block_mask

    def causal(batch: Tensor, head: Tensor, query: Tensor, key: Tensor) -> Tensor:
        return query >= key

    return create_block_mask(causal, None, None, length, length, device=device)


def flex(q: Tensor, k: Tensor, v: Tensor, *, is_causal: bool) -> Tensor:
    """Return attention, by FlexAttention on CUDA and by SDPA elsewhere.

    FlexAttention has no kernel for heads narrower than 16; those go through SDPA everywhere, and so
    does a graph that is written down without knowing where it will run.
    """
    if isinstance(q, Proxy) or q.device.type != "cuda" or q.shape[-1] < _NARROWEST:
        return F.scaled_dot_product_attention(q, k, v, is_causal=is_causal)
    mask = _causal_mask(q.shape[-2], str(q.device)) if is_causal else None
    with warnings.catch_warnings():
        # The compiler looks at .grad of its inputs, which are no leaves, and warns about itself.
        warnings.filterwarnings("ignore", message="The .grad attribute of a Tensor that is not")
        out: Tensor = _compiled()(q, k, v, block_mask=mask)
    return out


@lru_cache(maxsize=1)
def _compiled() -> Any:
    from torch.nn.attention.flex_attention import flex_attention

    return torch.compile(flex_attention, dynamic=False)


@register_blueprint(
    "flex_attention",
    topologies=("sequence",),
    note="Self-attention, causal in causal hosts: FlexAttention on CUDA, the same through SDPA on "
    "the CPU.",
    kind="attention",
)
class FlexAttention(nn.Module):
    """x + projection(attention), by FlexAttention where there is CUDA."""

    is_causal: bool = True
    """Whether positions see no later ones; `Blueprint.build` sets it to what the host is."""

    def __init__(self, channels: int, topology: Topology) -> None:
        """Create the projections."""
        super().__init__()
        self.attention = Projection(channels)

    def forward(self, x: Tensor) -> Tensor:
        """Return the activation plus what was attended to."""
        mixed = flex(*self.attention.split(x), is_causal=self.is_causal)
        return x + self.attention.join(mixed)
