"""What is kept of a process that may die: as much as its state rests on, and no more."""

from __future__ import annotations

from typing import Any

from esper.lab.population.worker_handle import Journal, describe


class Told:
    """A journal, and requests that are answered at once."""

    def __init__(self) -> None:
        self.journal = Journal()
        self._serial = 0

    def ask(self, name: str, *arguments: Any, answered: bool = True) -> int:
        self._serial += 1
        self.journal.note(describe(self._serial, name, arguments, name.encode()))
        if answered:
            self.journal.answered(self._serial)
        return self._serial

    @property
    def kept(self) -> list[str]:
        return [f"{each.name} {each.about}" for each, _ in self.journal.requests()]


def loaded() -> Told:
    told = Told()
    told.ask("load_source", 10, object())
    told.ask("load", 20, 10, [], (), b"")
    told.ask("load", 21, 10, [], (), b"")
    return told


def test_what_only_asks_is_kept_until_it_is_answered() -> None:
    told = loaded()
    told.ask("open", 30, [20], [1], None)
    told.ask("train", 30, [0])
    waiting = told.ask("measure", 30, [], answered=False)
    assert told.kept[-3:] == ["open 30", "train 30", "measure 30"]
    assert [awaited for _, awaited in told.journal.requests()] == [False] * 5 + [True]
    told.journal.answered(waiting)
    assert told.kept[-1] == "train 30"


def test_rows_that_are_closed_leave_nothing() -> None:
    told = loaded()
    told.ask("open", 30, [20], [1], None)
    told.ask("open", 31, [21], [1], None)
    told.ask("change", 30, "sync", None)
    told.ask("train", 31, [0])
    told.ask("close", 30)
    assert told.kept == ["load_source 10", "load 20", "load 21", "open 31", "train 31"]


def test_tasks_are_kept_for_the_rows_that_were_built_from_them() -> None:
    told = loaded()
    told.ask("open", 30, [20], [1], None)
    told.ask("adopt", 30, 0, 21, 5)
    told.ask("unload", [20, 21], [10])
    assert told.kept[:3] == ["load_source 10", "load 20", "load 21"]
    assert told.journal.unloaded == [10, 20, 21]
    told.ask("close", 30)
    assert len(told.journal) == 0
    assert told.journal.unloaded == []


def test_tasks_without_rows_are_forgotten_at_once() -> None:
    told = loaded()
    told.ask("unload", [20], [])
    assert told.kept == ["load_source 10", "load 21"]
    told.ask("unload", [21], [10])
    assert told.kept == []


def test_the_memory_of_a_source_is_shared_anew() -> None:
    told = Told()
    source = object()
    told.ask("load_source", 10, source)
    ((request, _),) = told.journal.requests()
    assert request.shared is source
    assert not request.packed
