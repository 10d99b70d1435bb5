"""UpdateReport: what an update did, in the columns of the store."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from esper.leyline.actions import HEAD_NAMES
from esper.nissa.columns import Row
from esper.nissa.schema import UpdateHeadRow, UpdateRow


@dataclass(frozen=True, slots=True)
class NonFinite:
    """One place where a number was NaN or infinite, so that no step was taken."""

    epoch: int
    """Optimisation epoch, from 0."""
    kind: str
    """What it was: 'log_prob', 'old_log_prob', 'value', 'gradient', or the name of a target."""
    heads: tuple[str, ...] = ()
    """The heads it was found in, where it was in any."""

    def __str__(self) -> str:
        where = f" of {', '.join(self.heads)}" if self.heads else ""
        return f"{self.kind}{where} in epoch {self.epoch}"


@dataclass(slots=True)
class UpdateReport:
    """What one update did: one entry per optimisation epoch, and one per epoch and head."""

    updates: list[dict[str, Any]] = field(default_factory=list)
    """Columns of `UpdateRow`, by name."""
    heads: list[dict[str, Any]] = field(default_factory=list)
    """Columns of `UpdateHeadRow`, by name."""
    nonfinite: list[NonFinite] = field(default_factory=list)
    """Why the update was cut short, if it was."""
    steps: int = 0
    """Steps the optimizer took."""
    seconds: float = 0.0

    @property
    def skipped(self) -> bool:
        """Whether no step could be taken because a number was not finite."""
        return self.steps == 0

    @property
    def explained_variance(self) -> float:
        """Of the returns, by what the critic expected when it acted."""
        return float(self.updates[-1]["explained_variance"])

    @property
    def approx_kl(self) -> float:
        """From the policy of the rollout to the one after the last step; NaN where skipped."""
        value = self.updates[-1].get("approx_kl")
        return float("nan") if value is None else float(value)

    def head(self, name: str) -> dict[str, Any]:
        """Return the columns of one head after the last step."""
        return next(row for row in reversed(self.heads) if row["head"] == name)

    def rows(self, round: int, env_steps: int) -> list[Row]:
        """Return the records to write, heads before the update they belong to."""
        shared: dict[str, Any] = {"round": round, "env_steps": env_steps}
        heads = [UpdateHeadRow(**row, **shared) for row in self.heads]
        return [*heads, *(UpdateRow(**row, **shared) for row in self.updates)]


def head_rows(ordinal: int, columns: Mapping[str, Sequence[Any]]) -> list[dict[str, Any]]:
    """Return one entry per head from columns with one value per head."""
    return [
        {
            "ordinal": ordinal,
            "head": head,
            **{name: values[index] for name, values in columns.items()},
        }
        for index, head in enumerate(HEAD_NAMES)
    ]
