"""Measure the overhead of the vector environment over a bare population.

The same rows live twice in one process, by the same actions: in `GrowVectorEnv`, and in a bare
population whose masks are asked for after every step. They step in turns, so that whatever else the
machine does falls on both, and the figure is the median of the steps' ratios, by the clock and by
the processor. What the environment adds is observing, the reward, the comparison with twins and
arrays. Needs `esper-grow[envs]`.
"""

from __future__ import annotations

import argparse
import os
import time
from collections.abc import Callable, Sequence
from statistics import median

import numpy as np
import torch
from numpy.typing import NDArray

from benchmarks.table import print_table
from esper.lab.population.ray_population import AnyPopulation
from esper.leyline.actions import Actions
from esper.simic.training.row_source import TaskRows

GOAL = 1.05


def main(arguments: Sequence[str]) -> int:
    """Print seconds per step of both, and their ratio."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks environments", description=__doc__.splitlines()[0]
    )
    parser.add_argument("--recipe", default="digits", help="whose rows (default: digits)")
    parser.add_argument("--rows", type=int, default=64, help="networks (default: 64)")
    parser.add_argument("--steps", type=int, default=12, help="steps (default: 12)")
    parser.add_argument("--device", default="cpu", help="where they run (default: cpu)")
    options = parser.parse_args(arguments)
    torch.set_num_threads(1)
    # An extra, which a list of the benchmarks does without.
    from esper.lab.envs.grow import GrowVectorEnv

    # The last step of an episode begins another one, which no step of a population does.
    settings = {"episode_length": options.steps + 1, "device": options.device}
    if options.device == "cpu":
        settings["strategy"] = "sequential"  # all in this process, whose time is measured
    envs = GrowVectorEnv(options.rows, options.recipe, settings)
    source = TaskRows(envs.rows.config)
    population = source.environment(0, 0)
    population.reset(source.plan(0, 0).env_seeds)
    _, infos = envs.reset()
    generator = np.random.default_rng(0)
    spent: dict[str, list[tuple[float, float]]] = {"population": [], "environment": []}
    for number in range(options.steps):
        actions = draw(generator, infos["action_mask"], envs.rows.spaces.sizes)
        decided = envs.rows.spaces.decode(actions)
        works: list[tuple[str, Callable[[], object]]] = [
            ("population", lambda decided=decided: step(population, decided)),  # type: ignore[misc]
            ("environment", lambda actions=actions: envs.step(actions)),  # type: ignore[misc]
        ]
        for name, work in works if number % 2 else reversed(works):
            spent[name].append(timed(work))
        infos = envs.rows.infos()
    scores = population.signals().val_score.cpu().numpy()
    assert np.array_equal(scores, infos["score"]), "both have lived through the same"
    envs.close()
    source.close()
    ratios = [
        [after / before for before, after in zip(*pair, strict=True)]
        for pair in zip(spent["population"], spent["environment"], strict=True)
    ]
    table: list[list[object]] = [
        [name, *(f"{median(each) * 1e3:.1f}" for each in zip(*spent[name], strict=True))]
        for name in spent
    ]
    found = [median(each) for each in zip(*ratios, strict=True)]
    table.append(["ratio", *(f"{ratio:.4f}" for ratio in found)])
    print_table([f"ms a step of {options.rows} rows", "by the clock", "by the processor"], table)
    print(f"goal {GOAL}; load {os.getloadavg()[0]:.1f} on {os.cpu_count()} cores")
    by_clock, by_processor = found
    # On a device the processor only waits; on a CPU others may have had it meanwhile.
    return 0 if (by_processor if options.device == "cpu" else by_clock) <= GOAL else 1


def step(population: AnyPopulation, actions: Actions) -> None:
    """Do what whoever decides next needs of a population."""
    population.step({head: chosen.to(population.device) for head, chosen in actions.items()})
    population.masks()


def timed(work: Callable[[], object]) -> tuple[float, float]:
    """Return what something takes by the clock and by the processor."""
    clock, processor = time.perf_counter(), time.process_time()
    work()
    if torch.cuda.is_available():
        torch.cuda.synchronize()
    return time.perf_counter() - clock, time.process_time() - processor


def draw(
    generator: np.random.Generator, masks: NDArray[np.int8], sizes: Sequence[int]
) -> NDArray[np.int64]:
    """Return one random choice of every head that its mask allows, int64 [R, 8]."""
    parts = np.split(masks.astype(np.float64), np.cumsum(sizes)[:-1], axis=1)
    return np.stack([(part * generator.random(part.shape)).argmax(1) for part in parts], axis=1)
