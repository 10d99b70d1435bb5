"""Learn to grow with sb3-contrib's MaskablePPO instead of our own learner.

Run it with `pip install 'esper-grow[sb3]'` and `python examples/envs/maskable_ppo.py`. All rows are
one population; an action is one number and its mask is exact.
"""

from __future__ import annotations

import argparse
import json
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch
from sb3_contrib import MaskablePPO
from stable_baselines3.common.callbacks import BaseCallback

from esper.envs import GrowVectorEnv, LegalVectorActions
from esper.envs.stable_baselines import GrowVecEnv


class Curve(BaseCallback):
    """Keeps what every round of episodes came to, and prints it."""

    def __init__(self, rows: int) -> None:
        """Start with no round."""
        super().__init__()
        self.rounds: list[dict[str, float]] = []
        self._returns = np.zeros(rows)
        self._started = time.perf_counter()

    def _on_step(self) -> bool:
        self._returns += self.locals["rewards"]
        infos: list[dict[str, Any]] = self.locals["infos"]
        if self.locals["dones"].all():  # the rows of a population end together
            gains = [info["score"] - info["twin_score"] for info in infos]
            found = {
                "steps": float(self.num_timesteps),
                "return": float(self._returns.mean()),
                "gain": float(np.mean(gains)),
                "seconds": time.perf_counter() - self._started,
            }
            self.rounds.append(found)
            self._returns[:] = 0
            print(", ".join(f"{name} {value:.2f}" for name, value in found.items()), flush=True)
        return True


def main() -> None:
    """Train for some steps."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--recipe", default="digits", help="recipe of `esper train`")
    parser.add_argument("--rows", type=int, default=32, help="networks side by side (default: 32)")
    parser.add_argument("--length", type=int, default=30, help="decisions of an episode")
    parser.add_argument("--rounds", type=int, default=24, help="episodes of all rows (default: 24)")
    parser.add_argument("--seed", type=int, default=0, help="seed of everything (default: 0)")
    parser.add_argument("--out", help="file for the curve, as JSON")
    options = parser.parse_args()
    torch.set_num_threads(1)

    grow = GrowVectorEnv(
        options.rows,
        options.recipe,
        {"episode_length": options.length, "seed": options.seed, "device": "cpu"},
    )
    # How, how far and how fast a seed blends is left at its default: 154 actions for 3 slots.
    env = GrowVecEnv(
        LegalVectorActions(grow, pinned=("tempo", "alpha_target", "alpha_speed", "alpha_curve"))
    )
    model = MaskablePPO(
        "MlpPolicy",
        env,
        n_steps=options.length,  # one update per round, as in our learner
        batch_size=options.rows * options.length // 4,
        n_epochs=6,
        learning_rate=1e-3,
        gamma=grow.rows.config.ppo.gamma,
        ent_coef=0.01,
        seed=options.seed,
        device="cpu",
    )
    curve = Curve(options.rows)
    model.learn(options.rows * options.length * options.rounds, callback=curve)
    env.close()
    if options.out:
        Path(options.out).write_text(json.dumps(curve.rounds, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
