"""Running out of memory: from an allocator's complaint to how many rows would fit."""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import contextmanager

import torch

from esper.population.engine import MemoryLimitError

_UNITS = {"bytes": 1, "KiB": 2**10, "MiB": 2**20, "GiB": 2**30, "TiB": 2**40}
_SIZE = r"([\d.]+) (bytes|KiB|MiB|GiB|TiB)"

_WANTED = re.compile(rf"[Tt]ried to allocate {_SIZE}")
_CAPACITY = re.compile(rf"total capacity of {_SIZE}")
_FREE = re.compile(rf"of which {_SIZE} is free")
_HELD = re.compile(rf"{_SIZE} is allocated by PyTorch")
_SPARE = re.compile(rf"{_SIZE} is reserved by PyTorch but unallocated")
_CPU = "DefaultCPUAllocator"


@contextmanager
def naming_rows_that_fit(rows: int, *, at_once: bool, resident: int = 0) -> Iterator[None]:
    """Within the block, an out-of-memory error becomes one that names how many rows would fit.

    Args:
        rows: how many rows share the memory that ran out.
        at_once: whether they are one stack, which can be divided into several.
        resident: bytes that were taken before, whatever the number of rows.
    """
    try:
        yield
    except torch.OutOfMemoryError as error:
        raise _explain(str(error), rows, at_once, resident) from error
    except MemoryError as error:
        if isinstance(error, MemoryLimitError):
            raise
        raise _explain(str(error), rows, at_once, resident) from error
    except RuntimeError as error:
        if _CPU not in str(error):
            raise
        raise _explain(str(error), rows, at_once, resident) from error


def rows_that_fit(message: str, rows: int, resident: int = 0) -> int:
    """Return how many of `rows` rows would fit, from what the allocator said.

    The rows had taken what was allocated when the error came, less what was resident before, and
    wanted at least the piece that was refused. How much more they would have wanted nobody knows,
    so the answer is the power of two below the quotient, and below the number that failed.
    """
    wanted, held = _find(_WANTED, message), _find(_HELD, message)
    available = held + _find(_FREE, message) + _find(_SPARE, message) - resident
    need = held + wanted - resident
    fitting = rows * available / need if held and need > 0 else rows / 2
    most = max(1, min(int(fitting), rows - 1))
    return 1 << (most.bit_length() - 1)


def _explain(message: str, rows: int, at_once: bool, resident: int) -> MemoryLimitError:
    capacity = _find(_CAPACITY, message)
    place = f"the device's {capacity / 2**30:.1f} GiB" if capacity else "memory"
    if rows == 1:
        return MemoryLimitError(
            f"not even one row fits into {place}; use a smaller batch_size or a smaller host"
        )
    fitting = rows_that_fit(message, rows, resident)
    if at_once:
        return MemoryLimitError(
            f"{rows} rows at once do not fit into {place}, {fitting} would; "
            f"use PopulationConfig(rows_per_stack={fitting}) or rows={fitting}"
        )
    return MemoryLimitError(
        f"{rows} rows do not fit into {place}, {fitting} would; use rows={fitting}"
    )


def _find(pattern: re.Pattern[str], message: str) -> float:
    """Return the size in bytes that an allocator's message names, 0 where it does not."""
    found = pattern.search(message)
    return float(found[1]) * _UNITS[found[2]] if found else 0.0
