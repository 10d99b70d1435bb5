"""The conformance checks of controllers, and tools that other checks share."""

from __future__ import annotations

import copy
import math
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any, Protocol, TypeAlias, TypeVar

import torch
from torch import Tensor

from esper.kasmina.blueprints import BLUEPRINTS
from esper.leyline.actions import CAUSAL_HEADS, HEAD_NAMES, NUM_OPS, PLACEHOLDERS, LifecycleOp
from esper.leyline.controller import Controller, ControllerContext
from esper.leyline.errors import EsperWarning
from esper.leyline.rules import Masks, RulesConfig, RuleView, build_masks, is_in
from esper.leyline.signals import HISTORY, Signals
from esper.leyline.slots import BUILTIN_BLUEPRINTS, NOOP, TOPOLOGIES, Topology
from esper.leyline.stages import (
    ALPHA_TARGETS,
    BLENDED_STAGES,
    COOLDOWN_STAGES,
    LIVE_STAGES,
    AlphaAlgorithm,
    AlphaMode,
    SeedStage,
)
from esper.tamiyo.controllers import make_controller
from esper.utils.randomness import generator

# ---- Tools of several checks


def require(condition: bool, message: str) -> None:
    """Raise AssertionError with the message unless the condition holds."""
    if not condition:
        raise AssertionError(message)


def same(one: Any, other: Any) -> bool:
    """Return whether two states are equal, with NaN equal to NaN."""
    if isinstance(one, Tensor) and isinstance(other, Tensor):
        if one.dtype != other.dtype or one.shape != other.shape:
            return False
        return bool(((one == other) | ((one != one) & (other != other))).all())
    if isinstance(one, dict) and isinstance(other, dict):
        return one.keys() == other.keys() and all(same(one[key], other[key]) for key in one)
    if isinstance(one, list | tuple) and isinstance(other, list | tuple):
        return len(one) == len(other) and all(map(same, one, other))
    if isinstance(one, float) and isinstance(other, float) and math.isnan(one):
        return math.isnan(other)
    return type(one) is type(other) and bool(one == other)


def check_plain(value: Any, where: str = "state_dict()") -> None:
    """Raise AssertionError unless a state consists of plain data and tensors."""
    if isinstance(value, dict):
        for key, item in value.items():
            require(isinstance(key, str), f"{where} has the key {key!r}; keys must be text")
            check_plain(item, f"{where}[{key!r}]")
    elif isinstance(value, list | tuple):
        for index, item in enumerate(value):
            check_plain(item, f"{where}[{index}]")
    else:
        plain = value is None or type(value) in (bool, int, float, str)
        require(
            plain or isinstance(value, Tensor),
            f"{where} is a {type(value).__name__}; use numbers, text, lists, dicts and tensors",
        )


class HasState(Protocol):
    """A controller or a reward: an object with a memory."""

    def state_dict(self) -> dict[str, Any]:
        """Return the memory."""

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore the memory."""


T = TypeVar("T", bound=HasState)


def check_memory(
    make: Callable[[], T],
    reset: Callable[[T], None],
    first: Callable[[T, int], Any],
    again: Callable[[T, int], Any],
    steps: int,
    where: str = "",
) -> None:
    """Raise unless a restored or reset object repeats its steps.

    Args:
        make: returns a new object.
        reset: makes an object start again.
        first: takes a step by number for the first time and returns its result.
        again: repeats a step and returns its result.
        steps: number of steps; the memory is saved after half of them.
        where: start of every message.
    """
    middle = steps // 2
    played = make()
    reset(played)
    results = [first(played, step) for step in range(middle)]
    state = played.state_dict()
    check_plain(state)
    saved = copy.deepcopy(state)
    results += [first(played, step) for step in range(middle, steps)]
    require(same(state, saved), f"{where}state_dict() changed in later steps; return copies")

    def repeat(one: T, start: int, when: str) -> None:
        for step in range(start, steps):
            require(
                same(again(one, step), results[step]),
                f"{where}after {when}, step {step} gave another result than before",
            )

    restored = make()
    restored.load_state_dict(copy.deepcopy(saved))
    require(
        same(restored.state_dict(), saved),
        f"{where}state_dict() after load_state_dict(state) is not the state",
    )
    repeat(restored, middle, "load_state_dict")
    played.load_state_dict(copy.deepcopy(saved))
    repeat(played, middle, "load_state_dict of an earlier state")
    reset(played)
    repeat(played, 0, "reset")


# ---- Random but valid signals and masks


BLUEPRINTS_BY_TOPOLOGY: dict[Topology, tuple[str, ...]] = {
    kind: tuple(
        name
        for index, name in enumerate(BUILTIN_BLUEPRINTS)
        if index != NOOP and kind in BLUEPRINTS.get(name).topologies
    )
    for kind in TOPOLOGIES
}
"""The built-in blueprints that fit, by topology."""

EMPTY = -1
_VECTOR = TOPOLOGIES.index("vector")
_OCCUPIED = (*LIVE_STAGES, SeedStage.FOSSILIZED, *COOLDOWN_STAGES)


class _Draws:
    """Draws from one generator."""

    def __init__(self, generator: torch.Generator) -> None:
        self.generator = generator

    def integers(self, low: int, high: int, *shape: int) -> Tensor:
        """Return int64 from `low` up to, not including, `high`."""
        return torch.randint(low, high, shape, generator=self.generator)

    def below(self, limit: Tensor) -> Tensor:
        """Return int64 from 0 up to, not including, each limit."""
        drawn = (torch.rand(limit.shape, generator=self.generator) * limit).long()
        return torch.minimum(drawn, limit - 1)

    def uniform(self, low: float, high: float, *shape: int) -> Tensor:
        return low + (high - low) * torch.rand(shape, generator=self.generator)

    def normal(self, scale: float, *shape: int) -> Tensor:
        return scale * torch.randn(shape, generator=self.generator)

    def chance(self, probability: float, *shape: int) -> Tensor:
        return torch.rand(shape, generator=self.generator) < probability

    def one_of(self, values: Sequence[float], *shape: int) -> Tensor:
        return torch.tensor(values)[self.integers(0, len(values), *shape)]


def random_signals(rows: int, slots: int, generator: torch.Generator) -> tuple[Signals, Masks]:
    """Return signals of random hosts and the masks the rules give for them.

    Every field has values that it can take in a run, absent ones included, and dependent fields
    agree. About one call in four has negative losses for scores, the others accuracies.
    """
    draw = _Draws(generator)
    shape = (rows, slots)
    enabled = draw.chance(0.8, *shape)
    first = draw.integers(0, slots, rows)
    enabled[torch.arange(rows), first] = True
    occupied = enabled & draw.chance(0.6, *shape)
    stage = torch.where(occupied, draw.one_of(_OCCUPIED, *shape), EMPTY)
    fits, blueprint, *topologies = _random_fits(rows, slots, draw)
    alpha, target, mode = _random_alpha(stage, draw)
    epoch = draw.integers(1, 61, rows)
    age = draw.below(epoch[:, None].expand(shape))
    in_stage = draw.below(age + 1)
    view = RuleView(
        stage=torch.where(occupied, stage, int(SeedStage.DORMANT)),
        alpha_mode=torch.where(occupied, mode, int(AlphaMode.HOLD)),
        age=torch.where(occupied, age, 0),
        enabled=enabled,
        copies=torch.zeros_like(stage),
        fits=fits,
    )
    rules = RulesConfig(max_seeds=int(draw.integers(0, slots + 1)))
    masks = build_masks(view, rules)

    def in_slot(values: Tensor, absent: float) -> Tensor:
        return torch.where(occupied, values, absent)

    losses = draw.uniform(0.01, 3.0, rows, HISTORY)
    scores = -losses if bool(draw.chance(0.25)) else draw.uniform(5.0, 99.0, rows, HISTORY)
    unknown = torch.arange(HISTORY) < HISTORY - epoch[:, None]
    measured = is_in(stage, BLENDED_STAGES) & draw.chance(0.8, *shape)
    moving = mode != int(AlphaMode.HOLD)
    ticks = draw.integers(1, 9, *shape)
    host = draw.integers(1_000, 100_000, rows)
    grown = is_in(stage, (*LIVE_STAGES, SeedStage.FOSSILIZED))
    slot_params = torch.where(grown, draw.integers(10, 5_000, *shape), 0)
    host_flops = 50 * host
    slot_flops = torch.where(grown, 60 * slot_params, 0)
    topology, fits_topology = topologies
    seed_params = torch.where(fits_topology, draw.integers(10, 5_000, *fits.shape), -1)
    peak, factor = draw.one_of((0.01, 0.05, 0.2), rows), draw.uniform(0.01, 1.0, rows)
    limited = draw.chance(0.5, rows)
    interaction = draw.normal(1.0, rows, slots, slots)
    interaction = torch.where(torch.eye(slots, dtype=torch.bool), 0.0, interaction)
    signals = Signals(
        epoch=epoch,
        max_epochs=torch.full((rows,), 60),
        val_loss=losses[:, -1],
        val_score=scores[:, -1],
        best_loss=losses.amin(1),
        best_score=scores.amax(1),
        train_loss=torch.where(draw.chance(0.9, rows), draw.uniform(0.01, 3.0, rows), torch.nan),
        loss_history=losses.masked_fill(unknown, torch.nan),
        score_history=scores.masked_fill(unknown, torch.nan),
        plateau_epochs=draw.below(epoch.clamp(max=10)),
        stabilized=draw.chance(0.8, rows),
        params=host + slot_params.sum(1),
        host_params=host,
        budget=torch.full((rows,), 500_000),
        flops=host_flops + slot_flops.sum(1),
        host_flops=host_flops,
        param_limit=torch.where(limited, 2 * (host + slot_params.sum(1)), -1),
        flop_limit=torch.where(limited, 2 * (host_flops + slot_flops.sum(1)), -1),
        rate_factor=factor,
        learning_rate=torch.where(draw.chance(0.9, rows), peak * factor, torch.nan),
        train_samples=draw.integers(0, 50_000, rows),
        samples_per_epoch=draw.integers(0, 5_000, rows),
        num_classes=draw.one_of((0, 2, 10, 100), rows),
        chance_loss=torch.where(draw.chance(0.9, rows), 2.3, torch.nan),
        compute_budget=torch.where(limited, 10**12, -1),
        compute_spent=torch.where(limited, 10**12 * epoch // 60, 0),
        last_op=draw.integers(0, NUM_OPS, rows),
        last_success=draw.chance(0.8, rows),
        rolled_back=draw.chance(0.05, rows),
        enabled=enabled,
        occupied=occupied,
        stage=stage,
        blueprint=torch.where(occupied, blueprint, EMPTY),
        alpha_mode=torch.where(occupied, mode, EMPTY),
        algorithm=torch.where(occupied, draw.integers(0, len(AlphaAlgorithm), *shape), EMPTY),
        alpha=alpha,
        alpha_target=target,
        alpha_velocity=torch.where(moving, (target - alpha) / ticks, 0.0),
        time_to_target=torch.where(moving, ticks, 0).float(),
        epochs_in_stage=torch.where(occupied, in_stage, EMPTY),
        age=torch.where(occupied, age, EMPTY),
        counterfactual_age=torch.where(measured, draw.below((age + 1).clamp(max=5)), EMPTY),
        contribution=torch.where(measured, draw.normal(2.0, *shape), torch.nan),
        contribution_se=torch.where(measured, draw.uniform(0.0, 1.0, *shape), torch.nan),
        contribution_velocity=torch.where(measured, draw.normal(0.5, *shape), torch.nan),
        grad_norm=in_slot(draw.uniform(0.0, 5.0, *shape), 0.0),
        grad_health=in_slot(draw.uniform(0.0, 1.0, *shape), 0.0),
        grad_health_prev=in_slot(draw.uniform(0.0, 1.0, *shape), 0.0),
        vanishing=occupied & draw.chance(0.1, *shape),
        exploding=occupied & draw.chance(0.1, *shape),
        interaction=torch.where(measured[:, :, None] & measured[:, None], interaction, 0.0),
        slot_params=slot_params,
        slot_flops=slot_flops,
        slot_channels=draw.integers(2, 129, *shape),
        slot_positions=torch.where(topology == _VECTOR, 1, draw.integers(1, 1_025, *shape)),
        slot_topology=topology,
        copies=torch.zeros_like(stage),
        seed_params=seed_params,
        seed_flops=torch.where(fits_topology, 60 * seed_params, -1),
        twin_score=torch.where(draw.chance(0.5, rows), scores[:, 0], torch.nan),
    )
    return signals, masks


def _random_fits(rows: int, slots: int, draw: _Draws) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return which blueprints fit each slot [R, S, B], and a fitting one [R, S].

    Then the topologies of the slots [R, S], and which blueprints are for those [R, S, B].
    """
    table = torch.zeros(len(TOPOLOGIES), len(BUILTIN_BLUEPRINTS), dtype=torch.bool)
    for index, kind in enumerate(TOPOLOGIES):
        for name in BLUEPRINTS_BY_TOPOLOGY[kind]:
            table[index, BUILTIN_BLUEPRINTS.index(name)] = True
    topology = draw.integers(0, len(TOPOLOGIES), rows, slots)
    fits = table[topology]
    weight = draw.uniform(0.1, 1.0, rows, slots, len(BUILTIN_BLUEPRINTS))
    blueprint = (weight * fits).argmax(-1)
    # In some slots nothing fits, as when a limit is reached.
    return fits & ~draw.chance(0.05, rows, slots, 1), blueprint, topology, fits


def _random_alpha(stage: Tensor, draw: _Draws) -> tuple[Tensor, Tensor, Tensor]:
    """Return alpha, its target and its mode, valid for these stages."""
    shape = tuple(stage.shape)
    blending = stage == int(SeedStage.BLENDING)
    full = (stage == int(SeedStage.HOLDING)) | (stage == int(SeedStage.FOSSILIZED))
    hold = int(AlphaMode.HOLD)
    mode = torch.where(blending, draw.integers(0, len(AlphaMode), *shape), hold)
    goal = draw.one_of(ALPHA_TARGETS, *shape)
    target = torch.where(mode == int(AlphaMode.DOWN), torch.zeros(shape), goal)
    share = draw.uniform(0.05, 0.95, *shape)
    ramp = torch.where(mode == int(AlphaMode.UP), share * target, share)
    alpha = torch.where(mode == hold, target, ramp)
    one, zero = torch.ones(shape), torch.zeros(shape)
    alpha = torch.where(blending, alpha, torch.where(full, one, zero))
    target = torch.where(blending, target, torch.where(full, one, zero))
    return alpha, target, mode


ControllerFactory: TypeAlias = Callable[[ControllerContext], Controller]
Step: TypeAlias = tuple[Signals, Masks]
Actions: TypeAlias = dict[str, Tensor]


def check_controller(
    controller: str | ControllerFactory,
    *,
    rows: Sequence[int] = (1, 3),
    slots: int = 3,
    steps: int = 40,
    seed: int = 0,
) -> None:
    """Run a controller on random signals and raise if it breaks the protocol.

    The checks: it has the methods of the protocol; actions have every head as int64 [rows], are
    legal, and have placeholders in the heads that their op does not use; signals and masks are not
    changed; the memory is plain data and tensors, and a new controller that loads it continues with
    the same actions; after `reset` everything repeats.

    Args:
        controller: Its name, as in 'every_nth:4', or a function that returns a new controller for a
            context. The slots are called r0c0, r0c1, ...; the blueprints are the built-in ones.
        rows: Numbers of rows to try.
        slots: Number of slots.
        steps: Decisions per run.
        seed: Seed of the random signals.

    Raises:
        AssertionError: The controller breaks the protocol; the message says where.
    """
    if isinstance(controller, str):
        factory: ControllerFactory = partial(make_controller, controller)
    else:
        factory = controller
    context = ControllerContext(slot_names=tuple(f"r0c{slot}" for slot in range(slots)), seed=seed)
    made = factory(context)
    require(
        isinstance(made, Controller) and not isinstance(made, type),
        f"{made!r} must be an object with reset, act, state_dict and load_state_dict",
    )
    with warnings.catch_warnings():
        # Controllers rightly warn about many random situations.
        warnings.simplefilter("ignore", EsperWarning)
        for count in rows:
            stream = generator(seed, count, slots, "check_controller")
            situations = [random_signals(count, slots, stream) for _ in range(steps)]
            _check_run(factory, context, situations, count)


def _check_run(
    factory: ControllerFactory, context: ControllerContext, situations: Sequence[Step], rows: int
) -> None:
    run: list[Step] = []
    taken: list[Actions] = []

    def make() -> Controller:
        controller = factory(context)
        controller.reset(rows, "cpu")
        return controller

    def first(controller: Controller, index: int) -> Actions:
        signals, masks = situations[index]
        # The last op in the signals is the one that the controller took.
        last_op = taken[-1]["op"] if taken else torch.zeros_like(signals.last_op)
        run.append((replace(signals, last_op=last_op), masks))
        taken.append(_checked_act(controller, run[-1], index))
        return taken[-1]

    check_memory(
        make,
        lambda controller: controller.reset(rows, "cpu"),
        first,
        lambda controller, index: controller.act(*run[index]),
        len(situations),
        f"{rows} rows: ",
    )


def _checked_act(controller: Controller, step: Step, index: int) -> Actions:
    """Return the actions of one step after checking them."""
    before = _tensors(step)
    actions = controller.act(*step)
    for name, values in _tensors(step).items():
        require(same(values, before[name]), f"step {index}: act() changed {name}")
    try:
        check_actions(actions, step[1])
    except AssertionError as error:
        raise AssertionError(f"step {index}: {error}") from None
    return {head: values.clone() for head, values in actions.items()}


def _tensors(step: Step) -> dict[str, Tensor]:
    """Return a copy of every tensor of signals and masks, by name."""
    return {
        f"{type(shown).__name__}.{name}": values.clone()
        for shown in step
        for name, values in shown.state_dict().items()
    }


def check_actions(actions: Mapping[str, Tensor], masks: Masks) -> None:
    """Raise AssertionError unless every row's action is complete and legal.

    Heads that the op does not use must have their placeholder.
    """
    require(
        set(actions) == set(HEAD_NAMES),
        f"actions must have the heads {', '.join(HEAD_NAMES)}, got {', '.join(actions)}",
    )
    for head, values in actions.items():
        require(
            values.dtype == torch.int64 and tuple(values.shape) == (masks.rows,),
            f"head {head!r} must be int64 [{masks.rows}], got {values.dtype} {list(values.shape)}",
        )
    for row in range(masks.rows):
        _check_row(row, {head: int(values[row]) for head, values in actions.items()}, masks)


def _check_row(row: int, action: dict[str, int], masks: Masks) -> None:
    where = f"row {row}"
    require(_allowed(masks.op[row], action["op"]), f"{where}: op {action['op']} is not legal")
    op = LifecycleOp(action["op"])
    slots = masks.slot_by_op[row, op]
    require(_allowed(slots, action["slot"]), f"{where}: {op.name} at an illegal slot: {action}")
    for head in HEAD_NAMES:
        if head == "op":
            continue
        if head not in CAUSAL_HEADS[op]:
            wanted = int(slots.nonzero()[0]) if head == "slot" else int(PLACEHOLDERS[head])
            require(
                action[head] == wanted,
                f"{where}: {op.name} does not use {head!r}, which must be {wanted}: {action}",
            )
        elif head != "slot":
            by_slot = masks.blueprint_by_slot[row, action["slot"]]
            mask = by_slot if head == "blueprint" else getattr(masks, head)[row]
            require(_allowed(mask, action[head]), f"{where}: {head!r} is not legal: {action}")


def _allowed(mask: Tensor, index: int) -> bool:
    return 0 <= index < len(mask) and bool(mask[index])
