"""The seeds that can be germinated: 13 built-in blueprints, `kin`, and whatever is registered."""

from __future__ import annotations

from esper.kasmina.blueprints import attention, conv, kin, mlp
from esper.kasmina.blueprints import mlp as norm
from esper.kasmina.blueprints.registry import (
    BLUEPRINTS,
    blueprint_by_id,
    blueprint_names,
    count_parameters,
    register_blueprint,
    selectable,
)
from esper.leyline.slots import BUILTIN_BLUEPRINTS

__all__ = [
    "BLUEPRINTS",
    "attention",
    "blueprint_by_id",
    "blueprint_names",
    "conv",
    "count_parameters",
    "kin",
    "mlp",
    "norm",
    "register_blueprint",
    "selectable",
]

# Ids are positions in a fixed table: a built-in that is missing there would silently get a new id.
# `kin` has the id after them.
_registered = set(BLUEPRINTS._items) - {kin.KIN}
assert _registered == set(BUILTIN_BLUEPRINTS), (
    f"built-in blueprints and their ids disagree: {sorted(_registered ^ set(BUILTIN_BLUEPRINTS))}"
)
