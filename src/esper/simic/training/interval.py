"""Confidence intervals of paired differences, by Student's t."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache

import torch
from torch import Tensor

from esper.leyline.errors import UsageError

_SLICES = 2_000
_HALVINGS = 60


@dataclass(frozen=True, slots=True)
class Interval:
    """A mean with the interval that holds it at some confidence."""

    mean: float
    low: float
    high: float
    count: int

    def __str__(self) -> str:
        return f"{self.mean:+.2f} [{self.low:+.2f}, {self.high:+.2f}] (n = {self.count})"


def paired_interval(differences: Tensor | Sequence[float], confidence: float = 0.95) -> Interval:
    """Return the mean of paired differences [N] with its interval.

    Args:
        differences: one number per pair, such as a network's score minus its twin's.
        confidence: share of such intervals that hold the true mean.
    """
    values = torch.as_tensor(differences, dtype=torch.float64)
    count = values.numel()
    if count < 2:
        raise UsageError(f"an interval needs at least 2 pairs, got {count}")
    if not 0.0 < confidence < 1.0:
        raise UsageError(f"confidence must be between 0 and 1, got {confidence}")
    mean = float(values.mean())
    error = float(values.std(correction=1)) / math.sqrt(count)
    reach = t_quantile(0.5 + confidence / 2.0, count - 1) * error
    return Interval(mean, mean - reach, mean + reach, count)


@lru_cache(maxsize=256)
def t_quantile(share: float, freedom: int) -> float:
    """Return where Student's t with these degrees of freedom has this share below it."""
    if not 0.5 <= share < 1.0 or freedom < 1:
        raise UsageError(f"share must be 0.5 to 1 and freedom 1 or more, got {share}, {freedom}")
    low, high = 0.0, 1.0
    while _t_share(high, freedom) < share:
        high *= 2.0
    for _ in range(_HALVINGS):
        middle = (low + high) / 2.0
        if _t_share(middle, freedom) < share:
            low = middle
        else:
            high = middle
    return (low + high) / 2.0


def _t_share(x: float, freedom: int) -> float:
    """Return the share of Student's t below x >= 0.

    With t = sqrt(freedom) tan(a) the density is a power of cos(a), smooth on a finite range, which
    Simpson's rule integrates to rounding.
    """
    end = math.atan(x / math.sqrt(freedom))
    step = end / _SLICES
    total = 0.0
    for index in range(_SLICES + 1):
        weight = 1 if index in (0, _SLICES) else 4 if index % 2 else 2
        total += weight * math.cos(index * step) ** (freedom - 1)
    log_norm = math.lgamma((freedom + 1) / 2) - math.lgamma(freedom / 2) - 0.5 * math.log(math.pi)
    return 0.5 + math.exp(log_norm) * total * step / 3.0
