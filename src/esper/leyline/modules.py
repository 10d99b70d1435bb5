"""Modules of users, named as Python names them or by their files."""

from __future__ import annotations

import os
import sys
from importlib.util import find_spec

from esper.leyline.errors import UsageError


def is_file_name(name: str) -> bool:
    """Return whether a module is named by its file."""
    return name.endswith(".py") or os.sep in name


def find_module(name: str) -> str:
    """Return what a module, or the module in a file, is imported by.

    Its folder (of a module, the current one) goes onto the path, as Python does for a script, so
    that processes which are given its classes find them by name too.

    Raises:
        UsageError: There is no such file, or it cannot be imported by its name.
    """
    module, folder = name, os.getcwd()
    if is_file_name(name):
        path = os.path.abspath(name)
        if not os.path.isfile(path):
            raise UsageError("there is no such file")
        folder, file = os.path.split(path)
        module = file.removesuffix(".py")
        if not module.isidentifier():
            raise UsageError(f"{module!r} cannot be the name of a module")
        known = find_spec(module)
        if known is not None and (known.origin is None or not _is_file(known.origin, path)):
            raise UsageError(
                f"a module {module!r} exists already ({known.origin}); rename the file"
            )
    if folder not in sys.path:
        sys.path.insert(0, folder)
    return module


def _is_file(origin: str, path: str) -> bool:
    return os.path.isfile(origin) and os.path.samefile(origin, path)
