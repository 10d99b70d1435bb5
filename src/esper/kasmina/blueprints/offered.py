"""Which blueprints a slot is offered: those that have every symmetry its host has.

What a seed does to the order of positions is measured on a small one with random weights, so that
it holds for registered blueprints as well, whatever they say of themselves.
"""

from __future__ import annotations

from functools import lru_cache

import torch
from torch import Tensor, nn

from esper.kasmina.blueprints.registry import (
    Blueprint,
    blueprint_by_id,
    blueprint_names,
    selectable,
)
from esper.leyline.blueprints import Topology
from esper.leyline.randomness import seeded
from esper.leyline.symmetry import Symmetry, is_causal, is_equivariant, symmetry_of

_WIDTHS = (8, 64)
"""Channels of the seed that is tried; the second where a blueprint has none of the first."""

_PLACES = 6
_ROUNDING = 1e-9


def offered(topology: Topology, symmetry: Symmetry) -> tuple[int, ...]:
    """Return the ids that may be germinated in a slot of this kind; never noop."""
    names = blueprint_names()
    left_out = withheld(topology, symmetry)
    return tuple(choice for choice in selectable(topology) if names[choice] not in left_out)


def withheld(topology: Topology, symmetry: Symmetry) -> tuple[str, ...]:
    """Return the blueprints that would take a symmetry from the host of such a slot."""
    if symmetry == "bidirectional" or topology == "vector":
        return ()
    choices = [blueprint_by_id(choice) for choice in selectable(topology)]
    return tuple(one.name for one in choices if not _keeps(one, topology, symmetry))


def _keeps(blueprint: Blueprint, topology: Topology, symmetry: Symmetry) -> bool:
    own = seed_symmetry(blueprint, topology, is_causal=is_causal(symmetry))
    keeps_causal = is_causal(own) or not is_causal(symmetry)
    return keeps_causal and (is_equivariant(own) or not is_equivariant(symmetry))


@lru_cache(maxsize=1024)
def seed_symmetry(blueprint: Blueprint, topology: Topology, *, is_causal: bool) -> Symmetry:
    """Return the symmetry of a seed in a host that is causal or not.

    A seed that cannot be tried counts as having none.
    """
    for width in _WIDTHS:
        try:
            with seeded("symmetry"), torch.no_grad():
                return _measure(blueprint, width, topology, is_causal)
        except Exception:
            # Foreign code, which may be for other widths only.
            continue
    return "bidirectional"


def _measure(blueprint: Blueprint, width: int, topology: Topology, causal: bool) -> Symmetry:
    seed = blueprint.build(width, topology, is_causal=causal).double().eval()
    for parameter in seed.parameters():
        parameter.add_(torch.randn(parameter.shape), alpha=0.3)
    if topology == "cnn":
        x = torch.randn(2, width, _PLACES, _PLACES, dtype=torch.float64)
        reorders = all(_is_reordered(seed, x, axis) for axis in (2, 3))
        return symmetry_of(causal=False, equivariant=reorders)
    x = torch.randn(2, _PLACES, width, dtype=torch.float64)
    changed = x.clone()
    half = _PLACES // 2
    changed[:, half:] = torch.randn(changed[:, half:].shape, dtype=torch.float64)
    looks_ahead = not _same(seed(x)[:, :half], seed(changed)[:, :half])
    return symmetry_of(causal=not looks_ahead, equivariant=_is_reordered(seed, x, 1))


def _is_reordered(seed: nn.Module, x: Tensor, axis: int) -> bool:
    order = torch.tensor([3, 0, 5, 1, 4, 2])
    return _same(seed(x.index_select(axis, order)), seed(x).index_select(axis, order))


def _same(one: Tensor, other: Tensor) -> bool:
    return bool((one - other).abs().max() <= _ROUNDING * one.abs().max())
