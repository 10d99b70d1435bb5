"""What decisions are worth in hindsight, and how much of that an arm reaches.

The best of several noisy means is partly luck. So whatever is chosen by results is chosen on half
of the seeds and scored on the other half, both ways (*cross-fitted*). The halves are every other
seed. Everything is a log ratio over waiting, hence about a share of the loss; intervals are
bootstraps over members. The best single arm is chosen again in every resample, which favours it, so
intervals of what is gained over it lean towards less.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
from numpy.typing import ArrayLike, NDArray

from esper.lab.proof.statistics import RESAMPLES, Floats, Interval, percentile_interval
from esper.leyline.errors import UsageError

MOST_LOST = 0.005
"""Most that an arm may lose, as a share of the loss, and still count as not worse."""
LEAST = -math.log1p(MOST_LOST)
"""The same as a log ratio."""


def halves(values: ArrayLike) -> tuple[Floats, Floats]:
    """Return the means over each half of the seeds, the last axis."""
    table = np.asarray(values, dtype=np.float64)
    if table.shape[-1] < 2:
        raise UsageError("choosing on half of the seeds needs at least 2 seeds")
    return table[..., ::2].mean(-1), table[..., 1::2].mean(-1)


def cross_fit(values: ArrayLike) -> tuple[Floats, Floats]:
    """Return what the best arm of each member, and the best single arm, reach on every member.

    Args:
        values: log ratios over waiting, [members, arms, seeds]; waiting itself is an arm of zeros.
    """
    first, second = halves(values)
    rows = np.arange(len(first))
    own, single = [], []
    for chosen, judged in ((first, second), (second, first)):
        own.append(judged[rows, chosen.argmax(1)])
        single.append(judged[:, chosen.mean(0).argmax()])
    return np.mean(own, 0), np.mean(single, 0)


@dataclass(frozen=True, slots=True, kw_only=True)
class Hindsight:
    """An arm beside the best that could have been chosen in hindsight; means over members."""

    members: int
    arms: int
    """Number of arms to choose from, waiting among them."""
    single: float
    """The best single arm over waiting."""
    gain: Interval
    """The best arm of each member over the best single one."""
    reached: Interval
    """The arm over the best single one."""
    share: float | None
    """`reached` as a share of `gain`; None if nothing is gained."""
    over_half: Interval
    """`reached` less half of `gain`: above 0 if the arm reaches more than half. Unlike the share it
    has an interval also where the gain may be 0."""
    over_best: Interval
    """The arm over the best arm of each member."""


def measure_hindsight(subject: Floats, values: Floats, seed: int = 0) -> Hindsight:
    """Compare an arm with the best of several arms in hindsight.

    Args:
        subject: log ratios of the arm over waiting, [members, seeds].
        values: those of the arms to choose from, [members, arms, seeds], waiting's zeros among
            them; the seeds may be others.
        seed: seed of the resamples.
    """
    mine = np.mean(halves(subject), 0)
    own, single = cross_fit(values)
    first, second = halves(values)
    counts = _resampled(len(mine), seed)
    drawn = np.arange(len(counts))
    singles = np.zeros(len(counts))
    for chosen, judged in ((first, second), (second, first)):
        singles += (counts @ judged)[drawn, (counts @ chosen).argmax(1)] / 2.0
    mine_drawn, own_drawn = counts @ mine, counts @ own
    gain = float((own - single).mean())
    reached = float((mine - single).mean())
    reached_drawn, gain_drawn = mine_drawn - singles, own_drawn - singles
    return Hindsight(
        members=len(mine),
        arms=values.shape[1],
        single=float(single.mean()),
        gain=percentile_interval(gain, gain_drawn),
        reached=percentile_interval(reached, reached_drawn),
        share=reached / gain if gain > 0 else None,
        over_half=percentile_interval(reached - gain / 2.0, reached_drawn - gain_drawn / 2.0),
        over_best=percentile_interval(float((mine - own).mean()), mine_drawn - own_drawn),
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class Useless:
    """An arm on the members on which every deeper arm is worse than waiting."""

    members: int
    """Members that one half of the seeds calls so, or both."""
    by_both: int
    """Members that both halves call so."""
    mean: float | None
    """The arm over waiting on the other half, mean over these members; None if there are none."""
    over_waiting: Interval | None
    """The same with its interval; None with fewer than two members."""


def measure_useless(
    subject: Floats, others: Floats, is_deeper: NDArray[np.bool_], seed: int = 0
) -> Useless:
    """Compare an arm with waiting where growing is useless.

    Args:
        subject: log ratios of the arm over waiting, [members, seeds].
        others: those of all arms that may be deeper, [members, arms, seeds], with the same seeds.
        is_deeper: whether they are on a member, [members, arms]. The others say nothing there.
        seed: seed of the resamples.
    """
    counts = is_deeper.any(1)
    is_useless = np.stack([((half < 0) | ~is_deeper).all(1) & counts for half in halves(others)])
    first, second = halves(subject)
    judged = np.stack([second, first])
    is_any = is_useless.any(0)
    means = (judged * is_useless).sum(0)[is_any] / is_useless.sum(0)[is_any]
    mean = float(means.mean()) if len(means) else None
    drawn = _resampled(len(means), seed) @ means if len(means) > 1 else None
    return Useless(
        members=len(means),
        by_both=int(is_useless.all(0).sum()),
        mean=mean,
        over_waiting=None if mean is None or drawn is None else percentile_interval(mean, drawn),
    )


def _resampled(members: int, seed: int) -> Floats:
    """Return weights of members [N, members] in resamples; each row sums to 1."""
    stream = np.random.default_rng(seed)
    counts = stream.multinomial(members, np.full(members, 1.0 / members), RESAMPLES)
    return np.asarray(counts / members, dtype=np.float64)
