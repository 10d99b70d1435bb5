"""Speed of a whole PPO update, against a reference in the same run.

The time includes advantages, reference log-probabilities, all passes with their steps, and all
diagnostics. The KL limit, which would end an update early, and imitation are off, as the reference
has neither. The reference (`find_update_reference`) is sb3-contrib's `RecurrentPPO.train`, or the
same update with its episodes scored step by step.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from esper.lab.bench import Comparison, compare
from esper.lab.bench.learning import (
    PLAIN_STEPS,
    PlainWork,
    PolicyWork,
    Situation,
    Work,
    ppo_losses,
    score_by_steps,
)
from esper.leyline.actions import HEAD_SIZES
from esper.leyline.errors import UsageError
from esper.leyline.slots import SlotConfig
from esper.simic.agent.config import ImitationConfig
from esper.simic.agent.ppo import PPOAgent, PPOConfig
from esper.simic.agent.rollout_buffer import TamiyoRolloutBuffer
from esper.tamiyo.controllers.policy_file import new_policy
from esper.tamiyo.networks.config import PolicyConfig
from esper.tamiyo.networks.decision import NUM_HEADS, Scores
from esper.tamiyo.networks.factored_lstm import FactoredRecurrentActorCriticV2
from esper.tamiyo.policy.action_masks import available_heads
from esper.tamiyo.policy.features import batch_obs_to_features

# ---- The reference: sb3-contrib's `RecurrentPPO` at the same size


_INSTALL = "pip install 'esper-grow[bench]'"


def find_reference(ours: PolicyWork) -> tuple[Work, str]:
    """Return the reference: sb3-contrib, or the policy's plain steps if it is not installed.

    The second value is a line on what was left out and how to install it, or empty.
    """
    try:
        return build_reference(ours), ""
    except ModuleNotFoundError as error:
        return PlainWork(ours), tell_left_out(error)


class Sized(Protocol):
    """Work with known sizes."""

    rows: int
    steps: int
    hidden: int
    inputs: int
    parameters: int
    device: str


def build_reference(ours: Sized) -> RecurrentPPOWork:
    """Return `RecurrentPPO` at the size of this work.

    Raises:
        ModuleNotFoundError: sb3-contrib is not installed.
        UsageError: The reference would have a different size.
    """
    work = RecurrentPPOWork(
        ours.rows, ours.steps, ours.hidden, inputs=ours.inputs, device=ours.device
    )
    share = work.parameters / ours.parameters
    if not 0.9 < share < 1.1:
        raise UsageError(
            f"the reference has {share:.2f} times the parameters, outside 0.9 to 1.1; use another "
            "width"
        )
    return work


def tell_left_out(error: ModuleNotFoundError) -> str:
    """Return a line on what was left out, and how to install it."""
    return (
        f"left out: sb3-contrib's RecurrentPPO, because {error.name} is not installed "
        f"({_INSTALL}); compared with {PLAIN_STEPS} of the same network instead"
    )


class RecurrentPPOWork:
    """RecurrentPPO on random episodes.

    Args:
        rows: environments.
        steps: steps of every episode.
        hidden: width of the LSTM.
        inputs: numbers it reads at every step.
        device: where it runs.

    Raises:
        ModuleNotFoundError: sb3-contrib is not installed.
    """

    name = "sb3-contrib RecurrentPPO"

    def __init__(
        self,
        rows: int,
        steps: int,
        hidden: int,
        *,
        inputs: int = 133,
        device: str = "cpu",
    ) -> None:
        """Build the model and collect one buffer."""
        if rows * steps < 2:
            raise UsageError("RecurrentPPO needs at least 2 steps in its buffer")
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            model, environments = _build(rows, steps, hidden, inputs, device)
            _, callback = model._setup_learn(rows * steps)
            callback.on_training_start({}, {})
            model.collect_rollouts(environments, callback, model.rollout_buffer, steps)
        self._model, self._policy = model, model.policy
        self._size = rows * steps
        self.parameters = sum(weight.numel() for weight in model.policy.parameters())
        self._batch = next(iter(model.rollout_buffer.get(rows * steps)))
        self._observations = torch.randn(rows, inputs).to(device)
        self._memory = model._last_lstm_states
        self._starts = torch.zeros(rows).to(device)

    def step(self) -> None:
        """Choose the actions of all rows at one step."""
        with torch.no_grad():
            self._policy(self._observations, self._memory, self._starts)

    def update(self) -> None:
        """Run the forward and backward pass of one update over the whole batch."""
        batch = self._batch
        self._policy.optimizer.zero_grad()
        mask = batch.mask > 1e-8
        values, log_prob, entropy = self._policy.evaluate_actions(
            batch.observations, batch.actions, batch.lstm_states, batch.episode_starts
        )
        ratio = (log_prob - batch.old_log_prob).exp()
        errors = batch.returns - values.flatten()
        ppo_losses(ratio, batch.advantages, errors, entropy)[mask].mean().backward()

    def train(self, epochs: int, minibatches: int) -> None:
        """Run `RecurrentPPO.train`: an update of this many passes and minibatches."""
        self._model.n_epochs = epochs
        # Rounded up, as a remainder would be one more minibatch.
        self._model.batch_size = math.ceil(self._size / minibatches)
        self._model.train()


def _build(rows: int, steps: int, hidden: int, inputs: int, device: str) -> tuple[Any, Any]:
    """Return the model and its environments."""
    import gymnasium
    import numpy as np
    from gymnasium import spaces
    from sb3_contrib import RecurrentPPO
    from stable_baselines3.common.torch_layers import BaseFeaturesExtractor
    from stable_baselines3.common.vec_env import DummyVecEnv

    class Features(BaseFeaturesExtractor):  # type: ignore[misc]
        def __init__(self, space: Any) -> None:
            super().__init__(space, hidden)
            self.net = nn.Sequential(nn.Linear(inputs, hidden), nn.LayerNorm(hidden), nn.ReLU())

        def forward(self, observations: Tensor) -> Tensor:
            result: Tensor = self.net(observations)
            return result

    class Episode(gymnasium.Env):  # type: ignore[misc]
        observation_space = spaces.Box(-10, 10, (inputs,), np.float32)
        action_space = spaces.MultiDiscrete(list(HEAD_SIZES.values()))
        draws = np.random.default_rng(0)

        def reset(self, *, seed: int | None = None, options: Any = None) -> Any:
            self.at = 0
            return np.zeros(inputs, np.float32), {}

        def step(self, action: Any) -> Any:
            self.at += 1
            observation = self.draws.standard_normal(inputs, np.float32)
            return observation, float(self.draws.standard_normal()), self.at >= steps, False, {}

    # Chosen so that the number of parameters matches at every width.
    actor = [2 * hidden, 700 * hidden // 512]
    environments = DummyVecEnv([Episode] * rows)
    model = RecurrentPPO(
        "MlpLstmPolicy",
        environments,
        n_steps=steps,
        batch_size=rows * steps,
        device=device,
        policy_kwargs={
            "features_extractor_class": Features,
            "lstm_hidden_size": hidden,
            "shared_lstm": True,
            "enable_critic_lstm": False,
            "net_arch": {"pi": actor, "vf": [hidden // 2]},
            "activation_fn": nn.ReLU,
        },
    )
    return model, environments


class UpdateWork:
    """An agent and a round of recorded episodes; rewards are noise.

    Args:
        situations: signals and masks of the rows, one entry per step.
        hidden: width of the network.
        epochs: passes of an update.
        minibatches: minibatches of a pass, at most as many as rows.
        device: where it learns.
    """

    def __init__(
        self,
        situations: Sequence[Situation],
        hidden: int,
        *,
        epochs: int,
        minibatches: int,
        device: str = "cpu",
    ) -> None:
        """Act through the episodes once to fill the buffer."""
        signals = situations[0][0]
        rows, steps, slots = signals.rows, len(situations), signals.num_slots
        if minibatches > rows:
            raise UsageError(f"{minibatches} minibatches need as many rows, got {rows}")
        self.rows, self.steps, self.hidden, self.device = rows, steps, hidden, device
        self.epochs, self.minibatches = epochs, minibatches
        policy = new_policy(PolicyConfig(num_slots=slots, lstm_hidden_dim=hidden))
        config = PPOConfig(
            epochs=epochs,
            minibatches=minibatches,
            target_kl=0.0,
            imitation=ImitationConfig(weight=0.0),
        )
        self.agent = PPOAgent(policy, config, device)
        self.inputs = policy.network.config.input_dim
        self.parameters = sum(weight.numel() for weight in policy.network.parameters())
        self.buffer = TamiyoRolloutBuffer(rows, steps, policy.network.config, device)
        self._collect(situations, SlotConfig.of(slots))

    def update(self) -> None:
        """Run one whole update."""
        self.learn(self.agent)

    def learn(self, agent: PPOAgent) -> None:
        """Run one whole update of this agent on the round."""
        agent.update(self.buffer, progress=0.5, paid_off=0.5, round=0)

    def plain_agent(self) -> PPOAgent:
        """Return an agent with the same weights that scores step by step."""
        network = _PlainNetwork.from_config(self.agent.network.config)
        network.load_state_dict(self.agent.network.state_dict())
        policy = replace(self.agent.policy, network=network)
        return PPOAgent(policy, self.agent.config, self.device)

    def _collect(self, situations: Sequence[Situation], slots: SlotConfig) -> None:
        policy, device = self.agent.policy, self.device
        hidden = policy.network.initial_hidden(self.rows)
        nobody = torch.zeros(self.rows, dtype=torch.bool, device=device)
        waiting = torch.zeros(self.rows, NUM_HEADS, dtype=torch.int64, device=device)
        for at, (signals, legal) in enumerate(situations):
            raw, blueprints = batch_obs_to_features(signals, slots, device)
            masks = legal.to(device)
            state = policy.normalizer.normalize(raw)
            step = policy.network.get_action(state, masks, blueprints, hidden=hidden)
            self.buffer.add_decision(
                raw_state=raw,
                state=state,
                blueprint_indices=blueprints,
                hidden=hidden,
                step=step,
                base_masks=policy.network.table.head_masks(masks, waiting),
                available=available_heads(masks),
                free=masks.op.sum(-1) > 1,
                active=~nobody,
            )
            self.buffer.add_outcome(
                reward=torch.randn(self.rows).to(device),
                effective_op=step.op,
                terminated=~nobody if at == self.steps - 1 else nobody,
                truncated=nobody,
            )
            hidden = step.hidden


class _PlainNetwork(FactoredRecurrentActorCriticV2):
    """The same network, with episodes scored step by step."""

    def score(self, *inputs: Any, with_baseline: bool = False, **others: Any) -> Scores:
        """Score whole episodes from an initial state, as an update does."""
        if with_baseline or others:
            raise UsageError("plain steps take no baseline and no other arguments")
        return score_by_steps(super().score, *inputs)


@dataclass(frozen=True, slots=True)
class UpdateReference:
    """The reference of an update."""

    name: str
    parameters: int
    update: Callable[[], None]


def find_update_reference(ours: UpdateWork) -> tuple[UpdateReference, str]:
    """Return `RecurrentPPO.train`, or without sb3-contrib the same update by plain steps.

    Both make the same number of passes and minibatches over as many steps. The second value is a
    line on what was left out and how to install it, or empty.

    Raises:
        UsageError: The reference has a different size.
    """
    try:
        work = build_reference(ours)
    except ModuleNotFoundError as error:
        learn = partial(ours.learn, ours.plain_agent())
        return UpdateReference(PLAIN_STEPS, ours.parameters, learn), tell_left_out(error)
    train = partial(work.train, ours.epochs, ours.minibatches)
    return UpdateReference(work.name, work.parameters, train), ""


def compare_updates(ours: UpdateWork, reference: UpdateReference, *, rounds: int) -> Comparison:
    """Compare an update with that of the reference."""
    return compare(
        "update",
        ours.update,
        reference.update,
        against=reference.name,
        rounds=rounds,
        device=ours.device,
    )
