"""What networks cost in parameters and operations, and which seeds fit within the limits."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, Protocol, TypeVar

import torch
from torch import Tensor

from esper.kasmina.blueprints.kin import KIN, Kin
from esper.kasmina.blueprints.registry import (
    BLUEPRINTS,
    Blueprint,
    blueprint_by_id,
    blueprint_names,
    count_parameters,
    offered,
)
from esper.kasmina.flops import HOW_TO_COUNT, FlopCount, forward_flops
from esper.kasmina.slot import GateNetwork
from esper.kasmina.state import SlotState
from esper.leyline.actions import TensorRecord
from esper.leyline.config import Config, option
from esper.leyline.controller import GrowthLimits
from esper.leyline.errors import ConfigError, reason_of, warn
from esper.leyline.slots import TOPOLOGIES, Symmetry, Topology, channel_axis
from esper.leyline.stages import AlphaAlgorithm, SeedStage
from esper.utils.randomness import seeded

NOT_FOR_THE_SLOT = -1
"""Cost of a seed whose blueprint is not for the slot's topology, or breaks a symmetry there."""

NO_LIMIT = -1
"""Stands for no limit."""

N = TypeVar("N", int, Tensor)


class SlotShape(Protocol):
    """Anything that knows the shape of the activation at a slot."""

    @property
    def topology(self) -> Topology:
        """Kind of activation."""

    @property
    def shape(self) -> tuple[int, ...]:
        """Shape of the activation, batch first."""

    @property
    def symmetry(self) -> Symmetry:
        """Whether the host is causal or equivariant in the order of positions."""


def seed_parameters(blueprint: Blueprint, channels: int, topology: Topology) -> int:
    """Return the most parameters such a seed can come to have, a gate network included.

    Any style may be set later, so a limit always reserves room for the gate.
    """
    return count_parameters(blueprint, channels, topology) + gate_parameters(channels, topology)


@lru_cache(maxsize=1024)
def gate_parameters(channels: int, topology: Topology) -> int:
    """Return the parameters of a gate network of this width."""
    with torch.device("meta"):
        gate = GateNetwork(channels, topology)
    return sum(parameter.numel() for parameter in gate.parameters())


def seed_flops(blueprint: Blueprint, topology: Topology, shape: tuple[int, ...]) -> int:
    """Return the operations of one sample's forward pass through such a seed, without a gate."""
    return count_seed(blueprint, topology, shape).total


@lru_cache(maxsize=4096)
def count_seed(blueprint: Blueprint, topology: Topology, shape: tuple[int, ...]) -> FlopCount:
    """Return the count of one sample's forward pass through such a seed, without a gate."""
    shape, channels = (1, *shape[1:]), shape[channel_axis(topology)]
    try:
        with torch.device("meta"):
            seed = blueprint.build(channels, topology)
        return forward_flops(seed, torch.empty(shape, device="meta"))
    except Exception:
        # A module whose control flow depends on values cannot run on the meta device.
        with seeded("costs"):
            seed = blueprint.build(channels, topology)
        return forward_flops(seed, torch.zeros(shape))


@lru_cache(maxsize=1024)
def gate_flops(topology: Topology, shape: tuple[int, ...]) -> int:
    """Return the operations of one sample's forward pass through a gate network."""
    with torch.device("meta"):
        gate = GateNetwork(shape[channel_axis(topology)], topology)
    return forward_flops(gate, torch.empty((1, *shape[1:]), device="meta")).total


@dataclass(frozen=True, slots=True, kw_only=True)
class SlotCosts(TensorRecord):
    """Shapes of slots and costs of seeds and gates in them; int64 tensors.

    They are [S] and [S, B] for one host, and have a leading dimension R for rows. Any style may be
    set later, so the cost of a seed always includes a gate.
    """

    slot_channels: Tensor
    """[S], width of the activation, 0 where unknown."""
    slot_positions: Tensor
    """[S], pixels or tokens, 1 for vectors, 0 where unknown."""
    slot_topology: Tensor
    """[S], index into `TOPOLOGIES`, -1 where unknown."""
    gate_params: Tensor
    """[S], parameters of a gate."""
    gate_flops: Tensor
    """[S], operations per sample of a gate."""
    seed_params: Tensor
    """[S, B], parameters of a seed with a gate, -1 where the blueprint is not for the slot."""
    seed_flops: Tensor
    """[S, B], operations per sample of a seed with a gate, -1 likewise."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RowCosts:
    """Costs of the hosts of R rows and of seeds in them, and the limits of each row; int64.

    Everything is per row, because rows that run together may be of different tasks.
    """

    host_params: Tensor
    """[R], trainable parameters of the bare host."""
    host_flops: Tensor
    """[R], operations of one sample's forward pass through the bare host."""
    param_limit: Tensor
    """[R], most parameters of the whole network, -1 without a limit."""
    flop_limit: Tensor
    """[R], most operations per sample of the whole network, -1 without a limit."""
    seeds: SlotCosts
    """[R, S] and [R, S, B], shapes of the slots and costs of seeds there."""


def row_costs(
    rows: int,
    seeds: SlotCosts,
    *,
    host_params: int | Tensor,
    host_flops: int | Tensor = 0,
    param_limit: int | Tensor = NO_LIMIT,
    flop_limit: int | Tensor = NO_LIMIT,
    device: torch.device | str = "cpu",
) -> RowCosts:
    """Return the costs of rows with the same host; every number is for all of them or [R].

    A number for all rows uses no memory per row.
    """

    def each(value: int | Tensor) -> Tensor:
        return torch.as_tensor(value, dtype=torch.int64, device=device).expand(rows)

    return RowCosts(
        host_params=each(host_params),
        host_flops=each(host_flops),
        param_limit=each(param_limit),
        flop_limit=each(flop_limit),
        seeds=seeds.to(device).map(lambda value: value.expand(rows, *value.shape)),
    )


def slot_costs(slots: Sequence[SlotShape], blueprints: tuple[str, ...] | None = None) -> SlotCosts:
    """Return the costs at these slots, for all registered blueprints, or those named.

    Copies of blocks are not for any slot here: `with_copies` adds them.
    """
    known = tuple((slot.topology, (1, *slot.shape[1:])) for slot in slots)
    names = blueprint_names() if blueprints is None else blueprints
    return _slot_costs(known, tuple(slot.symmetry for slot in slots), names)


def with_copies(costs: SlotCosts, kin: Sequence[Kin]) -> SlotCosts:
    """Return the costs of slots with those of copying the block in front of each."""
    params, flops = costs.seed_params.clone(), costs.seed_flops.clone()
    choice = BLUEPRINTS.get(KIN).id
    for index, block in enumerate(kin):
        if not block.problem:
            params[index, choice] = block.parameters + costs.gate_params[index]
            flops[index, choice] = block.flops + costs.gate_flops[index]
    return dataclasses.replace(costs, seed_params=params, seed_flops=flops)


@lru_cache(maxsize=256)
def _slot_costs(
    slots: tuple[tuple[Topology, tuple[int, ...]], ...],
    symmetries: tuple[Symmetry, ...],
    blueprints: tuple[str, ...],
) -> SlotCosts:
    channels = [shape[channel_axis(topology)] for topology, shape in slots]
    params = torch.full((len(slots), len(blueprints)), NOT_FOR_THE_SLOT)
    flops = torch.full_like(params, NOT_FOR_THE_SLOT)
    gates = [gate_flops(topology, shape) for topology, shape in slots]
    for index, (topology, shape) in enumerate(slots):
        for choice in offered(topology, symmetries[index]):
            blueprint = blueprint_by_id(choice)
            try:
                count = count_seed(blueprint, topology, shape)
            except Exception as error:
                # Third-party code: a seed that cannot run must not disable the others.
                warn(
                    f"blueprint {blueprints[choice]!r} is not offered at {topology} slots of shape "
                    f"{'x'.join(map(str, shape[1:]))}: {type(error).__name__}: "
                    f"{reason_of(error)}"
                )
                continue
            if count.uncounted:
                warn(
                    f"the operations of {count.describe_uncounted()} in blueprint "
                    f"{blueprints[choice]!r} cannot be counted: limits of operations do not hold "
                    f"for it, {HOW_TO_COUNT}"
                )
            params[index, choice] = seed_parameters(blueprint, channels[index], topology)
            flops[index, choice] = count.total + gates[index]
    return SlotCosts(
        slot_channels=torch.tensor(channels),
        slot_positions=torch.tensor(
            [math.prod(shape) // c for c, (_, shape) in zip(channels, slots, strict=True)]
        ),
        slot_topology=torch.tensor([TOPOLOGIES.index(topology) for topology, _ in slots]),
        gate_params=torch.tensor(
            [gate_parameters(c, t) for c, (t, _) in zip(channels, slots, strict=True)]
        ),
        gate_flops=torch.tensor(gates),
        seed_params=params,
        seed_flops=flops,
    )


def slot_flops(state: SlotState, costs: SlotCosts) -> Tensor:
    """Return int64 [R, S]: operations per sample of every seed and its gate, 0 where is none."""
    choice = state.blueprint.clamp(min=0)[..., None]
    table = costs.seed_flops.expand(*state.blueprint.shape, -1)
    with_gate = table.gather(2, choice).squeeze(2)
    more_copies = (count_copies(state.doublings) - 1) * (with_gate - costs.gate_flops)
    own = with_gate + more_copies - _missing(state, costs.gate_flops)
    return torch.where(state.has_module, own, 0)


def count_copies(doublings: N) -> N:
    """Return how many copies stand in a slot: the block and its copies are doubled every time."""
    copies: N = 2 ** (doublings + 1) - 1
    return copies


def standing_copies(state: SlotState) -> Tensor:
    """Return int64 [R, S]: copies of a block in the slot, 0 where there is no copy."""
    is_copy = state.has_module & (state.blueprint == BLUEPRINTS.get(KIN).id)
    return torch.where(is_copy, count_copies(state.doublings), 0)


def copies_to_double(state: SlotState) -> Tensor:
    """Return int64 [R, S]: copies in the slot that can be doubled; 0 elsewhere.

    They have been at full amplitude since they came: no ramp has led there, and none away. So they
    have taken every step that their sources have taken, and are one network with the host.
    """
    is_live = state.stage != int(SeedStage.FOSSILIZED)
    is_whole = (state.alpha == 1) & (state.alpha_start == 0) & (state.steps_total == 0)
    return torch.where(is_live & is_whole, standing_copies(state), 0)


def germination_costs(state: SlotState, costs: SlotCosts) -> tuple[Tensor, Tensor]:
    """Return int64 [R, S, B], twice: parameters and operations per sample of a new seed.

    They include a gate, and are -1 where the blueprint is not for the slot. Where copies can be
    doubled, `kin` costs as many copies again and one of the block; the gate is there already.
    """
    choice, copies = BLUEPRINTS.get(KIN).id, copies_to_double(state)
    if choice >= costs.seed_params.shape[-1]:
        return costs.seed_params, costs.seed_flops

    def doubled(seeds: Tensor, gate: Tensor) -> Tensor:
        seeds = seeds.expand(*copies.shape, -1).clone()
        one = seeds[..., choice]
        seeds[..., choice] = torch.where(copies > 0, (copies + 1) * (one - gate), one)
        return seeds

    return (
        doubled(costs.seed_params, costs.gate_params),
        doubled(costs.seed_flops, costs.gate_flops),
    )


def parse_factor(value: float | str) -> float:
    """Return `max_growth` as a number: a factor above 1, also as a text ("2x"), or 0 for none."""
    try:
        if isinstance(value, bool):
            raise TypeError
        factor = float(value.strip().removesuffix("x") if isinstance(value, str) else value)
    except (TypeError, ValueError, OverflowError):
        factor = math.nan
    if factor != 0.0 and not 1.0 < factor < math.inf:
        raise ConfigError(
            "max_growth must be a factor above 1, such as 2.0 or '2x' for twice the parameters and "
            f"operations (0 is no limit), got {value!r}"
        )
    return factor


@dataclass(frozen=True, kw_only=True)
class Limits(Config):
    """How far a network may grow."""

    max_growth: float = option(
        0.0,
        "Most parameters and operations of the grown network, as a multiple of the host's; the two "
        "limits below win over it; 0 is no limit.",
    )
    max_parameters: int = option(
        0, "Most trainable parameters of the grown network; 0 is no limit.", minimum=0
    )
    max_added_flops: int = option(
        0, "Most operations per sample that seeds may add; 0 is no limit.", minimum=0
    )

    def __post_init__(self) -> None:
        """Read `max_growth`, also as a text such as "2x"."""
        object.__setattr__(self, "max_growth", parse_factor(self.max_growth))
        super().__post_init__()

    def most_parameters(self, trainable: int, whole: int) -> int:
        """Return the most trainable parameters of the whole network, `NO_LIMIT` without a limit.

        Args:
            trainable: trainable parameters of the bare host.
            whole: all its parameters, frozen ones too.
        """
        if self.max_parameters or not self.max_growth:
            return self.max_parameters or NO_LIMIT
        return trainable + math.floor((self.max_growth - 1) * whole)

    def most_flops(self, host_flops: int, *, is_counted: bool) -> int:
        """Return the most operations per sample of the whole network, `NO_LIMIT` without a limit.

        Args:
            host_flops: those of the bare host.
            is_counted: whether all of them could be counted.
        """
        if self.max_added_flops:
            return host_flops + self.max_added_flops
        if self.max_growth and is_counted:
            return host_flops + math.floor((self.max_growth - 1) * host_flops)
        return NO_LIMIT


def host_multiple(what: str, default: float | None = None) -> Any:
    """Declare a limit in units of the bare host's, by default none."""
    text = f"Most {what} of the grown network, in units of the bare host's: 2 lets it double"
    return option(default, f"{text}." if default else f"{text}; empty is no limit.", minimum=1.0)


@dataclass(frozen=True, kw_only=True)
class HostMultiples(Config):
    """How far a network may grow, in units of its bare host."""

    param_limit: float | None = host_multiple("parameters")
    flop_limit: float | None = host_multiple("operations per sample")

    @property
    def growth_limits(self) -> GrowthLimits:
        """The same, as a policy remembers the limits that it learned under."""
        return GrowthLimits(parameters=self.param_limit, flops=self.flop_limit)


def times_host(limit: float | None, host: int) -> int:
    """Return a limit in units of the host's as a number, `NO_LIMIT` without one."""
    return NO_LIMIT if limit is None else math.floor(limit * host)


def as_options(param_limit: int, flop_limit: int, host_flops: int) -> dict[str, int]:
    """Return limits of the whole network as the options of `Limits` that mean the same."""
    options = {}
    if param_limit != NO_LIMIT:
        options["max_parameters"] = param_limit
    if flop_limit != NO_LIMIT:
        # 0 would be no limit; nothing that is counted costs as little as 1.
        options["max_added_flops"] = max(1, flop_limit - host_flops)
    return options


def fitting_blueprints(
    state: SlotState, costs: RowCosts, affordable: Tensor | None = None
) -> Tensor:
    """Return bool [R, S, B]: the blueprints that each slot can take within the limits of its row.

    Limits are of the whole network, `NO_LIMIT` for none. Costs are those of present seeds, of the
    new seed, and of the gates that each may get later. So a network never exceeds its limits.
    `affordable`, int64 [R], is a second limit of operations: what the rest of a budget pays for.
    """

    def within(host: Tensor, grown: Tensor, gate: Tensor, seed: Tensor, limit: Tensor) -> Tensor:
        used = host + (grown + _missing(state, gate)).sum(1)
        fits = used[:, None, None] + seed <= limit[:, None, None]
        return fits | (limit == NO_LIMIT)[:, None, None]

    seeds = costs.seeds
    seed_params, seed_flops = germination_costs(state, seeds)
    is_possible = seed_params != NOT_FOR_THE_SLOT
    # In the slot of copies only those like them can grow.
    choices = torch.arange(seed_params.shape[-1], device=seed_params.device)
    doubles = (choices == BLUEPRINTS.get(KIN).id) & (copies_to_double(state) > 0)[..., None]
    is_possible &= doubles | (standing_copies(state) == 0)[..., None]
    params = within(
        costs.host_params, state.params, seeds.gate_params, seed_params, costs.param_limit
    )
    grown = slot_flops(state, seeds)
    flops = within(costs.host_flops, grown, seeds.gate_flops, seed_flops, costs.flop_limit)
    fits = is_possible & params & flops
    if affordable is None:
        return fits
    return fits & within(costs.host_flops, grown, seeds.gate_flops, seed_flops, affordable)


def _missing(state: SlotState, gate: Tensor) -> Tensor:
    """Return int64 [R, S]: the cost of a gate where a seed has none yet."""
    has_none = state.has_module & (state.algorithm != int(AlphaAlgorithm.GATE))
    return torch.where(has_none, gate, 0)
