"""What others' learners see and choose from: observation and action of rows as plain arrays.

The observation is that of our own policies, `PolicyConfig.layout`, followed by the blueprint of
every slot as a one-hot (all zero where the slot is empty). The action is one index per head, in the
order of `HEAD_NAMES`; its mask is what each head could take before anything is chosen, all heads
side by side. Such masks cannot say that a slot depends on the op: a combination that is not legal
changes nothing, like WAIT. `esper.envs.legal` has masks that are exact.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import torch
from gymnasium import spaces
from numpy.typing import NDArray
from torch import Tensor
from torch.nn import functional as F

from esper.leyline.actions import HEAD_NAMES, PLACEHOLDERS, LifecycleOp
from esper.leyline.rules import Masks
from esper.leyline.signals import Signals
from esper.tamiyo.networks.config import PolicyConfig
from esper.tamiyo.policy.action_masks import available_heads


class RowSpaces:
    """The spaces of one row, and rows as arrays of them.

    Args:
        policy: the layout of the observation, fitted to the rows.
    """

    def __init__(self, policy: PolicyConfig) -> None:
        """Lay the spaces out."""
        self._layout = policy.observation
        self._blueprints = policy.num_blueprints
        self.sizes = tuple(policy.head_sizes[head] for head in HEAD_NAMES)
        """Number of choices of every head."""
        specs = self._layout.specs
        hots = policy.num_slots * policy.num_blueprints
        low = [_bound(spec.low, -math.inf) for spec in specs] + [0.0] * hots
        high = [_bound(spec.high, math.inf) for spec in specs] + [1.0] * hots
        self.observation: Any = spaces.Box(
            np.array(low, np.float32), np.array(high, np.float32), dtype=np.float32
        )
        """Box of float32."""
        self.action: Any = spaces.MultiDiscrete(self.sizes)
        """MultiDiscrete, one entry per head."""

    def observe(self, signals: Signals) -> NDArray[np.float32]:
        """Return float32 [R, D]."""
        with torch.no_grad():
            numbers, blueprints = self._layout.observe(signals, "cpu")
            # An empty slot is -1: it becomes 0 among one more class, which is then left out.
            hot = F.one_hot(blueprints + 1, self._blueprints + 1)[..., 1:]
            seen = torch.cat([numbers, hot.flatten(1).to(numbers.dtype)], dim=1)
        # Rounding may leave a bound by one bit.
        low, high = self.observation.low, self.observation.high
        clipped: NDArray[np.float32] = np.clip(seen.numpy(), low, high)
        return clipped

    def decode(self, actions: NDArray[np.int64]) -> dict[str, Tensor]:
        """Return {head: int64 [R]} of arrays [R, 8]."""
        table = torch.as_tensor(np.asarray(actions), dtype=torch.int64)
        return {head: table[:, index] for index, head in enumerate(HEAD_NAMES)}

    def mask(self, masks: Masks) -> NDArray[np.int8]:
        """Return int8 [R, choices of all heads], 1 where a head may take the choice."""
        flat: NDArray[np.int8] = union_mask(masks).to(torch.int8).numpy()
        return flat


def union_mask(masks: Masks) -> Tensor:
    """Return bool [R, choices of all heads]: what some legal action chooses.

    A head that no legal action uses has its placeholder alone: what it draws has no effect.
    """
    masks = masks.to("cpu")
    acting = masks.slot_by_op.clone()
    acting[:, LifecycleOp.WAIT] = False
    plantable = masks.slot_by_op[:, LifecycleOp.GERMINATE].unsqueeze(-1)
    depending = {
        "slot": acting.any(1),
        "blueprint": (masks.blueprint_by_slot & plantable).any(1),
    }
    used = available_heads(masks)
    flat = []
    for index, head in enumerate(HEAD_NAMES):
        part = depending[head] if head in depending else getattr(masks, head)
        idle = torch.arange(part.shape[-1]) == int(PLACEHOLDERS[head])
        flat.append(torch.where(used[:, index, None], part, idle))
    return torch.cat(flat, dim=1)


def _bound(value: float, unknown: float) -> float:
    return value if math.isfinite(value) else unknown
