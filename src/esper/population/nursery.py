"""The seeds of a stacked group of rows: one stack per slot and blueprint, one for its gates."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from esper.kasmina.blueprints.registry import blueprint_by_id
from esper.kasmina.seeding import draw_gate, draw_seed
from esper.kasmina.state import SlotState
from esper.leyline.alpha import AlphaAlgorithm, AlphaMode
from esper.leyline.stages import BLENDED_STAGES, SeedStage
from esper.population.engine import RowWeights, SlotSpec
from esper.population.grafts import Part, SlotGrafts
from esper.population.shortcuts import shorten
from esper.population.stack import Stack

GATE = -1
"""Stands in the place of a blueprint id for a slot's stack of gates."""

_SEED = "seed."
_GATE = "gate."


@dataclass(slots=True)
class Bed:
    """A stack of seeds (or gates) of one kind at one slot, and whose they are."""

    slot: int
    kind: int
    module: nn.Module
    stack: Stack
    rows: list[int]


@dataclass(frozen=True, slots=True)
class Member:
    """A seed that takes part in a forward pass."""

    position: int
    """Where its row stands in the stacked batch."""
    row: int
    kind: int
    """Blueprint id."""
    algorithm: int
    alpha: float
    """1 where isolated."""
    is_isolated: bool


@dataclass(frozen=True, slots=True)
class Entry:
    """Who of a bed learns in this epoch."""

    bed: Bed
    active: Tensor
    """bool [n, 1]."""


class Nursery:
    """Keeps the seeds of all rows and agrees with their lifecycle state."""

    def __init__(
        self,
        slots: tuple[SlotSpec, ...],
        keys: Sequence[int],
        dtype: torch.dtype,
        device: torch.device,
        compute: torch.dtype | None = None,
    ) -> None:
        """Create a nursery without seeds; `keys` name the rows' random streams.

        Weights have the precision `dtype`, activations `compute` (the same by default).
        """
        self._slots = slots
        self._keys = list(keys)
        self._dtype = dtype
        self._device = device
        self._compute = compute or dtype
        self._beds: dict[tuple[int, int], Bed] = {}
        self.germinations = [0] * len(keys)

    def sync(self, state: SlotState) -> None:
        """Make room for new seeds and free those that are gone; gates follow the algorithm."""
        present = state.has_module.tolist()
        blueprint, algorithm = state.blueprint.tolist(), state.algorithm.tolist()
        for row in range(len(self._keys)):
            for slot in range(len(self._slots)):
                held = self._held(row, slot)
                wanted = blueprint[row][slot] if present[row][slot] else None
                if held is not None and held != wanted:
                    self._drop(row, slot, held)
                if wanted is not None and held != wanted:
                    self._germinate(row, slot, wanted)
                gated = wanted is not None and algorithm[row][slot] == AlphaAlgorithm.GATE
                has_gate = self._has(row, slot, GATE)
                if gated and not has_gate:
                    self._open_gate(row, slot)
                elif has_gate and not gated:
                    self._drop(row, slot, GATE)

    def sizes(self, state: SlotState) -> Tensor:
        """Return int64 [R, S]: parameters of every seed with its gate."""
        result = torch.zeros_like(state.params)
        for bed in self._beds.values():
            for row in bed.rows:
                result[row, bed.slot] += bed.stack.width
        return result

    def grafts(self, slot: int, members: list[Member], total: int) -> SlotGrafts | None:
        """Return what has grown at a slot of `total` stacked rows; None without members."""
        if not members:
            return None
        kinds = sorted({member.kind for member in members})
        ordered: list[Member] = []
        parts = []
        for kind in kinds:
            bed = self._beds[slot, kind]
            own = [member for member in members if member.kind == kind]
            own.sort(key=lambda member: (bed.rows.index(member.row), member.position))
            start = len(ordered)
            ordered += own
            parts.append(self._part(bed, own, slice(start, len(ordered))))
        positions = [member.position for member in ordered]
        isolated = [member.is_isolated for member in ordered]
        algorithms = [member.algorithm for member in ordered]
        multiplies = [algorithm == AlphaAlgorithm.MULTIPLY for algorithm in algorithms]
        gated = [n for n, algorithm in enumerate(algorithms) if algorithm == AlphaAlgorithm.GATE]
        gates = None
        if gated:
            bed = self._beds[slot, GATE]
            gated.sort(key=lambda n: (bed.rows.index(ordered[n].row), ordered[n].position))
            gates = self._part(bed, [ordered[n] for n in gated], slice(0, len(gated)))
        return SlotGrafts(
            rows=None if positions == list(range(total)) else self._tensor(positions),
            parts=tuple(parts),
            alpha=torch.tensor(
                [member.alpha for member in ordered], dtype=torch.float64, device=self._device
            ),
            isolated=self._flags(isolated) if any(isolated) else None,
            multiplies=self._flags(multiplies) if any(multiplies) else None,
            gates=gates,
            gated=self._tensor(gated) if gated else None,
        )

    def _part(self, bed: Bed, members: list[Member], where: slice) -> Part:
        places = [bed.rows.index(member.row) for member in members]
        whole = places == list(range(len(bed.rows)))
        return Part(bed.stack, None if whole else self._tensor(places), bed.module, where)

    def active(self, state: SlotState) -> list[tuple[Stack, Entry]]:
        """Return every bed in which some seed learns now, with who does."""
        stage, alpha = state.stage.tolist(), state.alpha.tolist()
        mode = state.alpha_mode.tolist()
        result = []
        for bed in self._beds.values():
            learning = [
                mode[row][bed.slot] != AlphaMode.DOWN
                and (
                    stage[row][bed.slot] == SeedStage.TRAINING
                    or (stage[row][bed.slot] in BLENDED_STAGES and alpha[row][bed.slot] > 0)
                )
                for row in bed.rows
            ]
            if bed.stack.width and any(learning):
                active = torch.tensor(learning, device=self._device)[:, None]
                result.append((bed.stack, Entry(bed, active)))
        return result

    def shared(self, stacks: list[tuple[Stack, Entry]]) -> list[tuple[int, int, Tensor, Tensor]]:
        """Return (gates, seeds, places, places): whose norms belong together, a seed and its gate.

        The first two are positions in `stacks`, the others positions in those stacks.
        """
        result = []
        for number, (_, entry) in enumerate(stacks):
            if entry.bed.kind != GATE:
                continue
            for other, (_, seeds) in enumerate(stacks):
                if seeds.bed.slot != entry.bed.slot or seeds.bed.kind == GATE:
                    continue
                both = [row for row in seeds.bed.rows if row in entry.bed.rows]
                if both:
                    here = self._tensor([entry.bed.rows.index(row) for row in both])
                    there = self._tensor([seeds.bed.rows.index(row) for row in both])
                    result.append((number, other, here, there))
        return result

    def seed_norms(
        self,
        stacks: list[tuple[Stack, Entry]],
        gradients: Sequence[Tensor],
        reached: Sequence[Sequence[bool]],
        state: SlotState | None,
    ) -> Iterator[tuple[int, int, Tensor, int]]:
        """Yield (slot, row, norms of its gradient tensors, size) of seeds in TRAINING, BLENDING.

        `reached` says for every stack which of its tensors the loss reaches at all.
        """
        assert state is not None
        found: dict[tuple[int, int], list[Tensor]] = {}
        sizes: dict[tuple[int, int], int] = {}
        for (stack, entry), gradient, with_gradient in zip(stacks, gradients, reached, strict=True):
            norms = stack.tensor_norms(gradient).cpu()[:, torch.tensor(with_gradient)]
            active = entry.active.cpu()
            for place, row in enumerate(entry.bed.rows):
                key = (entry.bed.slot, row)
                sizes[key] = sizes.get(key, 0) + stack.width
                # A frozen seed has no gradient at all: nothing has vanished there.
                if bool(active[place, 0]):
                    found.setdefault(key, []).append(norms[place])
                else:
                    found.setdefault(key, [])
        nothing = torch.zeros(0, dtype=torch.float64)
        for row, stages in enumerate(state.stage.tolist()):
            for slot, stage in enumerate(stages):
                if stage in (SeedStage.TRAINING, SeedStage.BLENDING):
                    norms_of = found.get((slot, row), [])
                    size = sizes.get((slot, row), 0)
                    yield slot, row, torch.cat([nothing, *norms_of]), size

    def read(self, row: int) -> tuple[dict[int, dict[str, Tensor]], dict[int, dict[str, Tensor]]]:
        """Return parameters and momentum of a row's seeds by slot."""
        values: dict[int, dict[str, Tensor]] = {}
        momenta: dict[int, dict[str, Tensor]] = {}
        for bed in self._beds.values():
            if row in bed.rows:
                prefix = _GATE if bed.kind == GATE else _SEED
                found, moving = bed.stack.read(bed.rows.index(row))
                values.setdefault(bed.slot, {}).update({prefix + k: v for k, v in found.items()})
                momenta.setdefault(bed.slot, {}).update({prefix + k: v for k, v in moving.items()})
        return values, momenta

    def write(self, row: int, weights: RowWeights, state: SlotState) -> None:
        """Replace a row's seeds by saved ones."""
        for bed in list(self._beds.values()):
            if row in bed.rows:
                self._drop(row, bed.slot, bed.kind)
        for slot, values in weights.seeds.items():
            momentum = weights.seed_momentum[slot]
            kind = int(state.blueprint[0, slot])
            self._plant(row, slot, kind, _under(_SEED, values), _under(_SEED, momentum))
            gate = _under(_GATE, values)
            if gate:
                self._plant(row, slot, GATE, gate, _under(_GATE, momentum))
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
            spec, key = self._slots[slot], (0, slot, 0)
            module = (
                draw_gate(spec.channels, spec.topology, key)
                if kind == GATE
                else draw_seed(blueprint_by_id(kind), spec.channels, spec.topology, key)
            )
            shapes = {name: value.shape for name, value in values.items()}
            frozen = [name for name, p in module.named_parameters() if not p.requires_grad]
            module = shorten(module.to(device=self._device, dtype=self._compute))
            stack = Stack(shapes, self._dtype, self._device, frozen)
            self._beds[slot, kind] = Bed(slot, kind, module, stack, [])
        bed = self._beds[slot, kind]
        bed.stack.append(values, momentum)
        bed.rows.append(row)

    def _drop(self, row: int, slot: int, kind: int) -> None:
        bed = self._beds[slot, kind]
        place = bed.rows.index(row)
        bed.stack.remove(place)
        del bed.rows[place]
        if not bed.rows:
            del self._beds[slot, kind]

    def _held(self, row: int, slot: int) -> int | None:
        for (place, kind), bed in self._beds.items():
            if place == slot and kind != GATE and row in bed.rows:
                return kind
        return None

    def _has(self, row: int, slot: int, kind: int) -> bool:
        return (slot, kind) in self._beds and row in self._beds[slot, kind].rows

    def _flags(self, values: list[bool]) -> Tensor:
        return torch.tensor(values, device=self._device)

    def _tensor(self, values: list[int]) -> Tensor:
        return torch.tensor(values, dtype=torch.int64, device=self._device)


def _under(prefix: str, values: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return what is named under a prefix, without it."""
    return {
        name.removeprefix(prefix): value
        for name, value in values.items()
        if name.startswith(prefix)
    }
