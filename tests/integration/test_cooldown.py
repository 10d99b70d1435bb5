"""A pruned seed on a real network: it goes in time, and its slot stays closed long enough."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from esper.kasmina.lifecycle import LifecycleConfig
from esper.kasmina.state import GateConfig
from esper.lab.population.engine import PopulationConfig
from esper.lab.population.population import Population
from esper.leyline.actions import LifecycleOp, placeholder_actions
from esper.leyline.signals import Signals
from esper.leyline.stages import ALPHA_TARGETS, SPEED_TICKS, TEMPO_EPOCHS, SeedStage
from tests.simic.training.tiny import NAME

EMBARGO = 5
COOLDOWN = 7
"""Decisions from the prune to the first one that may germinate again: pruned, five, resetting."""


class Host:
    """One network that is told what to do."""

    def __init__(self) -> None:
        lifecycle = LifecycleConfig(
            gates=GateConfig(min_training_epochs=0, min_gradient_health=0.0), embargo_ticks=EMBARGO
        )
        self.population = Population(
            NAME,
            1,
            seed=0,
            device="cpu",
            strategy="sequential",
            horizon=60,
            config=PopulationConfig(lifecycle=lifecycle),
        )
        self.signals: Signals = self.population.reset()

    def do(self, op: LifecycleOp, **heads: int) -> bool:
        """Carry out an operation at the first slot; return whether it took effect."""
        actions = placeholder_actions(1)
        for head, value in {"op": int(op), **heads}.items():
            actions[head] = torch.tensor([value])
        self.signals = self.population.step(actions)
        return bool(self.signals.last_success)

    def germinate(self) -> bool:
        full, soon = ALPHA_TARGETS.index(1.0), TEMPO_EPOCHS.index(3)
        return self.do(LifecycleOp.GERMINATE, blueprint=1, alpha_target=full, tempo=soon)

    def hold(self) -> None:
        """Grow a seed to the full amplitude."""
        assert self.germinate()
        assert self.do(LifecycleOp.ADVANCE)
        assert self.do(LifecycleOp.ADVANCE)
        while float(self.signals.alpha[0, 0]) < 1.0:
            self.do(LifecycleOp.WAIT)
        assert self.do(LifecycleOp.ADVANCE)

    @property
    def may_germinate(self) -> bool:
        return bool(self.population.masks().slot_by_op[0, int(LifecycleOp.GERMINATE), 0])

    @property
    def is_bare(self) -> bool:
        return int(self.signals.params) == int(self.signals.host_params)


@pytest.fixture
def host() -> Iterator[Host]:
    host = Host()
    yield host
    host.population.close()


@pytest.mark.parametrize("insist", [False, True])
def test_a_slot_pruned_at_once_stays_closed_for_the_whole_cooldown(
    host: Host, insist: bool
) -> None:
    assert host.germinate()
    assert host.do(LifecycleOp.WAIT)
    assert host.do(LifecycleOp.PRUNE, alpha_speed=SPEED_TICKS.index(0))
    assert host.is_bare
    for decision in range(1, COOLDOWN):
        assert not host.may_germinate, f"decision {decision} after the prune"
        if insist:
            assert not host.germinate(), "what the mask forbids is refused as well"
        else:
            host.do(LifecycleOp.WAIT)
        assert host.is_bare
    assert host.may_germinate
    assert host.germinate()
    assert int(host.signals.stage[0, 0]) == int(SeedStage.GERMINATED)


@pytest.mark.parametrize("ticks", [ticks for ticks in SPEED_TICKS if ticks])
def test_a_slow_prune_ends_on_time_and_frees_its_slot(host: Host, ticks: int) -> None:
    host.hold()
    alphas = [1.0]
    assert host.do(LifecycleOp.PRUNE, alpha_speed=SPEED_TICKS.index(ticks))
    for _ in range(ticks - 1):
        alphas.append(float(host.signals.alpha[0, 0]))
        assert not host.is_bare
        assert not host.may_germinate
        host.do(LifecycleOp.WAIT)
    assert alphas == sorted(alphas, reverse=True)
    assert host.is_bare, "gone with the last tick of its schedule"
    waited = 0
    while not host.may_germinate:
        host.do(LifecycleOp.WAIT)
        waited += 1
    assert waited == COOLDOWN
    assert host.germinate()
