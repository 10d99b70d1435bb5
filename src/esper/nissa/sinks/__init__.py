"""Where a run is shown besides its store: TensorBoard, W&B, and whatever others add."""

from __future__ import annotations

from collections.abc import Iterable

from esper.nissa.sinks import tensorboard as _tensorboard
from esper.nissa.sinks import wandb as _wandb
from esper.nissa.sinks.sink import DEFAULT_SINKS, SINKS, Sink, SinkContext, make_sink, register_sink

__all__ = ["DEFAULT_SINKS", "SINKS", "Sink", "SinkContext", "check_sinks", "register_sink"]

# Imported for what they register.
_BUILT_IN = (_tensorboard, _wandb)


def check_sinks(sinks: Iterable[str | Sink]) -> None:
    """Refuse sinks that are unknown or cannot work here, before a run is made for them.

    One that fails later is reported, and the run goes on without it.
    """
    for sink in sinks:
        name, _ = make_sink(sink)
        if name == "wandb":
            _wandb.check_wandb()
