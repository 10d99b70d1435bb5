"""Where the claim's gain sits, and what else does as well: figures of the second opening.

    python research/campaign/audit.py

Everything comes from the results of every network (`results/claim_2.jsonl.xz` and
`claim_2_beside.jsonl.xz`). Log ratios are positive where tamiyo makes fewer test errors; tests are
over the mean log ratios of members, corrected by Holm where six comparisons stand together.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

import numpy as np
from beside import REQUIRED, errors_of, read
from scipy import stats

from esper.lab.proof.results import CellResult
from esper.lab.proof.statistics import Floats, holm, log_ratios

ENOUGH = 25_000
"""Images from which the rule that was formed afterwards grows by the contextual schedule."""

KEPT = (
    "cifar16 residual 4x2",
    "cifar16 residual 8x2",
    "fashion14 plain 5x2",
    "fashion14 residual 4x2",
)
"""Hosts that lacked capacity in the arena before decision 0013 too; eight others were replaced."""


def kind_of(member: str) -> str:
    """Return the group of a member, by what its label says."""
    if "x2 pooled" in member:
        return "plain, two blocks" if " plain " in member else "residual, two blocks"
    return "three wide blocks" if f"{ENOUGH} images" in member else "too little or noisy data"


def outcome(grown: object, parameters: int) -> tuple[str, int]:
    """Return what a network became, so that equal ones are equal."""
    return repr(grown), parameters


def points_of(played: Sequence[CellResult], arm: str, members: Sequence[str]) -> Floats:
    """Return the test scores of an arm, float64 [members, seeds]."""
    known = {each.member: each.test_scores for each in played if each.arm == arm}
    return np.array([known[member] for member in members])


def told(ratios: Floats) -> str:
    """Return the mean over members with the p-value of a t test that it is 0."""
    wins = int((ratios > 0).sum())
    return f"{ratios.mean():+.4f} (t p = {t_test(ratios):.2g}, above 0 in {wins} of {len(ratios)})"


def print_groups(claim: Sequence[CellResult], subject: str, members: Sequence[str]) -> None:
    """Print what every group of members gains over waiting, and for how many parameters."""
    gain = points_of(claim, subject, members) - points_of(claim, "wait", members)
    cells = {each.member: each for each in claim if each.arm == subject}
    size = np.array([np.mean(cells[m].parameters) / cells[m].host_parameters for m in members])
    hosts = np.array([cells[m].host_parameters for m in members])
    print("| members | hosts' parameters | points over waiting | parameters |\n|---|---|---|---|")
    for kind in dict.fromkeys(map(kind_of, members)):
        rows = np.array([kind_of(member) == kind for member in members])
        low, high = hosts[rows].min(), hosts[rows].max()
        print(
            f"| {kind} ({rows.sum()}) | {low:,} to {high:,} | {gain[rows].mean():+.2f} | "
            f"{size[rows].mean():.2f} |"
        )
    lacking = np.array(["two blocks" in kind_of(member) for member in members])
    kept = np.array([member.startswith(KEPT) for member in members])
    new, old = gain[lacking & ~kept].mean(), gain[kept].mean()
    print(f"lacking capacity: {(lacking & ~kept).sum()} new members {new:+.2f} points, ", end="")
    print(f"{kept.sum()} of the arena before {old:+.2f}")


def print_share(claim: Sequence[CellResult], subject: str, members: Sequence[str]) -> None:
    """Print how much of the mean gain the plain hosts of two blocks carry, and what is left."""
    plain = np.array([kind_of(member) == "plain, two blocks" for member in members])
    own = errors_of(claim, subject, members)
    means = {arm: log_ratios(own, errors_of(claim, arm, members)).mean(1) for arm in REQUIRED}
    for arm, each in means.items():
        share = each[plain].sum() / each.sum()
        print(f"over {arm}: {told(each)}; plain hosts of two blocks carry {share:.0%}")
    groups = [(member.split()[0], " plain " in member, class_of(member)) for member in members]
    clusters = {
        arm: np.array([each[[g == one for g in groups]].mean() for one in dict.fromkeys(groups)])
        for arm, each in means.items()
    }
    print(f"t, after Holm: {spread(holm([t_test(each) for each in means.values()]))}")
    print(f"signs, after Holm: {spread(holm([sign_test(each) for each in means.values()]))}")
    count = len(dict.fromkeys(groups))
    values = [t_test(each) for each in clusters.values()]
    print(f"t over {count} clusters (data, host, class), uncorrected: {spread(values)}")
    left = holm([t_test(each[~plain]) for each in means.values()])
    print(f"t without the plain hosts of two blocks, after Holm: {spread(left)}")


def class_of(member: str) -> str:
    """Return whether growth was expected to help: lacking capacity, neutral or useless."""
    kind = kind_of(member)
    return "lacks capacity" if "two blocks" in kind else kind


def t_test(values: Floats) -> float:
    """Return the p-value that the mean of these is 0."""
    return float(stats.ttest_1samp(values, 0.0).pvalue)


def sign_test(values: Floats) -> float:
    """Return the p-value that as many are above 0 as below; exact ties say nothing."""
    decided = values[values != 0]
    return float(stats.binomtest(int((decided > 0).sum()), len(decided)).pvalue)


def spread(values: Sequence[float]) -> str:
    """Return the least and the greatest of the p-values."""
    return f"p from {min(values):.3f} to {max(values):.3f}"


def print_watching(claim: Sequence[CellResult], subject: str, members: Sequence[str]) -> None:
    """Print whether what it does on a member depends on anything but the member."""
    cells = {each.member: each for each in claim if each.arm == subject}
    same = [
        Counter(map(outcome, cells[m].grown, cells[m].parameters)).most_common(1)[0][1]
        for m in members
    ]
    total = sum(len(cells[member].grown) for member in members)
    print(f"{sum(same)} of {total} networks have their member's most frequent outcome")
    own, rule = (errors_of(claim, arm, members) for arm in (subject, "contextual"))
    print(f"against the contextual schedule: {told(log_ratios(own, rule).mean(1))}")
    many = np.array([f"{ENOUGH} images" in member for member in members])
    stump = np.where(many[:, None], rule, errors_of(claim, "wait", members))
    print(f"against the rule by number of images: {told(log_ratios(own, stump).mean(1))}")


def print_beside(claim: Sequence[CellResult], members: Sequence[str]) -> None:
    """Print how it does against its own architectures from scratch, and how far results repeat."""
    beside = read("claim_2_beside")
    own, scratch = (errors_of(beside, arm, members) for arm in ("subject", "scratch subject"))
    means = log_ratios(own, scratch).mean(1)
    shallow = np.array(["x2 pooled" in member for member in members])
    print(f"against its architectures from scratch: {told(means)}")
    print(f"the same, hosts of two blocks: {told(means[shallow])}")
    again = points_of(beside, "wait", members)
    first = points_of(claim, "wait", members)[:, : again.shape[1]]
    seeds = {(each.member, tuple(each.seeds[: again.shape[1]])) for each in claim}
    assert all((e.member, tuple(e.seeds)) in seeds for e in beside if e.arm == "wait"), "same seeds"
    moved = again - first
    rms, most = float(np.sqrt((moved**2).mean())), float(np.abs(moved).max())
    print(
        f"waiting again with the same seeds on the GPU: {int((moved == 0).sum())} of {moved.size} "
        f"identical, rms {rms:.2f} points, largest {most:.1f}, mean {moved.mean():+.2f}"
    )


def main() -> None:
    """Print all of it."""
    claim = read("claim_2")
    subject, members = claim[0].arm, list(dict.fromkeys(each.member for each in claim))
    print_groups(claim, subject, members)
    print_share(claim, subject, members)
    print_watching(claim, subject, members)
    print_beside(claim, members)


if __name__ == "__main__":
    main()
