"""What tests of several strategies share."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from esper.lab.population.worker_pool import lease_pool


@pytest.fixture(scope="module")
def kept_processes() -> Iterator[None]:
    """Worker processes that stay until the module's last test: they take seconds to start."""
    pool = lease_pool()
    yield
    pool.release()
