import torch

from esper.kasmina.lifecycle import Outcome
from esper.lab.imagined import ImaginedHosts, middle_aged_hosts
from esper.leyline.actions import LifecycleOp
from esper.leyline.stages import SeedStage
from esper.tamiyo.policy.layout import check_signals


def test_random_actions_are_legal_and_lead_everywhere() -> None:
    hosts = ImaginedHosts(64, seed=1)
    stages: set[int] = set()
    for _ in range(40):
        applied = hosts.step(hosts.random_actions(prune_chance=0.2))
        assert bool((applied.outcome != int(Outcome.ILLEGAL)).all())
        signals = hosts.signals()
        check_signals(signals)
        stages |= set(signals.stage[signals.occupied].tolist())
    assert stages == {int(stage) for stage in SeedStage if stage > SeedStage.DORMANT}


def test_equal_seeds_live_equal_lives() -> None:
    one, other = middle_aged_hosts(8, seed=3), middle_aged_hosts(8, seed=3)
    assert torch.equal(one.signals().alpha, other.signals().alpha)
    assert torch.equal(one.signals().val_loss, other.signals().val_loss)
    assert not torch.equal(one.signals().val_loss, middle_aged_hosts(8, seed=4).signals().val_loss)


def test_slots_that_are_off_stay_empty() -> None:
    enabled = torch.tensor([[True, False, True]] * 4)
    hosts = ImaginedHosts(4, enabled=enabled)
    for _ in range(20):
        hosts.step(hosts.random_actions())
    assert not bool(hosts.signals().occupied[:, 1].any())


def test_what_was_done_is_told() -> None:
    hosts = ImaginedHosts(2)
    assert hosts.signals().last_op.tolist() == [0, 0]
    actions = hosts.random_actions()
    hosts.step(actions)
    signals = hosts.signals()
    assert torch.equal(signals.last_op, actions["op"])
    assert signals.epoch.tolist() == [2, 2]
    assert bool(signals.last_success[signals.last_op == int(LifecycleOp.WAIT)].all())
