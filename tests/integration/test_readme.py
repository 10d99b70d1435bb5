"""The README keeps its word: it is short, its lines run, its figures and its tree are true."""

from __future__ import annotations

import inspect
import re
from pathlib import Path

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import esper
from benchmarks._pages import python_blocks
from benchmarks.depth.cells import CELLS
from benchmarks.depth.command import read_records
from benchmarks.depth.verdict import geometric_mean, judge
from esper.growth.criterion import make_criterion
from tests.growth.depth.models import make_gpt, tokens
from tests.pages import section
from tests.plots import make_batches, make_net

ROOT = Path(__file__).parents[2]
PAGE = ROOT / "README.md"
TEXT = PAGE.read_text(encoding="utf-8")


def test_it_has_at_most_700_words() -> None:
    assert len(TEXT.split()) <= 700


def test_the_lines_that_deepen_run_in_a_loop_of_ones_own() -> None:
    torch.manual_seed(0)
    model = make_gpt()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    windows = [tokens(step) for step in range(10)]
    batches = [(window[:, :-1], window[:, 1:]) for window in windows]
    names = {"esper": esper, "F": F, "model": model, "optimizer": optimizer, "batches": batches}
    deepen, _ = python_blocks(PAGE)
    exec(deepen, names)
    assert len([line for line in deepen.splitlines() if line.strip()]) == 6
    depth = names["depth"]
    assert isinstance(depth, esper.Deepen)
    assert depth.awake == {"blocks": 4}


@pytest.mark.filterwarnings("ignore:.*too few to grow in", "ignore:Nothing grew")
def test_the_lines_that_grow_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    torch.manual_seed(0)
    batches = make_batches()
    names = {"esper": esper, "torch": torch, "model": make_net(), "example": batches[0][0]}
    names |= dict.fromkeys(("train", "val", "test"), batches)
    _, grow = python_blocks(PAGE)
    assert len([line for line in grow.splitlines() if line.strip()]) == 6
    exec(grow.replace("epochs=40", "epochs=3"), names)
    assert {path.name for path in tmp_path.iterdir()} >= {"growth.svg", "grown.pt"}


def test_the_losses_and_the_controller_it_names_are_those_of_grow() -> None:
    assert "`tamiyo`, the default" in TEXT
    assert inspect.signature(esper.grow).parameters["controller"].default == "tamiyo"
    named = re.search(r"give `loss=(.*?)` \(next tokens\) or `(.*?)`", TEXT)
    assert named is not None
    scores, tokens = torch.randn(3, 5, 7), torch.randint(7, (3, 5))
    make_criterion(eval(named[1]), scores, tokens)
    make_criterion(eval(named[2], {"nn": nn}), torch.randn(3, 2), torch.randn(3, 2))


def test_the_saving_it_states_is_the_measured_one() -> None:
    records = read_records(ROOT / "research" / "depth" / "results.jsonl")
    found = [judge(records, cell) for cell in CELLS.values()]
    ratios = [verdict.ratio for verdict in found if verdict is not None]
    mean, _, _ = geometric_mean(ratios)
    stated = f"{mean:.2f} times the compute"
    assert stated in TEXT
    assert f"{min(ratios):.2f} to {max(ratios):.2f}" in TEXT


def test_every_row_of_when_to_use_it_has_a_figure_and_leads_to_its_command() -> None:
    table = section(TEXT, "When to use it, and when not")
    rows = [line for line in table.splitlines() if line.startswith("| ")][1:]
    assert len(rows) == 7
    results = (ROOT / "docs" / "results.md").read_text(encoding="utf-8")
    parts = re.split(r"^## (.*)\n", results, flags=re.MULTILINE)[1:]
    commands = {
        heading.lower().replace(" ", "-").replace("?", ""): text
        for heading, text in zip(parts[::2], parts[1::2], strict=True)
    }
    for row in rows:
        measured = row.strip("| ").split(" | ")[2]
        assert re.search(r"\d", measured), row
        (anchor, *_) = re.findall(r"\(docs/results\.md#([a-z-]+)\)", measured)
        assert re.search(r"python -m benchmarks|esper prove", commands[anchor]), row


def test_every_folder_of_the_package_has_its_line_in_the_tree() -> None:
    tree = re.search(r"```\nsrc/esper/\n(.*?)```", TEXT, re.DOTALL)
    assert tree is not None
    stated = set(re.findall(r"^  ([a-z]+)/ ", tree[1], re.MULTILINE))
    there = {each.parent.name for each in (ROOT / "src" / "esper").glob("*/__init__.py")}
    assert stated == there
    for name in re.findall(r"^([a-z]+)/ ", tree[1], re.MULTILINE):
        assert (ROOT / name).is_dir(), name


def test_every_link_leads_somewhere() -> None:
    for target in re.findall(r"\]\(([^()\s]+)\)", TEXT):
        path, _, anchor = target.partition("#")
        assert (ROOT / path).exists(), target
        if anchor:
            page = (ROOT / path).read_text(encoding="utf-8").lower()
            headings = re.findall(r"^##+ (.*)$", page, re.MULTILINE)
            slugs = [re.sub(r"[^a-z0-9 -]", "", heading).replace(" ", "-") for heading in headings]
            assert anchor in slugs, target
