"""Lifecycle states made by hand, and the plain slots that live by the same state."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from esper.kasmina.blueprints.registry import BLUEPRINTS
from esper.kasmina.engine import Moments
from esper.kasmina.seedbed import HostContext, Seedbed
from esper.kasmina.slot import Slot
from esper.kasmina.slots.placement import Placement
from esper.kasmina.state import SlotState, empty_state
from esper.lab.population.engine import SlotSpec
from esper.lab.population.parameter_stack import StackCapacity
from esper.lab.population.seed_stacks import SeedStacks
from esper.lab.population.slot_forward import SlotForward
from esper.leyline.slots import USUAL_AXES
from esper.leyline.stages import AlphaAlgorithm, AlphaMode, SeedStage

CHANNELS = 6
SPEC = SlotSpec("r0c0", "body", "vector", (2, CHANNELS), CHANNELS)
OTHER = SlotSpec("r0c1", "neck", "vector", (2, CHANNELS), CHANNELS)
KEYS = [31, 32, 33, 34, 35, 36]

ADD, MULTIPLY, GATE = (int(algorithm) for algorithm in AlphaAlgorithm)


def make_state(rows: int, slots: int = 1) -> SlotState:
    return empty_state(rows, slots)


def put(
    state: SlotState,
    row: int,
    blueprint: str,
    stage: SeedStage = SeedStage.BLENDING,
    *,
    slot: int = 0,
    algorithm: int = ADD,
    alpha: float = 0.5,
    **fields: Any,
) -> SlotState:
    """Return the state with a seed in a slot."""
    here = torch.zeros_like(state.occupied)
    here[row, slot] = True
    amplitude = 0.0 if stage in (SeedStage.GERMINATED, SeedStage.TRAINING) else alpha
    return state.where(
        here,
        stage=int(stage),
        blueprint=BLUEPRINTS.get(blueprint).id,
        algorithm=algorithm,
        alpha=amplitude,
        alpha_mode=int(fields.pop("alpha_mode", AlphaMode.HOLD)),
        **fields,
    )


def clear(state: SlotState, row: int, slot: int = 0) -> SlotState:
    here = torch.zeros_like(state.occupied)
    here[row, slot] = True
    return state.clear(here)


def make_seed_stacks(
    rows: int, slots: tuple[SlotSpec, ...] = (SPEC,), *, has_spares: bool = False
) -> SeedStacks:
    capacity = StackCapacity(has_spares=has_spares, rows=rows, sample_bytes=2**20)
    return SeedStacks(slots, KEYS[:rows], torch.float64, torch.device("cpu"), capacity=capacity)


def plain_slots(state: SlotState, spec: SlotSpec = SPEC) -> list[Slot]:
    """Return what a garden of each row would have in its first slot."""
    slots = []
    for row in range(state.rows):
        entry = Placement(
            spec.name, spec.path, USUAL_AXES[spec.topology], spec.shape, spec.symmetry
        )
        stack = Seedbed([entry], "straight_through", KEYS[row]).double()
        host = HostContext(nn.Linear(1, 1).double(), {spec.name: ""})
        stack.sync(state.select([row]), host)
        slots.append(stack[0])
    return slots


def first_forward(seed_stacks: SeedStacks, state: SlotState) -> SlotForward:
    """Return what runs at the first slot in training."""
    grown = seed_stacks.slot_forwards(state)[0]
    assert grown is not None
    return grown


def stir(slots: list[Slot], seed_stacks: SeedStacks) -> None:
    """Give every seed weights of its own, the same in its slot and in the stacks."""
    generator = torch.Generator().manual_seed(9)
    for row, slot in enumerate(slots):
        values: dict[str, Tensor] = {}
        with torch.no_grad():
            for name, parameter in slot.named_parameters():
                drawn = torch.randn(parameter.shape, generator=generator, dtype=torch.float64)
                parameter.copy_(0.3 * drawn)
                values[name] = parameter.detach().clone()
        for stack in seed_stacks.stacks:
            if row in stack.rows:
                prefix = "gate." if stack.kind == -1 else "seed."
                own = {k.removeprefix(prefix): v for k, v in values.items() if k.startswith(prefix)}
                stack.parameters.write(stack.rows.index(row), own, Moments())
