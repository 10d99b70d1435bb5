"""Sources are read once, whatever is done with them."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from esper.lab.tasks import DataCache, get_task
from esper.lab.tasks.presets import Digits


@pytest.fixture
def reads(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Note every time the digits are read."""
    noted: list[str] = []
    read = Digits.read

    def note(self: Digits, data_path: Any) -> Any:
        noted.append(self.name)
        return read(self, data_path)

    monkeypatch.setattr(Digits, "read", note)
    return noted


def test_tasks_on_one_source_share_what_is_read(reads: list[str]) -> None:
    cache = DataCache()
    plain = cache.load(get_task("digits"))
    small = cache.load(get_task("digits", train_size=100, learning_rate=0.1))
    noisy = cache.load(get_task("digits", label_noise=0.3, horizon=9, validation_samples=10))
    assert reads == ["digits"]
    assert plain.splits is small.splits is noisy.splits
    assert cache.load(get_task("digits", batch_size=8)) is plain, "it uses the same of it"
    assert [data.size("train") for data in (plain, small)] == [1079, 100]
    assert len(noisy.subset) == 10


def test_other_splits_are_of_the_same_source(reads: list[str]) -> None:
    cache = DataCache()
    one, other = (
        cache.load(get_task("digits")),
        cache.load(get_task("digits", val_fraction=0.1)),
    )
    assert one.splits is not other.splits
    assert one.size("val") > other.size("val")
    assert len(reads) == 1


def test_what_no_task_needs_is_forgotten(reads: list[str]) -> None:
    cache, task = DataCache(), get_task("digits")
    first = cache.load(task)
    cache.forget_all_but([get_task("digits", train_size=9)])
    assert cache.load(task).splits is first.splits
    cache.forget_all_but([])
    assert cache.load(task).splits is not first.splits
    assert len(reads) == 2


def test_data_is_what_a_task_loads_alone() -> None:
    task = get_task("digits", train_size=50, label_noise=0.2)
    shared, alone = DataCache().load(task), task.load()
    order = shared.order(3, 1)
    assert torch.equal(order, alone.order(3, 1))
    for one, other in zip(shared.batch("train", order), alone.batch("train", order), strict=True):
        assert torch.equal(one, other)


def test_some_classes_are_splits_of_their_own(reads: list[str]) -> None:
    cache = DataCache()
    whole = cache.load(get_task("digits"))
    few, noisy = (
        cache.load(get_task("digits", classes=(3, 5), num_classes=2, label_noise=noise))
        for noise in (0.0, 0.3)
    )
    assert few.splits is noisy.splits is not whole.splits
    assert few.size("val") < whole.size("val")
    assert len(reads) == 1
