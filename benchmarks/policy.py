"""The policy against sb3-contrib's RecurrentPPO: one step, and one full-batch update, as ratios."""

from __future__ import annotations

import argparse
import json
import sys
import time
import warnings
from collections.abc import Callable
from statistics import median
from typing import Any

from benchmarks.table import print_table

_INSTALL = "pip install -c constraints.txt -e '.[bench]'"


def main(arguments: list[str]) -> int:
    import torch

    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--rows", type=int, default=16, help="environments (default: 16)")
    parser.add_argument("--steps", type=int, default=150, help="steps an episode (default: 150)")
    parser.add_argument("--hidden", type=int, default=512, help="width (default: 512)")
    parser.add_argument("--rounds", type=int, default=9, help="interleaved pairs (default: 9)")
    parser.add_argument("--captured-rows", type=int, default=256, help="rows of the CUDA graph")
    parser.add_argument("--json", action="store_true", help="print one JSON document")
    options = parser.parse_args(arguments)
    torch.set_num_threads(1)
    torch.manual_seed(0)
    try:
        reference = Reference(options)
    except ModuleNotFoundError as error:
        print(f"{error.name} is not installed; install it by {_INSTALL}", file=sys.stderr)
        return 2
    ours = Ours(options)
    result: dict[str, Any] = {
        "device": options.device,
        "rows": options.rows,
        "steps": options.steps,
        "hidden": options.hidden,
        "parameters": {"esper": ours.parameters, "reference": reference.parameters},
    }
    share = reference.parameters / ours.parameters
    assert 0.9 < share < 1.1, f"the reference has {share:.2f} times the parameters"
    finish = torch.cuda.synchronize if options.device == "cuda" else None
    work = {
        "step": (ours.step, reference.step, 40),
        "plain_step": (ours.plain_step, reference.step, 40),
        "update": (ours.update, reference.update, 1),
    }
    for name, (own, theirs, repeats) in work.items():
        result[name] = compare(own, theirs, rounds=options.rounds, repeats=repeats, finish=finish)
    if options.device == "cuda":
        result["captured_step"] = captured(options)
    if options.json:
        print(json.dumps(result, indent=2))
    else:
        show(result)
    return 0


def compare(
    ours: Callable[[], None],
    reference: Callable[[], None],
    *,
    rounds: int,
    repeats: int,
    finish: Callable[[], None] | None,
) -> dict[str, float]:
    """Time both by turns; the ratio is the median of the ratios of neighbours.

    A slow moment of the machine then hits both sides of a pair.
    """

    def timed(work: Callable[[], None]) -> float:
        started = time.perf_counter()
        for _ in range(repeats):
            work()
        if finish is not None:
            finish()
        return (time.perf_counter() - started) / repeats

    for work in (ours, reference):
        timed(work)
    pairs = [(timed(ours), timed(reference)) for _ in range(rounds)]
    ratios = sorted(theirs / own for own, theirs in pairs)
    return {
        "esper_ms": 1e3 * median(own for own, _ in pairs),
        "reference_ms": 1e3 * median(theirs for _, theirs in pairs),
        "ratio": median(ratios),
        "least_ratio": ratios[0],
        "greatest_ratio": ratios[-1],
    }


def show(result: dict[str, Any]) -> None:
    counts = result["parameters"]
    print(
        f"{result['rows']} rows x {result['steps']} steps, hidden {result['hidden']}, "
        f"{result['device']}; parameters {counts['esper']:,} and {counts['reference']:,}\n"
    )
    titles = {
        "step": "policy step",
        "plain_step": "policy step by get_action",
        "update": "forward + backward, whole batch",
    }
    rows = [
        [
            title,
            f"{result[name]['esper_ms']:.3f} ms",
            f"{result[name]['reference_ms']:.3f} ms",
            f"{result[name]['ratio']:.2f}",
            f"{result[name]['least_ratio']:.2f} to {result[name]['greatest_ratio']:.2f}",
        ]
        for name, title in titles.items()
    ]
    print_table(["", "esper", "sb3-contrib", "ratio (median)", "range"], rows)
    if "captured_step" in result:
        graph = result["captured_step"]
        print(
            f"\npolicy step, {graph['rows']} rows: eager {graph['eager_us']:.1f} us, "
            f"CUDA graph {graph['graph_us']:.1f} us ({graph['ratio']:.1f} times faster)"
        )


def random_masks(rows: int, slots: int, draws: Any, device: str) -> Any:
    """Return the masks of random situations on a device."""
    from esper.leyline.masks import Masks
    from esper.testing.signals import random_signals

    masks = random_signals(rows, slots, draws)[1]
    moved = {name: getattr(masks, name).to(device) for name in Masks.__dataclass_fields__}
    return Masks(**moved)


class Ours:
    """The policy of this package, on random observations and random legal situations."""

    def __init__(self, options: argparse.Namespace) -> None:
        import torch

        from esper.tamiyo.networks import FactoredRecurrentActorCriticV2, rollout_step

        rows, steps, device = options.rows, options.steps, options.device
        self.policy = FactoredRecurrentActorCriticV2(lstm_hidden_dim=options.hidden).to(device)
        self.parameters = sum(weight.numel() for weight in self.policy.parameters())
        draws = torch.Generator().manual_seed(0)
        config = self.policy.config
        shape = (rows, steps)
        self.states = torch.randn(*shape, config.observation_dim).to(device)
        self.blueprints = torch.randint(-1, 13, (*shape, config.num_slots)).to(device)
        taken = []
        hidden = self.policy.initial_hidden(rows)
        for at in range(steps):
            masks = random_masks(rows, config.num_slots, draws, device)
            step = self.policy.get_action(
                self.states[:, at], masks, self.blueprints[:, at], hidden=hidden
            )
            hidden = step.hidden
            taken.append(step)
        self.now, self.hidden = masks, hidden
        self.actions = torch.stack([step.actions for step in taken], 1)
        self.masks = torch.stack([step.masks for step in taken], 1)
        self.log_probs = torch.stack([step.log_probs for step in taken], 1)
        self.fast = rollout_step(self.policy, rows)
        self.advantages = torch.randn(shape).to(device)
        self.returns = torch.randn(shape).to(device)

    def step(self) -> None:
        """One step of a rollout: packed on a CPU, captured in a graph on a GPU."""
        self.fast(self.states[:, -1], self.now, self.blueprints[:, -1], hidden=self.hidden)

    def plain_step(self) -> None:
        self.policy.get_action(
            self.states[:, -1], self.now, self.blueprints[:, -1], hidden=self.hidden
        )

    def update(self) -> None:
        self.policy.zero_grad()
        scores = self.policy.score(
            self.states, self.blueprints, self.actions, self.masks, with_baseline=False
        )
        ratio = (scores.log_probs - self.log_probs).sum(-1).exp()
        gain = self.advantages * ratio
        clipped = self.advantages * ratio.clamp(0.8, 1.2)
        policy_loss = -gain.minimum(clipped).mean()
        value_loss = (self.returns - scores.values).square().mean()
        loss = policy_loss + 0.5 * value_loss - 0.01 * scores.entropies.sum(-1).mean()
        loss.backward()


class Reference:
    """RecurrentPPO with a shared LSTM of the same width, the same heads and as many parameters.

    Its features go through the same layer as ours before the LSTM; its one hidden network for all
    heads has two layers, chosen so that the parameters match. The batch is its own buffer's: whole
    episodes as sequences, all in one batch.
    """

    def __init__(self, options: argparse.Namespace) -> None:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            self._build(options)

    def _build(self, options: argparse.Namespace) -> None:
        import gymnasium
        import numpy as np
        import torch
        from gymnasium import spaces
        from sb3_contrib import RecurrentPPO
        from stable_baselines3.common.torch_layers import BaseFeaturesExtractor
        from stable_baselines3.common.vec_env import DummyVecEnv
        from torch import nn

        from esper.leyline.actions import HEAD_SIZES

        inputs, width = 133, options.hidden

        class Features(BaseFeaturesExtractor):
            def __init__(self, space: spaces.Box) -> None:
                super().__init__(space, width)
                self.net = nn.Sequential(nn.Linear(inputs, width), nn.LayerNorm(width), nn.ReLU())

            def forward(self, observations: torch.Tensor) -> torch.Tensor:
                return self.net(observations)

        class Episode(gymnasium.Env[Any, Any]):
            observation_space = spaces.Box(-10, 10, (inputs,), np.float32)
            action_space = spaces.MultiDiscrete(list(HEAD_SIZES.values()))

            def reset(self, *, seed: int | None = None, options: Any = None) -> Any:
                self.at = 0
                return np.zeros(inputs, np.float32), {}

            def step(self, action: Any) -> Any:
                self.at += 1
                observation = np.random.randn(inputs).astype(np.float32)
                return observation, float(np.random.randn()), self.at >= episode, False, {}

        episode = options.steps
        np.random.seed(0)
        environments = DummyVecEnv([Episode] * options.rows)
        model = RecurrentPPO(
            "MlpLstmPolicy",
            environments,
            n_steps=options.steps,
            batch_size=options.rows * options.steps,
            device=options.device,
            policy_kwargs={
                "features_extractor_class": Features,
                "lstm_hidden_size": width,
                "shared_lstm": True,
                "enable_critic_lstm": False,
                "net_arch": {"pi": [2 * width, 700 * width // 512], "vf": [width // 2]},
                "activation_fn": nn.ReLU,
            },
        )
        _, callback = model._setup_learn(options.rows * options.steps)
        callback.on_training_start({}, {})
        model.collect_rollouts(environments, callback, model.rollout_buffer, options.steps)
        self.model, self.policy = model, model.policy
        self.parameters = sum(weight.numel() for weight in self.policy.parameters())
        self.batch = next(iter(model.rollout_buffer.get(options.rows * options.steps)))
        self.observations = torch.randn(options.rows, inputs).to(options.device)
        self.states = model._last_lstm_states
        self.starts = torch.zeros(options.rows).to(options.device)

    def step(self) -> None:
        import torch

        with torch.no_grad():
            self.policy(self.observations, self.states, self.starts)

    def update(self) -> None:
        """The forward and backward of `RecurrentPPO.train`, without its logging."""
        batch = self.batch
        self.policy.optimizer.zero_grad()
        mask = batch.mask > 1e-8
        values, log_prob, entropy = self.policy.evaluate_actions(
            batch.observations, batch.actions, batch.lstm_states, batch.episode_starts
        )
        ratio = (log_prob - batch.old_log_prob).exp()
        gain, clipped = batch.advantages * ratio, batch.advantages * ratio.clamp(0.8, 1.2)
        policy_loss = -gain.minimum(clipped)[mask].mean()
        value_loss = (batch.returns - values.flatten()).square()[mask].mean()
        loss = policy_loss + 0.5 * value_loss - 0.01 * entropy[mask].mean()
        loss.backward()


def captured(options: argparse.Namespace) -> dict[str, float]:
    """Time one step of many rows, eager and replayed from a CUDA graph."""
    import torch

    from esper.tamiyo.networks import CapturedPolicyStep, FactoredRecurrentActorCriticV2

    rows, device = options.captured_rows, options.device
    policy = FactoredRecurrentActorCriticV2(lstm_hidden_dim=options.hidden).to(device)
    config = policy.config
    states = torch.randn(rows, config.observation_dim).to(device)
    blueprints = torch.randint(-1, 13, (rows, config.num_slots)).to(device)
    masks = random_masks(rows, config.num_slots, torch.Generator().manual_seed(0), device)
    legal = policy.table.row_masks(masks, (rows,))
    hidden = policy.initial_hidden(rows)
    graph = CapturedPolicyStep(policy, rows)

    def eager() -> None:
        policy.get_action(states, legal, blueprints, hidden=hidden)

    def replayed() -> None:
        graph(states, legal, blueprints, hidden=hidden)

    times = compare(
        replayed, eager, rounds=options.rounds, repeats=100, finish=torch.cuda.synchronize
    )
    return {
        "rows": rows,
        "eager_us": 1e3 * times["reference_ms"],
        "graph_us": 1e3 * times["esper_ms"],
        "ratio": times["ratio"],
    }
