"""Causal self-attention through FlexAttention on CUDA.

Elsewhere the same causal mask goes through scaled-dot-product attention: the same function of the
same parameters, so a seed grown on one device runs on the other.
"""

from __future__ import annotations

import warnings
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from esper.kasmina.blueprints.attention import CausalProjection
from esper.kasmina.blueprints.registry import register_blueprint
from esper.leyline.blueprints import Topology

_NARROWEST = 16


@lru_cache(maxsize=8)
def _causal_mask(length: int, device: str) -> Any:
    from torch.nn.attention.flex_attention import create_block_mask

    def causal(batch: Tensor, head: Tensor, query: Tensor, key: Tensor) -> Tensor:
        return query >= key

    return create_block_mask(causal, None, None, length, length, device=device)


def causal_flex(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Return causal attention, by FlexAttention on CUDA and by SDPA elsewhere.

    FlexAttention has no kernel for heads narrower than 16; those go through SDPA everywhere.
    """
    if q.device.type != "cuda" or q.shape[-1] < _NARROWEST:
        return F.scaled_dot_product_attention(q, k, v, is_causal=True)
    mask = _causal_mask(q.shape[-2], str(q.device))
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
    note="Causal self-attention: FlexAttention on CUDA, the same mask through SDPA on the CPU.",
)
class FlexAttention(nn.Module):
    """x + projection(causal attention), by FlexAttention where there is CUDA."""

    def __init__(self, channels: int, topology: Topology) -> None:
        """Create the projections."""
        super().__init__()
        self.attention = CausalProjection(channels)

    def forward(self, x: Tensor) -> Tensor:
        """Return the activation plus what was attended to."""
        return x + self.attention.join(causal_flex(*self.attention.split(x)))
