"""What processes have loaded, and that they forget what nobody uses."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
import torch

from esper.lab.population.engine import Condition, StrategyError
from esper.lab.population.worker_pool import _Worker, pack_condition, unpack_condition
from esper.lab.population.workers import WorkerShelf
from esper.lab.tasks import DataCache
from esper.lab.tasks.dataset import choose_data
from tests.lab.population.tiny_tasks import TinyImages, TinyText


class OnePool:
    """Two workers in this process, which answer at once."""

    is_usable = True

    def __init__(self) -> None:
        self.workers = [_Worker(), _Worker()]
        self.asked: list[str] = []
        self._serial = 0

    def next_serial(self) -> int:
        self._serial += 1
        return self._serial

    def ask(self, process: int, name: str, *arguments: Any) -> int:
        self.asked.append(name)
        getattr(self.workers[process], name)(*arguments)
        return self.next_serial()

    def answers(self, serials: dict[int, int]) -> dict[int, Any]:
        return dict.fromkeys(serials)


def conditions(*changes: dict[str, Any]) -> list[Condition]:
    shelf = DataCache()
    tasks = [TinyImages(TinyImages.defaults.replace(**each)) for each in changes]
    return [Condition(task, shelf.load(task)) for task in tasks]


def loaded(pool: OnePool) -> Sequence[tuple[int, int]]:
    return [(len(worker._sources), len(worker._conditions)) for worker in pool.workers]


def test_a_source_is_sent_once_and_kept_while_used() -> None:
    pool = OnePool()
    shelf = WorkerShelf(pool, 2)  # type: ignore[arg-type]
    plain, small, noisy = conditions({}, {"train_size": 9}, {"label_noise": 0.5})
    shelf.use([plain, small])
    shelf.use([small, noisy])
    assert pool.asked.count("load_source") == 2
    assert pool.asked.count("load") == 6
    assert loaded(pool) == [(1, 3)] * 2
    assert len({shelf.number_of(each) for each in (plain, small, noisy)}) == 3
    shelf.drop([plain, small])
    assert loaded(pool) == [(1, 2)] * 2, "somebody else still uses one of them"
    shelf.drop([small, noisy])
    assert loaded(pool) == [(0, 0)] * 2


def test_what_arrives_is_what_was_sent() -> None:
    (one,) = conditions({"train_size": 9, "label_noise": 0.5})
    (plain,) = conditions({})
    for each in (one, plain):
        packed = pack_condition(each)
        assert len(packed) < 20_000, "samples stay where they are"
        (task_class, *_), config, data = unpack_condition(packed, each.data.splits)
        assert (task_class, config) == (TinyImages, each.task.config)
        assert data.splits is each.data.splits
        for name in ("kept", "train_targets", "subset"):
            assert torch.equal(getattr(data, name), getattr(each.data, name))
    shared = unpack_condition(pack_condition(plain), plain.data.splits)[2]
    assert shared.train_targets is plain.data.splits.targets["train"]
    text = TinyText()
    tokens = Condition(text, text.load())
    assert unpack_condition(pack_condition(tokens), tokens.data.splits)[2].kind == "tokens"
    noisy = Condition(text, choose_data(tokens.data.splits, label_noise=0.5))
    arrived = unpack_condition(pack_condition(noisy), noisy.data.splits)[2]
    indices = noisy.data.indices("train")
    for sent, found in zip(
        noisy.data.batch("train", indices), arrived.batch("train", indices), strict=True
    ):
        assert torch.equal(sent, found)


def test_what_cannot_travel_is_refused_and_leaves_nothing_behind() -> None:
    class Local(TinyImages):
        name = "local"

    pool = OnePool()
    shelf = WorkerShelf(pool, 2)  # type: ignore[arg-type]
    task = Local()
    with pytest.raises(StrategyError, match="task 'local' cannot be sent to worker processes"):
        shelf.use([Condition(task, task.load())])
    assert loaded(pool) == [(0, 0)] * 2
    (plain,) = conditions({})
    shelf.use([plain])
    assert loaded(pool) == [(1, 1)] * 2
