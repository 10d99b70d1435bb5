import dataclasses
from types import ModuleType
from typing import Any

import numpy as np
import pytest
import torch

from esper.leyline.signals import Signals
from esper.leyline.stages import STAGE_INDEX, SeedStage
from esper.tamiyo.policy.arrays import RawSignals, Workbench, make_workbench, workbench
from esper.testing.signals import random_signals

CPU = torch.device("cpu")


@pytest.fixture(params=[np, torch], ids=["numpy", "torch"])
def bench(request: pytest.FixtureRequest) -> Workbench:
    return make_workbench(4, CPU, request.param)


def array(bench: Workbench, values: torch.Tensor) -> Any:
    return values.numpy() if bench.is_numpy else values


def test_the_cpu_uses_numpy_and_keeps_its_tables() -> None:
    assert workbench(3, CPU).xp is np
    assert workbench(3, CPU) is workbench(3, CPU)
    assert workbench(3, CPU) is not workbench(4, CPU)


def test_every_raw_signal_is_a_signal() -> None:
    names = {field.name for field in dataclasses.fields(Signals)}
    assert set(RawSignals._fields) <= names
    assert "twin_score" not in RawSignals._fields


def test_signals_are_read_without_a_copy(bench: Workbench) -> None:
    signals, _ = random_signals(5, 4, torch.Generator().manual_seed(0))
    raw = bench.read(signals)
    assert isinstance(raw.alpha, np.ndarray if bench.is_numpy else torch.Tensor)
    raw.alpha[0, 0] = 0.25
    assert float(signals.alpha[0, 0]) == 0.25


def test_stage_bits_are_activity_and_one_hot(bench: Workbench) -> None:
    values = torch.tensor([[int(stage) for stage in SeedStage]])
    bits = bench.tensor(bench.look_up(bench.stage_bits, array(bench, values)))
    assert bool((bits[0, :, 0] == 1).all())
    for place, stage in enumerate(SeedStage):
        assert bits[0, place, 1:].tolist() == [float(i == STAGE_INDEX[stage]) for i in range(10)]
    nothing = array(bench, torch.tensor([-1, 5, 11]))
    assert not bool(bench.tensor(bench.look_up(bench.stage_bits, nothing)).any())
    with pytest.raises(IndexError):
        bench.look_up(bench.stage_bits, array(bench, torch.tensor([12])))


def test_op_bits_are_a_one_hot(bench: Workbench) -> None:
    bits = bench.tensor(bench.look_up(bench.op_bits, array(bench, torch.arange(6))))
    assert torch.equal(bits, torch.eye(6))
    assert not bool(
        bench.tensor(bench.look_up(bench.op_bits, array(bench, torch.tensor([-1])))).any()
    )


def test_sums_over_neighbours(bench: Workbench) -> None:
    weight = torch.rand(6, 3)
    around = bench.tensor(bench.around(array(bench, weight)))
    for slot in range(3):
        torch.testing.assert_close(around[:, slot, 0], weight[:, :slot].sum(1))
        torch.testing.assert_close(around[:, slot, 1], weight[:, slot + 1 :].sum(1))
    pairs = torch.randn(6, 3, 3)
    total, most = bench.sum_and_most(array(bench, pairs))
    torch.testing.assert_close(bench.tensor(total), pairs.sum(-1))
    torch.testing.assert_close(bench.tensor(most), pairs.amax(-1))


def test_a_blank_observation_is_zero(bench: Workbench) -> None:
    blank = bench.tensor(bench.blank(3))
    assert (blank.shape, blank.dtype) == ((3, 151), torch.float32)
    assert not bool(blank.any())


@pytest.mark.parametrize("library", [np, torch], ids=["numpy", "torch"])
def test_tables_made_while_inferring_are_ordinary(library: ModuleType) -> None:
    with torch.inference_mode():
        bench = make_workbench(2, CPU, library)
    assert not bench.tensor(bench.units).is_inference()
