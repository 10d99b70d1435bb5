"""Networks that no controller has seen: every case can be grown, and the verdict is right."""

from __future__ import annotations

import importlib.util
from pathlib import Path

import pytest
import torch

from benchmarks.strangers import (
    CASES,
    NEED_TRANSFORMERS,
    SCHEDULES,
    TRAINER,
    Shuffled,
    _verdict,
    numbers,
    run_one,
)

NEEDS_DATA = ("vit", "vit-large", "resnet")


@pytest.mark.parametrize("case", [case for case in CASES if case not in (*NEEDS_DATA, TRAINER)])
def test_every_network_learns_from_its_data(case: str) -> None:
    if case in NEED_TRANSFORMERS and importlib.util.find_spec("transformers") is None:
        pytest.skip("transformers is not installed")
    chosen = CASES[case]
    torch.manual_seed(0)
    model = chosen.make()
    train, val, test = chosen.data(Path(), 0)
    assert len(train) > len(val) == len(test) // 2
    *inputs, targets = train[0]
    out = model(*inputs)
    if chosen.loss == "regression":
        assert out.shape == targets.shape
    else:
        assert out.shape[:-1] == targets.shape
        assert int(targets.max()) < out.shape[-1]


def test_a_run_has_its_twin_and_what_grew() -> None:
    found = run_one("mlp", next(iter(SCHEDULES)), 0, Path(), epochs=6)
    assert found["score"] < 0
    assert found["twin"] < 0
    assert found["growth"] >= 1
    assert found["seeds"]


@pytest.mark.integrations
def test_the_trainer_of_hugging_face_grows_what_a_schedule_says() -> None:
    pytest.importorskip("transformers")
    found = run_one(TRAINER, "late slot, early", 0, Path(), epochs=6)
    assert found["growth"] > 1
    assert [seed.split(":")[0] for seed in found["seeds"]] == ["mlp at transformer.h.1"]
    waiting = run_one(TRAINER, "wait", 0, Path(), epochs=1)
    assert 0 < waiting["score"] == waiting["twin"] < found["twin"] < 100


def test_batches_come_in_the_order_of_their_epoch() -> None:
    batches = Shuffled(numbers(Path(), 0)[0], 0)
    first = [x[0, 0] for x, _ in batches]
    batches.set_epoch(1)
    assert [x[0, 0] for x, _ in batches] != first
    batches.set_epoch(0)
    assert [x[0, 0] for x, _ in batches] == first


@pytest.mark.parametrize(
    ("schedule", "own", "told"),
    [
        ([2.0, 2.1], [1.2, 1.2], "59% of the best schedule"),
        ([2.0, 2.1], [0.2, 0.2], "10% of the best schedule: too little"),
        ([-1.0, 2.0], [0.0, 0.2], "median +0.1"),
        ([-1.0, 2.0], [-0.2, -0.2], "median -0.2: harm"),
        ([2.0], [1.0], "not measured"),
    ],
)
def test_the_verdict(schedule: list[float], own: list[float], told: str) -> None:
    assert _verdict({next(iter(SCHEDULES)): schedule, "tamiyo": own}) == told
