"""A finished round in one line, for logs and terminals, and how its figures are written."""

from __future__ import annotations

import math
from collections.abc import Mapping

from esper.simic.training.progress import RoundReport

_HEADS_FIRST = ("op", "slot", "blueprint", "tempo")


def round_line(report: RoundReport) -> str:
    """Return a finished round in one line."""
    parts = [f"return {signed(report.return_mean)}"]
    if report.gain_mean is not None:
        parts.append(f"gain {signed(report.gain_mean)}")
    if report.evaluation is not None:
        parts.append(f"greedy gain {signed(report.evaluation.val_gain_mean)}")
    parts += [
        f"fossilized {share(report.fossilization_rate)}",
        f"EV {number(report.explained_variance)}{_beside(report.potential_share)}",
        f"KL {number(report.approx_kl)}",
        f"WAIT {share(report.wait_share_free)}",
        f"entropies {entropies_line(report.conditional_entropies)}",
    ]
    return "  ".join(parts)


def _beside(potential_share: float | None) -> str:
    """Return what the reward's potential explains, where there is one."""
    return "" if potential_share is None else f" (potential {number(potential_share)})"


def entropies_line(entropies: Mapping[str, float | None]) -> str:
    """Return the heads' entropies where they had a choice, those that matter most first."""
    order = [*_HEADS_FIRST, *(head for head in entropies if head not in _HEADS_FIRST)]
    told = [f"{head} {number(entropies.get(head))}" for head in order if head in entropies]
    return " ".join(told) or "–"


def signed(value: float | None) -> str:
    """Return a difference; a dash where nothing was measured, here and below."""
    return f"{value:+.3f}" if value is not None and math.isfinite(value) else "–"


def number(value: float | None) -> str:
    """Return a number in two digits, however small."""
    if value is None or not math.isfinite(value):
        return "–"
    return f"{value:.1e}" if value and abs(value) < 1e-3 else f"{value:.2g}"


def share(value: float | None) -> str:
    """Return a share in percent."""
    return f"{100 * value:.0f} %" if value is not None and math.isfinite(value) else "–"
