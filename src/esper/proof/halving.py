"""Successive halving: which plans go on to more seeds, as pure functions of what they brought.

Of the places on a member, half go to the plans that are best over all members, the same ones
everywhere, so that a single schedule can be chosen from complete tables; the other half go to the
member's own best. Settings of the heuristic are one thing for all members, so all of their places
are shared.
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from esper.leyline.errors import UsageError

Scores = Mapping[str, Mapping[str, float]]
"""By member and plan: what it brought, larger is better."""

_RUNG = re.compile(r"(\d+)x(\d+)\Z")


@dataclass(frozen=True, slots=True)
class Rung:
    """How many plans are played on a member, each with how many seeds."""

    plans: int
    seeds: int


def parse_rungs(texts: Sequence[str]) -> tuple[Rung, ...]:
    """Return the rungs that '64x2', '16x8' and so on mean: plans x seeds, fewer and fewer plans."""
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


def survivors(scores: Scores, places: int, *, is_shared: bool) -> dict[str, list[str]]:
    """Return the plans that go on, by member.

    Args:
        scores: what plans brought so far; on every member the same or some of the same.
        places: how many go on on each member.
        is_shared: whether they are the same on every member.
    """
    shared = shared_ranking(scores)
    common = shared[: places if is_shared else -(-places // 2)]
    found = {}
    for member, own in scores.items():
        ranking = [] if is_shared else sorted(own, key=lambda plan: -own[plan])
        rest = [plan for plan in ranking if plan not in common]
        found[member] = [*common, *rest[: places - len(common)]]
    return found
