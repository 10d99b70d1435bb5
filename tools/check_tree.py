"""Checks the shape of the tree: file sizes, docstrings, mirrored tests, contracts.

Run from anywhere: ``python tools/check_tree.py [ROOT]``. Prints one line per finding and exits
with 1 when there is any.

* A source file has at most ``MAX_LINES`` lines.
* Every module of the package opens with a docstring.
* ``tests/a/test_x.py`` tests ``src/esper/a/x.py``, the private ``_x.py`` or the package ``x/``;
  ``test_x_part.py`` tests a part of it and ``test_init.py`` tests ``__init__.py``. ``tests/tools``
  and ``tests/benchmarks`` mirror the folders of those names. Tests that span modules live in
  ``FREE_FOLDERS`` or are named in ``EXEMPT_TESTS``.
* Every package of ``esper`` has an import contract, and leyline may import none of the others.
"""

from __future__ import annotations

import ast
import sys
import tomllib
from collections.abc import Iterator
from pathlib import Path

MAX_LINES = 500
PACKAGE = Path("src/esper")
FREE_FOLDERS = (
    *("tests/integration", "tests/conformance", "tests/browser", "tests/zoo"),
    "tests/frameworks",
)
MIRRORED_FOLDERS = ("tools", "benchmarks")
# Paths from the root, such as "tests/test_public_names.py".
EXEMPT_TESTS: frozenset[str] = frozenset()


def check_sources(root: Path) -> Iterator[str]:
    for path in sorted((root / PACKAGE).rglob("*.py")):
        name = path.relative_to(root).as_posix()
        text = path.read_text(encoding="utf-8")
        lines = len(text.splitlines())
        if lines > MAX_LINES:
            yield f"{name}: {lines} lines, at most {MAX_LINES} are allowed; split it by purpose"
        try:
            tree = ast.parse(text)
        except SyntaxError as error:
            yield f"{name}:{error.lineno}: {error.msg}"
            continue
        if not ast.get_docstring(tree):
            yield f"{name}: a module needs a docstring that says what it is for"


def mirrored(root: Path, test: Path) -> list[Path]:
    """The places, any of which makes ``test`` (a path from the root) the mirror of something."""
    folders = test.parts[1:-1]
    stem = test.stem.removeprefix("test_")
    base = root / PACKAGE
    if folders and folders[0] in MIRRORED_FOLDERS:
        base, folders = root / folders[0], folders[1:]
    home = base.joinpath(*folders)
    if stem == "init" or stem.startswith("init_"):
        return [home / "__init__.py"]
    places = [home / f"{stem}.py", home / f"_{stem}.py", home / stem / "__init__.py"]
    # A module tested in several files: `test_costs_rent.py` tests the rent in `costs.py`.
    while "_" in stem:
        stem = stem.rpartition("_")[0]
        places.append(home / f"{stem}.py")
    return places


def check_tests(root: Path) -> Iterator[str]:
    for path in sorted((root / "tests").rglob("test_*.py")):
        test = path.relative_to(root)
        name = test.as_posix()
        if name in EXEMPT_TESTS or any(name.startswith(f"{free}/") for free in FREE_FOLDERS):
            continue
        places = mirrored(root, test)
        if not any(place.is_file() for place in places):
            wanted = places[0].relative_to(root).as_posix()
            yield (
                f"{name}: mirrors no module ({wanted} does not exist); "
                f"rename it or move it to {FREE_FOLDERS[0]}"
            )
    for name in sorted(EXEMPT_TESTS):
        if not (root / name).is_file():
            yield f"{name}: exempted in tools/check_tree.py but does not exist"


def check_contracts(root: Path) -> Iterator[str]:
    config = tomllib.loads((root / "pyproject.toml").read_text(encoding="utf-8"))
    forbidden: dict[str, set[str]] = {}
    layered: set[str] = set()
    for contract in config["tool"]["importlinter"]["contracts"]:
        for source in contract.get("source_modules", ()):
            forbidden.setdefault(source, set()).update(contract["forbidden_modules"])
        for floor in contract.get("layers", ()):
            layered.update(".".join(name.split(".")[:2]) for name in floor.split(" : "))
    packages = {init.parent.name for init in (root / PACKAGE).glob("*/__init__.py")}
    for package in sorted(packages):
        if f"esper.{package}" not in forbidden.keys() | layered:
            yield f"pyproject.toml: esper.{package} has no import contract"
    for package in sorted(packages - {"leyline"}):
        if f"esper.{package}" not in forbidden.get("esper.leyline", set()):
            yield f"pyproject.toml: leyline's contract does not forbid esper.{package}"


def main(arguments: list[str]) -> int:
    root = Path(arguments[0]) if arguments else Path(__file__).resolve().parent.parent
    if not (root / PACKAGE).is_dir():
        print(f"error: {root} has no {PACKAGE.as_posix()}", file=sys.stderr)
        return 2
    findings = [*check_sources(root), *check_tests(root), *check_contracts(root)]
    for finding in findings:
        print(finding)
    return 1 if findings else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
