"""Measuring a population: the numbers belong together, and rows are the same in every case."""

from __future__ import annotations

import pytest
import torch

from esper.kasmina.contribution import participating, plan_ablations
from esper.lab.bench.engine import (
    WIDE,
    Case,
    Throughput,
    grown_population,
    half_grown,
    make_cases,
    measure,
    measure_matmul,
    measured_task,
    random_data,
    ratios,
    step_flops,
)
from esper.leyline.errors import UsageError
from esper.leyline.stages import SeedStage
from tests.lab.population.tiny_tasks import TinyImages, TinyText, TinyValues, populations, row_tree
from tests.plots import same

QUICK = {"task": "digits", "samples": 64, "batch_size": 32}


@pytest.mark.parametrize("strategy", ["sequential", "stacked"])
def test_rates_phases_and_shares_belong_together(strategy: str) -> None:
    case = Case(strategy=strategy, rows=2, steps=1, **QUICK)  # type: ignore[arg-type]
    found = measure(case, "cpu", matmul_rate=1e11)
    assert (found.strategy, found.rows, found.precision) == (strategy, 2, "fp32")
    assert min(found.train_s, found.validate_s, found.other_s) > 0
    assert found.row_ms == pytest.approx(500 * found.step_s)
    assert found.row_epochs_per_s == pytest.approx(2 / found.step_s)
    assert found.images_per_s == pytest.approx(64 * found.row_epochs_per_s)
    assert found.matmul_share == pytest.approx(found.tflops * 1e12 / 1e11)
    assert 0 < found.matmul_share < 1
    assert found.memory_gib is None
    assert set(found.to_mapping()) == set(Throughput.__slots__)


def test_about_half_of_the_slots_are_grown_with_everything_there_is() -> None:
    task = measured_task("digits")
    case = Case(task="digits", strategy="sequential", rows=60)
    with populations(grown_population(task, random_data(task), case, "cpu")) as (population,):
        (group,) = population.groups
        state = group.state
        grown = state.has_module
        assert 0.4 < float(grown.float().mean()) < 0.6
        assert set(state.stage[grown].tolist()) == {
            SeedStage.BLENDING,
            SeedStage.FOSSILIZED,
            SeedStage.TRAINING,
        }
        assert set(state.blueprint[grown].tolist()) == set(
            group.table.fits()[0, 0].nonzero().flatten().tolist()
        )
        assert set(state.algorithm[grown].tolist()) == {0, 1, 2}
        assert bool((state.params[grown] > 0).all())


def test_a_row_is_the_same_whichever_case_it_is_part_of() -> None:
    task = measured_task("digits")
    data = random_data(task)
    whole = Case(task="digits", strategy="sequential", rows=4)
    part = Case(task="digits", strategy="sequential", rows=2, first_row=2)
    with populations(
        grown_population(task, data, whole, "cpu"), grown_population(task, data, part, "cpu")
    ) as (one, other):
        assert same(row_tree(one, 2), row_tree(other, 0))
        assert same(row_tree(one, 3), row_tree(other, 1))


def test_operations_of_a_step_are_those_of_its_passes() -> None:
    task = measured_task("digits")
    case = Case(task="digits", strategy="sequential", rows=1)
    with populations(grown_population(task, random_data(task), case, "cpu")) as (population,):
        (group,) = population.groups
        group.start(group.state.clear(torch.ones_like(group.state.occupied)))
        # A convolution of k x k from a to b channels on n x n: 2 k^2 a b n^2 operations.
        host = 2 * 9 * (1 * 4 * 64 + 4 * 8 * 16 + 8 * 8 * 4) + 2 * 8 * 10
        assert step_flops(group, 100) == host * (3 * 1024 + 100)
        group.start(half_grown(group))
        plan = plan_ablations(participating(group.state)[0].tolist())
        assert step_flops(group, 100) > host * (3 * 1024 + 100 * len(plan))


def test_cases_are_every_combination_behind_the_rows_one_after_another() -> None:
    cases = make_cases(
        ["digits"],
        ["sequential", "stacked"],
        [2, 4],
        ["fp32", "bf16"],
        reference={"rows": 1, "steps": 1},
        steps=3,
    )
    assert [(case.strategy, case.rows, case.use_bf16, case.steps) for case in cases] == [
        ("sequential", 1, False, 1),
        ("stacked", 2, False, 3),
        ("stacked", 2, True, 3),
        ("stacked", 4, False, 3),
        ("stacked", 4, True, 3),
    ]
    assert make_cases(["digits"], [], [2], ["fp32"], reference=None) == []
    with pytest.raises(UsageError, match="unknown task"):
        make_cases(["nothing"], ["stacked"], [2], ["fp32"], reference=None)


def test_ratios_are_against_the_rows_of_the_same_task_one_after_another() -> None:
    def result(task: str, strategy: str, row_ms: float) -> Throughput:
        values = dict.fromkeys(Throughput.__slots__, 0)
        return Throughput(**{**values, "task": task, "strategy": strategy, "row_ms": row_ms})  # type: ignore[arg-type]

    results = [
        result("a", "sequential", 10.0),
        result("a", "stacked", 2.0),
        result("b", "stacked", 1.0),
    ]
    assert ratios(results) == [1.0, 5.0, None]


@pytest.mark.parametrize("task", [TinyImages, TinyText, TinyValues])
def test_random_data_has_the_shape_of_the_tasks(task: type[TinyImages]) -> None:
    made = task()
    data, real = random_data(made, 200), made.load()
    x, y = data.batch("train", data.order(0, 1)[:3])
    real_x, real_y = real.batch("train", real.order(0, 1)[:3])
    assert (x.shape, x.dtype, y.shape, y.dtype) == (
        real_x.shape,
        real_x.dtype,
        real_y.shape,
        real_y.dtype,
    )
    assert data.samples_per_step == real.samples_per_step


def test_tasks_by_name() -> None:
    wide = measured_task(WIDE, batch_size=64, samples=256)
    assert wide.config.batch_size == 64
    assert wide.config.samples_per_step == 256
    assert wide.host_parameters > 90_000
    with pytest.raises(UsageError, match="unknown task"):
        measured_task("nothing")


def test_the_machines_own_speed() -> None:
    assert measure_matmul(torch.device("cpu"), size=128) > 1e8
