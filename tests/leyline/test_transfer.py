"""Numbers to a device and back: as they were when they were sent, and nobody waits."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from esper.leyline.transfer import to_device, to_host, write_to

CPU = torch.device("cpu")
needs_cuda = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")


def test_on_the_cpu_numbers_stay_where_they_are() -> None:
    values = torch.arange(4)
    assert to_device(values, CPU) is values
    assert to_host(values)() is values


def test_numbers_are_overwritten_in_place_and_keep_their_type() -> None:
    place = torch.zeros(2, dtype=torch.float32)
    write_to(place, torch.tensor([0.1, 0.2], dtype=torch.float64))
    assert place.tolist() == torch.tensor([0.1, 0.2]).tolist()


@pytest.fixture
def busy_device() -> Iterator[torch.cuda.Event]:
    """Give the device work for a while; to wait for it is an error. Yields the end of the work."""
    # To get new memory of this kind may wait; here, as after a few steps, there is enough of it.
    kept = [torch.zeros(3, dtype=t).pin_memory() for t in (torch.int64, torch.float32) * 32]
    del kept
    torch.cuda._sleep(1)
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        torch.cuda._sleep(400_000_000)
        done = torch.cuda.Event()
        done.record()
        yield done
    finally:
        torch.cuda.set_sync_debug_mode("default")


@pytest.mark.gpu
@needs_cuda
def test_a_device_that_is_busy_gets_what_was_sent(busy_device: torch.cuda.Event) -> None:
    values = torch.arange(3)
    sent = to_device(values, torch.device("cuda"))
    place = torch.zeros(3, dtype=torch.float32, device="cuda")
    write_to(place, values.double() / 3)
    # Neither the source nor the memory in between is read any more.
    values.fill_(9)
    others = [to_device(torch.full((3,), 7), sent.device) for _ in range(8)]
    assert not busy_device.query()
    torch.cuda.set_sync_debug_mode("default")
    assert sent.tolist() == [0, 1, 2]
    assert place.cpu().equal((torch.arange(3).double() / 3).float())
    assert all(other.tolist() == [7, 7, 7] for other in others)


@pytest.mark.gpu
@needs_cuda
def test_what_comes_back_is_what_was_there(busy_device: torch.cuda.Event) -> None:
    numbers = torch.full((3,), 1.0, device="cuda")
    first = to_host(numbers)
    numbers.fill_(2.0)
    second = to_host(numbers)
    empty = to_host(numbers[:0])
    assert not busy_device.query()
    assert first().tolist() == [1.0] * 3
    assert second().tolist() == [2.0] * 3
    assert empty().tolist() == []
