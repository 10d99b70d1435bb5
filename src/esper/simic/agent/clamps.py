"""How much of the observation lies at its clamps: what the policy can no longer tell apart."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from esper.leyline.slots import SlotConfig
from esper.tamiyo.policy.layout import feature_names, feature_specs
from esper.tamiyo.policy.normalizer import CLIP


class ClampCounter:
    """Counts the entries of measured features that were cut off.

    A feature that is cut off by its formula counts at its upper bound, and at its lower one where
    that is not simply zero; every feature counts at the clip of the normaliser.
    """

    def __init__(self, slot_config: SlotConfig, device: torch.device | str) -> None:
        """Look up which features can be cut off, and where."""
        specs = feature_specs(slot_config)
        infinity = float("inf")

        def is_cut(formula: str) -> bool:
            return "clamp(" in formula or "min(" in formula

        measured = [spec.kind == "continuous" for spec in specs]
        high = [spec.high if is_cut(spec.formula) else infinity for spec in specs]
        low = [spec.low if is_cut(spec.formula) and spec.low < 0 else -infinity for spec in specs]
        self._measured = torch.tensor(measured, device=device)
        self._high = torch.tensor(high, device=device)
        self._low = torch.tensor(low, device=device)
        self._names = feature_names(slot_config)
        self._cut = torch.zeros(len(specs), dtype=torch.int64, device=device)
        self._seen = torch.zeros((), dtype=torch.int64, device=device)

    def start(self) -> None:
        """Begin a new round."""
        self._cut.zero_()
        self._seen.zero_()

    def count(self, raw: Tensor, normalized: Tensor, active: Tensor) -> None:
        """Count observations [rows, features] of the rows that still run."""
        cut = (raw >= self._high) | (raw <= self._low) | (normalized.abs() >= CLIP)
        self._cut += (cut & self._measured & active.unsqueeze(1)).sum(0)
        self._seen += active.sum()

    @property
    def share(self) -> float:
        """Share of the measured entries that were cut off."""
        seen = int(self._seen) * int(self._measured.sum())
        return int(self._cut.sum()) / seen if seen else 0.0

    def worst(self, count: int = 5) -> dict[str, float]:
        """Return the features that are cut off most often, with their shares."""
        seen = int(self._seen)
        cut = self._cut.tolist()
        order = sorted(range(len(cut)), key=lambda index: (-cut[index], index))
        return {self._names[index]: cut[index] / seen for index in order[:count] if cut[index]}

    def state_dict(self) -> dict[str, Any]:
        """Return the counts."""
        return {"cut": self._cut.cpu().clone(), "seen": int(self._seen)}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on from these counts."""
        self._cut.copy_(state["cut"])
        self._seen.fill_(state["seen"])
