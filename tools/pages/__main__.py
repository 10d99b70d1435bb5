"""`python -m tools.pages`: writes every page that is made from the code.

With `--check` nothing is written, and the exit code is 1 where a page is out of date.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

from esper.utils.files import atomic_write_text
from tools.pages import arena, commands, observation, settings, telemetry

DOCS = Path(__file__).parents[2] / "docs"

PAGES: dict[str, Callable[[], str]] = {
    "arena.md": arena.render,
    "commands.md": commands.render,
    "observation.md": observation.render,
    "observation-travelling.md": observation.render_travelling,
    "settings.md": settings.render,
    "telemetry.md": telemetry.render,
}
"""What every page says, by its name below docs/."""


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m tools.pages", description="Write the pages that are made from the code."
    )
    parser.add_argument("--out", type=Path, default=DOCS, help="their folder (default: docs)")
    parser.add_argument("--check", action="store_true", help="only say what is out of date")
    options = parser.parse_args(arguments)
    code = 0
    for name, render in PAGES.items():
        path, text = options.out / name, render()
        if path.is_file() and path.read_text(encoding="utf-8") == text:
            continue
        if options.check:
            code = 1
        else:
            atomic_write_text(path, text)
        print(f"{path} {'is out of date' if options.check else 'written'}")
    return code


if __name__ == "__main__":
    sys.exit(main())
