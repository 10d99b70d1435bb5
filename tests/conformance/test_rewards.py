"""Every built-in reward passes the battery, and the battery finds what is wrong with others."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
import torch

from esper.simic.rewards import REWARDS, Reward, RewardConfig, RewardStep, Transition, make_reward
from esper.testing import check_reward


@pytest.mark.parametrize("mode", REWARDS.names())
def test_built_in_rewards(mode: str) -> None:
    check_reward(lambda: make_reward(RewardConfig(mode=mode)), steps=20)


class Sound:
    """Pays the change of the score."""

    needs_twin = False

    def __init__(self) -> None:
        self.paid = torch.zeros(0)

    def reset(self, signals: Any) -> None:
        self.paid = torch.zeros(signals.rows)

    def step(self, transition: Transition) -> RewardStep:
        change = transition.after.val_score - transition.before.val_score + 0 * self.paid
        paid = torch.where(transition.active, change, 0.0)
        self.paid = self.paid + paid
        return RewardStep(terms={"gain": paid})

    def state_dict(self) -> dict[str, Any]:
        return {"paid": self.paid}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.paid = state["paid"]


class PaysTheDead(Sound):
    def step(self, transition: Transition) -> RewardStep:
        everyone = torch.ones_like(transition.active)
        return super().step(dataclasses.replace(transition, active=everyone))


class Forgets(Sound):
    def step(self, transition: Transition) -> RewardStep:
        paid = torch.where(transition.active, self.paid + 1, 0.0)
        self.paid = self.paid + 1
        return RewardStep(terms={"gain": paid})

    def state_dict(self) -> dict[str, Any]:
        return {"paid": torch.zeros_like(self.paid)}


class RemembersInPlace(Sound):
    def step(self, transition: Transition) -> RewardStep:
        self.paid.add_(1)
        change = transition.after.val_score - transition.before.val_score
        return RewardStep(terms={"gain": torch.where(transition.active, change, 0.0)})

    def state_dict(self) -> dict[str, Any]:
        return {"paid": self.paid}


class LooksAside(Sound):
    def step(self, transition: Transition) -> RewardStep:
        mean = transition.after.val_score.mean().expand(len(transition.active))
        return RewardStep(terms={"gain": torch.where(transition.active, mean, 0.0)})


class NotFinite(Sound):
    def step(self, transition: Transition) -> RewardStep:
        infinite = torch.where(transition.active, torch.inf, 0.0)
        return RewardStep(terms={"gain": infinite})


class Unreadable(Sound):
    def step(self, transition: Transition) -> RewardStep:
        return RewardStep(terms={"\x1b[31m": super().step(transition).total})


class Fickle(Sound):
    def step(self, transition: Transition) -> RewardStep:
        name = "joy" if int(transition.after.epoch[0]) % 2 else "sorrow"
        return RewardStep(terms={name: super().step(transition).total})


class Meddles(Sound):
    def step(self, transition: Transition) -> RewardStep:
        step = super().step(transition)
        transition.before.val_score.add_(1)
        return step


class Whole(Sound):
    def step(self, transition: Transition) -> RewardStep:
        return RewardStep(terms={"gain": super().step(transition).total.double()})


def test_a_sound_reward_passes() -> None:
    check_reward(Sound, steps=12)


@pytest.mark.parametrize(
    ("reward", "message"),
    [
        (PaysTheDead, "pays rows whose episode is over"),
        (Forgets, "after load_state_dict, step 6 gave another result"),
        (RemembersInPlace, "return copies"),
        (LooksAside, "among 4 rows"),
        (NotFinite, "is not finite"),
        (Unreadable, "must be printable text"),
        (Fickle, "give the same ones in every step"),
        (Meddles, "changed its transition"),
        (Whole, "must be float32"),
    ],
)
def test_what_is_wrong_is_said(reward: type[Reward], message: str) -> None:
    with pytest.raises(AssertionError, match=message):
        check_reward(reward, steps=12)
