"""Results that nobody played."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from esper.lab.proof.results import CellResult


def result(
    arm: str,
    member: str,
    errors: Sequence[float],
    *,
    purpose: str = "proof",
    seeds: Sequence[int] | None = None,
    parameters: int = 150,
    val_errors: Sequence[float] | None = None,
    flops: int = 1200,
    moments: Sequence[Sequence[int]] = (),
    copies: Sequence[Sequence[int]] | None = None,
    epochs: int = 60,
) -> CellResult:
    """Return a result with these errors on the test split, and on validation samples by default.

    Args:
        arm: name of the arm.
        member: label of the member.
        errors: by seed.
        purpose: of the cell.
        seeds: numbers from 0 on by default.
        parameters: of every network; the host has 100.
        val_errors: by seed.
        flops: of every network; the host has 1,000.
        moments: epochs of germination by seed; without them it is a result of an older version.
        copies: copies in the slots of every seed's network, 0 where nothing grew; by default one
            seed of another kind in every network.
        epochs: of every curve, if there are moments.
    """
    count = len(errors)
    val_errors = errors if val_errors is None else val_errors
    return CellResult(
        purpose=purpose,
        arm=arm,
        member=member,
        seeds=list(range(count)) if seeds is None else list(seeds),
        val_errors=list(val_errors),
        test_errors=list(errors),
        val_scores=[100 * (1 - error) for error in val_errors],
        test_scores=[100 * (1 - error) for error in errors],
        parameters=[parameters] * count,
        flops=[flops] * count,
        host_parameters=100,
        host_flops=1000,
        training_flops=[3e6] * count,
        ablation_flops=[1e5] * count,
        germinated=[1] * count,
        fossilized=[1] * count,
        pruned=[0] * count,
        rolled_back=[False] * count,
        grown=[_NORM] * count if copies is None else [_kin(each) for each in copies],
        curves=[[50.0] * epochs for _ in moments],
        germinated_at=[list(each) for each in moments],
    )


_NORM: list[dict[str, Any]] = [
    {"slot": "r0c0", "blueprint": "norm", "channels": 2, "algorithm": "ADD"}
]


def _kin(copies: Sequence[int]) -> list[dict[str, Any]]:
    return [
        {"slot": f"r0c{place}", "blueprint": "kin", "channels": 2, "copies": count}
        for place, count in enumerate(copies)
        if count
    ]
