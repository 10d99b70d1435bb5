"""The table of depth on the page of results is what the raw results say."""

from __future__ import annotations

from pathlib import Path

import pytest

from benchmarks.depth.cells import CELLS
from benchmarks.depth.command import read_records
from benchmarks.depth.verdict import Verdict, geometric_mean, judge

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs" / "results.md").read_text("utf-8")
ROWS = {
    "GPT, 9.6 M parameters, 65 million bytes of Python": "python-short",
    "the same, 262 million bytes": "python-long",
    "the same, 65 million bytes of prose": "prose",
    "GPT, 38 M parameters": "ladder",
    "GPT, 60 thousand parameters": "small",
    "ViT with mixup": "vit",
    "ViT without mixup": "vit-plain",
    "residual CNN, CIFAR-10": "cnn",
}


@pytest.fixture(scope="module")
def verdicts() -> dict[str, Verdict]:
    records = read_records(ROOT / "research" / "depth" / "results.jsonl")
    found = {name: judge(records, cell) for name, cell in CELLS.items()}
    return {name: verdict for name, verdict in found.items() if verdict is not None}


@pytest.mark.parametrize("words", ROWS)
def test_a_row_states_the_measured_ratio_and_front(
    words: str, verdicts: dict[str, Verdict]
) -> None:
    row = next(line for line in PAGE.splitlines() if line.startswith(f"| {words}"))
    _, _, ratio, front, _ = (part.strip() for part in row.split("|"))
    verdict = verdicts[ROWS[words]]
    expected = f"{verdict.ratio:.2f} times"
    assert ratio.startswith(f"more than {expected}" if verdict.is_bound else expected)
    if verdict.grown is None:
        assert front == "not measured yet"
    else:
        change = 100 * (verdict.grown.score / verdict.static.score - 1)
        stated = f"{abs(change):.1f} %" if abs(change) < 3 else f"{abs(change):.0f} %"
        assert f"{stated} {'lower' if change < 0 else '*higher*'}" in front


def test_the_mean_over_cells_is_stated(verdicts: dict[str, Verdict]) -> None:
    mean, low, high = geometric_mean([verdict.ratio for verdict in verdicts.values()])
    words = f"The geometric mean is {mean:.2f}, with a 95 % interval over these eight networks of"
    assert f"{words} {low:.2f} to {high:.2f}" in PAGE
