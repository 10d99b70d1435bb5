"""Every page with Python on it has a test that runs it; those of a few lines are run here."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch

import esper
from benchmarks._pages import DOCS, python_blocks, run_blocks
from esper.simic.rewards import RewardConfig, RewardStep, Transition
from tests.growth.depth.models import make_gpt, tokens
from tests.lab.tasks.conftest import cifar_arrays, write_cifar_packed
from tests.simic.rewards.stories import Story

ROOT = DOCS.parent
HERE = "tests/integration/test_snippets.py"
HOW_TO = "tests/integration/test_how_to_pages.py"  # It lists the pages of its folder by itself.
RUN_BY = {
    "README.md": "tests/integration/test_readme.py",
    "docs/data.md": HERE,
    "docs/index.md": HERE,
    "docs/rewards.md": HERE,
    "docs/short-examples.md": "tests/integration/test_short_examples.py",
    "docs/tutorial-gpt.md": "tests/integration/test_tutorial_gpt.py",
    "docs/tutorial.md": "tests/integration/test_tutorial.py",
    "research/campaign/card.md": HERE,
    # The same file as the card above, which a test compares.
    "src/esper/tamiyo/weights/tamiyo/README.md": "tests/integration/test_claim.py",
}


def test_every_page_with_python_has_a_test_that_runs_it() -> None:
    folders = (ROOT / name for name in ("docs", "research", "src", "examples", "benchmarks"))
    pages = [*ROOT.glob("*.md"), *(page for folder in folders for page in folder.rglob("*.md"))]
    found = {str(page.relative_to(ROOT)) for page in pages if python_blocks(page)}
    assert {page for page in found if not page.startswith("docs/how-to/")} == set(RUN_BY)
    assert all((ROOT / test).is_file() for test in (*RUN_BY.values(), HOW_TO))


def test_the_packed_pair_is_undone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(write_cifar_packed(tmp_path / "packed"))
    images = run_blocks(python_blocks(DOCS / "data.md"))[0]["images"]
    pixels, _ = cifar_arrays()["test_batch"]
    assert np.array_equal(images, pixels.reshape(-1, 3, 32, 32))


def test_a_reward_is_computed() -> None:
    story = Story(RewardConfig(mode="shaped", disable_pbrs=True))
    seen: list[Transition] = []
    compute = story.reward.step

    def step(transition: Transition) -> RewardStep:
        seen.append(transition)
        return compute(transition)

    story.reward.step = step  # type: ignore[method-assign]
    signals, paid = story.signals, story.germinate()
    known = {"signals": signals, "transition": seen[0]}
    found = run_blocks(python_blocks(DOCS / "rewards.md"), known)[0]["step"]
    assert torch.equal(found.total, paid.total)
    assert set(found.terms) == set(paid.terms)


def test_the_lines_of_the_front_page_deepen() -> None:
    model = make_gpt()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    (block,) = python_blocks(DOCS / "index.md")
    training = "model(example).sum().backward(); optimizer.step()"
    assert block.count("\n...\n") == 1
    known = {"esper": esper, "model": model, "optimizer": optimizer, "example": tokens(0)}
    depth = run_blocks([block.replace("\n...\n", f"\n{training}\n")], known)[0]["depth"]
    assert depth.steps == 1
    assert depth.awake == {"blocks": 1}


def test_the_controller_of_the_card_is_loaded() -> None:
    card = ROOT / "research" / "campaign" / "card.md"
    assert run_blocks(python_blocks(card))[0]["tamiyo"].card == card.read_text(encoding="utf-8")
