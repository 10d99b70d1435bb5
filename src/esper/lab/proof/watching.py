"""Does a controller watch? How its networks of one member end, and when they part.

A controller that does not look at a run does the same with every seed of a member, and the same on
members that look alike beforehand. How often networks *end alike* is the share that has the usual
outcome of their group. The groups are the seeds of a member, and all seeds of *likenesses*: several
members whose descriptors are equal, logarithms rounded to whole numbers (octaves).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean, median

from esper.lab.proof.results import CellResult
from esper.lab.tasks.member import AnyMember
from esper.utils.process import grouped

_DIGITS = 6
"""Of descriptors that are no logarithms."""


@dataclass(frozen=True, slots=True)
class Run:
    """What an arm did in one network."""

    outcome: Hashable
    """Slots, blueprints and copies in the scored network."""
    moments: tuple[int, ...]
    """Epochs at whose start something was germinated."""
    epochs: int

    def germinated_by(self, epoch: int) -> int:
        """Return how much was germinated by the start of an epoch."""
        return sum(moment <= epoch for moment in self.moments)


def runs_of(result: CellResult) -> list[Run]:
    """Return the runs of all seeds; none for results of older versions, without moments."""
    return [
        Run(
            outcome=tuple(
                sorted((each["slot"], each["blueprint"], each.get("copies", 0)) for each in grown)
            ),
            moments=tuple(moments),
            epochs=len(curve),
        )
        for grown, moments, curve in zip(
            result.grown, result.germinated_at, result.curves, strict=False
        )
    ]


def likenesses(members: Sequence[AnyMember]) -> list[list[str]]:
    """Return the labels of members that look alike beforehand, two or more in each list."""
    found = grouped((_known(member), member.label) for member in members)
    return [labels for labels in found.values() if len(labels) > 1]


def _known(member: AnyMember) -> Hashable:
    return tuple(
        (name, round(value, 0 if name.startswith("log_") else _DIGITS))
        for name, value in sorted(member.descriptors().items())
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class Ends:
    """How networks of the same group end; shares of networks, means over groups."""

    groups: int
    alike: float | None
    """Share with the usual outcome of their group; None without groups."""
    alike_in_moments: float | None
    """Share with the usual moments of germination."""
    differing: int
    """Groups in which not all outcomes are equal."""
    parted_at: float | None
    """Share of the budget that is spent when the numbers of germinations in such a group first
    differ, the median; None if they never do."""
    never_parted: int
    """Groups that end differently with equal numbers of germinations at all times: in other slots,
    or scored at other epochs."""


def how_they_end(groups: Sequence[Sequence[Run]]) -> Ends:
    """Return how often networks end alike and when they part."""
    groups = [group for group in groups if len(group) > 1]
    differing = [group for group in groups if len({run.outcome for run in group}) > 1]
    parted = [parting(group) for group in differing]
    known = [each for each in parted if each is not None]
    return Ends(
        groups=len(groups),
        alike=_mean([_usual([run.outcome for run in group]) for group in groups]),
        alike_in_moments=_mean([_usual([run.moments for run in group]) for group in groups]),
        differing=len(differing),
        parted_at=median(known) if known else None,
        never_parted=len(parted) - len(known),
    )


def parting(group: Sequence[Run]) -> float | None:
    """Return the share of the budget that is spent when germinations first differ in number."""
    epochs = max(run.epochs for run in group)
    for epoch in range(1, epochs + 1):
        if len({run.germinated_by(epoch) for run in group}) > 1:
            return (epoch - 1) / epochs
    return None


def watch(
    results: Mapping[str, CellResult], alike: Sequence[Sequence[str]]
) -> dict[str, Ends] | None:
    """Return how an arm's networks end within members, and within members that look alike.

    Args:
        results: of the arm, by member.
        alike: labels of members that look alike.

    Returns:
        None for results of older versions, and for arms that germinate nothing.
    """
    runs = {member: runs_of(result) for member, result in results.items()}
    if not all(runs.values()) or not any(run.moments for own in runs.values() for run in own):
        return None
    together = [[run for label in labels for run in runs[label]] for labels in alike]
    return {
        "same member": how_they_end(list(runs.values())),
        "alike beforehand": how_they_end(together),
    }


def _usual(outcomes: Sequence[Hashable]) -> float:
    """Return the share of the most frequent outcome."""
    return Counter(outcomes).most_common(1)[0][1] / len(outcomes)


def _mean(values: Sequence[float]) -> float | None:
    return fmean(values) if values else None
