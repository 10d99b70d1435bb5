"""Validation passes: every stacked row in all requested configurations of its seeds.

`StackedEngine` measures with a `ValidationPass`. A position of a pass is a row in one configuration
of its seeds, so a seed may be in use at several positions or at none. The positions differ from
pass to pass. `SelectedRows` holds them at fixed addresses. If positions and entries are cheap, it
has spare ones, so that a captured pass stays valid longer. Training uses it too, when some rows of
a stack take more steps than others.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from math import prod

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from esper.kasmina.contribution import values_in_points
from esper.kasmina.evaluation import Objective
from esper.kasmina.state import SlotState
from esper.lab.population.batches import order_images
from esper.lab.population.engine import CudaStreams, GraphReplay, SlotSpec, StackStream
from esper.lab.population.parameter_stack import ParameterStack, StackCapacity
from esper.lab.population.seed_stacks import GATE, IS_BLENDED, SeedStacks
from esper.lab.population.slot_forward import (
    BLENDED,
    EMPTY,
    ISOLATED,
    Integers,
    SlotForward,
    SlotForwards,
    SlotIndex,
    SlotIndexArrays,
    StackedModule,
)
from esper.lab.tasks.dataset import TaskData
from esper.lab.tasks.splits import Split
from esper.leyline.stages import AlphaAlgorithm, SeedStage
from esper.utils.process import to_device, write_to

Key = tuple[int, int]
"""Slot and kind of a stack, as in `seed_stacks`."""

_FADING = 0.97
"""Decay, per pass, of the remembered number of positions and entries."""


@dataclass(frozen=True, slots=True)
class ActiveSeeds:
    """The active seeds of a pass at one slot, ordered by kind, entry and position."""

    positions: Integers
    state: Integers
    """ISOLATED or BLENDED."""
    kinds: Integers
    entries: Integers
    algorithm: Integers
    alpha: NDArray[np.float64]
    gated: Integers
    """Indices of those with a gate, in the order of their gates."""
    gate_entries: Integers
    """The entries of these gates."""

    def count(self, slot: int) -> dict[Key, int]:
        """Return the number of seeds of every kind."""
        kinds, counts = np.unique(self.kinds, return_counts=True)
        found = {(slot, kind): n for kind, n in zip(kinds.tolist(), counts.tolist(), strict=True)}
        return found | ({(slot, GATE): len(self.gated)} if len(self.gated) else {})


class SelectedRows:
    """The positions of a pass and the seeds at every slot, set by `select`."""

    def __init__(
        self,
        seed_stacks: SeedStacks,
        slots: Sequence[SlotSpec],
        capacity: StackCapacity,
        device: torch.device,
        streams: CudaStreams,
        *,
        for_training: bool = False,
    ) -> None:
        """Prepare to select from the seeds of all rows; `capacity` sets the number of spares.

        Seeds in isolation are active only if `for_training`.
        """
        self._for_training = for_training
        self._seed_stacks, self._slots, self._capacity = seed_stacks, tuple(slots), capacity
        self._device, self._streams = device, streams
        self.rows = torch.zeros(0, dtype=torch.int64, device=device)
        """int64, the row of every position; any row for a spare one."""
        self.forwards: SlotForwards = (None,) * len(self._slots)
        """The seeds at every slot."""
        self.layout_version = 0
        """Counts new layouts of memory; a pass captured at another version is invalid."""
        self._seeds_version = -1
        self._entries: dict[Key, int] = {}
        self._peaks: dict[Key, float] = {}
        self._most_positions = 0.0

    def select(
        self,
        rows: Integers,
        on: NDArray[np.bool_],
        state: SlotState,
        spare: Integers | None = None,
    ) -> None:
        """Select rows [n], which may repeat; `on` [n, S] says which of their seeds are active.

        A seed that is not blended is active only in training. Spare positions have the rows
        `spare`, by default the first row.
        """
        active = [
            find_active_seeds(
                self._seed_stacks,
                slot,
                rows,
                on[:, slot],
                state,
                for_training=self._for_training,
            )
            for slot in range(len(self._slots))
        ]
        needed = {k: n for slot, each in enumerate(active) for k, n in each.count(slot).items()}
        self._remember(len(rows), needed)
        if not self._fits(len(rows), needed):
            self._lay_out(len(rows), needed)
        padded = np.zeros(len(self.rows), dtype=np.int64)
        padded[: len(rows)] = rows
        if spare is not None:
            padded[len(rows) :] = spare[: len(padded) - len(rows)]
        write_to(self.rows, torch.from_numpy(padded))
        for slot, each in enumerate(active):
            self._fill_slot(slot, each)

    def _remember(self, positions: int, needed: dict[Key, int]) -> None:
        """Record the numbers needed; older numbers decay."""
        self._most_positions = max(positions, _FADING * self._most_positions)
        for key in self._peaks.keys() | needed.keys():
            self._peaks[key] = max(needed.get(key, 0), _FADING * self._peaks.get(key, 0.0))

    def _fits(self, positions: int, needed: dict[Key, int]) -> bool:
        """Return whether there are enough positions and entries."""
        is_current = self._seeds_version == self._seed_stacks.layout_version
        if not self._capacity.has_spares or not is_current:
            return False
        return positions <= len(self.rows) and all(
            count <= self._entries.get(key, 0) for key, count in needed.items()
        )

    def _lay_out(self, positions: int, needed: dict[Key, int]) -> None:
        """Allocate the needed positions and entries, and spare ones."""
        if self._capacity.has_spares:
            positions = self._capacity.positions(max(positions, round(self._most_positions)))
            wanted = {
                (stack.slot, stack.kind): max(
                    needed.get((stack.slot, stack.kind), 0),
                    round(self._peaks.get((stack.slot, stack.kind), 0.0)),
                    stack.count,
                )
                for stack in self._seed_stacks.stacks
            }
            needed = {
                key: self._capacity.entries(self._slots[key[0]], count)
                for key, count in wanted.items()
                if count
            }
        self._entries = needed
        self.rows = torch.zeros(positions, dtype=torch.int64, device=self._device)
        self.forwards = (None,) * len(self._slots)
        self._seeds_version = self._seed_stacks.layout_version
        self.layout_version += 1

    def _fill_slot(self, slot: int, active: ActiveSeeds) -> None:
        """Assign entries to the seeds of a slot."""
        kinds = sorted(kind for where, kind in self._entries if where == slot and kind != GATE)
        if not kinds:
            return
        counts = [self._entries[slot, kind] for kind in kinds]
        first = np.cumsum([0, *counts])
        own = np.searchsorted(kinds, active.kinds)
        rank = np.arange(len(own)) - np.searchsorted(own, own)
        arrays = _make_arrays(
            active,
            first[own] + rank,
            entries=int(first[-1]),
            gates=self._entries.get((slot, GATE), 0),
            positions=len(self.rows),
        )
        chosen = [
            self._padded(slot, kind, active.entries[own == k], count)
            for k, (kind, count) in enumerate(zip(kinds, counts, strict=True))
        ]
        gates = self._padded(slot, GATE, active.gate_entries, len(arrays.entry_of_gate))
        forward = self.forwards[slot]
        if forward is None:
            forwards = list(self.forwards)
            forwards[slot] = SlotForward(
                SlotIndex.from_arrays(arrays, self._device),
                tuple(self._module(slot, k, at) for k, at in zip(kinds, chosen, strict=True)),
                self._module(slot, GATE, gates) if len(gates) else None,
                self._streams,
            )
            self.forwards = tuple(forwards)
            return
        forward.index.copy_(arrays)
        modules = [*forward.modules, *([forward.gates] if forward.gates is not None else [])]
        for module, at in zip(modules, [*chosen, *([gates] if len(gates) else [])], strict=True):
            assert module.entries is not None
            write_to(module.entries, torch.from_numpy(at))

    def _padded(self, slot: int, kind: int, entries: Integers, count: int) -> Integers:
        """Return `count` entries of a stack: these, and others as spares.

        A spare entry has no effect, except that it passes on NaN from an activation that is not
        finite. So it must not be the entry of an active seed.
        """
        missing = count - len(entries)
        if not missing:
            return entries
        others = np.setdiff1d(np.arange(len(self._seed_stacks.stack(slot, kind).rows)), entries)
        spare = others if len(others) else np.zeros(1, dtype=np.int64)
        return np.concatenate([entries, np.resize(spare, missing)])

    def _module(self, slot: int, kind: int, entries: Integers) -> StackedModule:
        stack = self._seed_stacks.stack(slot, kind)
        if not self._capacity.has_spares and np.array_equal(entries, np.arange(len(stack.rows))):
            return StackedModule(stack.parameters, None, stack.module, len(entries))
        chosen = to_device(torch.from_numpy(entries), self._device)
        return StackedModule(stack.parameters, chosen, stack.module, len(entries))


def find_active_seeds(
    seed_stacks: SeedStacks,
    slot: int,
    rows: Integers,
    on: NDArray[np.bool_],
    state: SlotState,
    *,
    for_training: bool = False,
) -> ActiveSeeds:
    """Return the active seeds of a slot in a pass over these rows."""
    stage, alpha = state.stage.numpy()[:, slot], state.alpha.numpy()[:, slot]
    blended = IS_BLENDED[stage] & (alpha > 0)
    isolated = (stage == int(SeedStage.TRAINING)) & for_training
    positions = np.flatnonzero(on & (blended | isolated)[rows])
    own = rows[positions]
    order = np.lexsort((positions, seed_stacks.entries[own, slot], seed_stacks.kinds[own, slot]))
    positions, own = positions[order], own[order]
    algorithm = state.algorithm.numpy()[own, slot]
    gated = np.flatnonzero(algorithm == int(AlphaAlgorithm.GATE))
    gated = gated[np.argsort(seed_stacks.gate_entries[own[gated], slot], kind="stable")]
    return ActiveSeeds(
        positions=positions,
        state=np.where(isolated[own], ISOLATED, BLENDED),
        kinds=seed_stacks.kinds[own, slot],
        entries=seed_stacks.entries[own, slot],
        algorithm=algorithm,
        alpha=np.where(isolated[own], 1.0, alpha[own]),
        gated=gated,
        gate_entries=seed_stacks.gate_entries[own[gated], slot],
    )


def _make_arrays(
    active: ActiveSeeds, entry: Integers, *, entries: int, gates: int, positions: int
) -> SlotIndexArrays:
    """Return the arrays of a slot whose seeds have these entries; other entries are empty."""
    arrays = SlotIndexArrays(
        row_of_entry=np.zeros(entries, dtype=np.int64),
        entry_of_row=np.full(positions, -1, dtype=np.int64),
        state=np.full(entries, EMPTY, dtype=np.int64),
        algorithm=np.zeros(entries, dtype=np.int64),
        gate_of_entry=np.full(entries, -1, dtype=np.int64),
        entry_of_gate=np.full(gates, -1, dtype=np.int64),
        row_of_gate=np.zeros(gates, dtype=np.int64),
        alpha=np.ones(entries),
    )
    arrays.row_of_entry[entry] = active.positions
    arrays.entry_of_row[active.positions] = entry
    arrays.state[entry] = active.state
    arrays.algorithm[entry] = active.algorithm
    arrays.alpha[entry] = active.alpha
    count = len(active.gated)
    arrays.gate_of_entry[entry[active.gated]] = np.arange(count)
    arrays.entry_of_gate[:count] = entry[active.gated]
    arrays.row_of_gate[:count] = active.positions[active.gated]
    return arrays


Run = Callable[[dict[str, Tensor], SlotForwards, Tensor], Tensor]
"""Runs hosts with these leaves [P, ...] and seeds on shared inputs; outputs are [P, B, ...]."""

_SAMPLES_CPU = 512
_SAMPLES_ACCELERATOR = 131_072
_BYTES_ACCELERATOR = 2**29
_SHARE_ACCELERATOR = 1 / 64
"""Samples of one pass: this many, or more while a slot's output stays below these bytes or this
share of the device's memory. In a small pass, launching kernels takes longer than running them."""


class ValidationPass:
    """Evaluates stacked hosts with their seeds on the validation samples of an episode.

    All rows of a pass see the same samples, so rows with different data are in different passes.
    The samples keep their address. On a device, a pass over small networks is captured and
    replayed, because its kernels take longer to launch than to run.
    """

    def __init__(
        self,
        hosts: ParameterStack,
        seed_stacks: SeedStacks,
        slots: Sequence[SlotSpec],
        data: Sequence[TaskData],
        objective: Objective,
        compute: torch.dtype,
        streams: CudaStreams,
        run: Run,
        *,
        graph_stream: StackStream | None,
    ) -> None:
        """Allocate memory for the samples of rows with this data; nothing is evaluated yet."""
        self._hosts, self._run, self._objective = hosts, run, objective
        self._compute, self._device = compute, data[0].device
        on_cpu, self._count = self._device.type == "cpu", len(data[0].subset)
        self._part = min(self._count, 256) if on_cpu else self._count
        self._samples: list[tuple[Tensor, Tensor]] = []
        self._loaded: object = None
        self.assign(data)
        at_once = _SAMPLES_CPU
        if not on_cpu:
            largest = max(prod(slot.shape[1:]) for slot in slots) * compute.itemsize
            memory = torch.cuda.get_device_properties(self._device).total_memory
            most = max(_BYTES_ACCELERATOR, int(_SHARE_ACCELERATOR * memory))
            at_once = max(_SAMPLES_ACCELERATOR, most // largest)
        self._positions_at_once = max(1, at_once // self._part)
        capacity = StackCapacity(
            has_spares=graph_stream is not None,
            rows=self._positions_at_once,
            sample_bytes=self._count * compute.itemsize,
        )
        # A pass over large activations keeps the device busy without being captured.
        capacity.has_spares &= all(capacity.is_cheap(slot) for slot in slots)
        self._replay = None
        if graph_stream is not None and capacity.has_spares:
            self._replay = GraphReplay(graph_stream)
        self._captured_version = -1
        self._rows = SelectedRows(seed_stacks, slots, capacity, self._device, streams)
        self._results: tuple[Tensor, Tensor | None] = (torch.zeros(0), None)

    @property
    def forwards(self) -> SlotForwards:
        """The active seeds of the last pass, by slot."""
        return self._rows.forwards

    def assign(self, data: Sequence[TaskData]) -> None:
        """Use this data from now on."""
        assert all(len(each.subset) == self._count for each in data), "rows are judged alike"
        self._sets, self._set_of_row = find_sets(data)
        self._loaded = None

    def measure(self, plans: Sequence[Tensor], state: SlotState) -> tuple[Tensor, Tensor | None]:
        """Evaluate plans[r] (bool [K_r, S]) of every row; return loss and correct [sum K, M]."""
        rows = np.repeat(np.arange(len(plans)), [len(plan) for plan in plans])
        if not len(rows):
            return torch.zeros((0, self._count), device=self._device), None
        on = torch.cat(list(plans)).numpy()
        losses, corrects, order = [], [], []
        for number, part in self._passes(rows):
            data = self._sets[number]
            self._rows.select(rows[part], on[part], state)
            self._load(data, "val", data.subset, number)
            loss, correct = self._run_pass(len(part))
            losses.append(loss)
            order.append(part)
            if correct is not None:
                corrects.append(correct)
        loss, right = torch.cat(losses), torch.cat(corrects) if corrects else None
        if len(self._sets) == 1:
            return loss, right
        back = to_device(torch.from_numpy(np.argsort(np.concatenate(order))), self._device)
        return loss[back], None if right is None else right[back]

    def score(self, split: Split, state: SlotState) -> Tensor:
        """Return float64 [R, 2]: score in points and loss of every row on a whole split."""
        rows = np.arange(len(self._set_of_row))
        scores = torch.zeros((len(rows), 2), dtype=torch.float64, device=self._device)
        everything = np.ones((len(rows), state.num_slots), dtype=np.bool_)
        for number, part in self._passes(rows):
            data, total = self._sets[number], torch.zeros_like(scores[: len(part)])
            self._rows.select(part, everything[part], state)
            for indices in data.indices(split).split(self._count):
                self._load(data, split, indices, None)
                loss, correct = self._run_pass(len(part))
                both = torch.stack([values_in_points(loss, correct), loss.double()], -1)
                total += both[:, : len(indices)].sum(1)
            scores[to_device(torch.from_numpy(part), self._device)] = total / data.size(split)
        return scores.cpu()

    def _passes(self, rows: Integers) -> Iterator[tuple[int, Integers]]:
        """Yield (set, positions) of every pass over these rows; `positions` are indices into it."""
        own = self._set_of_row[rows]
        for number in range(len(self._sets)):
            mine = np.flatnonzero(own == number)
            for first in range(0, len(mine), self._positions_at_once):
                yield number, mine[first : first + self._positions_at_once]

    def _load(self, data: TaskData, split: Split, indices: Tensor, name: object) -> None:
        """Load the samples for passes, unless those with this name are loaded.

        If there are too few samples, the first ones are repeated.
        """
        if name is not None and self._loaded == name:
            return
        if len(indices) < self._count:
            indices = indices.repeat(-(-self._count // len(indices)))[: self._count]
        is_new = not self._samples
        for number, part in enumerate(indices.split(self._part)):
            x, y = data.batch(split, part)
            if is_new:
                x = order_images(x.to(self._compute)) if x.is_floating_point() else x
                self._samples.append((x, y))
                continue
            self._samples[number][0].copy_(x)
            self._samples[number][1].copy_(y)
        self._loaded = name

    def _run_pass(self, count: int) -> tuple[Tensor, Tensor | None]:
        """Return loss and correct [count, M] of the first selected positions."""
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


def find_sets(data: Sequence[TaskData]) -> tuple[list[TaskData], Integers]:
    """Return the distinct validation and test sets, and int64 [R]: the set of each row.

    Rows with the same sets may train on different samples.
    """
    sets: list[TaskData] = []
    found: dict[int, int] = {}
    for each in data:
        if id(each) in found:
            continue
        alike = (
            number
            for number, other in enumerate(sets)
            if other.splits is each.splits and torch.equal(other.subset, each.subset)
        )
        found[id(each)] = next(alike, len(sets))
        if found[id(each)] == len(sets):
            sets.append(each)
    return sets, np.array([found[id(each)] for each in data], dtype=np.int64)
