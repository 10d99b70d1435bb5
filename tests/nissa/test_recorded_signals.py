from __future__ import annotations

import os
import signal
from collections.abc import Iterator

import pytest

from esper.nissa.recorded import SAME_REQUEST_S, stop_signals


@pytest.fixture(
    params=[signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGXCPU, signal.SIGUSR1],
    ids=lambda number: number.name,
)
def number(request: pytest.FixtureRequest) -> Iterator[int]:
    """A signal that is not silenced, as SIGHUP is where `nohup` started the tests."""
    found = signal.getsignal(request.param)
    if found is signal.SIG_IGN:
        signal.signal(request.param, signal.SIG_DFL)
    yield request.param
    signal.signal(request.param, found)


def test_a_signal_is_noted_and_a_later_one_stops_at_once(
    monkeypatch: pytest.MonkeyPatch, number: int
) -> None:
    now = 100.0
    monkeypatch.setattr("esper.nissa.recorded.time.monotonic", lambda: now)
    before = signal.getsignal(number)
    with stop_signals() as noted:
        assert not noted
        os.kill(os.getpid(), number)
        assert noted == [number]
        # The same request, sent to the process and to its group.
        now += SAME_REQUEST_S / 2
        os.kill(os.getpid(), number)
        assert noted == [number]
        now += SAME_REQUEST_S
        with pytest.raises(KeyboardInterrupt):
            os.kill(os.getpid(), number)
    assert signal.getsignal(number) is before


def test_a_signal_that_was_silenced_stays_silent() -> None:
    """`nohup esper train` goes on when its terminal closes."""
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        with stop_signals() as noted:
            os.kill(os.getpid(), signal.SIGHUP)
            assert not noted
        assert signal.getsignal(signal.SIGHUP) is signal.SIG_IGN
    finally:
        signal.signal(signal.SIGHUP, before)
