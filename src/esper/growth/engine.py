"""The engine of a gardener: one garden that the user trains, in one or several processes."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import torch
from torch import Tensor
from torch import distributed as dist

from esper.growth.batches import Batches
from esper.kasmina.budget import Portion
from esper.kasmina.engine import EpochResult, RowWeights, read_weights, take_samples, write_weights
from esper.kasmina.evaluation import Evaluator, moving_norms
from esper.kasmina.garden import Garden
from esper.kasmina.optimizer import CarriedOptimizer
from esper.kasmina.recalibration import (
    first_samples,
    fitting_evaluator,
    read_statistics,
    recalibrate,
    write_statistics,
)
from esper.kasmina.signals import unknown_rates
from esper.kasmina.slots.arguments import only_argument, read_batch, whole_dict
from esper.kasmina.slots.probe import map_tensors
from esper.kasmina.state import SlotState
from esper.leyline.errors import UsageError, warn
from esper.utils.process import Pending

T = TypeVar("T")


class Ranks:
    """The processes in which `DistributedDataParallel` trains copies of a garden.

    Call every method in all of them at the same point. Without such a wrapper there is only this
    process, and every value is returned unchanged.
    """

    def __init__(self, garden: Garden, *, val_is_sharded: bool = False) -> None:
        """Bind the garden; its wrapper may come later."""
        self._garden = garden
        self._val_is_sharded = val_is_sharded

    @property
    def group(self) -> dist.ProcessGroup | None:
        """The processes that train this garden; None if there is only this one."""
        wrapper = self._garden.ties.wrapper()
        if wrapper is None:
            return None
        group: dist.ProcessGroup = wrapper.process_group
        return group if dist.get_world_size(group) > 1 else None

    def from_first(self, value: T) -> T:
        """Return rank 0's value; its tensors must be on the CPU."""
        group = self.group
        if group is None:
            return value
        holder: list[Any] = [value]
        dist.broadcast_object_list(holder, group=group, group_src=0)
        shared: T = holder[0]
        return shared

    def mean(self, value: float | None) -> float | None:
        """Return the mean over the processes whose value is not None."""
        known = [one for one in self._all(value) if one is not None]
        return sum(known) / len(known) if known else None

    def measured(self, loss: Tensor, correct: Tensor | None) -> tuple[Tensor, Tensor | None]:
        """Return the same loss [K, M] and correctness [K, M] everywhere."""
        if self.group is None:
            return loss, correct
        device = loss.device
        own = loss.cpu(), None if correct is None else correct.cpu()
        losses, corrects = zip(
            *(self._all(own) if self._val_is_sharded else [self.from_first(own)]), strict=True
        )
        rights = [one for one in corrects if one is not None]
        return (
            torch.cat(losses, 1).to(device),
            torch.cat(rights, 1).to(device) if rights else None,
        )

    def check_topology(self) -> None:
        """Raise an error if the networks of the processes differ."""
        found = self._all(topology_hash(self._garden))
        others = [rank for rank, one in enumerate(found) if one != found[0]]
        if others:
            raise UsageError(
                f"the network of rank {', '.join(map(str, others))} differs from that of rank 0; "
                "act on the garden equally in every process, or only through Gardener.step"
            )

    def _all(self, value: T) -> list[T]:
        """Return the values of all processes, by rank."""
        group = self.group
        if group is None:
            return [value]
        values: list[Any] = [None] * dist.get_world_size(group)
        dist.all_gather_object(values, value, group=group)
        return values


def topology_hash(garden: Garden) -> str:
    """Return a hash of parameters, of what trains, and of how seeds are blended."""
    parameters = [(n, tuple(p.shape), p.requires_grad) for n, p in garden.named_parameters()]
    slots = [(s.name, s.mode, s.algorithm, float(s.alpha)) for s in garden.seedbed]
    return hashlib.sha256(repr((parameters, slots)).encode()).hexdigest()


# ---- The engine of a group of one row


class OwnersEngine:
    """One garden that the user trains: `train` only returns what the user's epoch left."""

    def __init__(self, garden: Garden, ranks: Ranks) -> None:
        """Bind the garden and the processes that train it; its optimizer may come later."""
        self.garden = garden
        self.carried: CarriedOptimizer | None = None
        self._ranks = ranks
        self._evaluator: Evaluator | None = None
        self._train_loss = math.nan
        self._trained: int | None = None
        self.before_write: Callable[[], None] | None = None
        """Called before earlier weights are restored."""
        self._inputs: Sequence[Any] = ()
        """Inputs of training batches of this epoch, for BatchNorm statistics."""
        self._samples = 0
        """Number of samples in `_inputs`."""
        self._fitted = self._amplitudes()
        """Amplitude of every seed when statistics were last computed."""
        self._is_warned = False

    @property
    def slots(self) -> Sequence[str]:
        """Names of the slots."""
        return self.garden.slot_names

    @property
    def host_params(self) -> int:
        """Trainable parameters of the model itself."""
        return self.garden.count_host_parameters()

    def rates(self, epochs: Tensor) -> tuple[Tensor, Tensor]:
        """Return the optimizer's learning rate as a share of its peak, and the rate itself.

        It is that of the next epoch if the schedule is stepped before the gardener.
        """
        if self.carried is None:
            return unknown_rates(epochs)
        group = self.carried.optimizer.param_groups[0]
        rate = float(group["lr"])
        # PyTorch's schedules store their first or largest rate in the group.
        peak = float(group.get("max_lr", group.get("initial_lr", rate)))
        return torch.tensor([rate / peak if peak > 0 else 1.0]), torch.tensor([rate])

    def finish_epoch(
        self, evaluator: Evaluator, train_loss: float | None, samples: int | None = None
    ) -> None:
        """Take the evaluator, the training loss and the samples of an epoch that the user trained.

        `samples` is None where nobody counts them.
        """
        self._evaluator = evaluator
        self._trained = samples
        self._train_loss = math.nan if train_loss is None else train_loss

    def recalibrate_from(self, batches: Batches, most: int) -> int:
        """Recompute statistics on the first `most` samples of a user's batches; return how many."""
        if not most or not moving_norms(self.garden):
            return 0
        parameter = next(self.garden.parameters(), None)
        device = torch.device("cpu") if parameter is None else parameter.device
        argument = only_argument(self.garden.model)
        inputs = (
            b if isinstance(b, Tensor) else whole_dict(read_batch(b)[0], argument) for b in batches
        )
        read = first_samples(inputs, most)
        return self.recalibrate([map_tensors(one, lambda t: t.to(device)) for one in read])

    def recalibrate(self, inputs: Sequence[Any]) -> int:
        """Recompute running statistics on these batches, and keep the batches for ablations.

        In several processes all take those of rank 0, as in DistributedDataParallel. Return the
        number of samples; 0 in a model without such statistics.
        """
        norms = moving_norms(self.garden)
        self._inputs = inputs if norms else ()
        count = self._samples = recalibrate(self.garden, inputs, norms) if norms else 0
        if count and self._ranks.group is not None:
            own = [tensor.cpu() for tensor in read_statistics(norms)]
            write_statistics(norms, self._ranks.from_first(own))
        if count:
            self._fitted = self._amplitudes()
        return count

    def warn_of_statistics(self, epoch: int) -> None:
        """Warn once if BatchNorm statistics are out of date for the network to be measured."""
        now = self._amplitudes()
        norms = moving_norms(self.garden)
        if self._samples or self._is_warned or now == self._fitted or not norms:
            return
        self._is_warned = True
        slots = [name for name in self.slots if now.get(name) != self._fitted.get(name)]
        warn(
            f"epoch {epoch}: the seeds at {', '.join(slots)} changed, but the running statistics "
            f"of the model's {type(norms[0]).__name__} layers did not, so scores and contributions "
            "are too low; call gardener.recalibrate(train_batches) before gardener.step(...)"
        )

    def forget_batches(self) -> int:
        """Release the batches of this epoch's statistics; return their number of samples."""
        samples, self._samples, self._inputs = self._samples, 0, ()
        return samples

    def _amplitudes(self) -> dict[str, float]:
        """Return the amplitude of every seed that changes an output, by slot."""
        return {name: view.alpha for name, view in self.garden.slots.items() if view.alpha > 0}

    def sync(self, state: SlotState) -> Tensor:
        """Build and free seeds to match the state; return their sizes, int64 [1, S]."""
        return self.garden.sync(state)

    def train(self, portions: Sequence[Portion]) -> Pending[EpochResult]:
        """Return the result of the user's epoch."""
        sample, sampled = take_samples([self.garden])
        loss = torch.tensor([self._train_loss], dtype=torch.float64)
        counted = None if self._trained is None else torch.tensor([self._trained])
        result = self._ranks.from_first(EpochResult(loss, sample, sampled, counted))
        return lambda: result

    def measure(self, plans: Sequence[Tensor]) -> tuple[Tensor, Tensor | None]:
        """Evaluate the garden in every configuration of its plan."""
        assert self._evaluator is not None, "an epoch is measured after it was finished"
        evaluator = self._evaluator
        if self._inputs:
            evaluator = fitting_evaluator(evaluator, self.garden, self._inputs)
        return self._ranks.measured(*evaluator.measure(self.garden, plans[0]))

    def read(self, row: int) -> RowWeights:
        """Return copies of the garden's weights."""
        return read_weights(self.garden, None)

    def read_at_rest(self, rows: Sequence[int], seeds: Tensor) -> list[RowWeights]:
        """Return a copy of the garden's weights with those of its `seeds`, bool [1, S]."""
        return [self.read(row).at_rest(seeds[row].tolist()) for row in rows]

    def write(self, row: int, weights: RowWeights, state: SlotState) -> None:
        """Restore weights of the garden, and clear the optimizer's state for them.

        The saved statistics belong to seeds that are gone, so they are recomputed.
        """
        if self.before_write is not None:
            self.before_write()
        optimizer = None if self.carried is None else self.carried.optimizer
        write_weights(self.garden, optimizer, weights, state)
        self.recalibrate(self._inputs)
