"""The parts of a host in the order in which they are called, as plain records for drawings."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, slots=True, kw_only=True)
class ModuleRecord:
    """One submodule of a host, with the slots that sit on its output."""

    path: str
    """Dotted name within the host."""
    kind: str
    """Name of its class."""
    parameters: int
    """Trainable parameters that no other part counts."""
    shape: tuple[int, ...] | None
    """Shape of its output for one sample; None where that is not one tensor."""
    slots: tuple[str, ...]

    def to_mapping(self) -> dict[str, Any]:
        """Return plain data that `from_mapping` reads back."""
        return dataclasses.asdict(self)

    @classmethod
    def from_mapping(cls, data: Mapping[str, Any]) -> ModuleRecord:
        """Rebuild what `to_mapping` returned."""
        shape = data["shape"]
        return cls(
            path=str(data["path"]),
            kind=str(data["kind"]),
            parameters=int(data["parameters"]),
            shape=None if shape is None else tuple(int(size) for size in shape),
            slots=tuple(str(slot) for slot in data["slots"]),
        )
