"""Tiny tasks of every topology and ways to drive and compare populations of them."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional as F

from esper.kasmina.blueprints.registry import BLUEPRINTS
from esper.kasmina.gates import GateConfig
from esper.kasmina.hosts import CnnConfig, MlpConfig, TransformerConfig
from esper.kasmina.lifecycle import LifecycleConfig
from esper.leyline.actions import LifecycleOp
from esper.leyline.signals import Signals
from esper.population.config import PopulationConfig
from esper.population.engine import Engine, RowWeights
from esper.population.population import Population
from esper.tamiyo.controllers.choices import WAIT, Choice, pack_choices
from esper.tamiyo.controllers.random import RandomController
from esper.tasks.config import TaskConfig
from esper.tasks.data import Source
from esper.tasks.objective import Objective
from esper.tasks.task import DataPath, Task

HORIZON = 60

QUICK = LifecycleConfig(gates=GateConfig(min_training_epochs=1), embargo_ticks=1)
"""A life in which a seed passes its gates after one epoch and a pruned slot is soon free."""


def make_config(**changes: Any) -> PopulationConfig:
    """Return settings under which life is fast."""
    return PopulationConfig(**{"lifecycle": QUICK, **changes})


def exact(objective: str) -> Objective:
    """Return an objective that keeps the precision of what it is given."""

    def classification(outputs: Tensor, y: Tensor) -> tuple[Tensor, Tensor | None]:
        return F.cross_entropy(outputs, y, reduction="none"), (outputs.argmax(-1) == y).float()

    def language(outputs: Tensor, y: Tensor) -> tuple[Tensor, Tensor | None]:
        loss = F.cross_entropy(outputs.transpose(1, 2), y, reduction="none")
        return loss.mean(1), (outputs.argmax(-1) == y).float().mean(1)

    def regression(outputs: Tensor, y: Tensor) -> tuple[Tensor, Tensor | None]:
        y = y.to(outputs.dtype).reshape(outputs.shape)
        return F.mse_loss(outputs, y, reduction="none").flatten(1).mean(1), None

    return {
        "classification": classification,
        "language": language,
        "regression": regression,
    }[objective]


class _Tiny(Task):
    """A data set made on the spot; its objective keeps float64 where the weights have it."""

    @property
    def objective(self) -> Objective:
        return exact(self.config.objective)


class TinyImages(_Tiny):
    """Images of 6 x 6 in three classes; three slots."""

    name = "tiny_images"
    defaults = TaskConfig(
        host="cnn",
        host_options=CnnConfig(channels=(4, 4, 4), num_classes=3, in_channels=1, pool_layers=1),
        input_shape=(1, 6, 6),
        num_classes=3,
        batch_size=4,
        samples_per_step=14,
        validation_samples=12,
        val_fraction=0.3,
        learning_rate=0.05,
        augment="crop_flip",
        horizon=HORIZON,
        baseline_loss=1.1,
    )

    def read(self, data_path: DataPath | None) -> Source:
        rng = np.random.default_rng(1)
        y = rng.integers(0, 3, 60)
        x = rng.integers(0, 160, (60, 1, 6, 6)) + 40 * (
            y[:, None, None, None] == np.arange(3)[None, None, None, :].repeat(2, -1)
        )
        return Source("tiny images", "memory", x.astype(np.uint8), y, num_classes=3)


class TinyText(_Tiny):
    """Sequences of 5 tokens out of 7; two slots."""

    name = "tiny_text"
    defaults = TaskConfig(
        host="transformer",
        host_options=TransformerConfig(vocab=7, dim=8, heads=2, layers=2, context=5, segments=2),
        objective="language",
        input_shape=(5,),
        num_classes=7,
        batch_size=6,
        samples_per_step=18,
        validation_samples=9,
        val_fraction=0.3,
        learning_rate=0.1,
        weight_decay=0.0,
        horizon=HORIZON,
        baseline_loss=1.95,
    )

    def read(self, data_path: DataPath | None) -> Source:
        rng = np.random.default_rng(2)
        start, step = rng.integers(0, 7, (2, 160, 1))
        x = (start + (1 + step % 2) * np.arange(6)) % 7
        return Source("tiny text", "memory", x.astype(np.uint8), None, num_classes=7)


class TinyValues(_Tiny):
    """Five features to two real values; one slot."""

    name = "tiny_values"
    defaults = TaskConfig(
        host="mlp",
        host_options=MlpConfig(in_features=5, hidden=(6, 8), num_outputs=2, slots=("r0c1",)),
        objective="regression",
        input_shape=(5,),
        num_classes=None,
        batch_size=8,
        samples_per_step=16,
        validation_samples=10,
        val_fraction=0.3,
        learning_rate=0.05,
        horizon=HORIZON,
        baseline_loss=1.0,
    )

    def read(self, data_path: DataPath | None) -> Source:
        rng = np.random.default_rng(3)
        x = rng.standard_normal((50, 5)).astype(np.float32)
        y = np.stack([np.tanh(x[:, 0] * x[:, 1]), np.abs(x[:, 2])], 1).astype(np.float32)
        return Source("tiny values", "memory", x, y)


MIXED: tuple[type[Task], ...] = (TinyImages, TinyText, TinyValues)
