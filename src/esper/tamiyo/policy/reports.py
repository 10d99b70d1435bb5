"""Plain records about hosts and slots: what an observation is made of, in numbers one can read.

They are the form in which the design documents speak of signals. `plain_reports` turns tensors into
them; `reference.py` turns them into an observation.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from esper.leyline.actions import LifecycleOp
from esper.leyline.alpha import AlphaAlgorithm, AlphaMode
from esper.leyline.signals import Signals
from esper.leyline.slots import SlotConfig


@dataclass(frozen=True, slots=True, kw_only=True)
class HostReport:
    """What is known about one host after an epoch, in plain numbers."""

    epoch: int
    max_epochs: int
    val_loss: float
    val_score: float
    best_loss: float
    best_score: float
    loss_history: tuple[float, ...]
    """Up to five epochs, newest last; the newest is the one just validated."""
    score_history: tuple[float, ...]
    """As many as losses."""
    plateau_epochs: int
    stabilized: bool
    params: int
    budget: int
    last_op: int = LifecycleOp.WAIT
    last_success: bool = True
    enabled: tuple[str, ...] | None = None
    """Ids of the slots this host has; None for all of them."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SlotReport:
    """What is known about the record in one slot, in plain numbers."""

    stage: int
    blueprint: int
    alpha: float = 0.0
    alpha_target: float = 0.0
    alpha_mode: int = AlphaMode.HOLD
    alpha_velocity: float = 0.0
    time_to_target: float = 0.0
    algorithm: int = AlphaAlgorithm.ADD
    contribution: float | None = None
    """None before the first ablation."""
    contribution_velocity: float | None = None
    counterfactual_age: int | None = None
    epochs_in_stage: int = 0
    grad_norm: float = 0.0
    grad_health: float = 1.0
    grad_health_prev: float = 1.0
    vanishing: bool = False
    exploding: bool = False
    interactions: Mapping[str, float] | None = None
    """Points gained together with the seed in another slot, by its id."""

    @property
    def is_measured(self) -> bool:
        """Whether an ablation has been done."""
        return self.contribution is not None


def plain_reports(
    signals: Signals, slot_config: SlotConfig
) -> tuple[list[HostReport], list[dict[str, SlotReport]]]:
    """Return the rows of `signals` as plain records, for whoever wants to read or compare them."""
    hosts, slots = [], []
    plain = {name: getattr(signals, name).tolist() for name in Signals.__dataclass_fields__}
    names = slot_config.slot_ids[: signals.num_slots]
    for row in range(signals.rows):
        values = {name: column[row] for name, column in plain.items()}
        enabled = tuple(name for name, on in zip(names, values["enabled"], strict=True) if on)
        hosts.append(
            HostReport(
                epoch=values["epoch"],
                max_epochs=values["max_epochs"],
                val_loss=values["val_loss"],
                val_score=values["val_score"],
                best_loss=values["best_loss"],
                best_score=values["best_score"],
                loss_history=tuple(x for x in values["loss_history"] if not math.isnan(x)),
                score_history=tuple(x for x in values["score_history"] if not math.isnan(x)),
                plateau_epochs=values["plateau_epochs"],
                stabilized=values["stabilized"],
                params=values["params"],
                budget=values["budget"],
                last_op=values["last_op"],
                last_success=values["last_success"],
                enabled=enabled,
            )
        )
        slots.append(
            {
                name: _slot_report(values, index, names)
                for index, name in enumerate(names)
                if values["occupied"][index]
            }
        )
    return hosts, slots


_SLOT_FIELDS = (
    "stage",
    "blueprint",
    "alpha",
    "alpha_target",
    "alpha_mode",
    "alpha_velocity",
    "time_to_target",
    "algorithm",
    "epochs_in_stage",
    "grad_norm",
    "grad_health",
    "grad_health_prev",
    "vanishing",
    "exploding",
)


def _slot_report(values: Mapping[str, Any], index: int, names: Sequence[str]) -> SlotReport:
    age = values["counterfactual_age"][index]
    together = zip(names, values["interaction"][index], strict=True)
    return SlotReport(
        **{name: values[name][index] for name in _SLOT_FIELDS},
        contribution=_known(values["contribution"][index]),
        contribution_velocity=_known(values["contribution_velocity"][index]),
        counterfactual_age=None if age < 0 else age,
        interactions={name: value for name, value in together if name != names[index]},
    )


def _known(value: float) -> float | None:
    return None if math.isnan(value) else value
