"""Monitors: small pure functions over what was recorded, each with a threshold and an advice."""

from __future__ import annotations

from esper.nissa.monitors import behaviour as _behaviour
from esper.nissa.monitors import critic as _critic
from esper.nissa.monitors import memory as _memory
from esper.nissa.monitors import policy as _policy
from esper.nissa.monitors import progress as _progress
from esper.nissa.monitors import rewards as _rewards
from esper.nissa.monitors import stability as _stability
from esper.nissa.monitors.entropy import monitor_sparse_head_entropy
from esper.nissa.monitors.measures import (
    BANDS,
    light,
    monitor_advantage_bias_by_op,
    monitor_critic_op_sensitivity,
    monitor_per_head_ratios,
)
from esper.nissa.monitors.table import MONITORS, Finding, Monitor, register_monitor
from esper.nissa.monitors.watch import Watch

__all__ = [
    "BANDS",
    "MONITORS",
    "Finding",
    "Monitor",
    "Watch",
    "light",
    "monitor_advantage_bias_by_op",
    "monitor_critic_op_sensitivity",
    "monitor_per_head_ratios",
    "monitor_sparse_head_entropy",
    "register_monitor",
]

# Imported for what they register.
_BUILT_IN = (
    _behaviour,
    _critic,
    _memory,
    _policy,
    _progress,
    _rewards,
    _stability,
)
