"""The mathematics of mixing a seed into its host, and the gate network of the GATE style.

`h` is the host's activation at the slot, `s` the seed's output, `alpha` the amplitude: a scalar
for a whole batch or one number per sample. At alpha = 0 every algorithm returns `h` bit for bit;
from BLENDING on nothing is detached, so the host upstream keeps its gradient at alpha = 1.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from esper.leyline.alpha import AlphaAlgorithm
from esper.leyline.blueprints import Topology
from esper.leyline.tensors import apply_function


class GateNetwork(nn.Module):
    """How much of the seed each sample lets in, in [0, 1].

    Image and vector activations are pooled to one number per sample. A sequence gets one number
    per position: pooling over time would show early tokens their own future.
    """

    def __init__(self, channels: int, topology: Topology) -> None:
        """Create the gate for activations with this many channels."""
        super().__init__()
        hidden = max(8, channels // 4)
        self.topology: Topology = topology
        self.hidden = nn.Linear(channels, hidden)
        self.out = nn.Linear(hidden, 1)

    def forward(self, x: Tensor) -> Tensor:
        """Return the gate in a shape that broadcasts against `x`."""
        pooled = x.mean((-2, -1)) if self.topology == "cnn" else x
        gate = torch.sigmoid(self.out(torch.relu(self.hidden(pooled))))
        return gate[..., None, None] if self.topology == "cnn" else gate


def blend(
    h: Tensor, s: Tensor, alpha: Tensor, algorithm: int, gate: nn.Module | None = None
) -> Tensor:
    """Return the mixture of host and seed; `alpha` broadcasts against `h` and may not be 0."""
    s = s.to(h.dtype)
    alpha = alpha.to(h.dtype)
    if algorithm == int(AlphaAlgorithm.ADD):
        return h + alpha * (s - h)
    if algorithm == int(AlphaAlgorithm.MULTIPLY):
        return h * (1 + alpha * torch.tanh(s - h))
    assert gate is not None, "the GATE algorithm needs a gate network"
    opening: Tensor = gate(h).to(h.dtype)
    return h + alpha * opening * (s - h)


def blend_rows(
    h: Tensor, s: Tensor, alpha: Tensor, multiplies: Tensor | None, opening: Tensor | None
) -> Tensor:
    """Blend many networks at once, each by its own algorithm.

    Args:
        h: activations of the hosts, [n, B, ...].
        s: outputs of the seeds, like `h`.
        alpha: amplitudes, broadcasting against `h`.
        multiplies: where the algorithm is MULTIPLY; None where it nowhere is.
        opening: what gate networks let in, 1 where there is none; None where there are none.
    """
    difference = s.to(h.dtype) - h
    change = difference if opening is None else opening.to(h.dtype) * difference
    if multiplies is not None:
        change = torch.where(multiplies, h * torch.tanh(difference), change)
    return h + alpha.to(h.dtype) * change


def blend_per_sample(
    h: Tensor, s: Tensor, alpha: Tensor, algorithm: int, gate: nn.Module | None = None
) -> Tensor:
    """Blend with one alpha per sample; samples at 0 are the host's, whatever the seed says."""
    alpha = alpha.reshape(-1, *([1] * (h.dim() - 1)))
    return torch.where(alpha > 0, blend(h, s, alpha, algorithm, gate), h)


class _StraightThrough(torch.autograd.Function):
    """Value of the host, gradient for both: what `h + (b - stopgrad(b))` means, exactly."""

    generate_vmap_rule = True

    @staticmethod
    def forward(h: Tensor, b: Tensor) -> Tensor:
        # A copy: what follows may work in place, which a view of `h` would forbid.
        return h.clone()

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Tensor, Tensor], output: Tensor) -> None:
        return None

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, Tensor]:
        return grads[0], grads[0]


def straight_through(h: Tensor, b: Tensor) -> Tensor:
    """Return `h` bit for bit, while `b` receives the gradient of the output.

    A non-finite `b` cannot reach the host: its value is never used.
    """
    return apply_function(_StraightThrough, h, b)
