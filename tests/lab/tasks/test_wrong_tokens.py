"""Wrong next tokens of text: how many, which, and that they are always the same."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from esper.lab.tasks.data.source import Source
from esper.lab.tasks.dataset import TaskData, choose_data
from esper.lab.tasks.splits import SPLITS, Splits, make_splits
from esper.lab.tasks.wrong_tokens import WrongTokens, choose_wrong_tokens
from esper.leyline.errors import ConfigError

LETTERS = b"abcdefghij"


def text(letters: bytes = LETTERS, count: int = 400) -> Splits:
    """Random sequences of 17 letters."""
    rng = np.random.default_rng(0)
    x = rng.choice(np.frombuffer(letters, np.uint8), (count, 17))
    return make_splits(Source("letters", "here", x, None, num_classes=256))


def everything(data: TaskData, split: Any = "train") -> tuple[Tensor, Tensor]:
    return data.batch(split, data.indices(split))


@pytest.mark.parametrize("share", [0.1, 0.6, 1.0])
def test_a_share_of_the_training_targets_is_another_token_of_the_text(share: float) -> None:
    splits = text()
    clean, noisy = choose_data(splits), choose_data(splits, label_noise=share)
    (x, y), (same_x, wrong_y) = everything(clean), everything(noisy)
    assert torch.equal(x, same_x), "inputs stay as they are"
    # 5,248 targets: five standard deviations are at most 0.035.
    assert float((y != wrong_y).double().mean()) == pytest.approx(share, abs=0.035)
    assert set(wrong_y.flatten().tolist()) == set(LETTERS)
    for split in ("val", "test"):
        for one, other in zip(everything(clean, split), everything(noisy, split), strict=True):
            assert torch.equal(one, other)


def test_every_other_token_is_as_likely() -> None:
    wrong = choose_wrong_tokens(text(), 1.0)
    samples = torch.arange(20_000)
    for right in LETTERS:
        found = wrong.replace(torch.full((20_000, 1), right), samples)
        counts = torch.bincount(found.flatten() - LETTERS[0], minlength=len(LETTERS))
        assert int(counts[right - LETTERS[0]]) == 0
        others = counts[counts > 0].double()
        assert len(others) == len(LETTERS) - 1
        assert float((others - 20_000 / 9).abs().max()) < 6 * (20_000 / 9) ** 0.5


def test_a_target_is_the_same_wherever_it_is_read() -> None:
    splits = text()
    noisy = choose_data(splits, label_noise=0.5)
    _, y = everything(noisy)
    order = noisy.order(3, 2)
    shaped = noisy.batch("train", order[:12].reshape(3, 4))[1]
    assert torch.equal(shaped.flatten(0, 1), y[order[:12]])
    again = choose_data(text(), label_noise=0.5)
    assert torch.equal(everything(again)[1], y)
    # A task with fewer samples has the same wrong targets.
    small = choose_data(splits, label_noise=0.5, train_size=40)
    assert torch.equal(everything(small)[1], y[small.kept])


def test_more_noise_keeps_what_less_noise_has_replaced() -> None:
    splits = text()
    clean, some, more = (
        everything(choose_data(splits, label_noise=share))[1] for share in (0.0, 0.2, 0.7)
    )
    replaced = some != clean
    assert torch.equal(some[replaced], more[replaced])
    assert int((more != clean).sum()) > 2 * int(replaced.sum())


def test_golden_targets_keep_tasks_what_they_are() -> None:
    wrong = WrongTokens(0.5, torch.tensor([2, 3, 5, 7, 11]))
    found = wrong.replace(torch.tensor([[2, 3, 5, 7, 11, 2, 3, 5]] * 2), torch.tensor([0, 70_000]))
    assert found.tolist() == [[2, 3, 2, 7, 2, 2, 11, 5], [7, 5, 5, 7, 2, 2, 2, 5]]


def test_clean_text_has_nothing_extra() -> None:
    clean = choose_data(text())
    assert clean.wrong_tokens is None
    assert clean.train_targets is None
    noisy = choose_data(text(), label_noise=0.5)
    assert noisy.train_targets is None, "no target is stored"
    assert noisy.wrong_tokens is not None
    assert noisy.wrong_tokens.alphabet.tolist() == list(LETTERS)


def test_it_follows_the_data_to_other_splits() -> None:
    splits = text()
    noisy = choose_data(splits, label_noise=0.5)
    moved = noisy.on(Splits(**{name: getattr(splits, name) for name in Splits.__slots__}))
    assert torch.equal(everything(noisy)[1], everything(moved)[1])


def test_a_text_of_one_letter_has_no_wrong_tokens() -> None:
    with pytest.raises(ConfigError, match="needs two or more different tokens, but letters has"):
        choose_data(text(b"a"), label_noise=0.1)


def test_a_text_can_be_subsampled() -> None:
    splits = text()
    small = choose_data(splits, train_size=50)
    assert small.size("train") == len(small.kept.unique()) == 50
    assert set(small.order(1, 1).tolist()) == set(small.kept.tolist())
    assert {split: small.size(split) for split in SPLITS[1:]} == {
        split: len(splits.samples[split]) for split in SPLITS[1:]
    }
    assert set(small.kept.tolist()) != set(range(50)), "they are taken from the whole text"
    with pytest.raises(ConfigError, match="train_size is 401, but the training split has only"):
        choose_data(splits, train_size=401)


@pytest.mark.gpu
def test_a_device_has_the_same_wrong_tokens() -> None:
    splits = text()
    here = choose_data(splits, label_noise=0.5)
    there = here.on(splits.to("cuda"))
    assert torch.equal(everything(there)[1].cpu(), everything(here)[1])
