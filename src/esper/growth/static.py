"""Compares a grown network with a static one of the same size, trained from scratch.

The static network has all seeds at full amplitude from the first step. Data, epochs, optimizer,
schedule, seed and the rule for the epoch to keep are those of the growing run.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from esper.growth.gardener import Gardener
from esper.growth.request import GrowRequest
from esper.kasmina.contribution import Estimate, standard_error
from esper.kasmina.garden import Garden
from esper.kasmina.slots.placement import place_nothing
from esper.kasmina.state import SlotState, empty_state
from esper.leyline.errors import UsageError
from esper.leyline.reasons import format_score, is_loss
from esper.leyline.records import DecisionRecord, RunSummary, depth_decision
from esper.leyline.stages import SeedStage

if TYPE_CHECKING:
    from esper.growth.grown import Grown
    from esper.growth.run import GrowthLoop


class StaticGardener(Gardener):
    """Measures a network without slots: there is nothing to decide."""

    def _decide(self, signals: Any, before_action: Any) -> DecisionRecord:
        return depth_decision("WAIT")


@dataclass(frozen=True, slots=True, kw_only=True)
class StaticComparison:
    """A grown network and a static one, measured on the same validation data."""

    model: nn.Module
    """The static network, trained."""
    grown: RunSummary
    """How the growing run ended."""
    static: RunSummary
    """How the static one did."""
    val_difference: Estimate
    """Validation score of the grown network minus the static one's, over the same samples."""
    compute: float
    """Training FLOPs of the growing run as a share of the static one's."""

    @property
    def better(self) -> str:
        """Which is better by more than two standard errors: 'grown', 'static' or 'neither'."""
        value, se = self.val_difference.value, self.val_difference.se
        if abs(value) > 2 * se:
            return "grown" if value > 0 else "static"
        return "neither"

    def __str__(self) -> str:
        """Return in one line which is better, by how much, and at what cost."""
        unit = "of loss" if is_loss(self.grown.val_score) else "points"
        size = Estimate(abs(self.val_difference.value), self.val_difference.se)
        verdict = {
            "grown": "The grown network is better",
            "static": "The static network is better",
            "neither": "Neither is clearly better",
        }[self.better]
        lead = ": the difference is" if self.better == "neither" else " by"
        line = (
            f"{verdict}{lead} {str(size).removeprefix('+')} {unit} on the validation data (grown "
            f"{format_score(self.grown.val_score)}, static {format_score(self.static.val_score)})"
        )
        if self.grown.test_score is not None and self.static.test_score is not None:
            line += (
                f"; on the test data grown {format_score(self.grown.test_score)}, static "
                f"{format_score(self.static.test_score)}"
            )
        sizes = dict.fromkeys((self.grown.parameters_after, self.static.parameters_after))
        counts = " and ".join(f"{size:,}" for size in sizes)
        return (
            f"{line}; {counts} parameters; growing took {100 * self.compute:.0f} % of the "
            "static network's training FLOPs."
        )

    def __repr__(self) -> str:
        """Return the same line."""
        return f"StaticComparison({self})"


def compare_static(
    grown: Grown, model: nn.Module | None = None, *, progress: bool | None = None
) -> StaticComparison:
    """Train a static network by the recipe of a growing run and compare both.

    Args:
        grown: the grown network, with the recipe of its run.
        model: another network to train instead; by default the grown architecture from scratch.
        progress: show every epoch on standard error; by default if that is a terminal.
    """
    from esper.growth.grow import progress_of
    from esper.growth.run import GrowthLoop

    ended = grown.summary
    is_own_twin = model is None and bool(ended.stacks) and ended.twin_val_score is not None
    request = _static_request(grown, model)
    loop = GrowthLoop(request)
    garden = loop.garden
    if is_own_twin:
        # The twin of a deepened network is the static one; nothing is trained again.
        assert grown.twin is not None
        garden = Garden(grown.twin, place_nothing(grown.twin, grown.example_input))
        static = replace(
            ended,
            val_score=ended.twin_val_score,  # type: ignore[arg-type]
            test_score=ended.twin_test_score,
            parameters_after=garden.count_parameters(),
            flops_after=garden.host_flops,
        )
    else:
        show = progress_of(ended.epochs, progress)
        for record in loop.epochs():
            show(record)
            if record.epoch >= ended.epochs:
                loop.stop(f"the grown network was trained for {ended.epochs} epochs")
        static = loop.finish().summary
    return StaticComparison(
        model=garden if garden.slot_names else garden.model,
        grown=ended,
        static=static,
        val_difference=paired_difference(loop, grown._garden, garden),
        compute=_compute(grown, static),
    )


def paired_difference(loop: GrowthLoop, one: Garden, other: Garden) -> Estimate:
    """Return the validation score of one network minus another's, over the same samples."""
    difference = loop.val_values(one) - loop.val_values(other)
    return Estimate(float(difference.mean()), float(standard_error(difference[None])))


def _static_request(grown: Grown, model: nn.Module | None) -> GrowRequest:
    """Return the request that trains the static network."""
    recipe = grown.recipe
    if hasattr(recipe.request.train, "__next__"):
        raise UsageError(
            "train was an iterator, which cannot be read again; to compare, call esper.grow with "
            "train=DataLoader(...) or a list"
        )
    garden, placed, planted = grown._garden, None, None
    if model is not None:
        if not isinstance(model, nn.Module):
            raise UsageError(
                f"compare_static takes a torch.nn.Module, got {type(model).__name__}; write "
                "grown.compare_static() for the architecture that grew"
            )
        request = replace(recipe.request, model=model, name=type(model).__name__)
        if isinstance(request.optimizer, Optimizer) or isinstance(request.scheduler, LRScheduler):
            raise UsageError(
                "the run's optimizer belongs to its own model; to compare with another model, call "
                "esper.grow with a function: optimizer=torch.optim.AdamW"
            )
    else:
        request = recipe.again()
        if not grown.summary.stacks:
            placed, planted = garden.placed, at_full_amplitude(garden.state)
            if not bool(planted.occupied.any()):
                raise UsageError(
                    "nothing grew, so there is nothing to compare; give compare_static(model) one"
                )
    device = next(garden.parameters()).device
    if placed is None:
        example = grown.example_input
        placed = place_nothing(request.model.to(device), example)
    return replace(
        request,
        placed=placed,
        planted=planted,
        controller="wait",
        device=device,
        config=request.config.replace(twin=False, deepen=None, patience=0),
    )


def at_full_amplitude(state: SlotState) -> SlotState:
    """Return the state in which all blended seeds are fossils at full amplitude."""
    grown = state.has_module & (state.alpha > 0)
    amplitude = torch.where(state.alpha_target > 0, state.alpha_target, state.alpha)
    return empty_state(*state.stage.shape).where(
        grown,
        stage=int(SeedStage.FOSSILIZED),
        blueprint=state.blueprint,
        doublings=state.doublings,
        algorithm=state.algorithm,
        ramp=state.ramp,
        tempo=state.tempo,
        blend_target=amplitude,
        alpha=amplitude,
        alpha_start=amplitude,
        alpha_target=amplitude,
    )


def _compute(grown: Grown, static: RunSummary) -> float:
    """Return the training FLOPs of a growing run as a share of the static network's."""
    ended = grown.summary
    if ended.training_flops and static.training_flops and ended.compute_budget:
        return ended.training_flops / static.training_flops
    if ended.training_flops and ended.static_flops:
        return ended.training_flops / ended.static_flops
    spent = sum(record.flops for record in grown.history)
    return spent / (len(grown.history) * static.flops_after)
