"""Measure the milliseconds of a population's step while random actions add and remove seeds.

Every row acts at random, so topologies change at every step; captures are counted. With `--grown`
no row acts and every slot of every row has a seed: the largest memory that a population needs.
"""

from __future__ import annotations

import argparse
import json
from statistics import mean, median
from typing import Any

from benchmarks.table import print_table


def main(arguments: list[str]) -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks acting", description=__doc__)
    parser.add_argument("--device", default="auto")
    parser.add_argument("--task", default="digits")
    parser.add_argument("--rows", type=int, nargs="+", default=[64, 128, 256])
    parser.add_argument("--rows-per-stack", type=int, default=None)
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--warm-up", type=int, default=3, help="steps that are not timed")
    parser.add_argument("--batch-size", type=int, default=None)
    parser.add_argument("--bf16", action="store_true")
    parser.add_argument("--grown", action="store_true", help="a seed in every slot, nobody acts")
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args(arguments)
    results = [measure(rows, options) for rows in options.rows]
    if options.json:
        print(json.dumps(results, indent=2))
        return 0
    print_table(
        ["task", "rows", "median", "mean", "longest", "captures", "GiB"],
        [
            [
                each["task"],
                str(each["rows"]),
                *(f"{each[name]:.0f} ms" for name in ("median_ms", "mean_ms", "longest_ms")),
                f"{each['captures']} in {each['steps']} steps",
                "–" if each["memory_gib"] is None else f"{each['memory_gib']:.1f}",
            ]
            for each in results
        ],
    )
    return 0


def measure(rows: int, options: argparse.Namespace) -> dict[str, Any]:
    """Run some steps; return their times, and the captures of all steps."""
    import torch

    from esper.lab.bench import now
    from esper.lab.bench.engine import measured_task, random_data
    from esper.lab.population.engine import PopulationConfig
    from esper.lab.population.population import Population
    from esper.leyline.actions import placeholder_actions
    from esper.tamiyo.controllers import RandomController

    config = PopulationConfig(use_bf16=options.bf16)
    if options.rows_per_stack is not None:
        config = config.replace(rows_per_stack=options.rows_per_stack)
    task = measured_task(options.task, options.batch_size)
    population = Population(task, rows, 1, options.device, data=[random_data(task)], config=config)
    on_cuda = population.device.type == "cuda"
    try:
        signals = population.reset()
        if options.grown:
            for group in population.groups:
                group.start(fully_grown(group))
        controller = RandomController(1)
        controller.reset(rows, population.device)
        times = []
        for number in range(options.warm_up + options.steps):
            if number == options.warm_up and on_cuda:
                torch.cuda.reset_peak_memory_stats()
            waiting = placeholder_actions(rows)
            actions = waiting if options.grown else controller.act(signals, population.masks())
            started = now(population.device)
            signals = population.step(actions)
            times.append(1e3 * (now(population.device) - started))
        timed = times[options.warm_up :]
        return {
            "task": options.task,
            "rows": rows,
            "steps": len(times),
            "median_ms": median(timed),
            "mean_ms": mean(timed),
            "longest_ms": max(timed),
            "captures": sum(getattr(group.engine, "captures", 0) for group in population.groups),
            "memory_gib": torch.cuda.max_memory_allocated() / 2**30 if on_cuda else None,
        }
    finally:
        population.close()


def fully_grown(group: Any) -> Any:
    """Return the group's state with a seed blending in every slot, blueprints and styles mixed."""
    import torch

    from esper.leyline.stages import SeedStage

    generator = torch.Generator().manual_seed(1)
    shape = group.state.stage.shape
    fitting = group.table.fits()[0, 0].nonzero().flatten()
    return group.state.where(
        torch.ones(shape, dtype=torch.bool),
        stage=int(SeedStage.BLENDING),
        blueprint=fitting[torch.randint(len(fitting), shape, generator=generator)],
        algorithm=torch.randint(0, 3, shape, generator=generator),
        alpha=0.5,
    )
