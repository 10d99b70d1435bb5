"""Seeds that nothing trains: found by their parameters, which stay as they were drawn.

So it does not matter which optimizer an owner has, or whether the gardener made it.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor, nn

from esper.kasmina.slot import Slot
from esper.kasmina.state import SlotState
from esper.leyline.errors import warn
from esper.leyline.stages import SeedStage


def fingerprint(seed: nn.Module) -> Tensor | None:
    """Return numbers that change with any parameter of a seed; None where there are none."""
    values = [p.detach().double() for p in seed.parameters() if not p.is_meta]
    if not values:
        return None
    # An optimizer that moves anything changes one sum or the other.
    return torch.stack([torch.stack([v.sum(), v.square().sum()]).cpu() for v in values])


def find_untrained(
    host: nn.Module, slots: Iterable[Slot], state: SlotState, is_carried: bool
) -> SlotState:
    """Return the state with the seeds marked that are as they were drawn; warn of such as stay so.

    Args:
        host: the model, of which a seed that learns must not be the only thing that stands still.
        slots: the slots with their seeds.
        state: the lifecycle, one row.
        is_carried: whether an optimizer is kept in step with growth, so that no warning is due.
    """
    untrained = state.untrained.clone()
    learning = [p for p in host.parameters() if p.requires_grad and not p.is_inference()]
    version = sum(parameter._version for parameter in learning)
    for index, slot in enumerate(slots):
        if slot.seed is None or slot.drawn is None:
            continue
        now = fingerprint(slot.seed)
        is_same = now is not None and torch.equal(now, slot.drawn)
        untrained[0, index] = is_same
        if not is_same:
            slot.drawn = slot.host_version = None
            continue
        if int(state.stage[0, index]) > int(SeedStage.GERMINATED) and not is_carried:
            _look_for_optimizer(slot, version, is_host_frozen=not learning)
        slot.host_version = version
    return state.where(torch.ones_like(untrained), untrained=untrained)


def remember_loaded(garden: Any, _: Any) -> None:
    """After a garden's weights were loaded: take untrained ones for those that were drawn."""
    for index, slot in enumerate(garden.seedbed):
        if slot.seed is not None and bool(garden.state.untrained[0, index]):
            slot.drawn = fingerprint(slot.seed)


def _look_for_optimizer(slot: Slot, version: int, *, is_host_frozen: bool) -> None:
    """Warn, once, where the host was trained since a seed began to learn, but the seed not."""
    was_trained = slot.host_version is not None and version > slot.host_version
    if is_host_frozen:
        # Nothing of the host moves; a gradient that nobody took away tells the same.
        was_trained = any(parameter.grad is not None for parameter in slot.parameters())
    if was_trained and not slot.is_known_untrained:
        slot.is_known_untrained = True
        warn(
            f"nothing trains the seed in slot {slot.name!r}: the network was trained, but the "
            "seed's parameters are in no optimizer that did; make the optimizer by "
            "gardener.optimizer(torch.optim.AdamW, lr=...), or add "
            f"garden.slot_parameters({slot.name!r}) to yours"
        )
