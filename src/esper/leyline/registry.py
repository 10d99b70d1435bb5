"""Registries of plug-ins by name, and lazy imports of the names of a package.

A plug-in is registered once, under a lower_snake name, usually by a decorator. Third parties add
theirs through the entry-point group `esper.<kind>s`, which is read when a name is first looked up.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from importlib import import_module
from importlib.metadata import entry_points
from typing import Any, Generic, TypeVar

from esper.leyline.errors import UsageError, unknown_name, warn

T = TypeVar("T")

_NAME = re.compile(r"[a-z][a-z0-9_]*\Z")


class Registry(Generic[T]):
    """The plug-ins of one kind by name, in order of registration."""

    def __init__(self, kind: str, group: str | None = None) -> None:
        """Create an empty registry.

        Args:
            kind: the singular noun used in messages.
            group: entry points of third parties; `esper.<kind>s` by default.
        """
        self.kind = kind
        self.group = group or f"esper.{kind}s"
        self._items: dict[str, T] = {}
        self._discovered = False

    def register(self, name: str, item: T) -> T:
        """Add `item` under `name` and return it; refuse bad and taken names."""
        if not isinstance(name, str) or not _NAME.match(name):
            raise UsageError(f"{self.kind} name must be lower_snake (a-z, 0-9, _), got {name!r}")
        if name in self._items:
            raise UsageError(f"{self.kind} {name!r} is already registered; choose another name")
        self._items[name] = item
        return item

    def unregister(self, name: str) -> None:
        """Remove a name, so that a test or a notebook can register it again."""
        self.get(name)
        del self._items[name]

    def get(self, name: str) -> T:
        """Return the plug-in called `name`, or raise with the nearest known name."""
        if name not in self._items:
            self._discover()
        try:
            return self._items[name]
        except KeyError:
            known = unknown_name(self.kind, name, self._items)
            raise type(known)(
                f"{known}; one of your own is known once its module is imported (--import FILE)"
            ) from None

    def names(self) -> tuple[str, ...]:
        """Return every known name in order of registration."""
        self._discover()
        return tuple(self._items)

    def __contains__(self, name: object) -> bool:
        return name in self.names()

    def __iter__(self) -> Iterator[str]:
        return iter(self.names())

    def __len__(self) -> int:
        return len(self.names())

    def _discover(self) -> None:
        """Import third-party plug-ins once; importing one registers it."""
        if self._discovered:
            return
        self._discovered = True
        for point in entry_points(group=self.group):
            # One plug-in that fails must not disable the others.
            try:
                point.load()
            except Exception as error:
                warn(
                    f"the {self.kind} plug-in {point.name!r} ({point.value}) cannot be used: "
                    f"{type(error).__name__}: {error}; mend or uninstall it"
                )


# ---- Names of packages


def find_in(package: str, modules: Mapping[str, Sequence[str]]) -> Callable[[str], Any]:
    """Return the `__getattr__` of a package that imports its names when they are first used.

    Commands such as `esper query` then start without importing PyTorch.

    Args:
        package: its name.
        modules: the names that each of its modules defines.
    """
    homes = {name: module for module, names in modules.items() for name in names}

    def find(name: str) -> Any:
        if name not in homes:
            raise AttributeError(f"module {package!r} has no attribute {name!r}")
        value = getattr(import_module(homes[name]), name)
        setattr(import_module(package), name, value)
        return value

    return find
