"""The life of a seed as pure functions over [R, S] tensors: apply, tick, record.

Order of a step: `apply_command` (one operation per row) -> `tick` (amplitudes, cooldowns) ->
train one epoch -> `record_epoch`. Nothing here touches a module: owners of modules build and free
them to match the new state.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import IntEnum
from functools import cached_property, partial
from typing import Any, Literal

import torch
from torch import Tensor

from esper.kasmina.costs import Limits, standing_copies
from esper.kasmina.state import (
    OF_THE_MODULE,
    EarnedGates,
    GateConfig,
    SlotState,
    blending_gate,
    fossilize_gate,
    germinate_gate,
    holding_gate,
    training_gate,
)
from esper.leyline.actions import Command, LifecycleOp
from esper.leyline.config import Config, option
from esper.leyline.controller import shortened
from esper.leyline.errors import EsperError
from esper.leyline.rules import Masks, Refusal, RulesConfig, RuleView, allows, refusals
from esper.leyline.slots import Immediate
from esper.leyline.stages import STEEPNESS, AlphaAlgorithm, AlphaCurve, AlphaMode, SeedStage


def ramp_fraction(progress: Tensor, curve: Tensor) -> Tensor:
    """Return how far along its way a ramp is, in [0, 1], after `progress` of its ticks."""
    steepness = torch.tensor(STEEPNESS, dtype=progress.dtype, device=progress.device)[curve]
    # A positive stand-in keeps the unused branch of `where` finite.
    k = torch.where(steepness > 0, steepness, torch.ones_like(steepness))
    low, high = torch.sigmoid(-k / 2), torch.sigmoid(k / 2)
    sigmoid = (torch.sigmoid(k * (progress - 0.5)) - low) / (high - low)
    cosine = 0.5 * (1 - torch.cos(torch.pi * progress))
    smooth = torch.where(curve == int(AlphaCurve.COSINE), cosine, progress)
    return torch.where(steepness > 0, sigmoid, smooth)


def retarget(
    state: SlotState, mask: Tensor, target: Tensor, steps: Tensor, curve: Tensor
) -> SlotState:
    """Start a ramp to `target` where `mask`; with zero steps or no distance it is there at once."""
    jump = (steps <= 0) | (target == state.alpha)
    up = target > state.alpha
    mode = torch.where(up, int(AlphaMode.UP), int(AlphaMode.DOWN))
    mode = torch.where(jump, int(AlphaMode.HOLD), mode)
    state = state.where(
        mask,
        alpha_start=state.alpha,
        alpha_target=target,
        alpha_mode=mode,
        alpha_curve=curve,
        steps_total=torch.where(jump, torch.zeros_like(steps), steps),
        steps_done=0,
    )
    return state.where(mask & jump, alpha=target)


def tick_amplitude(state: SlotState, mask: Tensor) -> tuple[SlotState, Tensor]:
    """Advance running ramps by one tick where `mask`; also return where a target was reached."""
    moving = mask & (state.alpha_mode != int(AlphaMode.HOLD))
    done = state.steps_done + 1
    reached = moving & (done >= state.steps_total)
    progress = done.to(state.alpha.dtype) / state.steps_total.clamp(min=1)
    distance = state.alpha_target - state.alpha_start
    alpha = state.alpha_start + distance * ramp_fraction(progress.clamp(max=1.0), state.alpha_curve)
    # Rounding must not let a ramp leave its interval or turn back.
    alpha = torch.where(
        distance > 0, torch.maximum(alpha, state.alpha), torch.minimum(alpha, state.alpha)
    )
    alpha = torch.where(reached, state.alpha_target, alpha).clamp(0.0, 1.0)
    state = state.where(moving, alpha=alpha, steps_done=done)
    return state.where(reached, alpha_mode=int(AlphaMode.HOLD)), reached


def velocity(state: SlotState) -> Tensor:
    """Return the mean change per tick of the running ramp, 0 in HOLD."""
    moving = (state.alpha_mode != int(AlphaMode.HOLD)) & (state.steps_total > 0)
    rate = (state.alpha_target - state.alpha_start) / state.steps_total.clamp(min=1)
    return torch.where(moving, rate, torch.zeros_like(rate))


def time_to_target(state: SlotState) -> Tensor:
    """Return the ticks left of the running ramp, 0 in HOLD."""
    left = (state.steps_total - state.steps_done).clamp(min=0)
    return torch.where(state.alpha_mode != int(AlphaMode.HOLD), left, torch.zeros_like(left))


@dataclass(frozen=True, kw_only=True)
class LifecycleConfig(Config):
    """The constants of a seed's life."""

    immediate: Immediate = option(
        "auto",
        "Which seeds are at full amplitude from the first step, and learn from the loss itself: "
        "'auto', copies of blocks, and in frozen parts of a host whatever changes nothing at its "
        "start (adapters); 'all' of the latter in any host; 'none': every seed trains alone first "
        "and is blended in.",
    )

    gates: GateConfig = option(GateConfig, "Thresholds of the gates.")
    rules: RulesConfig = option(RulesConfig, "Constants of legality.")
    embargo_ticks: int = option(5, "Ticks a slot stays embargoed after a prune.", minimum=1)
    auto_advance: bool = option(
        False, "Pass G1, G2 and G3 without being told: ADVANCE is then no operation."
    )
    auto_training: bool = option(False, "Pass G1 without being told.")
    auto_blending: bool = option(False, "Pass G2 without being told.")
    auto_holding: bool = option(False, "Pass G3 without being told.")

    @property
    def inert_epochs(self) -> int:
        """Epochs a new seed lives through before it is first blended in."""
        # Germinated, unless it trains at once; then training until its gate opens.
        return self.gates.min_training_epochs + (0 if self.auto_training else 1)

    def fitted(self, horizon: int) -> LifecycleConfig:
        """Return the same life with its waits shortened in proportion to a short run."""
        gates = self.gates.replace(
            min_training_epochs=shortened(self.gates.min_training_epochs, horizon),
            min_blending_epochs=shortened(self.gates.min_blending_epochs, horizon),
        )
        return self.replace(gates=gates, embargo_ticks=shortened(self.embargo_ticks, horizon))

    @property
    def effective_rules(self) -> RulesConfig:
        """Return the rules; ADVANCE is off when every gate forwards itself."""
        return self.rules.replace(advance_allowed=False) if all(self.forwards) else self.rules

    @cached_property
    def earning(self) -> LifecycleConfig:
        """Return the same with gates that do not fossilize a seed without effect."""
        return self.replace(gates=EarnedGates.like(self.gates))

    @property
    def forwards(self) -> tuple[bool, bool, bool]:
        """Whether G1, G2 and G3 are passed automatically."""
        own = (self.auto_training, self.auto_blending, self.auto_holding)
        return (True, True, True) if self.auto_advance else own


TrainingMode = Literal["straight_through", "shadow"]


@dataclass(frozen=True, kw_only=True)
class GardenConfig(Limits):
    """How seeds live in a garden, and how far it may grow."""

    lifecycle: LifecycleConfig = option(LifecycleConfig, "The life of a seed.")
    training_mode: TrainingMode = option(
        "straight_through", "How a seed in TRAINING learns while the host is left alone."
    )
    seed: int = option(0, "Seed of the initial weights of seeds.", minimum=0)

    def limited(
        self,
        *,
        max_growth: float | str | None = None,
        max_seeds: int | None = None,
        max_parameters: int | None = None,
        max_added_flops: int | None = None,
    ) -> GardenConfig:
        """Return the same with these limits of growth; None leaves a limit as it is.

        `max_growth` replaces earlier limits on parameters and operations.
        """
        if max_growth is not None:
            max_parameters = max_parameters or 0
            max_added_flops = max_added_flops or 0
        limits: dict[str, Any] = {
            "max_growth": max_growth,
            "max_parameters": max_parameters,
            "max_added_flops": max_added_flops,
        }
        if max_seeds is not None:
            rules = self.lifecycle.rules.replace(max_seeds=max_seeds)
            limits["lifecycle"] = self.lifecycle.replace(rules=rules)
        return self.replace(**{name: value for name, value in limits.items() if value is not None})


class Outcome(IntEnum):
    """How an operation ended."""

    DONE = 0
    GATE_FAILED = 1
    ILLEGAL = 2


@dataclass(frozen=True, slots=True)
class Applied:
    """The result of one operation per row; tensors [R]."""

    outcome: Tensor
    """int64, an `Outcome`."""
    refusal: Tensor
    """int64, a `Refusal`; NONE unless illegal."""

    @property
    def took_effect(self) -> Tensor:
        """Return bool [R]: whether the operation took effect."""
        return self.outcome == int(Outcome.DONE)


def rule_view(state: SlotState, enabled: Tensor, fits: Tensor) -> RuleView:
    """Return what legality depends on."""
    return RuleView(
        stage=state.stage,
        alpha_mode=state.alpha_mode,
        age=state.age,
        enabled=enabled,
        copies=standing_copies(state),
        fits=fits,
    )


def check_command(
    state: SlotState, command: Command, enabled: Tensor, fits: Tensor, config: LifecycleConfig
) -> Tensor:
    """Return int64 [R]: why each row's command is illegal, 0 where it is legal."""
    rows = torch.arange(state.rows, device=state.stage.device)
    known_slot = (command.slot >= 0) & (command.slot < state.num_slots)
    slot = command.slot.clamp(0, state.num_slots - 1)
    view = rule_view(state, enabled, fits)
    codes = refusals(view, config.effective_rules)[rows, command.op, slot]
    # WAIT addresses no slot: it is legal whatever the slot head says.
    wait = command.op == int(LifecycleOp.WAIT)
    codes = torch.where(wait, torch.zeros_like(codes), codes)

    germinate = command.op == int(LifecycleOp.GERMINATE)
    retargets = command.op == int(LifecycleOp.SET_ALPHA_TARGET)
    known_blueprint = (command.blueprint >= 0) & (command.blueprint < fits.shape[-1])
    blueprint = command.blueprint.clamp(0, fits.shape[-1] - 1)
    unfit = germinate & (~known_blueprint | ~fits[rows, slot, blueprint])
    bad = (germinate | retargets) & ~((command.target > 0) & (command.target <= 1))
    ramps = retargets | (command.op == int(LifecycleOp.PRUNE))
    bad = bad | (germinate & (command.tempo < 1)) | (ramps & (command.speed < 0))
    bad = bad | (~known_slot & ~wait)
    taken = view.copies[rows, slot] > 0
    misfit = torch.where(taken, int(Refusal.SLOT_OCCUPIED), int(Refusal.BLUEPRINT_DOES_NOT_FIT))
    codes = torch.where((codes == 0) & unfit, misfit, codes)
    return torch.where((codes == 0) & bad, int(Refusal.BAD_ARGUMENT), codes)


def refuse_disagreement(masks: Masks, command: Command, applied: Applied) -> None:
    """Raise if an operation was refused although the masks allowed it.

    Both follow from one function, so this never happens; `ESPER_DEBUG=1` checks it at every step.
    """
    allowed = allows(masks, command.op, command.slot, command.blueprint)
    wrong = allowed & (applied.refusal != 0) & (applied.refusal != int(Refusal.BAD_ARGUMENT))
    if bool(wrong.any()):
        row = int(wrong.nonzero()[0])
        op, slot = LifecycleOp(int(command.op[row])), int(command.slot[row])
        why = Refusal(int(applied.refusal[row])).text
        raise EsperError(
            f"row {row}: {op.name} at slot {slot} was refused although its mask allowed it: {why}; "
            "the masks and the lifecycle disagree, please report this"
        )


def apply_command(
    state: SlotState,
    command: Command,
    *,
    enabled: Tensor,
    fits: Tensor,
    config: LifecycleConfig,
    immediate: Tensor | None = None,
) -> tuple[SlotState, Applied]:
    """Carry out one operation per row; an illegal one or a failed gate changes nothing.

    Args:
        state: the slots of all rows.
        command: one operation per row.
        enabled: bool [R, S], slots in use.
        fits: bool [R, S, B], blueprints that may be germinated.
        config: the constants of a seed's life.
        immediate: bool [R], where a germinated seed has its full amplitude at once.
    """
    refusal = check_command(state, command, enabled, fits, config)
    slots = torch.arange(state.num_slots, device=state.stage.device)
    here = (command.slot[:, None] == slots) & (refusal == 0)[:, None]

    def asked(op: LifecycleOp) -> Tensor:
        return here & (command.op == int(op))[:, None]

    gates = config.gates
    germinate = asked(LifecycleOp.GERMINATE) & germinate_gate(command.blueprint)[:, None]
    advance = asked(LifecycleOp.ADVANCE)
    to_training = advance & training_gate(state)
    to_blending = advance & blending_gate(state, gates)
    to_holding = advance & holding_gate(state, gates)
    fossilize = asked(LifecycleOp.FOSSILIZE) & fossilize_gate(state, gates)
    set_target = asked(LifecycleOp.SET_ALPHA_TARGET)
    prune = asked(LifecycleOp.PRUNE)

    took_effect = (
        germinate | to_training | to_blending | to_holding | fossilize | set_target | prune
    ).any(1) | ((command.op == int(LifecycleOp.WAIT)) & (refusal == 0))
    outcome = torch.where(took_effect, int(Outcome.DONE), int(Outcome.GATE_FAILED))
    outcome = torch.where(refusal != 0, int(Outcome.ILLEGAL), outcome)

    doubled = germinate & (standing_copies(state) > 0)
    doublings = state.doublings + 1
    state = _germinate(state, germinate, command)
    # What is awake stays at full amplitude, and its copies join it there.
    state = state.where(doubled, doublings=doublings, blend_target=1.0)
    at_once = doubled if immediate is None else doubled | (germinate & immediate[:, None])
    state = _enter_at_once(state, at_once)
    state = enter_stage(state, to_training, SeedStage.TRAINING)
    state = _start_blending(state, to_blending)
    state = _hold(state, to_holding)
    state = enter_stage(state, fossilize, SeedStage.FOSSILIZED)
    state = _set_target(state, set_target, command)
    state = _prune(state, prune, command)
    return state, Applied(outcome=outcome, refusal=refusal)


def tick(state: SlotState, config: LifecycleConfig) -> SlotState:
    """End of a decision: forward automatic gates, move amplitudes, count cooldowns."""
    # Cooldowns first: a slot pruned in this tick starts its cooldown in the next.
    pruned = state.stage == int(SeedStage.PRUNED)
    embargoed = state.stage == int(SeedStage.EMBARGOED)
    resetting = state.stage == int(SeedStage.RESETTING)
    state = state.clear(resetting)
    state = state.where(embargoed, cooldown=state.cooldown + 1)
    over = embargoed & (state.cooldown >= config.embargo_ticks)
    state = enter_stage(state, over, SeedStage.RESETTING)
    state = enter_stage(state, pruned, SeedStage.EMBARGOED)

    # Automatic gates come before the ramps: a seed that starts to blend moves in the same tick.
    training, blending, holding = config.forwards
    if training:
        state = enter_stage(state, training_gate(state), SeedStage.TRAINING)
    if blending:
        state = _start_blending(state, blending_gate(state, config.gates))
    state, reached = tick_amplitude(state, state.stage == int(SeedStage.BLENDING))
    state = _remove(state, reached & (state.alpha_target <= 0))
    if holding:
        state = _hold(state, holding_gate(state, config.gates))
    return state


def record_epoch(state: SlotState, score: Tensor) -> SlotState:
    """After validation: count the epoch for every seed with a module. `score` is float64 [R]."""
    present = state.has_module
    current = score[:, None].expand_as(state.score_now).to(state.score_now.dtype)
    first = present & torch.isnan(state.score_initial)
    state = state.where(first, score_initial=current)
    state = state.where(present & torch.isnan(state.score_stage), score_stage=current)
    return state.where(
        present,
        score_now=current,
        age=state.age + 1,
        learned=state.learned + (state.stage != int(SeedStage.GERMINATED)),
        epochs_in_stage=state.epochs_in_stage + 1,
        counterfactual_age=torch.where(
            state.counterfactual_age >= 0, state.counterfactual_age + 1, state.counterfactual_age
        ),
        grad_health_prev=state.grad_health,
    )


def remove_seeds(state: SlotState, mask: Tensor) -> SlotState:
    """Prune the seeds at `mask` at once, legal or not (rollbacks use this)."""
    return _remove(state, mask & state.has_module)


def enter_stage(state: SlotState, mask: Tensor, stage: SeedStage) -> SlotState:
    """Change the stage where `mask`, remembering the old one and restarting its counters."""
    return state.where(
        mask,
        stage=int(stage),
        previous_stage=state.stage,
        previous_epochs=state.epochs_in_stage,
        epochs_in_stage=0,
        score_stage=state.score_now,
    )


def _spread(mask: Tensor, value: Tensor) -> Tensor:
    """Expand a value per row [R] to every slot of the row."""
    return value[:, None].expand_as(mask)


def _germinate(state: SlotState, mask: Tensor, command: Command) -> SlotState:
    spread = partial(_spread, mask)
    state = state.clear(mask)
    state = enter_stage(state, mask, SeedStage.GERMINATED)
    return state.where(
        mask,
        blueprint=spread(command.blueprint),
        algorithm=spread(command.algorithm),
        ramp=spread(command.ramp),
        tempo=spread(command.tempo),
        blend_target=spread(command.target),
    )


def _enter_at_once(state: SlotState, mask: Tensor) -> SlotState:
    """Let new seeds pass G1 and G2 when they germinate, at full amplitude.

    There is no ramp, and the style is ADD. From here on they live like any blended seed.
    """
    state = enter_stage(state, mask, SeedStage.TRAINING)
    state = enter_stage(state, mask, SeedStage.BLENDING)
    state = state.where(mask, algorithm=int(AlphaAlgorithm.ADD))
    at_once = torch.zeros_like(state.tempo)
    return retarget(state, mask, state.blend_target, at_once, state.ramp)


def _start_blending(state: SlotState, mask: Tensor) -> SlotState:
    state = enter_stage(state, mask, SeedStage.BLENDING)
    return retarget(state, mask, state.blend_target, state.tempo, state.ramp)


def _hold(state: SlotState, mask: Tensor) -> SlotState:
    state = enter_stage(state, mask, SeedStage.HOLDING)
    return state.where(mask, alpha=1.0)


def _set_target(state: SlotState, mask: Tensor, command: Command) -> SlotState:
    spread = partial(_spread, mask)
    falls_back = mask & (state.stage == int(SeedStage.HOLDING)) & (spread(command.target) < 1)
    state = enter_stage(state, falls_back, SeedStage.BLENDING)
    state = state.where(mask, algorithm=spread(command.algorithm))
    return retarget(
        state, mask, spread(command.target), spread(command.speed), spread(command.curve)
    )


def _prune(state: SlotState, mask: Tensor, command: Command) -> SlotState:
    spread = partial(_spread, mask)
    at_once = mask & ((spread(command.speed) == 0) | (state.alpha <= 0))
    fade = mask & ~at_once
    state = enter_stage(state, fade & (state.stage == int(SeedStage.HOLDING)), SeedStage.BLENDING)
    nothing = torch.zeros_like(state.alpha)
    state = retarget(state, fade, nothing, spread(command.speed), spread(command.curve))
    return _remove(state, at_once)


def _remove(state: SlotState, mask: Tensor) -> SlotState:
    """Free the module; the record stays for the cooldown, without measurements."""
    return enter_stage(state, mask, SeedStage.PRUNED).clear(mask, OF_THE_MODULE)
