"""The seeds of a stacked engine: one stack of parameters per slot and kind, one for gates.

A kind is a blueprint; copies of blocks (`kin`) are a kind for each number of them, so that all
seeds of a stack are of one shape.

`StackedEngine` keeps one `SeedStacks` for its rows. It follows the lifecycle state (`sync`), knows
the position of every row's seed (`kinds`, `entries`), and returns the modules that run at each slot
in training (`slot_forwards`). `validation` selects its own entries of the same stacks.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch
from torch import Tensor, nn

from esper.kasmina.blueprints.kin import as_seed, grow_copies
from esper.kasmina.blueprints.registry import blueprint_by_id
from esper.kasmina.costs import count_copies
from esper.kasmina.engine import Moments, RowWeights, without_prefix
from esper.kasmina.seedbed import draw_gate, draw_seed
from esper.kasmina.state import SlotState
from esper.lab.population.engine import CudaStreams, SlotSpec
from esper.lab.population.parameter_stack import ParameterStack, StackCapacity
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
from esper.lab.population.vmap_rules import install_vmap_rules
from esper.leyline.stages import BLENDED_STAGES, AlphaAlgorithm, SeedStage

GATE = -1
"""Kind of a slot's stack of gates; that of a stack of seeds is `seed_kind`."""

_DOUBLED = 1 << 16
"""What every doubling of copies adds to their kind; above all blueprint ids."""

ABSENT = -2
"""Kind or entry of a row without a seed or gate, and row of an unused entry."""

IS_BLENDED = np.isin(np.arange(max(SeedStage) + 1), BLENDED_STAGES)
"""By the value of a stage: whether the seed's output reaches the host's."""

_SEED = "seed."
_GATE = "gate."


def seed_kind(blueprint: Integers, doublings: Integers) -> Integers:
    """Return the kind of seeds of these blueprints, doubled so often."""
    return blueprint + _DOUBLED * doublings


@dataclass(frozen=True, slots=True)
class HostBlocks:
    """The blocks of stacked hosts that stand in front of slots, for seeds that are copies."""

    parameters: ParameterStack
    """Those of the hosts."""
    modules: Mapping[int, nn.Module]
    """By slot: a block without hooks, where it can be copied."""


@dataclass(slots=True)
class SeedStack:
    """The seeds (or gates) of one kind at one slot, and the rows they belong to."""

    slot: int
    kind: int
    module: nn.Module
    parameters: ParameterStack
    filler: dict[str, Tensor]
    """Parameters of unused entries: those of any seed of the kind."""
    rows: list[int]
    """The row of every entry, ABSENT where it is unused."""
    peak: int = 0
    """Largest number of entries in use since the stacks were made or renewed."""
    last_peak: int = 0
    """The same before the last renewal."""

    @property
    def count(self) -> int:
        """Number of entries in use."""
        return len(self.rows) - self.rows.count(ABSENT)

    @property
    def are_copies(self) -> bool:
        """Whether the seeds are copies of the host's blocks."""
        return self.kind != GATE and blueprint_by_id(self.kind % _DOUBLED).is_copy

    def whole(self) -> StackedModule:
        """Return the module that runs all entries, in order."""
        return StackedModule(self.parameters, None, self.module, len(self.rows))


class SeedStacks:
    """Parameters of all rows' seeds, kept in line with the lifecycle state."""

    def __init__(
        self,
        slots: tuple[SlotSpec, ...],
        keys: Sequence[int],
        dtype: torch.dtype,
        device: torch.device,
        compute: torch.dtype | None = None,
        capacity: StackCapacity | None = None,
        streams: CudaStreams | None = None,
        *,
        has_squares: bool = False,
        blocks: HostBlocks | None = None,
    ) -> None:
        """Start without seeds; `keys` name the rows' random streams.

        Weights have the precision `dtype`, activations `compute` (the same by default). `capacity`
        says how many entries a stack has for some seeds (just as many by default), `streams` where
        seeds of different kinds run, `has_squares` whether stacks keep what AdamW needs, `blocks`
        what seeds can be copies of.
        """
        self._slots = slots
        self._keys = list(keys)
        self._dtype = dtype
        self._device = device
        self._compute = compute or dtype
        self._capacity = capacity or StackCapacity()
        self._streams = streams or CudaStreams()
        self._has_squares = has_squares
        self._blocks = blocks
        self._stacks: dict[tuple[int, int], SeedStack] = {}
        self.kinds = np.full((len(keys), len(slots)), ABSENT, dtype=np.int64)
        """[R, S], kind of every row's seed, ABSENT where there is none."""
        self.entries = np.zeros_like(self.kinds)
        """[R, S], its entry in the stack of that kind."""
        self.gate_entries = np.full_like(self.kinds, ABSENT)
        """[R, S], the entry of its gate in the stack of gates, ABSENT without one."""
        self._forwards: dict[int, SlotForward] = {}
        self._forwards_version = -1
        self.germinations = [0] * len(keys)
        self.layout_version = 0
        """Counts changes of entries; a graph captured at another version is invalid."""

    @property
    def stacks(self) -> list[SeedStack]:
        """Return every stack, by slot and kind."""
        return [self._stacks[key] for key in sorted(self._stacks)]

    def stack(self, slot: int, kind: int) -> SeedStack:
        """Return the stack of a kind at a slot."""
        return self._stacks[slot, kind]

    def at_slot(self, slot: int) -> list[SeedStack]:
        """Return the stacks of seeds at a slot, by kind, without that of gates."""
        return [stack for stack in self.stacks if stack.slot == slot and stack.kind != GATE]

    def renew(self, keys: Sequence[int]) -> None:
        """Remove all seeds; `keys` name the random streams of the new rows.

        Cheap entries are kept for the next seeds, as many as were needed recently.
        """
        self._keys = list(keys)
        self.kinds.fill(ABSENT)
        self.entries.fill(0)
        self.gate_entries.fill(ABSENT)
        self.germinations = [0] * len(keys)
        for key, stack in list(self._stacks.items()):
            stack.rows = [ABSENT] * len(stack.rows)
            needed, stack.last_peak, stack.peak = max(stack.peak, stack.last_peak), stack.peak, 0
            entries = self._capacity.entries_kept(self._slots[stack.slot], len(stack.rows), needed)
            if not entries:
                del self._stacks[key]
                self.layout_version += 1
            elif entries != len(stack.rows):
                self._resize(stack, entries)

    def sync(self, state: SlotState) -> None:
        """Draw new seeds, free removed ones, and add or remove gates by blending algorithm."""
        present = state.has_module.numpy()
        own = seed_kind(state.blueprint.numpy(), state.doublings.numpy())
        wanted = np.where(present, own, ABSENT)
        gated = present & (state.algorithm.numpy() == int(AlphaAlgorithm.GATE))
        changed = (self.kinds != wanted) | ((self.gate_entries != ABSENT) != gated)
        version = self.layout_version
        for row, slot in np.argwhere(changed).tolist():
            held, kind = int(self.kinds[row, slot]), int(wanted[row, slot])
            # Before what is there goes: copies may be made of it.
            new = None if kind in (ABSENT, held) else self._germinate(row, slot, kind)
            if held not in (ABSENT, kind):
                self._remove(row, slot, held)
            if new is not None:
                self._add(row, slot, kind, *new)
            has_gate = self.gate_entries[row, slot] != ABSENT
            if gated[row, slot] and not has_gate:
                self._add_gate(row, slot)
            elif has_gate and not gated[row, slot]:
                self._remove(row, slot, GATE)
        self._shrink(has_changed=self.layout_version != version)

    def sizes(self, state: SlotState) -> Tensor:
        """Return int64 [R, S]: parameters of every seed with its gate."""
        result = np.zeros_like(self.kinds)
        for (slot, kind), stack in self._stacks.items():
            held = (
                self.gate_entries[:, slot] != ABSENT
                if kind == GATE
                else self.kinds[:, slot] == kind
            )
            result[:, slot] += stack.parameters.width * held
        return torch.from_numpy(result)

    def slot_forwards(self, state: SlotState) -> SlotForwards:
        """Return the modules that run at every slot in training: all entries of all stacks.

        Until the layout changes, these are the same objects with other values.
        """
        if self._forwards_version != self.layout_version:
            self._forwards, self._forwards_version = {}, self.layout_version
        return tuple(self._slot_forward(slot, state) for slot in range(len(self._slots)))

    def _slot_forward(self, slot: int, state: SlotState) -> SlotForward | None:
        stacks = self.at_slot(slot)
        if not stacks:
            return None
        rows = np.array([row for stack in stacks for row in stack.rows], dtype=np.int64)
        in_use = np.flatnonzero(rows != ABSENT)
        stage, alpha = state.stage.numpy()[:, slot], state.alpha.numpy()[:, slot]
        blended = IS_BLENDED[stage] & (alpha > 0)
        isolated = stage == int(SeedStage.TRAINING)
        own = rows[in_use]
        index = SlotIndexArrays(
            row_of_entry=np.maximum(rows, 0),
            entry_of_row=np.full(len(self._keys), -1, dtype=np.int64),
            state=np.full_like(rows, EMPTY),
            algorithm=np.zeros_like(rows),
            gate_of_entry=np.full_like(rows, -1),
            entry_of_gate=np.zeros(0, dtype=np.int64),
            row_of_gate=np.zeros(0, dtype=np.int64),
            alpha=np.ones(len(rows)),
        )
        index.state[in_use] = np.where(isolated[own], ISOLATED, blended[own] * BLENDED)
        here = index.state != EMPTY
        index.entry_of_row[rows[here]] = np.flatnonzero(here)
        index.algorithm[in_use] = state.algorithm.numpy()[own, slot]
        index.alpha[in_use] = np.where(isolated[own], 1.0, alpha[own])
        gates = self._stacks.get((slot, GATE))
        if gates is not None:
            owners = np.array(gates.rows, dtype=np.int64)
            # The -1 behind the last row is the entry of a gate that belongs to no row.
            gated = np.append(index.entry_of_row, -1)[np.where(owners == ABSENT, -1, owners)]
            index.gate_of_entry[gated[gated >= 0]] = np.flatnonzero(gated >= 0)
            index = replace(index, entry_of_gate=gated, row_of_gate=np.maximum(owners, 0))
        forward = self._forwards.get(slot)
        if forward is None:
            forward = self._forwards[slot] = SlotForward(
                SlotIndex.from_arrays(index, self._device),
                tuple(stack.whole() for stack in stacks),
                None if gates is None else gates.whole(),
                self._streams,
            )
        else:
            forward.index.copy_(index)
        return forward

    def read(self, row: int) -> tuple[dict[int, dict[str, Tensor]], dict[int, Moments]]:
        """Return the parameters of a row's seeds by slot, and their optimizer state."""
        values: dict[int, dict[str, Tensor]] = {}
        moments: dict[int, Moments] = {}
        for slot in range(len(self._slots)):
            for parameters, entry, prefix in self._parameters_of(row, slot):
                found, moving = parameters.read(entry)
                values.setdefault(slot, {}).update({prefix + k: v for k, v in found.items()})
                moments.setdefault(slot, Moments()).update(moving.behind(prefix))
        return values, moments

    def read_at_rest(self, row: int, wanted: Sequence[bool]) -> dict[int, dict[str, Tensor]]:
        """Return the parameters of a row's seeds at the given slots."""
        values: dict[int, dict[str, Tensor]] = {}
        for slot in (slot for slot, is_wanted in enumerate(wanted) if is_wanted):
            for parameters, entry, prefix in self._parameters_of(row, slot):
                (found,) = parameters.read_at_rest([entry])
                values.setdefault(slot, {}).update({prefix + k: v for k, v in found.items()})
        return values

    def _parameters_of(self, row: int, slot: int) -> Iterator[tuple[ParameterStack, int, str]]:
        """Yield (parameters, entry, prefix) of a row's seed and of its gate, if any."""
        held, gate = int(self.kinds[row, slot]), int(self.gate_entries[row, slot])
        if held != ABSENT:
            yield self._stacks[slot, held].parameters, int(self.entries[row, slot]), _SEED
        if gate != ABSENT:
            yield self._stacks[slot, GATE].parameters, gate, _GATE

    def write(self, row: int, weights: RowWeights, state: SlotState) -> None:
        """Replace a row's seeds with saved ones."""
        for slot in range(len(self._slots)):
            if self.kinds[row, slot] != ABSENT:
                self._remove(row, slot, int(self.kinds[row, slot]))
            if self.gate_entries[row, slot] != ABSENT:
                self._remove(row, slot, GATE)
        for slot, values in weights.seeds.items():
            moments = weights.seed_moments[slot]
            kind = int(seed_kind(state.blueprint.numpy(), state.doublings.numpy())[0, slot])
            self._add(row, slot, kind, without_prefix(_SEED, values), moments.under(_SEED))
            gate = without_prefix(_GATE, values)
            if gate:
                self._add(row, slot, GATE, gate, moments.under(_GATE))
        self.germinations[row] = weights.germinations

    def _germinate(self, row: int, slot: int, kind: int) -> tuple[dict[str, Tensor], Moments]:
        """Return the parameters of a new seed, and what is remembered of them."""
        blueprint, spec = blueprint_by_id(kind % _DOUBLED), self._slots[slot]
        key = (self._keys[row], slot, self.germinations[row])
        self.germinations[row] += 1
        if blueprint.is_copy:
            return self._copy(row, slot, count_copies(kind // _DOUBLED))
        seed = draw_seed(blueprint, spec.channels, spec.topology, spec.symmetry, key)
        return dict(seed.named_parameters()), Moments()

    def _copy(self, row: int, slot: int, count: int) -> tuple[dict[str, Tensor], Moments]:
        """Return copies of what is awake, a block and its copies: as many as are wanted."""
        assert self._blocks is not None, "only blocks that were handed over can be copied"
        values, moments = self._blocks.parameters.read(row)
        prefix = f"{self._slots[slot].path}."
        block = without_prefix(prefix, values), moments.under(prefix)
        copies = self._copies(row, slot)[:count]
        while len(copies) < count:
            copies += [block, *copies]
        if count == 1:
            return copies[0]
        whole: dict[str, Tensor] = {}
        remembered = Moments()
        for number, (own, moving) in enumerate(copies):
            whole |= {f"{number}.{name}": value for name, value in own.items()}
            remembered.update(moving.behind(f"{number}."))
        return whole, remembered

    def _copies(self, row: int, slot: int) -> list[tuple[dict[str, Tensor], Moments]]:
        """Return the copies that a row has in a slot, in the order in which they run."""
        held = int(self.kinds[row, slot])
        if held == ABSENT:
            return []
        values, moments = self._stacks[slot, held].parameters.read(int(self.entries[row, slot]))
        count = count_copies(held // _DOUBLED)
        if count == 1:
            return [(values, moments)]
        prefixes = [f"{number}." for number in range(count)]
        return [(without_prefix(each, values), moments.under(each)) for each in prefixes]

    def _make_module(self, slot: int, kind: int) -> nn.Module:
        """Return a module of a kind, for its forward and the shapes of its parameters."""
        spec, key = self._slots[slot], (0, slot, 0)
        if kind == GATE:
            return draw_gate(spec.channels, spec.topology, key)
        blueprint = blueprint_by_id(kind % _DOUBLED)
        if not blueprint.is_copy:
            return draw_seed(blueprint, spec.channels, spec.topology, spec.symmetry, key)
        assert self._blocks is not None, "only blocks that were handed over can be copied"
        copies, _ = grow_copies(self._blocks.modules[slot], (), count_copies(kind // _DOUBLED))
        return as_seed(copies)

    def _add_gate(self, row: int, slot: int) -> None:
        spec = self._slots[slot]
        key = (self._keys[row], slot, self.germinations[row])
        gate = draw_gate(spec.channels, spec.topology, key)
        self._add(row, slot, GATE, dict(gate.named_parameters()), Moments())

    def _add(
        self,
        row: int,
        slot: int,
        kind: int,
        values: dict[str, Tensor],
        moments: Moments,
    ) -> None:
        if (slot, kind) not in self._stacks:
            self._stacks[slot, kind] = self._make_stack(slot, kind)
        stack = self._stacks[slot, kind]
        if ABSENT not in stack.rows:
            self._resize(stack, self._capacity.entries(self._slots[slot], stack.count + 1))
        entry = stack.rows.index(ABSENT)
        stack.parameters.write(entry, values, moments)
        stack.rows[entry] = row
        stack.peak = max(stack.peak, stack.count)
        self._record_entry(stack, row, entry)

    def _make_stack(self, slot: int, kind: int) -> SeedStack:
        module = self._make_module(slot, kind)
        parameters = dict(module.named_parameters())
        shapes = {name: value.shape for name, value in parameters.items()}
        frozen = [name for name, p in parameters.items() if not p.requires_grad]
        filler = {name: p.detach().clone() for name, p in parameters.items()}
        module = install_vmap_rules(module.to(device=self._device, dtype=self._compute))
        stacked = ParameterStack(
            shapes,
            self._dtype,
            self._device,
            frozen,
            self._compute,
            has_squares=self._has_squares,
        )
        return SeedStack(slot, kind, module, stacked, filler, [])

    def _remove(self, row: int, slot: int, kind: int) -> None:
        stack = self._stacks[slot, kind]
        stack.rows[stack.rows.index(row)] = ABSENT
        (self.gate_entries if kind == GATE else self.kinds)[row, slot] = ABSENT

    def _record_entry(self, stack: SeedStack, row: int, entry: int) -> None:
        """Record the entry of a row's seed or gate."""
        if stack.kind == GATE:
            self.gate_entries[row, stack.slot] = entry
        else:
            self.kinds[row, stack.slot], self.entries[row, stack.slot] = stack.kind, entry

    def _shrink(self, *, has_changed: bool) -> None:
        """Remove unused entries of stacks that `capacity` calls oversized."""
        wanted = {
            key: self._capacity.entries(self._slots[stack.slot], stack.count) if stack.count else 0
            for key, stack in self._stacks.items()
            if not self._capacity.is_cheap(self._slots[stack.slot])
        }
        sizes = {key: (len(self._stacks[key].rows), count) for key, count in wanted.items()}
        for key in self._capacity.oversized(sizes, has_changed=has_changed):
            if wanted[key]:
                self._resize(self._stacks[key], wanted[key])
            else:
                del self._stacks[key]
                self.layout_version += 1

    def _resize(self, stack: SeedStack, entries: int) -> None:
        """Change the number of entries of a stack; those in use come first."""
        in_use = [entry for entry, row in enumerate(stack.rows) if row != ABSENT]
        stack.parameters.resize(in_use, entries, stack.filler)
        rows = [stack.rows[entry] for entry in in_use]
        stack.rows = rows + [ABSENT] * (entries - len(rows))
        for entry, row in enumerate(rows):
            self._record_entry(stack, row, entry)
        self.layout_version += 1
