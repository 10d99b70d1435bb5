from __future__ import annotations

import itertools
from collections.abc import Callable
from types import SimpleNamespace

import pytest

from esper.lab import bench
from esper.lab.bench import compare, take_turns


def test_the_ratio_is_that_of_neighbours(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = SimpleNamespace(now=0.0)

    def taking(*turns: float) -> Callable[[], None]:
        """Return work whose calls take these seconds; two calls are timed together."""
        seconds = itertools.chain.from_iterable((each, each) for each in turns)

        def work() -> None:
            clock.now += next(seconds)

        return work

    def read() -> float:
        return float(clock.now)

    monkeypatch.setattr(bench, "time", SimpleNamespace(perf_counter=read, thread_time=read))
    # The first turn of each only warms up.
    ours, theirs = taking(9.0, 1.0, 2.0, 4.0), taking(9.0, 8.0, 4.0, 20.0)
    result = compare("work", ours, theirs, against="longer", rounds=3, calls=2)
    assert (result.least_ratio, result.ratio, result.greatest_ratio) == (2.0, 5.0, 8.0)
    assert (result.esper_ms, result.reference_ms) == (2000.0, 8000.0)
    assert result.cpu_ratio == 5.0


def test_calls_are_timed_together_and_the_first_turn_only_warms_up() -> None:
    ours, theirs = [], []
    pairs = take_turns(
        lambda: ours.append(1), lambda: theirs.append(1), rounds=3, calls=4, reference_calls=2
    )
    assert (len(pairs), len(ours), len(theirs)) == (3, 16, 8)
    assert all(own.wall > 0 and own.cpu > 0 for own, _ in pairs)
