"""The governor: notices when a row's training has gone wrong, before it can poison a snapshot.

Three panics: a loss that is not finite; a loss that falls back to chance after it had been well
below it (lobotomy); a loss that explodes three epochs in a row (divergence). Pure functions over
rows; restoring a row is the business of whoever owns its weights.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from esper.kasmina.state import SlotState
from esper.leyline.actions import TensorRecord
from esper.leyline.config import Config, option
from esper.leyline.rules import CodeWithText
from esper.leyline.stages import SeedStage

# ---- Gradient statistics of seeds, from the norms of their gradient tensors


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


# ---- The governor


WINDOW = 20  # Losses that are remembered.
MIN_SAMPLES = 10  # Losses needed before anything but NaN is judged.
SIGMAS = 6.0  # Standard deviations above the mean of a divergence.
FACTOR = 3.0  # Times the mean of a divergence.
LEARNED_SHARE = 0.6  # Share of the chance loss below which a host has learned.
CHANCE_SHARE = 0.065  # Distance to the chance loss, as a share of it, that counts as chance.


@dataclass(frozen=True, kw_only=True)
class GovernorConfig(Config):
    """When the governor panics, and how often it takes a snapshot."""

    is_on: bool = option(True, "Whether rows are watched at all.")
    snapshot_every: int = option(5, "Epochs between snapshots.", minimum=1)
    max_loss: float = option(
        12.0, "A loss below this is never a divergence (15 for text).", above=0.0
    )
    patience: int = option(3, "Diverged epochs in a row that are a panic.", minimum=1)


class Panic(CodeWithText):
    """Why a row is rolled back."""

    NONE = 0, "nothing is wrong"
    NOT_FINITE = 1, "the validation loss was not finite"
    LOBOTOMY = 2, "the network fell back to the loss of guessing"
    DIVERGENCE = 3, "the validation loss exploded"


@dataclass(frozen=True, slots=True, kw_only=True)
class GovernorState(TensorRecord):
    """What is remembered about every row."""

    losses: Tensor
    """float64 [R, window], newest last, NaN where not yet there."""
    anomalies: Tensor
    """int64 [R], diverged epochs in a row."""


def start_governing(rows: int, device: torch.device | str = "cpu") -> GovernorState:
    """Return the state before the first epoch."""
    unknown = torch.full((rows, WINDOW), math.nan, dtype=torch.float64, device=device)
    return GovernorState(
        losses=unknown, anomalies=torch.zeros(rows, dtype=torch.int64, device=device)
    )


def govern(
    state: GovernorState, loss: Tensor, chance_loss: Tensor | float, config: GovernorConfig
) -> tuple[GovernorState, Tensor]:
    """Take over one epoch's validation loss [R]; return the state and int64 [R], a `Panic`.

    `chance_loss` (one number or [R]) is that of a network that only guesses; where nobody knows it
    is NaN, which compares false.
    """
    known = torch.isfinite(state.losses)
    count = known.sum(1)
    filled = torch.where(known, state.losses, torch.zeros_like(state.losses))
    mean = filled.sum(1) / count.clamp(min=1)
    spread = torch.where(known, (state.losses - mean[:, None]).square(), torch.zeros_like(filled))
    sigma = (spread.sum(1) / count.clamp(min=1)).sqrt()
    judged = count >= MIN_SAMPLES
    finite = torch.isfinite(loss)

    had_learned = mean < LEARNED_SHARE * chance_loss
    at_chance = (loss - chance_loss).abs() < CHANCE_SHARE * chance_loss
    lobotomy = judged & had_learned & at_chance & finite
    anomaly = (
        judged
        & finite
        & (loss > config.max_loss)
        & (loss > mean + SIGMAS * sigma)
        & (loss > FACTOR * mean)
    )
    anomalies = torch.where(anomaly, state.anomalies + 1, torch.zeros_like(state.anomalies))
    divergence = anomalies >= config.patience

    panic = torch.zeros_like(state.anomalies)
    panic = torch.where(divergence, int(Panic.DIVERGENCE), panic)
    panic = torch.where(lobotomy, int(Panic.LOBOTOMY), panic)
    panic = torch.where(~finite, int(Panic.NOT_FINITE), panic)

    # Anomalies and panics are no part of what is normal.
    keep = (panic == 0) & ~anomaly
    shifted = torch.cat([state.losses[:, 1:], loss[:, None]], 1)
    losses = torch.where(keep[:, None], shifted, state.losses)
    anomalies = torch.where(panic != 0, torch.zeros_like(anomalies), anomalies)
    return GovernorState(losses=losses, anomalies=anomalies), panic
