from __future__ import annotations

import torch

from esper.growth.batches import FixedBatches, TrainingBatches
from esper.tasks import get_task
from esper.tasks.dataset import TaskData


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
