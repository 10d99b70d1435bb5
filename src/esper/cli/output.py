"""Where words go: results to standard output, progress and complaints to standard error."""

from __future__ import annotations

import json
import math
import sys
from typing import Any

from rich.console import Console
from rich.text import Text


def out_console() -> Console:
    """Return the console of results; output that is no terminal gets room for whole tables."""
    return Console(width=None if sys.stdout.isatty() else 120, highlight=False)


def err_console() -> Console:
    """Return the console of progress."""
    return Console(stderr=True, highlight=False)


def print_json(document: Any) -> None:
    """Print one JSON document; numbers that are not finite become null."""
    print(json.dumps(_plain(document), indent=2, ensure_ascii=False))


def safe(text: object) -> Text:
    """Return a value as text that can neither style nor steer the terminal."""
    shown = "".join(c if c.isprintable() else f"\\x{ord(c):02x}" for c in str(text))
    return Text(shown)


def points(value: float | None) -> str:
    """Return a score in points, or a dash."""
    return "–" if value is None else f"{value:.2f}"


def _plain(value: Any) -> Any:
    if isinstance(value, dict):
        return {str(key): _plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(item) for item in value]
    if isinstance(value, float) and not math.isfinite(value):
        return None
    return value
