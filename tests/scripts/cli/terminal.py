"""Running the command in this process or in one of its own, and what it said."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import pytest

from esper.scripts.cli.main import main


@dataclass(frozen=True)
class Said:
    """What a command left behind."""

    code: int
    out: str
    err: str

    def complaint(self) -> str:
        """Return the one line of a wrong request, after checking that it is just that."""
        assert self.code == 2, self
        assert self.out == ""
        lines = self.err.splitlines()
        assert len(lines) == 1, self.err
        assert lines[0].startswith("esper"), self.err
        assert "Traceback" not in self.err
        assert lines[0].isprintable()
        return lines[0]


def esper(capsys: pytest.CaptureFixture[str], *arguments: object) -> Said:
    """Run the command in this process."""
    capsys.readouterr()
    try:
        code = main([str(argument) for argument in arguments])
    except SystemExit as exit_:
        code = int(str(exit_.code))
    said = capsys.readouterr()
    return Said(code, said.out, said.err)


def environment(**changes: str) -> dict[str, str]:
    """Return an environment in which nothing but the arguments matters.

    A process computes as this one does, with the same instruction set and as many threads.
    """
    kept = {key: value for key, value in os.environ.items() if not key.startswith("ESPER_")}
    threads = os.environ["ESPER_THREADS"]
    return {**kept, "OMP_NUM_THREADS": threads, "ESPER_THREADS": threads, **changes}


def start(
    *arguments: object, cwd: Path | None = None, env: Mapping[str, str] | None = None
) -> subprocess.Popen[str]:
    """Start the command in a process of its own."""
    return subprocess.Popen(
        [sys.executable, "-m", "esper.scripts.cli.main", *map(str, arguments)],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        encoding="utf-8",
        cwd=cwd,
        env=dict(env or environment()),
    )


def esper_process(
    *arguments: object, cwd: Path | None = None, env: Mapping[str, str] | None = None
) -> Said:
    """Run the command in a process of its own."""
    process = start(*arguments, cwd=cwd, env=env)
    out, err = process.communicate(timeout=120)
    return Said(process.returncode, out, err)
