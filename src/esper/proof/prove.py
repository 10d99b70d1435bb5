"""`esper prove`: arms on members with paired seeds, and what may be said of them.

The first arm is the one under proof; it is compared with every other. Three stages, each of which
is played once and read from `results.jsonl` afterwards: learning rates for the static networks, on
validation samples and with seeds of their own; all arms; and what arms grew, from scratch.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean
from typing import Any

import numpy as np

from esper.leyline.config import Config, option
from esper.leyline.errors import UsageError
from esper.proof.arm import (
    SCRATCH,
    STATIC,
    WAIT,
    Arm,
    ArmSpec,
    ControllerArm,
    ScheduleArm,
    ScratchArm,
    StaticArm,
    check_names,
    parse_arm,
    waiting,
)
from esper.proof.choose import ContextualRule
from esper.proof.member import Member, descriptors
from esper.proof.plans import PlainSchedule
from esper.proof.play import Cell, PlayConfig, Player
from esper.proof.results import CellResult, ResultFile
from esper.proof.static import commonest
from esper.proof.statistics import Comparison, Floats, compare, front, log_ratios
from esper.tamiyo.controllers.documents import read_document

PROOF_SEEDS = 1 << 34
"""First seed of proofs; every opening of the claim has seeds of its own beyond."""
RATE_SEEDS = 1 << 36
"""First seed by which learning rates are chosen."""
RESULTS_FILE = "results.jsonl"

REPORTED_ONLY = ("contextual", "privileged", STATIC, SCRATCH)
"""Kinds of arms whose comparisons are reported and not required."""


@dataclass(frozen=True, kw_only=True)
class ProveConfig(Config):
    """Which arms, with how many seeds, and how they are judged."""

    arms: tuple[str, ...] = option(
        ("heuristic", "wait", "random", "periodic", "plateau"),
        "What is played; the first is judged.",
    )
    seeds: int = option(8, "Seeds of every arm on every member.", minimum=2)
    sizes: tuple[float, ...] = option(
        (1.0, 1.5, 2.0, 3.0), "Widths of the static networks, in units of the host's.", above=0.0
    )
    rates: tuple[float, ...] = option(
        (0.25, 0.5, 1.0, 2.0, 4.0),
        "Learning rates tried for every static network, in units of the member's.",
        above=0.0,
    )
    rate_seeds: int = option(2, "Seeds by which a rate is chosen.", minimum=1)
    confidence: float = option(0.95, "Of intervals and verdicts.", above=0.5, maximum=0.999)
    opening: int = option(0, "Which opening of the claim this is; 0 where none.", minimum=0)
    play: PlayConfig = option(PlayConfig, "Limits, and how networks are grown.")

    def __post_init__(self) -> None:
        """Check the arms."""
        super().__post_init__()
        specs = [parse_arm(text) for text in self.arms]
        check_names(specs)
        if specs and specs[0].kind in (STATIC, SCRATCH):
            raise UsageError(
                f"the first arm is the one under proof, so it cannot be {specs[0].name!r}"
            )


class Proof:
    """A proof in its folder.

    Args:
        config: the arms and how they are judged.
        members: on which tasks.
        folder: where results are and go.
        player: plays the rows.
    """

    def __init__(
        self, config: ProveConfig, members: Sequence[Member], folder: Path, player: Player
    ) -> None:
        """Read the arms' files; nothing is played yet."""
        self.config, self.members = config, tuple(members)
        self._player = player
        self.specs = [parse_arm(text) for text in config.arms]
        if WAIT not in {spec.name for spec in self.specs}:
            self.specs.append(ArmSpec(WAIT, WAIT, None))
        self._plain = [make_arm(spec) for spec in self.specs if spec.kind not in (STATIC, SCRATCH)]
        self.results = ResultFile(folder / RESULTS_FILE)

    def run(self) -> bool:
        """Play what is missing; return whether everything was played."""
        return (
            self._play("rates", self._rate_cells())
            and self._play("proof", [*self._cells(self._plain), *self._cells(self._static())])
            and self._play("proof", self._cells(self._scratch()))
        )

    def arms(self) -> list[str]:
        """Return the names of all arms that were played, the one under proof first."""
        return list(dict.fromkeys(result.arm for result in self.results.of("proof")))

    def conclude(self) -> dict[str, Any]:
        """Return everything that was found, as plain data."""
        arms, played = self.arms(), self.results.of("proof")
        subject = arms[0]
        errors = {arm: self._errors(played, arm) for arm in arms}
        tables = {arm: log_ratios(errors[subject], errors[arm]) for arm in arms if arm != subject}
        comparisons = compare(
            tables,
            subject,
            required=[spec.name for spec in self.specs if spec.kind not in REPORTED_ONLY],
            confidence=self.config.confidence,
        )
        summaries = {arm: summarise(played, arm, errors) for arm in arms}
        return {
            "subject": subject,
            "opening": self.config.opening,
            "members": [member.label for member in self.members],
            "seeds": self.config.seeds,
            "limits": {
                "parameters": self.config.play.param_limit,
                "flops": self.config.play.flop_limit,
            },
            "verdicts": [str(each) for each in comparisons],
            "comparisons": [comparison_mapping(each) for each in comparisons],
            "arms": summaries,
            "by_member": self._by_member(played, arms, errors),
            "fronts": {
                cost: [
                    arms[i]
                    for i in front(
                        [summaries[arm][cost] for arm in arms],
                        [summaries[arm]["error"] for arm in arms],
                    )
                ]
                for cost in ("parameters", "flops", "training_flops")
            },
            "best_static": best_static(summaries),
            "privileged_share": privileged_share(errors, subject, self.specs),
        }

    def _play(self, purpose: str, cells: Sequence[Cell]) -> bool:
        missing = [cell for cell in cells if cell.key not in self.results]
        for results in self._player.play(missing):
            self.results.add(results)
        return all(cell.key in self.results for cell in cells)

    def _cells(self, arms: Sequence[Arm]) -> list[Cell]:
        first = PROOF_SEEDS + (self.config.opening << 20)
        seeds = tuple(range(first, first + self.config.seeds))
        return [Cell("proof", arm, member, seeds) for member in self.members for arm in arms]

    def _rate_cells(self) -> list[Cell]:
        if not self._has(STATIC):
            return []
        seeds = tuple(range(RATE_SEEDS, RATE_SEEDS + self.config.rate_seeds))
        return [
            Cell("rates", self._candidate(member, size, factor), member, seeds)
            for member in self.members
            for size in self.config.sizes
            for factor in self.config.rates
        ]

    def _candidate(self, member: Member, size: float, factor: float) -> StaticArm:
        rate = factor * member.task().config.learning_rate
        return StaticArm(f"{_static_name(size)}, rate x{factor:g}", size, {member.label: rate})

    def _static(self) -> list[Arm]:
        """Return the static arms, each with the rate that suits it on every member."""
        if not self._has(STATIC):
            return []
        found: list[Arm] = []
        for size in self.config.sizes:
            rates = {}
            for member in self.members:
                tried = [self._candidate(member, size, factor) for factor in self.config.rates]
                best = min(tried, key=lambda arm, m=member: self._rate_error(arm, m))  # type: ignore[misc]
                rates[member.label] = best.rates[member.label]
            found.append(StaticArm(_static_name(size), size, rates))
        return found

    def _rate_error(self, arm: StaticArm, member: Member) -> float:
        return fmean(np.log(self.results.get(("rates", arm.name, member.label)).val_errors))

    def _scratch(self) -> list[Arm]:
        """Return what arms grew most often on every member, to be trained from scratch."""
        found: list[Arm] = []
        for spec in self.specs:
            if spec.kind != SCRATCH:
                continue
            assert spec.argument is not None, "a scratch arm names another"
            grown = {
                member.label: commonest(
                    self.results.get(("proof", spec.argument, member.label)).architectures()
                )
                for member in self.members
            }
            name = f"scratch {spec.argument}" if spec.name == SCRATCH else spec.name
            found.append(ScratchArm(name, grown))
        return found

    def _has(self, kind: str) -> bool:
        return any(spec.kind == kind for spec in self.specs)

    def _errors(self, played: Sequence[CellResult], arm: str) -> Floats:
        """Return the test errors of an arm, float64 [members, seeds]."""
        known = {result.member: result for result in played if result.arm == arm}
        return np.array([known[member.label].test_errors for member in self.members])

    def _by_member(
        self, played: Sequence[CellResult], arms: Sequence[str], errors: Mapping[str, Floats]
    ) -> dict[str, dict[str, dict[str, float]]]:
        """Return, by member and arm, mean scores, log ratio over waiting, and what was added."""
        found: dict[str, dict[str, dict[str, float]]] = {}
        for place, member in enumerate(self.members):
            found[member.label] = {}
            for arm in arms:
                result = next(r for r in played if (r.arm, r.member) == (arm, member.label))
                ratios = log_ratios(errors[arm][place], errors[WAIT][place])
                found[member.label][arm] = {
                    "test_score": fmean(result.test_scores),
                    "log_ratio_over_wait": float(ratios.mean()),
                    "parameters_added": fmean(result.parameters) / result.host_parameters - 1.0,
                    "flops_added": fmean(result.flops) / result.host_flops - 1.0,
                    "fossilized": fmean(result.fossilized),
                }
        return found


def make_arm(spec: ArmSpec) -> Arm:
    """Return the arm that a text of the command line asks for; its file is read."""
    if spec.kind == WAIT:
        return dataclasses.replace(waiting(), name=spec.name)
    if spec.kind == "schedule" and spec.argument:
        entries: PlainSchedule = read_document(spec.argument, "schedule")
        return ScheduleArm(spec.name, lambda member: entries)
    if spec.kind == "contextual":
        assert spec.argument is not None, "parse_arm asks for a file"
        document = read_document(spec.argument, "contextual schedule")
        rule = ContextualRule.from_mapping(document, spec.argument)
        return ScheduleArm(spec.name, lambda member: rule.schedule(descriptors(member.task())))
    if spec.kind == "privileged":
        return ScheduleArm(spec.name, _privileged(spec.argument or ""))
    return ControllerArm(spec.name, spec.controller)


def _privileged(path: str) -> Any:
    schedules = read_document(path, "schedules by member")
    if not isinstance(schedules, Mapping):
        raise UsageError(f"{path} holds no schedules by member; `esper search` writes them")

    def schedule(member: Member) -> PlainSchedule:
        if member.label not in schedules:
            raise UsageError(
                f"{path} has no schedule for {member.label!r}; search on the members themselves"
            )
        found: PlainSchedule = schedules[member.label]
        return found

    return schedule


def _static_name(size: float) -> str:
    return f"static x{size:g}"


def comparison_mapping(comparison: Comparison) -> dict[str, Any]:
    """Return a comparison as plain data."""
    return {**dataclasses.asdict(comparison), "errors_changed": comparison.errors_changed}


def summarise(
    played: Sequence[CellResult], arm: str, errors: Mapping[str, Floats]
) -> dict[str, float]:
    """Return the figures of an arm over all members; costs are in units of the host's."""
    own = [result for result in played if result.arm == arm]
    waiting = {result.member: result for result in played if result.arm == WAIT}

    def over_waiting(total: str) -> float:
        return fmean(
            fmean(getattr(each, total)) / fmean(waiting[each.member].training_flops) for each in own
        )

    return {
        "test_score": fmean(fmean(each.test_scores) for each in own),
        "error": float(np.exp(np.log(errors[arm]).mean())),
        "parameters": fmean(fmean(each.parameters) / each.host_parameters for each in own),
        "flops": fmean(fmean(each.flops) / each.host_flops for each in own),
        "training_flops": over_waiting("training_flops"),
        "ablation_flops": over_waiting("ablation_flops"),
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


def to_json(document: Any) -> str:
    """Return a document as JSON text."""
    return json.dumps(document, indent=1) + "\n"
