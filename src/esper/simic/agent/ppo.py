"""PPOAgent: updates a policy by rounds of episodes.

One update computes advantages from the values of the rollout, scores the reference
log-probabilities once, then makes up to K passes over the round in minibatches of whole rows. The
change of the policy by a pass is measured on the forward passes of the next one, and after the
last pass on a forward pass of its own. An update stops when the KL exceeds its limit, and takes no
step on values that are not finite.
"""

from __future__ import annotations

import copy
import dataclasses
import time
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from esper.leyline.actions import HEAD_NAMES
from esper.leyline.errors import CheckpointError, NonFiniteError, UsageError, reason_of
from esper.simic.agent.config import (
    GROUP_NAMES,
    TRUNK,
    VALUE,
    PPOConfig,
    RewardScales,
    ValueNormalizer,
)
from esper.simic.agent.losses import GoodEpisodes, compute_ppo_loss, not_yet
from esper.simic.agent.objective import make_targets
from esper.simic.agent.passes import Passes
from esper.simic.agent.report import NonFinite, UpdateReport
from esper.simic.agent.rollout_buffer import RolloutBatch, TamiyoRolloutBuffer
from esper.tamiyo.controllers.policy_file import Policy
from esper.tamiyo.networks import Network, make_network
from esper.utils.randomness import generator, seeded

__all__ = ["PPOAgent", "PPOConfig", "compute_ppo_loss"]

FIRST_GUESS = 1e-3
"""Scale of an untrained critic's output, in units of a typical return: nearly 0. Its random output
would otherwise be noise in the first advantages."""

ADAM_EPS = 1e-5
SKIPS_ALLOWED = 3
"""Training stops after this many updates in a row with values that are not finite."""


class PPOAgent:
    """Trains a policy by PPO.

    Args:
        policy: the policy to train; it is moved to the device.
        config: settings of the learner.
        device: where it learns.
        seed: seed of the run; orders of rows and fresh heads are drawn from it.
    """

    def __init__(
        self, policy: Policy, config: PPOConfig, device: torch.device | str = "cpu", seed: int = 0
    ) -> None:
        """Build the optimizer and the normalisers."""
        self.policy, self.config, self.seed = policy, config, seed
        self.device = torch.device(device)
        self.network: Network = policy.to(self.device).network
        self.optimizer = make_optimizer(self.network, config)
        self.value_normalizer = ValueNormalizer(self.device)
        self.updates_done = 0
        """Updates that took at least one step."""
        self.skips_in_a_row = 0
        """Updates in a row, up to now, with values that are not finite."""
        self.resets = 0
        """Number of calls of `reset_heads`."""
        self.good_episodes = GoodEpisodes(device=self.device)
        """The best episodes so far."""
        self.reward_scales = RewardScales()
        """Divisors of rewards, by task."""
        self._paid_off: dict[str, float] = {}
        bias = torch.tensor(self.network.config.initial_op_bias, device=self.device)
        is_prior = config.exploration.op_reference == "prior"
        self.op_reference = bias if is_prior else torch.zeros_like(bias)
        """Logits that the op stays close to while it explores."""
        self._anchor: Policy | None = None

    def start_from(self, other: Policy) -> None:
        """Copy another policy's weights and statistics, and keep it as the anchor.

        Raises:
            UsageError: The networks differ.
        """
        try:
            self.policy.load_state_dict(other.state_dict())
        except RuntimeError as error:
            raise UsageError(
                "the policy to start from has another network than this run; use the policy "
                f"settings it was trained with: {reason_of(error)[:200]}"
            ) from error
        self._drop_anchor()

    def anchor_logits(self, batch: RolloutBatch) -> Tensor | None:
        """Return [R, T, 8, K]: logits of the policy it started from; None if it is not used."""
        anchor = self._anchor
        if anchor is None or not self.config.anchor_kl:
            return None
        with torch.no_grad():
            states = anchor.normalizer.normalize(batch.raw_states)
            scores = anchor.network.score(
                states, batch.blueprint_indices, batch.actions, batch.masks, with_baseline=False
            )
        return scores.logits

    def _drop_anchor(self) -> Policy:
        """Keep a copy of the current policy as the anchor."""
        network = copy.deepcopy(self.network).requires_grad_(False)
        normalizer = copy.deepcopy(self.policy.normalizer)
        self._anchor = dataclasses.replace(self.policy, network=network, normalizer=normalizer)
        return self._anchor

    def value_units(self, tasks: Sequence[str]) -> Tensor:
        """Return float32 [R]: factors from the critic's output to raw rewards."""
        return self.value_normalizer.scale * self.reward_scales.units(tasks, self.device)

    def update(
        self,
        buffer: TamiyoRolloutBuffer,
        *,
        progress: float,
        paid_off: Tensor | float,
        round: int,
        tasks: Sequence[str] | None = None,
        counts: Tensor | None = None,
    ) -> UpdateReport:
        """Update the policy by one round.

        Args:
            buffer: the round; every row has terminated or was truncated.
            progress: share of the training that is done, from 0 to 1.
            paid_off: [R], running share of the episodes of a row's task that pay off, from 0 to 1;
                or one for all.
            round: number of the round, which the order of rows is drawn from.
            tasks: names of the tasks of all rows; one task by default.
            counts: bool [R], episodes whose returns count for the scale of rewards, all but those
                that the governor ended; by default all of them.

        Raises:
            NonFiniteError: This was the third update in a row with values that are not finite.
            UsageError: A row is unfinished, or the buffer has no step.
        """
        started = time.perf_counter()
        batch = buffer.batch()
        if not bool(batch.valid.any()):
            raise UsageError("the buffer holds no step to learn from; collect a round first")
        with torch.no_grad():
            names = [""] * batch.rows if tasks is None else list(tasks)
            rates = torch.as_tensor(paid_off, device=self.device).float().expand(batch.rows)
            self._paid_off |= dict(zip(names, rates.tolist(), strict=True))
            was = self.reward_scales.common if self.reward_scales.is_known else None
            self._learn_units(batch, names, counts)
            units = self.reward_scales.units(names, self.device)
            # The critic's output of the rollout is in the units of that time.
            now = self.reward_scales.common
            old_scale = self.value_normalizer.scale * (FIRST_GUESS if was is None else was / now)
            targets = make_targets(
                buffer,
                self.config,
                scale=old_scale,
                progress=progress,
                paid_off=rates,
                units=units,
                groups=_numbers(names, self.device),
            )
            wrong = targets.nonfinite()
            if not wrong:
                self.value_normalizer.update(targets.value_targets[batch.valid] * old_scale)
                new_scale = self.value_normalizer.scale
                self._rescale_critic(old_scale / new_scale)
                targets = targets.rescaled(old_scale / new_scale)
        if self.config.imitation.weight > 0 and not wrong:
            self.good_episodes.keep(batch, names, self.reward_scales)
        set_learning_rate(self.optimizer, self.config, progress)
        order = generator(self.seed, "minibatches", round)
        with _tensor_cores(self.device):
            passes = Passes(
                self.policy,
                self.optimizer,
                self.config,
                batch,
                targets,
                progress=progress,
                paid_off=rates,
                op_reference=self.op_reference,
                anchor=self.anchor_logits(batch),
                imitate=self.imitate,
            )
            if wrong:
                passes.nonfinite += [NonFinite(0, name) for name in wrong]
            else:
                passes.run(order)
            report = passes.report(old_scale)
        self._count(report)
        report.seconds = time.perf_counter() - started
        return report

    def imitate(self, part: int = 0, parts: int = 1) -> Tensor:
        """Return the loss of imitating the best episodes; 0 without any.

        The weight of a task's episodes falls to 0 as episodes of that task pay off.

        Args:
            part: which part of the kept episodes is used.
            parts: number of parts.
        """
        names = self.good_episodes.tasks
        paid_off = torch.tensor([self._paid_off[name] for name in names])
        weights = self.config.imitation.weight * not_yet(paid_off)
        if not bool((weights > 0).any()):
            return torch.zeros((), device=self.device)
        return self.good_episodes.loss(
            self.policy,
            gamma=self.config.gamma,
            weights=weights.to(self.device),
            scales=self.reward_scales,
            value_scale=self.value_normalizer.scale,
            part=part,
            parts=parts,
        )

    def reset_heads(self, names: Iterable[str]) -> None:
        """Initialise some heads anew, and clear their optimizer state.

        Args:
            names: of `HEAD_NAMES`, or 'value' for the critic.

        Raises:
            UsageError: A head does not exist.
        """
        chosen = list(dict.fromkeys(names))
        known = (*HEAD_NAMES, VALUE)
        unknown = [name for name in chosen if name not in known]
        if unknown:
            raise UsageError(
                f"there is no head {', '.join(map(repr, unknown))}; known: {', '.join(known)}"
            )
        for name in chosen:
            with seeded(self.seed, "fresh head", name, self.resets):
                fresh = make_network(self.network.config, self.policy.blueprint_kinds)
            start = fresh.state_dict()
            own = {each: start[each] for each in start if group_of(each) == name}
            self.network.load_state_dict(own, strict=False)
        forget(self.network, self.optimizer, set(chosen))
        self.resets += 1

    def state_dict(self) -> dict[str, Any]:
        """Return the whole state as plain data and tensors."""
        return {
            **self.policy.state_dict(),
            "optimizer": optimizer_state(self.network, self.optimizer),
            "value_normalizer": self.value_normalizer.state_dict(),
            "updates_done": self.updates_done,
            "skips_in_a_row": self.skips_in_a_row,
            "resets": self.resets,
            "good_episodes": self.good_episodes.state_dict(),
            "paid_off": dict(self._paid_off),
            "reward_scales": self.reward_scales.state_dict(),
            "anchor": None if self._anchor is None else self._anchor.state_dict(),
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue exactly from what `state_dict` returned."""
        self.policy.load_state_dict(state)
        load_optimizer_state(self.network, self.optimizer, state["optimizer"])
        self.value_normalizer.load_state_dict(state["value_normalizer"])
        self.updates_done = int(state["updates_done"])
        self.skips_in_a_row = int(state["skips_in_a_row"])
        self.resets = int(state["resets"])
        self.good_episodes.load_state_dict(state["good_episodes"])
        self._paid_off = dict(state["paid_off"])
        self.reward_scales.load_state_dict(state["reward_scales"])
        if state["anchor"] is not None:
            self._drop_anchor().load_state_dict(state["anchor"])

    def _learn_units(
        self, batch: RolloutBatch, tasks: Sequence[str], counts: Tensor | None
    ) -> None:
        """Update the scales of rewards by the returns of episodes that count."""
        returns = (batch.rewards * batch.valid).sum(1).cpu()
        chosen = torch.ones_like(returns, dtype=torch.bool) if counts is None else counts.cpu()
        names = [
            name for name, is_counted in zip(tasks, chosen.tolist(), strict=True) if is_counted
        ]
        self.reward_scales.update(names, returns[chosen])

    def _rescale_critic(self, factor: Tensor) -> None:
        """Rescale the critic's last layer, so that its values stay the same in raw rewards."""
        last = self.network.value_head[-1]
        assert isinstance(last, nn.Linear), "the critic ends with a linear layer"
        last.weight.mul_(factor)
        last.bias.mul_(factor)

    def _count(self, report: UpdateReport) -> None:
        self.updates_done += report.steps > 0
        if not report.nonfinite:
            self.skips_in_a_row = 0
            return
        self.skips_in_a_row += 1
        if self.skips_in_a_row >= SKIPS_ALLOWED:
            found = "; ".join(map(str, report.nonfinite))
            raise NonFiniteError(
                f"{self.skips_in_a_row} updates in a row had values that are not finite (last: "
                f"{found}); resume an earlier checkpoint with a lower ppo.learning_rate"
            )


def _numbers(names: Sequence[str], device: torch.device) -> Tensor:
    """Return int64 [R]: the index of every name among the distinct ones."""
    known = {name: number for number, name in enumerate(dict.fromkeys(names))}
    return torch.tensor([known[name] for name in names], device=device)


@contextmanager
def _tensor_cores(device: torch.device) -> Iterator[None]:
    """Allow TF32 matrix products on a GPU; on a CPU nothing changes."""
    if device.type != "cuda":
        yield
        return
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("high")
    try:
        yield
    finally:
        torch.set_float32_matmul_precision(before)


# ---- The optimizer: one group of parameters per part of the network
#
# Groups give every head its own learning rate and allow a head to be reset; only the critic has
# weight decay. State is saved by parameter name, so that the order of parameters does not matter.


def group_of(parameter_name: str) -> str:
    """Return the group of a parameter by its name in the network."""
    module = parameter_name.split(".", 1)[0]
    if module == "op_encoder":
        return VALUE
    name = module.removesuffix("_head")
    return name if module.endswith("_head") and name in GROUP_NAMES else TRUNK


def make_optimizer(network: nn.Module, config: PPOConfig) -> torch.optim.Adam | torch.optim.AdamW:
    """Return Adam over all groups; AdamW where the critic's weights decay."""
    groups: list[dict[str, Any]] = [
        {
            "name": name,
            "params": [
                parameter for own, parameter in network.named_parameters() if group_of(own) == name
            ],
            "weight_decay": config.weight_decay if name == VALUE else 0.0,
        }
        for name in GROUP_NAMES
    ]
    kind = torch.optim.AdamW if config.weight_decay > 0 else torch.optim.Adam
    optimizer = kind(groups, lr=config.learning_rate, eps=ADAM_EPS, fused=True)
    set_learning_rate(optimizer, config, progress=0.0)
    return optimizer


def set_learning_rate(optimizer: torch.optim.Optimizer, config: PPOConfig, progress: float) -> None:
    """Set the learning rate of every group after this share of the training."""
    multipliers = dict(zip(HEAD_NAMES, config.lr_multipliers.by_head(), strict=True))
    for group in optimizer.param_groups:
        group["lr"] = config.learning_rate_at(progress) * multipliers.get(group["name"], 1.0)


def optimizer_state(
    network: nn.Module, optimizer: torch.optim.Optimizer
) -> dict[str, dict[str, Tensor]]:
    """Return the optimizer's state by parameter name."""
    return {
        name: {key: value.clone() for key, value in optimizer.state[parameter].items()}
        for name, parameter in network.named_parameters()
        if parameter in optimizer.state
    }


def load_optimizer_state(
    network: nn.Module, optimizer: torch.optim.Optimizer, state: dict[str, dict[str, Tensor]]
) -> None:
    """Replace the optimizer's state by what `optimizer_state` returned.

    Raises:
        CheckpointError: The state belongs to another network.
    """
    parameters = dict(network.named_parameters())
    unknown = [name for name in state if name not in parameters]
    if unknown:
        raise CheckpointError(
            f"the saved optimizer has state of {', '.join(unknown)}, which this policy does not "
            "have; resume with the same policy settings"
        )
    optimizer.state.clear()
    for name, saved in state.items():
        parameter = parameters[name]
        optimizer.state[parameter] = {
            key: value.detach().clone().to(parameter.device) for key, value in saved.items()
        }


def forget(network: nn.Module, optimizer: torch.optim.Optimizer, groups: set[str]) -> None:
    """Clear the optimizer's state of some groups."""
    for name, parameter in network.named_parameters():
        if group_of(name) in groups:
            optimizer.state.pop(parameter, None)
