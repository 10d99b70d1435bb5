"""The sequence host: a GPT-2 style decoder (pre-norm, learned positions, tied head).

Its layers are divided into equal segments, with a slot after the last layer of each. Dropout is
off by default, so that paired comparisons have no noise of their own.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from esper.kasmina.hosts.registry import pick_slots, register_host
from esper.leyline.config import Config, option
from esper.leyline.errors import ConfigError, UsageError
from esper.leyline.slots import Topology, slot_id

INIT_STD = 0.02


@dataclass(frozen=True, kw_only=True)
class LayersConfig(Config):
    """Sizes of a host of layers in equal segments, and which of its slots are offered."""

    dim: int = option(384, "Width of the residual stream.", minimum=1)
    heads: int = option(6, "Attention heads; divides dim.", minimum=1)
    layers: int = option(6, "Layers of attention.", minimum=1)
    segments: int = option(3, "Equal parts of the stack, each with a slot at its end.", minimum=1)
    slots: tuple[str, ...] | None = option(
        None, "Slot ids offered for growth; one after every segment if empty."
    )

    def __post_init__(self) -> None:
        """Check the rules that span several fields."""
        super().__post_init__()
        kind = type(self).__name__
        if self.dim % self.heads:
            raise ConfigError(f"{kind}.heads must divide dim ({self.dim}), got {self.heads}")
        if self.layers % self.segments:
            raise ConfigError(
                f"{kind}.segments must divide layers ({self.layers}), got {self.segments}"
            )
        self.slot_paths()

    @property
    def segment_layers(self) -> int:
        """Number of layers of each segment."""
        return self.layers // self.segments

    def slot_paths(self) -> dict[str, str]:
        """Return the offered slots and the submodules they follow."""
        ends = range(self.segment_layers - 1, self.layers, self.segment_layers)
        every = {slot_id(0, index): f"layers.{end}" for index, end in enumerate(ends)}
        return pick_slots(every, self.slots)


@dataclass(frozen=True, kw_only=True)
class TransformerConfig(LayersConfig):
    """Sizes of the sequence host, and which of its slots are offered."""

    vocab: int = option(50257, "Number of distinct tokens.", minimum=1)
    context: int = option(256, "Longest sequence, in tokens.", minimum=1)
    dropout: float = option(
        0.0, "Share of activations dropped in training.", minimum=0.0, maximum=0.9
    )


class MultiHeadAttention(nn.Module):
    """Multi-head attention: to all positions, or only to a position itself and earlier ones."""

    def __init__(self, dim: int, heads: int, *, causal: bool, dropout: float = 0.0) -> None:
        """Build the projections."""
        super().__init__()
        self.heads = heads
        self.causal = causal
        self.dropout = dropout
        self.qkv = nn.Linear(dim, 3 * dim)
        self.out = nn.Linear(dim, dim)

    def forward(self, hidden: Tensor) -> Tensor:
        """Return what each position gathers, [B, T, D] to [B, T, D]."""
        query, key, value = (
            part.unflatten(-1, (self.heads, -1)).transpose(-3, -2)  # [B, heads, T, D / heads]
            for part in self.qkv(hidden).chunk(3, dim=-1)
        )
        gathered = self.attend(query, key, value, self.causal)
        projected: Tensor = self.out(gathered.transpose(-3, -2).flatten(-2))
        return projected

    def attend(self, query: Tensor, key: Tensor, value: Tensor, causal: bool) -> Tensor:
        """Return what each position gathers in every head; stacks replace this method."""
        dropout = self.dropout if self.training else 0.0
        return F.scaled_dot_product_attention(
            query, key, value, is_causal=causal, dropout_p=dropout
        )


class AttentionLayer(nn.Module):
    """Attention, then a GELU network four times as wide, each on a normalised residual stream."""

    def __init__(self, dim: int, heads: int, *, causal: bool, dropout: float = 0.0) -> None:
        """Build the layer."""
        super().__init__()
        self.norm1 = nn.LayerNorm(dim)
        self.attention = MultiHeadAttention(dim, heads, causal=causal, dropout=dropout)
        self.norm2 = nn.LayerNorm(dim)
        self.mlp = nn.Sequential(nn.Linear(dim, 4 * dim), nn.GELU(), nn.Linear(4 * dim, dim))
        self.drop = _dropout(dropout)

    def forward(self, hidden: Tensor) -> Tensor:
        """Return the stream with both updates added."""
        hidden = hidden + self.drop(self.attention(self.norm1(hidden)))
        updated: Tensor = hidden + self.drop(self.mlp(self.norm2(hidden)))
        return updated


@register_host("transformer")
class TransformerHost(nn.Module):
    """Tokens [B, T] to scores of the next token [B, T, vocab]."""

    config_class: ClassVar[type[Config]] = TransformerConfig
    topology: ClassVar[Topology] = "sequence"

    def __init__(self, config: TransformerConfig) -> None:
        """Build the host; its weights come from torch's current random state."""
        super().__init__()
        self.config = config
        self.tokens = nn.Embedding(config.vocab, config.dim)
        self.positions = nn.Embedding(config.context, config.dim)
        self.drop = _dropout(config.dropout)
        self.layers = nn.ModuleList(
            AttentionLayer(config.dim, config.heads, causal=True, dropout=config.dropout)
            for _ in range(config.layers)
        )
        self.norm = nn.LayerNorm(config.dim)
        self.slot_paths = config.slot_paths()
        self._initialise(config.layers)

    @torch.no_grad()
    def _initialise(self, layers: int) -> None:
        for name, parameter in self.named_parameters():
            if parameter.ndim < 2:
                continue
            # Every residual branch adds variance to the stream, so their last weights shrink.
            ends_branch = name.endswith(("attention.out.weight", "mlp.2.weight"))
            parameter.normal_(0.0, INIT_STD / ((2 * layers) ** 0.5 if ends_branch else 1.0))
        for module in self.modules():
            if isinstance(module, nn.Linear):
                module.bias.zero_()

    def forward(self, tokens: Tensor) -> Tensor:
        """Return the scores of every next token."""
        length = tokens.shape[-1]
        if length > self.config.context:
            raise UsageError(
                f"a sequence of {length} tokens does not fit the host's context of "
                f"{self.config.context}; cut it, or build the host with a longer context"
            )
        hidden = self.drop(self.tokens(tokens) + self.positions.weight[:length])
        for layer in self.layers:
            hidden = layer(hidden)
        return F.linear(self.norm(hidden), self.tokens.weight)


def _dropout(share: float) -> nn.Module:
    # Without dropout the host must not contain a module that could draw random numbers.
    return nn.Dropout(share) if share > 0 else nn.Identity()
