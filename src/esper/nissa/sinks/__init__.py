"""Where a run is shown besides its store: TensorBoard, W&B, and whatever others add."""

from __future__ import annotations

from esper.nissa.sinks import tensorboard as _tensorboard
from esper.nissa.sinks import wandb as _wandb
from esper.nissa.sinks.sink import SINKS, Sink, SinkContext, register_sink

__all__ = ["SINKS", "Sink", "SinkContext", "register_sink"]

# Imported for what they register.
_BUILT_IN = (_tensorboard, _wandb)
