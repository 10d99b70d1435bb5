"""`python -m esper` is the `esper` command, for where its script is not on the path."""

from __future__ import annotations

from esper.scripts.cli.main import main

if __name__ == "__main__":
    raise SystemExit(main())
