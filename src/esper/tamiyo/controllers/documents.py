"""Plain data in a file that people write: JSON by its ending, else YAML."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from esper.leyline.errors import UsageError


def read_document(path: str | Path, what: str) -> Any:
    """Return the plain data in a file; `what` it should hold is for messages."""
    import yaml

    path = Path(path)
    try:
        text = path.read_text(encoding="utf-8")
    except FileNotFoundError:
        raise UsageError(f"{path}: there is no such {what} file") from None
    except (OSError, UnicodeDecodeError) as error:
        raise UsageError(f"{path}: cannot read the {what} as text: {_line(error)}") from None
    try:
        return json.loads(text) if path.suffix.lower() == ".json" else yaml.safe_load(text)
    except (ValueError, RecursionError, yaml.YAMLError) as error:
        kind = "JSON" if path.suffix.lower() == ".json" else "YAML"
        raise UsageError(f"{path}: not valid {kind}: {_line(error)}") from None


def _line(error: BaseException) -> str:
    return " ".join(str(error).split())
