"""Counts how large the package is, and how much of it two everyday runs touch.

Run from anywhere: ``python tools/tree_totals.py [--runs] [ROOT]``. It prints

* lines of code of ``src/esper``: neither blank, nor comment, nor docstring; and those of
  ``benchmarks``, ``tests`` and ``tools``, because code that moves there has not gone away;
* modules, modules of more than ``LONG`` lines (all lines count here), folders of ``src/esper``;
* settings: fields of configurations, declared by ``option(...)``;
* with ``--runs``, how many files of the package have a function that runs during
  ``esper train smoke``, in this process, on the CPU, and during a second
  ``esper.grow(controller="heuristic")`` of a small CNN on the embedded digits.

Only calls of functions count as running; what runs while a module is imported does not. ``--runs``
measures the ``esper`` that Python finds, ``ROOT`` or not.
"""

from __future__ import annotations

import ast
import inspect
import io
import sys
import tempfile
import threading
import tokenize
from collections.abc import Callable
from pathlib import Path
from types import FrameType
from typing import Any

PACKAGE = Path("src/esper")
OTHERS = ("benchmarks", "tests", "tools")
LONG = 500
_SILENT = {
    tokenize.COMMENT,
    tokenize.NL,
    tokenize.NEWLINE,
    tokenize.INDENT,
    tokenize.DEDENT,
    tokenize.ENDMARKER,
}


def count_code_lines(text: str) -> int:
    """Count the lines that are neither blank, nor comment alone, nor docstring.

    A docstring is any string that stands alone as a statement: of a module, a class, a function, or
    below a field.
    """
    lines: set[int] = set()
    for token in tokenize.generate_tokens(io.StringIO(text).readline):
        if token.type not in _SILENT:
            lines.update(range(token.start[0], token.end[0] + 1))
    for node in ast.walk(ast.parse(text)):
        if (
            isinstance(node, ast.Expr)
            and isinstance(node.value, ast.Constant)
            and isinstance(node.value.value, str)
        ):
            lines.difference_update(range(node.lineno, (node.end_lineno or node.lineno) + 1))
    return len(lines)


def count_options(text: str) -> int:
    """Count the calls of `option` in a module: each declares one field of a configuration."""
    return sum(
        isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == "option"
        for node in ast.walk(ast.parse(text))
    )


def files_run(action: Callable[[], object], package: Path) -> set[str]:
    """Files of a package in which a function was called while `action` ran, in any thread."""
    root = f"{package.resolve()}/"
    seen: set[str] = set()

    def note(frame: FrameType, event: str, argument: Any) -> None:
        # Code of a module or a class body has no fast locals.
        if event == "call" and frame.f_code.co_flags & inspect.CO_OPTIMIZED:
            seen.add(frame.f_code.co_filename)

    threading.setprofile(note)
    sys.setprofile(note)
    try:
        action()
    finally:
        sys.setprofile(None)
        threading.setprofile(None)
    names = {str(Path(name).resolve()) for name in seen}
    return {name.removeprefix(root) for name in names if name.startswith(root)}


def train_smoke() -> None:
    from esper.scripts.cli.main import main

    with tempfile.TemporaryDirectory() as folder:
        code = main(["train", "smoke", "--device", "cpu", "--json", "--out", f"{folder}/run"])
    if code:
        raise SystemExit(f"esper train smoke ended with {code}")


def grow_digits() -> None:
    import torch
    from sklearn.datasets import load_digits
    from torch import nn

    import esper

    data = load_digits()
    images = torch.tensor(data.images / 16.0, dtype=torch.float32)[:, None]
    batches = list(zip(images.split(64), torch.tensor(data.target).split(64), strict=True))
    torch.manual_seed(0)
    model = nn.Sequential(
        nn.Sequential(nn.Conv2d(1, 4, 3, padding=1), nn.ReLU()),
        nn.MaxPool2d(2),
        nn.Sequential(nn.Conv2d(4, 8, 3, padding=1), nn.ReLU()),
        nn.AdaptiveAvgPool2d(1),
        nn.Flatten(),
        nn.Linear(8, 10),
    )
    train, val = batches[:13], batches[13:18]
    esper.grow(model, ["0", "2"], train=train, val=val, epochs=40, controller="heuristic")


def print_sizes(root: Path) -> None:
    package = root / PACKAGE
    texts = [path.read_text(encoding="utf-8") for path in package.rglob("*.py")]
    folders = [init.parent for init in package.glob("*/__init__.py")]
    long = [text for text in texts if len(text.splitlines()) > LONG]
    options = sum(map(count_options, texts))
    print(f"{PACKAGE.as_posix()}: {sum(map(count_code_lines, texts)):,} lines of code")
    print(f"modules: {len(texts)}, of more than {LONG} lines: {len(long)}")
    print(f"folders: {len(folders)}")
    print(f"settings: {options} declared fields")
    for name in OTHERS:
        paths = (root / name).rglob("*.py")
        lines = sum(count_code_lines(path.read_text(encoding="utf-8")) for path in paths)
        print(f"{name}: {lines:,} lines of code")


def print_runs() -> None:
    import contextlib
    import os

    import esper

    package = Path(esper.__file__).parent
    with open(os.devnull, "w") as nowhere, contextlib.redirect_stdout(nowhere):
        trained = files_run(train_smoke, package)
        grow_digits()
        grown = files_run(grow_digits, package)
    print(f"files run by `esper train smoke`: {len(trained)}")
    print(f"files run by a warm `esper.grow(controller='heuristic')`: {len(grown)}")


def main(arguments: list[str]) -> int:
    places = [argument for argument in arguments if argument != "--runs"]
    root = Path(places[0]) if places else Path(__file__).resolve().parent.parent
    if not (root / PACKAGE).is_dir():
        print(f"error: {root} has no {PACKAGE.as_posix()}", file=sys.stderr)
        return 2
    print_sizes(root)
    if "--runs" in arguments:
        print_runs()
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
