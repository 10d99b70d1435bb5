"""Results that nobody played."""

from __future__ import annotations

from collections.abc import Sequence

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
) -> CellResult:
    """Return a result with these errors on the test split, and on validation samples by default."""
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
        flops=[1200] * count,
        host_parameters=100,
        host_flops=1000,
        training_flops=[3e6] * count,
        ablation_flops=[1e5] * count,
        germinated=[1] * count,
        fossilized=[1] * count,
        pruned=[0] * count,
        rolled_back=[False] * count,
        grown=[
            [{"slot": "r0c0", "blueprint": "norm", "channels": 2, "algorithm": "ADD"}]
            for _ in errors
        ],
    )
