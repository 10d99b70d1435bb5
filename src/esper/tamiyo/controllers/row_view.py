"""What a controller that thinks row by row reads: signals and masks of one row as plain numbers."""

from __future__ import annotations

from dataclasses import dataclass, fields

from esper.leyline.alpha import AlphaMode
from esper.leyline.errors import UsageError
from esper.leyline.rules import Masks
from esper.leyline.signals import Signals

_FULL_ALPHA = 1.0 - 1e-6


@dataclass(frozen=True, slots=True)
class RowView:
    """The signals and masks of one row; lists are over slots."""

    epoch: int
    horizon: int
    score: float
    best_score: float
    plateau_epochs: int
    stabilized: bool
    rolled_back: bool
    last_op: int
    last_success: bool
    enabled: list[bool]
    stage: list[int]
    blueprint: list[int]
    algorithm: list[int]
    alpha_mode: list[int]
    alpha: list[float]
    alpha_target: list[float]
    epochs_in_stage: list[int]
    counterfactual_age: list[int]
    contribution: list[float]
    legal: list[list[bool]]
    """Whether each op is legal at each slot."""
    fits: list[list[bool]]
    """Whether each blueprint fits each slot."""

    def is_fully_blended(self, slot: int) -> bool:
        """Return whether a seed has reached its full amplitude and stays there."""
        return (
            self.alpha_mode[slot] == AlphaMode.HOLD
            and self.alpha[slot] >= _FULL_ALPHA
            and self.alpha_target[slot] >= _FULL_ALPHA
        )


def read_rows(signals: Signals, masks: Masks) -> list[RowView]:
    """Return one view per row; every tensor is copied from its device once."""
    others = {
        "horizon": signals.max_epochs,
        "score": signals.val_score,
        "legal": masks.slot_by_op,
        "fits": masks.blueprint_by_slot,
    }
    names = [field.name for field in fields(RowView)]
    columns = [others[name] if name in others else getattr(signals, name) for name in names]
    return [RowView(*row) for row in zip(*(each.tolist() for each in columns), strict=True)]


def check_rows(who: str, known: int, signals: Signals) -> None:
    """Refuse signals of another number of rows than a controller was reset for."""
    if signals.rows != known:
        raise UsageError(
            f"the {who} was reset for {known} rows but is shown {signals.rows}; "
            f"call reset({signals.rows}, device) first"
        )
