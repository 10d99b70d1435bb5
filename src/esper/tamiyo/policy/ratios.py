"""The `ratios` observation: what `travelling` has, without anything that tells a size or a count.

Every input is a ratio, a share or a flag: nothing says how many channels, samples or epochs there
are. In their place a policy sees what is left of a budget of compute, and what each seed would add
to the cost of a step. `FEATURE_SETS` names the features of both layouts.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from esper.tamiyo.policy.layout import (
    COST_HIGH,
    FEEDBACK_FEATURES,
    HOST_FEATURES,
    NUM_FEEDBACK,
    PAIR_FEATURES,
    TRAVELLING_SLOT_FEATURES,
    FeatureSpec,
    flag,
    within,
)

_ABSOLUTE = frozenset(
    {
        *("epochs_left", "horizon", "plateau", "params", "flops_known", "flops", "budget_used"),
        *("samples_known", "train_samples", "samples_per_param", "passes", "passes_left"),
        *("rate_known", "learning_rate", "classes", "num_slots"),
        *("channels", "positions", "fitting", "time_to_target", "epochs_in_stage", "age"),
        "grad_norm",
    }
)
"""Features of the travelling layout that tell how large a host, its data or its run is."""


def _relative(specs: Sequence[FeatureSpec], *more: FeatureSpec) -> tuple[FeatureSpec, ...]:
    kept = [spec for spec in specs if spec.name not in _ABSOLUTE]
    # What became of the previous action stays last.
    split = len(kept) - (NUM_FEEDBACK if FEEDBACK_FEATURES[0] in kept else 0)
    return (*kept[:split], *more, *kept[split:])


RATIO_HOST_FEATURES = _relative(
    HOST_FEATURES,
    flag("budget_known", "1 if the run has a budget of compute"),
    FeatureSpec(
        "budget_left", "1 - compute_spent / compute_budget; without a budget 1 - epoch / max_epochs"
    ),
    FeatureSpec("plateau_share", "plateau_epochs / max_epochs"),
)

RATIO_SLOT_FEATURES = _relative(
    TRAVELLING_SLOT_FEATURES,
    FeatureSpec("fitting_share", "blueprints that fit / blueprints"),
    FeatureSpec("time_to_target_share", "time_to_target / max_epochs"),
    FeatureSpec("in_stage_share", "epochs_in_stage / max_epochs"),
    FeatureSpec("age_share", "age / max_epochs"),
    within("step_share", "slot_flops / flops", 0.0, 1.0),
)

RATIO_PAIR_FEATURES = (
    *PAIR_FEATURES,
    within("step_cost", "ln((flops + seed_flops) / flops)", 0.0, COST_HIGH),
)


@dataclass(frozen=True, slots=True)
class FeatureSet:
    """The features of a layout that serves any number of slots and blueprints."""

    host: tuple[FeatureSpec, ...]
    """Of the host, its task and the previous action."""
    slot: tuple[FeatureSpec, ...]
    """Of every slot; all zero where the host has no such slot."""
    pair: tuple[FeatureSpec, ...]
    """Of every blueprint at every slot; all zero where it does not fit."""

    def index(self, part: Literal["host", "slot", "pair"], name: str) -> int:
        """Return the position of a feature within its part."""
        names = [spec.name for spec in getattr(self, part)]
        return names.index(name)


FEATURE_SETS = {
    "travelling": FeatureSet(HOST_FEATURES, TRAVELLING_SLOT_FEATURES, PAIR_FEATURES),
    "ratios": FeatureSet(RATIO_HOST_FEATURES, RATIO_SLOT_FEATURES, RATIO_PAIR_FEATURES),
}
"""By the name of the layout."""
