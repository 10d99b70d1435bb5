"""The engine of a group of one row whose epochs its owner trains."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from esper.growth.distributed import Ranks
from esper.kasmina.engine import EpochResult, RowWeights, read_weights, take_samples, write_weights
from esper.kasmina.evaluation import Evaluator
from esper.kasmina.garden import Garden
from esper.kasmina.optimizer import CarriedOptimizer
from esper.kasmina.recalibration import (
    fitting_evaluator,
    moving_norms,
    read_statistics,
    recalibrate,
    write_statistics,
)
from esper.kasmina.signals import unknown_rates
from esper.kasmina.state import SlotState
from esper.leyline.transfer import Later


class OwnersEngine:
    """One garden that its owner trains: `train` only takes over what the owner's epoch left."""

    def __init__(self, garden: Garden, ranks: Ranks) -> None:
        """Bind the garden and the processes that train it; its optimizer may come later."""
        self.garden = garden
        self.carried: CarriedOptimizer | None = None
        self._ranks = ranks
        self._evaluator: Evaluator | None = None
        self._train_loss = math.nan
        self.before_write: Callable[[], None] | None = None
        """Called before earlier weights are put back into the garden."""
        self._inputs: Sequence[Any] = ()
        """Training batches of this epoch that statistics are taken from, of inputs alone."""

    @property
    def slots(self) -> Sequence[str]:
        """Names of the slots."""
        return self.garden.slot_names

    @property
    def host_params(self) -> int:
        """Trainable parameters of the model itself."""
        return self.garden.count_host_parameters()

    def rates(self, epochs: Tensor) -> tuple[Tensor, Tensor]:
        """Return the share of the peak learning rate, and the rate, that the optimizer has now.

        That is the next epoch's, where the schedule is stepped before the gardener is.
        """
        if self.carried is None:
            return unknown_rates(epochs)
        group = self.carried.optimizer.param_groups[0]
        rate = float(group["lr"])
        # Schedules of PyTorch leave the rate they start from, or rise to, in the group.
        peak = float(group.get("max_lr", group.get("initial_lr", rate)))
        return torch.tensor([rate / peak if peak > 0 else 1.0]), torch.tensor([rate])

    def finish_epoch(self, evaluator: Evaluator, train_loss: float | None) -> None:
        """Say that the owner has trained an epoch, with what loss, and how it is evaluated."""
        self._evaluator = evaluator
        self._train_loss = math.nan if train_loss is None else train_loss

    def recalibrate(self, inputs: Sequence[Any]) -> int:
        """Take running statistics anew on these batches, and keep them for ablations.

        In several processes those of rank 0 hold, as they do in DistributedDataParallel. Returns
        the number of samples; 0 where there are no statistics.
        """
        norms = moving_norms(self.garden)
        self._inputs = inputs if norms else ()
        count = recalibrate(self.garden, inputs, norms)
        if count and self._ranks.group is not None:
            own = [tensor.cpu() for tensor in read_statistics(norms)]
            write_statistics(norms, self._ranks.from_first(own))
        return count

    def forget_batches(self) -> None:
        """Let go of the batches that statistics were taken from: the next epoch has its own."""
        self._inputs = ()

    def sync(self, state: SlotState) -> Tensor:
        """Build, free and re-aim seeds as the state says; return their sizes, int64 [1, S]."""
        self.garden.assume(state)
        return self.garden.state.params

    def train(self, epochs: Sequence[int]) -> Later[EpochResult]:
        """Return what the owner's epoch said."""
        sample, sampled = take_samples([self.garden])
        loss = torch.tensor([self._train_loss], dtype=torch.float64)
        result = self._ranks.from_first(EpochResult(loss, sample, sampled))
        return lambda: result

    def measure(self, plans: Sequence[Tensor]) -> tuple[Tensor, Tensor | None]:
        """Evaluate the garden in every configuration of its plan."""
        assert self._evaluator is not None, "an epoch is measured after it was finished"
        evaluator = fitting_evaluator(self._evaluator, self.garden, self._inputs)
        return self._ranks.measured(*evaluator.measure(self.garden, plans[0]))

    def read(self, row: int) -> RowWeights:
        """Return copies of the garden's weights."""
        return read_weights(self.garden, None)

    def read_at_rest(self, rows: Sequence[int], seeds: Tensor) -> list[RowWeights]:
        """Return a copy of the garden's weights with those of its `seeds`, bool [1, S]."""
        return [self.read(row).at_rest(seeds[row].tolist()) for row in rows]

    def write(self, row: int, weights: RowWeights, state: SlotState) -> None:
        """Put weights into the garden; its optimizer forgets what it remembered of it.

        Its statistics were saved with seeds that are no more, so they are taken anew.
        """
        if self.before_write is not None:
            self.before_write()
        optimizer = None if self.carried is None else self.carried.optimizer
        write_weights(self.garden, optimizer, weights, state)
        self.recalibrate(self._inputs)
