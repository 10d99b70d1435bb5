"""Plans that double the depth of a network: when all its stages are copied.

A plan doubles once or twice, so that a stage of one block ends with 2 or 4. Doubling at the
first decision stands for a network that is that deep from the start.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

import torch

from esper.kasmina.blueprints.kin import KIN
from esper.lab.proof.plans import PlainSchedule, Plan, pick
from esper.leyline.slots import Topology
from esper.tamiyo.controllers.schedule import ALL
from esper.utils.randomness import generator

SHARES = (0, 2, 4, 6, 8, 10, 12, 16, 20, 25, 30, 40, 50, 60)
"""Percent of the run at which a plan may double."""
MOST = 2
"""Most doublings of a plan."""

_STANDARD: tuple[tuple[int, ...], ...] = (
    (0,), (10,), (4,), (20,), (30,), (6, 12), (12, 30), (0, 2),
    (6,), (50,), (20, 40), (2,), (2, 6), (16,),
)  # fmt: skip
"""Moments of the plans that every search begins with."""


def doubling_plan(moments: Sequence[int], name: str = "") -> Plan:
    """Return the plan that doubles at these shares of the run, in percent."""
    deeper = [f"{2 ** (number + 1)}@{share}%" for number, share in enumerate(moments)]
    entries = tuple(
        {"epoch": f"{share}%", "op": "germinate", "slot": ALL, "blueprint": KIN}
        for share in moments
    )
    return Plan(name or f"1>{'>'.join(deeper)}", entries)


def make_doublings(seed: int, count: int, topologies: Sequence[Topology]) -> tuple[Plan, ...]:
    """Return so many plans: standard ones, then drawn ones; copies fit slots of every kind."""
    del topologies
    standard = [doubling_plan(moments) for moments in _STANDARD[:count]]
    known = {plan.name for plan in standard}
    number = 0
    while len(standard) < count:
        stream = generator(seed, number, "doublings")
        times = int(torch.randint(MOST, (), generator=stream)) + 1
        drawn = {pick(stream, SHARES) for _ in range(times)}
        plan = doubling_plan(sorted(drawn))
        number += 1
        if plan.name not in known:
            known.add(plan.name)
            standard.append(plan)
    return tuple(standard)


def breed_doublings(
    name: str, parent: PlainSchedule, stream: torch.Generator, topologies: Sequence[Topology]
) -> Plan:
    """Return a copy of a plan with one change: a moment moved by a step, added or left out."""
    del topologies
    draw = partial(pick, stream)
    moments = [int(str(entry["epoch"]).removesuffix("%")) for entry in parent]
    change = draw(("move", "move", "add", "drop"))
    free = [share for share in SHARES if share not in moments]
    if change == "add" and len(moments) < MOST:
        moments.append(draw(free))
    elif change == "drop" and len(moments) > 1:
        moments.remove(draw(moments))
    else:
        place = draw(range(len(moments)))
        near = sorted(free, key=lambda share: abs(share - moments[place]))[:4]
        moments[place] = draw(near)
    return doubling_plan(sorted(moments), name)
