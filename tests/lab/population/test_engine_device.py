"""From an allocator's complaint to the number of rows that would fit."""

from __future__ import annotations

import pytest
import torch

from esper.lab.population.engine import MemoryLimitError, naming_rows_that_fit, rows_that_fit
from esper.leyline.errors import EsperError


def complaint(wanted: str, free: str, held: str, spare: str = "100.00 MiB") -> str:
    """What PyTorch's CUDA allocator says."""
    return (
        f"CUDA out of memory. Tried to allocate {wanted}. GPU 0 has a total capacity of 40.00 GiB "
        f"of which {free} is free. Process 17 has 39.00 GiB memory in use. Of the allocated memory "
        f"{held} is allocated by PyTorch, and {spare} is reserved by PyTorch but unallocated. If "
        "reserved but unallocated memory is large try setting PYTORCH_ALLOC_CONF."
    )


@pytest.mark.parametrize(
    ("message", "rows", "resident", "fitting"),
    [
        # 30 GiB held and 10 more wanted where 30.1 + 1 are there: 3/4 of 64 rows, so 32.
        (complaint("10.00 GiB", "1.00 GiB", "30.00 GiB"), 64, 0, 32),
        # The same with most of it there before: 11 GiB of rows wanted 20, so a half of 64.
        (complaint("10.00 GiB", "1.00 GiB", "30.00 GiB"), 64, 20 * 2**30, 32),
        (complaint("30.00 GiB", "1.00 GiB", "10.00 GiB"), 64, 0, 16),
        (complaint("2.00 MiB", "1.00 MiB", "38.00 GiB", "512 bytes"), 64, 0, 32),
        (complaint("2.00 GiB", "1.00 GiB", "38.00 GiB"), 2, 0, 1),
        # Nothing to go by: half of them.
        ("out of memory", 48, 0, 16),
        ("out of memory", 1, 0, 1),
    ],
)
def test_the_rows_that_would_fit(message: str, rows: int, resident: int, fitting: int) -> None:
    assert rows_that_fit(message, rows, resident) == fitting


def test_fewer_rows_than_failed_are_always_named() -> None:
    for rows in range(2, 70):
        found = rows_that_fit(complaint("1.00 KiB", "30.00 GiB", "1.00 GiB"), rows)
        assert 1 <= found < rows


def test_an_error_of_the_device_names_the_rows_per_stack() -> None:
    with (
        pytest.raises(MemoryLimitError) as caught,
        naming_rows_that_fit(64, at_once=True),
    ):
        raise torch.OutOfMemoryError(complaint("10.00 GiB", "1.00 GiB", "30.00 GiB"))
    assert str(caught.value) == (
        "64 rows at once do not fit into the device's 40.0 GiB, 32 would; "
        "use PopulationConfig(rows_per_stack=32) or rows=32"
    )
    assert isinstance(caught.value, EsperError)
    assert isinstance(caught.value, MemoryError)


def test_one_row_that_does_not_fit_cannot_be_divided() -> None:
    with (
        pytest.raises(MemoryLimitError, match="not even one row fits"),
        naming_rows_that_fit(1, at_once=True),
    ):
        raise torch.OutOfMemoryError("out of memory")


def test_an_error_of_the_cpu_names_the_rows() -> None:
    with (
        pytest.raises(MemoryLimitError, match=r"32 rows do not fit into memory, 16 would"),
        naming_rows_that_fit(32, at_once=False),
    ):
        torch.empty(10**15)
    with (
        pytest.raises(MemoryLimitError, match="8 would"),
        naming_rows_that_fit(16, at_once=False),
    ):
        raise MemoryError


def test_other_errors_stay_what_they_are() -> None:
    with (
        pytest.raises(RuntimeError, match="shapes") as caught,
        naming_rows_that_fit(4, at_once=True),
    ):
        raise RuntimeError("shapes do not match")
    assert not isinstance(caught.value, MemoryLimitError)
    first = MemoryLimitError("said already")
    with (
        pytest.raises(MemoryLimitError, match="said already") as again,
        naming_rows_that_fit(4, at_once=True),
    ):
        raise first
    assert again.value is first
