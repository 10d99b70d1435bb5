from __future__ import annotations

import os
import signal

import pytest

from esper.cli.interruption import stop_signals


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_is_noted_and_a_second_one_stops_at_once(number: int) -> None:
    before = signal.getsignal(number)
    with stop_signals() as noted:
        assert not noted
        os.kill(os.getpid(), number)
        assert noted == [number]
        with pytest.raises(KeyboardInterrupt):
            os.kill(os.getpid(), number)
    assert signal.getsignal(number) is before
