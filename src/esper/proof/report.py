"""The report of a proof in Markdown: verdicts first, then what they rest on."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any


def write_report(found: Mapping[str, Any]) -> str:
    """Return the report of what `Proof.conclude` found."""
    limits = found["limits"]
    opened = f", opening {found['opening']} of the claim" if found["opening"] else ""
    parts = [
        f"# Proof: {found['subject']}",
        f"{len(found['members'])} members of {found['family']} ({found['split']}{opened}), "
        f"{found['seeds']} paired seeds each. Every arm may grow to {limits['parameters']:g} times "
        f"the host's parameters and {limits['flops']:g} times its operations. Log ratios are of "
        "test errors, above 0 where the first arm makes fewer; intervals are bootstraps over "
        "members and seeds of the interquartile mean.",
        *_ranking(found),
        "## Verdicts",
        "\n".join(f"- {verdict}" for verdict in found["verdicts"]),
        "## Arms",
        _arms(found["arms"]),
        "Sizes are in units of the host's at the end of a run; operations of training and of "
        "ablations in units of what training the waiting host takes. Error is the geometric mean.",
        *_asides(found),
        "## Members",
        _members(found),
        "Log ratio over waiting, mean over seeds, and in brackets the parameters added.",
    ]
    return "\n\n".join(parts) + "\n"


def _ranking(found: Mapping[str, Any]) -> list[str]:
    """Return the table of a public benchmark; nothing where it is none."""
    if not found["benchmark"]:
        return []
    rows = [
        [str(place), arm, f"{score:+.4f}"]
        for place, (arm, score) in enumerate(found["ranking"].items(), start=1)
    ]
    told = "A score is the interquartile mean of log ratios over waiting."
    return [f"## {found['benchmark']}", _table(["rank", "arm", "score"], rows), told]


def _arms(arms: Mapping[str, Mapping[str, float]]) -> str:
    header = ["arm", "test score", "error", "parameters", "FLOPs", "training", "ablations"]
    header += ["germinated", "fossilized", "pruned"]
    rows = [
        [
            name,
            f"{arm['test_score']:.2f}",
            f"{arm['error']:.4f}",
            f"{arm['parameters']:.2f}",
            f"{arm['flops']:.2f}",
            f"{arm['training_flops']:.2f}",
            f"{arm['ablation_flops']:.2f}",
            f"{arm['germinated']:.1f}",
            f"{arm['fossilized']:.1f}",
            f"{arm['pruned']:.1f}",
        ]
        for name, arm in sorted(arms.items(), key=lambda item: item[1]["error"])
    ]
    return _table(header, rows)


def _asides(found: Mapping[str, Any]) -> list[str]:
    """Return what is reported beside the verdicts."""
    lines = [
        f"- Front of error against {cost.replace('_', ' ')}: {', '.join(arms)}."
        for cost, arms in found["fronts"].items()
    ]
    best = found["best_static"]
    if best is not None:
        lines.append(
            f"- Best of the static sizes: {best['arm']} with error {best['error']:.4f}; training "
            f"all of them took {best['training_flops_of_all_sizes']:.2f} times the host's training."
        )
    if found["privileged_share"] is not None:
        lines.append(
            f"- {found['subject']} reaches {found['privileged_share']:.0%} of the gain of "
            "schedules that were searched on the members themselves."
        )
    for purpose, each in found["restraint"].items():
        verdict = "within" if each["is_restrained"] else "not within"
        lines.append(
            f"- Where growth {_PURPOSES.get(purpose, purpose)} ({each['members']} members): "
            f"{each['parameters_added']:+.1%} parameters, {each['points_gained']:+.2f} points; "
            f"{verdict} 5 % and 0.3 points."
        )
    return ["## Beside the verdicts", "\n".join(lines)]


_PURPOSES = {
    "lacks capacity": "is meant to pay",
    "neutral": "is neutral",
    "useless or harmful": "is useless or harmful",
}


def _members(found: Mapping[str, Any]) -> str:
    arms = list(found["arms"])
    rows = [
        [
            member,
            *(
                f"{own[arm]['log_ratio_over_wait']:+.3f} ({own[arm]['parameters_added']:+.0%})"
                for arm in arms
            ),
        ]
        for member, own in found["by_member"].items()
    ]
    return _table(["member", *arms], rows)


def _table(header: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    lines = [header, ["---"] * len(header), *rows]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)
