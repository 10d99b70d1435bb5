"""The seeds of a stacked group of rows: one stack per slot and blueprint, one for its gates."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor, nn

from esper.kasmina.blueprints.registry import blueprint_by_id
from esper.kasmina.engine import RowWeights
from esper.kasmina.seedbed import draw_gate, draw_seed
from esper.kasmina.state import SlotState
from esper.leyline.alpha import AlphaAlgorithm
from esper.leyline.stages import BLENDED_STAGES, SeedStage
from esper.population.capacity import Room
from esper.population.engine import SlotSpec
from esper.population.parameter_stack import Stack
from esper.population.slot_forward import Part, SlotGrafts
from esper.population.slot_index import BLENDED, EMPTY, ISOLATED, Integers, Seating, Seats
from esper.population.streams import Lanes
from esper.population.vmap_rules import shorten

GATE = -1
"""Stands in the place of a blueprint id for a slot's stack of gates."""

NOBODY = -2
"""Stands in the place of a blueprint id where there is no seed, and of a row in an empty place."""

IS_BLENDED = np.isin(np.arange(max(SeedStage) + 1), BLENDED_STAGES)
"""By the value of a stage: whether the seed's output reaches the host's."""

_SEED = "seed."
_GATE = "gate."


@dataclass(slots=True)
class Bed:
    """A stack of seeds (or gates) of one kind at one slot, and whose they are."""

    slot: int
    kind: int
    module: nn.Module
    stack: Stack
    filler: dict[str, Tensor]
    """Parameters for empty places: those of some seed of the kind."""
    rows: list[int]
    """The row of every place, NOBODY where it is empty."""
    peak: int = 0
    """Most places that were taken at once since the nursery was made or renewed."""
    last_peak: int = 0
    """The same before it was renewed."""

    @property
    def count(self) -> int:
        """Number of places that are taken."""
        return len(self.rows) - self.rows.count(NOBODY)


class Nursery:
    """Keeps the seeds of all rows and agrees with their lifecycle state."""

    def __init__(
        self,
        slots: tuple[SlotSpec, ...],
        keys: Sequence[int],
        dtype: torch.dtype,
        device: torch.device,
        compute: torch.dtype | None = None,
        room: Room | None = None,
        lanes: Lanes | None = None,
    ) -> None:
        """Create a nursery without seeds; `keys` name the rows' random streams.

        Weights have the precision `dtype`, activations `compute` (the same by default). `room` says
        how many places a stack has for some seeds (just as many by default), `lanes` where seeds of
        different kinds run.
        """
        self._slots = slots
        self._keys = list(keys)
        self._dtype = dtype
        self._device = device
        self._compute = compute or dtype
        self._room = room or Room()
        self._lanes = lanes or Lanes()
        self._beds: dict[tuple[int, int], Bed] = {}
        self.kinds = np.full((len(keys), len(slots)), NOBODY, dtype=np.int64)
        """[R, S], blueprint id of every row's seed, NOBODY where there is none."""
        self.places = np.zeros_like(self.kinds)
        """[R, S], its place in the bed."""
        self.gates = np.full_like(self.kinds, NOBODY)
        """[R, S], the place of its gate, NOBODY where there is none."""
        self._seated: dict[int, SlotGrafts] = {}
        self._seated_for = -1
        self.germinations = [0] * len(keys)
        self.moves = 0
        """How often places were added or given up: what was captured before is void."""

    @property
    def beds(self) -> list[Bed]:
        """Return every bed, by slot and kind."""
        return [self._beds[key] for key in sorted(self._beds)]

    def renew(self, keys: Sequence[int]) -> None:
        """Forget all seeds; `keys` name the random streams of as many other rows.

        Where places cost little they stay, as many as were needed of late, for the next seeds.
        """
        self._keys = list(keys)
        self.kinds.fill(NOBODY)
        self.places.fill(0)
        self.gates.fill(NOBODY)
        self.germinations = [0] * len(keys)
        for key, bed in list(self._beds.items()):
            bed.rows = [NOBODY] * len(bed.rows)
            needed, bed.last_peak, bed.peak = max(bed.peak, bed.last_peak), bed.peak, 0
            capacity = self._room.kept(self._slots[bed.slot], len(bed.rows), needed)
            if not capacity:
                del self._beds[key]
                self.moves += 1
            elif capacity != len(bed.rows):
                self._arrange(bed, capacity)

    def sync(self, state: SlotState) -> None:
        """Make room for new seeds and free those that are gone; gates follow the algorithm."""
        present = state.has_module.numpy()
        wanted = np.where(present, state.blueprint.numpy(), NOBODY)
        gated = present & (state.algorithm.numpy() == int(AlphaAlgorithm.GATE))
        changed = (self.kinds != wanted) | ((self.gates != NOBODY) != gated)
        moves = self.moves
        for row, slot in np.argwhere(changed).tolist():
            held, kind = int(self.kinds[row, slot]), int(wanted[row, slot])
            if held not in (NOBODY, kind):
                self._drop(row, slot, held)
            if kind not in (NOBODY, held):
                self._germinate(row, slot, kind)
            has_gate = self.gates[row, slot] != NOBODY
            if gated[row, slot] and not has_gate:
                self._open_gate(row, slot)
            elif has_gate and not gated[row, slot]:
                self._drop(row, slot, GATE)
        self._give_up_places(has_moved=self.moves != moves)

    def sizes(self, state: SlotState) -> Tensor:
        """Return int64 [R, S]: parameters of every seed with its gate."""
        result = np.zeros_like(self.kinds)
        for (slot, kind), bed in self._beds.items():
            held = self.gates[:, slot] != NOBODY if kind == GATE else self.kinds[:, slot] == kind
            result[:, slot] += bed.stack.width * held
        return torch.from_numpy(result)

    def seat(self, state: SlotState) -> tuple[SlotGrafts | None, ...]:
        """Return what has grown at every slot for training: all places of all beds.

        Until places move it is the same object with other numbers in it.
        """
        if self._seated_for != self.moves:
            self._seated, self._seated_for = {}, self.moves
        return tuple(self._seat_slot(slot, state) for slot in range(len(self._slots)))

    def _seat_slot(self, slot: int, state: SlotState) -> SlotGrafts | None:
        beds = self.seed_beds(slot)
        if not beds:
            return None
        rows = np.array([row for bed in beds for row in bed.rows], dtype=np.int64)
        taken = np.flatnonzero(rows != NOBODY)
        stage, alpha = state.stage.numpy()[:, slot], state.alpha.numpy()[:, slot]
        blended = IS_BLENDED[stage] & (alpha > 0)
        isolated = stage == int(SeedStage.TRAINING)
        own = rows[taken]
        places = Seating(
            rows=np.maximum(rows, 0),
            holder=np.full(len(self._keys), -1, dtype=np.int64),
            state=np.full_like(rows, EMPTY),
            algorithm=np.zeros_like(rows),
            gate=np.full_like(rows, -1),
            gated=np.zeros(0, dtype=np.int64),
            gate_rows=np.zeros(0, dtype=np.int64),
            alpha=np.ones(len(rows)),
        )
        places.state[taken] = np.where(isolated[own], ISOLATED, blended[own] * BLENDED)
        here = places.state != EMPTY
        places.holder[rows[here]] = np.flatnonzero(here)
        places.algorithm[taken] = state.algorithm.numpy()[own, slot]
        places.alpha[taken] = np.where(isolated[own], 1.0, alpha[own])
        gates = self._beds.get((slot, GATE))
        if gates is not None:
            owners = np.array(gates.rows, dtype=np.int64)
            holder = np.append(places.holder, -1)
            gated = holder[np.where(owners == NOBODY, -1, owners)]
            places.gate[gated[gated >= 0]] = np.flatnonzero(gated >= 0)
            gate_rows = np.maximum(owners, 0)
            places = _replace_gates(places, gated, gate_rows)
        grown = self._seated.get(slot)
        if grown is None:
            parts = tuple(Part(bed.stack, None, bed.module, len(bed.rows)) for bed in beds)
            gate_part = None
            if gates is not None:
                gate_part = Part(gates.stack, None, gates.module, len(gates.rows))
            seats = Seats.take(places, self._device)
            grown = SlotGrafts(seats, parts, gate_part, self._lanes)
            self._seated[slot] = grown
        else:
            grown.seats.change(places)
        return grown

    def read(self, row: int) -> tuple[dict[int, dict[str, Tensor]], dict[int, dict[str, Tensor]]]:
        """Return parameters and momentum of a row's seeds by slot."""
        values: dict[int, dict[str, Tensor]] = {}
        momenta: dict[int, dict[str, Tensor]] = {}
        for slot in range(len(self._slots)):
            for stack, place, prefix in self._stacks_of(row, slot):
                found, moving = stack.read(place)
                values.setdefault(slot, {}).update({prefix + k: v for k, v in found.items()})
                momenta.setdefault(slot, {}).update({prefix + k: v for k, v in moving.items()})
        return values, momenta

    def read_at_rest(self, row: int, wanted: Sequence[bool]) -> dict[int, dict[str, Tensor]]:
        """Return parameters of a row's seeds at the slots that are wanted."""
        values: dict[int, dict[str, Tensor]] = {}
        for slot in (slot for slot, is_wanted in enumerate(wanted) if is_wanted):
            for stack, place, prefix in self._stacks_of(row, slot):
                (found,) = stack.read_at_rest([place])
                values.setdefault(slot, {}).update({prefix + k: v for k, v in found.items()})
        return values

    def _stacks_of(self, row: int, slot: int) -> Iterator[tuple[Stack, int, str]]:
        """Yield (stack, place, prefix) of a row's seed and of its gate, as far as it has them."""
        held, gate = int(self.kinds[row, slot]), int(self.gates[row, slot])
        if held != NOBODY:
            yield self._beds[slot, held].stack, int(self.places[row, slot]), _SEED
        if gate != NOBODY:
            yield self._beds[slot, GATE].stack, gate, _GATE

    def write(self, row: int, weights: RowWeights, state: SlotState) -> None:
        """Replace a row's seeds by saved ones."""
        for slot in range(len(self._slots)):
            if self.kinds[row, slot] != NOBODY:
                self._drop(row, slot, int(self.kinds[row, slot]))
            if self.gates[row, slot] != NOBODY:
                self._drop(row, slot, GATE)
        for slot, values in weights.seeds.items():
            momentum = weights.seed_momentum[slot]
            kind = int(state.blueprint[0, slot])
            self._plant(row, slot, kind, _under(_SEED, values), _under(_SEED, momentum) or None)
            gate = _under(_GATE, values)
            if gate:
                self._plant(row, slot, GATE, gate, _under(_GATE, momentum) or None)
        self.germinations[row] = weights.germinations

    def _germinate(self, row: int, slot: int, kind: int) -> None:
        spec = self._slots[slot]
        key = (self._keys[row], slot, self.germinations[row])
        seed = draw_seed(blueprint_by_id(kind), spec.channels, spec.topology, key)
        self.germinations[row] += 1
        self._plant(row, slot, kind, dict(seed.named_parameters()), None)

    def _open_gate(self, row: int, slot: int) -> None:
        spec = self._slots[slot]
        key = (self._keys[row], slot, self.germinations[row])
        gate = draw_gate(spec.channels, spec.topology, key)
        self._plant(row, slot, GATE, dict(gate.named_parameters()), None)

    def _plant(
        self,
        row: int,
        slot: int,
        kind: int,
        values: dict[str, Tensor],
        momentum: dict[str, Tensor] | None,
    ) -> None:
        if (slot, kind) not in self._beds:
            self._beds[slot, kind] = self._make_bed(slot, kind)
        bed = self._beds[slot, kind]
        if NOBODY not in bed.rows:
            self._arrange(bed, self._room.places(self._slots[slot], bed.count + 1))
        place = bed.rows.index(NOBODY)
        bed.stack.write(place, values, momentum)
        bed.rows[place] = row
        bed.peak = max(bed.peak, bed.count)
        self._note(bed, row, place)

    def _make_bed(self, slot: int, kind: int) -> Bed:
        spec, key = self._slots[slot], (0, slot, 0)
        module = (
            draw_gate(spec.channels, spec.topology, key)
            if kind == GATE
            else draw_seed(blueprint_by_id(kind), spec.channels, spec.topology, key)
        )
        parameters = dict(module.named_parameters())
        shapes = {name: value.shape for name, value in parameters.items()}
        frozen = [name for name, p in parameters.items() if not p.requires_grad]
        filler = {name: p.detach().clone() for name, p in parameters.items()}
        module = shorten(module.to(device=self._device, dtype=self._compute))
        stack = Stack(shapes, self._dtype, self._device, frozen, self._compute)
        return Bed(slot, kind, module, stack, filler, [])

    def _drop(self, row: int, slot: int, kind: int) -> None:
        bed = self._beds[slot, kind]
        bed.rows[bed.rows.index(row)] = NOBODY
        (self.gates if kind == GATE else self.kinds)[row, slot] = NOBODY

    def _note(self, bed: Bed, row: int, place: int) -> None:
        """Remember where a row's seed or gate is."""
        if bed.kind == GATE:
            self.gates[row, bed.slot] = place
        else:
            self.kinds[row, bed.slot], self.places[row, bed.slot] = bed.kind, place

    def _give_up_places(self, *, has_moved: bool) -> None:
        """Give up places that nobody takes, where the room says it is time."""
        wanted = {
            key: self._room.places(self._slots[bed.slot], bed.count) if bed.count else 0
            for key, bed in self._beds.items()
            if not self._room.is_cheap(self._slots[bed.slot])
        }
        sizes = {key: (len(self._beds[key].rows), count) for key, count in wanted.items()}
        for key in self._room.too_large(sizes, has_moved=has_moved):
            if wanted[key]:
                self._arrange(self._beds[key], wanted[key])
            else:
                del self._beds[key]
                self.moves += 1

    def _arrange(self, bed: Bed, capacity: int) -> None:
        """Give a bed this many places; those that are taken come first."""
        taken = [place for place, row in enumerate(bed.rows) if row != NOBODY]
        bed.stack.arrange(taken, capacity, bed.filler)
        rows = [bed.rows[place] for place in taken]
        bed.rows = rows + [NOBODY] * (capacity - len(rows))
        for place, row in enumerate(rows):
            self._note(bed, row, place)
        self.moves += 1

    def bed(self, slot: int, kind: int) -> Bed:
        """Return the bed of a kind at a slot."""
        return self._beds[slot, kind]

    def seed_beds(self, slot: int) -> list[Bed]:
        """Return the beds of seeds at a slot, by kind."""
        return [bed for bed in self.beds if bed.slot == slot and bed.kind != GATE]


def _replace_gates(seating: Seating, gated: Integers, gate_rows: Integers) -> Seating:
    return Seating(
        seating.rows,
        seating.holder,
        seating.state,
        seating.algorithm,
        seating.gate,
        gated,
        gate_rows,
        seating.alpha,
    )


def _under(prefix: str, values: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return what is named under a prefix, without it."""
    return {
        name.removeprefix(prefix): value
        for name, value in values.items()
        if name.startswith(prefix)
    }
