"""Rules that choose a plan for a task by its descriptors, fitted to the table of a search.

There are two kinds. `NearestRule` takes the plan that was best on similar members. `SplitRule`
compares one or two descriptors with a threshold. Both are files that the arm `contextual:FILE`
plays. Neither sees anything of the run.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial
from typing import Any, ClassVar, TypeAlias

import numpy as np

from esper.lab.proof.choose import Places, Reals, Split, Table, shrunk, units_of
from esper.lab.proof.plans import PlainPlan
from esper.leyline.errors import UsageError

NEIGHBOURS = (1, 3, 5, 9)
"""Numbers of neighbours that are tried for a `NearestRule`, by leaving members out."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Rule(ABC):
    """Chooses a plan for a task by its descriptors."""

    kind: ClassVar[str]
    """What its file says that it is."""
    plans: dict[str, PlainPlan]
    """The plans that it chooses among, by name."""
    held_out: float
    """Mean log ratio over waiting on members that were left out of the fit, one at a time."""

    @abstractmethod
    def choose(self, descriptors: Mapping[str, float]) -> str | None:
        """Return the name of the plan for a task; None if waiting looks best."""

    @abstractmethod
    def describe(self) -> str:
        """Return the rule in one line."""

    def plan(self, descriptors: Mapping[str, float]) -> PlainPlan | None:
        """Return the plan for a task; None if waiting looks best."""
        chosen = self.choose(descriptors)
        return None if chosen is None else self.plans[chosen]

    def to_mapping(self) -> dict[str, Any]:
        """Return plain data that `read_rule` reads back."""
        return {"kind": self.kind, **asdict(self)}


# ---- The best plan on the nearest members


@dataclass(frozen=True, slots=True, kw_only=True)
class NearestRule(Rule):
    """Chooses the plan that was best on the nearest members.

    Descriptors are standardised over the members. The value of a plan is its mean over the nearest
    members, weighted by distance; the value of waiting is 0.
    """

    kind: ClassVar[str] = "contextual schedule"
    neighbours: int
    centre: dict[str, float]
    scale: dict[str, float]
    places: dict[str, dict[str, float]]
    """Descriptors by member."""
    values: dict[str, dict[str, float]]
    """Mean log ratio by member and plan."""

    def choose(self, descriptors: Mapping[str, float]) -> str | None:
        """Return the name of the plan for a task; None if waiting looks best."""
        return _nearest_best(self, descriptors, list(self.places))

    def describe(self) -> str:
        """Return the rule in one line."""
        many = "the nearest member" if self.neighbours == 1 else f"the {self.neighbours} nearest"
        return f"the best of {len(self.plans)} plans on {many}"


def fit_nearest(
    table: Table, places: Places, plans: Mapping[str, PlainPlan], split: Split
) -> NearestRule:
    """Return the rule with the best number of neighbours, by leave-one-out over members.

    Args:
        table: log ratios of the plans.
        places: descriptors by member.
        plans: plans by name; those that were played on every member are candidates.
        split: which errors count.
    """
    known = _played_everywhere(table, plans)
    chosen = {member: {name: own[name] for name in known} for member, own in table.items()}
    names = sorted(next(iter(places.values())))
    rows = np.array([[place[name] for name in names] for place in places.values()])
    first = NearestRule(
        neighbours=1,
        centre=dict(zip(names, rows.mean(0).tolist(), strict=True)),
        scale=dict(zip(names, units_of(rows).tolist(), strict=True)),
        places={member: dict(place) for member, place in places.items()},
        values=shrunk(chosen, split, places),
        plans=known,
        held_out=0.0,
    )
    most = max(1, len(places) - 1)
    tried = [
        replace(first, neighbours=count)
        for count in dict.fromkeys(min(each, most) for each in NEIGHBOURS)
    ]
    worth = [_worth_of_nearest(rule, chosen, split) for rule in tried]
    best = worth.index(max(worth))
    return replace(tried[best], held_out=worth[best])


def _worth_of_nearest(rule: NearestRule, table: Table, split: Split) -> float:
    """Return the mean log ratio of the rule's choices for held-out members."""
    worth = []
    for member in rule.places:
        others = [each for each in rule.places if each != member] or [member]
        plan = _nearest_best(rule, rule.places[member], others)
        worth.append(0.0 if plan is None else table[member][plan].mean(split))
    return sum(worth) / len(worth)


def _nearest_best(
    rule: NearestRule, descriptors: Mapping[str, float], known: Sequence[str]
) -> str | None:
    _check_descriptors(rule.centre, descriptors)

    def distance(member: str) -> float:
        place = rule.places[member]
        return math.sqrt(
            sum(((descriptors[name] - place[name]) / rule.scale[name]) ** 2 for name in rule.centre)
        )

    asked = sorted(known, key=distance)[: rule.neighbours]
    weights = [1.0 / (0.5 + distance(member)) for member in asked]
    values = {
        plan: sum(w * rule.values[m][plan] for w, m in zip(weights, asked, strict=True))
        for plan in rule.plans
    }
    best = max(values, key=lambda plan: values[plan], default=None)
    return best if best is not None and values[best] > 0 else None


# ---- One or two splits


@dataclass(frozen=True, slots=True)
class Leaf:
    """The end of a rule of splits."""

    plan: str | None
    """Name of the plan; None waits."""


@dataclass(frozen=True, slots=True)
class Branch:
    """Compares a descriptor with a threshold."""

    descriptor: str
    threshold: float
    above: Tree
    """What follows if the descriptor is larger."""
    below: Tree


Tree: TypeAlias = Leaf | Branch


@dataclass(frozen=True, slots=True, kw_only=True)
class SplitRule(Rule):
    """Chooses a plan by comparing one or two descriptors with a threshold each."""

    kind: ClassVar[str] = "rule of splits"
    tree: Tree

    def choose(self, descriptors: Mapping[str, float]) -> str | None:
        """Return the name of the plan for a task; None if waiting looks best."""
        _check_descriptors(_asked(self.tree), descriptors)
        return _leaf_of(self.tree, descriptors).plan

    def describe(self) -> str:
        """Return the rule in one line."""
        return _described(self.tree)


def fit_splits(
    table: Table, places: Places, plans: Mapping[str, PlainPlan], split: Split, *, splits: int
) -> SplitRule:
    """Return the rule of splits with the best mean log ratio.

    All descriptors, all thresholds half-way between neighbouring values and all orders of splits
    are tried. A leaf has the plan with the best mean over its members, or waits. A split that gains
    nothing is left out. For `held_out` the splits and the leaves are fitted again without the
    member.

    Args:
        table: log ratios of the plans.
        places: descriptors by member.
        plans: plans by name; those that were played on every member are candidates.
        split: which errors count.
        splits: most splits.
    """
    known = _played_everywhere(table, plans)
    members, names = list(table), [None, *known]
    descriptors = sorted(places[members[0]])
    x = np.array([[places[member][name] for name in descriptors] for member in members])
    values = np.array(
        [[0.0, *(table[member][name].mean(split) for name in known)] for member in members]
    )
    forest = _Forest(x, values, descriptors, names)
    everyone = np.arange(len(members))
    worth = []
    for number, member in enumerate(members):
        others = np.delete(everyone, number) if len(members) > 1 else everyone
        _, tree = forest.best(others, splits)
        chosen = _leaf_of(tree, places[member]).plan
        worth.append(values[number, names.index(chosen)])
    _, tree = forest.best(everyone, splits)
    return SplitRule(tree=tree, plans=known, held_out=float(np.mean(worth)))


@dataclass(frozen=True, slots=True)
class _Forest:
    """Finds the best rule of splits for some members."""

    x: Reals
    """Descriptors [members, D]."""
    values: Reals
    """Mean log ratios [members, 1 + plans]; the first column is waiting."""
    descriptors: Sequence[str]
    names: Sequence[str | None]
    """Names of the columns of `values`."""

    def best(self, rows: Any, splits: int) -> tuple[float, Tree]:
        """Return the summed log ratio of the best rule with so many splits at most, and the rule.

        Args:
            rows: int64 [N], numbers of the members.
            splits: most splits.
        """
        totals = self.values[rows].sum(0)
        best = int(totals.argmax())
        worth, tree = float(totals[best]), Leaf(self.names[best])
        found: tuple[float, Tree] = worth, tree
        for number in range(len(self.descriptors) if splits else 0):
            own = self.x[rows, number]
            known = np.unique(own)
            for threshold in ((known[1:] + known[:-1]) / 2).tolist():
                is_above = own > threshold
                for count in range(splits):
                    high, above = self.best(rows[is_above], count)
                    low, below = self.best(rows[~is_above], splits - 1 - count)
                    # The first of equals, and the one with fewer splits, whatever rounding says.
                    if high + low > found[0] + _EQUAL:
                        branch = Branch(self.descriptors[number], threshold, above, below)
                        found = high + low, branch
        return found


_EQUAL = 1e-9
"""Difference of summed log ratios below which rules are equally good."""


def _leaf_of(tree: Tree, descriptors: Mapping[str, float]) -> Leaf:
    while isinstance(tree, Branch):
        is_above = descriptors[tree.descriptor] > tree.threshold
        tree = tree.above if is_above else tree.below
    return tree


def _asked(tree: Tree) -> list[str]:
    """Return the descriptors that a tree compares."""
    if isinstance(tree, Leaf):
        return []
    return [tree.descriptor, *_asked(tree.above), *_asked(tree.below)]


def _described(tree: Tree) -> str:
    if isinstance(tree, Leaf):
        return tree.plan or "wait"
    above = _described(tree.above)
    if isinstance(tree.above, Branch):
        above = f"({above})"
    return (
        f"if {tree.descriptor} > {tree.threshold:.4g}: {above}, otherwise {_described(tree.below)}"
    )


def _read_tree(mapping: Mapping[str, Any]) -> Tree:
    if "plan" in mapping:
        return Leaf(**mapping)
    sides = {side: _read_tree(mapping[side]) for side in ("above", "below")}
    return Branch(**{**mapping, **sides})


# ---- All kinds


FITS: Mapping[str, Callable[[Table, Places, Mapping[str, PlainPlan], Split], Rule]] = {
    "contextual": fit_nearest,
    "split1": partial(fit_splits, splits=1),
    "split2": partial(fit_splits, splits=2),
}
"""How rules are fitted, by the name of their file."""


def read_rule(mapping: Any, where: str) -> Rule:
    """Return the rule from the contents of a file."""
    kinds: dict[str, type[Rule]] = {each.kind: each for each in (NearestRule, SplitRule)}
    if not isinstance(mapping, Mapping) or mapping.get("kind") not in kinds:
        raise UsageError(f"{where} holds no rule by descriptors; `esper search` writes them")
    fields = {key: value for key, value in mapping.items() if key != "kind"}
    try:
        if "tree" in fields:
            fields["tree"] = _read_tree(fields["tree"])
        return kinds[mapping["kind"]](**fields)
    except (TypeError, KeyError) as error:
        raise UsageError(f"{where} is not a whole rule: {error}; run the search again") from None


def _played_everywhere(table: Table, plans: Mapping[str, PlainPlan]) -> dict[str, PlainPlan]:
    """Return plain copies of the plans that were played on every member."""
    return {
        name: plan if isinstance(plan, int) else [dict(entry) for entry in plan]
        for name, plan in plans.items()
        if all(name in own for own in table.values())
    }


def _check_descriptors(
    needed: Sequence[str] | Mapping[str, Any], given: Mapping[str, float]
) -> None:
    missing = [name for name in needed if name not in given]
    if missing:
        raise UsageError(
            f"the rule needs the descriptors {', '.join(missing)}; run the search again"
        )
