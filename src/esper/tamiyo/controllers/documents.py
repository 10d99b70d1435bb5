"""Documents that controllers are made from: a file of plain data, or one line that says why not."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from esper.leyline import documents
from esper.leyline.errors import ConfigError, UsageError


def read_document(path: str | Path, what: str) -> Any:
    """Return the plain data in a file; `what` it should hold is for messages."""
    try:
        return documents.read_document(Path(path))
    except FileNotFoundError:
        raise UsageError(f"{path}: there is no such {what} file") from None
    except OSError as error:
        raise UsageError(f"{path}: cannot read the {what}: {error.strerror}") from None
    except ConfigError as error:
        raise UsageError(f"{path}: cannot read the {what}: {error}") from None
