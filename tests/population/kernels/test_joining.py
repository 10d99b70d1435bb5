"""Blending by kernels against the plain join, which is what it means."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from esper.kasmina.state import SlotState
from esper.leyline.stages import SeedStage
from esper.population import slot_forward
from esper.population.capacity import Room
from esper.population.engine import SlotSpec
from esper.population.seed_stacks import Nursery
from esper.population.slot_forward import SlotGrafts
from esper.population.streams import Lanes
from tests.population.kernels.agreement import draw, on_cuda
from tests.population.seedlings import ADD, GATE, KEYS, MULTIPLY, make_state, put

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


def grow(topology: str, lanes: int) -> tuple[SlotGrafts, Nursery]:
    state = half_grown(topology)
    nursery = Nursery(
        (SLOTS[topology],),
        KEYS,
        torch.float32,
        torch.device("cuda"),
        room=Room(spares=True, rows=6, sample_bytes=2**20),
        lanes=Lanes(lanes),
    )
    nursery.sync(put(put(state, 3, NAMES[topology][0]), 0, NAMES[topology][1]))
    nursery.sync(state)
    grown = nursery.seat(state)[0]
    assert grown is not None
    for bed in nursery.beds:
        bed.stack.flat.copy_(draw(*bed.stack.flat.shape, seed=len(bed.rows)) * 0.3)
    return grown, nursery


def run(grown: SlotGrafts, nursery: Nursery, h: Tensor) -> list[Tensor]:
    h = h.clone().requires_grad_()
    out, dim = grown.join(h, 0)
    out = out.movedim(dim, 0)
    leaves = [leaf for bed in nursery.beds for leaf in bed.stack.leaves.values()]
    weight = draw(*out.shape, seed=5)
    return [out.detach(), *torch.autograd.grad((out * weight).sum(), [h, *leaves])]


@pytest.mark.parametrize("lanes", [0, 4])
@pytest.mark.parametrize("topology", list(SLOTS))
def test_values_and_gradients(topology: str, lanes: int, monkeypatch: pytest.MonkeyPatch) -> None:
    grown, nursery = grow(topology, lanes)
    h = draw(6, 4, *SLOTS[topology].shape[1:])
    found = run(grown, nursery, h)
    monkeypatch.setattr(slot_forward, "has_kernels", lambda x: False)
    expected = run(grown, nursery, h)
    for one, other in zip(found, expected, strict=True):
        torch.testing.assert_close(one, other, rtol=2e-3, atol=2e-4)
    assert torch.equal(found[0][[2, 3, 4]], h[[2, 3, 4]])


def test_a_seed_that_is_not_finite_reaches_no_other_row() -> None:
    grown, nursery = grow("cnn", 4)
    h = draw(6, 4, 8, 6, 6)
    clean = run(grown, nursery, h)[:2]
    for bed in nursery.beds:
        for place, row in enumerate(bed.rows):
            # Rows 0 (blended) and 2 (apart) are spoiled, and so are all empty places.
            if row in (0, 2) or row < 0:
                bed.stack.flat[place] = torch.nan
    spoiled = run(grown, nursery, h)[:2]
    others = [1, 3, 4, 5]
    for before, after in zip(clean, spoiled, strict=True):
        assert torch.equal(before[others], after[others])
        assert torch.equal(before[2], after[2])
        assert not bool(torch.isfinite(after[0]).all())
