"""`python -m tests.harness`: every trial in full numbers, with a table of what was counted."""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from collections import Counter
from pathlib import Path
from typing import Any

from tests.harness.accidents import ACCIDENTS, KILLS, SUBJECTS, finish, happens_to, survive

_PER_PROCESS = 120
_PER_RUN = 4


def try_inputs(count: int, seed: int, folder: Path) -> tuple[Counter[str], list[str]]:
    """Carry out generated inputs in processes of their own; return counts and faults."""
    tried: Counter[str] = Counter()
    faults: list[str] = []
    for first in range(seed, seed + count, _PER_PROCESS):
        number = min(_PER_PROCESS, seed + count - first)
        done = subprocess.run(
            [sys.executable, "-m", "tests.harness.hostile", str(first), str(number), str(folder)],
            env={**os.environ, "OMP_NUM_THREADS": "1"},
            capture_output=True,
            text=True,
            check=False,
        )
        lines = done.stdout.splitlines()
        if done.returncode != 0 or not lines:
            last = lines[-1] if lines else "before the first"
            faults.append(
                f"the process ended with {done.returncode} at {last}: {done.stderr[-300:]}"
            )
            continue
        found = json.loads(lines[-1])
        tried.update(found["tried"])
        faults += found["faults"]
        print(
            f"# hostile inputs: {tried.total()} of {count}, faults: {found['faults']}", flush=True
        )
    return tried, faults


def try_accidents(counts: dict[str, int], seed: int) -> tuple[Counter[str], list[str]]:
    """Let accidents happen to every kind of run in turn; return counts and faults."""
    tried: Counter[str] = Counter()
    faults: list[str] = []
    wholes: dict[str, Any] = {}
    for name, count in counts.items():
        is_kill = name in KILLS
        subjects = [subject for subject in SUBJECTS if happens_to(name, subject)]
        number = 0
        while tried[name] < count:
            subject = subjects[number % len(subjects)]
            with tempfile.TemporaryDirectory() as place:
                if subject.name not in wholes:
                    problem = finish(subject, Path(place) / "whole")
                    assert problem is None, problem
                    wholes[subject.name] = subject.numbers(Path(place) / "whole")
                times = min(_PER_RUN, count - tried[name]) if is_kill else 1
                fault = survive(
                    subject, name, Path(place), wholes[subject.name], seed + number, times
                )
            tried[name] += times
            number += 1
            faults += [] if fault is None else [fault]
            print(f"# {name}: {tried[name]} of {count}, {subject.name}: {fault or 'survived'}")
            sys.stdout.flush()  # hours of work are not lost with the last line
    return tried, faults


def main() -> int:
    """Run everything and print the counts."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--inputs", type=int, default=2000, help="hostile inputs")
    parser.add_argument("--kills", type=int, default=200, help="of each kind of kill")
    parser.add_argument("--others", type=int, default=12, help="of every other accident")
    parser.add_argument("--only", choices=ACCIDENTS, help="one kind of accident")
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as place:
        tried, faults = try_inputs(options.inputs, options.seed, Path(place))
    counts = {
        name: options.kills if name in KILLS else options.others
        for name in ACCIDENTS
        if options.only in (None, name)
    }
    more, others = try_accidents(counts, options.seed)
    tried, faults = tried + more, [*faults, *others]
    for name, count in tried.items():
        print(f"{name:28} {count:6,}")
    print(f"{'in all':28} {tried.total():6,}   faults: {len(faults)}")
    for fault in faults:
        print(f"  {fault}")
    return int(bool(faults))


if __name__ == "__main__":
    raise SystemExit(main())
