"""Numbers to a device and back: as they were when they were sent, and nobody waits."""

from __future__ import annotations

import pytest
import torch

from esper.utils.process import to_device, to_host, write_to
from tests.devices import busy_device

CPU = torch.device("cpu")
needs_cuda = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
CYCLES = 400_000_000


def test_on_the_cpu_numbers_stay_where_they_are() -> None:
    values = torch.arange(4)
    assert to_device(values, CPU) is values
    assert to_host(values)() is values


def test_numbers_are_overwritten_in_place_and_keep_their_type() -> None:
    place = torch.zeros(2, dtype=torch.float32)
    write_to(place, torch.tensor([0.1, 0.2], dtype=torch.float64))
    assert place.tolist() == torch.tensor([0.1, 0.2]).tolist()


def have_memory_for_copies() -> None:
    """Let the allocator have as much as it has after a few steps: to get more may wait."""
    kept = [torch.zeros(3, dtype=t).pin_memory() for t in (torch.int64, torch.float32) * 32]
    del kept


@pytest.mark.gpu
@needs_cuda
def test_a_device_that_is_busy_gets_what_was_sent() -> None:
    have_memory_for_copies()
    values, place = torch.arange(3), torch.zeros(3, device="cuda")
    with busy_device(CYCLES) as end:
        sent = to_device(values, place.device)
        write_to(place, values.double() / 3)
        # Neither the source nor the memory in between is read any more.
        values.fill_(9)
        others = [to_device(torch.full((3,), 7), place.device) for _ in range(8)]
        assert not end.query()
    assert sent.tolist() == [0, 1, 2]
    assert place.cpu().equal((torch.arange(3).double() / 3).float())
    assert all(other.tolist() == [7, 7, 7] for other in others)


@pytest.mark.gpu
@needs_cuda
def test_what_comes_back_is_what_was_there() -> None:
    have_memory_for_copies()
    numbers = torch.ones(3, device="cuda")
    with busy_device(CYCLES) as end:
        first = to_host(numbers)
        numbers.fill_(2.0)
        second = to_host(numbers)
        nothing = to_host(numbers[:0])
        assert not end.query()
    assert first().tolist() == [1.0] * 3
    assert second().tolist() == [2.0] * 3
    assert nothing().tolist() == []
