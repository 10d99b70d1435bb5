"""The optimizer of the policy: one group of parameters per part of the network.

Groups give every head a step size of its own and let a head start afresh; the critic alone has
weight decay. State is saved by the name of the parameter, so that it means the same whatever the
order of parameters is.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from esper.leyline.actions import HEAD_NAMES
from esper.leyline.errors import CheckpointError
from esper.simic.agent.config import PPOConfig

VALUE = "value"
TRUNK = "trunk"
ADAM_EPS = 1e-5  # What Adam adds to its denominator.
GROUP_NAMES: tuple[str, ...] = (*HEAD_NAMES, VALUE, TRUNK)
"""The eight heads, the critic, and what they all read."""


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


def learning_rate(config: PPOConfig, progress: float) -> float:
    """Return the step size after this share of the training."""
    share = min(max(progress, 0.0), 1.0)
    return config.learning_rate * (1.0 - share * (1.0 - config.learning_rate_end))


def set_learning_rate(optimizer: torch.optim.Optimizer, config: PPOConfig, progress: float) -> None:
    """Give every group its step size after this share of the training."""
    multipliers = dict(zip(HEAD_NAMES, config.lr_multipliers.by_head(), strict=True))
    for group in optimizer.param_groups:
        group["lr"] = learning_rate(config, progress) * multipliers.get(group["name"], 1.0)


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
