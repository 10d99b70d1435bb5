"""The command line of scripts that write a page of the documentation from the code."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Sequence
from pathlib import Path

from esper.leyline.files import atomic_write_text


def write_or_check(
    script: str,
    summary: str,
    page: Path,
    render: Callable[[], str],
    arguments: Sequence[str] | None = None,
) -> int:
    """Write the page, or say whether it is current; return the exit code.

    Args:
        script: name of the script among these.
        summary: what it does, in a line.
        page: where the page is by default.
        render: returns its text.
        arguments: of the command line; those of the process by default.
    """
    parser = argparse.ArgumentParser(prog=f"python -m esper.scripts.{script}", description=summary)
    parser.add_argument("--out", type=Path, default=page, help=f"the page (default {page})")
    parser.add_argument("--check", action="store_true", help="only say whether it is current")
    options = parser.parse_args(arguments)
    text = render()
    if options.check:
        is_current = options.out.is_file() and options.out.read_text(encoding="utf-8") == text
        print(f"{options.out} is {'current' if is_current else 'out of date'}")
        return 0 if is_current else 1
    atomic_write_text(options.out, text)
    print(f"wrote {options.out}")
    return 0
