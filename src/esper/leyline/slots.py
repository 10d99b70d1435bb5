"""Names and order of the slots of a host."""

from __future__ import annotations

import re
from dataclasses import dataclass

from esper.leyline.errors import UsageError, instead

_SLOT_ID = re.compile(r"r(\d+)c(\d+)\Z")


@dataclass(frozen=True, slots=True)
class SlotConfig:
    """The slots a controller acts on, in action order."""

    slot_ids: tuple[str, ...]

    def __post_init__(self) -> None:
        """Refuse empty and repeated ids; any sequence of ids becomes a tuple."""
        if isinstance(self.slot_ids, str):
            raise UsageError(f"slot ids must be a tuple of names, got the text {self.slot_ids!r}")
        object.__setattr__(self, "slot_ids", tuple(self.slot_ids))
        if not self.slot_ids:
            raise UsageError("a SlotConfig needs at least one slot id, for example ('r0c0',)")
        if len(set(self.slot_ids)) != len(self.slot_ids):
            raise UsageError(f"slot ids must differ, got {', '.join(self.slot_ids)}")

    @classmethod
    def default(cls) -> SlotConfig:
        """Return the three slots r0c0, r0c1, r0c2."""
        return cls.of(3)

    @classmethod
    def of(cls, count: int) -> SlotConfig:
        """Return `count` slots in row 0."""
        return cls(tuple(slot_id(0, column) for column in range(count)))

    @property
    def num_slots(self) -> int:
        """Number of slots."""
        return len(self.slot_ids)

    def index(self, name: str) -> int:
        """Return the position of a slot id, or raise with the known ids."""
        if name not in self.slot_ids:
            raise UsageError(f"unknown slot {name!r}{instead(name, self.slot_ids)}")
        return self.slot_ids.index(name)


def slot_id(row: int, column: int) -> str:
    """Return the id of the slot in this row and column."""
    return f"r{row}c{column}"


def parse_slot_id(name: str) -> tuple[int, int]:
    """Return (row, column) of a slot id such as 'r0c2'."""
    match = _SLOT_ID.match(name)
    if match is None:
        raise UsageError(f"slot id must look like 'r0c2' (row, column), got {name!r}")
    return int(match[1]), int(match[2])
