"""Run every test that trains a network under each instruction set, with one and two threads.

`python -m tools.portable [--set NAME]... [--threads N]... [--jobs N] [PYTEST ARGUMENT ...]`

A test that passes under only one instruction set depends on the last bits of its arithmetic, and
fails on other processors. Sets that this processor lacks are skipped by name. `tests/trains.py`
lists the tests that train. Further arguments go to pytest: paths instead of all tests, `-x`, `-k`.

Small networks are slower with two threads. So each set runs all tests with one thread, and a share
of them with two: every test runs with two threads under one set. `--threads 2` runs all tests under
each set.
"""

from __future__ import annotations

import argparse
import os
import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from tests.trains import SHARE
from tools.instruction_sets import INSTRUCTION_SETS, available

ROOT = Path(__file__).parents[1]
CHOSEN = "trains and (not slow or figures) and not gpu and not integrations"
"""The tests that are run; other slow ones would take hours."""


@dataclass(frozen=True)
class Setting:
    """Instruction set and threads of one pass over the tests."""

    instruction_set: str
    threads: int
    share: str | None = None
    """Which part of the tests it runs, such as `1/3`; None for all."""

    def __str__(self) -> str:
        threads = f"{self.threads} thread{'s' * (self.threads > 1)}"
        return ", ".join(filter(None, (self.instruction_set, threads, self.share)))

    def environment(self, base: Mapping[str, str]) -> dict[str, str]:
        """Return the environment of a process under this setting."""
        count = str(self.threads)
        return {
            **{name: value for name, value in base.items() if name != SHARE},
            **INSTRUCTION_SETS[self.instruction_set],
            "ESPER_THREADS": count,
            "OMP_NUM_THREADS": count,
            "MKL_NUM_THREADS": count,
            # Tests run side by side: a thread that waits leaves its core to them.
            "OMP_WAIT_POLICY": "PASSIVE",
            # PyTorch takes compiled code from its cache whichever instruction set it was made for.
            "TORCHINDUCTOR_CACHE_DIR": f"{tempfile.gettempdir()}/inductor-{self.instruction_set}",
            **({} if self.share is None else {SHARE: self.share}),
        }


@dataclass(frozen=True)
class Outcome:
    """Result of one pass."""

    setting: Setting
    code: int
    """Exit status of pytest."""
    counts: str
    """Its last line: how many passed, failed and were skipped."""
    failures: tuple[str, ...]
    seconds: float


def plan(sets: Sequence[str], threads: Sequence[int] | None = None) -> list[Setting]:
    """Return the settings to run: these threads, or all tests with one and shares with two."""
    if threads:
        return [Setting(name, count) for count in threads for name in sets]
    shares = [Setting(name, 2, f"{i}/{len(sets)}") for i, name in enumerate(sets, start=1)]
    return [*(Setting(name, 1) for name in sets), *shares]


def run_tests(setting: Setting, jobs: int, arguments: Sequence[str]) -> Outcome:
    """Run the tests under a setting; print pytest's output as it comes."""
    side_by_side = ["-n", str(jobs)] if jobs > 1 else []
    command = [sys.executable, "-m", "pytest", "-q", *side_by_side, "-m", CHOSEN, *arguments]
    started = time.monotonic()
    last, failures = "", []
    process = subprocess.Popen(
        command,
        cwd=ROOT,
        env=setting.environment(os.environ),
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        encoding="utf-8",
    )
    with process:
        assert process.stdout is not None
        for line in process.stdout:
            print(line, end="", flush=True)
            if line.startswith(("FAILED ", "ERROR ")):
                failures.append(line.split(" - ")[0].split(maxsplit=1)[1].strip())
            if line.strip():
                last = line
    counts = re.sub(r" in [\d.]+s.*", "", last.strip(" =\n"))
    seconds = time.monotonic() - started
    return Outcome(setting, process.returncode, counts, tuple(failures), seconds)


def summary(outcomes: Sequence[Outcome], missing: Sequence[str]) -> str:
    """Return one line for every setting, and one for every test that failed."""
    lines = []
    for each in outcomes:
        verdict = "ok" if each.code == 0 else "FAILED"
        lines.append(f"{each.setting!s:23} {verdict:7} {each.seconds:5.0f} s  {each.counts}")
        lines += [f"    {test}" for test in each.failures]
    lines += [f"{name:23} skipped: this processor does not have it" for name in missing]
    return "\n".join(lines)


def main(arguments: list[str]) -> int:
    """Run every setting that this processor has; return 0 if all tests passed in all of them."""
    parser = argparse.ArgumentParser(
        prog="python -m tools.portable",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--set", action="append", choices=tuple(INSTRUCTION_SETS), dest="sets")
    parser.add_argument("--threads", action="append", type=int, metavar="N")
    parser.add_argument("--jobs", type=int, default=2, help="tests that run side by side")
    options, passed_on = parser.parse_known_args(arguments)
    here, wanted = available(), options.sets or tuple(INSTRUCTION_SETS)
    missing = [name for name in wanted if name not in here]
    settings = plan([name for name in wanted if name in here], options.threads)
    outcomes = []
    for number, setting in enumerate(settings, start=1):
        print(f"== {number} of {len(settings)}: {setting}", flush=True)
        outcomes.append(run_tests(setting, options.jobs, passed_on))
    print(f"\n{summary(outcomes, missing)}")
    return int(not settings or any(each.code != 0 for each in outcomes))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
