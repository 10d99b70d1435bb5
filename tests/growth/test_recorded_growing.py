from __future__ import annotations

import math
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim import LBFGS, AdamW, Optimizer
from torch.optim.lr_scheduler import StepLR
from torch.utils.data import DataLoader, TensorDataset

import esper
from esper.growth.config import GardenerConfig, GrowthConfig
from esper.growth.grow import grow
from esper.growth.grown import Grown
from esper.kasmina.garden import load_garden
from esper.leyline.errors import UsageError
from esper.leyline.reasons import epoch_line
from esper.leyline.records import EpochRecord
from tests.nissa.report.runs import make_epoch
from tests.plots import (
    EAGER,
    FEATURES,
    GROW_ONE,
    SLOTS,
    Batch,
    Script,
    growth_config,
    make_batches,
    make_net,
    plain_history,
    same,
)

# Most runs here are too short to grow, or grow by chance; that is not what they are about.
pytestmark = [
    pytest.mark.filterwarnings("ignore:.*too few to grow in"),
    pytest.mark.filterwarnings("ignore:.*still being blended in"),
    pytest.mark.filterwarnings("ignore:Nothing grew"),
    pytest.mark.filterwarnings("ignore:Nothing that grew was kept"),
]

TRAIN, VAL = make_batches(4), make_batches(2, 32, seed=9)


def grow_tiny(**changes: Any) -> Grown:
    options = {
        "train": TRAIN,
        "val": VAL,
        "epochs": 6,
        "controller": Script(GROW_ONE),
        "config": growth_config(1),
        **changes,
    }
    model = options.pop("model", None) or make_net()
    return grow(model, options.pop("slots", SLOTS), **options)


def test_a_model_is_grown_in_one_call() -> None:
    model = make_net()
    seen: list[EpochRecord] = []
    grown = grow_tiny(model=model, on_epoch=seen.append, test=VAL, twin=True)
    assert grown.model.model is model
    assert [record.epoch for record in seen] == [1, 2, 3, 4, 5, 6]
    assert seen == grown.history
    assert grown.summary.task == "TinyNet"
    assert grown.summary.parameters_after > grown.summary.parameters_before
    assert grown.summary.val_score > 60
    assert grown.model.slots["stem"].stage.name == "BLENDING"
    assert grown.model(torch.zeros(5, FEATURES)).shape == (5, 3)
    assert esper.grow is grow


def test_the_learned_controller_decides_by_default() -> None:
    grown = grow(make_net(), SLOTS, train=TRAIN[:1], val=VAL[:1], epochs=2)
    assert grown.summary.controller == "tamiyo"
    assert grown.twin is None
    assert grown.history[-1].twin_score is None


# --------------------------------------------------------------------------------- kinds of inputs


class TwoInputs(nn.Module):
    """Takes features and their mask under names."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Linear(FEATURES, 6)
        self.head = nn.Linear(6, 3)

    def forward(self, features: Tensor, mask: Tensor) -> Tensor:
        scores: Tensor = self.head(torch.tanh(self.stem(features * mask)))
        return scores


@pytest.mark.parametrize("kind", [tuple, dict, list])
def test_inputs_may_be_tuples_and_dicts(kind: type) -> None:
    def pack(batches: list[Batch]) -> list[tuple[Any, Tensor]]:
        packed = []
        for x, y in batches:
            values = {"features": x, "mask": torch.ones_like(x)}
            packed.append((values if kind is dict else kind(values.values()), y))
        return packed

    torch.manual_seed(0)
    grown = grow_tiny(model=TwoInputs(), slots=["stem"], train=pack(TRAIN), val=pack(VAL))
    assert grown.model.slots["stem"].stage.name == "BLENDING"
    assert grown.contributions.leave_one_out.keys() == {"stem"}
    torch.manual_seed(0)
    plain = TwoInputs()
    plain.forward = lambda x: TwoInputs.forward(plain, x, torch.ones_like(x))  # type: ignore
    again = grow_tiny(model=plain, slots=["stem"])
    assert plain_history(again.history) == plain_history(grown.history)


def test_a_users_data_loader_works_and_repeats_with_its_seed() -> None:
    x, y = (torch.cat(parts) for parts in zip(*TRAIN, strict=True))

    def once() -> Grown:
        order = torch.Generator().manual_seed(8)
        train = DataLoader(TensorDataset(x, y), 24, shuffle=True, generator=order)
        val = DataLoader(TensorDataset(x, y), 50)
        return grow_tiny(train=train, val=val, controller="random", seed=2, epochs=10)

    first, second = once(), once()
    assert plain_history(first.history) == plain_history(second.history)
    assert same(first.model.state_dict(), second.model.state_dict())


def test_a_loss_of_ones_own_without_labels() -> None:
    """A denoising autoencoder: the targets are the inputs."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(FEATURES, 3), nn.Tanh(), nn.Linear(3, FEATURES))
    batches = [(x, x) for x, _ in TRAIN]

    def reconstruction(outputs: Tensor, x: Tensor) -> tuple[Tensor, None]:
        return (outputs - x).square().mean(1), None

    grown = grow_tiny(model=model, slots=["0"], train=batches, val=batches, loss=reconstruction)
    named = grow_tiny(
        model=nn.Sequential(nn.Linear(FEATURES, 3), nn.Tanh(), nn.Linear(3, FEATURES)),
        slots=["0"],
        train=batches,
        val=batches,
        loss="regression",
    )
    for result in (grown, named):
        last = result.history[-1]
        assert last.val_score == pytest.approx(-last.val_loss)
        assert last.val_loss < result.history[0].val_loss
        assert abs(result.contributions.leave_one_out["0"].value) < 1
        assert result.summary.val_score < 0


# ---------------------------------------------------------------------------------------- settings


def test_seeds_make_runs_repeat_and_differ() -> None:
    histories = [
        plain_history(grow_tiny(controller="random", seed=seed, epochs=12).history)
        for seed in (0, 0, 1)
    ]
    assert histories[0] == histories[1]
    assert histories[0] != histories[2]


def test_a_schedule_is_stepped_once_per_epoch_and_drives_new_parameters() -> None:
    rates: list[float] = []
    made: list[Optimizer] = []

    def optimizer(parameters: list[nn.Parameter]) -> Optimizer:
        made.append(AdamW(parameters, lr=0.08))
        return made[-1]

    grown = grow_tiny(
        optimizer=optimizer,
        scheduler=partial(StepLR, step_size=1, gamma=0.5),
        on_epoch=lambda record: rates.append(made[0].param_groups[0]["lr"]),
    )
    assert rates == [0.08 * 0.5**epoch for epoch in range(1, 7)]
    covered = {id(p) for group in made[0].param_groups for p in group["params"]}
    assert covered == {id(p) for p in grown.model.parameters()}


def test_arguments_win_over_the_configuration() -> None:
    config = growth_config(
        4,
        twin=True,
        seed=9,
        garden=EAGER.replace(max_parameters=111, max_added_flops=222),
        gardener=GardenerConfig(ablate_every=2),
    )
    grown = grow(
        make_net(),
        SLOTS,
        train=TRAIN[:1],
        val=VAL[:1],
        controller="wait",
        config=config,
        epochs=2,
        seed=1,
        twin=False,
        max_seeds=3,
        max_parameters=333,
        max_added_flops=0,
        ablate_every=5,
    )
    settings = grown.config
    assert isinstance(settings, GrowthConfig)
    assert (settings.epochs, settings.seed, settings.twin) == (2, 1, False)
    assert (settings.garden.max_parameters, settings.garden.max_added_flops) == (333, 0)
    assert settings.garden.lifecycle.rules.max_seeds == 3
    assert settings.gardener.ablate_every == 5
    assert len(grown.history) == 2


def test_the_configuration_holds_where_no_argument_is_given() -> None:
    rules = EAGER.lifecycle.rules.replace(max_seeds=2)
    config = growth_config(
        2,
        twin=True,
        seed=9,
        garden=EAGER.replace(
            max_parameters=111,
            max_added_flops=222,
            lifecycle=EAGER.lifecycle.replace(rules=rules),
        ),
        gardener=GardenerConfig(ablate_every=2),
    )
    grown = grow(make_net(), SLOTS, train=TRAIN[:1], val=VAL[:1], controller="wait", config=config)
    # What there is to train on is found out; everything else is as it was asked for.
    found = {"train_samples": 16, "samples_per_epoch": 16, "num_classes": 3}
    chance = grown.config.gardener.chance_loss
    assert chance == pytest.approx(math.log(3))
    told = config.gardener.replace(chance_loss=chance, **found)
    assert grown.config == config.replace(gardener=told)
    assert len(grown.history) == 2
    assert grown.model.config.max_parameters == 111


def test_limits_hold() -> None:
    grown = grow_tiny(controller="random", epochs=40, max_parameters=250, max_seeds=1)
    assert max(record.parameters for record in grown.history) <= 250
    alive = [sum(slot.blueprint is not None for slot in record.slots) for record in grown.history]
    assert max(alive) == 1


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"train": []}, "the training set is empty"),
        ({"val": []}, "the validation set is empty"),
        ({"loss": "clasification"}, "unknown loss 'clasification', did you mean 'classification'"),
        ({"loss": "mse"}, "unknown loss 'mse'; known: .*regression, model; or give a criterion"),
        ({"train": (torch.zeros(4, 2), torch.zeros(4))}, "train is a tuple of tensors, not of"),
        (
            {"loss": 3},
            r"loss must be a name, a criterion such as .* or a function, got 3",
        ),
        (
            {"loss": lambda outputs, y: (outputs,)},
            r"must return \(loss\[B\], correct\[B\] or None\)",
        ),
        ({"controller": "tamiyo:small"}, "there is no controller 'small': Esper ships tamiyo"),
        ({"slots": ["stim"]}, "no submodule 'stim', did you mean 'stem'"),
        ({"slots": "stem"}, "slots must be a list of submodule names"),
        ({"epochs": 0}, "epochs must be at least 1"),
        ({"max_seeds": -1}, "max_seeds must be at least 0"),
    ],
)
def test_mistakes_are_named_in_one_line(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(UsageError, match=message) as caught:
        grow_tiny(**changes)
    assert "\n" not in str(caught.value)


class OneNumber(nn.Module):
    """Features [B, 4] to one number [B]."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Linear(FEATURES, 6), nn.Tanh())
        self.head = nn.Linear(6, 1)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.head(self.body(x)).squeeze(-1)
        return out


def test_numbers_may_be_one_for_each_sample() -> None:
    train, val = ([(x, x.sum(1)) for x, _ in part] for part in (TRAIN, VAL))
    grown = grow_tiny(model=OneNumber(), slots=["body"], train=train, val=val, loss="regression")
    assert grown.summary.val_score < 0


@pytest.mark.filterwarnings("ignore:there is no run in")
def test_slots_are_found_where_none_are_named(tmp_path: Path) -> None:
    found = list(esper.suggest_slots(make_net(), VAL[0][0]))
    options: dict[str, Any] = {"train": TRAIN, "val": VAL, "epochs": 2, "controller": "wait"}
    assert grow(make_net(), **options).model.slot_names == tuple(found)
    assert grow(make_net(), "auto", **options).model.slot_names == tuple(found)
    options |= {"out": tmp_path / "run", "resume": True}
    for _ in range(2):
        assert grow(make_net(), **options).model.slot_names == tuple(found)


@pytest.mark.parametrize("made", [LBFGS, lambda parameters: LBFGS(parameters, lr=0.1)])
def test_an_optimizer_that_computes_the_loss_itself_is_refused_by_name(made: Any) -> None:
    with pytest.raises(UsageError, match=r"LBFGS cannot train a network that grows.*AdamW"):
        grow_tiny(optimizer=made)


# ------------------------------------------------------------------------------------- what is left


def test_what_was_grown_can_be_saved_and_loaded(tmp_path: Path) -> None:
    grown = grow_tiny()
    grown.model.save(tmp_path / "grown")
    loaded = load_garden(tmp_path / "grown", model=make_net(seed=60)).eval()
    x = torch.randn(7, FEATURES)
    assert torch.equal(loaded(x), grown.model(x))
    assert loaded.slots["stem"].stage.name == "BLENDING"


def test_an_epoch_fits_in_a_line() -> None:
    record = make_epoch(3, 91.234, twin_score=90.5, train_loss=0.125)
    assert epoch_line(record) == (
        "val score 91.23  val loss 0.5000  twin 90.50  train loss 0.1250  4,210 parameters"
    )
    assert epoch_line(replace(record, twin_score=None, train_loss=None)) == (
        "val score 91.23  val loss 0.5000  4,210 parameters"
    )
