"""The named reference: sb3-contrib's `RecurrentPPO`, set up to do the policy's work.

It has one LSTM of the same width shared by actor and critic (`shared_lstm=True,
enable_critic_lstm=False`), a `MultiDiscrete` of our heads, and as many parameters within a tenth.
What it cannot express is left at its best: no masks and no op-conditioned critic, both of which
only cost time. The batch is its own buffer's, all steps of all rows in one; as always there, the
buffer is cut at a random step and padded, so rows of one episode become one more sequence. Its
`update` is the forward and backward pass of `RecurrentPPO.train` without logging.

Its LSTM reads a layer like ours (linear, LayerNorm, ReLU), so that both memories are equal and the
other parameters are in the network of its heads. By sb3's default the LSTM would read the
observation itself, which is faster, because the loop over steps then has less to do.

sb3-contrib is no dependency; it is imported when this is built.
"""

from __future__ import annotations

import math
import warnings
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from esper.bench.policy import PLAIN_STEPS, PlainWork, PolicyWork, Work, ppo_losses
from esper.leyline.actions import HEAD_SIZES
from esper.leyline.errors import UsageError

_INSTALL = "pip install 'esper-grow[bench]'"


def find_reference(ours: PolicyWork) -> tuple[Work, str]:
    """Return what to compare with: the named reference, or without it the policy's plain steps.

    The second is empty, or one line that says what was left out and how to get it.
    """
    try:
        return build_reference(ours), ""
    except ModuleNotFoundError as error:
        return PlainWork(ours), tell_left_out(error)


class Sized(Protocol):
    """Work that says how large it is."""

    rows: int
    steps: int
    hidden: int
    inputs: int
    parameters: int
    device: str


def build_reference(ours: Sized) -> RecurrentPPOWork:
    """Return the named reference at the size of this work.

    Raises:
        ModuleNotFoundError: sb3-contrib is not installed.
        UsageError: The reference would be of another size.
    """
    work = RecurrentPPOWork(
        ours.rows, ours.steps, ours.hidden, inputs=ours.inputs, device=ours.device
    )
    share = work.parameters / ours.parameters
    if not 0.9 < share < 1.1:
        raise UsageError(f"the reference has {share:.2f} times the parameters; that is not fair")
    return work


def tell_left_out(error: ModuleNotFoundError) -> str:
    """Return one line: what was left out because of this, and how to get it."""
    return (
        f"left out: sb3-contrib's RecurrentPPO, because {error.name} is not installed "
        f"({_INSTALL}); compared with {PLAIN_STEPS} of the same network instead"
    )


class RecurrentPPOWork:
    """RecurrentPPO at work on made-up episodes.

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
        """Decide one step of all rows."""
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
        """Run `RecurrentPPO.train` itself: a whole update of this many passes and minibatches."""
        self._model.n_epochs = epochs
        # Rounded up: what is left over would be one more minibatch.
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

    # Chosen so that the parameters match at every width.
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
