"""The host of causal convolutions: a residual network over tokens that sees a few of them back.

A block looks back `2 * (kernel_size - 1)` tokens, so how far the network sees grows with its depth,
one block after the other. Its layers are divided into equal segments, with a slot after each. What
stands in front of a slot is the whole segment, so that copies of it (`kin`) double all of its
blocks.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from esper.kasmina.hosts.registry import pick_slots, register_host
from esper.leyline.config import Config, option
from esper.leyline.errors import ConfigError
from esper.leyline.slots import Topology, slot_id


@dataclass(frozen=True, kw_only=True)
class TcnConfig(Config):
    """Sizes of the causal convolutional network, and which of its slots are offered."""

    vocab: int = option(256, "Number of distinct tokens.", minimum=1)
    dim: int = option(24, "Width of the residual stream.", minimum=1)
    layers: int = option(1, "Residual blocks of two convolutions.", minimum=1)
    segments: int = option(1, "Equal parts of the stack, each with a slot at its end.", minimum=1)
    kernel_size: int = option(
        3, "Tokens that a convolution sees, the last one included.", minimum=1
    )
    slots: tuple[str, ...] | None = option(
        None, "Slot ids offered for growth; one after every segment if empty."
    )

    def __post_init__(self) -> None:
        """Check the rules that span several fields."""
        super().__post_init__()
        if self.layers % self.segments:
            raise ConfigError(
                f"TcnConfig.segments must divide layers ({self.layers}), got {self.segments}"
            )
        self.slot_paths()

    def slot_paths(self) -> dict[str, str]:
        """Return the offered slots and the submodules they follow."""
        every = {slot_id(0, index): f"segments.{index}" for index in range(self.segments)}
        return pick_slots(every, self.slots)


class CausalConvolution(nn.Module):
    """A convolution over the last tokens, as one matrix product, which stacks run as one too."""

    def __init__(self, dim: int, kernel_size: int) -> None:
        """Build the filters."""
        super().__init__()
        self.kernel_size = kernel_size
        self.filters = nn.Linear(kernel_size * dim, dim)

    def forward(self, hidden: Tensor) -> Tensor:
        """Return [B, T, D] from [B, T, D]; zeros stand in front of the first token."""
        length = hidden.shape[-2]
        padded = F.pad(hidden, (0, 0, self.kernel_size - 1, 0))
        seen = [padded[..., back : back + length, :] for back in range(self.kernel_size)]
        convolved: Tensor = self.filters(torch.cat(seen, -1))
        return convolved


class CausalBlock(nn.Module):
    """Adds two causal convolutions to its input, each of a normalised stream."""

    def __init__(self, dim: int, kernel_size: int) -> None:
        """Build the branch."""
        super().__init__()
        self.branch = nn.Sequential(
            nn.LayerNorm(dim),
            CausalConvolution(dim, kernel_size),
            nn.GELU(),
            nn.LayerNorm(dim),
            CausalConvolution(dim, kernel_size),
        )

    def forward(self, hidden: Tensor) -> Tensor:
        """Return the stream with the branch added."""
        updated: Tensor = hidden + self.branch(hidden)
        return updated


@register_host("tcn")
class TcnHost(nn.Module):
    """Tokens [B, T] to scores of the next token [B, T, vocab]; T is any length."""

    config_class: ClassVar[type[Config]] = TcnConfig
    topology: ClassVar[Topology] = "sequence"

    def __init__(self, config: TcnConfig) -> None:
        """Build the host; its weights come from torch's current random state."""
        super().__init__()
        self.config = config
        self.tokens = nn.Embedding(config.vocab, config.dim)
        self.segments = nn.ModuleList(
            nn.Sequential(
                *(
                    CausalBlock(config.dim, config.kernel_size)
                    for _ in range(config.layers // config.segments)
                )
            )
            for _ in range(config.segments)
        )
        self.norm = nn.LayerNorm(config.dim)
        self.classifier = nn.Linear(config.dim, config.vocab)
        self.slot_paths = config.slot_paths()

    def forward(self, tokens: Tensor) -> Tensor:
        """Return the scores of every next token."""
        hidden = self.tokens(tokens)
        for segment in self.segments:
            hidden = segment(hidden)
        scores: Tensor = self.classifier(self.norm(hidden))
        return scores
