"""The model inside a garden, handled alone: what would leave the seeds behind is refused.

Seeds live in the garden and not in the model, so a `state_dict` of the model, or of a part of it
behind which something grows, is not the network: it would load without a complaint and compute
something else. The same holds for wrappers given the model instead of its garden.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from torch import nn

from esper.kasmina.probe import pass_whole_batches
from esper.kasmina.slot import Slot
from esper.leyline.errors import SlotError


class Whole:
    """Whether the garden itself is being saved or copied, with everything in it."""

    def __init__(self) -> None:
        """Begin outside."""
        self.is_entered = False

    @contextmanager
    def entered(self) -> Iterator[None]:
        """Within the block the model's guards let everything through."""
        before, self.is_entered = self.is_entered, True
        try:
            yield
        finally:
            self.is_entered = before


class Guard:
    """A `state_dict` pre-hook of one module of the model, with the slots at or below it."""

    def __init__(self, whole: Whole, slots: list[Slot]) -> None:
        """Refuse while one of these slots holds a seed, unless the whole garden is at work."""
        self._whole = whole
        self._slots = slots

    def __call__(self, module: nn.Module, prefix: str, keep_vars: bool) -> None:
        """Refuse what would be loaded as another network."""
        grown = [slot.name for slot in self._slots if slot.seed is not None]
        if grown and not self._whole.is_entered:
            raise SlotError(
                f"the weights of the {type(module).__name__} inside a garden are not the grown "
                f"network: seeds at {', '.join(grown)} would be left behind; save the garden "
                "(garden.state_dict(), garden.save(folder)) or a plain copy (garden.bake())"
            )


def connect(model: nn.Module, slots: dict[str, Slot], whole: Whole) -> None:
    """Hang slots, by path, behind their submodules, and guards on all that hold them."""
    for path, slot in slots.items():
        model.get_submodule(path).register_forward_hook(slot.attend, with_kwargs=True)
        pass_whole_batches(map(model.get_submodule, _upwards(path.rpartition(".")[0])))
    for name in dict.fromkeys(part for path in slots for part in _upwards(path)):
        below = [
            slot for path, slot in slots.items() if not name or f"{path}.".startswith(f"{name}.")
        ]
        module = model.get_submodule(name)
        module.register_state_dict_pre_hook(Guard(whole, below))


def disconnect(model: nn.Module) -> None:
    """Take every slot and every guard off a model."""
    for module in model.modules():
        for hooks, kind in _hooks_of(module):
            for key in [key for key, hook in hooks.items() if isinstance(_owner(hook), kind)]:
                del hooks[key]
                module._forward_hooks_with_kwargs.pop(key, None)


def machinery_of(model: nn.Module) -> list[Slot | Guard]:
    """Return the slots and guards that hang on a model or on parts of it."""
    return [
        _owner(hook)
        for module in model.modules()
        for hooks, kind in _hooks_of(module)
        for hook in hooks.values()
        if isinstance(_owner(hook), kind)
    ]


def slots_behind(model: nn.Module) -> list[Slot]:
    """Return the slots of gardens that hang behind submodules of this model."""
    return [one for one in machinery_of(model) if isinstance(one, Slot)]


def _hooks_of(module: nn.Module) -> tuple[tuple[dict[int, Any], type], ...]:
    """Return where slots and guards hang on one module."""
    return (module._forward_hooks, Slot), (module._state_dict_pre_hooks, Guard)


def _owner(hook: Any) -> Any:
    return getattr(hook, "__self__", hook)


def _upwards(path: str) -> Iterator[str]:
    """Yield a dotted name and those of everything that holds it, the model itself last."""
    while path:
        yield path
        path = path.rpartition(".")[0]
    yield ""
