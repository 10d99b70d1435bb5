"""The statistics of a proof, as small pure functions.

The unit is the log ratio of errors, paired by member and seed: `log(reference / arm)`. So +0.1
means about 10 % fewer errors than the reference, whatever the task's error is. Tables of log ratios
are float64 [members, seeds].

There are two bootstraps. One over seeds, with fixed members, says whether a difference holds on
these tasks. One over members, and within each over seeds, says whether it would hold on other tasks
of the kind. Verdicts use the second, because members differ more than seeds. A bootstrap over few
members is overconfident, so a sign test over members sets the least p-value.

Beside it stands Wilcoxon's signed-rank test over the members' means, with a correction of its own.
It counts members, so that a few with large effects cannot carry it. A proof may ask for both.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np
from numpy.typing import ArrayLike, NDArray
from scipy import stats

from esper.leyline.errors import UsageError

Floats = NDArray[np.float64]
Verdict = Literal["beats", "ties", "loses"]

_WORDS: dict[Verdict, str] = {"beats": "beats", "ties": "ties with", "loses": "loses to"}

RESAMPLES = 9_999
"""Resamples of a bootstrap; the smallest p-value is 0.0002."""
MOST_PAIRS = 1 << 22
"""Numbers resampled at once, to limit memory."""


@dataclass(frozen=True, slots=True)
class Interval:
    """An estimate with its confidence interval."""

    estimate: float
    low: float
    high: float
    confidence: float = 0.95

    def __str__(self) -> str:
        return f"{self.estimate:+.3f} [{self.low:+.3f}, {self.high:+.3f}]"


def error_rate(accuracy: ArrayLike, samples: int) -> Floats:
    """Return error rates from accuracies in points, at least half an error in all samples."""
    return np.maximum(1.0 - np.asarray(accuracy, dtype=np.float64) / 100.0, 0.5 / samples)


def log_ratios(errors: ArrayLike, reference: ArrayLike) -> Floats:
    """Return log(reference / errors): above 0 if there are fewer errors than the reference's."""
    return np.log(np.asarray(reference, dtype=np.float64)) - np.log(
        np.asarray(errors, dtype=np.float64)
    )


def interquartile_mean(values: ArrayLike, axis: int | None = None) -> Floats:
    """Return the mean of the middle half of the values."""
    return np.asarray(stats.trim_mean(np.asarray(values, dtype=np.float64), 0.25, axis=axis))


def probability_of_improvement(table: ArrayLike) -> float:
    """Return the mean over members of the share of seeds that are better; a tie is half."""
    table = np.asarray(table, dtype=np.float64)
    better = np.where(table > 0, 1.0, np.where(table == 0, 0.5, 0.0))
    return float(better.mean(axis=1).mean())


def bootstrap_seeds(table: ArrayLike, confidence: float = 0.95, seed: int = 0) -> Interval:
    """Return the interquartile mean with its interval over seeds, with fixed members."""
    table = _checked(table)
    samples = tuple(table)
    if table.shape[1] < 2:
        raise UsageError("an interval over seeds needs at least 2 seeds of every member")

    def middle(*rows: Floats, axis: int) -> Floats:
        return interquartile_mean(np.concatenate(rows, axis=axis), axis=axis)

    found = stats.bootstrap(
        samples,
        middle,
        n_resamples=RESAMPLES,
        batch=max(1, MOST_PAIRS // table.size),
        vectorized=True,
        confidence_level=confidence,
        method="percentile",
        rng=np.random.default_rng(seed),
    )
    low, high = found.confidence_interval
    return Interval(float(interquartile_mean(table)), float(low), float(high), confidence)


def resample_members(table: ArrayLike, seed: int = 0) -> Floats:
    """Return the interquartile means [N] of resamples over members, and over seeds within each."""
    table = _checked(table)
    members, seeds = table.shape
    stream = np.random.default_rng(seed)
    found = []
    batch = max(1, MOST_PAIRS // table.size)
    for start in range(0, RESAMPLES, batch):
        count = min(batch, RESAMPLES - start)
        chosen = stream.integers(members, size=(count, members, 1))
        within = stream.integers(seeds, size=(count, members, seeds))
        drawn = table[chosen, within].reshape(count, -1)
        found.append(interquartile_mean(drawn, axis=1))
    return np.concatenate(found)


def two_sided_p(resamples: ArrayLike) -> float:
    """Return twice the share of resamples on the rarer side of 0; at least 2 / (N + 1)."""
    values = np.asarray(resamples, dtype=np.float64)
    below = (np.count_nonzero(values <= 0) + 1) / (len(values) + 1)
    above = (np.count_nonzero(values >= 0) + 1) / (len(values) + 1)
    return min(1.0, 2.0 * min(below, above))


def least_p(members: int) -> float:
    """Return the least two-sided p-value for so many members, that of a sign test.

    Under the null each member favours an arm with probability 1/2, so all of them, or none, do in 2
    of 2^members cases. A bootstrap alone rejects a true null at 0.05 in 28 % of cases with two
    members, 14 % with four and 10 % with six.
    """
    return 2.0 ** (1 - members)


def percentile_interval(
    estimate: float, resamples: ArrayLike, confidence: float = 0.95
) -> Interval:
    """Return the percentile interval of resamples."""
    tail = (1.0 - confidence) / 2.0
    low, high = np.quantile(np.asarray(resamples, dtype=np.float64), [tail, 1.0 - tail])
    return Interval(estimate, float(low), float(high), confidence)


@dataclass(frozen=True, slots=True)
class RankTest:
    """Wilcoxon's signed-rank test over the members' means."""

    middle: float
    """Hodges-Lehmann estimate, which has the sign of the test: the median of the means of all pairs
    of members."""
    p_value: float
    adjusted_p: float
    """After Holm's correction of the rank tests alone."""


def middle_of_pairs(means: ArrayLike) -> float:
    """Return the Hodges-Lehmann estimate: the median of the means of all pairs.

    A member makes a pair with itself too.
    """
    values = np.asarray(means, dtype=np.float64)
    first, second = np.triu_indices(len(values))
    return float(np.median((values[first] + values[second]) / 2.0))


def signed_rank_p(means: ArrayLike) -> float:
    """Return the two-sided p-value of Wilcoxon's test; members without a difference drop out.

    It is at least that of a sign test: with ties scipy uses a normal approximation.
    """
    values = np.asarray(means, dtype=np.float64)
    if not values.any():
        return 1.0
    return max(float(stats.wilcoxon(values).pvalue), least_p(len(values)))


def holm(p_values: Sequence[float]) -> list[float]:
    """Return Holm's adjusted p-values: at level a, all those below a may be claimed together."""
    adjusted = [1.0] * len(p_values)
    largest = 0.0
    for rank, index in enumerate(_order(p_values)):
        largest = max(largest, min(1.0, (len(p_values) - rank) * p_values[index]))
        adjusted[index] = largest
    return adjusted


def holm_confidences(p_values: Sequence[float], confidence: float = 0.95) -> list[float]:
    """Return the confidence at which Holm tests each of several comparisons, by its rank."""
    found = [confidence] * len(p_values)
    for rank, index in enumerate(_order(p_values)):
        found[index] = 1.0 - (1.0 - confidence) / (len(p_values) - rank)
    return found


def _order(values: Sequence[float]) -> list[int]:
    return sorted(range(len(values)), key=values.__getitem__)


@dataclass(frozen=True, slots=True, kw_only=True)
class Comparison:
    """One arm against another, in log ratios of errors."""

    arm: str
    reference: str
    members: int
    seeds: int
    over_members: Interval
    """Over members and seeds, at the confidence of Holm's correction."""
    over_seeds: Interval | None
    """Over seeds with fixed members; None with one seed."""
    better: float
    """Probability of improvement."""
    p_value: float
    adjusted_p: float
    is_required: bool
    """Whether Holm's correction includes it."""
    ranks: RankTest
    needs_ranks: bool
    """Whether the verdict needs the rank test too."""
    verdict: Verdict

    @property
    def has_few_members(self) -> bool:
        """Whether the interval excludes 0 but there are too few members for a verdict."""
        is_clear = self.over_members.low > 0 or self.over_members.high < 0
        return self.verdict == "ties" and is_clear and self.p_value == least_p(self.members)

    @property
    def errors_changed(self) -> float:
        """Relative change of the errors; above 0 is more."""
        return float(np.expm1(-self.over_members.estimate))

    def __str__(self) -> str:
        interval = self.over_members
        adjusted = "after Holm" if self.is_required else "unadjusted"
        change = f"{abs(self.errors_changed):.1%} {'more' if self.errors_changed > 0 else 'fewer'}"
        return (
            f"{self.arm} {_WORDS[self.verdict]} {self.reference}: {change} errors, "
            f"log ratio {interval} ({interval.confidence:.1%}), "
            f"p = {self.adjusted_p:.4f} {adjusted}, {self.ranks.adjusted_p:.4f} by Wilcoxon, "
            f"better in {self.better:.0%} of pairs"
            + (f"; {self.members} members are too few to say more" if self.has_few_members else "")
        )


def compare(
    tables: dict[str, Floats],
    arm: str,
    *,
    required: Sequence[str] = (),
    confidence: float = 0.95,
    needs_ranks: bool = False,
    seed: int = 0,
) -> list[Comparison]:
    """Compare an arm with every other.

    Args:
        tables: by reference, the arm's log ratios against it, float64 [members, seeds].
        arm: name of the arm.
        required: references with Holm's correction; the others are reported without it.
        confidence: confidence of a single comparison.
        needs_ranks: whether a verdict needs Wilcoxon's test over members too.
        seed: seed of the resamples.
    """
    drawn = {name: resample_members(table, seed) for name, table in tables.items()}
    p_values = {
        name: max(two_sided_p(each), least_p(len(tables[name]))) for name, each in drawn.items()
    }
    together = [name for name in tables if name in required]
    levels = dict.fromkeys(tables, confidence)
    adjusted = dict(p_values)
    for name, level, p in zip(
        together,
        holm_confidences([p_values[name] for name in together], confidence),
        holm([p_values[name] for name in together]),
        strict=True,
    ):
        levels[name], adjusted[name] = level, p
    ranks = _rank_tests(tables, together)
    found = []
    for name, given in tables.items():
        table = _checked(given)
        estimate = float(interquartile_mean(table))
        interval = percentile_interval(estimate, drawn[name], levels[name])
        found.append(
            Comparison(
                arm=arm,
                reference=name,
                members=table.shape[0],
                seeds=table.shape[1],
                over_members=interval,
                over_seeds=bootstrap_seeds(table, confidence, seed) if table.shape[1] > 1 else None,
                better=probability_of_improvement(table),
                p_value=p_values[name],
                adjusted_p=adjusted[name],
                is_required=name in together,
                ranks=ranks[name],
                needs_ranks=needs_ranks,
                verdict=judge(
                    interval, adjusted[name], 1.0 - confidence, ranks[name] if needs_ranks else None
                ),
            )
        )
    return found


def _rank_tests(tables: dict[str, Floats], together: Sequence[str]) -> dict[str, RankTest]:
    """Return the rank test of every comparison; `together` names those that Holm corrects."""
    means = {name: _checked(table).mean(1) for name, table in tables.items()}
    p_values = {name: signed_rank_p(each) for name, each in means.items()}
    corrected = holm([p_values[name] for name in together])
    adjusted = p_values | dict(zip(together, corrected, strict=True))
    return {
        name: RankTest(middle_of_pairs(means[name]), p_values[name], adjusted[name])
        for name in tables
    }


def judge(
    interval: Interval, adjusted_p: float, level: float, ranks: RankTest | None = None
) -> Verdict:
    """Return the verdict; a win needs an interval above 0 and an adjusted p below the level.

    Args:
        interval: of the estimate, at the confidence of Holm's correction.
        adjusted_p: p-value after Holm.
        level: the level of the test.
        ranks: a rank test that has to say the same; None if it does not count.
    """
    sign = 1.0 if interval.low > 0 else -1.0 if interval.high < 0 else 0.0
    is_certain = adjusted_p < level and sign != 0.0
    if ranks is not None:
        is_certain &= ranks.adjusted_p < level and ranks.middle * sign > 0
    if not is_certain:
        return "ties"
    return "beats" if sign > 0 else "loses"


def front(costs: Sequence[float], errors: Sequence[float]) -> list[int]:
    """Return the indices of the Pareto front, cheapest first."""
    order = sorted(range(len(costs)), key=lambda index: (costs[index], errors[index]))
    found: list[int] = []
    least = np.inf
    for index in order:
        if errors[index] < least:
            least = errors[index]
            found.append(index)
    return found


def _checked(table: ArrayLike) -> Floats:
    values = np.asarray(table, dtype=np.float64)
    if values.ndim != 2 or values.size < 4:
        raise UsageError(
            f"a comparison needs at least 4 pairs of members and seeds, got {list(values.shape)}"
        )
    if not np.isfinite(values).all():
        raise UsageError("a comparison needs finite errors; some network has diverged")
    return values
