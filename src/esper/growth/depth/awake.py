"""Counts and wakes the blocks of stacks, and makes the smaller network of those awake."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from itertools import compress
from typing import Any
from warnings import catch_warnings, simplefilter

from torch import nn
from torch.optim import Optimizer

from esper.growth.depth.blocks import (
    Order,
    Processes,
    Sleeper,
    copy_block,
    copy_optimizer_state,
    plan_copies,
)
from esper.growth.depth.rules import Decision
from esper.growth.depth.saving import OnSave, SaveWatch
from esper.growth.depth.stacks import Stack
from esper.kasmina.flops import HOW_TO_COUNT, PASSES_OF_TRAINING, forward_flops
from esper.leyline.errors import UsageError, unknown_name, warn
from esper.utils.process import grouped

Stacks = Mapping[str, Stack]


_START = 0.25
"""Default share of the blocks that are awake at first."""


def default_start(stacks: Stacks) -> dict[str, int]:
    """Return the blocks of every stack that are awake at first, rounded up to whole periods."""
    return {
        name: stack.period * math.ceil(_START * len(stack.blocks) / stack.period)
        for name, stack in stacks.items()
    }


def double(stacks: Stacks, awake: Mapping[str, int]) -> dict[str, int]:
    """Return twice the blocks awake, by stack, but no more than there are."""
    return {name: min(len(stack.blocks), 2 * awake[name]) for name, stack in stacks.items()}


def fill_in(stacks: Stacks, decision: Decision, awake: Mapping[str, int]) -> dict[str, int]:
    """Return the blocks that a decision wants awake, by stack."""
    blocks = {name: len(stack.blocks) for name, stack in stacks.items()}
    assert decision is not None
    if isinstance(decision, Mapping):
        for name in decision:
            if name not in blocks:
                raise unknown_name("stack", name, blocks)
        return {**blocks, **awake, **decision}
    if decision > max(blocks.values()):
        raise UsageError(
            f"{decision} blocks cannot be awake; there are only {format_blocks(blocks)}"
        )
    return {name: min(decision, count) for name, count in blocks.items()}


def resolve(stacks: Stacks, decision: Decision, awake: Mapping[str, int]) -> dict[str, int]:
    """Return the blocks to be awake by stack; refuse numbers that are not possible."""
    wanted = fill_in(stacks, decision, awake)
    for name, count in wanted.items():
        period, most = stacks[name].period, len(stacks[name].blocks)
        if not max(1, awake.get(name, 1)) <= count <= most:
            raise UsageError(
                f"{count} blocks of {name} cannot be awake, only {awake.get(name, 1)} to {most}; "
                "blocks that are awake stay awake"
            )
        if count % period and count != most:
            raise UsageError(
                f"{count} blocks of {name} cannot be awake, because {period} kinds of blocks "
                f"alternate; give a multiple of {period}, or all {most}"
            )
    return wanted


def format_blocks(blocks: Mapping[str, int]) -> str:
    """Return numbers of blocks as text."""
    return ", ".join(f"{count} in {name}" for name, count in blocks.items())


class SleepingStacks:
    """The stacks of a network and of its averaged copies, with some of their blocks asleep.

    Args:
        networks: the network, then its averaged copies.
        stacks: the stacks to deepen.
        processes: keeps `DistributedDataParallel` informed of sleeping blocks.
        saves: told when weights of sleeping blocks are saved.
    """

    def __init__(
        self,
        networks: Sequence[nn.Module],
        stacks: Stacks,
        processes: Processes,
        saves: SaveWatch,
    ) -> None:
        """Leave all blocks awake."""
        self._stacks = stacks
        self._processes = processes
        on_save = OnSave(saves)
        self._sleepers = {
            name: [
                [Sleeper(_block(network, block), stack.output, on_save) for block in stack.blocks]
                for network in networks
            ]
            for name, stack in stacks.items()
        }
        # Counted now, because under DDP parameters of sleeping blocks require no gradient.
        self._size = _trainable(networks[0])
        self._sizes = {
            name: [_trainable(sleeper.block) for sleeper in own]
            for name, (own, *_) in self._sleepers.items()
        }

    def count_parameters(self, awake: Mapping[str, int]) -> int:
        """Return the trainable parameters of the network with these blocks awake."""
        asleep = (sizes[awake[name] :] for name, sizes in self._sizes.items())
        return self._size - sum(map(sum, asleep))

    def excess(self, limit: int, awake: Mapping[str, int]) -> str:
        """Return how these blocks awake exceed a limit of parameters (0: none); else ''."""
        parameters = self.count_parameters(awake)
        if not limit or parameters <= limit:
            return ""
        return (
            f"with {format_blocks(awake)} awake the network would have {parameters:,} parameters, "
            f"more than max_parameters={limit:,}"
        )

    def set_awake(self, awake: Mapping[str, int]) -> None:
        """Wake the first blocks of every stack, and put the others to sleep."""
        self._rouse(awake)
        self._processes.follow(
            [
                sleeper.block
                for name, (own, *_) in self._sleepers.items()
                for sleeper in own[awake[name] :]
            ]
        )

    @contextmanager
    def all_awake(self, awake: Mapping[str, int]) -> Iterator[None]:
        """Wake all blocks within the `with` block; afterwards only these are awake."""
        self._rouse({name: len(stack.blocks) for name, stack in self._stacks.items()})
        try:
            yield
        finally:
            self._rouse(awake)

    def copy(
        self,
        awake: Mapping[str, int],
        wanted: Mapping[str, int],
        order: Order,
        optimizers: Sequence[Optimizer],
    ) -> None:
        """Copy blocks awake, with their optimizer state, to the blocks that will wake."""
        for name, stack in self._stacks.items():
            for target, source in plan_copies(awake[name], wanted[name], order, stack.period):
                for sleepers in self._sleepers[name]:
                    copy_block(sleepers[source].block, sleepers[target].block)
                own = self._sleepers[name][0]
                copy_optimizer_state(own[source].block, own[target].block, optimizers)

    def _rouse(self, awake: Mapping[str, int]) -> None:
        for name, networks in self._sleepers.items():
            for sleepers in networks:
                for index, sleeper in enumerate(sleepers):
                    sleeper.set_awake(index < awake[name])


def _block(network: nn.Module, name: str) -> nn.Module:
    try:
        return network.get_submodule(name)
    except AttributeError:
        raise UsageError(
            f"{type(network).__name__} has no block {name}; give ema= copies of the model"
        ) from None


def _trainable(module: nn.Module) -> int:
    return sum(p.numel() for p in module.parameters() if p.requires_grad)


# ---- Training FLOPs of a network with some of its blocks asleep


@dataclass(frozen=True, slots=True)
class Costs:
    """Training FLOPs of one batch."""

    base: int
    """FLOPs of everything but the blocks of stacks."""
    block: Mapping[str, float]
    """Mean FLOPs of one block, by stack."""

    def per_batch(self, awake: Mapping[str, int]) -> float:
        """Return the FLOPs of a batch with these blocks awake; sleeping ones cost nothing."""
        return self.base + sum(self.block[name] * count for name, count in awake.items())


class Compute:
    """Training FLOPs of a run while blocks wake.

    Args:
        batches_per_step: batches of all processes in an optimizer step.
    """

    def __init__(self, batches_per_step: int) -> None:
        """Start at 0, with costs yet to be counted."""
        self.costs: Costs | None = None
        self._batches_per_step = batches_per_step
        self._spent, self._since = 0.0, 0

    def per_step(self, awake: Mapping[str, int]) -> float:
        """Return the FLOPs of a step with these blocks awake."""
        if self.costs is None:
            raise UsageError(
                "FLOPs are counted on the first training batch; write Deepen(..., example=batch) "
                "to count them now"
            )
        return self._batches_per_step * self.costs.per_batch(awake)

    def after(self, step: int, awake: Mapping[str, int]) -> float:
        """Return the FLOPs spent by a step, with these blocks awake since the last change."""
        return self._spent + (step - self._since) * self.per_step(awake)

    def change(self, step: int, awake: Mapping[str, int]) -> float:
        """Note that other blocks than these are awake after a step; return the FLOPs spent."""
        self._spent, self._since = self.after(step, awake), step
        return self._spent

    def state_dict(self) -> dict[str, Any]:
        """Return plain data."""
        costs = self.costs and {"base": self.costs.base, "block": dict(self.costs.block)}
        return {"since": self._since, "spent": self._spent, "costs": costs}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore what `state_dict` returned, among other keys."""
        self._since, self._spent = state["since"], state["spent"]
        if state["costs"] is not None:
            self.costs = Costs(state["costs"]["base"], dict(state["costs"]["block"]))


def count_costs(
    module: nn.Module,
    path: str,
    stacks: Mapping[str, Stack],
    args: tuple[Any, ...],
    kwargs: Mapping[str, Any],
) -> Costs:
    """Count the FLOPs of one batch with all blocks awake.

    Args:
        module: the network, or the part of it that is called.
        path: name of the module in the network.
        stacks: the stacks within it.
        args: arguments of the call.
        kwargs: keyword arguments of the call.
    """
    with catch_warnings():
        # The network's own warnings appear when it trains.
        simplefilter("ignore")
        count = forward_flops(module, args, kwargs)
    if count.uncounted:
        warn(
            f"training FLOPs are too low, because the operations of "
            f"{count.describe_uncounted()} cannot be counted, {HOW_TO_COUNT}"
        )
    prefix = f"{path}." if path else ""
    blocks = {
        name: [PASSES_OF_TRAINING * count.by_module[one.removeprefix(prefix)] for one in own.blocks]
        for name, own in stacks.items()
    }
    whole = count.training
    return Costs(
        whole - sum(map(sum, blocks.values())),
        {name: sum(flops) / len(flops) for name, flops in blocks.items()},
    )


# ---- Removing sleeping blocks, while the model is saved or loaded, or for good


_DEPTHS = ("num_hidden_layers", "n_layer", "num_layers", "n_layers", "depth")
"""Names of the number of blocks in configurations of Hugging Face."""
_SIDES = {
    "encoder": ("encoder_layers", "num_encoder_layers"),
    "decoder": ("decoder_layers", "num_decoder_layers"),
}


_LAYER_TYPES = "layer_types"
_DEPTHS_BY_STAGE = "depths"

_Undo = list[tuple[dict[str, Any], dict[str, Any]]]


def shorten(
    networks: Sequence[nn.Module], stacks: Stacks, awake: Mapping[str, int], *, has_config: bool
) -> Callable[[], None]:
    """Remove sleeping blocks from networks; return a function that puts them back.

    Args:
        networks: the network and its averaged copies.
        stacks: their stacks.
        awake: blocks awake, by stack.
        has_config: whether to shorten configurations of Hugging Face too.
    """
    undo: _Undo = []
    try:
        for network in networks:
            _shorten_network(network, stacks, awake, has_config, undo)
    except BaseException:
        _put_back(undo)
        raise
    return partial(_put_back, undo)


def _shorten_network(
    network: nn.Module, stacks: Stacks, awake: Mapping[str, int], has_config: bool, undo: _Undo
) -> None:
    sleeping = grouped(
        (stack.container, block.rpartition(".")[2])
        for name, stack in stacks.items()
        for block in stack.blocks[awake[name] :]
    )
    # Found before any block is renumbered, because one list may contain another.
    lists = {container: network.get_submodule(container)._modules for container in sleeping}
    configs = {
        container: _configs_around(network, container) if has_config else []
        for container in sleeping
    }
    for container, asleep in sleeping.items():
        _shorten_list(container, lists[container], configs[container], asleep, undo)


def _put_back(undo: _Undo) -> None:
    for now, before in reversed(undo):
        now.clear()
        now.update(before)


def _shorten_list(
    container: str,
    children: dict[str, nn.Module | None],
    configs: Sequence[Any],
    asleep: Sequence[str],
    undo: _Undo,
) -> None:
    """Remove these blocks from their list, renumber the rest, and shorten configurations."""
    is_kept = [key not in asleep for key in children]
    for config in configs:
        undo.append((vars(config), dict(vars(config))))
    if configs and not any([_shorten(vars(one), container, is_kept) for one in configs]):
        raise UsageError(
            f"{type(configs[0]).__name__} has no known entry for the depth of {container}; save "
            "model.state_dict() inside export() instead"
        )
    undo.append((children, dict(children)))
    kept = [child for key, child in children.items() if key not in asleep]
    children.clear()
    children.update({str(number): child for number, child in enumerate(kept)})


def _configs_around(network: nn.Module, container: str) -> list[Any]:
    """Return the configurations of Hugging Face of the modules around a list."""
    parts = container.split(".")
    modules = [network.get_submodule(".".join(parts[:count])) for count in range(len(parts))]
    found = {id(config): config for one in modules if (config := getattr(one, "config", None))}
    # Other kinds of configurations do not tell how a model is built from a file.
    return [config for config in found.values() if hasattr(config, "attribute_map")]


def _shorten(config: dict[str, Any], container: str, is_kept: list[bool]) -> bool:
    """Replace the number of all blocks by that of the kept ones; return whether it was found."""
    before, after = len(is_kept), sum(is_kept)
    side = next((side for side in _SIDES if side in container), "")
    own = [name for name in _SIDES.get(side, ()) if config.get(name) == before]
    # If both sides have a number, the general one is the encoder's.
    general = [] if own and side == "decoder" else [n for n in _DEPTHS if config.get(n) == before]
    config.update(dict.fromkeys([*own, *general], after))
    if len(config.get(_LAYER_TYPES) or ()) == before:
        config[_LAYER_TYPES] = [*compress(config[_LAYER_TYPES], is_kept)]
    stage = re.search(r"\.(\d+)", container)
    depths = list(config.get(_DEPTHS_BY_STAGE) or ())
    if stage and int(stage[1]) < len(depths) and depths[int(stage[1])] == before:
        depths[int(stage[1])] = after
        config[_DEPTHS_BY_STAGE] = depths
        return True
    return bool(own or general)
