"""Readers of data a user already has on disk, one file per layout.

`open_data(path)` finds out which layout a file or folder has. Nothing is downloaded, nothing is
made up, and no reader executes code from a file.
"""

from esper.tasks.data.layouts import DEFAULT_CONTEXT, open_data
from esper.tasks.data.source import Source

__all__ = ["DEFAULT_CONTEXT", "Source", "open_data"]
