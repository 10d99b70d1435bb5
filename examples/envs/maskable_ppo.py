"""Learn to grow with sb3-contrib's MaskablePPO instead of our own learner.

Run it with `pip install 'esper-grow[sb3]'` and `python examples/envs/maskable_ppo.py`. All rows are
one population; an action is one number and its mask is exact. How it learns beside our own learner:
`python -m benchmarks maskable_ppo`.
"""

from __future__ import annotations

import argparse

import torch
from sb3_contrib import MaskablePPO
from stable_baselines3.common.vec_env import VecMonitor, VecNormalize

from esper.lab.envs import GrowVectorEnv, LegalVectorActions
from esper.lab.envs.stable_baselines import GrowVecEnv


def main() -> None:
    """Train for some rounds; Stable-Baselines3 prints what they came to."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--recipe", default="digits", help="recipe of `esper train`")
    parser.add_argument("--rows", type=int, default=32, help="networks side by side (default: 32)")
    parser.add_argument("--length", type=int, default=30, help="decisions of an episode")
    parser.add_argument("--rounds", type=int, default=24, help="episodes of all rows (default: 24)")
    parser.add_argument("--seed", type=int, default=0, help="seed of everything (default: 0)")
    options = parser.parse_args()
    torch.set_num_threads(1)

    grow = GrowVectorEnv(
        options.rows,
        options.recipe,
        {"episode_length": options.length, "seed": options.seed, "device": "cpu"},
    )
    # How, how far and how fast a seed blends is left at its default: 154 actions for 3 slots.
    legal = LegalVectorActions(grow, pinned=("tempo", "alpha_target", "alpha_speed", "alpha_curve"))
    gamma = grow.rows.config.ppo.gamma
    # Observations come as they are measured; rewards too, which the monitor sees first.
    env = VecNormalize(VecMonitor(GrowVecEnv(legal)), gamma=gamma)
    model = MaskablePPO(
        "MlpPolicy",
        env,
        n_steps=options.length,  # one update per round, as in our learner
        batch_size=options.rows * options.length // 4,
        n_epochs=6,
        learning_rate=1e-3,
        gamma=gamma,
        ent_coef=0.01,
        seed=options.seed,
        device="cpu",
        verbose=1,
    )
    model.learn(options.rows * options.length * options.rounds, log_interval=1)
    env.close()


if __name__ == "__main__":
    main()
