"""Successive halving: which plans go on to more seeds, as pure functions of what they brought.

The same plans go on on every member, so that tables are complete: what is best for all, what is
best for one, and what to expect on members like these are then read from the same figures. They are
chosen as a portfolio: each adds most where those before it are weak. Settings of the heuristic are
one thing for all members; of them the best go on.
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


def portfolio(scores: Scores, places: int, first: Sequence[str] = ()) -> list[str]:
    """Return the plans that serve the members best together, in the order they are taken in.

    A member is served by the best plan for it, or by waiting, which is worth 0. Where no plan adds
    anything to those that are in, the best on average come next.

    Args:
        scores: what plans brought.
        places: how many plans there are to be.
        first: plans that are in beforehand.
    """
    ranking, found = shared_ranking(scores), list(first)

    def served(plan: str) -> float:
        return sum(max(0.0, *(own[each] for each in (plan, *found))) for own in scores.values())

    while len(found) < min(places, len(ranking)):
        found.append(max((plan for plan in ranking if plan not in found), key=served))
    return found
