"""Who is told of a change."""

from __future__ import annotations

from esper.kasmina.listeners import Listeners


class Ear:
    def __init__(self) -> None:
        self.count = 0

    def hear(self) -> None:
        self.count += 1


def test_everybody_is_told_each_time() -> None:
    listeners, one, two = Listeners(), Ear(), Ear()
    listeners.add(one.hear)
    listeners.tell()
    listeners.add(two.hear)
    listeners.tell()
    assert (one.count, two.count) == (2, 1)


def test_listening_keeps_nobody_alive() -> None:
    listeners, ear, gone = Listeners(), Ear(), Ear()
    listeners.add(gone.hear)
    listeners.add(ear.hear)
    del gone
    listeners.tell()
    assert ear.count == 1
    assert len(listeners) == 1
