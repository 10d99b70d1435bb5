"""ObservationNormalizer: running statistics by which observations are standardised.

During a rollout the statistics are frozen: `normalize` only reads them, so that all observations
of a round are on one scale. After it, `update` is called once with all raw observations. Flags,
one-hots and codes mean what they are and stay as they are.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from esper.leyline.errors import NonFiniteError, UsageError
from esper.tamiyo.policy.layout import FeatureSpec
from esper.tamiyo.policy.observation import ObservationLayout

MOMENTUM = 0.99
LEAST_VARIANCE = 1e-8
"""A feature that varies by less has not varied yet, but for rounding, and passes as it is."""

CLIP = 10.0


class ObservationNormalizer(nn.Module):
    """Standardises the continuous features of an observation.

    Features that a layout repeats, as for every slot, have their statistics in common, and only
    repetitions that are there count: `state_dict` is the same for any number of them.

    Args:
        layout: what the observation is.
        momentum: largest share of the old statistics that an update keeps.
    """

    mean: Tensor
    """float32 [D], 0 where a feature is not standardised."""
    scale: Tensor
    """float32 [D], what a feature is multiplied by."""

    def __init__(self, layout: ObservationLayout, momentum: float = MOMENTUM) -> None:
        """Start with statistics that change nothing."""
        super().__init__()
        self.layout = layout
        self.parts = nn.ModuleDict(
            {part.name: RunningMoments(part.specs, momentum) for part in layout.parts}
        )
        self.register_buffer("mean", torch.zeros(layout.size), persistent=False)
        self.register_buffer("scale", torch.ones(layout.size), persistent=False)
        self.register_load_state_dict_post_hook(_after_loading)  # type: ignore[no-untyped-call]

    def normalize(self, observation: Tensor) -> Tensor:
        """Return the observation [..., D] standardised and clipped to +-10; nothing is learned."""
        return ((observation - self.mean) * self.scale).clamp(-CLIP, CLIP)

    def forward(self, observation: Tensor) -> Tensor:
        """Return `normalize(observation)`."""
        return self.normalize(observation)

    def update(self, batch: Tensor) -> None:
        """Take over the raw observations [..., D] of a whole round."""
        if batch.shape[-1] != self.layout.size or batch.numel() == 0:
            raise UsageError(
                f"update needs one or more observations of {self.layout.size} features, "
                f"got {list(batch.shape)}"
            )
        rows = batch.reshape(-1, self.layout.size)
        _refuse_non_finite(rows, self.layout)
        for part in self.layout.parts:
            own = part.of(rows)
            if part.presence is not None:
                own = own[own[..., part.presence] > 0]
            if own.numel():
                self.moments(part.name).update(own)
        self.spread()

    def moments(self, part: str) -> RunningMoments:
        """Return the statistics of a part of the layout."""
        found = self.parts[part]
        assert isinstance(found, RunningMoments)
        return found

    @torch.no_grad()
    def spread(self) -> None:
        """Give every repetition of a feature the statistics of its part."""
        for part in self.layout.parts:
            own, place = self.moments(part.name), slice(part.start, part.start + part.size)
            # In place: whoever captured these tensors, a graph or a view, sees the new values.
            self.mean[place].copy_(own.mean.repeat(part.repeats))
            self.scale[place].copy_(own.scale.repeat(part.repeats))


class RunningMoments(nn.Module):
    """Mean and variance of every continuous feature so far.

    They are those of all values so far, with the part of the variance that lies between the old
    mean and the batch's, until an update would move them by less than 1 - `momentum`; from then on
    they follow by as much. So the first round sets them, and a feature that has not varied yet
    passes as it is.

    Args:
        specs: the features.
        momentum: largest share of the old statistics that an update keeps.
    """

    mean: Tensor
    """float32 [D], 0 where a feature is not standardised."""
    var: Tensor
    """float32 [D], 1 where a feature is not standardised."""
    count: Tensor
    """float64, observations seen."""
    momentum: Tensor
    """float64."""
    continuous: Tensor
    """bool [D], what is standardised."""

    def __init__(self, specs: Sequence[FeatureSpec], momentum: float = MOMENTUM) -> None:
        """Start with statistics that change nothing."""
        super().__init__()
        if not 0.0 <= momentum < 1.0:
            raise UsageError(f"momentum must be 0 or more and below 1, got {momentum}")
        continuous = [spec.kind == "continuous" for spec in specs]
        size = len(continuous)
        self.register_buffer("mean", torch.zeros(size))
        self.register_buffer("var", torch.ones(size))
        self.register_buffer("count", torch.zeros((), dtype=torch.float64))
        self.register_buffer("momentum", torch.tensor(momentum, dtype=torch.float64))
        self.register_buffer("continuous", torch.tensor(continuous), persistent=False)

    @property
    def scale(self) -> Tensor:
        """float32 [D], what a feature is multiplied by."""
        varies = self.continuous & (self.var > LEAST_VARIANCE)
        return torch.where(varies, self.var.rsqrt(), 1.0)

    @torch.no_grad()
    def update(self, batch: Tensor) -> None:
        """Take over values [..., D]."""
        rows = batch.reshape(-1, len(self.mean)).to(self.mean)
        var, mean = torch.var_mean(rows, dim=0, correction=0)
        share = rows.shape[0] / (self.count + rows.shape[0])
        take = torch.maximum(share, 1 - self.momentum).to(self.mean.dtype)
        keep = 1 - take
        between = keep * take * (mean - self.mean).square()
        new_var = keep * self.var + take * var + between
        new_mean = keep * self.mean + take * mean
        self.var.copy_(torch.where(self.continuous, new_var, self.var))
        self.mean.copy_(torch.where(self.continuous, new_mean, self.mean))
        self.count += rows.shape[0]


def _refuse_non_finite(rows: Tensor, layout: ObservationLayout) -> None:
    finite = torch.isfinite(rows).all(0)
    if not bool(finite.all()):
        index = int((~finite).nonzero()[0])
        raise NonFiniteError(
            f"feature {index} ({layout.names[index]}) of an observation is not finite; "
            "the statistics are left as they were"
        )


def _after_loading(normalizer: nn.Module, _: Any) -> None:
    assert isinstance(normalizer, ObservationNormalizer)
    normalizer.spread()
