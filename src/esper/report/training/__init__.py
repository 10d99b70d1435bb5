"""The report of a training run: how a controller learned, from what was recorded alone."""

from __future__ import annotations

from esper.report.training.page import render_training
from esper.report.training.record import TrainingRecord, read_training

__all__ = ["TrainingRecord", "read_training", "render_training"]
