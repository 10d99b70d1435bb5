"""Random but valid signals and masks, for tests of whatever reads them."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from esper.kasmina.blueprints import BLUEPRINTS
from esper.leyline.actions import NUM_OPS
from esper.leyline.alpha import ALPHA_TARGETS, AlphaAlgorithm, AlphaMode
from esper.leyline.blueprints import BUILTIN_BLUEPRINTS, NOOP, TOPOLOGIES, Topology
from esper.leyline.rules import Masks, RulesConfig, RuleView, build_masks, is_in
from esper.leyline.signals import HISTORY, Signals
from esper.leyline.stages import BLENDED_STAGES, COOLDOWN_STAGES, LIVE_STAGES, SeedStage

BLUEPRINTS_BY_TOPOLOGY: dict[Topology, tuple[str, ...]] = {
    kind: tuple(
        name
        for index, name in enumerate(BUILTIN_BLUEPRINTS)
        if index != NOOP and kind in BLUEPRINTS.get(name).topologies
    )
    for kind in TOPOLOGIES
}
"""The built-in blueprints that random slots allow, by kind of activation."""

EMPTY = -1
_VECTOR = TOPOLOGIES.index("vector")
_OCCUPIED = (*LIVE_STAGES, SeedStage.FOSSILIZED, *COOLDOWN_STAGES)


class _Draws:
    """Short names for the draws below, all from one generator."""

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

    Every field takes values it can have, absent ones included; fields that depend on each other
    agree. About one call in four speaks of negative losses instead of accuracies.
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
        seed_params=seed_params,
        seed_flops=torch.where(fits_topology, 60 * seed_params, -1),
        twin_score=torch.where(draw.chance(0.5, rows), scores[:, 0], torch.nan),
    )
    return signals, masks


def _random_fits(rows: int, slots: int, draw: _Draws) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return which blueprints fit each slot [R, S, B], and one [R, S] that a seed may have.

    Then the slots' topologies [R, S], and which blueprints are for those [R, S, B].
    """
    table = torch.zeros(len(TOPOLOGIES), len(BUILTIN_BLUEPRINTS), dtype=torch.bool)
    for index, kind in enumerate(TOPOLOGIES):
        for name in BLUEPRINTS_BY_TOPOLOGY[kind]:
            table[index, BUILTIN_BLUEPRINTS.index(name)] = True
    topology = draw.integers(0, len(TOPOLOGIES), rows, slots)
    fits = table[topology]
    weight = draw.uniform(0.1, 1.0, rows, slots, len(BUILTIN_BLUEPRINTS))
    blueprint = (weight * fits).argmax(-1)
    # Now and then nothing fits, as when a limit of parameters is reached.
    return fits & ~draw.chance(0.05, rows, slots, 1), blueprint, topology, fits


def _random_alpha(stage: Tensor, draw: _Draws) -> tuple[Tensor, Tensor, Tensor]:
    """Return alpha, its target and its mode, as they can be in these stages."""
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
