"""The vector host: linear blocks with LayerNorm and ReLU, for features or flat images."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise
from typing import ClassVar

from torch import Tensor, nn

from esper.kasmina.hosts.registry import pick_slots, register_host
from esper.leyline.config import Config, option
from esper.leyline.errors import ConfigError
from esper.leyline.slots import Topology, slot_id


@dataclass(frozen=True, kw_only=True)
class MlpConfig(Config):
    """Sizes of the vector host, and which of its slots are offered."""

    in_features: int = option(64, "Features of one sample once flattened.", minimum=1)
    hidden: tuple[int, ...] = option((16, 16, 16), "Width of each hidden block.", minimum=1)
    num_outputs: int = option(10, "Classes to tell apart, or values to predict.", minimum=1)
    slots: tuple[str, ...] | None = option(
        None, "Slot ids offered for growth; one after every block if empty."
    )

    def __post_init__(self) -> None:
        """Check the rules that span several fields."""
        super().__post_init__()
        if not self.hidden:
            raise ConfigError("MlpConfig.hidden must name at least one block, got none")
        self.slot_paths()

    def slot_paths(self) -> dict[str, str]:
        """Return the offered slots and the submodules they follow."""
        every = {slot_id(0, index): f"blocks.{index}" for index in range(len(self.hidden))}
        return pick_slots(every, self.slots)


@register_host("mlp")
class MlpHost(nn.Module):
    """Samples [B, ...], flattened to [B, in_features], to outputs [B, num_outputs]."""

    config_class: ClassVar[type[Config]] = MlpConfig
    topology: ClassVar[Topology] = "vector"

    def __init__(self, config: MlpConfig) -> None:
        """Build the host; its weights come from torch's current random state."""
        super().__init__()
        self.config = config
        widths = (config.in_features, *config.hidden)
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.Linear(width, next_width), nn.LayerNorm(next_width), nn.ReLU())
            for width, next_width in pairwise(widths)
        )
        self.head = nn.Linear(widths[-1], config.num_outputs)
        self.slot_paths = config.slot_paths()

    def forward(self, samples: Tensor) -> Tensor:
        """Return the outputs of a batch of samples."""
        hidden = samples.flatten(1)
        for block in self.blocks:
            hidden = block(hidden)
        outputs: Tensor = self.head(hidden)
        return outputs
