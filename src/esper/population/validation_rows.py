"""Who takes part in a pass over validation data, in memory that stays where it is.

A pass has positions: a row in one configuration of its seeds. A seed takes part at several of them
or at none, and it is never quite the same from one pass to the next. Where positions and places
cost little there are some to spare, so that a captured pass serves until somebody does not fit.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray

from esper.kasmina.state import SlotState
from esper.leyline.alpha import AlphaAlgorithm
from esper.population.capacity import Room
from esper.population.engine import SlotSpec
from esper.population.seed_stacks import GATE, IS_BLENDED, Nursery
from esper.population.slot_forward import Grafts, Part, SlotGrafts
from esper.population.slot_index import BLENDED, EMPTY, Integers, Seating, Seats
from esper.population.streams import Lanes

Key = tuple[int, int]
"""Slot and blueprint id, or GATE."""

_FADING = 0.97
"""What is left, after each pass, of how many were needed once."""


@dataclass(frozen=True, slots=True)
class Guests:
    """The seeds that take part at one slot, ordered by kind, place and position."""

    positions: Integers
    kinds: Integers
    places: Integers
    algorithm: Integers
    alpha: NDArray[np.float64]
    gated: Integers
    """Which of them have a gate, in the order of their gates."""
    gates: Integers
    """The places of these gates."""

    def count(self, slot: int) -> dict[Key, int]:
        """Return how many there are of every kind."""
        kinds, counts = np.unique(self.kinds, return_counts=True)
        found = {(slot, kind): n for kind, n in zip(kinds.tolist(), counts.tolist(), strict=True)}
        return found | ({(slot, GATE): len(self.gated)} if len(self.gated) else {})


class Gathering:
    """The positions of a pass and the seeds at every slot; `gather` says which they are."""

    def __init__(
        self,
        nursery: Nursery,
        slots: Sequence[SlotSpec],
        room: Room,
        device: torch.device,
        lanes: Lanes,
    ) -> None:
        """Choose from the seeds of a nursery; `room` says how many may be left to spare."""
        self._nursery, self._slots, self._room = nursery, tuple(slots), room
        self._device, self._lanes = device, lanes
        self.rows = torch.zeros(0, dtype=torch.int64, device=device)
        """int64, the row of every position; any where it is to spare."""
        self.grafts: Grafts = (None,) * len(self._slots)
        """What takes part at every slot."""
        self.moves = 0
        """How often memory was laid out anew: what was captured before is void."""
        self._laid_out_for = -1
        self._places: dict[Key, int] = {}
        self._peaks: dict[Key, float] = {}
        self._most_positions = 0.0

    def gather(self, rows: Integers, on: NDArray[np.bool_], state: SlotState) -> None:
        """Take rows [n], each as often as it comes; `on` [n, S] says which of its seeds take part.

        A seed that is not blended takes no part in any case.
        """
        guests = [
            find_guests(self._nursery, slot, rows, on[:, slot], state)
            for slot in range(len(self._slots))
        ]
        needed = {k: n for slot, each in enumerate(guests) for k, n in each.count(slot).items()}
        self._remember(len(rows), needed)
        if not self._fits(len(rows), needed):
            self._lay_out(len(rows), needed)
        padded = np.zeros(len(self.rows), dtype=np.int64)
        padded[: len(rows)] = rows
        self.rows.copy_(torch.from_numpy(padded))
        for slot, each in enumerate(guests):
            self._seat(slot, each)

    def _remember(self, positions: int, needed: dict[Key, int]) -> None:
        """Take note of how much is needed; what was needed long ago fades."""
        self._most_positions = max(positions, _FADING * self._most_positions)
        for key in self._peaks.keys() | needed.keys():
            self._peaks[key] = max(needed.get(key, 0), _FADING * self._peaks.get(key, 0.0))

    def _fits(self, positions: int, needed: dict[Key, int]) -> bool:
        """Return whether everybody finds a place as things are."""
        if not self._room.spares or self._laid_out_for != self._nursery.moves:
            return False
        return positions <= len(self.rows) and all(
            count <= self._places.get(key, 0) for key, count in needed.items()
        )

    def _lay_out(self, positions: int, needed: dict[Key, int]) -> None:
        """Make room for what is needed, and for what may soon be."""
        if self._room.spares:
            positions = self._room.positions(max(positions, round(self._most_positions)))
            wanted = {
                (bed.slot, bed.kind): max(
                    needed.get((bed.slot, bed.kind), 0),
                    round(self._peaks.get((bed.slot, bed.kind), 0.0)),
                    bed.count,
                )
                for bed in self._nursery.beds
            }
            needed = {
                key: self._room.places(self._slots[key[0]], count)
                for key, count in wanted.items()
                if count
            }
        self._places = needed
        self.rows = torch.zeros(positions, dtype=torch.int64, device=self._device)
        self.grafts = (None,) * len(self._slots)
        self._laid_out_for = self._nursery.moves
        self.moves += 1

    def _seat(self, slot: int, guests: Guests) -> None:
        """Put the guests of a slot in their places."""
        kinds = sorted(kind for where, kind in self._places if where == slot and kind != GATE)
        if not kinds:
            return
        counts = [self._places[slot, kind] for kind in kinds]
        first = np.cumsum([0, *counts])
        own = np.searchsorted(kinds, guests.kinds)
        rank = np.arange(len(own)) - np.searchsorted(own, own)
        seating = _make_seating(
            guests,
            first[own] + rank,
            places=int(first[-1]),
            gates=self._places.get((slot, GATE), 0),
            positions=len(self.rows),
        )
        chosen = [_padded(guests.places[own == k], count) for k, count in enumerate(counts)]
        gates = _padded(guests.gates, len(seating.gated))
        grown = self.grafts[slot]
        if grown is None:
            grafts = list(self.grafts)
            grafts[slot] = SlotGrafts(
                Seats.take(seating, self._device),
                tuple(self._part(slot, k, at) for k, at in zip(kinds, chosen, strict=True)),
                self._part(slot, GATE, gates) if len(gates) else None,
                self._lanes,
            )
            self.grafts = tuple(grafts)
            return
        grown.seats.change(seating)
        parts = [*grown.parts, *([grown.gates] if grown.gates is not None else [])]
        for part, at in zip(parts, [*chosen, *([gates] if len(gates) else [])], strict=True):
            assert part.places is not None
            part.places.copy_(torch.from_numpy(at))

    def _part(self, slot: int, kind: int, places: Integers) -> Part:
        bed = self._nursery.bed(slot, kind)
        if not self._room.spares and np.array_equal(places, np.arange(len(bed.rows))):
            return Part(bed.stack, None, bed.module, len(places))
        chosen = torch.from_numpy(places).to(self._device)
        return Part(bed.stack, chosen, bed.module, len(places))


def find_guests(
    nursery: Nursery, slot: int, rows: Integers, on: NDArray[np.bool_], state: SlotState
) -> Guests:
    """Return the seeds of a slot that take part in a pass over these rows."""
    alpha = state.alpha.numpy()[:, slot]
    blended = IS_BLENDED[state.stage.numpy()[:, slot]] & (alpha > 0)
    positions = np.flatnonzero(on & blended[rows])
    own = rows[positions]
    order = np.lexsort((positions, nursery.places[own, slot], nursery.kinds[own, slot]))
    positions, own = positions[order], own[order]
    algorithm = state.algorithm.numpy()[own, slot]
    gated = np.flatnonzero(algorithm == int(AlphaAlgorithm.GATE))
    gated = gated[np.argsort(nursery.gates[own[gated], slot], kind="stable")]
    return Guests(
        positions=positions,
        kinds=nursery.kinds[own, slot],
        places=nursery.places[own, slot],
        algorithm=algorithm,
        alpha=alpha[own],
        gated=gated,
        gates=nursery.gates[own[gated], slot],
    )


def _make_seating(
    guests: Guests, seats: Integers, *, places: int, gates: int, positions: int
) -> Seating:
    """Return the numbers of a slot where the guests have these seats and the rest is empty."""
    seating = Seating(
        rows=np.zeros(places, dtype=np.int64),
        holder=np.full(positions, -1, dtype=np.int64),
        state=np.full(places, EMPTY, dtype=np.int64),
        algorithm=np.zeros(places, dtype=np.int64),
        gate=np.full(places, -1, dtype=np.int64),
        gated=np.full(gates, -1, dtype=np.int64),
        gate_rows=np.zeros(gates, dtype=np.int64),
        alpha=np.ones(places),
    )
    seating.rows[seats] = guests.positions
    seating.holder[guests.positions] = seats
    seating.state[seats] = BLENDED
    seating.algorithm[seats] = guests.algorithm
    seating.alpha[seats] = guests.alpha
    count = len(guests.gated)
    seating.gate[seats[guests.gated]] = np.arange(count)
    seating.gated[:count] = seats[guests.gated]
    seating.gate_rows[:count] = guests.positions[guests.gated]
    return seating


def _padded(places: Integers, count: int) -> Integers:
    """Return the places, and the first one for whoever is to spare."""
    result = np.zeros(count, dtype=np.int64)
    result[: len(places)] = places
    return result
