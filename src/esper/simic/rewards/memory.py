"""What rewards remember between the steps of an episode, over rows and slots.

`Memory` is plain data and never changes in place. Signals speak of one epoch; how a seed has done
since it was germinated, what it has cost, and what is still to be paid are found here. Every field
is kept current by one update: a function from a `StepView` to the fields that changed, beside the
term that needs them. What happens to seeds is followed in every mode, by `follow_seeds`.
"""

from __future__ import annotations

import dataclasses
import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from esper.leyline.actions import LifecycleOp
from esper.leyline.errors import CheckpointError
from esper.leyline.rules import is_in
from esper.leyline.signals import Signals
from esper.leyline.stages import MODULE_STAGES

if TYPE_CHECKING:
    from esper.simic.rewards.view import StepView

NO_SLOT = -1
Changes = dict[str, Tensor]
"""New values of some fields of the memory."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Memory:
    """The memory of R rows with S slots over episodes of up to L epochs."""

    score_before: Tensor
    """float32 [R, S], score the germination was decided on; NaN where not seen."""
    score_first: Tensor
    """float32 [R, S], first score with the seed in place; NaN where there is none."""
    attribution_paid: Tensor
    """float32 [R, S], sum of what was attributed to the seed so far."""
    balance: Tensor
    """float32 [R, S], credit in escrow."""
    fossil_contributes: Tensor
    """bool [R, S], fossilized with a real improvement and no harm."""
    boosts: Tensor
    """float32 [R, S, S, L + 1], points a scaffold gave a beneficiary at an epoch; 0 is none."""
    pending: Tensor
    """float32 [R], hindsight credit to be paid at the next step."""
    acted: Tensor
    """bool [R], some op other than WAIT has taken effect."""
    first_slot: Tensor
    """int64 [R], slot of the seed whose first-germination bonus may be taken back, or -1."""
    gain: Tensor
    """float32 [R], gain over the twin as it was last paid for, in points."""
    recent_gains: Tensor
    """float32 [R, N], gains of the last epochs, newest last, NaN where not yet there."""
    germinated: Tensor
    """int64 [R], seeds germinated so far."""
    fossilized: Tensor
    """int64 [R], seeds fossilized so far."""
    removed: Tensor
    """int64 [R], seeds removed so far, by whomever."""

    @property
    def device(self) -> torch.device:
        """Where it lies."""
        return self.gain.device

    def to(self, device: torch.device | str) -> Memory:
        """Return the same memory on another device."""
        return Memory(**{name: value.to(device) for name, value in self.state_dict().items()})

    def state_dict(self) -> dict[str, Tensor]:
        """Return every field by name."""
        return {field.name: getattr(self, field.name) for field in dataclasses.fields(self)}

    @classmethod
    def from_state_dict(cls, state: dict[str, Any]) -> Memory:
        """Rebuild what `state_dict` returned."""
        names = {field.name for field in dataclasses.fields(cls)}
        if names != state.keys():
            raise CheckpointError(
                "this is no memory of a reward of this version: it "
                f"lacks {', '.join(sorted(names - state.keys())) or 'nothing'} and has "
                f"{', '.join(sorted(state.keys() - names)) or 'nothing'} beyond"
            )
        return cls(**state)


def start_memory(signals: Signals, *, final_epochs: int, keeps_boosts: bool) -> Memory:
    """Return the memory of episodes that start with these signals."""
    rows, slots, device = signals.rows, signals.num_slots, signals.stage.device
    epochs = int(signals.max_epochs.max()) + 1 if keeps_boosts else 0

    def zeros(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
        return torch.zeros((rows, *shape), dtype=dtype, device=device)

    present = is_in(signals.stage, MODULE_STAGES)
    score = signals.val_score[:, None].expand(rows, slots)
    recent = torch.full((rows, final_epochs), math.nan, device=device)
    recent[:, -1] = 0.0
    return Memory(
        score_before=torch.full((rows, slots), math.nan, device=device),
        score_first=torch.where(present, score, math.nan),
        attribution_paid=zeros(slots),
        balance=zeros(slots),
        fossil_contributes=zeros(slots, dtype=torch.bool),
        boosts=zeros(slots, slots, epochs),
        pending=zeros(),
        acted=zeros(dtype=torch.bool),
        first_slot=torch.full((rows,), NO_SLOT, dtype=torch.int64, device=device),
        gain=zeros(),
        recent_gains=recent,
        germinated=zeros(dtype=torch.int64),
        fossilized=zeros(dtype=torch.int64),
        removed=zeros(dtype=torch.int64),
    )


def follow_seeds(view: StepView) -> Changes:
    """Update what every mode knows about the seeds: scores at their start, counts, deeds."""
    memory, before, after = view.memory, view.before, view.after
    new = view.has_module & ~view.had_module
    kept = view.has_module & view.had_module
    first = torch.where(new, after.val_score[:, None], memory.score_first)
    start = torch.where(new, before.val_score[:, None], memory.score_before)
    fossilize = view.did(LifecycleOp.FOSSILIZE)
    # The contribution must be there and not negative: a fossil that harms is no success.
    least = view.config.terminal.min_improvement
    contributes = fossilize & (view.improvement >= least) & (view.contribution >= 0)
    removed = view.had_module & ~view.has_module
    return {
        "score_before": torch.where(view.has_module, start, math.nan),
        "score_first": torch.where(view.has_module, first, math.nan),
        "fossil_contributes": (memory.fossil_contributes & kept) | contributes,
        "acted": memory.acted | (view.op != int(LifecycleOp.WAIT)),
        "germinated": memory.germinated + view.did(LifecycleOp.GERMINATE).any(1),
        "fossilized": memory.fossilized + fossilize.any(1),
        "removed": memory.removed + removed.sum(1),
    }
