"""How a network is trained: `TrainingConfig`, its optimizer, and the learning rates it means.

The rates of an epoch are pure functions of the settings, the epoch and how long each seed has been
learning, so nothing about them is kept anywhere, and a run that goes on goes on exactly.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from torch.optim import SGD, AdamW, Optimizer

from esper.leyline.config import Config, option

Schedule = Literal["constant", "cosine", "wsd"]

OptimizerName = Literal["sgd", "adamw"]

SeedRate = Literal["host", "own"]

SECOND_BETA = 0.999
"""Share of the mean of squares that a step of AdamW keeps."""

EPSILON = 1e-8
"""What AdamW adds to the root of the mean of squares."""

GOOD_RATES = {"sgd": "0.01 to 0.2", "adamw": "0.001 to 0.005"}
"""Where to look for the learning rate of an optimizer first."""


@dataclass(frozen=True, kw_only=True)
class TrainingConfig(Config):
    """How a network is trained: the one declaration, for growing and for populations alike."""

    batch_size: int = option(
        64, "Samples in one optimizer step, where Esper draws the batches.", minimum=1
    )
    optimizer: OptimizerName = option(
        "sgd",
        "What moves the weights: SGD with momentum, whose good rates are "
        f"{GOOD_RATES['sgd']}, or AdamW, whose good rates are {GOOD_RATES['adamw']}.",
    )
    learning_rate: float = option(0.01, "Learning rate, where it is highest.", above=0.0)
    momentum: float = option(
        0.9, "Momentum of SGD; the first beta of AdamW.", minimum=0.0, maximum=0.9999
    )
    weight_decay: float = option(
        5e-4,
        "Weight decay: part of the gradient for SGD; apart from it for AdamW, where 0.01 to 0.1 "
        "is usual.",
        minimum=0.0,
    )
    max_grad_norm: float = option(
        1.0,
        "Gradient norm to which the host and each seed are clipped, apart; 0 is off.",
        minimum=0.0,
    )
    schedule: Schedule = option(
        "constant",
        "How the learning rate moves over a run: not at all; up and down along a cosine; or up, "
        "level, and down at the end (wsd).",
    )
    warmup: float = option(
        0.05, "Share of a run in which a rate that moves goes up.", minimum=0.0, maximum=0.5
    )
    decay: float = option(
        0.2, "Share of a run at the end of wsd in which the rate goes down.", above=0.0, maximum=0.5
    )
    seed_rate: SeedRate = option(
        "host",
        "What a seed's learning rate follows: the host's of the same epoch, or a schedule of its "
        "own, which falls as the host's does but from the epoch it begins to learn in to the end.",
    )
    seed_factor: float = option(
        1.0, "A seed's learning rate relative to the one it follows.", above=0.0
    )
    seed_warmup: int = option(
        0, "Epochs, from the first it learns in, in which a seed's rate goes up.", minimum=0
    )


def build_optimizer(training: TrainingConfig, parameters: Iterable[Any]) -> Optimizer:
    """Return the optimizer that these settings describe, over parameters or groups of them."""
    rate, decay = training.learning_rate, training.weight_decay
    if training.optimizer == "adamw":
        betas = (training.momentum, SECOND_BETA)
        return AdamW(parameters, lr=rate, betas=betas, eps=EPSILON, weight_decay=decay)
    return SGD(parameters, lr=rate, momentum=training.momentum, weight_decay=decay)


def epoch_rates(
    training: TrainingConfig, epoch: int, horizon: int, learned: Sequence[int]
) -> tuple[float, list[float]]:
    """Return the host's learning rate in an epoch (1 is the first), and that of every seed.

    `learned` says how many epochs have passed since each seed began to learn, 0 in the first.
    """
    rate, own = training.learning_rate, training.learning_rate * training.seed_factor
    seeds = [own * seed_rate_factor(training, epoch, horizon, each) for each in learned]
    return rate * rate_factor(training, epoch, horizon), seeds


def rate_factor(training: TrainingConfig, epoch: int, horizon: int) -> float:
    """Return the share of the learning rate that an epoch (1 is the first) trains with.

    The rate moves from epoch to epoch. It is above 0 in the last one, and after the horizon it
    stays what it was there.
    """
    if training.schedule == "constant":
        return 1.0
    epoch = min(epoch, horizon)
    rising = math.ceil(training.warmup * horizon)
    if epoch <= rising:
        return epoch / (rising + 1)
    if training.schedule == "cosine":
        return _cosine((epoch - rising - 1) / (horizon - rising))
    return _fall_at_end(training, epoch, horizon)


def seed_rate_factor(training: TrainingConfig, epoch: int, horizon: int, learned: int) -> float:
    """Return the share of its learning rate that a seed trains with in an epoch.

    A seed that follows the host has the host's share. One with a schedule of its own begins at the
    whole rate, whenever that is, and comes down by the host's shape in the epochs that were left.
    Either way the rate first goes up for `seed_warmup` epochs.
    """
    warmth = min(1.0, (learned + 1) / (training.seed_warmup + 1))
    if training.seed_rate == "host":
        return warmth * rate_factor(training, epoch, horizon)
    left = max(1, horizon - (epoch - learned) + 1)
    passed = min(learned, left - 1)
    if training.schedule == "cosine":
        return warmth * _cosine(passed / left)
    if training.schedule == "wsd":
        return warmth * _fall_at_end(training, passed + 1, left)
    return warmth


def _cosine(passed: float) -> float:
    return 0.5 * (1 + math.cos(math.pi * passed))


def _fall_at_end(training: TrainingConfig, epoch: int, horizon: int) -> float:
    falling = math.ceil(training.decay * horizon)
    return min(1.0, (horizon - epoch + 1) / (falling + 1))
