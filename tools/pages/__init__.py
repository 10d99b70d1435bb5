"""Reference pages that are made from the code when the site is built, and not kept in docs/."""

from __future__ import annotations

from collections.abc import Callable

from tools.pages import arena, commands, observation, settings, telemetry

PAGES: dict[str, Callable[[], str]] = {
    "arena.md": arena.render,
    "commands.md": commands.render,
    "observation.md": observation.render,
    "observation-travelling.md": observation.render_travelling,
    "settings.md": settings.render,
    "telemetry.md": telemetry.render,
}
"""How to make every page, by its name below docs/."""
