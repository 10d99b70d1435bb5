"""What a monitor is, and the one table of them.

A monitor is a pure function over what was recorded lately: it returns what it finds wrong now, and
the same records give the same findings. Thresholds, meaning and advice stand beside it and make
the alarm, the line in the terminal and the page in the documents.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Literal

from esper.leyline.registry import Registry
from esper.nissa.columns import Row
from esper.nissa.monitors.recent import Recent

Severity = Literal["info", "warning", "critical"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Finding:
    """Something a monitor found."""

    severity: Severity
    message: str
    value: float | None = None
    """What was measured."""
    threshold: float | None = None
    """What it was compared with."""
    subject: str | None = None
    """The head, op, slot or blueprint it is about, where there are several."""


def findings(*found: Finding | None) -> Iterator[Finding]:
    """Return those that are findings; a check that finds nothing returns None."""
    return (each for each in found if each is not None)


Check = Callable[[Recent], Iterable[Finding]]


@dataclass(frozen=True, slots=True, kw_only=True)
class Monitor:
    """A check with everything a person needs to act on it."""

    name: str
    reads: type[Row]
    """The check runs after every record of this class."""
    thresholds: str
    """When it alarms, in words."""
    meaning: str
    advice: str
    check: Check
    is_event: bool = False
    """Every finding is news by itself, and nothing is ever cleared."""
    is_volatile: bool = False
    """It watches the machine, so identical runs may differ in it."""


MONITORS: Registry[Monitor] = Registry("monitor")
"""Monitors by name; a third party adds its own with `register_monitor`."""


def register_monitor(
    name: str,
    *,
    reads: type[Row],
    thresholds: str,
    meaning: str,
    advice: str,
    is_event: bool = False,
    is_volatile: bool = False,
) -> Callable[[Check], Check]:
    """Return a decorator that adds a check to the table."""

    def register(check: Check) -> Check:
        monitor = Monitor(
            name=name,
            reads=reads,
            thresholds=thresholds,
            meaning=meaning,
            advice=advice,
            check=check,
            is_event=is_event,
            is_volatile=is_volatile,
        )
        MONITORS.register(name, monitor)
        return check

    return register
