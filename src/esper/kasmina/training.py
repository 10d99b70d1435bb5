"""How a network is trained: objectives, `TrainingConfig`, learning rates, one training step.

The rates of an epoch are pure functions of the settings, the epoch and how long each seed has been
learning. So they need no saved state, and a resumed run has the same rates.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any, Literal, get_args

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.optim import SGD, AdamW, Optimizer
from torch.optim.lr_scheduler import LRScheduler, ReduceLROnPlateau

from esper.kasmina.evaluation import Objective, apply_objective
from esper.kasmina.garden import Garden
from esper.kasmina.optimizer import SLOT, CarriedOptimizer
from esper.kasmina.slots.probe import call_arguments
from esper.leyline.config import Config, option
from esper.leyline.errors import UsageError, reason_of

# ---- Loss and correctness of every single sample, as pure functions


ObjectiveName = Literal["classification", "language", "regression", "multilabel"]

ScoreKind = Literal["accuracy", "negative_loss"]
"""Unit of the score: accuracy in points 0 to 100, or the loss with its sign turned."""


def per_sample_classification(outputs: Tensor, y: Tensor) -> tuple[Tensor, Tensor | None]:
    """Return cross-entropy and 0-or-1 correctness for scores [B, K] and labels [B]."""
    loss = F.cross_entropy(outputs.float(), y, reduction="none")
    return loss, (outputs.argmax(dim=-1) == y).float()


def per_sample_language(outputs: Tensor, y: Tensor) -> tuple[Tensor, Tensor | None]:
    """Return mean cross-entropy and share of right tokens for scores [B, T, K], tokens [B, T]."""
    loss = F.cross_entropy(outputs.float().transpose(1, 2), y, reduction="none")  # [B, T]
    return loss.mean(dim=1), (outputs.argmax(dim=-1) == y).float().mean(dim=1)


def per_sample_regression(outputs: Tensor, y: Tensor) -> tuple[Tensor, Tensor | None]:
    """Return the mean squared error for outputs and targets [B] or [B, K]; nothing is correct."""
    loss = F.mse_loss(outputs.float(), y.float().reshape(outputs.shape), reduction="none")
    return by_sample(loss).mean(dim=1), None


def per_sample_multilabel(outputs: Tensor, y: Tensor) -> tuple[Tensor, Tensor | None]:
    """Return binary cross-entropy and share of right labels for scores and labels [B] or [B, K]."""
    y = y.float().reshape(outputs.shape)
    loss = F.binary_cross_entropy_with_logits(outputs.float(), y, reduction="none")
    right = ((outputs > 0) == (y > 0.5)).float()
    return by_sample(loss).mean(dim=1), by_sample(right).mean(dim=1)


def by_sample(values: Tensor) -> Tensor:
    """Return values as [B, K], one row per sample."""
    return values.flatten(1) if values.dim() > 1 else values.reshape(-1, 1)


OBJECTIVES: dict[ObjectiveName, Objective] = {
    "classification": per_sample_classification,
    "language": per_sample_language,
    "regression": per_sample_regression,
    "multilabel": per_sample_multilabel,
}

SCORE_KINDS: dict[ObjectiveName, ScoreKind] = {
    "classification": "accuracy",
    "language": "accuracy",
    "regression": "negative_loss",
    "multilabel": "accuracy",
}

assert set(OBJECTIVES) == set(SCORE_KINDS) == set(get_args(ObjectiveName)), "a name was forgotten"


Schedule = Literal["constant", "cosine", "wsd"]

OptimizerName = Literal["sgd", "adamw"]

SeedRate = Literal["host", "own"]

SECOND_BETA = 0.999
"""Second beta of AdamW."""

EPSILON = 1e-8
"""Epsilon of AdamW."""

GOOD_RATES = {"sgd": "0.01 to 0.2", "adamw": "0.001 to 0.005"}
"""Usual learning rates of each optimizer."""


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
    """Return the configured optimizer over parameters or groups of them."""
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

    A seed that follows the host has the host's share. One with its own schedule begins at the full
    rate and decays, in the shape of the host's schedule, over the epochs that are left. Both first
    warm up for `seed_warmup` epochs.
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


# ---- One training step: a garden, its optimizer, its schedule


SchedulerFactory = Callable[[Optimizer], LRScheduler]

BatchLoss = Callable[[Any, Any], Tensor]
"""(outputs, targets) -> the number to train on."""

SchedulerEvery = Literal["epoch", "batch"]
"""When a schedule is stepped."""


def clip_gradients(garden: Garden, max_norm: float) -> None:
    """Clip the host's gradients and every seed's separately to this norm."""
    for group in (garden.model, *garden.seedbed):
        parameters = [p for p in group.parameters() if p.grad is not None]
        if parameters:
            nn.utils.clip_grad_norm_(parameters, max_norm)


class Trainee:
    """Trains a garden: its optimizer, its schedule, and one step of both."""

    def __init__(
        self,
        garden: Garden,
        carried: CarriedOptimizer,
        objective: Objective,
        *,
        max_grad_norm: float,
        of_batch: BatchLoss | None = None,
        scheduler: SchedulerFactory | None = None,
        scheduler_every: SchedulerEvery = "epoch",
        precision: Callable[[], AbstractContextManager[Any]] = nullcontext,
    ) -> None:
        """Bind the parts; gradients are measured before clipping.

        Args:
            garden: the network.
            carried: its optimizer.
            objective: a loss for every sample.
            max_grad_norm: to which gradients are clipped, 0 for not at all.
            of_batch: the number to train on; the mean of the samples' losses by default.
            scheduler: makes the schedule of an optimizer.
            scheduler_every: when the schedule moves on.
            precision: context in which the network runs.
        """
        self.garden = garden
        self.carried = carried
        self.objective = objective
        self._of_batch = of_batch
        self._scheduler_every: SchedulerEvery = scheduler_every
        self.max_grad_norm = max_grad_norm
        self._precision = precision
        self._make_scheduler = scheduler
        self.scheduler = None if scheduler is None else scheduler(carried.optimizer)
        if isinstance(self.scheduler, ReduceLROnPlateau):
            raise UsageError(
                "ReduceLROnPlateau waits for a metric, but a schedule is stepped by epochs alone; "
                "use one such as CosineAnnealingLR"
            )
        self._losses: list[Tensor] = []
        carried.measures_itself = False

    @property
    def optimizer(self) -> Optimizer:
        """The optimizer itself."""
        return self.carried.optimizer

    def set_rates(self, host: float, seeds: Sequence[float]) -> None:
        """Set the learning rates of the host and of the seed in every slot.

        The optimizer has groups by slot: `slot_groups`.
        """
        by_slot = dict(zip(self.garden.slot_names, seeds, strict=True))
        for group in self.optimizer.param_groups:
            group["lr"] = by_slot[group[SLOT]] if SLOT in group else host

    def start_epoch(self) -> None:
        """Prepare for the batches of an epoch."""
        self.carried.start_epoch()
        self.garden.train()

    def train_batch(self, inputs: Any, targets: Any) -> Tensor:
        """Take one optimizer step; return its loss."""
        args, kwargs = call_arguments(inputs)

        def batch_loss(model: nn.Module) -> Tensor:
            with self._precision():
                outputs = model(*args, **kwargs)
            if self._of_batch is not None:
                return self._of_batch(outputs, targets)
            return apply_objective(self.objective, outputs, targets)[0].mean()

        optimizer = self.carried.optimizer
        optimizer.zero_grad(set_to_none=True)
        loss = self.garden.training_loss(batch_loss)
        if loss.requires_grad:
            loss.backward()
        elif any(parameter.requires_grad for parameter in self.garden.host_parameters()):
            raise UsageError(
                "the loss does not depend on the model's parameters; look for something detached, "
                "rounded or constant in the loss"
            )
        # Else the host is frozen and has no seed that learns yet.
        self.carried.sample_gradients()
        if self.max_grad_norm:
            clip_gradients(self.garden, self.max_grad_norm)
        optimizer.step()
        if self._scheduler_every == "batch":
            self._step_schedule()
        self._losses.append(loss.detach())
        return self._losses[-1]

    def finish_epoch(self) -> float | None:
        """Step the schedule and return the mean training loss, None without batches.

        It need not be finite: that is for the governor to judge.
        """
        if self._scheduler_every == "epoch":
            self._step_schedule()
        losses, self._losses = self._losses, []
        return float(torch.stack(losses).to(torch.float64).mean()) if losses else None

    def _step_schedule(self) -> None:
        if self.scheduler is None:
            return
        try:
            self.scheduler.step()
        except ValueError as error:
            reason = reason_of(error).rstrip(".")
            raise UsageError(
                f"the scheduler failed: {reason}; make it for all steps of the run"
            ) from error

    def fork(self, make_optimizer: Callable[[Garden], Optimizer]) -> Trainee:
        """Return an independent copy in exactly this state, with an optimizer of its own."""
        garden = copy.deepcopy(self.garden)
        twin = Trainee(
            garden,
            CarriedOptimizer(garden, make_optimizer(garden)),
            self.objective,
            max_grad_norm=self.max_grad_norm,
            of_batch=self._of_batch,
            scheduler=self._make_scheduler,
            scheduler_every=self._scheduler_every,
            precision=self._precision,
        )
        # Last, because making a schedule resets the learning rates.
        twin.carried.load_state_dict(copy.deepcopy(self.carried.state_dict()))
        if twin.scheduler is not None and self.scheduler is not None:
            twin.scheduler.load_state_dict(copy.deepcopy(self.scheduler.state_dict()))
        return twin

    def state_dict(self) -> dict[str, Any]:
        """Return garden, optimizer and schedule as plain data and tensors."""
        return {
            "garden": dict(self.garden.state_dict()),
            "optimizer": self.carried.state_dict(),
            "scheduler": None if self.scheduler is None else self.scheduler.state_dict(),
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore what `state_dict` returned."""
        self.garden.load_state_dict(state["garden"])
        self.carried.load_state_dict(state["optimizer"])
        if self.scheduler is not None and state["scheduler"] is not None:
            self.scheduler.load_state_dict(state["scheduler"])
