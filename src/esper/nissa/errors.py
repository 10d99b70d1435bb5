"""What can go wrong with a run's store, in one line each."""

from __future__ import annotations

from esper.leyline.errors import CheckpointError


class StoreError(CheckpointError):
    """The store of a run cannot be opened, read or written; checkpoints are not affected."""
