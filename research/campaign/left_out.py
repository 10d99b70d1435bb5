"""What a search teaches about members it never played: each member left out in turn.

    python research/campaign/left_out.py STATE/search_first

For members left out, schedules are chosen by what the others say (validation errors, likeness of
descriptors), and judged by their own test errors: the best single schedule, and lessons of so many
schedules beside waiting. Which schedules these are is chosen without the member too.
"""

from __future__ import annotations

import argparse
from pathlib import Path
from statistics import fmean

from esper.lab.proof.choose import Ratios, Table, best_by_likeness, best_single, read_table
from esper.lab.proof.results import RESULTS_FILE, ResultFile
from esper.lab.tasks import get_family
from esper.lab.tasks.member import descriptors

PRICES = (0.0, 0.01, 0.02, 0.05)
MOST = (1, 2, 3, 10)


def worth(own: dict[str, Ratios], arm: str | None) -> tuple[float, float]:
    """Return the test log ratio of an arm on a member, and its parameters over the host's."""
    return (0.0, 1.0) if arm is None else (own[arm].mean("test"), fmean(own[arm].parameters))


def main() -> None:
    """Print one row per rule."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n", 1)[0])
    parser.add_argument("search", type=Path, help="folder of `esper search`")
    parser.add_argument("--family", default="image16_family")
    asked = parser.parse_args()
    table = read_table(list(ResultFile(asked.search / RESULTS_FILE)), "wait")
    known = {member.label: member for member in get_family(asked.family).members("train")}
    places = {label: descriptors(known[label].task()) for label in table}
    arms = [arm for arm in next(iter(table.values())) if not arm.startswith("heuristic")]
    rest: dict[str, Table] = {
        out: {label: own for label, own in table.items() if label != out} for out in table
    }
    single = {out: worth(table[out], best_single(rest[out], arms, "val")) for out in table}
    print("| what is chosen | price | test log ratio | over the best single | parameters |")
    print("|---|---|---|---|---|")
    gain, size = (fmean(each) for each in zip(*single.values(), strict=True))
    print(f"| the best single schedule | – | {gain:+.4f} | – | {size:.2f} |")
    for most in MOST:
        for price in PRICES:
            found = {}
            for out in table:
                chosen = best_by_likeness(rest[out], arms, "val", places, price=price, most=most)
                found[out] = worth(table[out], chosen[out])
            gain, size = (fmean(each) for each in zip(*found.values(), strict=True))
            over = fmean(found[out][0] - single[out][0] for out in table)
            print(f"| {most} or waiting | {price} | {gain:+.4f} | {over:+.4f} | {size:.2f} |")


if __name__ == "__main__":
    main()
