"""Groups of configurations that part at slots."""

from __future__ import annotations

import contextlib

import pytest
import torch
from torch import Tensor

from esper.kasmina.evaluation import Branches, BranchingError, branching
from tests.plots import make_garden, raise_seed

PLAN = torch.tensor([[1, 1], [0, 1], [1, 0], [0, 0]]).bool()


def plus(amount: float) -> tuple[list[int], object]:
    """Return a seed that adds a number, and where it notes how many samples it got."""
    seen: list[int] = []

    def mix(h: Tensor) -> Tensor:
        seen.append(len(h))
        return h + amount

    return seen, mix


def test_a_batch_doubles_where_configurations_differ() -> None:
    branches, h = Branches(PLAN, 2), torch.tensor([[1.0], [2.0]])
    first, mix = plus(10)
    h = branches.split(0, "a", h, mix)  # type: ignore[arg-type]
    assert h.flatten().tolist() == [11, 12, 1, 2]
    second, mix = plus(100)
    h = branches.split(1, "b", h, mix)  # type: ignore[arg-type]
    assert (first, second) == ([2], [4])
    found = h.reshape(-1, 2)[branches.places()]
    assert found.tolist() == [[111, 112], [101, 102], [11, 12], [1, 2]]
    # A slot that is passed again finds everybody where they belong.
    h = branches.split(0, "a", h, mix)  # type: ignore[arg-type]
    assert h.reshape(-1, 2)[branches.places()][:, 0].tolist() == [211, 101, 111, 1]


def test_a_seed_sees_only_the_samples_that_need_it() -> None:
    plan = torch.tensor([[1, 1, 1], [0, 1, 0], [0, 0, 0]]).bool()
    branches, h = Branches(plan, 3), torch.zeros(3, 1)
    counts = []
    for slot, amount in enumerate((1, 10, 100)):
        seen, mix = plus(amount)
        h = branches.split(slot, "a", h, mix)  # type: ignore[arg-type]
        counts += seen
    assert counts == [3, 6, 3]
    assert h.reshape(-1, 3)[branches.places()][:, 0].tolist() == [111, 10, 0]


def test_a_slot_that_nobody_uses_and_one_that_is_never_reached() -> None:
    branches, h = Branches(PLAN[2:], 2), torch.ones(2, 1)
    seen, mix = plus(5)
    assert branches.split(1, "b", h, mix) is h  # type: ignore[arg-type]
    assert not seen
    assert branches.places() == [0, 0], "what has not differed has the same outcome"


def test_another_number_of_samples_is_refused() -> None:
    branches = Branches(PLAN, 2)
    with pytest.raises(BranchingError, match="slot 'a' got 3 samples where 2 were expected"):
        branches.split(0, "a", torch.zeros(3, 1), lambda h: h)


def test_slots_are_changed_within_the_block_alone() -> None:
    garden = make_garden()
    raise_seed(garden, "body", "BLENDING")
    raise_seed(garden, "neck", "BLENDING")
    raise_seed(garden, "stem", "TRAINING")
    plan = torch.tensor([[1, 1, 1], [0, 0, 1]]).bool()
    with contextlib.suppress(KeyError), branching(garden, plan, 2):
        # A seed that is not blended yet has nothing to switch off, and the last is always on.
        assert [slot.branch is not None for slot in garden.seedbed] == [False, True, False]
        raise KeyError
    assert all(slot.branch is None for slot in garden.seedbed)
