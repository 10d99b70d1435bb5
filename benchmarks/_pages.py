"""Runs the code on pages of the documentation, as a reader would type it."""

from __future__ import annotations

import contextlib
import io
import re
import sys
import types
from collections.abc import Mapping
from pathlib import Path
from typing import Any

DOCS = Path(__file__).parents[1] / "docs"


def python_blocks(page: Path) -> list[str]:
    """Return the blocks of Python on a page."""
    return re.findall(
        r"^```python\n(.*?)^```", page.read_text(encoding="utf-8"), re.DOTALL | re.MULTILINE
    )


def run_blocks(
    blocks: list[str], known: Mapping[str, Any] | None = None
) -> tuple[dict[str, Any], str]:
    """Run blocks one after the other in one module; return its names and what was printed.

    The module can be imported while they run, so that classes they define can be pickled.

    Args:
        blocks: as `python_blocks` returns them.
        known: names that the page takes for granted, such as `model`.
    """
    module = types.ModuleType("page_of_documentation")
    module.__dict__.update(known or {})
    said = io.StringIO()
    sys.modules[module.__name__] = module
    try:
        with contextlib.redirect_stdout(said):
            for block in blocks:
                exec(compile(block, module.__name__, "exec"), module.__dict__)
    finally:
        del sys.modules[module.__name__]
    return module.__dict__, said.getvalue()
