"""TwinRegression: what a row would have scored without its seeds, with less noise than its twin.

Training is chaotic: a row in which a seed takes part and its own twin soon have little more in
common than any two networks of the task. The twin's own luck is then noise in the gain, so it
counts only in part, beside the mean of the task's twins.

Taken alone that would pay for luck: a row whose network happens to score above the task's mean
could grow, and be paid for the difference. So the luck that was there when it parted from its twin
counts as well, by as much as luck lasts from one epoch to another; at that moment it is all of it,
and the gain starts from 0.

How long luck lasts has to be known from other twins. Until there are enough of them, rows are
compared with their own twin alone.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Any

import torch
from torch import Tensor

LEAST_OTHERS = 8
"""Other twins of a task, each with a seed of its own, that it takes to know the task's mean and how
long luck lasts. With fewer, what is wrong with them is in the pay of all rows (decision 0079)."""


@dataclass(frozen=True, slots=True)
class TwinRegression:
    """The twins of K tasks over E epochs, for R rows."""

    own_share: Tensor
    """float32 [K], weight of a row's own twin; 1 is that twin alone."""
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
        """Return the regression of rows with these tasks.

        Args:
            own_share: weight of a row's own twin where enough others are known.
            curves: [twins, E] by task, one for every seed; rows that share a seed share a twin.
            tasks: of all rows.
        """
        names = list(dict.fromkeys(tasks))
        shares, means, persistence = [], [], []
        for name in names:
            known = curves[name].double()
            shares.append(own_share if len(known) - 1 >= LEAST_OTHERS else 1.0)
            mean = known.mean(0)
            luck = known - mean
            shared = (luck.unsqueeze(2) * luck.unsqueeze(1)).sum(0)
            kept = shared / shared.diagonal().clamp(min=1e-9).unsqueeze(1)
            means.append(mean)
            persistence.append(kept.fill_diagonal_(1.0))
        return cls(
            torch.tensor(shares),
            torch.stack(means).float(),
            torch.stack(persistence).float(),
            torch.tensor([names.index(name) for name in tasks]),
        )

    def to(self, device: torch.device | str) -> TwinRegression:
        """Return the same on another device."""
        return TwinRegression(*(getattr(self, name).to(device) for name in _TENSORS))

    def expect(self, own: Tensor, epoch: Tensor) -> Tensor:
        """Return float32 [R, E]: the scores of rows without the seeds that take part in them.

        Args:
            own: [R, E], scores of the rows' own twins.
            epoch: int64 [R], epochs after which a row was still its twin.
        """
        luck, at = own - self.means[self.task], epoch - 1
        lasting = self.persistence[self.task, at] * luck.gather(1, at.unsqueeze(1))
        # Exactly the own twin where that is all that counts.
        others_share = 1.0 - self.own_share[self.task].unsqueeze(1)
        return own + others_share * (lasting - luck)

    def state_dict(self) -> dict[str, Any]:
        """Return it as tensors."""
        return {name: getattr(self, name).cpu() for name in _TENSORS}


_TENSORS = tuple(each.name for each in fields(TwinRegression))
