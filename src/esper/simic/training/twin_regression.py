"""TwinRegression: what a row would have scored had it not acted, with less noise than its own twin.

Training is chaotic: a row that has acted and its own twin soon have little more in common than any
two networks of the task. The twin's own luck is then noise in the gain, so it counts only in part,
beside the mean of the task's twins.

Taken alone that would pay for luck: a row whose network happens to score above the task's mean
could act, and be paid for the difference. So the luck that was there when it acted counts as well,
by as much as luck lasts from one epoch to another; at the moment of acting that is all of it, and
the gain starts from 0.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor


@dataclass(frozen=True, slots=True)
class TwinRegression:
    """The twins of K tasks over E epochs, for R rows."""

    own_share: float
    """Weight of a row's own twin; 1 is that twin alone."""
    means: Tensor
    """float32 [K, E], mean score of a task's twins."""
    persistence: Tensor
    """float32 [K, E, E], how much of a twin's distance from that mean at one epoch is left at
    another."""
    task: Tensor
    """int64 [R], task of every row."""

    @classmethod
    def fit(
        cls, own_share: float, curves: Mapping[str, Tensor], tasks: Sequence[str]
    ) -> TwinRegression:
        """Return the regression of rows with these tasks; `curves` are [twins, E] by task."""
        names = list(dict.fromkeys(tasks))
        means, persistence = [], []
        for name in names:
            known = curves[name].double()
            mean = known.mean(0)
            luck = known - mean
            shared = (luck.unsqueeze(2) * luck.unsqueeze(1)).sum(0)
            kept = shared / shared.diagonal().clamp(min=1e-9).unsqueeze(1)
            means.append(mean)
            persistence.append(kept.fill_diagonal_(1.0))
        return cls(
            own_share,
            torch.stack(means).float(),
            torch.stack(persistence).float(),
            torch.tensor([names.index(name) for name in tasks]),
        )

    def to(self, device: torch.device | str) -> TwinRegression:
        """Return the same on another device."""
        moved = (each.to(device) for each in (self.means, self.persistence, self.task))
        return TwinRegression(self.own_share, *moved)

    def expect(self, own: Tensor, epoch: Tensor) -> Tensor:
        """Return float32 [R, E]: the scores of rows that acted after some epochs, had they waited.

        Args:
            own: [R, E], scores of the rows' own twins.
            epoch: int64 [R], epochs done when the row acted.
        """
        mean = self.means[self.task]
        luck, at = own - mean, epoch - 1
        lasting = self.persistence[self.task, at] * luck.gather(1, at.unsqueeze(1))
        return mean + self.own_share * luck + (1.0 - self.own_share) * lasting

    def state_dict(self) -> dict[str, Any]:
        """Return it as plain data and tensors."""
        tensors = {name: getattr(self, name).cpu() for name in ("means", "persistence", "task")}
        return {"own_share": self.own_share, **tensors}
