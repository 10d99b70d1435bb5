"""What can go wrong with a run's store, in one line each."""

from __future__ import annotations

from esper.leyline.errors import CheckpointError

CHECKPOINT_KEPT = "; the last checkpoint is intact, then continue with --resume"
"""How a message ends when rows could not be written: what to do once the cause is mended."""


class StoreError(CheckpointError):
    """The store of a run cannot be opened, read or written; checkpoints are not affected."""
