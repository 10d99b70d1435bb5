"""How a network treats the order of positions (tokens, patches, nodes) at a slot.

Two symmetries matter to a seed. In a causal network no position sees later ones. In a
permutation-equivariant network, such as one on graphs or sets, reordering the positions of the
inputs reorders the activations and changes nothing else. A seed may only grow where it has every
symmetry that its host has.
"""

from __future__ import annotations

from typing import Literal, get_args

Symmetry = Literal["bidirectional", "causal", "equivariant", "pointwise"]
"""Neither symmetry, one of the two, or both: a position then sees only itself."""

SYMMETRIES: tuple[Symmetry, ...] = get_args(Symmetry)

MEANINGS: dict[Symmetry, str] = {
    "bidirectional": "positions see earlier and later ones",
    "causal": "no position sees later ones",
    "equivariant": "the order of positions does not matter",
    "pointwise": "no position sees another",
}
"""Each in words, to follow "in this model"."""


def symmetry_of(*, causal: bool, equivariant: bool) -> Symmetry:
    """Return the name of a network with these symmetries."""
    if causal:
        return "pointwise" if equivariant else "causal"
    return "equivariant" if equivariant else "bidirectional"


def is_causal(symmetry: Symmetry) -> bool:
    """Return whether no position sees later ones."""
    return symmetry in ("causal", "pointwise")


def is_equivariant(symmetry: Symmetry) -> bool:
    """Return whether the order of positions does not matter."""
    return symmetry in ("equivariant", "pointwise")
