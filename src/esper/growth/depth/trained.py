"""Signs that blocks which sleep have weights to keep, because copies will replace these weights."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from itertools import groupby

from torch import Tensor, nn
from torch.nn.modules.batchnorm import _NormBase
from torch.optim import Optimizer

from esper.growth.depth.stacks import Stack
from esper.leyline.errors import UsageError, warn


def check_not_frozen(
    network: nn.Module, stacks: Mapping[str, Stack], awake: Mapping[str, int]
) -> None:
    """Refuse to put frozen blocks to sleep.

    Args:
        network: the network.
        stacks: its stacks.
        awake: blocks that stay awake, by stack.
    """
    frozen = {
        name: [one for one in stack.blocks[awake[name] :] if _is_frozen(network.get_submodule(one))]
        for name, stack in stacks.items()
    }
    found = [name for names in frozen.values() for name in names]
    if not found:
        return
    others = [name for name in stacks if not frozen[name]]
    leave_out = f"leave their stack out: stacks={others}" if others else "train without Deepen"
    raise UsageError(
        f"{format_ranges(stacks, found)} would sleep and be replaced by copies, but all their "
        "parameters are frozen; Deepen trains a network from scratch, so unfreeze them by "
        f"requires_grad_(True), or {leave_out}"
    )


def warn_of_trained(
    network: nn.Module,
    stacks: Mapping[str, Stack],
    awake: Mapping[str, int],
    optimizers: Sequence[Optimizer],
) -> None:
    """Warn if blocks sleep that these optimizers have trained, or that look trained.

    Args:
        network: the network.
        stacks: its stacks.
        awake: blocks awake, by stack.
        optimizers: what trains the network.
    """
    asleep = {
        block: network.get_submodule(block)
        for name, stack in stacks.items()
        for block in stack.blocks[awake[name] :]
    }
    replaced = "and copies of other blocks will replace them; to resume a run write"
    if trained := [name for name, one in asleep.items() if has_trained(optimizers, one)]:
        warn(
            f"{format_ranges(stacks, trained)} sleep although the optimizer has trained them, "
            f"{replaced} depth.load_state_dict(...), to deepen a finished network "
            "esper.grow(model, checkpoint=..., deepen=...)"
        )
    elif trained := [name for name, one in asleep.items() if looks_trained(one)]:
        warn(
            f"{format_ranges(stacks, trained)} sleep although they look trained (the weights of "
            f"their norms differ from each other), {replaced} depth.load_state_dict(...), to train "
            "all blocks of a trained network leave Deepen out; if your model is initialised like "
            "this, write warnings.filterwarnings('ignore', '.*look trained')"
        )


def has_trained(optimizers: Sequence[Optimizer], block: nn.Module) -> bool:
    """Return whether optimizers have trained parameters of this block."""
    states = [
        one.state[parameter]
        for one in optimizers
        for parameter in block.parameters()
        if parameter in one.state
    ]
    # Some optimizers make the state of all parameters at once, with a counter of 0.
    return any(state and float(state.get("step", 1)) > 0 for state in states)


def looks_trained(block: nn.Module) -> bool:
    """Return whether a block has a norm whose weights or biases differ from each other.

    Almost all networks start with equal ones: 1, or 0 where the last norm of a block is silent at
    first (ResNets), or where 1 is added (Gemma). The first optimizer step makes them differ.
    Random weights say nothing about training, so a block without norms never looks trained.
    """
    return any(
        _is_uneven(parameter)
        for module in block.modules()
        for parameter in _parameters_of_norm(module)
    )


def format_ranges(stacks: Mapping[str, Stack], chosen: Collection[str]) -> str:
    """Return names of blocks as ranges within their stacks: "s1.1 to s1.3 and s2.1 to s2.3"."""
    return " and ".join(
        " to ".join(dict.fromkeys([names[0], names[-1]])) for names in _ranges(stacks, chosen)
    )


def _ranges(stacks: Mapping[str, Stack], chosen: Collection[str]) -> Iterator[list[str]]:
    for stack in stacks.values():
        for is_chosen, names in groupby(stack.blocks, chosen.__contains__):
            if is_chosen:
                yield list(names)


def _is_frozen(block: nn.Module) -> bool:
    parameters = list(block.parameters())
    return bool(parameters) and not any(one.requires_grad for one in parameters)


def _parameters_of_norm(module: nn.Module) -> Sequence[Tensor]:
    """Return the weight and bias of a norm; none for other modules, or for an unused BatchNorm."""
    own = list(module.parameters(recurse=False))
    # The classes of RMSNorm are as many as the models. All parameters of a norm have one shape.
    if "norm" not in type(module).__name__.lower() or len({one.shape for one in own}) != 1:
        return []
    if isinstance(module, _NormBase) and module.running_mean is not None:
        # DCGAN and others initialise BatchNorm at random, but a trained one has statistics.
        return own if bool(_local(module.running_mean).any()) else []
    return own


def _is_uneven(parameter: Tensor) -> bool:
    values = _local(parameter).flatten()
    return bool((values != values[:1]).any())


def _local(tensor: Tensor) -> Tensor:
    """Return the part of a tensor that this process has, under FSDP."""
    own: Tensor = tensor.to_local() if hasattr(tensor, "to_local") else tensor
    return own.detach()
