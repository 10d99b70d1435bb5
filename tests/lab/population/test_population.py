"""`Population`: the interface, and snapshots, forks and twins of its rows."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

import esper
from esper.kasmina.blueprints.registry import BLUEPRINTS
from esper.kasmina.engine import EpochResult
from esper.kasmina.lifecycle import LifecycleConfig
from esper.kasmina.state import GateConfig
from esper.lab.population.engine import MemoryLimitError, Strategy
from esper.lab.population.population import Population
from esper.leyline.actions import placeholder_actions
from esper.leyline.errors import CheckpointError, UsageError
from esper.leyline.slots import BUILTIN_BLUEPRINTS, BUILTIN_KINDS
from esper.leyline.stages import SeedStage
from esper.utils.storage import load_tree, save_tree
from tests.lab.population.plugins import Odd, OddSeed, plugged_in
from tests.lab.population.tiny_tasks import (
    MIXED,
    Script,
    TinyImages,
    TinyText,
    TinyValues,
    advance,
    assert_rows_agree,
    do,
    explore,
    germinate,
    make_config,
    make_population,
    populations,
    row_tree,
)
from tests.plots import same

ROWS = (2, 2, 1)


@pytest.fixture(scope="module")
def lived() -> Iterator[tuple[Population, Script]]:
    """A mixed population that has lived through eight steps."""
    population = make_population(rows=ROWS)
    with populations(population):
        yield population, explore(population, 8, seed=5)


def trees(population: Population) -> list[dict[str, Any]]:
    return [row_tree(population, row) for row in range(population.rows)]


def go_on(population: Population, steps: int = 3) -> list[dict[str, Any]]:
    """Live on with actions drawn from the state alone; return all rows."""
    from tests.lab.population.tiny_tasks import Explorer

    explorer = Explorer(99)
    explorer._watch = lambda signals: None  # type: ignore[method-assign]
    for _ in range(steps):
        population.step(explorer.act(population, population.signals()))
    return trees(population)


# -- the interface ---------------------------------------------------------------------------------


def test_the_interface_of_the_package() -> None:
    population = esper.Population(task="digits", rows=2, seed=7, device="cpu", strategy="auto")
    assert (population.rows, population.num_slots, population.row_seeds) == (2, 3, [0, 1])
    with pytest.raises(UsageError, match=r"no rows yet; call reset\(\) first"):
        population.signals()


def test_reset_trains_and_validates_the_first_epoch() -> None:
    with populations(make_population(rows=ROWS)) as (population,):
        signals = population.reset()
        assert signals.epoch.tolist() == [1] * 5
        assert bool(torch.isfinite(signals.val_loss).all())
        assert bool(torch.isfinite(signals.best_score).all())
        assert not bool(signals.occupied.any())
        assert bool(signals.last_success.all())
        first = trees(population)
        do(population, germinate("norm"))
        population.reset()
        assert same(trees(population), first)


@pytest.mark.parametrize("strategy", ["sequential", "stacked"])
def test_reset_takes_new_seeds_for_the_rows(strategy: Strategy) -> None:
    """Also by worker processes, in test_workers.py."""
    population = make_population([TinyValues], 2, strategy)
    expected = make_population([TinyValues], 2, strategy, row_seeds=[8, 9])
    with populations(population, expected):
        first = population.reset()
        data = population.conditions[0].data
        again = population.reset([8, 9])
        assert same(again.val_loss, expected.reset().val_loss)
        assert not same(again.val_loss, first.val_loss)
        assert population.row_seeds == [8, 9]
        assert population.groups[0].keys == expected.groups[0].keys
        assert population.conditions[0].data is data
        assert same(population.reset().val_loss, again.val_loss)
        with pytest.raises(UsageError, match="row_seeds must have 2 entries, got 3"):
            population.reset([1, 2, 3])
        assert same(population.signals().val_loss, again.val_loss), "a refusal changes nothing"


@pytest.mark.parametrize("strategy", ["sequential", "stacked"])
def test_no_population_grows_copies_of_blocks(strategy: Strategy) -> None:
    """`kin` is absent, or, where a blueprint of a user's comes after it, fits nowhere."""
    kin = BLUEPRINTS.get("kin").id

    def refused(population: Population) -> None:
        population.reset()
        do(population, germinate("kin"))
        signals = population.signals()
        assert not bool(signals.last_success[0])
        assert not bool(signals.occupied.any())

    with populations(make_population([TinyValues], 2, strategy)) as (population,):
        refused(population)
        assert population.known_blueprints() == BUILTIN_BLUEPRINTS
        assert population.known_kinds() == BUILTIN_KINDS
        assert population.signals().seed_params.shape[-1] == kin
        assert population.masks().blueprint_by_slot.shape[-1] == kin
        assert population.made()["blueprints"] == list(BUILTIN_BLUEPRINTS)
    with (
        plugged_in(odd=OddSeed),
        populations(make_population([TinyValues], 2, strategy)) as (population,),
    ):
        refused(population)
        assert population.known_blueprints() == (*BUILTIN_BLUEPRINTS, "kin", "odd")
        fits = population.masks().blueprint_by_slot
        assert not bool(fits[..., kin].any())
        assert bool(fits[..., kin + 1].any())
        do(population, germinate("odd"))
        assert bool(population.signals().occupied[0, 0])


def test_rows_are_shared_out_among_tasks() -> None:
    population = make_population(rows=8)
    assert [population.task_of_row.count(index) for index in range(3)] == [3, 3, 2]
    for rows in (2, (1, 1), (1, 0, 1)):
        with pytest.raises(UsageError, match="every one of 3 tasks needs at least one row"):
            make_population(rows=rows)
    with pytest.raises(UsageError, match="row_seeds must have 3 entries, got 1"):
        make_population(rows=3, row_seeds=[1])
    with pytest.raises(UsageError, match="no CUDA device"):
        Population(TinyValues(), 1, device="cuda")


def test_as_many_actions_as_rows() -> None:
    with populations(make_population([TinyValues], 2)) as (population,):
        population.reset()
        with pytest.raises(UsageError, match="2 rows need as many actions, got 3"):
            population.step(placeholder_actions(3))


def test_equal_rows_live_equal_lives() -> None:
    with populations(make_population([TinyValues], 3, row_seeds=[4, 9, 4])) as (population,):
        population.reset()
        do(population, *[germinate("mlp", 0, 3)] * 3)
        one, other, again = trees(population)
        assert same(one, again)
        assert not same(one, other)


def test_a_closed_population_starts_anew() -> None:
    population = make_population([TinyValues], 2, "stacked")
    first = population.reset()
    population.close()
    population.close()
    with pytest.raises(UsageError, match="reset"):
        population.step(placeholder_actions(2))
    assert same(population.reset().val_loss, first.val_loss)
    population.close()


# -- snapshot and restore --------------------------------------------------------------------------


@pytest.mark.parametrize("strategy", ["sequential", "stacked"])
def test_a_restored_population_replays_to_the_bit(strategy: Strategy) -> None:
    population = make_population(rows=ROWS, strategy=strategy)
    with populations(population):
        explore(population, 7, seed=6)
        saved = population.snapshot()
        now, ahead = trees(population), go_on(population)
        assert not same(now, ahead)
        for _ in range(2):
            population.restore(saved)
            assert same(trees(population), now)
            assert same(go_on(population), ahead)


def test_a_snapshot_is_a_copy(lived: tuple[Population, Script]) -> None:
    with populations(lived[0].fork(range(lived[0].rows))) as (population,):
        saved, again = population.snapshot(), population.snapshot()
        go_on(population, 1)
        assert same(saved, again)
        population.restore(saved)
        go_on(population, 1)
        assert same(saved, again)


@pytest.mark.parametrize(("one", "other"), [("sequential", "stacked"), ("stacked", "sequential")])
def test_snapshots_travel_between_strategies(one: Strategy, other: Strategy) -> None:
    here = make_population(rows=ROWS, strategy=one, precision="float64")
    there = make_population(rows=ROWS, strategy=other, precision="float64", rows_per_stack=1)
    with populations(here, there):
        explore(here, 8, seed=5)
        saved = here.snapshot()
        there.restore(saved)
        assert same(trees(here), trees(there))
        go_on(here)
        go_on(there)
        assert_rows_agree(here, there, 1e-9)
        # And back, whatever the stacks are.
        here.restore(there.snapshot())
        assert same(trees(here), trees(there))


def test_a_saved_population_goes_on_in_another(
    lived: tuple[Population, Script], tmp_path: Path
) -> None:
    population, _ = lived
    save_tree(tmp_path / "state", population.snapshot(), kind="population", version=1)
    loaded = make_population(rows=ROWS, seed=77, row_seeds=[9, 9, 9, 9, 9])
    with populations(loaded, population.fork(range(population.rows))) as (_, forked):
        saved, _ = load_tree(tmp_path / "state", kind="population", version=1)
        signals = loaded.restore(saved)
        assert same(trees(loaded), trees(population))
        assert same(signals.val_loss, population.signals().val_loss)
        assert (loaded.seed, loaded.row_seeds) == (population.seed, population.row_seeds)
        assert same(go_on(loaded), go_on(forked))


@pytest.mark.parametrize("strategy", ["sequential", "stacked"])
def test_what_adamw_remembers_is_saved_to_the_bit(strategy: Strategy) -> None:
    changes = {"optimizer": "adamw", "learning_rate": 0.003, "seed_rate": "own", "seed_warmup": 3}
    tasks = [task(task.defaults.replace(schedule="cosine", **changes)) for task in MIXED]
    whole, loaded = make_population(tasks, 3, strategy), make_population(tasks, 3, strategy)
    with populations(whole, loaded):
        # Seeds of several ages, some gone again.
        explore(whole, 9, seed=2)
        assert any(bool(group.state.learned.any()) for group in whole.groups)
        loaded.restore(whole.snapshot())
        assert same(trees(loaded), trees(whole))
        assert same(go_on(loaded), go_on(whole))
        assert same(trees(loaded), trees(whole))


@pytest.mark.parametrize(
    ("made", "reason"),
    [
        ({"rows": (2, 1, 2)}, r"rows \[2, 2, 1\], this one has rows \[2, 1, 2\]"),
        (
            {"tasks": MIXED[:2], "rows": 5},
            r"tasks \['tiny_images', .*\['tiny_images', 'tiny_text'\]",
        ),
        ({"precision": "float64"}, "settings.precision 'float32', this one has .* 'float64'"),
        (
            {"lifecycle": LifecycleConfig(gates=GateConfig(min_training_epochs=2))},
            "settings.lifecycle.gates.min_training_epochs 1, .* 2",
        ),
        (
            {
                "tasks": [
                    TinyImages,
                    TinyText,
                    TinyValues(TinyValues.defaults.replace(batch_size=4)),
                ]
            },
            r"task settings\[2\].batch_size 8, .* 4",
        ),
    ],
)
def test_a_snapshot_of_something_else_is_refused_in_one_line(
    lived: tuple[Population, Script], made: dict[str, Any], reason: str
) -> None:
    other = make_population(**{"rows": ROWS, **made})
    with populations(other):
        other.reset()
        before = trees(other)
        with pytest.raises(CheckpointError, match=reason) as caught:
            other.restore(lived[0].snapshot())
        assert "\n" not in str(caught.value)
        assert str(caught.value).endswith("make it the same way")
        assert same(trees(other), before), "a refusal changes nothing"


def test_a_snapshot_with_blueprints_that_are_not_registered_is_refused() -> None:
    with plugged_in(odd=Odd), populations(make_population([TinyValues], 1)) as (population,):
        population.reset()
        saved = population.snapshot()
    other = make_population([TinyValues], 1)
    with pytest.raises(CheckpointError, match=r"with blueprints .*'odd'"):
        other.restore(saved)


def test_what_is_no_snapshot_is_refused() -> None:
    with pytest.raises(CheckpointError, match="this is no snapshot of a population"):
        make_population([TinyValues], 1).restore({"weights": {}})


def test_how_rows_are_executed_is_no_part_of_what_they_are(
    lived: tuple[Population, Script],
) -> None:
    other = make_population(rows=ROWS, strategy="stacked", use_bf16=True, workers=3)
    with populations(other):
        other.restore(lived[0].snapshot())
        assert same(trees(other), trees(lived[0]))


# -- forks and twins -------------------------------------------------------------------------------


@pytest.mark.parametrize("rows", [[0], [3, 0], [4, 2, 2, 1], [1, 1]])
def test_a_fork_is_in_exactly_the_state_of_its_rows(
    lived: tuple[Population, Script], rows: list[int]
) -> None:
    population, _ = lived
    before = trees(population)
    with populations(population.fork(rows)) as (fork,):
        by_task = sorted(rows, key=lambda row: population.task_of_row[row])
        assert same(trees(fork), [before[row] for row in by_task])
        assert fork.num_slots == population.num_slots
        assert [task.name for task in fork.tasks] == list(
            dict.fromkeys(population.tasks[population.task_of_row[row]].name for row in by_task)
        )
        signals = fork.signals()
        assert same(signals.stage, population.signals().stage[by_task])
        go_on(fork)
        assert same(trees(population), before), "the rows it came from live on untouched"


def test_a_fork_with_the_same_actions_lives_the_same_life(
    lived: tuple[Population, Script],
) -> None:
    population, _ = lived
    with populations(population.fork([1, 3]), population.fork([1, 3, 1])) as (one, other):
        choices = [advance(0), germinate("norm", 1)]
        do(one, *choices)
        do(other, choices[0], germinate("attention", 2), choices[1])
        do(one)
        do(other)
        # Rows are grouped by task: 1 and its copy, then 3.
        assert same(row_tree(one, 0), row_tree(other, 0))
        assert same(row_tree(one, 1), row_tree(other, 2))


def test_a_fork_of_a_fork_and_its_snapshot(lived: tuple[Population, Script]) -> None:
    population, _ = lived
    with populations(population.fork([2, 3])) as (fork,):
        with populations(fork.fork([1])) as (again,):
            assert same(trees(again), trees(population)[3:4])
        saved = fork.snapshot()
        ahead = go_on(fork)
        fork.restore(saved)
        assert same(go_on(fork), ahead)


def test_rows_that_do_not_exist_cannot_be_forked(lived: tuple[Population, Script]) -> None:
    for rows in ([], [-1], [5], [0, 9]):
        with pytest.raises(UsageError, match="rows must be some of 0 to 4"):
            lived[0].fork(rows)


@pytest.mark.parametrize("strategy", ["sequential", "stacked"])
def test_the_twin_is_a_fork_before_the_first_action(strategy: Strategy) -> None:
    """The row itself, had it only waited; in the stacked strategy up to the last bits."""
    acting = make_population(rows=ROWS, strategy=strategy, precision="float64")
    waiting = make_population(rows=ROWS, strategy=strategy, precision="float64")
    with populations(acting, waiting):
        acting.reset()
        do(acting)
        twin = acting.fork([0, 3])
        with populations(twin):
            waiting.reset()
            do(waiting)
            life = [germinate("norm"), {"op": 0}, {"op": 0}, germinate("lora")]
            for choices in (life, [advance()] * 4, [], [advance()] * 4):
                do(acting, *choices)
                do(twin)
                do(waiting)
            assert int(acting.signals().stage[0, 0]) == SeedStage.BLENDING
            if strategy == "sequential":
                assert same(row_tree(twin, 0), row_tree(waiting, 0))
                assert same(row_tree(twin, 1), row_tree(waiting, 3))
            assert_rows_agree(twin, waiting, 1e-9, {0: 0, 1: 3})
            assert not same(acting.signals().val_loss[0], twin.signals().val_loss[0])


def test_there_is_time_for_other_things_when_all_epochs_have_begun() -> None:
    with populations(make_population([TinyValues, TinyText], 2)) as (population,):
        population.reset()
        events: list[str] = []

        def noting(name: str, method: Callable[[], None]) -> Callable[[], None]:
            def noted() -> None:
                events.append(name)
                method()

            return noted

        for number, group in enumerate(population.groups):
            for name in ("begin", "live"):
                noted = noting(f"{name} {number}", getattr(group, name))
                setattr(group, name, noted)
        population.meanwhile = lambda: events.append("meanwhile")
        population.step(placeholder_actions(2))
        assert events == ["begin 0", "begin 1", "meanwhile", "live 0", "live 1"]
        with populations(population.fork([0])) as (fork,):
            assert fork.meanwhile is None


def test_a_fork_shares_the_data() -> None:
    with populations(make_population([TinyValues], 2)) as (population,):
        population.reset()
        with populations(population.fork([1])) as (fork,):
            assert fork.conditions[0].data is population.conditions[0].data


# -- memory ----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("strategy", "advice"),
    [
        (
            "stacked",
            r"8 rows at once do not fit .* 4 would; use PopulationConfig\(rows_per_stack=4\)",
        ),
        ("sequential", "8 rows do not fit into .*, 4 would; use rows=4"),
    ],
)
@pytest.mark.parametrize("phase", ["train", "measure"])
def test_running_out_of_memory_names_the_rows_that_would_fit(
    strategy: Strategy, advice: str, phase: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    with populations(make_population([TinyValues], 8, strategy)) as (population,):
        population.reset()

        def too_much(*_: object) -> EpochResult:
            raise torch.OutOfMemoryError(
                "CUDA out of memory. Tried to allocate 8.00 GiB. GPU 0 has a total capacity of "
                "20.00 GiB of which 2.00 GiB is free. Of the allocated memory 16.00 GiB is "
                "allocated by PyTorch, and 1.00 GiB is reserved by PyTorch but unallocated."
            )

        monkeypatch.setattr(population.groups[0].engine, phase, too_much)
        with pytest.raises(MemoryLimitError, match=advice) as caught:
            do(population)
        assert "\n" not in str(caught.value)
        monkeypatch.undo()


def test_running_out_of_memory_while_rows_are_built(monkeypatch: pytest.MonkeyPatch) -> None:
    def too_much(*_: object) -> None:
        raise torch.OutOfMemoryError("CUDA out of memory.")

    monkeypatch.setattr(TinyValues, "build_host", too_much)
    with pytest.raises(MemoryLimitError, match="32 rows do not fit into memory, 16 would"):
        make_population([TinyValues], 32).reset()


def test_settings_say_what_they_are() -> None:
    config = make_config(rows_per_stack=3)
    assert type(config).from_mapping(config.to_mapping()) == config
