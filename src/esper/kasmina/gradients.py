"""Gradient statistics of seeds, from the norms of their gradient tensors.

They are really measured, on sampled batches after the backward pass and before clipping; the last
sample of an epoch counts.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from esper.kasmina.state import SlotState
from esper.leyline.stages import SeedStage
from esper.leyline.tensors import TensorRecord

VANISHING = 1e-7
"""A gradient tensor with a smaller norm has vanished."""

EXPLODING = 50.0
"""A gradient tensor with a larger norm explodes."""

_RATIO_MEMORY = 0.9
_RATIO_CAP = 10.0
_TINY = 1e-8


@dataclass(frozen=True, slots=True)
class GradientSample(TensorRecord):
    """What one batch said about some seeds; tensors of one shape, on the CPU."""

    norm: Tensor
    """float64, global L2 norm."""
    health: Tensor
    """float64 in [0, 1]."""
    vanishing: Tensor
    """bool."""
    exploding: Tensor
    """bool."""
    ratio: Tensor
    """float64, gradient per parameter relative to the host's, capped."""


def tensor_norms(parameters: Iterable[nn.Parameter]) -> Tensor:
    """Return float64 [P]: the norm of every parameter's gradient that exists."""
    gradients = [p.grad.detach() for p in parameters if p.grad is not None]
    if not gradients:
        return torch.zeros(0, dtype=torch.float64)
    norms = torch._foreach_norm(gradients)
    return torch.stack([norm.to(torch.float64) for norm in norms])


def summarise(
    norms: Tensor,
    seed_params: Tensor | int,
    host_norm: Tensor,
    host_params: Tensor | int,
    *,
    counts: Tensor | None = None,
) -> GradientSample:
    """Turn per-tensor norms [..., P] of seeds into one sample per seed [...].

    Where seeds have different numbers of tensors, `counts` [...] says how many of the P are theirs;
    the others, behind them, are zeros.
    """
    most = norms.shape[-1]
    if counts is None:
        counts = torch.full(norms.shape[:-1], most, device=norms.device)
    is_there = torch.arange(most, device=norms.device) < counts.unsqueeze(-1)
    # One after another, so that zeros behind them change nothing, not even the last bit.
    squares = norms.square().cumsum(-1)
    norm = squares[..., -1].sqrt() if most else norms.sum(-1)
    vanished = (is_there & (norms < VANISHING)).sum(-1)
    # A non-finite norm compares false with any threshold; it explodes all the same.
    exploded = (is_there & ~(norms <= EXPLODING)).sum(-1)
    share = 1.0 / counts.clamp(min=1).to(torch.float64)
    health = (1 - 0.5 * share * vanished - 0.8 * share * exploded).clamp(0, 1)
    host_size = torch.as_tensor(host_params, dtype=torch.float64).clamp(min=1).sqrt()
    seed_size = torch.as_tensor(seed_params, dtype=torch.float64).clamp(min=1).sqrt()
    ratio = (norm / seed_size.to(norm.device)) / (host_norm / host_size.to(norm.device))
    tiny = (norm < _TINY) | (host_norm < _TINY)
    ratio = torch.where(tiny, torch.zeros_like(ratio), ratio.clamp(max=_RATIO_CAP))
    return GradientSample(norm, health, vanished > 0, exploded > 0, ratio)


def sample_gradients(
    state: SlotState, host: nn.Module, slots: Sequence[nn.Module]
) -> dict[int, GradientSample]:
    """Return the samples of one network's seeds in TRAINING and BLENDING, by slot."""
    active = (state.stage == int(SeedStage.TRAINING)) | (state.stage == int(SeedStage.BLENDING))
    indices = active[0].nonzero().flatten().tolist()
    if not indices:
        return {}
    host_norms = tensor_norms(host.parameters()).cpu()
    host_norm = host_norms.square().sum().sqrt()
    host_size = sum(p.numel() for p in host.parameters() if p.requires_grad)
    samples = {}
    for index in indices:
        norms = tensor_norms(slots[index].parameters()).cpu()
        size = int(state.params[0, index])
        samples[index] = summarise(norms, size, host_norm, host_size)
    return samples


def record_gradients(state: SlotState, mask: Tensor, sample: GradientSample) -> SlotState:
    """Take over a sample [R, S] where `mask`; the ratio is smoothed over epochs."""
    smoothed = _RATIO_MEMORY * state.grad_ratio + (1 - _RATIO_MEMORY) * sample.ratio
    return state.where(
        mask,
        grad_norm=sample.norm.nan_to_num(math.inf),
        grad_health=sample.health,
        vanishing=sample.vanishing,
        exploding=sample.exploding,
        grad_ratio=torch.where(torch.isnan(state.grad_ratio), sample.ratio, smoothed),
    )
