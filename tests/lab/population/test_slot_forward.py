"""Seeds of many rows at one slot against a plain slot for every row."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from esper.kasmina.state import SlotState
from esper.lab.population.seed_stacks import ABSENT, SeedStacks
from esper.lab.population.slot_forward import SlotForwards, apply_slot
from esper.leyline.stages import SeedStage
from tests.lab.population.seed_states import (
    ADD,
    CHANNELS,
    GATE,
    MULTIPLY,
    first_forward,
    make_seed_stacks,
    make_state,
    plain_slots,
    put,
    stir,
)

Life = Callable[[SlotState], SlotState]

TRAINING = SeedStage.TRAINING


def mixed(state: SlotState) -> SlotState:
    state = put(state, 0, "mlp", algorithm=MULTIPLY, alpha=0.3)
    state = put(state, 1, "lora", algorithm=GATE, alpha=0.9)
    state = put(state, 2, "mlp", TRAINING, algorithm=ADD)
    state = put(state, 4, "mlp", TRAINING, algorithm=GATE)
    return put(state, 5, "norm", SeedStage.FOSSILIZED, algorithm=ADD, alpha=1.0)


def alike(state: SlotState) -> SlotState:
    for row in range(6):
        state = put(state, row, "lora", alpha=1.0)
    return state


def isolated(state: SlotState) -> SlotState:
    for row in range(6):
        algorithm = (ADD, MULTIPLY, GATE)[row % 3]
        state = put(state, row, "mlp_small", TRAINING, algorithm=algorithm)
    return state


def grown(life: Life, *, has_spares: bool = False) -> tuple[SlotState, SeedStacks]:
    state = life(make_state(6))
    seed_stacks = make_seed_stacks(6, has_spares=has_spares)
    if has_spares:
        # Rows 3 and 5 leave, so that some entries are empty, and not the last ones.
        before = put(put(state, 3, "mlp"), 5, "mlp")
        seed_stacks.sync(before)
    seed_stacks.sync(state)
    return state, seed_stacks


@pytest.mark.parametrize("has_spares", [False, True])
@pytest.mark.parametrize("dim", [0, 1])
@pytest.mark.parametrize("life", [mixed, alike, isolated])
def test_values_and_gradients_are_those_of_plain_slots(
    life: Life, dim: int, has_spares: bool
) -> None:
    state, seed_stacks = grown(life, has_spares=has_spares)
    slots = plain_slots(state)
    stir(slots, seed_stacks)
    h = torch.randn(6, 4, CHANNELS, dtype=torch.float64, requires_grad=True)
    plain_h = h.detach().clone().requires_grad_()
    weight = torch.randn(6, 4, CHANNELS, dtype=torch.float64)
    out, rows_at = first_forward(seed_stacks, state).run(h.transpose(0, dim), dim)
    assert rows_at == dim
    out = out.transpose(0, dim)
    expected = torch.stack([slot.train()(plain_h[row]) for row, slot in enumerate(slots)])
    torch.testing.assert_close(out, expected, rtol=1e-12, atol=1e-12)
    (out * weight).sum().backward()
    (expected * weight).sum().backward()
    assert h.grad is not None
    assert plain_h.grad is not None
    torch.testing.assert_close(h.grad, plain_h.grad, rtol=1e-12, atol=1e-12)
    for stack in seed_stacks.stacks:
        prefix = "gate." if stack.kind == -1 else "seed."
        for entry, row in enumerate(stack.rows):
            if row == ABSENT:
                continue
            parameters = dict(slots[row].named_parameters())
            for name, leaf in stack.parameters.leaves.items():
                assert leaf.grad is not None
                alone = parameters[prefix + name].grad
                found = leaf.grad[entry]
                wanted = torch.zeros_like(found) if alone is None else alone
                torch.testing.assert_close(found, wanted, rtol=1e-11, atol=1e-12)


def test_isolated_rows_keep_the_hosts_value_to_the_bit() -> None:
    state, seed_stacks = grown(isolated)
    stir(plain_slots(state), seed_stacks)
    forward = first_forward(seed_stacks, state)
    h = torch.randn(6, 4, CHANNELS, dtype=torch.float64)
    assert torch.equal(forward.run(h, 0)[0], h)


def test_a_seed_that_is_not_finite_reaches_no_other_row() -> None:
    state, seed_stacks = grown(mixed, has_spares=True)
    stir(plain_slots(state), seed_stacks)
    forward = first_forward(seed_stacks, state)

    def run() -> tuple[Tensor, Tensor]:
        h = torch.linspace(-1, 1, 6 * 4 * CHANNELS, dtype=torch.float64).reshape(6, 4, CHANNELS)
        h.requires_grad_()
        out, _ = forward.run(h, 0)
        (gradient,) = torch.autograd.grad(out.square().sum(), h)
        return out.detach(), gradient

    clean = run()
    for row, reaches_its_host in ((2, False), (0, True)):
        for stack in seed_stacks.stacks:
            if row in stack.rows:
                stack.parameters.flat[stack.rows.index(row)] = torch.nan
            for entry, owner in enumerate(stack.rows):
                if owner == ABSENT:
                    stack.parameters.flat[entry] = torch.nan
        for before, after in zip(clean, run(), strict=True):
            others = [other for other in range(6) if other not in (0, 2)]
            assert torch.equal(before[others], after[others])
            assert torch.equal(before[row], after[row]) != reaches_its_host


def test_a_slot_is_left_from_inside_of_vmap() -> None:
    state, seed_stacks = grown(mixed)
    stir(plain_slots(state), seed_stacks)
    forward = first_forward(seed_stacks, state)
    forwards: SlotForwards = (None, forward)
    h = torch.randn(6, 4, CHANNELS, dtype=torch.float64)
    expected, _ = forward.run(h, 0)

    def inside(row: Tensor) -> Tensor:
        return apply_slot(row, row, 1, forwards) * 2

    assert torch.equal(torch.vmap(inside)(h), expected * 2)
    # Wherever the rows lie: beside channels they stay, farther back they are moved.
    for dim in (1, 2):
        moved = torch.vmap(inside, in_dims=dim, out_dims=dim)(h.movedim(0, dim))
        assert torch.equal(moved.movedim(dim, 0), expected * 2)
    # Nothing has grown at the other slot: rows pass as they are.
    assert torch.equal(torch.vmap(lambda row: apply_slot(row, row, 0, forwards))(h), h)
    # An activation that is the same for every row is spread out first.
    same_for_all = torch.vmap(lambda row: apply_slot(h[0], row, 1, forwards))(h)
    assert torch.equal(same_for_all, forward.run(h[0].expand(6, 4, CHANNELS), 0)[0])


def test_outside_of_vmap_there_are_no_rows() -> None:
    with pytest.raises(RuntimeError, match="only inside the population's vmap"):
        apply_slot(torch.zeros(2, 3), torch.zeros(()), 0, (None,))
