"""The tutorial on a GPT runs as it stands, with a smaller budget."""

from __future__ import annotations

from pathlib import Path

import pytest

from benchmarks._pages import DOCS, python_blocks, run_blocks

PAGE = DOCS / "tutorial-gpt.md"


def test_the_page_runs_and_spends_the_same_compute_twice(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    blocks = python_blocks(PAGE)
    small = [block.replace("budget = 1.2e12", "budget = 1.5e10") for block in blocks]
    assert small != blocks
    names, said = run_blocks(small)
    assert "{'blocks': 4}" in said
    static, grown = [line for line in said.splitlines() if "steps, " in line]
    steps = [int(line.split(" steps")[0]) for line in (static, grown)]
    flops = [float(line.split(", ")[1].split()[0]) for line in (static, grown)]
    assert steps[1] > steps[0]
    assert flops[1] == pytest.approx(flops[0], rel=0.05)
    assert (tmp_path / "gpt.pt").is_file()
    assert names["write"](names["grown"], "def ", 3).startswith("def ")
