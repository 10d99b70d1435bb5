"""The schedules that a search tries: standard ones, drawn ones, and bred ones.

A drawn plan grows one to three seeds. It draws, in this order: the number of seeds; their
positions (first, middle, last) and their order; the blueprint, one for all or one each; the start
of the first seed and the gap to the next ones; style, tempo and amplitude. `SPACE` has the values
with their frequencies. A bred plan changes one or two fields of a good one. Plans are plain
schedules, so that they can be read, edited and played by `--controller schedule:FILE`.
"""

from __future__ import annotations

import itertools
import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, TypeAlias

import torch

from esper.leyline.actions import HEAD_VALUES
from esper.leyline.errors import UsageError
from esper.leyline.slots import TOPOLOGIES, Topology
from esper.leyline.stages import ALPHA_TARGETS, TEMPO_EPOCHS
from esper.tamiyo.controllers.schedule import PlainEntry
from esper.utils.randomness import generator

# ---- Successive halving: which plans get more seeds


Scores = Mapping[str, Mapping[str, float]]
"""Scores by member and plan; larger is better."""

_RUNG = re.compile(r"(\d+)x(\d+)\Z")


@dataclass(frozen=True, slots=True)
class Rung:
    """Number of plans in a rung, and of seeds of each on every member."""

    plans: int
    seeds: int


def parse_rungs(texts: Sequence[str]) -> tuple[Rung, ...]:
    """Parse rungs such as '64x2', '16x8': plans x seeds, with fewer plans in later rungs."""
    rungs = []
    for text in texts:
        match = _RUNG.match(text)
        if match is None or not all(map(int, match.groups())):
            raise UsageError(f"a rung is PLANSxSEEDS, as in 64x2; got {text!r}")
        rungs.append(Rung(int(match[1]), int(match[2])))
    if not rungs:
        raise UsageError("a search needs at least one rung, as in 64x2")
    for before, after in itertools.pairwise(rungs):
        if after.plans > before.plans:
            raise UsageError(
                f"a rung cannot have more plans than the one before, got {', '.join(texts)}"
            )
    return tuple(rungs)


def shared_ranking(scores: Scores) -> list[str]:
    """Return the plans that were played on every member, best mean first; ties keep their order."""
    members = list(scores.values())
    everywhere = [plan for plan in members[0] if all(plan in each for each in members)]
    means = {plan: sum(each[plan] for each in members) / len(members) for plan in everywhere}
    return sorted(everywhere, key=lambda plan: -means[plan])


def portfolio(scores: Scores, places: int, first: Sequence[str] = ()) -> list[str]:
    """Choose plans greedily, so that the best chosen plan of each member is as good as possible.

    A member may also wait, with a score of 0. When no plan adds anything, the best on average come
    next.

    Args:
        scores: scores of the plans.
        places: number of plans to choose.
        first: plans that are chosen beforehand.
    """
    ranking, found = shared_ranking(scores), list(first)

    def served(plan: str) -> float:
        return sum(max(0.0, *(own[each] for each in (plan, *found))) for own in scores.values())

    while len(found) < min(places, len(ranking)):
        found.append(max((plan for plan in ranking if plan not in found), key=served))
    return found


PlainSchedule: TypeAlias = Sequence[PlainEntry]
PlainPlan: TypeAlias = PlainSchedule | int
"""A schedule, or the depth of a static network."""

FIRST, MIDDLE, LAST = "0%", "50%", "100%"
POSITIONS = (FIRST, MIDDLE, LAST)

BLUEPRINTS: dict[Topology, tuple[str, ...]] = {
    "cnn": (
        *("conv_heavy", "conv_heavy", "conv_light", "conv_light", "conv_small"),
        *("bottleneck", "depthwise", "attention", "norm"),
    ),
    "sequence": ("mlp", "mlp", "mlp_small", "attention", "lora_large", "lora", "norm"),
    "vector": ("mlp", "mlp", "mlp_small", "lora_large", "lora", "norm"),
}
"""Blueprints to draw from, by kind of slot; those named twice are twice as likely."""
assert set(BLUEPRINTS) == set(TOPOLOGIES)

SPACE: dict[str, tuple[Any, ...]] = {
    "seeds": (1, 2, 2, 3, 3),
    "start": ("0%", "0%", "5%", "10%", "20%", "33%", "50%"),
    "gap": (0, 0, 10, 20),
    "same_blueprint": (True, True, False),
    "style": ("SIGMOID_ADD", "SIGMOID_ADD", "LINEAR_ADD", "GATED_GATE", "LINEAR_MULTIPLY"),
    "tempo": TEMPO_EPOCHS,
    "alpha_target": (1.0,) * 8 + ALPHA_TARGETS[:2],
}
"""Values of the other fields; repeated ones are more likely. Gaps are percent of the horizon."""
assert set(SPACE["style"]) == set(HEAD_VALUES["style"])

_FIELDS = ("style", "tempo", "alpha_target")
"""Fields that all seeds of a plan share."""


@dataclass(frozen=True, slots=True)
class Plan:
    """A schedule with a name."""

    name: str
    entries: PlainSchedule


def _same(
    blueprint: str, slots: Sequence[str], start: str = "0%", **fields: object
) -> PlainSchedule:
    return tuple(
        {"epoch": start, "op": "grow", "slot": slot, "blueprint": blueprint, "tempo": 3, **fields}
        for slot in slots
    )


STANDARD_PLANS: tuple[Plan, ...] = (
    Plan("conv_heavy last", _same("conv_heavy", (LAST,))),
    Plan("conv_heavy first", _same("conv_heavy", (FIRST,))),
    Plan("conv_heavy last, middle", _same("conv_heavy", (LAST, MIDDLE))),
    Plan("conv_heavy all", _same("conv_heavy", (LAST, MIDDLE, FIRST))),
    Plan("conv_light last", _same("conv_light", (LAST,))),
    Plan("conv_light first", _same("conv_light", (FIRST,))),
    Plan("conv_light all", _same("conv_light", POSITIONS)),
    Plan("bottleneck last", _same("bottleneck", (LAST,))),
    Plan("bottleneck all", _same("bottleneck", POSITIONS)),
    Plan("norm all", _same("norm", POSITIONS)),
    Plan("depthwise all", _same("depthwise", POSITIONS)),
    Plan("attention last", _same("attention", (LAST,))),
    Plan("attention all", _same("attention", POSITIONS)),
    Plan("conv_heavy last, late", _same("conv_heavy", (LAST,), "33%")),
    Plan("conv_light all, late", _same("conv_light", POSITIONS, "33%")),
    Plan("bottleneck all, late", _same("bottleneck", POSITIONS, "33%")),
)
"""Plans for hosts with images at their slots; entries for slots that a host lacks are skipped."""


def start_of(entries: PlainSchedule) -> float:
    """Return the start of a plan, as a share of the run."""
    return min((float(entry["epoch"].rstrip("%")) / 100 for entry in entries), default=1.0)


def read_plans(path: str | Path) -> dict[str, PlainSchedule]:
    """Return the schedules in a file of a search, by member or by name."""
    try:
        found = json.loads(Path(path).read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise UsageError(
            f"{path} cannot be read as the schedules of a search: {error}; `esper search` writes it"
        ) from error
    if not isinstance(found, dict) or not all(isinstance(own, list) for own in found.values()):
        raise UsageError(f"{path} has no schedules by name; `esper search` writes them")
    return {str(name): tuple(own) for name, own in found.items()}


def pick(stream: torch.Generator, values: Sequence[Any]) -> Any:
    """Draw one of the values uniformly."""
    return values[int(torch.randint(len(values), (), generator=stream))]


def draw_plan(seed: int, number: int, topologies: Sequence[Topology]) -> Plan:
    """Draw a plan; it depends on the arguments alone.

    Args:
        seed: seed of the search.
        number: number of the plan.
        topologies: kinds of slots; the plan has a blueprint for each.
    """
    stream = generator(seed, number, "plan")
    draw = partial(pick, stream)
    count = draw(SPACE["seeds"])
    order = torch.randperm(len(POSITIONS), generator=stream).tolist()[:count]
    sets = [[draw(BLUEPRINTS[each]) for each in topologies] for _ in range(count)]
    if draw(SPACE["same_blueprint"]):
        sets = sets[:1] * count
    start, gap = int(draw(SPACE["start"]).removesuffix("%")), draw(SPACE["gap"])
    fields = {key: draw(SPACE[key]) for key in _FIELDS}
    entries = tuple(
        {
            "epoch": f"{start + place * gap}%",
            "op": "grow",
            "slot": POSITIONS[position],
            "blueprint": names[0] if len(names) == 1 else list(names),
            **fields,
        }
        for place, (position, names) in enumerate(zip(order, sets, strict=True))
    )
    return Plan(f"plan {number}", entries)


def breed_plan(
    name: str, parent: PlainSchedule, stream: torch.Generator, topologies: Sequence[Topology]
) -> Plan:
    """Return a copy of a plan with one or two changes.

    Args:
        name: name of the new plan.
        parent: the plan to change.
        stream: random generator of the changes.
        topologies: kinds of slots of the members.
    """
    draw = partial(pick, stream)

    def draw_blueprint() -> str | list[str]:
        names = [draw(BLUEPRINTS[each]) for each in topologies]
        return names[0] if len(names) == 1 else names

    entries = [dict(entry) for entry in parent]
    for _ in range(draw((1, 2))):
        change = draw(("blueprint", "blueprint", "add", "drop", "start", *_FIELDS))
        free = [each for each in POSITIONS if each not in [entry["slot"] for entry in entries]]
        if change == "blueprint":
            draw(entries)["blueprint"] = draw_blueprint()
        elif change == "add" and free:
            entries.append({**draw(entries), "slot": draw(free), "blueprint": draw_blueprint()})
        elif change == "drop" and len(entries) > 1:
            entries.remove(draw(entries))
        elif change == "start":
            draw(entries)["epoch"] = draw(SPACE["start"])
        elif change in _FIELDS:
            value = draw(SPACE[change])
            entries = [{**entry, change: value} for entry in entries]
    return Plan(name, tuple(entries))


def make_plans(seed: int, count: int, topologies: Sequence[Topology]) -> tuple[Plan, ...]:
    """Return so many plans: the standard ones if all slots have images, then drawn ones."""
    kinds = tuple(dict.fromkeys(topologies))
    standard = STANDARD_PLANS if kinds == ("cnn",) else ()
    drawn = (draw_plan(seed, number, kinds) for number in range(max(0, count - len(standard))))
    return (*standard[:count], *drawn)


HEURISTIC_SPACE: dict[str, tuple[Any, ...]] = {
    "min_epoch": (1, 2, 5, 10),
    "plateau_epochs": (0, 1, 2, 3, 5),
    "rest_epochs": (0, 2, 5),
    "trial_epochs": (3, 5, 8),
    "prune_below": (-8.0, -4.0, -2.0, -1.0),
    "fossilize_above": (-1.0, -0.2, 0.0, 0.2, 0.5, 1.0),
    "ransom_contribution": (0.1, 1.0, 5.0),
    "measurement_epochs": (3, 10),
    "penalty_limit": (1.0, 3.0),
    "lead": ("conv_light", "conv_heavy", "bottleneck", "norm", "mlp", "attention"),
}
"""Values of the heuristic's settings; `lead` is the first blueprint of its rotation."""


def draw_heuristic(seed: int, number: int, rotation: Sequence[str]) -> dict[str, Any]:
    """Draw settings of the heuristic; number 0 is its defaults.

    Args:
        seed: seed of the search.
        number: number of the settings.
        rotation: the heuristic's default rotation.
    """
    if number == 0:
        return {}
    stream = generator(seed, number, "heuristic")
    drawn = {key: pick(stream, values) for key, values in HEURISTIC_SPACE.items()}
    lead = drawn.pop("lead")
    drawn["rotation"] = [lead, *(name for name in rotation if name != lead)]
    return drawn
