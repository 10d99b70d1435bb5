"""Blending by kernels against `SlotForward` in plain PyTorch, which is what it means."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from esper.kasmina.state import SlotState
from esper.lab.population import slot_forward
from esper.lab.population.engine import CudaStreams, SlotSpec
from esper.lab.population.parameter_stack import StackCapacity
from esper.lab.population.seed_stacks import SeedStacks
from esper.lab.population.slot_forward import SlotForward
from esper.leyline.stages import SeedStage
from tests.lab.population.kernels.agreement import draw, on_cuda
from tests.lab.population.seed_states import ADD, GATE, KEYS, MULTIPLY, make_state, put

pytestmark = on_cuda

SLOTS = {
    "cnn": SlotSpec("r0c0", "body", "cnn", (2, 8, 6, 6), 8),
    "sequence": SlotSpec("r0c0", "body", "sequence", (2, 5, 16), 16),
    "vector": SlotSpec("r0c0", "body", "vector", (2, 12), 12),
}
NAMES = {
    "cnn": ("conv_light", "attention", "norm"),
    "sequence": ("lora", "mlp", "norm"),
    "vector": ("lora", "mlp", "norm"),
}


def half_grown(topology: str) -> SlotState:
    one, two, three = NAMES[topology]
    state = put(make_state(6), 0, one, algorithm=MULTIPLY, alpha=0.3)
    state = put(state, 1, two, algorithm=GATE, alpha=0.9)
    state = put(state, 2, one, SeedStage.TRAINING, algorithm=ADD)
    state = put(state, 4, one, SeedStage.TRAINING, algorithm=GATE)
    return put(state, 5, three, SeedStage.FOSSILIZED, algorithm=ADD, alpha=1.0)


def grow(topology: str, streams: int) -> tuple[SlotForward, SeedStacks]:
    state = half_grown(topology)
    seed_stacks = SeedStacks(
        (SLOTS[topology],),
        KEYS,
        torch.float32,
        torch.device("cuda"),
        capacity=StackCapacity(has_spares=True, rows=6, sample_bytes=2**20),
        streams=CudaStreams(streams),
    )
    seed_stacks.sync(put(put(state, 3, NAMES[topology][0]), 0, NAMES[topology][1]))
    seed_stacks.sync(state)
    grown = seed_stacks.slot_forwards(state)[0]
    assert grown is not None
    for stack in seed_stacks.stacks:
        stack.parameters.flat.copy_(draw(*stack.parameters.flat.shape, seed=len(stack.rows)) * 0.3)
    return grown, seed_stacks


def run(grown: SlotForward, seed_stacks: SeedStacks, h: Tensor) -> list[Tensor]:
    h = h.clone().requires_grad_()
    out, dim = grown.run(h, 0)
    out = out.movedim(dim, 0)
    leaves = [leaf for stack in seed_stacks.stacks for leaf in stack.parameters.leaves.values()]
    weight = draw(*out.shape, seed=5)
    return [out.detach(), *torch.autograd.grad((out * weight).sum(), [h, *leaves])]


@pytest.mark.parametrize("streams", [0, 4])
@pytest.mark.parametrize("topology", list(SLOTS))
def test_values_and_gradients(topology: str, streams: int, monkeypatch: pytest.MonkeyPatch) -> None:
    grown, seed_stacks = grow(topology, streams)
    h = draw(6, 4, *SLOTS[topology].shape[1:])
    found = run(grown, seed_stacks, h)
    monkeypatch.setattr(slot_forward, "has_kernels", lambda x: False)
    expected = run(grown, seed_stacks, h)
    for one, other in zip(found, expected, strict=True):
        torch.testing.assert_close(one, other, rtol=2e-3, atol=2e-4)
    assert torch.equal(found[0][[2, 3, 4]], h[[2, 3, 4]])


def test_a_seed_that_is_not_finite_reaches_no_other_row() -> None:
    grown, seed_stacks = grow("cnn", 4)
    h = draw(6, 4, 8, 6, 6)
    clean = run(grown, seed_stacks, h)[:2]
    for stack in seed_stacks.stacks:
        for entry, row in enumerate(stack.rows):
            # Rows 0 (blended) and 2 (apart) are spoiled, and so are all empty entries.
            if row in (0, 2) or row < 0:
                stack.parameters.flat[entry] = torch.nan
    spoiled = run(grown, seed_stacks, h)[:2]
    others = [1, 3, 4, 5]
    for before, after in zip(clean, spoiled, strict=True):
        assert torch.equal(before[others], after[others])
        assert torch.equal(before[2], after[2])
        assert not bool(torch.isfinite(after[0]).all())
