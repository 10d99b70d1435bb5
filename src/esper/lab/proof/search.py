"""`esper search`: successive halving over schedules and settings of the heuristic.

A search finds the best single schedule, the best schedule of every member (for `esper clone`), and
settings of the heuristic. The first rung can have children: plans bred from the best plan of some
member, which play the same seeds before the next rung. Every plan with every seed on every member
is a row of a population. All results are in `results.jsonl`, so an interrupted search continues,
and other choices can be made from the file.
"""

from __future__ import annotations

import json
from collections.abc import Container, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from esper.lab.proof.arm import Arm, DepthArm, ScheduleArm, heuristic_arm, waiting
from esper.lab.proof.choose import (
    Places,
    Table,
    best_by_likeness,
    best_by_member,
    best_single,
    choose_few,
    measure_headroom,
    most_played,
    read_table,
    shrunk,
)
from esper.lab.proof.doublings import breed_doublings, make_doublings
from esper.lab.proof.plans import (
    PlainPlan,
    PlainSchedule,
    Rung,
    breed_plan,
    draw_heuristic,
    make_plans,
    parse_rungs,
    pick,
    portfolio,
    read_plans,
    shared_ranking,
    start_of,
)
from esper.lab.proof.play import Cell, PlayConfig, Player
from esper.lab.proof.results import RESULTS_FILE, ResultFile
from esper.lab.proof.rules import FITS
from esper.lab.tasks.family import MemberChoice
from esper.lab.tasks.member import AnyMember
from esper.leyline.config import Config, option
from esper.tamiyo.controllers.heuristic import HeuristicConfig
from esper.tamiyo.controllers.schedule import describe_schedule
from esper.utils.files import atomic_write_text
from esper.utils.randomness import generator

SEARCH_SEEDS = 1 << 33
"""First seed of searches; training and evaluations use smaller ones, proofs larger ones."""

SCHEDULE_FILE = "schedule.json"
PRIVILEGED_FILE = "privileged.json"
DEPTHS_FILE = "depth_privileged.json"
LESSONS_FILE = "lessons.json"
HEURISTIC_FILE = "heuristic.json"
RATIOS_FILE = "ratios.jsonl"
PLANS_FILE = "plans.json"

_SPACES = {"seeds": (make_plans, breed_plan), "doublings": (make_doublings, breed_doublings)}
"""By name: makes the first plans, and changes one."""


@dataclass(frozen=True, kw_only=True)
class SearchConfig(Config):
    """Settings of a search."""

    rungs: tuple[str, ...] = option(
        ("64x2", "16x8", "4x32"), "Plans x seeds of every rung; plans become fewer."
    )
    children: tuple[int, ...] = option(
        (),
        "Plans bred from the best of the first rung, per generation; each changes one or two "
        "fields of the best plan of some member.",
        minimum=1,
    )
    space: Literal["seeds", "doublings"] = option(
        "seeds",
        "What plans do: grow seeds, or double the depth of all stages by copies of their blocks.",
    )
    depths: tuple[int, ...] = option(
        (),
        "Depths of static networks that are also played, on as many seeds as waiting; none if "
        "empty.",
        minimum=2,
    )
    heuristics: int = option(
        16, "Settings of the heuristic that are also tried; 0 for none.", minimum=0
    )
    choose_by: Literal["val", "test"] = option(
        "val",
        "Errors that choose: those of validation, or of the test split, which is fair only on "
        "members without claims, such as train members.",
    )
    choices: int = option(
        10,
        "Most schedules that rules by descriptors choose among: those that together serve the "
        "members best.",
        minimum=1,
    )
    lessons: int = option(
        2,
        "Most schedules in the lessons of a clone, besides waiting; few, so that observations are "
        "enough to tell which one applies.",
        minimum=1,
    )
    lessons_from: float = option(
        0.1,
        "Earliest start of a schedule in the lessons, as a share of the run: a clone has to "
        "observe a task before it can recognise it.",
        minimum=0,
        maximum=1,
    )
    hidden: float = option(
        0.0,
        "Share of the variance between members that their descriptors cannot explain. The lower it "
        "is, the more a member's best plan is chosen by what paid on similar members.",
        minimum=0,
        maximum=1,
    )
    price: float = option(
        0.02,
        "Log ratio that a schedule in the lessons must gain per doubling of the parameters; "
        "schedules for proofs have no price.",
        minimum=0,
    )
    seed: int = option(0, "Seed of the plans and settings that are drawn.", minimum=0)
    opening: int = option(0, "Opening of the claim, 1 or 2; 0 for other splits.", minimum=0)
    members: MemberChoice = option(MemberChoice(split="train"), "The members.")
    play: PlayConfig = option(PlayConfig, "How networks are grown.")

    def __post_init__(self) -> None:
        """Check the rungs."""
        super().__post_init__()
        parse_rungs(self.rungs)


class Search:
    """A search in its folder.

    Args:
        config: settings of the search.
        members: the members.
        folder: folder of the results.
        player: plays the rows.
        taught: more members to write lessons for, without playing on them.
    """

    def __init__(
        self,
        config: SearchConfig,
        members: Sequence[AnyMember],
        folder: Path,
        player: Player,
        taught: Sequence[AnyMember] = (),
    ) -> None:
        """Draw the plans, or read bred ones from the folder."""
        self._taught = tuple(taught)
        self.config, self.members, self.folder = config, tuple(members), folder
        self._player = player
        self.rungs = parse_rungs(config.rungs)
        self._topologies = tuple(dict.fromkeys(member.task().topology for member in members))
        make, self._change = _SPACES[config.space]
        plans = make(config.seed, self.rungs[0].plans, self._topologies)
        self.plans: dict[str, PlainSchedule] = {plan.name: plan.entries for plan in plans}
        if (folder / PLANS_FILE).exists():
            self.plans |= read_plans(folder / PLANS_FILE)
        self.depths = {f"depth {depth}": depth for depth in config.depths}
        rotation = HeuristicConfig().rotation
        self.settings: dict[str, dict[str, Any]] = {
            f"heuristic {number}": draw_heuristic(config.seed, number, rotation)
            for number in range(config.heuristics)
        }
        self.results = ResultFile(folder / RESULTS_FILE)

    @property
    def rows(self) -> int:
        """Number of networks that are trained in total."""
        first = self.rungs[0]
        always = 1 + len(self.depths)
        arms = sum(
            rung.seeds * (always + rung.plans + self._heuristics(rung)) for rung in self.rungs
        )
        return len(self.members) * (arms + first.seeds * sum(self.config.children))

    def run(self) -> bool:
        """Play the first rung, its children, and the other rungs; return False if stopped."""
        if not self._play(0):
            return False
        for number, count in enumerate(self.config.children, start=1):
            self._breed(number, count)
            if not self._play(0):
                return False
        return all(self._play(number) for number in range(1, len(self.rungs)))

    def _play(self, number: int) -> bool:
        """Play what is missing of a rung; return False if stopped."""
        return self._player.play_missing(self._cells(number), self.results)

    def table(self, last_rung: int | None = None) -> Table:
        """Return the log ratios of all rungs, or of those before one."""
        purposes = [_purpose(number) for number in range(last_rung or len(self.rungs))]
        chosen = [result for result in self.results if result.purpose in purposes]
        return read_table(chosen, waiting().name)

    def conclude(self) -> dict[str, Any]:
        """Choose the best plans and settings, write them to files, and return a summary."""
        split, table = self.config.choose_by, self.table()
        single = best_single(table, list(self.plans), split)
        places = self._places()
        by_member = best_by_member(table, list(self.plans), split, places, self.config.hidden)
        few = choose_few(
            table, list(self.plans), split, places, self.config.choices, self.config.hidden
        )
        self._write(SCHEDULE_FILE, self._entries(single))
        privileged = {member: self._entries(plan) for member, (plan, _) in by_member.items()}
        self._write(PRIVILEGED_FILE, privileged)
        self._write(LESSONS_FILE, self._lessons(table, places))
        summary: dict[str, Any] = {
            "members": [member.label for member in self.members],
            "rows": self.rows,
            "choose_by": split,
            "best_single": {
                "plan": single,
                "schedule": describe_schedule(self.plans[single]),
                **self._worth(table, single),
            },
            "best_by_member": {
                member: {
                    "plan": plan or "wait",
                    "schedule": describe_schedule(self._entries(plan)),
                    "log_ratio": worth,
                }
                for member, (plan, worth) in by_member.items()
            },
            "headroom": measure_headroom(table, list(self.plans), split),
            "rules": self._rules(table, places, {plan: self.plans[plan] for plan in few}),
        }
        if self.depths:
            summary["depths"] = self._conclude_depths(table, places)
        if self.settings:
            best = best_single(table, list(self.settings), split)
            self._write(HEURISTIC_FILE, self.settings[best])
            summary["heuristic"] = {
                "settings": self.settings[best],
                **self._worth(table, best),
                "ranking": {
                    name: self._worth(table, name)["log_ratio"]
                    for name in most_played(table, list(self.settings))
                },
            }
        self._write_ratios(table)
        self._write("summary.json", summary)
        return summary

    def _places(self) -> Places:
        return {member.label: member.descriptors() for member in self.members}

    def _breed(self, generation: int, count: int) -> None:
        """Add new plans, bred from the best plan of some member.

        They are written to a file, so that stored results stay with the plans they belong to.
        """
        names = [f"plan {generation}.{number}" for number in range(count)]
        if names[0] in self.plans:
            return
        stream = generator(self.config.seed, generation, "children")
        values = shrunk(
            _only(self.table(1), self.plans),
            self.config.choose_by,
            self._places(),
            self.config.hidden,
        )
        known = [describe_schedule(entries) for entries in self.plans.values()]
        parents = dict(self.plans)
        while names:
            own = values[pick(stream, self.members).label]
            parent = parents[max(own, key=lambda plan: own[plan])]
            child = self._change(names[0], parent, stream, self._topologies)
            told = describe_schedule(child.entries)
            if told not in known:
                known.append(told)
                self.plans[names.pop(0)] = child.entries
        self._write(PLANS_FILE, {name: list(entries) for name, entries in self.plans.items()})

    def _cells(self, number: int) -> list[Cell]:
        """Return the cells of a rung: waiting, and every arm that is left, on every member."""
        first = SEARCH_SEEDS + (number << 20)
        seeds = tuple(range(first, first + self.rungs[number].seeds))
        return [
            Cell(_purpose(number), arm, member, seeds)
            for arm in self._arms(number)
            for member in self.members
        ]

    def _arms(self, number: int) -> list[Arm]:
        """Return the arms of a rung."""
        rung = self.rungs[number]
        plans, settings = list(self.plans), list(self.settings)
        if number:
            split, table = self.config.choose_by, self.table(number)
            played = _only(table, most_played(table, plans))
            scores = shrunk(played, split, self._places(), self.config.hidden)
            plans = portfolio(scores, rung.plans, first=shared_ranking(scores)[:1])
        if number and settings:
            means = {
                member: {arm: own[arm].mean(split) for arm in most_played(table, settings)}
                for member, own in table.items()
            }
            settings = shared_ranking(means)[: self._heuristics(rung)]
        return [
            waiting(),
            *(DepthArm(name, _always(depth)) for name, depth in self.depths.items()),
            *(ScheduleArm(name, _always(self.plans[name])) for name in plans),
            *(heuristic_arm(name, self.settings[name]) for name in settings),
        ]

    def _heuristics(self, rung: Rung) -> int:
        """Return the number of settings in a rung: the same share as of the plans."""
        return -(-self.config.heuristics * rung.plans // self.rungs[0].plans)

    def _worth(self, table: Table, arm: str) -> dict[str, float]:
        split = self.config.choose_by
        played = [own[arm] for own in table.values() if arm in own]
        count = len(played)
        return {
            "log_ratio": sum(each.mean(split) for each in played) / count,
            "test_log_ratio": sum(each.mean("test") for each in played) / count,
            "parameters": sum(sum(e.parameters) / len(e.parameters) for e in played) / count,
            "flops": sum(sum(e.flops) / len(e.flops) for e in played) / count,
        }

    def _lessons(self, table: Table, places: Places) -> dict[str, list[dict[str, Any]]]:
        """Return a schedule for every member, played or similar to played ones, for a clone."""
        others = {m.label: m.descriptors() for m in self._taught if m.label not in places}
        starts = {name: start_of(entries) for name, entries in self.plans.items()}
        # If all plans start earlier than the setting, the latest are used.
        earliest = min(self.config.lessons_from, max(starts.values()))
        best = best_by_likeness(
            table,
            [name for name, start in starts.items() if start >= earliest],
            self.config.choose_by,
            {**places, **others},
            price=self.config.price,
            most=self.config.lessons,
            hidden=self.config.hidden,
        )
        return {member: self._entries(plan) for member, plan in best.items()}

    def _conclude_depths(self, table: Table, places: Places) -> dict[str, Any]:
        """Choose the best depths of static networks, write them, and return a summary.

        Depth 1 is waiting.
        """
        split, names = self.config.choose_by, list(self.depths)
        by_member = {
            member: (1 if name is None else self.depths[name], worth)
            for member, (name, worth) in best_by_member(
                table, names, split, places, self.config.hidden
            ).items()
        }
        self._write(DEPTHS_FILE, {member: depth for member, (depth, _) in by_member.items()})
        worth = {1: 0.0} | {d: self._worth(table, n)["log_ratio"] for n, d in self.depths.items()}
        return {
            "best_single": max(worth, key=lambda depth: worth[depth]),
            "log_ratios": {str(depth): value for depth, value in worth.items()},
            "best_by_member": {
                member: {"depth": depth, "log_ratio": value}
                for member, (depth, value) in by_member.items()
            },
            "headroom": measure_headroom(table, names, split),
            "rules": self._rules(table, places, self.depths, "depth_"),
        }

    def _rules(
        self, table: Table, places: Places, plans: Mapping[str, PlainPlan], prefix: str = ""
    ) -> dict[str, dict[str, Any]]:
        """Write the rules that choose among some plans by descriptors, and return a summary."""
        found = {}
        for name, fit in FITS.items():
            rule = fit(table, places, plans, self.config.choose_by)
            self._write(f"{prefix}{name}.json", rule.to_mapping())
            found[name] = {"rule": rule.describe(), "held_out_log_ratio": rule.held_out}
        return found

    def _entries(self, plan: str | None) -> list[dict[str, Any]]:
        """Return the schedule of a plan; None is waiting, which has no entries."""
        return [] if plan is None else [dict(entry) for entry in self.plans[plan]]

    def _write(self, name: str, document: Any) -> None:
        atomic_write_text(self.folder / name, json.dumps(document, indent=1) + "\n")

    def _write_ratios(self, table: Table) -> None:
        lines = []
        for member, arms in table.items():
            for arm, ratios in arms.items():
                known = {"seeds": ratios.seeds, "val": ratios.val, "test": ratios.test}
                costs = {"parameters": ratios.parameters, "flops": ratios.flops}
                lines.append(json.dumps({"member": member, "arm": arm, **known, **costs}))
        atomic_write_text(self.folder / RATIOS_FILE, "\n".join(lines) + "\n")


def _purpose(number: int) -> str:
    return f"rung {number}"


def _only(table: Table, names: Container[str]) -> Table:
    return {m: {arm: own[arm] for arm in own if arm in names} for m, own in table.items()}


def _always(plan: PlainPlan) -> Any:
    return lambda member: plan
