"""What is reported beside the second opening, from the results of every network.

    python research/campaign/beside.py            # prints decision 0013's figures
    python research/campaign/beside.py --out results/claim_2_beside.json

Static networks and those from scratch were played by four processes, one for each data set and kind
of host (research/log.md has the command); their results stand in one file. Wilcoxon's test is over
the mean log ratios of the 24 members.
"""

from __future__ import annotations

import argparse
import json
import lzma
from collections.abc import Sequence
from pathlib import Path

import numpy as np
from scipy import stats

from esper.lab.proof.arm import ArmSpec
from esper.lab.proof.results import (
    CellResult,
    best_static,
    by_member,
    comparison_mapping,
    privileged_share,
    summarise,
)
from esper.lab.proof.statistics import Floats, compare, holm, log_ratios

HERE = Path(__file__).parent
RESULTS = HERE / "results"
REQUIRED = ("wait", "random", "periodic", "plateau", "heuristic", "schedule")


def read(name: str) -> list[CellResult]:
    """Return what was played, without the networks by which rates were chosen."""
    with lzma.open(RESULTS / f"{name}.jsonl.xz", "rt", encoding="utf-8") as file:
        found = [CellResult(**json.loads(line)) for line in file]
    return [each for each in found if each.purpose == "proof"]


def errors_of(played: Sequence[CellResult], arm: str, members: Sequence[str]) -> Floats:
    """Return the test errors of an arm, float64 [members, seeds]."""
    known = {each.member: each.test_errors for each in played if each.arm == arm}
    return np.array([known[member] for member in members])


def print_wilcoxon(claim: Sequence[CellResult], subject: str, members: Sequence[str]) -> None:
    """Print the p-values of the six required comparisons."""
    own = errors_of(claim, subject, members)
    ratios = [log_ratios(own, errors_of(claim, arm, members)).mean(1) for arm in REQUIRED]
    values = [float(stats.wilcoxon(each).pvalue) for each in ratios]
    for arm, value, adjusted in zip(REQUIRED, values, holm(values), strict=True):
        print(f"Wilcoxon over {arm}: p = {value:.4f}, after Holm {adjusted:.4f}")


def main() -> None:
    """Print the figures, and write the joined ones."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--out", type=Path, help="JSON of static networks and from scratch")
    options = parser.parse_args()
    claim, beside, privileged = map(read, ("claim_2", "claim_2_beside", "privileged_fashion14"))
    subject, members = claim[0].arm, list(dict.fromkeys(each.member for each in claim))
    print_wilcoxon(claim, subject, members)

    arms = list(dict.fromkeys(each.arm for each in beside))
    errors = {arm: errors_of(beside, arm, members) for arm in arms}
    ratios = {arm: log_ratios(errors[arms[0]], errors[arm]) for arm in arms[1:]}
    comparisons = compare(ratios, arms[0], required=["wait"], confidence=0.95)
    summaries = {arm: summarise(beside, arm, errors) for arm in arms}
    for each in comparisons:
        print(each)
    for arm, found in summaries.items():
        print(f"{arm}: {found['test_score']:.2f} points, {found['parameters']:.2f} parameters")
    print(f"best static: {best_static(summaries)}")

    own = list(dict.fromkeys(each.member for each in privileged))
    told = {arm: errors_of(privileged, arm, own) for arm in ("privileged", "wait")}
    # What was won is over the waiting networks that were played beside it, with the same seeds.
    won = errors_of(claim, "wait", own) / errors_of(claim, subject, own)
    told[subject] = told["wait"] / won[:, : told["wait"].shape[1]]
    share = privileged_share(told, subject, [ArmSpec("privileged", "privileged", None)])
    print(f"share of the privileged gain, {len(own)} members: {share:.0%}")
    if options.out:
        found = {
            "members": members,
            "seeds": int(errors[arms[0]].shape[1]),
            "verdicts": [str(each) for each in comparisons],
            "comparisons": [comparison_mapping(each) for each in comparisons],
            "arms": summaries,
            "best_static": best_static(summaries),
            "by_member": by_member(beside, errors, members),
        }
        options.out.write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
