"""A task: host from a seed, data checked against what the host takes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from esper.kasmina.flops import FlopCount, forward_flops
from esper.kasmina.hosts.cnn import CnnConfig
from esper.kasmina.hosts.mlp import MlpConfig
from esper.lab.tasks.task import get_task
from esper.leyline.errors import DataError, EsperWarning


def weights(task_name: str, seed: int) -> list[torch.Tensor]:
    return list(get_task(task_name).build_host(seed).parameters())


def test_the_seed_alone_decides_the_weights() -> None:
    torch.manual_seed(1)
    first = weights("digits", 7)
    torch.manual_seed(2)
    assert all(torch.equal(a, b) for a, b in zip(first, weights("digits", 7), strict=True))
    assert not torch.equal(first[0], weights("digits", 8)[0])


def test_building_leaves_the_global_numbers_alone() -> None:
    state = torch.get_rng_state()
    get_task("digits").build_host(3)
    assert torch.equal(torch.get_rng_state(), state)


def test_example_inputs_run_through_the_host() -> None:
    for name, shape in (("digits", (2, 10)), ("digits_mlp", (2, 10)), ("stories", (2, 64, 256))):
        task = get_task(name)
        assert task.build_host(0)(task.example_input()).shape == shape


def test_slots_and_sizes_match_a_real_host() -> None:
    task = get_task("digits")
    host = task.build_host(0)
    assert task.host_parameters == sum(p.numel() for p in host.parameters()) == 1030
    assert task.slot_paths == {"r0c0": "blocks.0", "r0c1": "blocks.1", "r0c2": "blocks.2"}
    assert (task.topology, task.score_kind) == ("cnn", "accuracy")


class Exponential(nn.Module):
    """A host that multiplies by an exponential, which has no formula."""

    def __init__(self, config: MlpConfig) -> None:
        super().__init__()
        self.slot_paths = {"r0c0": "first"}
        self.first = nn.Linear(64, 8)
        self.head = nn.Linear(8, 10)

    def forward(self, x: Tensor) -> Tensor:
        scores: Tensor = self.head(self.first(x.flatten(1)))
        return scores @ torch.linalg.matrix_exp(torch.zeros(10, 10, device=x.device))


def test_a_host_whose_operations_cannot_be_counted_has_no_limit_on_them(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    task = get_task("digits_mlp", flop_limit=2.0, param_limit=2.0)
    assert task.flop_limit == 2 * task.host_flops
    odd = get_task("digits_mlp", flop_limit=2.0, param_limit=2.0)
    monkeypatch.setattr("esper.lab.tasks.task._COUNTED", {})
    monkeypatch.setattr("esper.lab.tasks.task._META_HOSTS", {})
    monkeypatch.setattr("esper.lab.tasks.task.build_host", lambda name, config: Exponential(config))
    with pytest.warns(EsperWarning, match=r"matrix_exp in the host of task 'digits_mlp' cannot"):
        assert odd.flop_limit == -1
    assert odd.param_limit == 2 * odd.host_parameters
    assert odd.host_flops == 2 * (64 * 8 + 8 * 10 + 10 * 10)


def test_a_host_is_counted_once_however_many_tasks_have_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    counted: list[int] = []

    def count(host: nn.Module, example: Tensor) -> FlopCount:
        counted.append(1)
        return forward_flops(host, example)

    monkeypatch.setattr("esper.lab.tasks.task._COUNTED", {})
    monkeypatch.setattr("esper.lab.tasks.task.forward_flops", count)
    first = get_task("digits", train_size=100).host_flops
    assert get_task("digits", label_noise=0.1).host_flops == first
    assert len(counted) == 1
    wider = CnnConfig(channels=(8, 8, 8), in_channels=1)
    assert get_task("digits", host_options=wider).host_flops > first
    assert len(counted) == 2


def test_load_uses_the_configuration() -> None:
    data = get_task("digits", train_size=100, label_noise=0.1, samples_per_step=32).load()
    assert data.size("train") == 100
    assert data.order(0, 1).shape == (32,)
    full = get_task("digits").load()
    assert [full.size(split) for split in ("train", "val", "test")] == [1079, 359, 359]
    assert len(full.subset) == 359


@pytest.mark.parametrize(
    ("arrays", "words"),
    [
        ({"x": np.zeros((40, 9, 9), np.uint8), "y": np.arange(40) % 4}, "shape 1x9x9, but task"),
        ({"x": np.zeros((40, 8, 8), np.uint8), "y": np.arange(40) % 11}, "11 classes, but task"),
        ({"x": np.zeros((40, 8, 8), np.uint8), "y": np.arange(40) / 2}, "is data for regression"),
    ],
)
def test_data_that_does_not_fit_is_refused(
    tmp_path: Path, arrays: dict[str, Any], words: str
) -> None:
    np.savez(tmp_path / "own.npz", **arrays)
    with pytest.raises(DataError, match=words) as caught:
        get_task("digits").load(tmp_path / "own.npz")
    assert "own.npz" in str(caught.value)


def test_own_data_that_fits(tmp_path: Path) -> None:
    np.savez(tmp_path / "own.npz", x=np.eye(64).reshape(64, 8, 8), y=np.arange(64) % 4)
    assert get_task("digits").load(tmp_path / "own.npz").size("test") == 12


def test_a_short_training_run_learns() -> None:
    task = get_task("digits")
    data, host = task.load(), task.build_host(0)
    config = task.config
    optimizer = torch.optim.SGD(
        host.parameters(), config.learning_rate, config.momentum, weight_decay=config.weight_decay
    )

    def accuracy() -> float:
        with torch.no_grad():
            x, y = data.batch("val", data.subset)
            _, correct = task.objective(host(x), y)
        assert correct is not None
        return 100 * correct.mean().item()

    before = accuracy()
    for epoch in range(12):
        for indices in data.order(0, epoch).split(config.batch_size):
            x, y = data.batch("train", indices)
            optimizer.zero_grad()
            task.objective(host(x), y)[0].mean().backward()
            torch.nn.utils.clip_grad_norm_(host.parameters(), config.max_grad_norm)
            optimizer.step()
    assert before < 30
    assert accuracy() > 65
