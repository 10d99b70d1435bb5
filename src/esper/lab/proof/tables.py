"""The tables of a claim: the figures of `esper.lab.proof.evidence` in words and columns."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from esper.lab.proof.evidence import LEFT_OUT
from esper.lab.proof.hindsight import LEAST, MOST_LOST
from esper.lab.proof.results import NEEDS_BOTH, markdown_table
from esper.lab.proof.statistics import Interval

NONE = "–"
"""Stands where there is no figure."""

_AXES = {"network": "By kind of network", "data": "By data set"}


@dataclass(frozen=True)
class Section:
    """A table with its title and what its columns mean."""

    title: str
    notes: str
    header: Sequence[str] = ()
    rows: Sequence[Sequence[str]] = field(default_factory=list)


def sections(found: Mapping[str, Any]) -> list[Section]:
    """Return all tables of the figures of `gather`; what could not be made is named at the end."""
    parts = [
        _arms(found),
        *(_group(found, axis) for axis in found["groups"]),
        _without_five(found),
        _blindfolded(found),
        _ends(found),
        _hindsight(found),
        _useless(found),
        _left_out(found),
    ]
    return [part for part in parts if part is not None]


def to_markdown(found: Mapping[str, Any]) -> str:
    """Return all tables in Markdown."""
    parts = [f"# {headline(found)}"]
    for each in sections(found):
        parts += [f"## {each.title}", each.notes]
        parts += [markdown_table(each.header, each.rows)] if each.rows else []
    return "\n\n".join(parts) + "\n"


def headline(found: Mapping[str, Any]) -> str:
    """Return one line on what was played."""
    opened = f", opening {found['opening']}" if found["opening"] else ""
    return (
        f"{found['subject']} on {len(found['members'])} members of {found['family']} "
        f"({found['split']}{opened}), {found['seeds']} seeds"
    )


def _interval(mapping: Mapping[str, float] | None) -> str:
    return NONE if mapping is None else str(Interval(**mapping))


def _figure(value: float | None, form: str) -> str:
    return NONE if value is None else format(value, form)


def _tested(comparison: Mapping[str, Any]) -> list[str]:
    """Return an effect, both p-values and the verdict."""
    return [
        _interval(comparison["over_members"]),
        f"{comparison['adjusted_p']:.4f}",
        f"{comparison['ranks']['adjusted_p']:.4f}",
        "yes" if comparison["is_required"] else "no",
        comparison["verdict"],
    ]


_TESTED = ("log ratio (IQM)", "p, bootstrap", "p, Wilcoxon", "after Holm", "verdict")


def _arms(found: Mapping[str, Any]) -> Section:
    tested = {each["reference"]: _tested(each) for each in found["comparisons"]}
    rows = [
        [
            arm,
            f"{own['loss_ratio']:.3f}",
            *tested.get(arm, [NONE] * len(_TESTED)),
            f"{own['parameters']:.2f}",
            f"{own['total_flops']:.2f}",
        ]
        for arm, own in sorted(found["arms"].items(), key=lambda item: item[1]["loss_ratio"])
    ]
    notes = (
        "*Loss* is the mean ratio (geometric) of the test error, or of the loss for text, to that "
        f"of never growing. The log ratio is of the arm's error to that of {found['subject']}, "
        f"above 0 where {found['subject']} is better, with its bootstrap interval over members and "
        "seeds. Parameters are those of the scored network, in units of the network at its start; "
        "compute is that of the whole run over that of never growing. "
    )
    return Section(
        "Arms",
        notes + (NEEDS_BOTH if found["wilcoxon"] else "Verdicts rest on the bootstrap."),
        ("arm", "loss", *_TESTED, "parameters", "compute"),
        rows,
    )


def _group(found: Mapping[str, Any], axis: str) -> Section:
    groups = found["groups"][axis]
    rows = []
    for arm in (each["reference"] for each in found["comparisons"]):
        effects = [own["against"][arm] for own in groups.values()]
        above = sum(each["estimate"] > 0 for each in effects)
        rows.append(
            [
                arm,
                *(
                    _interval(each["interval"])
                    if each["interval"]
                    else _figure(each["estimate"], "+.3f")
                    for each in effects
                ),
                f"{above} of {len(effects)}",
            ]
        )
    names = [f"{value} ({own['members']})" for value, own in groups.items()]
    notes = (
        f"Log ratio of each arm's error to that of {found['subject']} on the members of one kind "
        "(their number in brackets), interquartile mean with its interval, without correction. "
        "Intervals of few members are too narrow, and one member has none."
    )
    return Section(_AXES[axis], notes, ("against", *names, "above 0"), rows)


def _without_five(found: Mapping[str, Any]) -> Section | None:
    own = found["without_five"]
    if own is None:
        return None
    rows = [
        [
            each["reference"],
            f"{own['lowest_mean'][each['reference']]:+.3f}",
            *_tested(each),
        ]
        for each in own["comparisons"]
    ]
    notes = (
        f"Against every arm without the {LEFT_OUT} members whose means favour {found['subject']} "
        f"most. The mean of the {own['members']} other members' means is the lowest that any "
        f"choice of {LEFT_OUT} leaves. The interquartile mean and the tests are of the same "
        f"members; other choices may leave a lower one."
    )
    header = ("against", "lowest mean", *_TESTED)
    return Section(f"Without the best {LEFT_OUT} members", notes, header, rows)


def _blindfolded(found: Mapping[str, Any]) -> Section | None:
    arms = found["watching"]["blindfolded"]
    if not arms:
        return None
    rows = [
        [each["reference"], *_tested(each)]
        for each in found["comparisons"]
        if each["reference"] in arms
    ]
    notes = f"{found['subject']} against itself with less to see; above 0, it needs the rest."
    return Section("Does it watch? With less to see", notes, ("against", *_TESTED), rows)


def _ends(found: Mapping[str, Any]) -> Section | None:
    ends = found["watching"]["ends"]
    if not ends:
        return None
    rows = []
    for arm, own in ends.items():
        cells = [arm]
        for each in own.values():
            cells += [
                _figure(each["alike"], ".0%"),
                _figure(each["alike_in_moments"], ".0%"),
                f"{each['differing']} of {each['groups']}",
                _figure(each["parted_at"], ".0%"),
            ]
        rows.append(cells)
    columns = ("end alike", "same moments", "groups that differ", "part at")
    names = [f"{group}: {name}" for group in next(iter(ends.values())) for name in columns]
    notes = (
        "*End alike* is the share of networks whose copies by slot are the usual ones of their "
        "group, in the network that is scored; *same moments* the share that germinated at the "
        "usual epochs. Groups are the seeds of a member, and all networks of members that look "
        f"alike beforehand ({len(found['watching']['likenesses'])} groups; descriptors are equal, "
        "logarithms rounded to octaves). *Part at* is the share of the budget that is spent when "
        "numbers of germinations first differ, the median over groups that end differently. An arm "
        "that does not look has the same moments everywhere."
    )
    return Section("Does it watch? How networks end", notes, ("arm", *names), rows)


def _hindsight(found: Mapping[str, Any]) -> Section | None:
    rows = [
        [
            name,
            f"{each['arms']}",
            f"{each['single']:+.3f}",
            _interval(each["gain"]),
            _interval(each["reached"]),
            _figure(each["share"], ".0%"),
            _interval(each["over_half"]),
            _interval(each["over_best"]),
            _not_worse(each["over_best"]["estimate"], each["over_best"]),
        ]
        for name, each in found["hindsight"].items()
        if each is not None
    ]
    if not rows:
        return None
    notes = (
        "The best arm of each member and the best single one are chosen on half of the seeds and "
        "scored on the other half, both ways; never growing is one of them. Mean log ratios with "
        "their intervals over members. *Over half* is what the first arm reaches less half of what "
        "hindsight gains; *over hindsight* is the first arm against the best of each member."
    )
    header = [
        *("choices", "arms", "best single over never growing", "hindsight over it"),
        *(f"{found['subject']} over it", "share", "over half", "over hindsight", _NOT_WORSE),
    ]
    return Section("Against hindsight", notes, header, rows)


_NOT_WORSE = f"worse by at most {MOST_LOST:.1%}"


def _not_worse(mean: float, interval: Mapping[str, float] | None) -> str:
    """Return whether an arm is not worse: by its whole interval, by its estimate, or not."""
    if interval is not None and interval["low"] >= LEAST:
        return "yes"
    return "by its estimate" if mean >= LEAST else "no"


def _useless(found: Mapping[str, Any]) -> Section | None:
    own = found["useless"]
    if own is None:
        return None
    notes = (
        f"Members on which all deeper networks of {len(own['others'])} arms are worse than never "
        "growing on half of the seeds. The first arm is compared with never growing on the other "
        "half; mean log ratio with its interval over members."
    )
    if own["mean"] is None:
        return Section("Where growing is useless", f"{notes} There are none.")
    effect = _interval(own["over_waiting"]) if own["over_waiting"] else _figure(own["mean"], "+.3f")
    header = ("members", "by both halves", f"{found['subject']} over never growing", _NOT_WORSE)
    row = [f"{own['members']}", f"{own['by_both']}", effect]
    return Section(
        "Where growing is useless",
        notes,
        header,
        [[*row, _not_worse(own["mean"], own["over_waiting"])]],
    )


def _left_out(found: Mapping[str, Any]) -> Section | None:
    own = found["left_out"]
    rows = [
        *(["arm", arm, reason] for arm, reason in own["arms"].items()),
        *(["member", label, "not played by the first arm and 'wait'"] for label in own["members"]),
        *(["table", name, reason] for name, reason in own["tables"].items()),
    ]
    if not rows:
        return None
    corrected = sum(each["is_required"] for each in found["comparisons"])
    notes = f"Holm's correction is over the {corrected} required comparisons that were played."
    return Section("Left out", notes, ("what", "name", "why"), rows)
