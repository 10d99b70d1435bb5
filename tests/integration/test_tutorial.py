"""The tutorial keeps its word: it runs as it stands, and prints what it says."""

from __future__ import annotations

import re

from benchmarks.tutorial import PAGE, run_tutorial

TEXT = PAGE.read_text(encoding="utf-8")


def masked(line: str) -> str:
    """A line without decimals, which differ from one processor to the next."""
    return re.sub(r"[+−-]?\d+\.\d+", "#", line)


def test_it_runs_as_it_stands_and_prints_what_it_says() -> None:
    names, said = run_tutorial()
    printed = {masked(line) for line in said.splitlines()}
    told = [
        line
        for block in re.findall(r"```text\n(.*?)```", TEXT, re.DOTALL)
        for line in block.splitlines()
    ]
    assert len(told) > 6
    assert [line for line in told if masked(line) not in printed] == []
    summary = names["grown"].summary
    assert summary.test_score > summary.twin_test_score
    assert names["grown"].why == ()
    assert type(names["again"]).__name__ == "SmallNet"
