"""The figures of a claim, from the results of a proof: what holds, where, and for what reason.

Beside the verdicts of `esper prove` these are the first arm's effect on every kind of network and
data, without the five members that favour it most, against the best decisions in hindsight, and
where growing is useless; and whether it watches. Arms without results on all members are left out
and named, so the figures can also be made of a proof that was stopped.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from esper.lab.proof.arm import DEPTH, SCRATCH, STATIC, WAIT, ArmSpec, parse_arm
from esper.lab.proof.choose import hindsight_values, read_table
from esper.lab.proof.hindsight import measure_hindsight, measure_useless
from esper.lab.proof.prove import ProveConfig, required_arms
from esper.lab.proof.results import CellResult, comparison_mapping, summarise
from esper.lab.proof.statistics import (
    Floats,
    compare,
    interquartile_mean,
    log_ratios,
    percentile_interval,
    resample_members,
)
from esper.lab.proof.watching import likenesses, watch
from esper.lab.tasks.member import AnyMember
from esper.leyline.errors import UsageError
from esper.utils.process import grouped

LEFT_OUT = 5
"""Members that a claim has to hold without."""

BLINDFOLDED = ("shuffled", "frozen", "without_curves", "only_curves")
"""Kinds of arms that show a policy less than it has learned with."""


@dataclass(frozen=True, kw_only=True)
class PlayedProof:
    """What a proof has played; every arm on every member."""

    config: ProveConfig
    specs: tuple[ArmSpec, ...]
    members: tuple[AnyMember, ...]
    """Those on which the first arm and waiting were played."""
    arms: dict[str, dict[str, CellResult]]
    """Results by arm and member, the first arm first."""
    missing_arms: dict[str, str]
    """Why an arm is left out."""
    missing_members: list[str]

    @property
    def subject(self) -> str:
        """Name of the first arm."""
        return self.specs[0].name

    def of_kind(self, *kinds: str) -> list[str]:
        """Return the names of the played arms of some kinds, in the order of the proof."""
        return [spec.name for spec in self.specs if spec.kind in kinds and spec.name in self.arms]

    def errors(self, arm: str) -> Floats:
        """Return an arm's test errors, [members, seeds]."""
        own = self.arms[arm]
        return np.array([own[member.label].test_errors for member in self.members])

    def over_waiting(self, arm: str) -> Floats:
        """Return an arm's log ratios over waiting, [members, seeds]."""
        return log_ratios(self.errors(arm), self.errors(WAIT))


def read_spec(text: str) -> ArmSpec:
    """Parse an arm of a proof that was played elsewhere: its files need not be here."""
    try:
        return parse_arm(text)
    except UsageError:
        name, equals, spec = text.partition("=")
        if not equals or ":" in name or "/" in name:
            name, spec = "", text
        kind, colon, argument = spec.partition(":")
        if colon and kind.isidentifier():
            return ArmSpec(name or kind, kind, argument)
        return ArmSpec(name or spec.rstrip("/").rpartition("/")[2], "greedy", spec)


def read_proof(settings: Mapping[str, Any], results: Sequence[CellResult]) -> PlayedProof:
    """Return what was played of a proof.

    Args:
        settings: those of `ProveConfig`, as plain data.
        results: of all cells so far.
    """
    config = ProveConfig.from_mapping({**settings, "arms": [WAIT]})
    specs = [read_spec(text) for text in settings["arms"]]
    if WAIT not in {spec.name for spec in specs}:
        specs.append(ArmSpec(WAIT, WAIT, None))
    played: dict[str, dict[str, CellResult]] = {}
    for each in results:
        if each.purpose == "proof":
            played.setdefault(each.arm, {})[each.member] = each
    everyone = config.members.find(config.opening)
    both = [played.get(specs[0].name, {}), played.get(WAIT, {})]
    members = [member for member in everyone if all(member.label in own for own in both)]
    if len(members) < 2:
        raise UsageError(
            f"the proof has {len(members)} members on which both {specs[0].name!r} and 'wait' were "
            "played, and tables need 2; continue it with --resume"
        )
    names = dict.fromkeys([*_expected(specs, played), *played])
    counts = {arm: sum(member.label in played.get(arm, ()) for member in members) for arm in names}
    missing = {
        arm: f"played on {count} of {len(members)} members" if count else "not played"
        for arm, count in counts.items()
        if count < len(members)
    }
    whole = [specs[0].name, *(arm for arm in played if arm != specs[0].name and arm not in missing)]
    labels = {member.label for member in members}
    return PlayedProof(
        config=config,
        specs=tuple(specs),
        members=tuple(members),
        arms={arm: {m: r for m, r in played[arm].items() if m in labels} for arm in whole},
        missing_arms=missing,
        missing_members=[each.label for each in everyone if each.label not in labels],
    )


def _expected(specs: Sequence[ArmSpec], played: Mapping[str, Any]) -> list[str]:
    """Return the names under which a proof's arms have results."""
    has_static = any(arm.startswith("static x") for arm in played)
    return [
        f"scratch {spec.argument}" if spec.name == SCRATCH else spec.name
        for spec in specs
        if spec.kind != STATIC or not has_static
    ]


def gather(proof: PlayedProof, searched: Sequence[CellResult] = ()) -> dict[str, Any]:
    """Return all figures as plain data.

    Args:
        proof: what was played.
        searched: results of a search on the same members, whose schedules and depths are chosen
            from in hindsight; by default these are the proof's arms of those kinds.
    """
    config, subject = proof.config, proof.subject
    errors = {arm: proof.errors(arm) for arm in proof.arms}
    tables = {arm: log_ratios(errors[subject], errors[arm]) for arm in proof.arms if arm != subject}
    how: dict[str, Any] = {
        "required": [arm for arm in required_arms(proof.specs, config.reported) if arm in tables],
        "confidence": config.confidence,
        "needs_ranks": config.wilcoxon,
    }
    not_made: dict[str, str] = {}
    found = {
        "subject": subject,
        "family": config.members.family,
        "split": config.members.split,
        "opening": config.opening,
        "members": [member.label for member in proof.members],
        "seeds": config.seeds,
        "wilcoxon": config.wilcoxon,
        "arms": _arms(proof, errors),
        "comparisons": [comparison_mapping(each) for each in compare(tables, subject, **how)],
        "groups": _groups(proof, tables, config.confidence),
        "without_five": _without_five(tables, subject, how, not_made),
        "watching": _watching(proof, not_made),
        "hindsight": {
            name: _hindsight(proof, kind, name, searched, not_made)
            for name, kind in (("schedules", "schedule"), ("depths", DEPTH))
        },
        "useless": _useless(proof, not_made),
    }
    found["left_out"] = {
        "arms": proof.missing_arms,
        "members": proof.missing_members,
        "tables": not_made,
    }
    return found


def _arms(proof: PlayedProof, errors: Mapping[str, Floats]) -> dict[str, dict[str, Any]]:
    played = [result for own in proof.arms.values() for result in own.values()]
    found: dict[str, dict[str, Any]] = {}
    for arm in proof.arms:
        ratios = proof.over_waiting(arm)
        found[arm] = {
            "loss_ratio": float(np.exp(-ratios.mean())),
            "interquartile_mean": float(interquartile_mean(ratios)),
            **summarise(played, arm, errors),
        }
    return found


def _groups(
    proof: PlayedProof, tables: Mapping[str, Floats], confidence: float
) -> dict[str, dict[str, Any]]:
    """Return the subject's effect against every arm by kind of network, and by data."""
    tasks = [member.task() for member in proof.members]
    axes = {
        "network": [task.config.host for task in tasks],
        "data": [task.name for task in tasks],
    }
    return {
        axis: {
            value: {
                "members": len(places),
                "against": {
                    arm: _effect(table[places], confidence) for arm, table in tables.items()
                },
            }
            for value, places in grouped(
                (value, place) for place, value in enumerate(values)
            ).items()
        }
        for axis, values in axes.items()
    }


def _effect(table: Floats, confidence: float) -> dict[str, Any]:
    """Return an effect with its interval over members and seeds, which needs 2 members."""
    estimate = float(interquartile_mean(table))
    found: dict[str, Any] = {"estimate": estimate, "interval": None}
    if len(table) > 1 and table.size >= 4:
        interval = percentile_interval(estimate, resample_members(table), confidence)
        found["interval"] = dataclasses.asdict(interval)
    return found


def _without_five(
    tables: Mapping[str, Floats],
    subject: str,
    how: Mapping[str, Any],
    not_made: dict[str, str],
) -> dict[str, Any] | None:
    """Return the comparisons without the five members that favour the subject most.

    For the mean of member means that is the lowest value that any choice of five can leave. The
    interquartile mean and both tests are of the same members.
    """
    members = len(next(iter(tables.values()))) if tables else 0
    if members < LEFT_OUT + 2:
        not_made["without_five"] = f"{members} members are too few to leave out {LEFT_OUT}"
        return None
    kept = {}
    for arm, table in tables.items():
        order = np.argsort(table.mean(1), kind="stable")
        kept[arm] = table[np.sort(order[:-LEFT_OUT])]
    return {
        "members": members - LEFT_OUT,
        "lowest_mean": {arm: float(table.mean(1).mean()) for arm, table in kept.items()},
        "comparisons": [comparison_mapping(each) for each in compare(kept, subject, **how)],
    }


def _watching(proof: PlayedProof, not_made: dict[str, str]) -> dict[str, Any]:
    blindfolded = proof.of_kind(*BLINDFOLDED)
    if not blindfolded:
        not_made["watching"] = f"no arm of {', '.join(BLINDFOLDED)} was played"
    alike = likenesses(proof.members)
    ends = {arm: watch(results, alike) for arm, results in proof.arms.items()}
    return {
        "blindfolded": blindfolded,
        "likenesses": alike,
        "ends": {
            arm: {group: dataclasses.asdict(each) for group, each in own.items()}
            for arm, own in ends.items()
            if own is not None
        },
    }


def _hindsight(
    proof: PlayedProof,
    kind: str,
    name: str,
    searched: Sequence[CellResult],
    not_made: dict[str, str],
) -> dict[str, Any] | None:
    """Return the subject beside the best arm of a kind, or waiting, in hindsight."""
    labels = [member.label for member in proof.members]
    table = read_table([each for each in searched if each.member in labels], WAIT)
    plans = [arm for own in table.values() for arm in own if _kind_in_search(arm) == kind]
    if plans:
        values = hindsight_values(table, list(dict.fromkeys(plans)), "test")
        if len(table) < 2 or values.shape[1] < 2 or values.shape[2] < 2:
            not_made[f"hindsight over {name}"] = (
                "the search has none of them with 2 seeds on all of its members, 2 or more"
            )
            return None
        subject = proof.over_waiting(proof.subject)[[labels.index(label) for label in table]]
        return _beside(subject, values, [f"{values.shape[1] - 1} {name} of the search"])
    choices = [arm for arm in proof.of_kind(kind) if arm != proof.subject]
    if not choices:
        not_made[f"hindsight over {name}"] = "no arm to choose from was played"
        return None
    return _beside(proof.over_waiting(proof.subject), _stacked(proof, [WAIT, *choices]), choices)


def _kind_in_search(arm: str) -> str:
    """Return the kind of an arm of a search by its name: schedule, depth or heuristic."""
    first = arm.partition(" ")[0]
    return first if first in (DEPTH, "heuristic") else "schedule"


def _beside(subject: Floats, values: Floats, choices: Sequence[str]) -> dict[str, Any]:
    return {
        "choices": [WAIT, *choices],
        **dataclasses.asdict(measure_hindsight(subject, values)),
    }


def _useless(proof: PlayedProof, not_made: dict[str, str]) -> dict[str, Any] | None:
    arms = [arm for arm in proof.of_kind(DEPTH, "schedule") if arm != proof.subject]
    if not arms:
        not_made["useless"] = "no arm of depth or schedule was played"
        return None
    is_deeper = np.array(
        [[_is_deeper(proof.arms[arm][member.label]) for arm in arms] for member in proof.members]
    )
    found = measure_useless(proof.over_waiting(proof.subject), _stacked(proof, arms), is_deeper)
    return {"others": arms, **dataclasses.asdict(found)}


def _is_deeper(result: CellResult) -> bool:
    """Return whether most of the scored networks are larger than the host.

    A schedule that grows after the best epoch is scored by a network without growth, and a depth
    that the budget does not pay for is the host.
    """
    return sum(flops > result.host_flops for flops in result.flops) * 2 > len(result.flops)


def _stacked(proof: PlayedProof, arms: Sequence[str]) -> Floats:
    """Return log ratios over waiting, [members, arms, seeds]."""
    return np.stack([proof.over_waiting(arm) for arm in arms], axis=1)
