"""Which policy goes to the second opening of the claim, if any: the rule, before it is known.

    python research/campaign/rule.py STATE

Prints one name, or `none` and exits with 1. The candidates are those that were trained since the
first opening; `gentle` is the policy of the first. A candidate is eligible if

1. on *select* it is not worse than `gentle` by more than 0.002 (interquartile mean of the log ratio
   over waiting), and better than the best single schedule (interquartile mean over pairs above 0);
2. on the members of *select* with three blocks and 3,000 images, and on `image16_few`, it adds at
   most 5 % parameters in the mean of either.

Of those that are eligible, the one that is furthest ahead of waiting on *select* is taken.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from statistics import fmean

import numpy as np

from esper.lab.proof.results import MOST_ADDED, RESULTS_FILE, ResultFile
from esper.lab.proof.statistics import interquartile_mean, log_ratios

CANDIDATES = ("tuned", "wider", "clone")
BEFORE, WAIT, SCHEDULE = "gentle", "wait", "schedule"
MOST_WORSE = 0.002
RESTRAINED = ("x3 pooled", "3000 images")
"""What the labels of members have where growing is of no use."""


class Played:
    """What came of a proof, by arm and member."""

    def __init__(self, folder: Path) -> None:
        """Read its results."""
        self._results = {
            (each.arm, each.member): each for each in ResultFile(folder / RESULTS_FILE)
        }
        self.members = list(dict.fromkeys(member for _, member in self._results))
        self.arms = {arm for arm, _ in self._results}

    def lead(self, arm: str, over: str) -> float:
        """Return the interquartile mean of the log ratios of all pairs."""
        ratios = [
            log_ratios(
                self._results[arm, member].test_errors, self._results[over, member].test_errors
            )
            for member in self.members
        ]
        return float(interquartile_mean(np.array(ratios)))

    def added(self, arm: str, *parts: str) -> float:
        """Return the share of parameters added on members whose labels have all these parts."""
        found = [self._results[arm, m] for m in self.members if all(part in m for part in parts)]
        return fmean(fmean(each.parameters) / each.host_parameters - 1 for each in found)


def main() -> None:
    """Print what the rule says, and why."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n", 1)[0])
    parser.add_argument("state", type=Path, help="folder of all stages")
    state = parser.parse_args().state
    select, few = Played(state / "select"), Played(state / "few")
    least = select.lead(BEFORE, WAIT) - MOST_WORSE
    eligible = {}
    for arm in (*CANDIDATES, BEFORE, SCHEDULE):
        lead, over = select.lead(arm, WAIT), select.lead(arm, SCHEDULE)
        added = select.added(arm, *RESTRAINED), few.added(arm)
        told = f"{arm}: {lead:+.4f} over waiting, {over:+.4f} over the best schedule, adds "
        print(told + f"{added[0]:.1%} and {added[1]:.1%} where it is of no use", file=sys.stderr)
        if arm in CANDIDATES and lead >= least and over > 0 and max(added) <= MOST_ADDED:
            eligible[arm] = lead
    if not eligible:
        print("none")
        sys.exit(1)
    print(max(eligible, key=lambda arm: eligible[arm]))


if __name__ == "__main__":
    main()
