"""The traffic lights of a page: where a number stops being good and starts being bad."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal

Light = Literal["good", "watch", "bad", "unknown"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Band:
    """Where a number stops being good and starts being bad."""

    watch: float
    bad: float
    meaning: str
    is_high_good: bool = False


BANDS: dict[str, Band] = {
    "explained_variance": Band(
        watch=0.3, bad=0.0, is_high_good=True, meaning="how much of the returns the critic explains"
    ),
    "clipfrac": Band(watch=0.25, bad=0.3, meaning="how many decisions were clipped"),
    "approx_kl": Band(watch=0.015, bad=0.03, meaning="how far an update moved the policy"),
    "grad_norm": Band(watch=5.0, bad=10.0, meaning="size of the learner's gradient"),
    "ratio_max": Band(watch=1.5, bad=2.0, meaning="greatest joint ratio"),
    "wait_share_free": Band(watch=1.0, bad=1.0, meaning="waiting where it could act; 99 % is fine"),
    "anti_gaming_share": Band(watch=0.05, bad=0.10, meaning="decisions penalised for gaming"),
    "growth_ratio": Band(watch=2.0, bad=5.0, meaning="parameters over those of the host"),
    "obs_clamp_share": Band(watch=0.05, bad=0.10, meaning="observation entries at their clamp"),
    "feedback_dependence": Band(
        watch=0.3, bad=0.6, meaning="op probability that hangs on the last action alone"
    ),
    "stale_s": Band(watch=2.0, bad=5.0, meaning="seconds since the last record of a running run"),
}
"""By metric; a metric without a band has no colour."""


def light(metric: str, value: float | None) -> Light:
    """Return the colour of a number: unknown where it was not measured or has no band."""
    band = BANDS.get(metric)
    if band is None or value is None or math.isnan(value):
        return "unknown"
    if band.is_high_good:
        if value >= band.watch:
            return "good"
        return "watch" if value >= band.bad else "bad"
    if value >= band.bad:
        return "bad"
    return "watch" if value >= band.watch else "good"
