from __future__ import annotations

from esper.leyline.errors import CheckpointError, EsperError, UsageError
from esper.nissa.errors import StoreError


def test_a_store_error_is_a_failure_while_running_and_no_wrong_request() -> None:
    assert issubclass(StoreError, CheckpointError)
    assert issubclass(StoreError, EsperError)
    assert issubclass(StoreError, OSError)
    assert not issubclass(StoreError, UsageError)
