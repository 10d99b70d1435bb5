"""Passes over validation data: every stacked row in every configuration it is asked for."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from math import prod

import numpy as np
import torch
from torch import Tensor

from esper.kasmina.state import SlotState
from esper.population.batches import order_images
from esper.population.capacity import StackCapacity
from esper.population.cuda_graph import GraphReplay
from esper.population.engine import SlotSpec
from esper.population.parameter_stack import ParameterStack
from esper.population.seed_stacks import SeedStacks
from esper.population.slot_forward import SlotForwards
from esper.population.streams import CudaStreams
from esper.population.validation_rows import ValidationRows
from esper.tasks.dataset import TaskData
from esper.tasks.objective import Objective

Run = Callable[[dict[str, Tensor], SlotForwards, Tensor], Tensor]
"""Runs hosts with these leaves [P, ...] and seeds on inputs that all share; outputs [P, B, ...]."""

_SAMPLES_CPU = 512
_SAMPLES_ACCELERATOR = 131_072
_BYTES_ACCELERATOR = 2**29
"""Samples of one pass: so many, or more where a slot's output has few bytes."""


class ValidationPass:
    """Evaluates stacked hosts with their seeds on the validation samples of an episode.

    On a device a pass over small networks is captured and replayed: there its many kernels take
    longer to launch than to run.
    """

    def __init__(
        self,
        hosts: ParameterStack,
        seed_stacks: SeedStacks,
        slots: Sequence[SlotSpec],
        data: TaskData,
        objective: Objective,
        compute: torch.dtype,
        streams: CudaStreams,
        run: Run,
        *,
        may_capture: bool,
    ) -> None:
        """Put the samples in order; nothing is evaluated yet."""
        self._hosts, self._run, self._objective = hosts, run, objective
        on_cpu, samples = data.device.type == "cpu", data.subset
        self._count = len(samples)
        self._samples: list[tuple[Tensor, Tensor]] = []
        for part in samples.split(min(len(samples), 256) if on_cpu else len(samples)):
            x, y = data.batch("val", part)
            x = order_images(x.to(compute)) if x.is_floating_point() else x
            self._samples.append((x, y))
        at_once = _SAMPLES_CPU
        if not on_cpu:
            largest = max(prod(slot.shape[1:]) for slot in slots) * compute.itemsize
            at_once = max(_SAMPLES_ACCELERATOR, _BYTES_ACCELERATOR // largest)
        self._positions_at_once = max(1, at_once // len(self._samples[0][1]))
        capacity = StackCapacity(
            has_spares=may_capture,
            rows=self._positions_at_once,
            sample_bytes=len(samples) * compute.itemsize,
        )
        # A pass over large activations keeps the device busy without being captured.
        capacity.has_spares = may_capture and all(capacity.is_cheap(slot) for slot in slots)
        self._replay = GraphReplay() if capacity.has_spares else None
        self._captured_version = -1
        self._rows = ValidationRows(seed_stacks, slots, capacity, data.device, streams)
        self._results: tuple[Tensor, Tensor | None] = (torch.zeros(0), None)

    @property
    def forwards(self) -> SlotForwards:
        """What took part in the last pass, by slot."""
        return self._rows.forwards

    def measure(self, plans: Sequence[Tensor], state: SlotState) -> tuple[Tensor, Tensor | None]:
        """Evaluate plans[r] (bool [K_r, S]) of every row; return loss and correct [sum K, M]."""
        rows = np.repeat(np.arange(len(plans)), [len(plan) for plan in plans])
        if not len(rows):
            return self._samples[0][1].new_zeros((0, self._count), dtype=torch.float32), None
        on = torch.cat(list(plans)).numpy()
        losses, corrects = [], []
        for first in range(0, len(rows), self._positions_at_once):
            part = slice(first, first + self._positions_at_once)
            self._rows.select(rows[part], on[part], state)
            loss, correct = self._run_pass(len(rows[part]))
            losses.append(loss)
            if correct is not None:
                corrects.append(correct)
        return torch.cat(losses), torch.cat(corrects) if corrects else None

    def _run_pass(self, count: int) -> tuple[Tensor, Tensor | None]:
        """Return loss and correct [count, M] at the first of the positions selected."""
        if self._replay is None:
            self._evaluate()
        else:
            if self._captured_version != self._rows.layout_version:
                self._captured_version = self._rows.layout_version
                self._replay.forget()
            self._replay.run(self._evaluate)
        loss, correct = self._results
        # The memory of a graph is overwritten by its next replay.
        return loss[:count].clone(), None if correct is None else correct[:count].clone()

    def _evaluate(self) -> None:
        """Evaluate every position on all samples."""
        chosen = self._rows.rows
        leaves = {n: v.index_select(0, chosen) for n, v in self._hosts.leaves.items()}
        results = [self._evaluate_batch(leaves, len(chosen), x, y) for x, y in self._samples]
        right = [correct for _, correct in results if correct is not None]
        losses = torch.cat([loss for loss, _ in results], 1)
        self._results = losses, torch.cat(right, 1) if right else None

    def _evaluate_batch(
        self, leaves: dict[str, Tensor], positions: int, x: Tensor, y: Tensor
    ) -> tuple[Tensor, Tensor | None]:
        outputs = self._run(leaves, self.forwards, x)
        targets = y.expand(positions, *y.shape).flatten(0, 1)
        loss, correct = self._objective(outputs.flatten(0, 1), targets)
        shape = (positions, len(y))
        return loss.reshape(shape), None if correct is None else correct.reshape(shape)
