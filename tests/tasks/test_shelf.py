from __future__ import annotations

import pytest
import torch

from esper.tasks import Member, get_task
from esper.tasks.presets import Digits
from esper.tasks.shelf import DataShelf

MEMBER = Member(data="digits", train_size=200)


def test_what_a_shelf_gives_is_what_a_task_loads() -> None:
    shelf = DataShelf(None, "cpu")
    noisy = MEMBER.replace(label_noise=0.3)
    for member in (MEMBER, noisy, MEMBER.replace(classes=(3, 5), train_size=0)):
        task = member.task()
        mine, own = shelf.load(task), task.load()
        for split in ("train", "val", "test"):
            assert torch.equal(mine.samples[split], own.samples[split])
            assert torch.equal(mine.targets[split], own.targets[split])
        assert torch.equal(mine.subset, own.subset)


def test_members_share_what_they_are_judged_on() -> None:
    shelf = DataShelf(None, "cpu")
    one, other = (shelf.load(MEMBER.replace(label_noise=n).task()) for n in (0.0, 0.3))
    for split in ("val", "test"):
        assert one.samples[split] is other.samples[split]
        assert one.targets[split] is other.targets[split]
    few = shelf.load(MEMBER.replace(classes=(3, 5)).task())
    assert few.samples["val"] is not one.samples["val"]
    carved = shelf.load(get_task("digits", val_fraction=0.1))
    assert carved.size("val") < one.size("val")


def test_a_source_is_read_once(monkeypatch: pytest.MonkeyPatch) -> None:
    reads = []
    read = Digits.read
    monkeypatch.setattr(Digits, "read", lambda self, path: reads.append(path) or read(self, path))
    shelf = DataShelf(None, "cpu")
    for noise in (0.0, 0.1, 0.2):
        shelf.load(MEMBER.replace(label_noise=noise).task())
    assert reads == [None]
