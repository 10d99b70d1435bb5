"""Tasks on text: those that need no files, at all levels, and those that read a text."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from esper.growth.depth.stacks import find_stacks
from esper.lab.tasks import DataCache, get_task
from esper.lab.tasks.data.text import fold
from esper.leyline.errors import ConfigError, UsageError
from esper.testing import check_task

LEVELS = {
    "sums": (1, 6),
    "links": (2, 8),
    "facts": (1, 3_000),
    "mirrors": (1, 24),
    "copies": (1, 24),
    "sorting": (1, 24),
    "repeats": (1, 8),
}
"""The ends of what is tried; `facts` goes up to 100,000."""


@pytest.mark.parametrize("name", ["sources", "chain", *LEVELS])
def test_contract_on_embedded_text(name: str) -> None:
    check_task(name)


def test_contract_on_small_text(tmp_path: Path) -> None:
    path = tmp_path / "book.txt"
    path.write_text("Once upon a time there was a seed. " * 400, encoding="utf-8")
    check_task("stories", path)


def test_sources_have_a_stack_that_can_be_deepened() -> None:
    task = get_task("sources")
    assert find_stacks(task.build_host(0), task.example_input()) == {"layers": 4}


@pytest.mark.parametrize("size", [500, 20_000])
def test_embedded_text_can_be_small_and_wrong(size: int) -> None:
    task = get_task("sums", train_size=size, label_noise=0.3)
    data = task.load()
    assert data.size("train") == len(data.kept.unique()) == size
    x, y = data.batch("train", data.indices("train"))
    wrong = (x[:, 1:] != y[:, :-1]).double().mean()
    # 500 sequences have 31,500 such targets: five standard deviations are 0.013.
    assert float(wrong) == pytest.approx(0.3, abs=0.013)
    assert set(y.unique().tolist()) == set(b"0123456789+*=\n")


@pytest.mark.parametrize("name", ["sources", "chain", *LEVELS])
def test_embedded_text_gives_way_to_a_text_of_ones_own(tmp_path: Path, name: str) -> None:
    path = tmp_path / "book.txt"
    path.write_text("Once upon a time there was a seed. " * 400, encoding="utf-8")
    assert get_task(name).read(path).origin == str(path)


@pytest.mark.parametrize("name", LEVELS)
def test_every_level_is_another_text(name: str) -> None:
    texts = [get_task(name, level=level).load().splits.samples["train"] for level in LEVELS[name]]
    usual = get_task(name).load().splits.samples["train"]
    assert not any(len(text) == len(usual) and bool((text == usual).all()) for text in texts)
    assert all(len(text) > 20_000 for text in texts)


def test_levels_are_kept_apart_where_data_is_shared() -> None:
    cache = DataCache()
    easy, hard, usual, same = (
        cache.load(task)
        for task in (
            get_task("mirrors", level=2),
            get_task("mirrors", level=9),
            get_task("mirrors"),
            get_task("mirrors", level=6),
        )
    )
    assert easy.splits is not hard.splits
    assert usual.splits is same.splits, "the usual level is one of them"


@pytest.mark.parametrize("name", ["sources", "chain", *LEVELS])
def test_a_text_of_64_tokens_is_the_same_text_folded(name: str) -> None:
    whole = get_task(name).load().splits.samples
    task = get_task(name, num_classes=64)
    data = task.load()
    folded = data.splits.samples
    assert data.num_classes == 64
    for split in ("train", "val", "test"):
        assert np.array_equal(folded[split].numpy(), fold(whole[split].numpy()))  # type: ignore[index]
    assert int(folded["train"].max()) < 64
    assert task.source_key != get_task(name).source_key


@pytest.mark.parametrize("name", LEVELS)
def test_levels_beyond_the_range_are_refused(name: str) -> None:
    most = LEVELS[name][1] if name != "facts" else 100_000
    with pytest.raises(
        ConfigError, match=rf"task '{name}' has levels \d to {most}, got {most + 1}"
    ):
        get_task(name, level=most + 1)


@pytest.mark.parametrize("name", ["chain", "sources", "digits"])
def test_tasks_without_levels_refuse_one(name: str) -> None:
    with pytest.raises(
        ConfigError, match=f"task '{name}' has no levels, got level=3; leave it out"
    ):
        get_task(name, level=3)


def test_a_level_is_not_for_a_text_of_ones_own(tmp_path: Path) -> None:
    path = tmp_path / "book.txt"
    path.write_text("Once upon a time there was a seed. " * 400, encoding="utf-8")
    with pytest.raises(UsageError, match="level=5 is for the computed text of task 'sums'"):
        get_task("sums", level=5).read(path)
