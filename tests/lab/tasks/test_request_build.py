from __future__ import annotations

import math

import pytest
import torch

from esper.growth.config import GardenerConfig, GrowthConfig
from esper.growth.criterion import Loss
from esper.growth.request import GrowRequest
from esper.growth.run import GrowthLoop
from esper.kasmina.lifecycle import GardenConfig
from esper.lab.tasks import TrainingConfig, get_task
from esper.lab.tasks.dataset import TaskData
from esper.lab.tasks.request import (
    FixedBatches,
    TrainingBatches,
    data_request,
    task_config,
    task_run,
)
from esper.leyline.signals import Signals
from tests.plots import EAGER, plain_history


def test_a_task_trains_with_its_own_settings() -> None:
    task = get_task("digits", learning_rate=0.02, batch_size=32, momentum=0.5, weight_decay=0.0)
    config = task_config(task, seed=4)
    # So that a network that falls back to guessing is noticed when it grows alone, too.
    assert config.gardener.chance_loss == task.config.baseline_loss > 0
    assert config.training == TrainingConfig(
        batch_size=32, learning_rate=0.02, momentum=0.5, weight_decay=0.0
    )
    assert (config.epochs, config.twin, config.seed) == (60, True, 4)
    assert config.gardener.param_budget == task.config.param_budget


def test_the_limits_of_a_task_bind_its_network_when_it_grows_alone() -> None:
    assert task_config(get_task("digits")).garden == GardenConfig()
    task = get_task("digits", param_limit=1.5, flop_limit=2.0)
    config = task_config(task)
    assert config.garden.max_parameters == task.param_limit == int(1.5 * task.host_parameters)
    run = task_run(task, task.load(), config=config, controller="wait")
    assert run.garden.flop_limit == task.flop_limit == 2 * task.host_flops
    signals = run.gardener.signals()
    assert (int(signals.param_limit), int(signals.flop_limit)) == (
        task.param_limit,
        task.flop_limit,
    )
    tight = task_config(get_task("digits", flop_limit=1.0)).garden
    assert tight.max_added_flops == 1


def test_signals_know_the_data_where_somebody_does() -> None:
    task = get_task("digits_mlp", samples_per_step=128, validation_samples=64)
    data = task.load()
    run = task_run(task, data, config=task_config(task, epochs=1), controller="wait")
    signals = run.gardener.signals()
    assert int(signals.train_samples) == data.size("train")
    assert int(signals.samples_per_epoch) == 128
    assert int(signals.num_classes) == 10


def test_signals_know_the_classes_of_somebodys_model() -> None:
    x, y = torch.rand(12, 4), torch.arange(12) % 3
    model = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.ReLU(), torch.nn.Linear(8, 3))

    def signals(loss: Loss, **said: float) -> Signals:
        targets = y.float()[:, None].expand(-1, 3) if loss == "regression" else y
        config = GrowthConfig(epochs=1, gardener=GardenerConfig(**said))
        parts = {"train": [(x, targets)], "val": [(x, targets)]}
        request = GrowRequest(
            model=model, slots=["0"], **parts, config=config, loss=loss, controller="wait"
        )
        return GrowthLoop(request).gardener.signals()

    for loss in ("classification", torch.nn.CrossEntropyLoss(label_smoothing=0.1)):
        found = signals(loss)
        assert float(found.chance_loss) == pytest.approx(math.log(3))
        assert int(found.num_classes) == 3
    # Nobody guesses numbers, and what the owner says counts.
    assert math.isnan(float(signals("regression").chance_loss))
    assert float(signals("classification", chance_loss=0.7).chance_loss) == pytest.approx(0.7)


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
        request = data_request(
            task.build_host(0),
            task.slot_paths,
            data,
            config=task_config(task, epochs=1, training=TrainingConfig(batch_size=batch_size)),
            controller="wait",
        )
        losses += [record.train_loss for record in GrowthLoop(request).epochs()]
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


@pytest.mark.parametrize(("samples", "augment"), [(100, "none"), (4096, "crop_flip")])
def test_statistics_see_every_training_sample_once(samples: int, augment: str) -> None:
    data = get_task("digits", samples_per_step=samples, augment=augment, train_size=513).load()
    batches = TrainingBatches(data, 64, seed=1)
    found = [list(batches.calibration_batches())]
    batches.set_epoch(7)
    found.append(list(batches.calibration_batches()))
    first, seventh = (torch.cat([x for x, _ in each]) for each in found)
    assert torch.equal(first, seventh)
    # 513 = 8 * 64 + 1: a last batch of one would have no variance.
    assert sorted(len(y) for _, y in found[0]) == [57] * 9
    labels = torch.cat([y for _, y in found[0]])
    assert torch.equal(labels.sort()[0], data.batch("train", data.indices("train"))[1].sort()[0])
    if augment == "none":
        own = data.batch("train", data.indices("train"))[0]
        assert torch.equal(first.flatten(1).sum(1).sort()[0], own.flatten(1).sum(1).sort()[0])
        assert not torch.equal(first, own), "sorted data would make batches of one class"


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
