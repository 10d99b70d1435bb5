"""The tutorial keeps its word: it runs as it stands, and prints what it shows.

What training ends with differs from one processor to the next, so what the page shows of one run is
compared in its form; tests/integration/test_figures.py has what it claims to gain.
"""

from __future__ import annotations

import re
from typing import Any

import pytest

from benchmarks.tutorial import PAGE, run_tutorial
from esper.kasmina.blueprints import blueprint_names
from tests.pages import ONE_RUN

TEXT = PAGE.read_text(encoding="utf-8")


@pytest.fixture(scope="module")
def tutorial() -> tuple[dict[str, Any], str]:
    return run_tutorial()


def blocks() -> list[tuple[str, bool]]:
    """Return the output that the page shows, and whether it is what one run printed."""
    found = re.findall(r"(?:^\((.*?)\)\n\n)?```text\n(.*?)```", TEXT, re.DOTALL | re.MULTILINE)
    return [(shown, remark.lower().startswith(ONE_RUN)) for remark, shown in found]


def form(line: str) -> str:
    """Return a line without what depends on the run: numbers, and what grew where, and when."""
    line = re.sub(r"grew .*\)", "grew #)", line)
    line = re.sub(rf"\b({'|'.join(blueprint_names())})\b", "#", line)
    line = re.sub(r"\b(stem|late)\b", "#", line)
    line = re.sub(r", \w+$", ", #", line)
    # Which network is better than a static one, and by how much.
    line = re.sub(r"^(Neither is|The (grown|static) network is) .* on the validation", "#", line)
    return re.sub(r"[+−-]?\d[\d,]*(\.\d+)?", "#", line)


def test_it_prints_what_it_shows(tutorial: tuple[dict[str, Any], str]) -> None:
    printed = tutorial[1].splitlines()
    forms = {form(line) for line in printed}
    shown = blocks()
    assert [is_one_run for _, is_one_run in shown] == [False, False, True, True, True]
    for block, is_one_run in shown:
        for line in block.splitlines():
            assert (form(line) in forms) if is_one_run else (line in printed), line


def test_one_run_grows_and_can_be_used(tutorial: tuple[dict[str, Any], str]) -> None:
    names = tutorial[0]
    grown = names["grown"]
    kept = [seed for seed in grown.summary.seeds if seed.fate == "fossilized"]
    assert kept or grown.why
    assert grown.summary.parameters_before == 754
    assert grown.summary.test_score > grown.summary.twin_test_score
    assert type(names["again"]).__name__ == "SmallNet"
