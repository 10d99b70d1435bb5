from __future__ import annotations

import sys

import pytest
import torch
from torch.optim import SGD

from esper.growth.gardener import Gardener
from esper.integrations import Rounds
from esper.kasmina.garden import Garden
from esper.leyline.errors import EsperWarning, MissingExtraError
from tests.plots import EAGER, GROW_ONE, Script, TinyConv, make_batches, make_garden, train

pytestmark = pytest.mark.filterwarnings("ignore:.*too few to grow in", "ignore:Nothing grew")


def make_rounds(horizon: int = 4) -> tuple[Rounds, torch.optim.Optimizer]:
    gardener = Gardener(make_garden(), Script(GROW_ONE), horizon)
    optimizer = gardener.optimizer(SGD, lr=0.1, momentum=0.9)
    rounds = Rounds(gardener, None, None)
    rounds.carry(optimizer)
    return rounds, optimizer


VAL = make_batches(2, 32, seed=9)


def test_a_round_is_measured_on_the_trainers_batches_and_told_its_mean_loss() -> None:
    rounds, optimizer = make_rounds()
    losses = train(rounds.gardener.garden, optimizer, make_batches())
    for loss in losses:
        rounds.add_loss(torch.tensor(loss))
    for nothing in (None, torch.ones(3), "loss"):
        rounds.add_loss(nothing)
    record = rounds.end(VAL)
    assert record is not None
    assert record.train_loss == pytest.approx(sum(losses) / len(losses))
    assert record.val_score > 0
    second = rounds.end(VAL)
    assert second is not None
    assert second.train_loss is None
    assert second.val_loss == record.val_loss
    # Every round has a mean of its own.
    rounds.add_loss(torch.tensor(7.0))
    third = rounds.end(VAL)
    assert third is not None
    assert third.train_loss == 7.0


def test_seeds_that_germinate_while_a_trainer_validates_can_be_trained() -> None:
    rounds, optimizer = make_rounds()
    for _ in range(3):
        train(rounds.gardener.garden, optimizer, make_batches())
        with torch.inference_mode():
            rounds.end(VAL)
    assert rounds.gardener.garden.slots["stem"].blueprint == "mlp_small"
    seed = list(rounds.gardener.garden.slot_parameters("stem"))
    before = [p.detach().clone() for p in seed]
    train(rounds.gardener.garden, optimizer, make_batches())
    assert not all(map(torch.equal, seed, before))


def test_statistics_are_taken_anew_on_what_the_network_was_trained_on() -> None:
    torch.manual_seed(0)
    garden = Garden(TinyConv(norm=True), ["first"], torch.zeros(2, 1, 8, 8), config=EAGER)
    gardener = Gardener(garden, "wait", 12)
    optimizer = gardener.optimizer(SGD, lr=0.1)
    rounds = Rounds(gardener, None, None)
    batches = [(torch.randn(8, 1, 8, 8), torch.randint(10, (8,))) for _ in range(3)]
    train(garden, optimizer, batches)
    record = rounds.end(batches)
    assert record is not None
    assert record.statistics_samples == 24
    expected = torch.stack([garden.model.first(x).mean((0, 2, 3)) for x, _ in batches]).mean(0)  # type: ignore[operator, union-attr]
    found = garden.model.norm.running_mean  # type: ignore[union-attr]
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-5)
    second = rounds.end(batches)
    assert second is not None
    assert second.statistics_samples == 0, "nothing was trained since"


def test_behind_the_horizon_nothing_happens() -> None:
    rounds, _ = make_rounds(2)
    assert [rounds.end(VAL) is None for _ in range(4)] == [False, False, True, True]


def test_a_round_does_not_touch_the_trainers_random_numbers() -> None:
    rounds, _ = make_rounds()
    state = torch.get_rng_state()
    loader = torch.utils.data.DataLoader(list(zip(*VAL[0], strict=True)), 8)  # type: ignore[arg-type]
    rounds.end(loader)
    assert torch.equal(torch.get_rng_state(), state)


def test_an_unfinished_round_travels_with_the_optimizer() -> None:
    rounds, optimizer = make_rounds()
    rounds.add_loss(torch.tensor(3.0))
    rounds.add_loss(torch.tensor(5.0))
    fresh, again = make_rounds()
    again.load_state_dict(optimizer.state_dict())
    fresh.add_loss(torch.tensor(1.0))
    record = fresh.end(VAL)
    assert record is not None
    assert record.train_loss == pytest.approx(3.0)


def test_at_the_horizon_it_is_told_why_nothing_grew() -> None:
    rounds, _ = make_rounds(2)
    rounds.end(VAL)
    with pytest.warns(EsperWarning, match="Nothing grew: the controller waited in 1 of 1"):
        rounds.end(VAL)


def test_the_owner_may_measure_otherwise() -> None:
    gardener = Gardener(make_garden(), "wait", 4)
    gardener.optimizer(SGD, lr=0.1)
    rounds = Rounds(gardener, None, lambda model: (torch.full((5,), 7.0), None))
    record = rounds.end(None)
    assert record is not None
    assert record.val_loss == 7.0


@pytest.mark.parametrize(
    ("library", "module"), [("lightning", "lightning"), ("transformers", "hugging_face")]
)
def test_a_missing_extra_is_named(
    library: str, module: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in [one for one in sys.modules if one.startswith(f"{library}.")]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, library, None)
    monkeypatch.delitem(sys.modules, f"esper.integrations.{module}", raising=False)
    with pytest.raises(MissingExtraError, match=rf"pip install 'esper-grow\[{library}\]'") as told:
        __import__(f"esper.integrations.{module}")
    assert isinstance(told.value, ImportError)
