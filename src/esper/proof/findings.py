"""The figures of a proof: every arm in itself, by member, and beside the static networks."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from statistics import fmean
from typing import Any

import numpy as np

from esper.proof.arm import WAIT, ArmSpec
from esper.proof.results import CellResult
from esper.proof.statistics import Comparison, Floats, front, interquartile_mean, log_ratios

COSTS = ("parameters", "flops", "total_flops")
"""What fronts are drawn against: sizes at the end, and all operations of a run."""

MOST_ADDED = 0.05
"""Share of parameters that may be added where growth is useless or harmful."""
MOST_LOST = 0.3
"""Points of test score that may be lost there."""


def comparison_mapping(comparison: Comparison) -> dict[str, Any]:
    """Return a comparison as plain data."""
    return {**dataclasses.asdict(comparison), "errors_changed": comparison.errors_changed}


def summarise(
    played: Sequence[CellResult], arm: str, errors: Mapping[str, Floats]
) -> dict[str, float]:
    """Return the figures of an arm over all members.

    Sizes are in units of the host's, operations in units of what training the waiting host takes.
    """
    own = [result for result in played if result.arm == arm]
    waiting = {result.member: result for result in played if result.arm == WAIT}

    def over_waiting(total: str) -> float:
        return fmean(
            fmean(getattr(each, total)) / fmean(waiting[each.member].training_flops) for each in own
        )

    training, ablations = over_waiting("training_flops"), over_waiting("ablation_flops")
    return {
        "test_score": fmean(fmean(each.test_scores) for each in own),
        "error": float(np.exp(np.log(errors[arm]).mean())),
        "parameters": fmean(fmean(each.parameters) / each.host_parameters for each in own),
        "flops": fmean(fmean(each.flops) / each.host_flops for each in own),
        "training_flops": training,
        "ablation_flops": ablations,
        "total_flops": training + ablations,
        "germinated": fmean(fmean(each.germinated) for each in own),
        "fossilized": fmean(fmean(each.fossilized) for each in own),
        "pruned": fmean(fmean(each.pruned) for each in own),
        "rolled_back": fmean(fmean(map(float, each.rolled_back)) for each in own),
    }


def best_static(summaries: Mapping[str, Mapping[str, float]]) -> dict[str, Any] | None:
    """Return the static network with the least error, and what finding it took: all of them."""
    static = {arm: s for arm, s in summaries.items() if arm.startswith("static x")}
    if not static:
        return None
    best = min(static, key=lambda arm: static[arm]["error"])
    spent = sum(each["training_flops"] for each in static.values())
    return {"arm": best, "error": static[best]["error"], "training_flops_of_all_sizes": spent}


def privileged_share(
    errors: Mapping[str, Floats], subject: str, specs: Sequence[ArmSpec]
) -> float | None:
    """Return how much of the privileged schedules' gain over waiting the subject reaches."""
    name = next((spec.name for spec in specs if spec.kind == "privileged"), None)
    if name is None:
        return None
    possible = float(log_ratios(errors[name], errors[WAIT]).mean())
    return float(log_ratios(errors[subject], errors[WAIT]).mean()) / possible if possible else None


def rank(errors: Mapping[str, Floats]) -> dict[str, float]:
    """Return every arm's score, the best first: the interquartile mean of log ratios over waiting.

    Args:
        errors: test errors by arm, [members, seeds].
    """
    scores = {
        arm: float(interquartile_mean(log_ratios(table, errors[WAIT])))
        for arm, table in errors.items()
    }
    return dict(sorted(scores.items(), key=lambda item: -item[1]))


def fronts(summaries: Mapping[str, Mapping[str, float]]) -> dict[str, list[str]]:
    """Return, for every cost, the arms that no other beats in cost and error, cheapest first."""
    arms = list(summaries)
    errors = [summaries[arm]["error"] for arm in arms]
    return {
        cost: [arms[place] for place in front([summaries[arm][cost] for arm in arms], errors)]
        for cost in COSTS
    }


def by_member(
    played: Sequence[CellResult], errors: Mapping[str, Floats], members: Sequence[str]
) -> dict[str, dict[str, dict[str, float]]]:
    """Return, by member and arm, mean scores, log ratio over waiting, and what was added."""
    known = {(result.member, result.arm): result for result in played}
    found: dict[str, dict[str, dict[str, float]]] = {}
    for place, member in enumerate(members):
        found[member] = {}
        for arm, table in errors.items():
            result = known[member, arm]
            ratios = log_ratios(table[place], errors[WAIT][place])
            waited = fmean(known[member, WAIT].test_scores)
            found[member][arm] = {
                "test_score": fmean(result.test_scores),
                "points_over_wait": fmean(result.test_scores) - waited,
                "log_ratio_over_wait": float(ratios.mean()),
                "parameters_added": fmean(result.parameters) / result.host_parameters - 1.0,
                "flops_added": fmean(result.flops) / result.host_flops - 1.0,
                "fossilized": fmean(result.fossilized),
            }
    return found


def restraint(
    figures: Mapping[str, Mapping[str, Mapping[str, float]]],
    subject: str,
    purposes: Mapping[str, str],
) -> dict[str, dict[str, Any]]:
    """Return, for every purpose of claim members, what the subject added and gained there.

    Args:
        figures: of `by_member`.
        subject: the arm under proof.
        purposes: what growth can bring, by member.
    """
    found: dict[str, dict[str, Any]] = {}
    for purpose in dict.fromkeys(purposes.values()):
        own = [figures[m][subject] for m in figures if purposes.get(m) == purpose]
        if not own:
            continue
        added = fmean(each["parameters_added"] for each in own)
        gained = fmean(each["points_over_wait"] for each in own)
        is_restrained = added <= MOST_ADDED and gained >= -MOST_LOST
        found[purpose] = {
            "members": len(own),
            "parameters_added": added,
            "points_gained": gained,
            "is_restrained": is_restrained,
        }
    return found
