"""PPOAgent: turns a round of episodes into a better policy.

One update: advantages from the values of the rollout; reference log-probabilities scored once at
the weights it starts from; then up to K passes over the round, each a few steps on whole rows. What
a pass did to the policy is measured after its steps: on the forward passes of the next one, and
after the last pass on a forward pass of its own. An update stops when the policy has moved too
far, and takes no step on a number that is not finite.
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
"""What a critic that has learned nothing says counts for, in units of a typical return: hardly
anything. Its random outputs would be noise in the first advantages, the larger the smaller the
returns are."""

ADAM_EPS = 1e-5  # What Adam adds to its denominator.
SKIPS_ALLOWED = 3
"""So many updates in a row may meet numbers that are not finite; then training stops."""


class PPOAgent:
    """A policy with what it takes to improve it.

    Args:
        policy: the policy to train; it is moved to the device.
        config: the learner's constants.
        device: where it learns.
        seed: of the run; orders of rows and fresh heads are drawn from it.
    """

    def __init__(
        self, policy: Policy, config: PPOConfig, device: torch.device | str = "cpu", seed: int = 0
    ) -> None:
        """Prepare the optimizer; nothing is learned yet."""
        self.policy, self.config, self.seed = policy, config, seed
        self.device = torch.device(device)
        self.network: Network = policy.to(self.device).network
        self.optimizer = make_optimizer(self.network, config)
        self.value_normalizer = ValueNormalizer(self.device)
        self.updates_done = 0
        """Updates that took at least one step."""
        self.skips_in_a_row = 0
        """Updates up to now that met a number that was not finite."""
        self.resets = 0
        """Times that heads were started afresh."""
        self.norms = GradientNorms(self.optimizer)
        self.good_episodes = GoodEpisodes(device=self.device)
        """The best episodes so far."""
        self.reward_scales = RewardScales()
        """The units that rewards are learned in."""
        self._paid_off: dict[str, float] = {}
        bias = torch.tensor(self.network.config.initial_op_bias, device=self.device)
        is_prior = config.exploration.op_reference == "prior"
        self.op_reference = bias if is_prior else torch.zeros_like(bias)
        """Logits that the op stays close to while it is curious."""
        self._anchor: Policy | None = None

    def start_from(self, other: Policy) -> None:
        """Take over another policy's weights and statistics, and stay near it from now on.

        Raises:
            UsageError: It is another network.
        """
        try:
            self.policy.load_state_dict(other.state_dict())
        except RuntimeError as error:
            raise UsageError(
                "the policy to start from is another network than this run's; give the settings it "
                f"was made with: {reason_of(error)[:200]}"
            ) from error
        self._drop_anchor()

    def anchor_logits(self, batch: RolloutBatch) -> Tensor | None:
        """Return [R, T, 8, K]: what the policy it started from says; None where that is nothing."""
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
        """Remember the policy as it is now."""
        network = copy.deepcopy(self.network).requires_grad_(False)
        normalizer = copy.deepcopy(self.policy.normalizer)
        self._anchor = dataclasses.replace(self.policy, network=network, normalizer=normalizer)
        return self._anchor

    def value_units(self, tasks: Sequence[str]) -> Tensor:
        """Return float32 [R]: what brings the critic's numbers onto the scale of raw rewards."""
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
        """Improve the policy by one round.

        Args:
            buffer: the round; every row has terminated or was truncated.
            progress: share of the training that is done, from 0 to 1.
            paid_off: [R], running share of the episodes of a row's task that pay off, from 0 to 1;
                or one for all.
            round: number of the round, which the order of rows is drawn from.
            tasks: names of the tasks of all rows; one task by default.
            counts: bool [R], episodes whose returns say something of the scale of rewards, as
                those that the governor ended do not; all of them by default.

        Raises:
            NonFiniteError: This was the third update in a row that met a number that is not
                finite.
            UsageError: A row is unfinished, or no step was taken at all.
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
            # What the critic said when it acted was in the units of that time.
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
            passes = Passes(self, batch, targets, progress=progress, paid_off=rates)
            if wrong:
                passes.nonfinite += [NonFinite(0, name) for name in wrong]
            else:
                passes.run(order)
            report = passes.report(old_scale)
        self._count(report)
        report.seconds = time.perf_counter() - started
        return report

    def imitate(self, part: int = 0, parts: int = 1) -> Tensor:
        """Return the loss of doing again what the best episodes did; 0 where there are none.

        Success on a task ends it for the episodes of that task.

        Args:
            part: which part of the kept episodes to look at.
            parts: how many parts there are.
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
        """Start some heads afresh, and forget what the optimizer knew of them.

        Args:
            names: of `HEAD_NAMES`, or 'value' for the critic.

        Raises:
            UsageError: There is no such head.
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
        """Return everything that the next update depends on, as plain data and tensors."""
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
        """Continue from what `state_dict` returned, exactly."""
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
        """Take over what the episodes that count returned."""
        returns = (batch.rewards * batch.valid).sum(1).cpu()
        chosen = torch.ones_like(returns, dtype=torch.bool) if counts is None else counts.cpu()
        names = [
            name for name, is_counted in zip(tasks, chosen.tolist(), strict=True) if is_counted
        ]
        self.reward_scales.update(names, returns[chosen])

    def _rescale_critic(self, factor: Tensor) -> None:
        """Make the critic say the same in units of the reward after its scale has changed."""
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
                f"{self.skips_in_a_row} updates in a row met numbers that are not finite (last: "
                f"{found}); go back to an earlier checkpoint with a lower learning rate"
            )


def _numbers(names: Sequence[str], device: torch.device) -> Tensor:
    """Return int64 [R]: the same number for the same name, from 0."""
    known = {name: number for number, name in enumerate(dict.fromkeys(names))}
    return torch.tensor([known[name] for name in names], device=device)


@contextmanager
def _tensor_cores(device: torch.device) -> Iterator[None]:
    """Allow TF32 in the products of an update on a GPU; on a CPU nothing changes."""
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
# Groups give every head a step size of its own and let a head start afresh; the critic alone has
# weight decay. State is saved by the name of the parameter, so that it means the same whatever the
# order of parameters is.


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
    """Give every group its step size after this share of the training."""
    multipliers = dict(zip(HEAD_NAMES, config.lr_multipliers.by_head(), strict=True))
    for group in optimizer.param_groups:
        group["lr"] = config.learning_rate_at(progress) * multipliers.get(group["name"], 1.0)


class GradientNorms:
    """Measures and shortens gradients, all parts of the network in a few calls."""

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        """Remember which parameters belong to which group."""
        self._parameters: list[nn.Parameter] = []
        owners: list[int] = []
        for index, group in enumerate(optimizer.param_groups):
            self._parameters += group["params"]
            owners += [index] * len(group["params"])
        self._owners = torch.tensor(owners, device=self._parameters[0].device)

    def clip(self, longest: float) -> Tensor:
        """Shorten the whole gradient to a length; return the norms before, float32 [groups + 1].

        The last one is that of the whole. A gradient that is not finite is left as it is.
        """
        gradients = [each.grad for each in self._parameters if each.grad is not None]
        assert len(gradients) == len(self._parameters), "every parameter takes part in the loss"
        squares = torch.stack(torch._foreach_norm(gradients)).square()
        by_group = squares.new_zeros(len(GROUP_NAMES)).index_add_(0, self._owners, squares)
        total = by_group.sum().sqrt()
        torch._foreach_mul_(gradients, (longest / (total + 1e-6)).clamp(max=1.0))
        return torch.cat([by_group.sqrt(), total.unsqueeze(0)])


def optimizer_state(
    network: nn.Module, optimizer: torch.optim.Optimizer
) -> dict[str, dict[str, Tensor]]:
    """Return what the optimizer remembers, by the name of the parameter."""
    return {
        name: {key: value.clone() for key, value in optimizer.state[parameter].items()}
        for name, parameter in network.named_parameters()
        if parameter in optimizer.state
    }


def load_optimizer_state(
    network: nn.Module, optimizer: torch.optim.Optimizer, state: dict[str, dict[str, Tensor]]
) -> None:
    """Make the optimizer remember what `optimizer_state` returned, and nothing else.

    Raises:
        CheckpointError: The state is that of another network.
    """
    parameters = dict(network.named_parameters())
    unknown = [name for name in state if name not in parameters]
    if unknown:
        raise CheckpointError(
            f"the saved optimizer knows {', '.join(unknown)}, which this policy does not have; "
            "resume with the same policy"
        )
    optimizer.state.clear()
    for name, saved in state.items():
        parameter = parameters[name]
        optimizer.state[parameter] = {
            key: value.detach().clone().to(parameter.device) for key, value in saved.items()
        }


def forget(network: nn.Module, optimizer: torch.optim.Optimizer, groups: set[str]) -> None:
    """Clear what the optimizer remembers of some groups."""
    for name, parameter in network.named_parameters():
        if group_of(name) in groups:
            optimizer.state.pop(parameter, None)
