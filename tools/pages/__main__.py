"""Write the reference pages as Markdown: `python -m tools.pages`, which `make pages` runs."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from tools.pages import PAGES

OUT = Path(__file__).parents[2] / "build" / "pages"


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m tools.pages", description=__doc__)
    parser.add_argument("--out", type=Path, default=OUT, help="their folder (default: build/pages)")
    options = parser.parse_args(arguments)
    options.out.mkdir(parents=True, exist_ok=True)
    for name, render in PAGES.items():
        (options.out / name).write_text(render(), encoding="utf-8")
        print(options.out / name)
    return 0


if __name__ == "__main__":
    sys.exit(main())
