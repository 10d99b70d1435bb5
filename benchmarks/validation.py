"""Measure validation with ablations: shared passes against one pass per configuration."""

from __future__ import annotations

import argparse
import json
from statistics import median
from typing import Any

from benchmarks.table import print_table

SEEDS = {
    "conv_light × 3": ("conv_light", "conv_light", "conv_light"),
    "norm, attention, depthwise": ("norm", "attention", "depthwise"),
    "conv_heavy × 3": ("conv_heavy", "conv_heavy", "conv_heavy"),
}


def main(arguments: list[str]) -> int:
    import torch

    parser = argparse.ArgumentParser(prog="python -m benchmarks validation", description=__doc__)
    parser.add_argument("--images", type=int, default=512)
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args(arguments)
    torch.set_num_threads(1)
    results = [
        measure(name, blueprints, options.images, options.rounds)
        for name, blueprints in SEEDS.items()
    ]
    if options.json:
        print(json.dumps(results, indent=2))
        return 0
    print_table(
        [
            "seeds",
            "shared pass",
            "processor time",
            "a pass for each",
            "ratio",
            "largest difference",
        ],
        [
            [
                each["seeds"],
                f"{each['shared_s']:.3f} s",
                f"{each['shared_cpu_s']:.3f} s",
                f"{each['apart_s']:.3f} s",
                f"{each['ratio']:.2f}",
                f"{each['difference']:.1e}",
            ]
            for each in results
        ],
    )
    return 0


def measure(name: str, blueprints: tuple[str, ...], images: int, rounds: int) -> dict[str, Any]:
    """Time both ways in turns; the ratio is the median over the pairs."""
    import torch

    from esper.kasmina.blueprints.registry import BLUEPRINTS
    from esper.kasmina.contribution import participating, plan_ablations
    from esper.kasmina.evaluation import BatchEvaluator, FunctionEvaluator
    from esper.kasmina.garden import Garden
    from esper.kasmina.state import empty_state
    from esper.lab.bench import take_turns
    from esper.lab.bench.engine import random_data
    from esper.lab.tasks import get_task
    from esper.leyline.stages import SeedStage

    task = get_task("cifar_baseline", validation_samples=images)
    data = random_data(task)
    garden = Garden(task.build_host(0), task.slot_paths, task.example_input())
    state = empty_state(1, len(blueprints))
    garden.sync(
        state.where(
            torch.ones_like(state.occupied),
            stage=int(SeedStage.BLENDING),
            blueprint=torch.tensor([[BLUEPRINTS.get(each).id for each in blueprints]]),
            alpha=torch.full((1, len(blueprints)), 0.5, dtype=torch.float64),
        )
    )
    stir(garden)
    configurations = plan_ablations(participating(garden.state)[0].tolist())
    batches = [data.batch("val", part) for part in data.subset.split(256)]
    shared = BatchEvaluator(batches, task.objective)

    def evaluate(model: Any) -> Any:
        losses, corrects = zip(*(task.objective(model(x), y) for x, y in batches), strict=True)
        return torch.cat(losses), torch.cat(corrects)

    apart = FunctionEvaluator(evaluate)
    one, other = (each.measure(garden, configurations)[0] for each in (shared, apart))
    pairs = take_turns(
        lambda: shared.measure(garden, configurations),
        lambda: apart.measure(garden, configurations),
        rounds=rounds,
    )
    if shared.problem is not None:
        raise SystemExit(f"the pass was not shared: {shared.problem}")
    return {
        "seeds": name,
        "images": images,
        "configurations": len(configurations),
        "shared_s": median(ours.wall for ours, _ in pairs),
        "shared_cpu_s": median(ours.cpu for ours, _ in pairs),
        "apart_s": median(theirs.wall for _, theirs in pairs),
        "ratio": median(ours.wall / theirs.wall for ours, theirs in pairs),
        "difference": float(((one - other).abs() / other.abs()).max()),
    }


def stir(garden: Any) -> None:
    """Give every parameter of a seed a value of its own: fresh seeds change nothing."""
    import torch

    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for parameter in garden.seedbed.parameters():
            parameter.add_(0.1 * torch.randn(parameter.shape, generator=generator))
