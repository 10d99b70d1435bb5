from __future__ import annotations

import os
import signal

import pytest

from esper.runs.recorded import SAME_REQUEST_S, stop_signals


@pytest.mark.parametrize(
    "number",
    [signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGXCPU, signal.SIGUSR1],
)
def test_a_signal_is_noted_and_a_later_one_stops_at_once(
    monkeypatch: pytest.MonkeyPatch, number: int
) -> None:
    now = 100.0
    monkeypatch.setattr("esper.runs.recorded.time.monotonic", lambda: now)
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
