"""Statistics against numbers that were worked out by hand."""

from __future__ import annotations

import itertools
import math
import random
from statistics import fmean

import numpy as np
import pytest

from esper.lab.proof.statistics import (
    Interval,
    RankTest,
    bootstrap_seeds,
    compare,
    error_rate,
    front,
    holm,
    holm_confidences,
    interquartile_mean,
    judge,
    least_p,
    log_ratios,
    middle_of_pairs,
    percentile_interval,
    probability_of_improvement,
    resample_members,
    signed_rank_p,
    two_sided_p,
)
from esper.leyline.errors import UsageError


def table(mean: float, members: int = 12, seeds: int = 4, spread: float = 0.02) -> np.ndarray:
    return mean + np.random.default_rng(0).normal(0, spread, (members, seeds))


def test_errors_are_shares_of_samples_and_never_none() -> None:
    assert error_rate([90.0, 100.0], 50).tolist() == pytest.approx([0.1, 0.01])


def test_a_log_ratio_is_above_0_with_fewer_errors() -> None:
    found = log_ratios([0.1, 0.2, 0.2], [0.2, 0.2, 0.1])
    assert found.tolist() == pytest.approx([math.log(2), 0.0, -math.log(2)])


def test_the_interquartile_mean_is_of_the_middle_half() -> None:
    # A quarter of eight is two: 1, 2 and 100, 900 go.
    assert float(interquartile_mean([1, 2, 3, 4, 5, 6, 100, 900])) == 4.5
    # A quarter of five is one value at either end.
    assert float(interquartile_mean([0, 1, 2, 3, 1000])) == 2.0
    assert interquartile_mean([[0, 1, 2, 3], [4, 5, 6, 7]], axis=1).tolist() == [1.5, 5.5]


def test_improvement_is_counted_by_member_with_ties_as_halves() -> None:
    # Shares of members: 1, 0.5, 0.25 + 0.125 of four.
    assert probability_of_improvement([[0.1, 0.2], [0.1, -0.1], [0.0, -1.0]]) == pytest.approx(
        (1.0 + 0.5 + 0.25) / 3
    )


def test_holm_by_hand() -> None:
    # Sorted: 0.01 x 4, 0.02 x 3, 0.03 x 2 = 0.06 (not below 0.06), 0.5 x 1.
    assert holm([0.03, 0.01, 0.5, 0.02]) == pytest.approx([0.06, 0.04, 0.5, 0.06])
    assert holm([0.9, 0.8]) == [1.0, 1.0]
    assert holm([]) == []
    assert holm_confidences([0.03, 0.01, 0.5, 0.02]) == pytest.approx(
        [1 - 0.05 / 2, 1 - 0.05 / 4, 1 - 0.05, 1 - 0.05 / 3]
    )


def test_p_values_count_the_rarer_side_and_are_never_0() -> None:
    # (2 + 1) / (9 + 1) of the resamples are at or below 0; twice that.
    assert two_sided_p([-1, 0, 1, 2, 3, 4, 5, 6, 7]) == pytest.approx(0.6)
    assert two_sided_p([1.0] * 99) == pytest.approx(0.02)
    assert two_sided_p([0.0] * 99) == 1.0


def test_percentile_intervals_leave_out_as_much_at_either_end() -> None:
    interval = percentile_interval(50.0, np.arange(101), 0.9)
    assert (interval.low, interval.high) == pytest.approx((5.0, 95.0))
    assert str(interval) == "+50.000 [+5.000, +95.000]"


def middle(values: list[float]) -> float:
    """Return the mean without the lowest and the highest quarter, the long way."""
    ordered = sorted(values)
    cut = len(ordered) // 4
    return fmean(ordered[cut : len(ordered) - cut])


def skewed(members: int = 6, seeds: int = 5) -> np.ndarray:
    """Members that differ, seeds that are lucky on all of them, and a few that stand out."""
    stream = np.random.default_rng(11)
    lucky = stream.normal(0, 0.5, (1, seeds))
    return np.exp(stream.normal(0, 0.3, (members, 1)) + lucky) * stream.exponential(
        0.5, (members, seeds)
    )


def bounds(values: list[float]) -> list[float]:
    ordered = sorted(values)
    return [ordered[int(share * len(ordered))] for share in (0.025, 0.5, 0.975)]


def test_both_bootstraps_are_what_a_plain_loop_finds() -> None:
    values, stream = skewed(), random.Random(5)
    rows = [list(map(float, row)) for row in values]
    over_members, over_seeds = [], []
    for _ in range(4000):
        members = [stream.choice(rows) for _ in rows]
        over_members.append(middle([stream.choice(row) for row in members for _ in row]))
        over_seeds.append(middle([stream.choice(row) for row in rows for _ in row]))
    low, centre, high = bounds(over_members)
    drawn = resample_members(values)
    assert np.quantile(drawn, [0.025, 0.5, 0.975]) == pytest.approx([low, centre, high], abs=0.04)
    seeds = bootstrap_seeds(values)
    low, _, high = bounds(over_seeds)
    assert (seeds.low, seeds.high) == pytest.approx((low, high), abs=0.03)
    flat = [value for row in rows for value in row]
    assert seeds.estimate == pytest.approx(middle(flat))
    # Where they agree the test could not tell one from the other.
    assert high - low < 0.8 * (bounds(over_members)[2] - bounds(over_members)[0])
    assert abs(middle(flat) - fmean(flat)) > 0.05
    assert abs((low + high) / 2 - middle(flat)) > 0.03


def test_a_comparison_is_made_of_these() -> None:
    values = skewed(8)
    found = compare({"a": values, "b": -values}, "mine", required=["a", "b"], seed=3)[0]
    level = 1 - 0.05 / 2
    assert found.over_members == percentile_interval(
        float(interquartile_mean(values)), resample_members(values, 3), level
    )
    assert found.over_seeds == bootstrap_seeds(values, 0.95, 3)
    assert found.p_value == max(two_sided_p(resample_members(values, 3)), least_p(8))


def test_resamples_of_members_spread_further_than_those_of_seeds() -> None:
    """Members that differ much, seeds that differ little: only other members can say so."""
    by_member = np.linspace(-0.2, 0.3, 8)[:, None] + np.zeros((8, 4))
    assert bootstrap_seeds(by_member).low == bootstrap_seeds(by_member).high
    drawn = resample_members(by_member)
    assert drawn.std() > 0.03
    assert two_sided_p(drawn) > 0.1


def test_resampling_is_repeatable_and_centred() -> None:
    values = table(0.1)
    assert np.array_equal(resample_members(values, 3), resample_members(values, 3))
    assert resample_members(values).mean() == pytest.approx(0.1, abs=0.01)
    interval = bootstrap_seeds(values)
    assert interval.low < interval.estimate < interval.high


def test_the_null_is_rejected_about_as_often_as_it_may_be() -> None:
    stream = np.random.default_rng(7)
    rejected = 0
    for number in range(40):
        values = stream.normal(0, 0.1, (12, 1)) + stream.normal(0, 0.05, (12, 4))
        rejected += two_sided_p(resample_members(values, number)) < 0.05
    assert rejected <= 6


def test_few_members_cannot_carry_a_verdict() -> None:
    assert [least_p(members) for members in (1, 2, 6)] == [1.0, 0.5, 2 / 64]
    for members, verdict in ((1, "ties"), (2, "ties"), (5, "ties"), (6, "beats"), (12, "beats")):
        found = compare({"wait": table(0.2, members)}, "mine", required=["wait"])[0]
        assert found.verdict == verdict, members
        assert found.p_value == max(least_p(members), 0.0002)
        assert ("members are too few to say more" in str(found)) == (verdict == "ties")
    four = {name: table(0.2, 7) for name in ("a", "b", "c", "d")}
    assert {each.verdict for each in compare(four, "mine", required=list(four))} == {"ties"}
    assert {each.verdict for each in compare(four, "mine")} == {"beats"}
    # A tie that is one by its interval says nothing of members.
    assert "too few" not in str(compare({"wait": table(0.0, 6)}, "mine")[0])


def test_chance_is_rarely_called_a_win_however_few_the_members() -> None:
    stream = np.random.default_rng(3)
    for members in (2, 4, 6):
        called = 0
        for _ in range(30):
            values = stream.normal(0, 0.1, (members, 1)) + stream.normal(0, 0.05, (members, 3))
            called += compare({"wait": values}, "mine", required=["wait"])[0].verdict != "ties"
        assert called <= 4, members


def test_verdicts() -> None:
    inside = Interval(0.1, -0.1, 0.2)
    above, below = Interval(0.1, 0.05, 0.2), Interval(-0.1, -0.2, -0.05)
    assert judge(above, 0.01, 0.05) == "beats"
    assert judge(below, 0.01, 0.05) == "loses"
    assert judge(inside, 0.2, 0.05) == "ties"
    assert judge(above, 0.06, 0.05) == "ties"


def test_ranks_of_members_by_every_choice_of_signs() -> None:
    # Ranks 1 to 6, and only the 1 is below 0: 2 of 64 choices of signs are as far out on a side.
    assert signed_rank_p([2, 3, -1, 4, 5, 6]) == pytest.approx(2 * 2 / 64)
    means = [0.3, -0.1, 0.7, 0.2, -0.4, 0.9, 1.1, 0.05]
    ranks = {value: rank for rank, value in enumerate(sorted(means, key=abs), start=1)}
    above = sum(rank for value, rank in ranks.items() if value > 0)
    sums = [
        sum(rank for rank, is_above in zip(ranks.values(), signs, strict=True) if is_above)
        for signs in itertools.product((False, True), repeat=8)
    ]
    as_far = sum(each >= above for each in sums)
    assert signed_rank_p(means) == pytest.approx(2 * as_far / 256)
    assert signed_rank_p([-each for each in means]) == pytest.approx(2 * as_far / 256)


def test_members_without_a_difference_say_nothing() -> None:
    assert signed_rank_p([0.0] * 8) == 1.0
    assert signed_rank_p([0.0] * 6 + [1.0, 2.0]) == pytest.approx(0.5)
    assert signed_rank_p([1.0] * 5) == least_p(5)


def test_the_middle_of_pairs_by_hand() -> None:
    # 1, 1.5, 3.5, 2, 4 and 6.
    assert middle_of_pairs([1, 2, 6]) == 2.75


def lopsided() -> np.ndarray:
    """Most members gain a little and a few lose much, so ranks are undecided."""
    by_member = np.array([0.05] * 47 + [-0.15] * 13)
    noise = np.random.default_rng(2).normal(0, 0.002, (60, 3))
    return by_member[:, None] + noise


def test_a_verdict_may_need_ranks_of_members_too() -> None:
    tables = {"a": lopsided(), "b": table(0.2)}
    usual = {each.reference: each for each in compare(tables, "mine", required=list(tables))}
    both = compare(tables, "mine", required=list(tables), needs_ranks=True)
    assert [each.verdict for each in usual.values()] == ["beats", "beats"]
    assert [each.verdict for each in both] == ["ties", "beats"]
    for each in both:
        assert each.ranks == usual[each.reference].ranks
        assert each.adjusted_p == usual[each.reference].adjusted_p
        means = tables[each.reference].mean(1)
        assert each.ranks.p_value == signed_rank_p(means)
        assert each.ranks.middle == middle_of_pairs(means)
    assert both[0].ranks.p_value > 0.05
    # The correction is over the rank tests: the smaller p of two is doubled.
    assert both[0].ranks.adjusted_p == both[0].ranks.p_value
    assert both[1].ranks.adjusted_p == pytest.approx(2 * both[1].ranks.p_value)
    alone = compare({"b": tables["b"]}, "mine")[0]
    assert alone.ranks.adjusted_p == alone.ranks.p_value


def test_ranks_have_to_agree_on_the_sign() -> None:
    above, below = Interval(0.1, 0.05, 0.2), Interval(-0.1, -0.2, -0.05)
    up, down = RankTest(0.1, 0.01, 0.02), RankTest(-0.1, 0.01, 0.02)
    unsure = RankTest(0.1, 0.1, 0.2)
    assert judge(above, 0.01, 0.05, up) == "beats"
    assert judge(below, 0.01, 0.05, down) == "loses"
    assert judge(above, 0.01, 0.05, down) == "ties"
    assert judge(below, 0.01, 0.05, up) == "ties"
    assert judge(above, 0.01, 0.05, unsure) == "ties"
    assert judge(above, 0.06, 0.05, up) == "ties"


def test_a_better_arm_wins_a_null_arm_ties_and_a_worse_one_loses() -> None:
    tables = {"bad": table(0.2), "same": table(0.0), "good": table(-0.2)}
    found = {each.reference: each for each in compare(tables, "mine", required=["bad", "same"])}
    assert [found[name].verdict for name in tables] == ["beats", "ties", "loses"]
    assert found["bad"].over_members.confidence == pytest.approx(0.975)
    assert found["bad"].adjusted_p == pytest.approx(2 * found["bad"].p_value)
    assert found["good"].adjusted_p == found["good"].p_value
    assert found["good"].over_members.confidence == 0.95
    assert found["bad"].better == 1.0
    assert found["bad"].errors_changed == pytest.approx(math.exp(-0.2) - 1, abs=0.01)


def test_a_verdict_in_words() -> None:
    better = compare({"wait": table(0.2)}, "mine", required=["wait"])[0]
    assert str(better).startswith("mine beats wait: 18.")
    assert "fewer errors, log ratio +0.2" in str(better)
    assert "(95.0%), p = 0.0005 after Holm, 0.0005 by Wilcoxon, better in 100% of" in str(better)
    worse = compare({"wait": table(-0.2)}, "mine")[0]
    assert "mine loses to wait: 22" in str(worse)
    assert "more errors" in str(worse)
    assert "unadjusted" in str(worse)


def test_more_comparisons_ask_for_more_certainty() -> None:
    """An effect that is enough alone need not be enough among many."""
    values = table(0.004, members=8, spread=0.012)
    alone = compare({"wait": values}, "mine", required=["wait"])[0]
    many = {f"control {number}": values for number in range(10)}
    among = compare(many, "mine", required=list(many))[0]
    assert among.adjusted_p > alone.adjusted_p
    assert among.over_members.low < alone.over_members.low


@pytest.mark.parametrize("bad", [[[0.1, 0.2]], [0.1, 0.2, 0.3, 0.4]])
def test_too_few_pairs_are_refused(bad: list[float]) -> None:
    with pytest.raises(UsageError, match="at least 4 pairs"):
        resample_members(bad)


def test_a_network_that_diverged_is_not_averaged_away() -> None:
    with pytest.raises(UsageError, match="diverged"):
        resample_members([[0.1, np.nan], [0.1, 0.2]])
    with pytest.raises(UsageError, match="at least 2 seeds"):
        bootstrap_seeds([[0.1], [0.2], [0.3], [0.4]])


def test_a_front_has_what_nobody_beats() -> None:
    # (1, 5), (2, 3), (2, 4), (3, 3), (4, 1): the third costs as much and errs more, the fourth too.
    assert front([1, 2, 2, 3, 4], [5, 3, 4, 3, 1]) == [0, 1, 4]
