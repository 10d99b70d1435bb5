"""TensorRecord: many tensors with names, which are moved, chosen from and saved together.

PyTorch is loaded where it is needed: whoever reads a run should not wait for it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields
from typing import TYPE_CHECKING, Any, Self

if TYPE_CHECKING:
    import torch
    from torch import Tensor


@dataclass(frozen=True, slots=True)
class TensorRecord:
    """Base of frozen dataclasses in which every field is a tensor."""

    def map(self, change: Callable[[Tensor], Tensor]) -> Self:
        """Return the same with every tensor changed."""
        return type(self)(**{name: change(value) for name, value in self.state_dict().items()})

    def to(self, device: torch.device | str) -> Self:
        """Return the same on another device."""
        return self.map(lambda value: value.to(device))

    def select(self, rows: Tensor | Sequence[int]) -> Self:
        """Return some rows, by number or bool [R], as a copy in that order."""
        import torch

        index = torch.as_tensor(rows)
        return self.map(lambda value: value[index])

    def put(self, where: Any, values: Self) -> None:
        """Write the same record of some places into those places of every tensor."""
        for name, value in values.state_dict().items():
            getattr(self, name)[where] = value

    @classmethod
    def join(cls, parts: Sequence[Self]) -> Self:
        """Return the rows of several records, one after another."""
        import torch

        names = parts[0].state_dict()
        return cls(**{name: torch.cat([getattr(part, name) for part in parts]) for name in names})

    def state_dict(self) -> dict[str, Tensor]:
        """Return every field by name."""
        return {field.name: getattr(self, field.name) for field in fields(self)}

    @classmethod
    def from_state_dict(cls, state: dict[str, Any]) -> Self:
        """Rebuild what `state_dict` returned."""
        return cls(**{field.name: state[field.name] for field in fields(cls)})


def apply_function(function: Any, *inputs: Any) -> Tensor:
    """Return what a `torch.autograd.Function` makes of inputs; PyTorch's `apply` has no types."""
    output: Tensor = function.apply(*inputs)
    return output
