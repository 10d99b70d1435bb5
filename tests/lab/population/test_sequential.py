"""The plain strategy: the semantics every other one is held to."""

from __future__ import annotations

import contextlib
import dataclasses
import warnings

import pytest
import torch

from esper.kasmina.lifecycle import GardenConfig
from esper.kasmina.state import EarnedGates
from esper.lab.population.engine import PopulationConfig
from esper.lab.population.population import Population
from esper.lab.population.sequential import one_thread
from esper.lab.tasks.request import task_config, task_run
from esper.lab.tasks.task import Task
from esper.leyline.stages import SeedStage
from esper.tamiyo.controllers.registry import Choice
from esper.utils.randomness import derive_seed
from tests.lab.population.plugins import odd_task, plugged_in
from tests.lab.population.tiny_tasks import (
    MIXED,
    QUICK,
    TinyImages,
    TinyText,
    TinyValues,
    advance,
    do,
    germinate,
    make_population,
    populations,
    read_row,
    row_tree,
)
from tests.plots import Script, same

SEEDS = {TinyImages: "conv_heavy", TinyText: "attention", TinyValues: "mlp"}


def life(blueprint: str, slot: int = 0, style: int = 3) -> dict[int, Choice]:
    """A seed's life by the epoch after which each step is taken, with a germination refused."""
    return {
        1: germinate(blueprint, slot, style),
        2: advance(slot),
        3: germinate(blueprint, slot, style),
        4: advance(slot),
        8: advance(slot),
        9: {"op": 4, "slot": slot},
    }


@pytest.mark.parametrize("rows", [7, 64])
def test_a_row_is_the_same_bit_for_bit_whoever_runs_beside_it(rows: int) -> None:
    mine, steps = 5, [germinate("mlp", 0, 3), advance(), advance(), {"op": 0}]
    alone = make_population([TinyValues], 1, row_seeds=[mine])
    crowd = make_population([TinyValues], rows)
    with populations(alone, crowd):
        alone.reset()
        crowd.reset()
        for number, choice in enumerate(steps):
            do(alone, choice)
            others = [
                advance() if number % 2 else germinate("lora", 0, row % 4) for row in range(rows)
            ]
            others[mine] = choice
            do(crowd, *others)
            assert same(row_tree(alone, 0), row_tree(crowd, mine))
        assert len(crowd.signals().blueprint.unique()) > 1


# The tiny text is not learned within so few epochs, which does not matter here.
@pytest.mark.filterwarnings("ignore:The network has learned nothing in 5 epochs")
@pytest.mark.parametrize("schedule", ["constant", "cosine", "wsd"])
@pytest.mark.parametrize("task", MIXED)
def test_a_row_is_what_a_gardener_grows_alone(task: type[Task], schedule: str) -> None:
    epochs = 12
    made = task(task.defaults.replace(schedule=schedule))
    choices = life(SEEDS[task])  # type: ignore[index]
    controller = Script(choices)
    key = derive_seed(3, 0, "row")
    config = task_config(
        made, epochs=epochs, seed=key, twin=False, garden=GardenConfig(lifecycle=QUICK)
    )
    # A population keeps the waits it is told, however short its episodes are.
    config = config.replace(gardener=config.gardener.replace(fits_horizon=False))
    run = task_run(made, made.load(), config=config, controller=controller)
    population = Population(
        made, 1, 3, "cpu", "sequential", horizon=epochs, config=population_config()
    )
    with populations(population):
        seen = [population.reset()]
        seen += [do(population, choices.get(epoch, {"op": 0})) for epoch in range(1, epochs)]
        with one_thread(torch.device("cpu")):
            records = list(run.epochs())
        expected = [*controller.seen, run.gardener.signals()]
        assert len(seen) == len(expected)
        for mine, theirs in zip(seen, expected, strict=True):
            for field in dataclasses.fields(mine):
                own, other = getattr(mine, field.name), getattr(theirs, field.name)
                if field.name in ("seed_params", "seed_flops"):
                    # A garden knows copies of blocks as well.
                    other = other[..., : own.shape[-1]]
                assert same(own, other), field.name
        # So few samples may all be answered alike, with the seed and without; then it is not kept.
        held = int(SeedStage.HOLDING)
        was_idle = any(
            int(one.stage[0, 0]) == held and float(one.contribution_se[0, 0]) == 0 for one in seen
        )
        assert int(seen[-1].stage[0, 0]) in {int(SeedStage.FOSSILIZED), held if was_idle else -1}
        (group,) = population.groups
        assert float(group.tracker.loss_history[0, -1]) == records[-1].val_loss
        assert float(group.tracker.score_history[0, -1]) == records[-1].val_score
        weights = dict(run.garden.model.named_parameters())
        for name, value in read_row(population, 0).host.items():
            assert torch.equal(value, weights[name]), name


def population_config() -> PopulationConfig:
    """A garden keeps no seed without effect, so that neither may the population it is equal to."""
    config = make_population([TinyValues], 1).config
    gates = EarnedGates.like(config.lifecycle.gates)
    return config.replace(lifecycle=config.lifecycle.replace(gates=gates))


def test_a_module_that_draws_does_so_from_its_rows_own_stream() -> None:
    with plugged_in():
        alone = make_population([odd_task(dropout=0.4)], 1, row_seeds=[2])
        crowd = make_population([odd_task(dropout=0.4)], 4)
        with populations(alone, crowd):
            alone.reset()
            torch.rand(5)
            crowd.reset()
            do(alone)
            do(crowd)
            assert same(row_tree(alone, 0), row_tree(crowd, 2))
            (task,) = alone.tasks
            config = task_config(task, epochs=2, seed=derive_seed(3, 2, "row"), twin=False)
            config = config.replace(gardener=config.gardener.replace(fits_horizon=False))
            run = task_run(task, task.load(), config=config, controller="wait")
            scores = [record.val_score for record in run.epochs()]
            assert scores[-1] == float(alone.groups[0].tracker.score_history[0, -1])


def test_running_statistics_are_part_of_a_row() -> None:
    with plugged_in(), populations(make_population([odd_task(batch_norm=True)], 2)) as (one,):
        one.reset()
        saved = one.snapshot()
        ahead = [do(one).val_loss for _ in range(2)]
        assert int(read_row(one, 0).host_buffers["body.1.num_batches_tracked"]) == 6
        one.restore(saved)
        assert int(read_row(one, 0).host_buffers["body.1.num_batches_tracked"]) == 2
        assert same(ahead, [do(one).val_loss for _ in range(2)])


def test_a_row_can_be_replaced_by_one_with_another_seed_in_the_same_slot() -> None:
    population = make_population([TinyValues], 2)
    with populations(population):
        population.reset()
        do(population, germinate("mlp"), germinate("lora", style=3))
        do(population, advance(), advance())
        (group,) = population.groups
        other = group.engine.read(1)
        group.engine.write(0, other, group.state.select([1]))
        assert same(group.engine.read(0).to_tree(), other.to_tree())
        groups = group.engine._trainees[0].optimizer.param_groups  # type: ignore[attr-defined]
        parameters = [p for each in groups for p in each["params"]]
        assert (
            len(parameters)
            == len({id(p) for p in parameters})
            == len(other.host) + len(other.seeds[0])
        )


def test_a_seed_from_a_snapshot_was_trained() -> None:
    population = make_population([TinyValues], 1, training_mode="shadow")
    with populations(population), warnings.catch_warnings():
        warnings.simplefilter("error")
        population.reset()
        do(population, germinate("mlp"))
        do(population, advance())
        do(population)
        saved = population.snapshot()
        ahead = do(population, advance())
        assert int(ahead.stage[0, 0]) == SeedStage.BLENDING
        population.restore(saved)
        assert same(do(population, advance()).val_loss, ahead.val_loss)


def test_rows_without_a_plan_are_left_out() -> None:
    population = make_population([TinyValues], 3)
    with populations(population):
        population.reset()
        engine = population.groups[0].engine
        everything = torch.ones((1, 1), dtype=torch.bool)
        loss, _ = engine.measure([everything] * 3)
        some, _ = engine.measure([everything[:0], everything, everything[:0]])
        assert torch.equal(some, loss[1:2])
        nothing, correct = engine.measure([everything[:0]] * 3)
        assert nothing.shape == (0, 10)
        assert correct is None


@pytest.mark.parametrize("fails", [False, True])
def test_rows_run_with_one_thread_whatever_their_owner_has(fails: bool) -> None:
    threads = torch.get_num_threads()
    torch.set_num_threads(2)
    try:
        with contextlib.suppress(KeyError), one_thread(torch.device("cpu")):
            assert torch.get_num_threads() == 1
            if fails:
                raise KeyError
        assert torch.get_num_threads() == 2
        with one_thread(torch.device("meta")):
            assert torch.get_num_threads() == 2
    finally:
        torch.set_num_threads(threads)
