"""SlotTable: the one owner of what lives in the slots of rows, and of what may."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch
from torch import Tensor

from esper.kasmina.contribution import Measured, record_contributions
from esper.kasmina.costs import RowCosts, fitting_blueprints, slot_flops
from esper.kasmina.governor import GradientSample, record_gradients
from esper.kasmina.lifecycle import (
    Applied,
    LifecycleConfig,
    apply_command,
    record_epoch,
    refuse_disagreement,
    remove_seeds,
    rule_view,
    tick,
)
from esper.kasmina.state import SlotState, empty_state
from esper.leyline.actions import Command
from esper.leyline.rules import Masks, RuleView, build_masks
from esper.utils.process import is_debugging


class SlotTable:
    """The slots of R rows.

    Args:
        costs: what hosts and seeds cost, and how far each row may grow.
        lifecycle: the constants of a seed's life.
        immediate: bool [S, B], which seeds are at their amplitude at once; by default none.
    """

    def __init__(
        self, costs: RowCosts, lifecycle: LifecycleConfig, immediate: Tensor | None = None
    ) -> None:
        """Start with nothing grown."""
        rows, slots = costs.seeds.slot_channels.shape
        device = costs.host_params.device
        self.costs = costs
        self.lifecycle = lifecycle
        nothing = torch.zeros(costs.seeds.seed_params.shape[1:], dtype=torch.bool)
        self.immediate = (nothing if immediate is None else immediate).to(device)
        self.state: SlotState = empty_state(rows, slots, device)
        """What lives in the slots, tensors [R, S]."""
        self.enabled = torch.ones((rows, slots), dtype=torch.bool, device=device)
        """Bool [R, S], the slots in use."""

    @property
    def device(self) -> torch.device:
        """Where everything is kept."""
        return self.enabled.device

    def flops(self) -> Tensor:
        """Return int64 [R, S]: operations per sample of every seed and its gate."""
        return slot_flops(self.state, self.costs.seeds)

    # -- what is legal -----------------------------------------------------------------------------

    def fits(self) -> Tensor:
        """Return bool [R, S, B]: the blueprints that may be germinated now, within the limits."""
        return fitting_blueprints(self.state, self.costs)

    def view(self) -> RuleView:
        """Return what legality depends on."""
        return rule_view(self.state, self.enabled, self.fits())

    def masks(self) -> Masks:
        """Return what is legal now."""
        return build_masks(self.view(), self.lifecycle.effective_rules)

    # -- what changes ------------------------------------------------------------------------------

    def apply(self, command: Command, *, immediate: bool | None = None) -> Applied:
        """Carry out one operation per row.

        Args:
            command: the operations.
            immediate: whether seeds that are germinated are at their amplitude at once; by default
                as the table says.
        """
        slots, blueprints = self.immediate.shape
        at_once = self.immediate[
            command.slot.clamp(0, slots - 1), command.blueprint.clamp(0, blueprints - 1)
        ]
        state, applied = apply_command(
            self.state,
            command,
            enabled=self.enabled,
            fits=self.fits(),
            config=self.lifecycle,
            immediate=at_once if immediate is None else torch.full_like(at_once, immediate),
        )
        if is_debugging():
            refuse_disagreement(self.masks(), command, applied)
        self.state = state
        return applied

    def tick(self) -> None:
        """End the decision: move amplitudes, count cooldowns, forward automatic gates."""
        self.state = tick(self.state, self.lifecycle)

    def record_epoch(self, score: Tensor, gradients: GradientSample, sampled: Tensor) -> None:
        """Count an epoch with its score, float64 [R], and gradients where they were `sampled`."""
        self.state = record_gradients(record_epoch(self.state, score), sampled, gradients)

    def record_contributions(self, measured: Measured, members: Tensor, due: Tensor) -> None:
        """Take over what ablations showed.

        Args:
            measured: what was found.
            members: bool [R, S], the seeds that took part.
            due: bool [R], the rows that were measured.
        """
        # Also without members: what two seeds once gained together is not true for ever.
        interaction = torch.where(due[:, None, None], measured.interaction, self.state.interaction)
        self.state = record_contributions(
            self.state, members, measured.worth, measured.error, interaction
        )

    def remove(self, which: Tensor) -> None:
        """Prune at once whatever lives under `which`, bool [R, S], legal or not."""
        self.state = remove_seeds(self.state, which)

    def resize(self, sizes: Tensor) -> None:
        """Take over how many parameters there are in every slot, int64 [R, S]."""
        self.state = self.state.where(torch.ones_like(self.enabled), params=sizes)

    @contextmanager
    def undone_by_error(self, build: Callable[[], object]) -> Iterator[None]:
        """Take everything back that happens within the block, if it fails.

        A seed that cannot be built was never germinated. `build` makes modules agree with the
        state again.
        """
        before = self.state
        try:
            yield
        except BaseException:
            self.state = before
            build()
            raise
