"""The README keeps its word: its snippet runs as printed and pays, and its tree is the tree."""

from __future__ import annotations

import re
from pathlib import Path
from statistics import median
from typing import Any

import pytest

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "README.md").read_text(encoding="utf-8")
SEEDS = range(10, 15)


def snippet() -> str:
    found = re.search(r"## Ten lines\n.*?```python\n(.*?)```", PAGE, re.DOTALL)
    assert found is not None
    return found[1]


def test_the_snippet_has_at_most_ten_lines() -> None:
    assert sum(bool(line.strip()) for line in snippet().splitlines()) <= 10


@pytest.mark.timeout(900)
# One of the five grows nothing, and says so; its gain of 0 counts.
@pytest.mark.filterwarnings("ignore:Nothing grew:esper.leyline.errors.EsperWarning")
def test_the_snippet_runs_as_printed_and_beats_its_twin(
    capsys: pytest.CaptureFixture[str],
) -> None:
    code = snippet()
    assert code.count(f"{SEEDS[0]}  #") == 1
    gains = []
    for seed in SEEDS:
        names: dict[str, Any] = {}
        exec(code.replace(f"{SEEDS[0]}  #", f"{seed}  #"), names)
        summary = names["grown"].summary
        gains.append(summary.test_score - summary.twin_test_score)
    assert "Grown(CnnHost: test score " in capsys.readouterr().out
    assert median(gains) > 0.0, gains


def test_every_folder_of_the_package_has_its_line_in_the_tree() -> None:
    tree = re.search(r"```\nsrc/esper/\n(.*?)```", PAGE, re.DOTALL)
    assert tree is not None
    told = set(re.findall(r"^  ([a-z]+)/ ", tree[1], re.MULTILINE))
    there = {each.parent.name for each in (ROOT / "src" / "esper").glob("*/__init__.py")}
    assert told == there
    for name in re.findall(r"^([a-z]+)/ ", tree[1], re.MULTILINE):
        assert (ROOT / name).is_dir(), name
