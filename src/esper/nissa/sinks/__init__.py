"""Sinks, which show a run beside its store: TensorBoard, W&B, and registered ones."""

from __future__ import annotations

from collections.abc import Iterable

from esper.nissa.sinks import tensorboard as _tensorboard
from esper.nissa.sinks import wandb as _wandb
from esper.nissa.sinks.sink import DEFAULT_SINKS, SINKS, Sink, SinkContext, make_sink, register_sink

__all__ = ["DEFAULT_SINKS", "SINKS", "Sink", "SinkContext", "check_sinks", "register_sink"]

# Imported for what they register.
_BUILT_IN = (_tensorboard, _wandb)


def check_sinks(sinks: Iterable[str | Sink]) -> None:
    """Raise for sinks that are unknown or cannot work here, before a run is created."""
    for sink in sinks:
        name, _ = make_sink(sink)
        if name == "wandb":
            _wandb.check_wandb()
