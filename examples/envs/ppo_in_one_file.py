"""PPO in one file, CleanRL style, over a whole population at once.

Run it with `pip install 'esper-grow[envs]'` and `python examples/envs/ppo_in_one_file.py`.
Copy it and change whatever you like: nothing of Esper's own learner is used.
"""

from __future__ import annotations

import argparse

import gymnasium
import numpy as np
import torch
from torch import Tensor, nn
from torch.distributions import Categorical

import esper.lab.envs


class Agent(nn.Module):
    """Actor and critic on one body."""

    def __init__(self, inputs: int, actions: int, width: int = 64) -> None:
        """Make the layers."""
        super().__init__()
        self.body = nn.Sequential(
            nn.Linear(inputs, width), nn.Tanh(), nn.Linear(width, width), nn.Tanh()
        )
        self.actor = nn.Linear(width, actions)
        self.critic = nn.Linear(width, 1)
        nn.init.orthogonal_(self.actor.weight, 0.01)
        nn.init.zeros_(self.actor.bias)

    def forward(self, seen: Tensor, mask: Tensor) -> tuple[Categorical, Tensor]:
        """Return the distribution over legal actions and the value."""
        features = self.body(seen)
        logits = self.actor(features).masked_fill(~mask, -1e9)
        return Categorical(logits=logits), self.critic(features).squeeze(-1)


def main() -> None:
    """Play rounds of episodes, and learn from each."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--recipe", default="digits", help="recipe of `esper train`")
    parser.add_argument("--rows", type=int, default=32, help="networks side by side (default: 32)")
    parser.add_argument("--length", type=int, default=30, help="decisions of an episode")
    parser.add_argument("--rounds", type=int, default=24, help="episodes of all rows (default: 24)")
    parser.add_argument("--seed", type=int, default=0, help="seed of everything (default: 0)")
    options = parser.parse_args()
    gamma, lam, clip, epochs, minibatches = 0.999, 0.95, 0.2, 6, 4
    torch.set_num_threads(1)
    torch.manual_seed(options.seed)

    envs = esper.lab.envs.LegalVectorActions(
        gymnasium.make_vec(
            "Esper/Grow-v1",
            num_envs=options.rows,
            recipe=options.recipe,
            settings={"episode_length": options.length, "device": "cpu"},
        ),
        pinned=("tempo", "alpha_target", "alpha_speed", "alpha_curve"),
    )
    inputs = envs.single_observation_space.shape[0]
    agent = Agent(inputs, int(envs.single_action_space.n))
    optimizer = torch.optim.Adam(agent.parameters(), lr=1e-3, eps=1e-5)

    seen, infos = envs.reset(seed=options.seed)
    for number in range(1, options.rounds + 1):
        kept: dict[str, list[Tensor]] = {
            name: [] for name in ("seen", "mask", "action", "log_prob", "value", "reward", "active")
        }
        has_ended = False
        while not has_ended:  # rows end together, see docs/how-to/environments.md
            now = torch.as_tensor(seen)
            mask = torch.as_tensor(infos["action_mask"]).bool()
            with torch.no_grad():
                choice, value = agent(now, mask)
                action = choice.sample()
            active = torch.as_tensor(infos["active"])
            seen, rewards, ends, cuts, infos = envs.step(action.numpy())
            has_ended = bool((ends | cuts).all())
            step = (now, mask, action, choice.log_prob(action), value)
            for name, each in zip(kept, step, strict=False):
                kept[name].append(each)
            kept["reward"].append(torch.as_tensor(rewards, dtype=torch.float32))
            kept["active"].append(active)

        data = {name: torch.stack(each) for name, each in kept.items()}  # [T, rows, ...]
        advantages, carry = torch.zeros_like(data["reward"]), torch.zeros(options.rows)
        following = torch.zeros(options.rows)  # the horizon is an end, so nothing follows it
        for t in reversed(range(len(advantages))):
            delta = data["reward"][t] + gamma * following - data["value"][t]
            carry = delta + gamma * lam * carry
            advantages[t], following = carry, data["value"][t]
        targets = advantages + data["value"]

        # Rows that ended early only waited for the others: nothing is to be learned from that.
        count = int(data["active"].sum())
        flat = {name: each[data["active"]] for name, each in data.items()}
        advantage, target = advantages[data["active"]], targets[data["active"]]
        advantage = (advantage - advantage.mean()) / (advantage.std() + 1e-8)
        for _ in range(epochs):
            for part in torch.randperm(count).chunk(minibatches):
                choice, value = agent(flat["seen"][part], flat["mask"][part])
                ratio = (choice.log_prob(flat["action"][part]) - flat["log_prob"][part]).exp()
                gain = torch.minimum(
                    ratio * advantage[part], ratio.clamp(1 - clip, 1 + clip) * advantage[part]
                ).mean()
                loss = -gain + 0.5 * (value - target[part]).square().mean()
                loss = loss - 0.01 * choice.entropy().mean()
                optimizer.zero_grad()
                loss.backward()
                nn.utils.clip_grad_norm_(agent.parameters(), 0.5)
                optimizer.step()

        final = infos["final_info"]
        gains = np.mean(final["score"] - final["twin_score"])
        returns = data["reward"].sum(0).mean()
        print(f"round {number}: return {returns:.2f}, gain over waiting {gains:+.2f}", flush=True)
    envs.close()


if __name__ == "__main__":
    main()
