"""A plug-in that registers itself when it is imported, as a user's module does."""

from __future__ import annotations

from esper.kasmina.blueprints.registry import register_blueprint
from tests.lab.population.plugins import OddSeed


@register_blueprint("self_registered", topologies=("vector",), note="Odd.")
class SelfRegistered(OddSeed):
    """Known wherever this module is imported."""
