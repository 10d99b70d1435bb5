"""How fast do networks of the arena grow, compared with static ones of the same hosts?

All arms have the same budget of FLOPs, so that times can be compared: networks that never grow,
networks that are four blocks deep from the start, and networks that double at different moments.
The figure to watch is FLOPs per second of growing networks over the mean of the static ones.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import time
from collections.abc import Sequence
from typing import Any

from benchmarks.table import print_table
from esper.lab.proof.arm import Arm, DepthArm, ScheduleArm, waiting
from esper.lab.proof.doublings import doubling_plan
from esper.lab.proof.play import Cell, Player
from esper.lab.proof.prove import ProveConfig
from esper.lab.tasks.arena import DepthMember
from esper.lab.tasks.family import Family, get_family
from esper.leyline.errors import UsageError
from esper.utils.settings import change_settings

MOMENTS = ((0,), (12, 30), (5, 12), (12, 20, 40), (30, 60), (50,), (0, 2), (0, 2, 5))
"""Moments of the plans, in percent of the budget; growing networks are spread over them."""
FIRST_SEED = 1 << 37


def main(arguments: list[str]) -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks arena_speed", description=__doc__)
    parser.add_argument("--family", default="depth_small")
    parser.add_argument("--members", type=int, default=2, help="those with the smallest budgets")
    parser.add_argument("--rows", type=int, default=64, help="networks of each kind, side by side")
    parser.add_argument("--steps", type=int, help="another budget of all members, in steps")
    parser.add_argument("--device", default="auto", choices=("auto", "cpu", "cuda"))
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args(arguments)
    family = get_family(options.family)
    members = sorted(depth_members(family), key=lambda member: member.steps)[: options.members]
    if options.steps:
        members = [dataclasses.replace(member, steps=options.steps) for member in members]
    settings = {**family.settings, "play.device": options.device, "play.rows": options.rows}
    config = change_settings(ProveConfig(), settings)
    kinds: dict[str, list[Arm]] = {
        "never grow": [waiting()],
        "4 blocks": [DepthArm("depth 4", 4)],
        "grow": [_plan(moments) for moments in MOMENTS],
    }
    results = {
        name: measure(Player(config.play), arms, members, options.rows)
        for name, arms in kinds.items()
    }
    static = (results["never grow"]["flops_per_s"] + results["4 blocks"]["flops_per_s"]) / 2
    ratio = results["grow"]["flops_per_s"] / static
    if options.json:
        print(json.dumps({"kinds": results, "grow_over_static": ratio}, indent=2))
        return 0
    print_table(
        ["networks", "number", "seconds", "FLOPs per second"],
        [
            [name, str(own["rows"]), f"{own['seconds']:.1f}", f"{own['flops_per_s']:.3g}"]
            for name, own in results.items()
        ],
    )
    print(f"\nGrowing networks reach {ratio:.0%} of the FLOPs per second of static ones.")
    return 0


def depth_members(family: Family) -> list[DepthMember]:
    """Return the members whose depth is decided under a budget; refuse other families."""
    found = [member for member in family.members("train") if isinstance(member, DepthMember)]
    if not found:
        raise UsageError(f"family {family.name!r} has no budget of compute; try depth_small")
    return found


def measure(
    player: Player, arms: Sequence[Arm], members: Sequence[DepthMember], rows: int
) -> dict[str, Any]:
    """Play about `rows` networks and return their number, seconds and FLOPs per second."""
    each = max(1, rows // (len(arms) * len(members)))
    seeds = tuple(range(FIRST_SEED, FIRST_SEED + each))
    cells = [Cell("speed", arm, member, seeds) for arm in arms for member in members]
    started = time.perf_counter()
    results = [result for chunk in player.play(cells) for result in chunk]
    seconds = time.perf_counter() - started
    flops = sum(sum(result.training_flops) for result in results)
    return {"rows": len(cells) * each, "seconds": seconds, "flops_per_s": flops / seconds}


def _plan(moments: Sequence[int]) -> Arm:
    plan = doubling_plan(moments)
    return ScheduleArm(plan.name, lambda member: plan.entries)
