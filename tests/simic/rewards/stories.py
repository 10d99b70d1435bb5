"""Stories of one row, told op by op: what is done, what is measured, and what it pays."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from esper.kasmina.lifecycle import LifecycleConfig
from esper.kasmina.state import GateConfig
from esper.leyline.actions import LifecycleOp, placeholder_actions
from esper.leyline.signals import Signals
from esper.leyline.slots import NUM_BLUEPRINTS
from esper.leyline.stages import SPEED_TICKS, TEMPO_EPOCHS
from esper.simic.rewards import RewardConfig, RewardStep, Transition, make_reward
from esper.testing import ImaginedRows

QUICK = LifecycleConfig(gates=GateConfig(min_training_epochs=0))
"""Seeds may blend as soon as they train."""

FADE = SPEED_TICKS.index(8)
AT_ONCE = SPEED_TICKS.index(0)


class Story:
    """One row; its measurements stay as they are until the story changes them."""

    def __init__(
        self,
        config: RewardConfig,
        *,
        slots: int = 2,
        horizon: int = 60,
        score: float = 50.0,
        seed_params: Tensor | None = None,
        seed_flops: Tensor | None = None,
        lifecycle: LifecycleConfig = QUICK,
    ) -> None:
        self.config = config
        self.world = ImaginedRows(
            1,
            slots,
            horizon,
            seed_params=seed_params,
            seed_flops=seed_flops,
            lifecycle=lifecycle,
        )
        self.reward = make_reward(config)
        self.score = self.twin = score
        self.contribution = torch.zeros(1, slots)
        self.interaction = torch.zeros(1, slots, slots)
        self.signals: Signals = self.world.reset(score)
        self.reward.reset(self.signals)
        self.steps: list[RewardStep] = []
        self.active = True

    def wait(self, times: int = 1) -> RewardStep:
        for _ in range(times):
            self.do(LifecycleOp.WAIT)
        return self.steps[-1]

    def germinate(self, slot: int = 0, blueprint: int = 1, tempo: int = 3) -> RewardStep:
        index = TEMPO_EPOCHS.index(tempo)
        return self.do(LifecycleOp.GERMINATE, slot=slot, blueprint=blueprint, tempo=index)

    def advance(self, slot: int = 0) -> RewardStep:
        return self.do(LifecycleOp.ADVANCE, slot=slot)

    def prune(self, slot: int = 0, speed: int = AT_ONCE) -> RewardStep:
        return self.do(LifecycleOp.PRUNE, slot=slot, alpha_speed=speed)

    def set_alpha(self, target: int, slot: int = 0, speed: int = AT_ONCE) -> RewardStep:
        return self.do(
            LifecycleOp.SET_ALPHA_TARGET, slot=slot, alpha_target=target, alpha_speed=speed
        )

    def fossilize(self, slot: int = 0) -> RewardStep:
        return self.do(LifecycleOp.FOSSILIZE, slot=slot)

    def blend(self, slot: int = 0) -> None:
        """From GERMINATED to the full amplitude."""
        self.advance(slot)
        self.advance(slot)
        self.wait(2)
        assert float(self.signals.alpha[0, slot]) == 1.0

    def begin_blending(self, slot: int = 0) -> RewardStep:
        """From an empty slot to the first epoch in which its seed takes part."""
        self.germinate(slot)
        self.advance(slot)
        step = self.advance(slot)
        assert 0.0 < float(self.signals.alpha[0, slot]) < 1.0
        return step

    def hold(self, slot: int = 0, blueprint: int = 1) -> None:
        """From an empty slot to HOLDING."""
        self.germinate(slot, blueprint)
        self.blend(slot)
        self.advance(slot)

    def do(self, op: LifecycleOp, *, rolled_back: bool = False, **heads: int) -> RewardStep:
        actions = placeholder_actions(1)
        actions["op"] = torch.tensor([int(op)])
        for head, value in heads.items():
            actions[head] = torch.tensor([value])
        before = self.signals
        after = self.world.step(
            actions,
            score=self.score,
            contribution=self.contribution,
            interaction=self.interaction,
            rolled_back=torch.tensor([rolled_back]),
        )
        transition = Transition(
            before=before,
            actions=actions,
            after=after,
            twin_before=torch.tensor([self.twin]),
            twin_after=torch.tensor([self.twin]),
            is_last=after.epoch == after.max_epochs,
            active=torch.tensor([self.active]),
        )
        self.active = self.active and not bool(transition.ended)
        self.signals = after
        self.steps.append(self.reward.step(transition))
        return self.steps[-1]

    def finish(self) -> RewardStep:
        """Wait until the horizon."""
        while self.active:
            self.wait()
        return self.steps[-1]

    def sum(self, *names: str, gamma: float = 1.0) -> float:
        """The discounted sum of all steps, of some terms or of all."""
        total = 0.0
        for index, step in enumerate(self.steps):
            values = [step.terms[name] for name in names] if names else [step.total]
            total += gamma**index * sum(float(value) for value in values)
        return total


def every_seed(size: int) -> Tensor:
    """Parameters or operations of seeds, alike for every blueprint."""
    return torch.full((NUM_BLUEPRINTS,), size)


def term(step: RewardStep, name: str) -> float:
    return float(step.terms[name])


def detail(step: RewardStep, name: str) -> float:
    return float(step.details[name])


def close(one: float, other: float, within: float = 1e-5) -> bool:
    return math.isclose(one, other, rel_tol=within, abs_tol=within)
