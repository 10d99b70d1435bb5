"""`esper prove`: compares arms on members with paired seeds.

The first arm, the subject, is compared with every other. There are three stages, whose results are
stored in `results.jsonl`: learning rates of the static networks, chosen by validation on separate
seeds; all arms, among them the runs that successive halving chooses from; and the architectures
that arms grew, trained from scratch.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from statistics import fmean
from typing import Any

import numpy as np

from esper.lab.proof.arm import (
    DEPTH,
    HALVING,
    KINDS,
    SCRATCH,
    SHUFFLED,
    STATIC,
    WAIT,
    Arm,
    ArmSpec,
    ControllerArm,
    DepthArm,
    ScheduleArm,
    ScratchArm,
    ShuffledArm,
    StaticArm,
    check_names,
    find_donors,
    parse_arm,
    waiting,
)
from esper.lab.proof.halving import combine, halving_arms
from esper.lab.proof.plans import PlainPlan, PlainSchedule
from esper.lab.proof.play import Cell, PlayConfig, Player
from esper.lab.proof.results import (
    RESULTS_FILE,
    CellResult,
    ResultFile,
    best_static,
    by_member,
    comparison_mapping,
    fronts,
    privileged_share,
    rank,
    restraint,
    summarise,
)
from esper.lab.proof.rules import read_rule
from esper.lab.proof.static import commonest
from esper.lab.proof.statistics import Floats, compare, log_ratios
from esper.lab.tasks.family import MemberChoice
from esper.lab.tasks.member import AnyMember
from esper.leyline.config import Config, option
from esper.leyline.errors import UsageError, unknown_name
from esper.utils.settings import read_named

PROOF_SEEDS = 1 << 34
"""First seed of proofs; every opening of the claim has its own seeds after it."""
RATE_SEEDS = 1 << 36
"""First of the seeds that choose learning rates."""

REPORTED_ONLY = ("contextual", "privileged", STATIC, SCRATCH)
"""Kinds of arms whose comparisons are reported and not required, by default."""


@dataclass(frozen=True, kw_only=True)
class ProveConfig(Config):
    """Arms, seeds and confidence of a comparison."""

    benchmark: str = option("", "Name of the public benchmark; none if empty.")
    arms: tuple[str, ...] = option(
        ("tamiyo", "wait", "random", "periodic", "plateau", "heuristic"),
        "The arms; the first is compared with every other.",
    )
    seeds: int = option(8, "Seeds of every arm on every member.", minimum=2)
    sizes: tuple[float, ...] = option(
        (1.0, 1.5, 2.0, 3.0),
        "Widths of the static networks over the host's.",
        above=0.0,
    )
    rates: tuple[float, ...] = option(
        (0.25, 0.5, 1.0, 2.0, 4.0),
        "Learning rates tried for every static network and every tuned depth, as multiples of the "
        "member's.",
        above=0.0,
    )
    rate_seeds: int = option(2, "Number of seeds that choose a rate.", minimum=1)
    confidence: float = option(
        0.95, "Confidence of intervals and verdicts.", above=0.5, maximum=0.999
    )
    wilcoxon: bool = option(
        False, "Whether verdicts also need Wilcoxon's signed-rank test over members."
    )
    reported: tuple[str, ...] = option(
        REPORTED_ONLY,
        "Kinds of arms whose comparisons are reported without correction; the others are required.",
    )
    opening: int = option(0, "Opening of the claim, 1 or 2; 0 for other splits.", minimum=0)
    members: MemberChoice = option(MemberChoice(), "The members.")
    play: PlayConfig = option(PlayConfig, "Limits, and how networks are grown.")

    def __post_init__(self) -> None:
        """Check the arms."""
        super().__post_init__()
        specs = [parse_arm(text) for text in self.arms]
        check_names(specs)
        for kind in self.reported:
            if kind not in KINDS:
                raise unknown_name("kind of arm", kind, KINDS)
        if specs and specs[0].is_derived:
            raise UsageError(
                f"the first arm is compared with the others, so it cannot be {specs[0].name!r}; "
                "put a controller first"
            )


class Proof:
    """A proof in its folder.

    Args:
        config: settings of the comparison.
        members: the members.
        folder: folder of the results.
        player: plays the rows.
    """

    def __init__(
        self, config: ProveConfig, members: Sequence[AnyMember], folder: Path, player: Player
    ) -> None:
        """Read the files of the arms."""
        self.config, self.members = config, tuple(members)
        self._player = player
        self.specs = [parse_arm(text) for text in config.arms]
        if WAIT not in {spec.name for spec in self.specs}:
            self.specs.append(ArmSpec(WAIT, WAIT, None))
        self._plain = [make_arm(spec) for spec in self.specs if not spec.is_derived]
        if self._has(SHUFFLED):
            find_donors(self.members)
        self._halving: list[DepthArm] = []
        if self._has(HALVING):
            self._halving = halving_arms(self.members, config.play.horizon)
        self.results = ResultFile(folder / RESULTS_FILE)

    def run(self) -> bool:
        """Play what is missing; return False if stopped."""
        return (
            self._play(self._rate_cells())
            and self._play(
                [
                    *self._cells(self._plain),
                    *self._cells(self._tuned()),
                    *self._cells(self._halving, HALVING),
                ]
            )
            and self._halve()
            and self._play(self._cells(self._scratch()))
        )

    def arms(self) -> list[str]:
        """Return the names of all arms that were played, the subject first."""
        return list(dict.fromkeys(result.arm for result in self.results.of("proof")))

    def conclude(self) -> dict[str, Any]:
        """Return all comparisons and figures as plain data."""
        arms, played = self.arms(), self.results.of("proof")
        subject, labels = arms[0], [member.label for member in self.members]
        errors = {arm: self._errors(played, arm) for arm in arms}
        comparisons = compare(
            {arm: log_ratios(errors[subject], errors[arm]) for arm in arms if arm != subject},
            subject,
            required=required_arms(self.specs, self.config.reported),
            confidence=self.config.confidence,
            needs_ranks=self.config.wilcoxon,
        )
        summaries = {arm: summarise(played, arm, errors) for arm in arms}
        figures = by_member(played, errors, labels)
        choice = self.config.members
        return {
            "subject": subject,
            "benchmark": self.config.benchmark,
            "ranking": rank(errors),
            "family": choice.family,
            "split": choice.split,
            "opening": self.config.opening,
            "members": labels,
            "seeds": self.config.seeds,
            "limits": {
                "parameters": self.config.play.param_limit,
                "flops": self.config.play.flop_limit,
            },
            "wilcoxon": self.config.wilcoxon,
            "verdicts": [str(each) for each in comparisons],
            "comparisons": [comparison_mapping(each) for each in comparisons],
            "arms": summaries,
            "fronts": fronts(summaries),
            "best_static": best_static(summaries),
            "privileged_share": privileged_share(errors, subject, self.specs),
            "restraint": restraint(figures, subject, choice.purposes()),
            "by_member": figures,
        }

    def _play(self, cells: Sequence[Cell]) -> bool:
        return self._player.play_missing(cells, self.results)

    def _cells(self, arms: Sequence[Arm], purpose: str = "proof") -> list[Cell]:
        first = PROOF_SEEDS + (self.config.opening << 20)
        seeds = tuple(range(first, first + self.config.seeds))
        return [Cell(purpose, arm, member, seeds) for member in self.members for arm in arms]

    def _rate_cells(self) -> list[Cell]:
        seeds = tuple(range(RATE_SEEDS, RATE_SEEDS + self.config.rate_seeds))
        return [
            Cell("rates", candidate, member, seeds)
            for member in self.members
            for make in self._untuned()
            for _, candidate in self._candidates(make, member)
        ]

    def _untuned(self) -> list[MakeArm]:
        """Return the makers of arms whose learning rate is tuned."""
        found: list[MakeArm] = []
        for spec in self.specs:
            if spec.kind == STATIC:
                found += [partial(_static_arm, size) for size in self.config.sizes]
            elif spec.is_tuned:
                found.append(partial(_depth_arm, spec))
        return found

    def _candidates(self, make: MakeArm, member: AnyMember) -> list[tuple[float, Arm]]:
        """Return the learning rates that are tried on a member, with their arms."""
        own = member.task().config.learning_rate
        return [
            (factor * own, make(f", rate x{factor:g}", {member.label: factor * own}))
            for factor in self.config.rates
        ]

    def _tuned(self) -> list[Arm]:
        """Return the arms that are tuned, each with its best rate on every member."""
        found: list[Arm] = []
        for make in self._untuned():
            rates = {}
            for member in self.members:
                tried = self._candidates(make, member)
                errors = [self._rate_error(arm, member) for _, arm in tried]
                rates[member.label], _ = tried[errors.index(min(errors))]
            found.append(make("", rates))
        return found

    def _rate_error(self, arm: Arm, member: AnyMember) -> float:
        return fmean(np.log(self.results.get(("rates", arm.name, member.label)).val_errors))

    def _halve(self) -> bool:
        """Store what successive halving chooses from its runs; there is nothing to stop."""
        found = []
        for spec in self.specs:
            for member in self.members if spec.kind == HALVING else ():
                if ("proof", spec.name, member.label) not in self.results:
                    keys = [(HALVING, run.name, member.label) for run in self._halving]
                    found.append(combine([self.results.get(key) for key in keys], spec.name))
        if found:
            self.results.add(found)
        return True

    def _scratch(self) -> list[Arm]:
        """Return arms that train from scratch what other arms grew most often on every member."""
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


def make_arm(spec: ArmSpec) -> Arm:
    """Return the arm of a specification; its file is read."""
    if spec.kind == WAIT:
        return replace(waiting(), name=spec.name)
    if spec.kind == DEPTH:
        return _depth_arm(spec, "", {})
    if spec.kind == "schedule" and spec.argument:
        entries: PlainSchedule = read_named(spec.argument, "schedule")
        return ScheduleArm(spec.name, lambda member: entries)
    if spec.kind == "contextual":
        assert spec.argument is not None, "parse_arm asks for a file"
        rule = read_rule(read_named(spec.argument, "rule"), spec.argument)
        return _planned(spec, rule.plans, lambda member: rule.plan(member.descriptors()))
    if spec.kind == "privileged":
        assert spec.argument is not None, "parse_arm asks for a file"
        plans = read_named(spec.argument, "plans by member")
        if not isinstance(plans, Mapping):
            raise UsageError(
                f"{spec.argument} has no plans by member; give privileged.json of a search"
            )
        return _planned(spec, plans, partial(_own_plan, spec.argument, plans))
    if spec.kind == SHUFFLED:
        assert spec.argument is not None, "parse_arm asks for a folder"
        return ShuffledArm(spec.name, spec.argument)
    return ControllerArm(spec.name, spec.controller)


def _planned(
    spec: ArmSpec, plans: Mapping[str, Any], choose: Callable[[AnyMember], Any]
) -> ScheduleArm | DepthArm:
    """Return the arm that carries out the chosen plan of every member.

    Args:
        spec: its specification.
        plans: the plans in its file, by name or by member: schedules, or depths.
        choose: returns the plan of a member; None waits.
    """
    depths = [isinstance(plan, int) for plan in plans.values()]
    if any(depths) and not all(depths):
        raise UsageError(f"{spec.argument} has both schedules and depths; write either into a file")
    if any(depths):
        return DepthArm(spec.name, lambda member: choose(member) or 1)
    return ScheduleArm(spec.name, lambda member: choose(member) or ())


def _own_plan(path: str, plans: Mapping[str, PlainPlan], member: AnyMember) -> PlainPlan:
    if member.label not in plans:
        raise UsageError(
            f"{path} has no plan for {member.label!r}; run `esper search` on these members"
        )
    return plans[member.label]


def required_arms(specs: Sequence[ArmSpec], reported: Sequence[str]) -> list[str]:
    """Return the names of the arms whose comparisons are corrected together."""
    return [spec.name for spec in specs if spec.kind not in reported]


MakeArm = Callable[[str, Mapping[str, float]], Arm]
"""Makes an arm from what its name ends with, and its learning rate by member."""


def _static_arm(size: float, end: str, rates: Mapping[str, float]) -> Arm:
    return StaticArm(f"static x{size:g}{end}", size, rates)


def _depth_arm(spec: ArmSpec, end: str, rates: Mapping[str, float]) -> Arm:
    return DepthArm(f"{spec.name}{end}", lambda member: spec.depth, rates)
