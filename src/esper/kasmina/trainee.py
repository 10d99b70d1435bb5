"""One network being trained: a garden, its optimizer, its schedule, and a step of all three."""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler, ReduceLROnPlateau

from esper.kasmina.evaluation import Objective, apply_objective
from esper.kasmina.garden import Garden
from esper.kasmina.optimizer import SLOT, CarriedOptimizer
from esper.kasmina.probe import call_arguments
from esper.leyline.errors import UsageError, reason_of

SchedulerFactory = Callable[[Optimizer], LRScheduler]

BatchLoss = Callable[[Any, Any], Tensor]
"""(outputs, targets) -> the number to train on."""

SchedulerEvery = Literal["epoch", "batch"]
"""When a schedule moves on: after every epoch, or after every batch."""


class Trainee:
    """A garden with its optimizer and schedule: everything one training step changes."""

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
        """Bind the parts; the optimizer is told that gradients are measured before clipping.

        Args:
            garden: what is trained.
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
        """Let the host learn at a rate, and the seed in every slot at its own.

        The optimizer has groups by slot: `slot_groups`.
        """
        by_slot = dict(zip(self.garden.slot_names, seeds, strict=True))
        for group in self.optimizer.param_groups:
            group["lr"] = by_slot[group[SLOT]] if SLOT in group else host

    def start_epoch(self) -> None:
        """Get ready for the batches of an epoch."""
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
                "the loss does not depend on the model's parameters, so that nothing can learn; "
                "is something detached, rounded or constant?"
            )
        # Else the host is frozen and has no seed that learns yet.
        self.carried.sample_gradients()
        if self.max_grad_norm:
            self.garden.clip_gradients(self.max_grad_norm)
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
                f"the scheduler cannot go on: {reason}; make it for all steps of the run"
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
        # Only now: to make a schedule sets the learning rates back to its beginning.
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
