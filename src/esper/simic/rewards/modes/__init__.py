"""The modes: choices of terms. Importing this package registers them by name."""

from esper.simic.rewards.modes import (
    basic,
    escrow,
    loss,
    minimal,
    shaped,
    simplified,
    sparse,
    twin,
)

__all__ = ["basic", "escrow", "loss", "minimal", "shaped", "simplified", "sparse", "twin"]
