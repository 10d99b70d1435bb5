"""Chooses from the results of a search: the best single schedule, and the best one per member.

The choices are made from one table: for every member and arm, the log ratios of errors to those of
the waiting network with the same seed. A mean over few seeds is shrunk towards the arm's results on
similar members (`shrunk`), because the best of 64 noisy means is mostly luck.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from esper.lab.proof.hindsight import cross_fit
from esper.lab.proof.plans import portfolio, shared_ranking
from esper.lab.proof.results import CellResult
from esper.lab.proof.statistics import log_ratios
from esper.leyline.errors import UsageError

Split = Literal["val", "test"]
Places = Mapping[str, Mapping[str, float]]
"""Descriptors by member."""
Reals = NDArray[np.float64]
_REACH = 3.0
"""Length scale of the kernel, in deviations of the descriptors."""
_SAME = 1e-9
"""Relative deviation below which numbers count as equal."""
_SEED_NOISE = 1.0
"""Variance of one seed, in units of the variance between members."""


@dataclass(slots=True)
class Ratios:
    """Log ratios of one arm on one member, seed by seed, over waiting with the same seed."""

    seeds: list[int] = field(default_factory=list)
    val: list[float] = field(default_factory=list)
    test: list[float] = field(default_factory=list)
    parameters: list[float] = field(default_factory=list)
    """Parameters at the end over the host's."""
    flops: list[float] = field(default_factory=list)
    """FLOPs at the end over the host's."""

    def mean(self, split: Split) -> float:
        """Return the mean log ratio."""
        values = self.val if split == "val" else self.test
        return sum(values) / len(values)


Table = dict[str, dict[str, Ratios]]
"""By member and arm."""


def read_table(results: Sequence[CellResult], waiting: str) -> Table:
    """Return the log ratios of every arm but the waiting one, over all purposes."""
    base = {(each.purpose, each.member): each for each in results if each.arm == waiting}
    table: Table = {}
    for result in results:
        if result.arm == waiting:
            continue
        own = base[result.purpose, result.member]
        if own.seeds[: len(result.seeds)] != result.seeds:
            raise UsageError(
                f"{result.arm!r} and waiting were played with different seeds on "
                f"{result.member!r}; start the search again"
            )
        count = len(result.seeds)
        ratios = table.setdefault(result.member, {}).setdefault(result.arm, Ratios())
        ratios.seeds += result.seeds
        ratios.val += log_ratios(result.val_errors, own.val_errors[:count]).tolist()
        ratios.test += log_ratios(result.test_errors, own.test_errors[:count]).tolist()
        ratios.parameters += [each / result.host_parameters for each in result.parameters]
        ratios.flops += [each / result.host_flops for each in result.flops]
    return table


def shrunk(
    table: Table, split: Split, places: Places, hidden: float = 0.0
) -> dict[str, dict[str, float]]:
    """Return the expected log ratio of every arm on its members, shrunk over similar members.

    `hidden` is the share of the variance between members that their descriptors cannot explain.
    """
    x = _standardised(list(table), list(table), places)
    found: dict[str, dict[str, float]] = {member: {} for member in table}
    for arm in dict.fromkeys(arm for own in table.values() for arm in own):
        means, counts = _means(table, arm, split)
        for member, count, value in zip(
            table, counts, _fitted(x, means, counts, hidden), strict=True
        ):
            if count:
                found[member][arm] = float(value)
    return found


def best_by_likeness(
    table: Table,
    arms: Sequence[str],
    split: Split,
    places: Places,
    *,
    price: float,
    most: int,
    hidden: float = 0.0,
) -> dict[str, str | None]:
    """Return the best arm for every member with descriptors, played or not; None is waiting.

    Args:
        table: log ratios of arms on the members that were played.
        arms: the candidates; only those with the most seeds on every member compete, because an
            arm that was played longer only where it did well looks better than it is.
        split: which errors count.
        places: descriptors of members, including those of the table.
        price: log ratio that an arm must gain per doubling of the parameters.
        most: most different arms in the result, the best portfolio for the played members.
        hidden: share of the variance between members that descriptors cannot explain.
    """
    known, asked = list(table), list(places)
    x, at = _standardised(known, known, places), _standardised(asked, known, places)
    worth: dict[str, Reals] = {}
    served: dict[str, dict[str, float]] = {member: {} for member in known}
    for arm in most_played(table, arms):
        means, counts = _means(table, arm, split)
        sizes = [size for own in table.values() for size in own[arm].parameters]
        cost = price * (sum(sizes) / len(sizes) - 1)
        own = dict(zip(known, _fitted(x, means, counts, hidden) - cost, strict=True))
        likely = dict(zip(asked, _expected(at, x, means, counts, hidden) - cost, strict=True))
        worth[arm] = np.array([{**likely, **own}[member] for member in asked])
        for member, value in own.items():
            served[member][arm] = float(value)
    chosen = portfolio(served, most)
    found: dict[str, str | None] = {}
    for number, member in enumerate(asked):
        best = max(chosen, key=lambda arm: float(worth[arm][number]))
        found[member] = best if worth[best][number] > 0 else None
    return found


def _means(table: Table, arm: str, split: Split) -> tuple[Reals, Reals]:
    """Return the arm's mean log ratio and its number of seeds on every member, 0 if not played."""
    played = [own.get(arm) for own in table.values()]
    means = [0.0 if each is None else each.mean(split) for each in played]
    return np.array(means), np.array([0.0 if each is None else len(each.seeds) for each in played])


def _standardised(members: Sequence[str], known: Sequence[str], places: Places) -> Reals:
    """Return descriptors [members, D], standardised by those of the known members."""
    names = sorted(places[known[0]])
    rows = [np.array([[places[m][name] for name in names] for m in of]) for of in (members, known)]
    return np.asarray((rows[0] - rows[1].mean(0)) / units_of(rows[1]))


def units_of(rows: Reals) -> Reals:
    """Return the standard deviation of every column; 1 if all its numbers are equal.

    The deviation of equal numbers may be tiny by rounding; dividing by it would make any other
    value seem far away.
    """
    deviation = rows.std(0)
    return np.where(deviation > _SAME * (1 + np.abs(rows).max(0)), deviation, 1.0)


def _fitted(x: Reals, means: Reals, counts: Reals, hidden: float) -> Reals:
    """Return the expected log ratio of an arm on the members themselves."""
    own, at = hidden * np.eye(len(x))[:, counts > 0], _expected(x, x, means, counts, hidden)
    return np.asarray(at + own @ _spread(x, means, counts, hidden)[1])


def _expected(at: Reals, x: Reals, means: Reals, counts: Reals, hidden: float) -> Reals:
    """Return the expected log ratio of an arm at some descriptors [N, D], by a Gaussian process.

    Far from all played members it is the mean over all seeds.

    Args:
        at: descriptors to predict for.
        x: descriptors of the played members.
        means: mean log ratio on each of these.
        counts: number of seeds of each mean; 0 if the arm was not played.
        hidden: share of the variance between members that descriptors cannot explain.
    """
    level, spread = _spread(x, means, counts, hidden)
    return np.asarray(level + (1 - hidden) * _likeness(at, x[counts > 0]) @ spread)


def _spread(x: Reals, means: Reals, counts: Reals, hidden: float) -> tuple[float, Reals]:
    """Return the mean over all seeds, and the weights of the played members."""
    x, means, counts = x[counts > 0], means[counts > 0], counts[counts > 0]
    level = float(np.average(means, weights=counts))
    told = (1 - hidden) * _likeness(x, x)
    noise = np.diag(hidden + _SEED_NOISE / counts)
    return level, np.asarray(np.linalg.solve(told + noise, means - level))


def _likeness(a: Reals, b: Reals) -> Reals:
    squares = ((a[:, None] - b[None]) ** 2).sum(-1)
    return np.asarray(np.exp(-0.5 * squares / _REACH**2))


def most_played(table: Table, arms: Sequence[str]) -> list[str]:
    """Return the arms with the most seeds on every member."""
    least = _seeds_everywhere(table, arms)
    most = max(least.values(), default=0)
    return [arm for arm in least if least[arm] == most]


def _seeds_everywhere(table: Table, arms: Sequence[str]) -> dict[str, int]:
    """Return the least number of seeds on a member, of the arms that were played on every one."""
    least = {
        arm: min((len(own[arm].seeds) if arm in own else 0) for own in table.values())
        for arm in arms
    }
    return {arm: count for arm, count in least.items() if count}


def choose_few(
    table: Table,
    arms: Sequence[str],
    split: Split,
    places: Places,
    most: int,
    hidden: float = 0.0,
) -> list[str]:
    """Return the arms, at most so many, that together serve the members best.

    They were played on every member. As long as enough are left, those with few seeds do not
    compete: the best of many means over few seeds is mostly luck.
    """
    seeds = _seeds_everywhere(table, arms)
    if len(seeds) <= most:
        return list(seeds)
    enough = sorted(seeds.values(), reverse=True)[most - 1]
    finalists = [arm for arm, count in seeds.items() if count >= enough]
    played = {member: {arm: own[arm] for arm in finalists} for member, own in table.items()}
    chosen = portfolio(shrunk(played, split, places, hidden), most)
    return [arm for arm in finalists if arm in chosen]


def best_single(table: Table, arms: Sequence[str], split: Split) -> str:
    """Return the arm with the best mean over all members, among those with the most seeds."""
    finalists = most_played(table, arms)
    means = {
        member: {arm: own[arm].mean(split) for arm in finalists} for member, own in table.items()
    }
    return shared_ranking(means)[0]


def best_by_member(
    table: Table, arms: Sequence[str], split: Split, places: Places, hidden: float = 0.0
) -> dict[str, tuple[str | None, float]]:
    """Return the best arm of every member and its expected log ratio; None if waiting is best.

    Only arms with the most seeds on a member are candidates there.
    """
    chosen = {member: {a: own[a] for a in arms if a in own} for member, own in table.items()}
    found: dict[str, tuple[str | None, float]] = {}
    for member, values in shrunk(chosen, split, places, hidden).items():
        most = max(len(ratios.seeds) for ratios in chosen[member].values())
        reached = [arm for arm, ratios in chosen[member].items() if len(ratios.seeds) == most]
        best = max(reached, key=lambda arm: values[arm])
        found[member] = (best, values[best]) if values[best] > 0 else (None, 0.0)
    return found


def hindsight_values(table: Table, arms: Sequence[str], split: Split) -> Reals:
    """Return log ratios [members, arms, seeds] to choose from in hindsight; the first is waiting.

    Arms are those with the most seeds on every member; all have as many seeds as any of them.
    """
    finalists = most_played(table, arms)
    seeds = min((len(own[arm].seeds) for own in table.values() for arm in finalists), default=0)
    rows = [
        [np.zeros(seeds), *(getattr(own[arm], split)[:seeds] for arm in finalists)]
        for own in table.values()
    ]
    return np.array(rows, dtype=np.float64)


def measure_headroom(table: Table, arms: Sequence[str], split: Split) -> dict[str, float]:
    """Return what the best arm of every member in hindsight gains over the best single one.

    Waiting is an arm too. Both are chosen on half of the seeds and scored on the other half, both
    ways, so luck does not count. Everything is a log ratio, hence about a share of the loss.

    Returns:
        `hindsight`: the gain, mean over members, with its `standard_error`; `single`: what the
        best single arm gains over waiting; and the numbers of `members` and `seeds`. Nothing where
        an arm has a single seed.
    """
    values = hindsight_values(table, arms, split)
    seeds = values.shape[-1]
    if seeds < 2:
        return {}
    own, single = cross_fit(values)
    gains = own - single
    error = gains.std(ddof=1) / math.sqrt(len(gains)) if len(gains) > 1 else math.nan
    return {
        "hindsight": float(gains.mean()),
        "standard_error": float(error),
        "single": float(single.mean()),
        "members": float(len(values)),
        "seeds": float(seeds),
    }
