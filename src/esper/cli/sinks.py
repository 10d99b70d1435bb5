"""`--wandb`: where a run is shown beside its own store and TensorBoard."""

from __future__ import annotations

import argparse
from typing import Any


def add_wandb(group: Any) -> None:
    """Add the option to a group of a command."""
    group.add_argument(
        "--wandb",
        action="store_true",
        help="also show curves and alarms in Weights & Biases; its own WANDB_MODE=offline keeps "
        "them here until `wandb sync`; give it again with --resume",
    )


def chosen_sinks(options: argparse.Namespace) -> tuple[str, ...]:
    """Return the names of the sinks that were asked for."""
    from esper.nissa.store import DEFAULT_SINKS

    return (*DEFAULT_SINKS, "wandb") if options.wandb else DEFAULT_SINKS
