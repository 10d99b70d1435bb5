"""What the vector environment costs beside the population it is made of.

Every step of `GrowVectorEnv` is timed, and within it the step of the population, so that whatever
else the machine does falls on both. What the environment adds is observing, masks, the reward and
arrays. Needs `esper-grow[envs]`.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Sequence

import numpy as np
import torch
from numpy.typing import NDArray


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
    from esper.envs.vector import GrowVectorEnv

    # The last step of an episode begins another one, which no step of a population does.
    settings = {"episode_length": options.steps + 1, "device": options.device}
    envs = GrowVectorEnv(options.rows, options.recipe, settings)
    _, infos = envs.reset()
    generator, step_seconds, before = np.random.default_rng(0), 0.0, envs.rows.live_seconds
    for _ in range(options.steps):
        actions = draw(generator, infos["action_mask"], envs.rows.spaces.sizes)
        started = time.perf_counter()
        infos = envs.step(actions)[-1]
        step_seconds += time.perf_counter() - started
    lived = envs.rows.live_seconds - before
    envs.close()
    for name, seconds in (("population", lived), ("environment", step_seconds)):
        each = seconds / options.steps * 1e3
        print(f"{name:12} {each:9.2f} ms a step of {options.rows} rows")
    print(f"environment / population: {step_seconds / lived:.4f}")
    return 0


def draw(
    generator: np.random.Generator, masks: NDArray[np.int8], sizes: Sequence[int]
) -> NDArray[np.int64]:
    """Return one random choice of every head that its mask allows, int64 [R, 8]."""
    parts = np.split(masks.astype(np.float64), np.cumsum(sizes)[:-1], axis=1)
    return np.stack([(part * generator.random(part.shape)).argmax(1) for part in parts], axis=1)
