"""Policies that are shown less than they have learned with."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from esper.leyline.errors import UsageError
from esper.leyline.signals import Signals
from esper.tamiyo.controllers import make_controller
from esper.tamiyo.controllers.ablated import (
    AblatedController,
    FrozenCurves,
    OnlyCurves,
    ShuffledCurves,
    WithoutCurves,
)
from esper.tamiyo.controllers.learned import LearnedController
from esper.tamiyo.controllers.policy_file import Policy, new_policy, save_policy
from esper.tamiyo.networks.config import PolicyConfig
from esper.testing.controllers import check_controller, random_signals
from tests.tamiyo.controllers.scenes import CONTEXT

KINDS = [WithoutCurves, OnlyCurves, FrozenCurves]


@pytest.fixture(scope="module", params=["documents", "travelling", "ratios"])
def policy(request: pytest.FixtureRequest) -> Policy:
    config = PolicyConfig(
        lstm_hidden_dim=16, layout=request.param, policy_gain=1.0, initial_op_bias=(0.0,) * 6
    )
    found = new_policy(config, seed=5)
    seen = [
        found.layout.observe(random_signals(8, 3, torch.Generator().manual_seed(seed))[0])[0]
        for seed in range(5)
    ]
    found.normalizer.update(torch.cat(seen))
    return found


def with_other_curves(signals: Signals) -> Signals:
    """Return the same rows after a run that went otherwise."""
    return replace(
        signals,
        val_loss=signals.val_loss / 2,
        best_loss=signals.best_loss / 2,
        train_loss=signals.train_loss / 3,
        loss_history=signals.loss_history / 2,
        score_history=signals.score_history / 2,
        val_score=signals.val_score / 2,
        best_score=signals.best_score * 0.9,
        plateau_epochs=signals.plateau_epochs + 1,
        stabilized=~signals.stabilized,
        contribution=signals.contribution - 1,
        contribution_velocity=signals.contribution_velocity + 1,
        grad_norm=signals.grad_norm * 2,
        grad_health=signals.grad_health / 2,
        grad_health_prev=signals.grad_health_prev / 2,
        vanishing=~signals.vanishing & signals.occupied,
        exploding=~signals.exploding & signals.occupied,
        interaction=signals.interaction + 1 - torch.eye(3),
    )


def with_another_task(signals: Signals) -> Signals:
    """Return the same curves on other networks at another time."""
    return replace(
        signals,
        epoch=signals.epoch + 1,
        compute_spent=signals.compute_spent // 2,
        rate_factor=signals.rate_factor / 2,
        slot_params=signals.slot_params + 9,
        alpha=signals.alpha / 2,
    )


def shown(controller: LearnedController, *signals: Signals) -> torch.Tensor:
    """Return what the policy is shown at the last of these decisions."""
    rows, _ = random_signals(8, 3, torch.Generator().manual_seed(0))
    controller.reset(rows.rows, "cpu")
    _, masks = random_signals(8, 3, torch.Generator().manual_seed(0))
    for each in signals:
        controller.act(each, masks)
    assert controller._last is not None
    return controller._last.observation


@pytest.mark.parametrize("kind", KINDS)
def test_battery(policy: Policy, kind: type[AblatedController]) -> None:
    check_controller(lambda context: kind(policy, context), steps=12)


def test_each_sees_what_its_name_says(policy: Policy) -> None:
    own = random_signals(8, 3, torch.Generator().manual_seed(0))[0]
    curves, task = with_other_curves(own), with_another_task(own)
    plain = LearnedController(policy, CONTEXT, greedy=True)

    def differ(make: Callable[[], LearnedController], *runs: tuple[Signals, ...]) -> bool:
        one, other = (shown(make(), *run) for run in runs)
        return not torch.equal(one, other)

    assert differ(lambda: plain, (own,), (curves,))
    assert differ(lambda: plain, (own,), (task,))
    assert not differ(lambda: WithoutCurves(policy, CONTEXT), (own,), (curves,))
    assert differ(lambda: WithoutCurves(policy, CONTEXT), (own,), (task,))
    assert differ(lambda: OnlyCurves(policy, CONTEXT), (own,), (curves,))
    assert not differ(lambda: OnlyCurves(policy, CONTEXT), (own,), (task,))
    assert not differ(lambda: FrozenCurves(policy, CONTEXT), (own, own), (own, curves))
    assert differ(lambda: FrozenCurves(policy, CONTEXT), (own, own), (curves, own))
    assert differ(lambda: FrozenCurves(policy, CONTEXT), (own, own), (own, task))


def test_they_are_controllers_by_name(tmp_path: Path, policy: Policy) -> None:
    save_policy(tmp_path / "policy", policy)
    for kind in KINDS:
        made = make_controller(f"{kind.name}:{tmp_path / 'policy'}", CONTEXT)
        assert isinstance(made, kind)
        assert made.greedy
        with pytest.raises(UsageError, match=f"{kind.name}:FOLDER"):
            make_controller(kind.name, CONTEXT)


def test_shuffled_curves_are_those_of_another_row(policy: Policy, tmp_path: Path) -> None:
    own = random_signals(8, 3, torch.Generator().manual_seed(0))[0]
    donors = [(row + 3) % 8 for row in range(8)]
    controller = ShuffledCurves(policy, CONTEXT, donors)
    plain = shown(LearnedController(policy, CONTEXT, greedy=True), own)
    is_curve = controller._is_curve
    expected = torch.where(is_curve, plain[donors], plain)
    assert torch.equal(shown(controller, own), expected)
    assert not torch.equal(expected, plain)
    itself = ShuffledCurves(policy, CONTEXT, list(range(8)))
    assert torch.equal(shown(itself, own), plain)
    save_policy(tmp_path / "policy", policy)
    built = ShuffledCurves.build(str(tmp_path / "policy"), CONTEXT, donors)
    assert torch.equal(shown(built, own), expected)
    with pytest.raises(AssertionError, match="every row needs a donor"):
        controller.reset(9, "cpu")
