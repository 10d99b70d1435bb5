"""A budget of compute: a run ends when a network has spent its FLOPs, not after so many passes.

A run with a budget has as many epochs as any other, but an epoch is an equal share of the budget:
the number of its optimizer steps follows from what a step of the network costs as it is now. So a
small network takes more steps than a grown one, and the learning rate, which moves from epoch to
epoch, follows the share of the budget that is spent.

A training step costs three forward passes of its batch. The evaluation that ends an epoch costs one
forward pass of the validation samples for each configuration of seeds that is measured.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, TypeVar

import torch
from torch import Tensor

from esper.kasmina.flops import PASSES_OF_TRAINING
from esper.leyline.errors import ConfigError

if TYPE_CHECKING:
    from esper.kasmina.signals import RowFacts

NO_BUDGET = -1
"""Budget of a network that is trained for a number of epochs."""

N = TypeVar("N", int, Tensor)


def parse_budget(value: float | str) -> float | str:
    """Return a budget as FLOPs, or as a text such as "10x": a multiple of the host's own run."""
    text = str(value).strip().lower()
    is_multiple = text.endswith("x")
    try:
        if isinstance(value, bool):
            raise ValueError
        number = float(text.removesuffix("x"))
    except ValueError:
        number = math.nan
    if not 0.0 < number < 2.0**62:
        raise ConfigError(
            "budget must be a number of FLOPs, such as 2e12, or a multiple of what the host would "
            f"take for all epochs, such as '10x', got {value!r}"
        )
    if not is_multiple:
        return number
    # All digits, but no more than there are: 10.0 is "10x".
    short = f"{number:g}"
    return f"{short}x" if float(short) == number else f"{number!r}x"


def count_budget(
    budget: float | str,
    *,
    host_flops: int,
    samples_per_epoch: int,
    batch_samples: int,
    val_samples: int,
    epochs: int,
) -> int:
    """Return a budget in FLOPs; refuse one in which the host cannot take a step in every epoch.

    Args:
        budget: as `parse_budget` returns it.
        host_flops: operations of one sample's forward pass through the host.
        samples_per_epoch: training samples of one epoch without a budget.
        batch_samples: samples of an optimizer step.
        val_samples: samples by which an epoch is measured.
        epochs: length of the run.
    """
    measuring = host_flops * val_samples
    found = 0
    if isinstance(budget, str):
        whole = training_flops(host_flops, samples_per_epoch) + measuring
        found = int(float(budget.removesuffix("x")) * whole * epochs)
    else:
        found = int(budget)
    least = (training_flops(host_flops, batch_samples) + measuring) * epochs
    if found < least:
        raise ConfigError(
            f"a budget of {found:.3g} FLOPs is too small for {epochs} epochs: one step and one "
            f"evaluation in each take {least:.3g}; give more, or fewer epochs or validation samples"
        )
    return found


def training_flops(flops: N, samples: N) -> N:
    """Return what it takes to train on some samples, at `flops` for one forward pass."""
    return PASSES_OF_TRAINING * flops * samples


@dataclass(frozen=True, slots=True)
class Portion:
    """What a row trains on before its next decision."""

    epoch: int
    """Number of the epoch, from 1: it names random streams and learning rates."""
    first: int
    """Samples that the row was trained on before."""
    samples: int
    """How many it is trained on now."""


def share_end(budget: int, epoch: int, epochs: int) -> int:
    """Return how much of a budget may be spent when an epoch (1 is the first) ends."""
    return budget * min(epoch, epochs) // epochs


def share_left(facts: RowFacts, epochs: Tensor, spent: Tensor) -> list[int]:
    """Return what rows that have spent so much, int64 [R], may still spend in these epochs."""
    # In Python's numbers: a large budget times an epoch has more than 64 bits.
    rows = torch.stack((facts.compute, epochs, facts.horizon, spent), 1).tolist()
    return [
        0 if budget == NO_BUDGET else share_end(budget, epoch, horizon) - taken
        for budget, epoch, horizon, taken in rows
    ]


def plan_portions(
    facts: RowFacts, epochs: Tensor, seen: Tensor, flops: Tensor, allowances: Sequence[int]
) -> list[Portion]:
    """Return what every row trains on in its epoch.

    Args:
        facts: what is known of the rows.
        epochs: int64 [R], which epoch each row is at, from 1.
        seen: int64 [R], samples that rows with a budget were trained on.
        flops: int64 [R], operations of one sample's forward pass.
        allowances: FLOPs that each row with a budget may train with.
    """
    known = (facts.compute, epochs, facts.samples_per_epoch, facts.batch_samples, seen, flops)
    portions = []
    for (budget, epoch, usual, batch, before, each), allowance in zip(
        torch.stack(known, 1).tolist(), allowances, strict=True
    ):
        if budget == NO_BUDGET:
            portions.append(Portion(epoch, (epoch - 1) * usual, usual))
            continue
        # At least one step: what is overdrawn is missing from the next share.
        steps = max(1, allowance // max(1, training_flops(each, batch)))
        portions.append(Portion(epoch, before, steps * batch))
    return portions


def affordable_flops(facts: RowFacts, epoch: Tensor, spent: Tensor) -> Tensor:
    """Return int64 [R]: the operations per sample that what is left of a budget pays for.

    In every share that is left there must be a step, and an evaluation with and without a new seed.
    """
    left = (facts.compute - spent).clamp(min=0)
    shares = (facts.horizon - epoch).clamp(min=1)
    passes = (PASSES_OF_TRAINING * facts.batch_samples + 2 * facts.val_samples).clamp(min=1)
    return torch.where(facts.compute == NO_BUDGET, NO_BUDGET, left // shares // passes)
