"""Refuse pins of `constraints.txt`, and minimums of `pyproject.toml`, that were withdrawn (yanked).

`python -m tools.check_pins [INDEX]` asks a package index, by default the one that pip uses.
"""

from __future__ import annotations

import os
import re
import sys
import urllib.request
from collections.abc import Mapping
from html.parser import HTMLParser
from pathlib import Path

from tools.minimum_pins import minimum_pins

_ROOT = Path(__file__).parents[1]


class Files(HTMLParser):
    """The files on a page of an index: name -> why it was withdrawn, None where it was not."""

    def __init__(self, page: str) -> None:
        """Read the page."""
        super().__init__()
        self.found: dict[str, str | None] = {}
        self._withdrawn: str | None = None
        self.feed(page)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        """Take note of the reason in a link."""
        known = dict(attrs)
        self._withdrawn = (known["data-yanked"] or "no reason") if "data-yanked" in known else None

    def handle_data(self, data: str) -> None:
        """Take note of the name that a link shows."""
        if data.strip():
            self.found[data.strip()] = self._withdrawn


def problem_of(pin: str, files: Mapping[str, str | None]) -> str | None:
    """Return what is wrong with a pin, given the files of its project on the index."""
    name, version = pin.split("==")
    # A minimum such as 1.4 names the release 1.4.0 as well.
    own = re.compile(rf"[-_]{re.escape(version)}(\.0)*(-|\.tar|\.zip)", re.IGNORECASE)
    found = [reason for file, reason in files.items() if own.search(file)]
    if not found:
        return f"{pin} is not on the index"
    if None in found:
        return None
    return f"{pin} was withdrawn ({found[0]}); choose another version of {name}"


def files_of(name: str, index: str) -> dict[str, str | None]:
    """Return the files that an index has of a project."""
    project = re.sub(r"[-_.]+", "-", name).lower()
    request = urllib.request.Request(
        f"{index.rstrip('/')}/{project}/", headers={"Accept": "text/html"}
    )
    with urllib.request.urlopen(request, timeout=60) as answer:
        return Files(answer.read().decode()).found


def default_index() -> str:
    """Return the address of the index that pip uses if nothing else is said."""
    # Here and not above: in a process that has imported pip, setuptools cannot be imported any
    # more, and PyTorch's compiler needs it.
    from pip._internal.models.index import PyPI

    return PyPI.simple_url


def main(index: str = "") -> int:
    """Print what is wrong and return how many pins that are."""
    lines = (_ROOT / "constraints.txt").read_text().splitlines()
    index = index or os.environ.get("PIP_INDEX_URL") or default_index()
    pins = [line for line in lines if "==" in line and not line.startswith("#")]
    problems = []
    for pin in dict.fromkeys([*pins, *minimum_pins()]):
        problem = problem_of(pin, files_of(pin.split("==")[0], index))
        if problem is not None:
            problems.append(problem)
    print("\n".join(problems) or f"{len(pins)} pins, none withdrawn")
    return len(problems)


if __name__ == "__main__":
    raise SystemExit(main(*sys.argv[1:2]))
