"""ObservationNormalizer: running statistics by which observations are standardised.

During a rollout the statistics are frozen: `normalize` only reads them, so that all observations
of a round are on one scale. After it, `update` is called once with all raw observations. Flags,
one-hots and codes mean what they are and stay as they are.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from esper.leyline.errors import NonFiniteError, UsageError
from esper.leyline.slots import SlotConfig
from esper.tamiyo.policy.layout import feature_names, feature_specs

MOMENTUM = 0.99
LEAST_VARIANCE = 1e-8
"""A feature that varies by less has not varied yet, but for rounding, and passes as it is."""

CLIP = 10.0


class ObservationNormalizer(nn.Module):
    """Standardises the continuous features of an observation.

    Mean and variance are those of all observations so far, with the part of the variance that
    lies between the old mean and the batch's, until an update would move them by less than
    1 - `momentum`; from then on they follow by as much. So the first round sets them, and a feature
    that has not varied yet passes as it is. `state_dict` holds them.

    Args:
        slot_config: the slots the observation is laid out for.
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
    scale: Tensor
    """float32 [D], what a feature is multiplied by."""

    def __init__(self, slot_config: SlotConfig, momentum: float = MOMENTUM) -> None:
        """Start with statistics that change nothing."""
        super().__init__()
        if not 0.0 <= momentum < 1.0:
            raise UsageError(f"momentum must be 0 or more and below 1, got {momentum}")
        self.names = feature_names(slot_config)
        continuous = [spec.kind == "continuous" for spec in feature_specs(slot_config)]
        size = len(continuous)
        self.register_buffer("mean", torch.zeros(size))
        self.register_buffer("var", torch.ones(size))
        self.register_buffer("count", torch.zeros((), dtype=torch.float64))
        self.register_buffer("momentum", torch.tensor(momentum, dtype=torch.float64))
        self.register_buffer("continuous", torch.tensor(continuous), persistent=False)
        self.register_buffer("scale", torch.ones(size), persistent=False)
        self.register_load_state_dict_post_hook(_after_loading)  # type: ignore[no-untyped-call]
        self._rescale()

    def normalize(self, observation: Tensor) -> Tensor:
        """Return the observation [..., D] standardised and clipped to +-10; nothing is learned."""
        return ((observation - self.mean) * self.scale).clamp(-CLIP, CLIP)

    def forward(self, observation: Tensor) -> Tensor:
        """Return `normalize(observation)`."""
        return self.normalize(observation)

    @torch.no_grad()
    def update(self, batch: Tensor) -> None:
        """Take over the raw observations [..., D] of a whole round."""
        if batch.shape[-1] != len(self.names) or batch.numel() == 0:
            raise UsageError(
                f"update needs one or more observations of {len(self.names)} features, "
                f"got {list(batch.shape)}"
            )
        rows = batch.reshape(-1, len(self.names)).to(self.mean)
        self._refuse_non_finite(rows)
        var, mean = torch.var_mean(rows, dim=0, correction=0)
        share = rows.shape[0] / (self.count + rows.shape[0])
        take = torch.maximum(share, 1 - self.momentum).to(self.mean.dtype)
        keep = 1 - take
        between = keep * take * (mean - self.mean).square()
        new_var = keep * self.var + take * var + between
        new_mean = keep * self.mean + take * mean
        # In place: whoever captured these tensors, a graph or a view, sees the new values.
        self.var.copy_(torch.where(self.continuous, new_var, self.var))
        self.mean.copy_(torch.where(self.continuous, new_mean, self.mean))
        self.count += rows.shape[0]
        self._rescale()

    def _refuse_non_finite(self, rows: Tensor) -> None:
        finite = torch.isfinite(rows).all(0)
        if not bool(finite.all()):
            index = int((~finite).nonzero()[0])
            raise NonFiniteError(
                f"feature {index} ({self.names[index]}) of an observation is not finite; "
                "the statistics are left as they were"
            )

    @torch.no_grad()
    def _rescale(self) -> None:
        varies = self.continuous & (self.var > LEAST_VARIANCE)
        self.scale.copy_(torch.where(varies, self.var.rsqrt(), 1.0))


def _after_loading(normalizer: nn.Module, _: Any) -> None:
    assert isinstance(normalizer, ObservationNormalizer)
    normalizer._rescale()
