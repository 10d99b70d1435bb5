"""What an arm spends: the operations of its training, and of the ablations it is measured by."""

from __future__ import annotations

from functools import lru_cache

import torch
from torch import Tensor

from esper.kasmina.contribution import plan_ablations
from esper.kasmina.flops import PASSES_OF_TRAINING
from esper.leyline.signals import Signals
from esper.leyline.stages import SeedStage


def training_flops(signals: Signals) -> Tensor:
    """Return float64 [R]: the operations of the epoch that the rows have just trained."""
    samples = signals.samples_per_epoch.double()
    return PASSES_OF_TRAINING * samples * signals.flops.double()


def ablation_flops(signals: Signals, samples: Tensor) -> Tensor:
    """Return float64 [R]: the operations of all configurations but the network as it is.

    Args:
        signals: of the epoch that was measured, on the CPU.
        samples: int64 [R], validation samples.
    """
    blended = (signals.alpha > 0) & (signals.stage >= 0)
    measured = blended & (signals.stage != int(SeedStage.FOSSILIZED))
    fossils = (signals.slot_flops * (blended & ~measured)).sum(1)
    base = (signals.host_flops + fossils).double()
    found = torch.zeros(signals.rows, dtype=torch.float64)
    # Rows without a seed on trial, most of them, are evaluated once.
    for row in measured.any(1).nonzero().flatten().tolist():
        chosen = _configurations(tuple(measured[row].tolist()))
        own = (signals.slot_flops[row] * measured[row]).double()
        found[row] = (base[row] + chosen @ own).sum() * samples[row]
    return found


@lru_cache(maxsize=1024)
def _configurations(members: tuple[bool, ...]) -> Tensor:
    """Return float64 [K - 1, S]: the configurations that a plain validation would not need."""
    return plan_ablations(members)[1:].double()
