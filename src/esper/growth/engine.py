"""One garden trained in several processes: what one of them measures and decides holds for all."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import torch
from torch import Tensor
from torch import distributed as dist

from esper.growth.batches import Batches, read_batch
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
from esper.kasmina.slots.probe import map_tensors
from esper.kasmina.state import SlotState
from esper.leyline.errors import UsageError, warn
from esper.utils.process import Pending

T = TypeVar("T")


class Ranks:
    """The processes in which copies of a garden are trained by `DistributedDataParallel`.

    Every method is called in all of them at the same point. Where the garden is in no such
    wrapper there is only this process, and everything is returned as it is.
    """

    def __init__(self, garden: Garden, *, val_is_sharded: bool = False) -> None:
        """Look for the garden's wrapper whenever something is to be shared."""
        self._garden = garden
        self._val_is_sharded = val_is_sharded

    @property
    def group(self) -> dist.ProcessGroup | None:
        """The processes that train this garden; None where this one is alone."""
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
        """Return the mean over the processes that know this number."""
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
        """Refuse to go on with networks that have become different ones."""
        found = self._all(topology_hash(self._garden))
        strangers = [rank for rank, one in enumerate(found) if one != found[0]]
        if strangers:
            raise UsageError(
                f"the network on rank {', '.join(map(str, strangers))} is not that of rank 0; act "
                "on the garden in the same way in every process, or let the Gardener do it"
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
    """Return what tells grown networks apart: parameters, what trains, and how seeds are mixed."""
    parameters = [(n, tuple(p.shape), p.requires_grad) for n, p in garden.named_parameters()]
    slots = [(s.name, s.mode, s.algorithm, float(s.alpha)) for s in garden.seedbed]
    return hashlib.sha256(repr((parameters, slots)).encode()).hexdigest()


# ---- The engine of a group of one row whose epochs its owner trains


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
        self._samples = 0
        """How many samples they have."""
        self._fitted = self._amplitudes()
        """What was blended in, and how far, when statistics were last taken."""
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

    def recalibrate_from(self, batches: Batches, most: int) -> int:
        """Do the same on the first batches of `most` samples, as users have them; 0 for none."""
        if not most or not moving_norms(self.garden):
            return 0
        parameter = next(self.garden.parameters(), None)
        device = torch.device("cpu") if parameter is None else parameter.device
        inputs = (b if isinstance(b, Tensor) else read_batch(b)[0] for b in batches)
        read = first_samples(inputs, most)
        return self.recalibrate([map_tensors(one, lambda t: t.to(device)) for one in read])

    def recalibrate(self, inputs: Sequence[Any]) -> int:
        """Take running statistics anew on these batches, and keep them for ablations.

        In several processes those of rank 0 hold, as they do in DistributedDataParallel. Returns
        the number of samples; 0 where there are no statistics.
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
        """Say once where statistics do not belong to the network that is about to be measured."""
        now = self._amplitudes()
        norms = moving_norms(self.garden)
        if self._samples or self._is_warned or now == self._fitted or not norms:
            return
        self._is_warned = True
        slots = [name for name in self.slots if now.get(name) != self._fitted.get(name)]
        warn(
            f"epoch {epoch}: the seeds at {', '.join(slots)} changed, but the running "
            f"statistics of the model's {type(norms[0]).__name__} layers were not taken anew, "
            "so scores and contributions are too low; call gardener.recalibrate(batches), with "
            "training batches, before gardener.step(...)"
        )

    def forget_batches(self) -> int:
        """Let go of the batches that statistics were taken from; return how many samples it were.

        The next epoch has its own.
        """
        samples, self._samples, self._inputs = self._samples, 0, ()
        return samples

    def _amplitudes(self) -> dict[str, float]:
        """Return how far every seed is blended in, by slot, of those that change any output."""
        return {name: view.alpha for name, view in self.garden.slots.items() if view.alpha > 0}

    def sync(self, state: SlotState) -> Tensor:
        """Build, free and re-aim seeds as the state says; return their sizes, int64 [1, S]."""
        return self.garden.sync(state)

    def train(self, epochs: Sequence[int]) -> Pending[EpochResult]:
        """Return what the owner's epoch said."""
        sample, sampled = take_samples([self.garden])
        loss = torch.tensor([self._train_loss], dtype=torch.float64)
        result = self._ranks.from_first(EpochResult(loss, sample, sampled))
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
        """Put weights into the garden; its optimizer forgets what it remembered of it.

        Its statistics were saved with seeds that are no more, so they are taken anew.
        """
        if self.before_write is not None:
            self.before_write()
        optimizer = None if self.carried is None else self.carried.optimizer
        write_weights(self.garden, optimizer, weights, state)
        self.recalibrate(self._inputs)
