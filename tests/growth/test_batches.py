"""Batches as people have them, and streams of them cut into windows."""

from __future__ import annotations

from collections import UserDict, namedtuple
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from esper.growth.batches import (
    DeviceBatches,
    Windows,
    check_batches,
    count_samples,
    read_batch,
    warn_of_moving_statistics,
)
from esper.leyline.errors import EsperWarning, UsageError

X, Z, Y = torch.ones(2, 3), torch.zeros(2, 4), torch.tensor([0, 1])
Named = namedtuple("Named", ["first", "second", "target"])


def test_batches_are_pairs_several_inputs_or_dicts_with_labels() -> None:
    assert read_batch((X, Y)) == (X, Y)
    inputs, targets = read_batch([X, Z, Y])
    assert (inputs[0] is X, inputs[1] is Z, targets is Y) == (True, True, True)
    assert read_batch(Named(X, Z, Y))[1] is Y
    batch = {"input_ids": X, "attention_mask": Z, "labels": Y}
    for one in (batch, UserDict(batch)):
        inputs, targets = read_batch(one)
        assert list(inputs) == ["input_ids", "attention_mask"]
        assert targets is Y
        assert list(read_batch(one, keeps_label=True)[0]) == list(batch)


@pytest.mark.parametrize(
    ("batch", "words"),
    [
        (X, "got a Tensor"),
        ((X,), "got a tuple of 1"),
        ({"x": X}, "exactly one of labels, label, targets, target, y, but has x"),
        ({"labels": Y, "y": Y}, "exactly one of labels"),
        ({}, "but has nothing"),
    ],
)
def test_other_batches_are_refused_in_one_line(batch: Any, words: str) -> None:
    with pytest.raises(UsageError) as error:
        list(DeviceBatches([batch], torch.device("cpu")))
    assert words in str(error.value)


@pytest.mark.parametrize(
    ("batches", "words"),
    [
        (iter([]), "can be read only once; give a list or a DataLoader, or write decide_every=N"),
        (X, "train must be an iterable of batches, such as a DataLoader, got a Tensor"),
        ("digits", "got a str"),
        (None, "got a NoneType"),
        ({"x": X}, "got a dict"),
    ],
)
def test_what_cannot_be_iterated_anew_is_refused(batches: Any, words: str) -> None:
    with pytest.raises(UsageError) as error:
        check_batches("train", batches)
    assert words in str(error.value)


class Numbered(list[int]):
    """Batches that note for which pass they are asked."""

    def __init__(self, size: int) -> None:
        super().__init__(range(size))
        self.epochs: list[int] = []

    def set_epoch(self, epoch: int) -> None:
        self.epochs.append(epoch)


def test_windows_go_on_where_the_last_one_ended_and_begin_anew_at_the_end() -> None:
    batches = Numbered(5)
    windows = Windows(batches, 2)
    assert len(windows) == 2
    seen = []
    for epoch in range(1, 6):
        windows.set_epoch(epoch)
        seen.append(list(windows))
    assert seen == [[0, 1], [2, 3], [4, 0], [1, 2], [3, 4]]
    assert batches.epochs == [1, 2]


def test_a_resumed_window_is_the_one_it_would_have_been() -> None:
    windows = Windows(Numbered(5), 2)
    windows.set_epoch(4)
    assert list(windows) == [1, 2]
    windows.set_epoch(5)
    assert list(windows) == [3, 4]


def test_an_iterator_ends_and_cannot_be_resumed() -> None:
    windows = Windows(iter(range(3)), 2)
    windows.set_epoch(1)
    assert [list(windows), list(windows), list(windows)] == [[0, 1], [2], []]
    with pytest.raises(UsageError, match="cannot be resumed"):
        Windows(iter(range(3)), 2).set_epoch(2)
    with pytest.raises(UsageError, match="decide_every must be at least 1"):
        Windows([], 0)


def test_samples_of_somebodys_batches_are_counted_where_they_say() -> None:
    x, y = torch.zeros(10, 3), torch.zeros(10)
    assert count_samples(DataLoader(TensorDataset(x, y), batch_size=4)) == 10
    assert count_samples([(x, y), (x[:4], y[:4])]) == 14
    assert count_samples(pair for pair in [(x, y)]) == 0


class HeldNorm(nn.BatchNorm1d):
    """A layer that its owner keeps in eval mode."""

    def train(self, mode: bool = True) -> HeldNorm:
        return super().train(False)


def test_a_frozen_layer_that_stays_in_eval_mode_does_not_move() -> None:
    model = nn.Sequential(nn.BatchNorm1d(3)).requires_grad_(False).eval()
    with pytest.warns(EsperWarning, match="'0' are frozen, but the running statistics .*") as told:
        warn_of_moving_statistics(model)
    assert not model.training
    # The line that the warning gives, written into a class, ends it.
    line = str(told[0].message).partition("in a subclass: ")[2]
    names: dict[str, Any] = {"torch": torch}
    exec(f"class Held(torch.nn.Sequential):\n    {line}\n", names)
    held = names["Held"](nn.BatchNorm1d(3)).requires_grad_(False)
    assert held.train() is held
    assert held.training
    warn_of_moving_statistics(held)
    warn_of_moving_statistics(nn.Sequential(HeldNorm(3)).requires_grad_(False).train())
