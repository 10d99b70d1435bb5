"""Print the lowest version of every dependency that `pyproject.toml` allows, as constraints.

`python -m tools.minimum_pins [TORCH]`; without a version, PyTorch is the one in `constraints.txt`.
"""

from __future__ import annotations

import sys
import tomllib
from pathlib import Path

_ROOT = Path(__file__).parents[1]


def minimum_pins(torch: str | None = None) -> list[str]:
    """Return one line for every dependency, `name==version`."""
    project = tomllib.loads((_ROOT / "pyproject.toml").read_text())["project"]
    pins = dict(each.split(">=") for each in project["dependencies"])
    pinned = dict(
        line.split("==")
        for line in (_ROOT / "constraints.txt").read_text().splitlines()
        if "==" in line and not line.startswith("#")
    )
    pins["torch"] = torch or pinned["torch"]
    return [f"{name}=={version}" for name, version in pins.items()]


if __name__ == "__main__":
    print("\n".join(minimum_pins(*sys.argv[1:2])))
