from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim import AdamW, Optimizer
from torch.optim.lr_scheduler import StepLR
from torch.utils.data import DataLoader, TensorDataset

import esper
from esper.growth.gardener import GardenerConfig
from esper.growth.grow import (
    FixedBatches,
    TrainingBatches,
    TrainingConfig,
    data_run,
    find_objective,
    grow,
    task_config,
    task_run,
    task_training,
)
from esper.growth.grown import Grown
from esper.growth.run import GrowthConfig
from esper.kasmina.garden import GardenConfig, load_garden
from esper.leyline.errors import UsageError
from esper.leyline.records import EpochRecord
from esper.tasks import get_task
from esper.tasks.dataset import TaskData
from esper.tasks.objective import OBJECTIVES
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


def test_the_defaults_grow_by_the_heuristic() -> None:
    grown = grow(make_net(), SLOTS, train=TRAIN[:1], val=VAL[:1], epochs=2)
    assert grown.summary.controller == "heuristic"
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
    assert grown.config == config
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
        ({"loss": 3}, "loss must be a name or a function, got 3"),
        ({"loss": nn.CrossEntropyLoss()}, r"must return \(loss\[B\], correct\[B\] or None\)"),
        ({"controller": "pretrained"}, "no pretrained controller ships with this version"),
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


# ------------------------------------------------------------------------------------- what is left


def test_what_was_grown_can_be_saved_and_loaded(tmp_path: Path) -> None:
    grown = grow_tiny()
    grown.model.save(tmp_path / "grown")
    loaded = load_garden(tmp_path / "grown", model=make_net(seed=60)).eval()
    x = torch.randn(7, FEATURES)
    assert torch.equal(loaded(x), grown.model(x))
    assert loaded.slots["stem"].stage.name == "BLENDING"


# ------------------------------------------------------------------------------------- whole tasks


def test_objectives_are_found_by_name() -> None:
    for name, objective in OBJECTIVES.items():
        assert find_objective(name) is objective
    assert find_objective(test_objectives_are_found_by_name) is test_objectives_are_found_by_name  # type: ignore[arg-type, comparison-overlap]


def test_a_task_trains_with_its_own_settings() -> None:
    task = get_task("digits", learning_rate=0.02, batch_size=32, momentum=0.5, weight_decay=0.0)
    assert task_training(task) == TrainingConfig(
        batch_size=32, learning_rate=0.02, momentum=0.5, weight_decay=0.0
    )
    config = task_config(task, seed=4)
    assert (config.epochs, config.twin, config.seed) == (60, True, 4)
    assert config.gardener.param_budget == task.config.param_budget


def test_a_task_is_grown_and_repeats() -> None:
    task = get_task("digits_mlp", samples_per_step=128, validation_samples=64)
    data = task.load()
    config = task_config(task, epochs=3, garden=GardenConfig(lifecycle=EAGER.lifecycle))
    histories = []
    for _ in range(2):
        run = task_run(task, data, config=config, controller="random")
        histories.append(plain_history(list(run.epochs())))
        assert run.name == "digits_mlp"
        assert run.garden.slot_names == tuple(task.slot_paths)
    assert histories[0] == histories[1]
    assert run.finish().summary.test_score is not None


def test_another_batch_size_trains_otherwise() -> None:
    task = get_task("digits_mlp", samples_per_step=128, validation_samples=64)
    data = task.load()
    losses = []
    for batch_size in (16, 64):
        run = data_run(
            task.build_host(0),
            task.slot_paths,
            data,
            config=task_config(task, epochs=1),
            training=TrainingConfig(batch_size=batch_size),
            controller="wait",
        )
        losses += [record.train_loss for record in run.epochs()]
    assert losses[0] != losses[1]


def small_data() -> TaskData:
    return get_task("digits", samples_per_step=100, validation_samples=50).load()


def test_an_epoch_is_named_by_seed_and_number_alone() -> None:
    data = small_data()
    batches, others = TrainingBatches(data, 32, seed=1), TrainingBatches(data, 32, seed=2)
    drawn = {}
    for epoch in (1, 2, 1):
        batches.set_epoch(epoch)
        x = torch.cat([inputs for inputs, _ in batches])
        assert torch.equal(drawn.setdefault(epoch, x), x)
    assert not torch.equal(drawn[1], drawn[2])
    others.set_epoch(1)
    assert not torch.equal(drawn[1], torch.cat([inputs for inputs, _ in others]))


def test_an_epoch_has_the_samples_of_a_step() -> None:
    batches = TrainingBatches(small_data(), 32, seed=1)
    sizes = [len(targets) for _, targets in batches]
    assert sizes == [32, 32, 32, 4]
    assert len(batches) == 4


def test_augmentation_repeats_with_the_epoch() -> None:
    task = get_task("digits", samples_per_step=64, augment="crop_flip")
    batches = TrainingBatches(task.load(), 64, seed=1)
    plain = TrainingBatches(get_task("digits", samples_per_step=64).load(), 64, seed=1)
    batches.set_epoch(3)
    plain.set_epoch(3)
    first, again = next(iter(batches)), next(iter(batches))
    assert torch.equal(first[0], again[0])
    assert torch.equal(first[1], next(iter(plain))[1])
    assert not torch.equal(first[0], next(iter(plain))[0])


def test_validation_is_the_same_each_time() -> None:
    data = small_data()
    subset = FixedBatches(data, "val", subset=True, batch_size=20)
    assert [len(y) for _, y in subset] == [20, 20, 10]
    assert len(subset) == 3
    for (x, y), (again, labels) in zip(subset, subset, strict=True):
        assert torch.equal(x, again)
        assert torch.equal(y, labels)
    whole = FixedBatches(data, "val")
    assert sum(len(y) for _, y in whole) == data.size("val") > 50
    everything = torch.cat([x for x, _ in whole])
    assert torch.equal(everything[data.subset], torch.cat([x for x, _ in subset]))


def test_splits_do_not_overlap() -> None:
    data = small_data()
    seen = [
        {x.numpy().tobytes() for batch, _ in FixedBatches(data, split) for x in batch}
        for split in ("val", "test")
    ]
    assert not seen[0] & seen[1]
