"""The blueprint embedding: which seed a slot holds, as a few learned numbers."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from esper.leyline.blueprints import NUM_BLUEPRINTS

_INITIAL_STD = 0.02


class BlueprintEmbedding(nn.Module):
    """Embeds blueprint ids; an empty slot, -1, has a row of its own, the last."""

    null_index: Tensor

    def __init__(self, num_blueprints: int = NUM_BLUEPRINTS, embed_dim: int = 4) -> None:
        """Create small random rows, one more than there are blueprints."""
        super().__init__()
        self.num_blueprints = num_blueprints
        self.embedding = nn.Embedding(num_blueprints + 1, embed_dim)
        nn.init.normal_(self.embedding.weight, std=_INITIAL_STD)
        # A tensor that follows the module's device, so that `where` needs no copy from the host.
        null_index = torch.tensor(num_blueprints, dtype=torch.int64)
        self.register_buffer("null_index", null_index, persistent=False)

    def forward(self, indices: Tensor) -> Tensor:
        """Return [..., S, embed_dim] for int64 [..., S]."""
        rows: Tensor = self.embedding(torch.where(indices < 0, self.null_index, indices))
        return rows
