"""Rows of one architecture are one stack, and each is what it would be alone."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
import torch

from esper.kasmina.hosts import CnnConfig
from esper.lab.population.engine import Condition, Roster, StackKey, Strategy, divide
from esper.lab.population.population import Population
from esper.lab.tasks import DataCache
from esper.lab.tasks.data import Source
from esper.lab.tasks.task import DataPath, Task
from esper.leyline.stages import SeedStage
from tests.lab.population.tiny_tasks import (
    TinyImages,
    TinyText,
    TinyValues,
    advance,
    assert_rows_agree,
    do,
    germinate,
    make_config,
    populations,
    row_tree,
)
from tests.plots import same

pytestmark = pytest.mark.usefixtures("kept_processes")


class OtherImages(TinyImages):
    """Other images of the same shape."""

    name = "other_images"

    def read(self, data_path: DataPath | None) -> Source:
        rng = np.random.default_rng(8)
        y = rng.integers(0, 3, 48)
        x = rng.integers(0, 90, (48, 1, 6, 6)) + 50 * y[:, None, None, None]
        return Source("other images", "memory", x.astype(np.uint8), y, num_classes=3)


def tiny(task_class: type[Task] = TinyImages, **changes: Any) -> Task:
    return task_class(task_class.defaults.replace(**{"horizon": 6, **changes}))


CONDITIONS: dict[str, Task] = {
    "plain": tiny(),
    "subset": tiny(train_size=15),
    "noise": tiny(label_noise=0.5),
    "other data": tiny(OtherImages),
    "rate": tiny(learning_rate=0.02),
    "decay": tiny(weight_decay=0.1),
    "momentum": tiny(momentum=0.5),
    "clip": tiny(max_grad_norm=0.1),
    "no clip": tiny(max_grad_norm=0.0),
    "cosine": tiny(schedule="cosine"),
    "warm-up": tiny(schedule="wsd", warmup=0.4, decay=0.4),
    "horizon": tiny(schedule="cosine", horizon=3),
    "images as they are": tiny(augment="none"),
    "seeds' rate": tiny(seed_factor=0.3, seed_warmup=2),
    "budget": tiny(param_budget=700),
    "chance": tiny(baseline_loss=5.0),
}
FACTS = {"plain", "budget", "chance"}
"""Conditions that change what is known of a row, not how it trains."""

NAMES = list(CONDITIONS)
EPOCHS = 6
LIFE = [germinate("norm", 0, 1), advance(), germinate("conv_small", 1, 3), advance(0), advance(1)]


def make(
    tasks: Sequence[Task],
    strategy: Strategy = "sequential",
    rows: int | Sequence[int] | None = None,
    row_seeds: Sequence[int] | None = None,
    **config: Any,
) -> Population:
    """Return a population of tasks that keep their own horizons; all rows have one seed."""
    settings = make_config(**{"precision": "float64", "workers": 2, **config})
    counts = len(tasks) if rows is None else rows
    total = counts if isinstance(counts, int) else sum(counts)
    seeds = [4] * total if row_seeds is None else row_seeds
    return Population(tasks, counts, 3, "cpu", strategy, config=settings, row_seeds=seeds)


def live(population: Population) -> Population:
    """Let all rows live the same life, for as many epochs as the longest of them has."""
    population.reset()
    for choice in LIFE:
        do(population, *[choice] * population.rows)
    return population


@pytest.fixture(scope="module")
def alone() -> dict[str, dict[str, Any]]:
    """Every row as it is alone, at its end, with its test score and what is known of it."""
    found = {}
    for name, task in CONDITIONS.items():
        with populations(live(make([task]))) as (population,):
            found[name] = row_tree(population, 0) | {"test": float(population.test_scores()[0])}
    return found


# -- rows alone and together -----------------------------------------------------------------------


@pytest.mark.parametrize("strategy", ["sequential", "workers"])
def test_a_row_among_others_is_the_row_alone_to_the_bit(
    strategy: Strategy, alone: dict[str, dict[str, Any]]
) -> None:
    with populations(live(make(list(CONDITIONS.values()), strategy))) as (together,):
        assert [group.rows for group in together.groups] == [len(CONDITIONS)]
        scores = together.test_scores()
        for row, name in enumerate(CONDITIONS):
            expected = alone[name]
            assert same(row_tree(together, row), {k: expected[k] for k in ("state", "weights")})
            assert float(scores[row]) == expected["test"]


@pytest.mark.parametrize("rows_per_stack", [1024, 5])
def test_a_row_in_a_stack_is_the_row_alone(
    rows_per_stack: int, alone: dict[str, dict[str, Any]]
) -> None:
    tasks = list(CONDITIONS.values())
    stacked = make(tasks, "stacked", rows_per_stack=rows_per_stack)
    with populations(live(stacked), live(make(tasks))) as (together, plain):
        assert all(group.engine.is_stacked for group in together.groups)
        assert [group.rows for group in together.groups] == (
            [16] if rows_per_stack == 1024 else [4, 4, 4, 4]
        )
        assert_rows_agree(together, plain, 1e-9)
        expected = torch.tensor([alone[name]["test"] for name in CONDITIONS])
        assert torch.allclose(together.test_scores(), expected.double(), atol=1e-6)


class OtherText(TinyText):
    """Other text, in another alphabet."""

    name = "other_text"

    def read(self, data_path: DataPath | None) -> Source:
        source = super().read(data_path)
        return dataclasses.replace(source, x=np.clip(source.x[:, ::-1], 2, 5))


TEXTS = [
    tiny(TinyText),
    tiny(TinyText, label_noise=0.5),
    tiny(TinyText, label_noise=0.2, train_size=30),
    tiny(OtherText, label_noise=0.3),
]


@pytest.mark.parametrize("strategy", ["sequential", "workers", "stacked"])
def test_wrong_tokens_of_a_row_are_the_same_in_every_strategy(strategy: Strategy) -> None:
    def lived(tasks: Sequence[Task], strategy: Strategy = "sequential") -> Population:
        population = make(tasks, strategy)
        population.reset()
        for choice in (germinate("norm"), advance(), advance()):
            do(population, *[choice] * population.rows)
        return population

    with populations(lived(TEXTS, strategy)) as (together,):
        assert [group.rows for group in together.groups] == [len(TEXTS)]
        for row, task in enumerate(TEXTS):
            with populations(lived([task])) as (single,):
                if strategy == "stacked":
                    assert_rows_agree(together, single, 1e-9, {row: 0})
                else:
                    assert same(row_tree(together, row), row_tree(single, 0))
        assert len({float(loss) for loss in together.groups[0].train_loss}) == len(TEXTS)


def test_every_condition_makes_a_difference(alone: dict[str, dict[str, Any]]) -> None:
    plain = alone["plain"]["weights"]["host"]
    for name in CONDITIONS:
        host = alone[name]["weights"]["host"]
        assert same(host, plain) == (name in FACTS), name


def test_what_is_known_of_a_row_is_its_own() -> None:
    with populations(make(list(CONDITIONS.values()), "stacked")) as (together,):
        signals = together.reset()
        facts = together.groups[0].facts
        assert signals.max_epochs.tolist() == [t.config.horizon for t in CONDITIONS.values()]
        assert facts.budget[NAMES.index("budget")] == 700
        assert facts.chance_loss[NAMES.index("chance")] == 5.0
        assert facts.train_samples[NAMES.index("subset")] == 15
        rates = together.groups[0]._rates(torch.full((len(NAMES),), 3))[1]
        assert rates[NAMES.index("rate")] == pytest.approx(0.02)
        assert rates[NAMES.index("cosine")] < rates[NAMES.index("plain")]


# -- the end of a row ------------------------------------------------------------------------------


@pytest.mark.parametrize("strategy", ["sequential", "stacked"])
def test_a_row_rests_after_its_horizon(strategy: Strategy) -> None:
    tasks = [CONDITIONS["plain"], CONDITIONS["horizon"]]
    with populations(make(tasks, strategy)) as (population,):
        population.reset()
        do(population, *[germinate("norm")] * 2)
        do(population, *[advance()] * 2)
        ended, score = row_tree(population, 1), float(population.test_scores()[1])
        do(population, *[advance()] * 2)
        signals = do(population, *[advance()] * 2)
        assert signals.epoch.tolist() == [5, 3]
        assert signals.stage[:, 0].tolist() == [SeedStage.BLENDING, SeedStage.TRAINING]
        assert same(row_tree(population, 1), ended)
        assert float(population.test_scores()[1]) == score
        assert population.panics().tolist() == [0, 0]
        # What is remembered says so too: a restored row rests as well.
        again = make(tasks, strategy)
        with populations(again):
            again.restore(population.snapshot())
            do(again)
            assert same(row_tree(again, 1), ended)
            assert int(again.signals().epoch[0]) == 6


# -- other tasks in the same population ------------------------------------------------------------

FIRST = [tiny(), tiny(label_noise=0.5), tiny(TinyValues), tiny(train_size=20)]
SECOND = [tiny(OtherImages), tiny(TinyValues, learning_rate=0.2), tiny(horizon=3), tiny()]


@pytest.mark.parametrize("strategy", ["sequential", "stacked", "workers"])
def test_a_population_takes_other_tasks(strategy: Strategy) -> None:
    used, new = make(FIRST, strategy), make(SECOND, strategy, row_seeds=[5, 6, 7, 8])
    with populations(used, new):
        live(used)
        engines = {id(group.engine): group.rows for group in used.groups}
        used.assign(SECOND)
        with pytest.raises(Exception, match=r"call reset\(\) first"):
            used.signals()
        used.reset([5, 6, 7, 8])
        new.reset()
        for choice in LIFE:
            do(used, *[choice] * 4)
            do(new, *[choice] * 4)
        assert [task.name for task in used.tasks] == [task.name for task in SECOND]
        assert all(same(row_tree(used, row), row_tree(new, row)) for row in range(4))
        if strategy == "stacked":
            assert {id(group.engine): group.rows for group in used.groups} == engines
        # And other numbers of rows.
        used.assign([tiny(TinyText)], rows=3)
        assert used.reset().val_loss.shape == (3,)
        assert used.num_slots == 2


def test_rows_come_in_the_order_of_their_tasks_whatever_runs_together() -> None:
    tasks = [tiny(), tiny(TinyValues), tiny(learning_rate=0.1)]
    with populations(make(tasks, "stacked", [2, 1, 2], row_seeds=range(5))) as (population,):
        signals = population.reset()
        assert [group.rows for group in population.groups] == [4, 1]
        assert population.task_of_row == (0, 0, 1, 2, 2)
        group, place = population.locate(3)
        assert (group, place) == (population.groups[0], 2)
        assert group.conditions[place].task is tasks[2]
        for row in range(5):
            group, place = population.locate(row)
            assert same(signals.val_loss[row], group.signals().val_loss[place])
        assert signals.enabled.sum(1).tolist() == [3, 3, 1, 3, 3]
        do(population, germinate("norm"), {"op": 0}, germinate("mlp"), {"op": 0}, germinate("norm"))
        assert population.signals().occupied[:, 0].tolist() == [True, False, True, False, True]
        with populations(population.fork([4, 2, 0])) as (fork,):
            assert fork.task_of_row == (0, 1, 2)
            for mine, theirs in enumerate((0, 2, 4)):
                assert same(row_tree(fork, mine), row_tree(population, theirs))


# -- the arithmetic of stacks ----------------------------------------------------------------------


def condition(task: Task) -> Condition:
    return Condition(task, task.load())


def test_what_makes_an_architecture() -> None:
    plain = StackKey.of(condition(tiny()))
    for task in CONDITIONS.values():
        assert StackKey.of(condition(task)) == plain
    others = [
        tiny(host_options=CnnConfig(channels=(4, 4, 6), num_classes=3, in_channels=1)),
        tiny(batch_size=5),
        tiny(samples_per_step=15),
        tiny(optimizer="adamw"),
        tiny(validation_samples=8),
        tiny(TinyValues),
    ]
    found = {StackKey.of(condition(task)) for task in others}
    assert len(found) == len(others)
    assert plain not in found
    data = tiny().load()
    real = {split: x.float() for split, x in data.splits.samples.items()}
    stored = data.on(dataclasses.replace(data.splits, samples=real))
    assert StackKey.of(Condition(tiny(), stored)) != plain


class OwnHost(TinyImages):
    """Builds its hosts in a way of its own."""

    name = "own_host"

    def build_host(self, seed: int) -> torch.nn.Module:
        return super().build_host(seed + 1)


def test_hosts_that_are_built_otherwise_are_another_architecture() -> None:
    assert StackKey.of(condition(tiny(OwnHost))) != StackKey.of(condition(tiny()))


def test_rows_are_divided_into_equal_parts() -> None:
    assert divide([3, 4, 5], 1024) == [[3, 4, 5]]
    assert [len(part) for part in divide(range(1030), 1024)] == [515, 515]
    assert [len(part) for part in divide(range(2049), 1024)] == [683, 683, 683]
    assert divide(range(5), 2) == [[0, 1], [2, 3], [4]]
    assert divide(range(3), 1) == [[0], [1], [2]]


def test_some_rows_of_a_roster() -> None:
    shelf = DataCache()
    conditions = [Condition(task, shelf.load(task)) for task in (tiny(), tiny(TinyText), tiny())]
    roster = Roster.of(conditions, [0, 0, 1, 2])
    assert list(roster.architectures.values()) == [[0, 1, 3], [2]]
    part, chosen = roster.take([3, 2, 3])
    assert chosen == [2, 3, 3]
    assert part.task_of_row == (0, 1, 1)
    assert [each.task.name for each in part.conditions] == ["tiny_text", "tiny_images"]
    assert part.condition(2) is conditions[2]


def test_a_thousand_rows_are_one_stack() -> None:
    rows, mine = 1024, 777
    tasks = [tiny(TinyValues, learning_rate=0.01 * (1 + number)) for number in range(4)]
    crowd = make(tasks, "stacked", [rows // 4] * 4, row_seeds=range(rows))
    single = make([tasks[mine // (rows // 4)]], "stacked", 1, row_seeds=[mine])
    with populations(crowd, single):
        crowd.reset()
        single.reset()
        assert [group.rows for group in crowd.groups] == [rows]
        actions = [germinate("mlp", 0, row % 4) for row in range(rows)]
        do(crowd, *actions)
        do(single, actions[mine])
        assert_rows_agree(single, crowd, 1e-9, {0: mine})
        assert crowd.test_scores().shape == (rows,)
