"""Monitors: small pure functions of recorded rows, each with thresholds and advice."""

from __future__ import annotations

from esper.nissa.monitors import behaviour as _behaviour
from esper.nissa.monitors import behaviour as _progress
from esper.nissa.monitors import critic as _critic
from esper.nissa.monitors import policy as _policy
from esper.nissa.monitors import rewards as _rewards
from esper.nissa.monitors import stability as _stability
from esper.nissa.monitors.monitor import BANDS, MONITORS, Finding, Watch, register_monitor

__all__ = [
    "BANDS",
    "MONITORS",
    "Finding",
    "Watch",
    "register_monitor",
]

# Imported for what they register.
_BUILT_IN = (_behaviour, _critic, _policy, _progress, _rewards, _stability)
