"""A group under its governor: rollbacks, and rows that are not finite among rows that are."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from typing import Any

import pytest
import torch

from esper.kasmina.engine import EpochResult, RowWeights
from esper.kasmina.signals import MIN_SAMPLES, GovernorConfig
from esper.lab.population.engine import Strategy
from esper.lab.population.population import Population
from esper.lab.population.task_group import TaskGroup, merge_signals, merge_views
from esper.leyline.actions import LifecycleOp
from esper.leyline.rules import build_masks
from esper.leyline.signals import Signals
from esper.leyline.stages import SeedStage
from tests.lab.population.tiny_tasks import (
    TinyImages,
    advance,
    assert_rows_agree,
    do,
    germinate,
    make_population,
    populations,
    read_row,
    row_tree,
)
from tests.plots import same

STRATEGIES: tuple[Strategy, ...] = ("sequential", "stacked")
VICTIM = 1
OTHERS = (0, 2, 3)
FOSSIL, LIVE, YOUNG = 0, 1, 2


def grown(strategy: Strategy, **config: Any) -> Population:
    """Return four rows: a fossil in the first slot, a blending seed, then one in TRAINING."""
    population = make_population([TinyImages], 4, strategy, precision="float64", **config)
    population.reset()
    names = ("conv_light", "conv_heavy", "depthwise", "conv_small")
    do(population, *(germinate(name, FOSSIL, 2) for name in names))
    do(population, *[advance(FOSSIL)] * 4)
    do(population)
    do(population, *[advance(FOSSIL)] * 4)
    for _ in range(2):
        do(population)
    do(population, *[advance(FOSSIL)] * 4)
    do(population, *[{"op": LifecycleOp.FOSSILIZE, "slot": FOSSIL}] * 4)
    do(population, *(germinate("conv_light", LIVE, row) for row in range(4)))
    do(population, *[advance(LIVE)] * 4)
    do(population)
    do(population, *[advance(LIVE)] * 4)
    do(population, *(germinate("depthwise", YOUNG, 3) for _ in range(4)))
    signals = do(population, *[advance(YOUNG)] * 4)
    stages = [SeedStage.FOSSILIZED, SeedStage.BLENDING, SeedStage.TRAINING]
    assert signals.stage.tolist() == [[int(stage) for stage in stages]] * 4
    return population


def spoil(weights: RowWeights, where: str) -> None:
    """Make one number of a row infinite or NaN."""
    places = {
        "host": weights.host["blocks.0.0.weight"],
        "host momentum": weights.host_moments.momentum["classifier.weight"],
        "fossil": weights.seeds[FOSSIL],
        "seed": weights.seeds[LIVE],
        "seed momentum": weights.seed_moments[LIVE].momentum,
        "young seed": weights.seeds[YOUNG],
        "nothing": torch.zeros(1),
    }
    tensor = places[where]
    if isinstance(tensor, dict):
        tensor = next(value for name, value in tensor.items() if value.dim() > 1)
    tensor.view(-1)[0] = torch.nan


def rewrite(population: Population, where: str) -> None:
    """Take the victim out and put it back, spoiled."""
    (group,) = population.groups
    weights = group.engine.read(VICTIM)
    spoil(weights, where)
    group.engine.write(VICTIM, weights, group.state.select([VICTIM]))


def step_spoiled(population: Population, where: str, when: str) -> Signals:
    """Live through one step in which the victim is spoiled before or after training."""
    (group,) = population.groups
    if when == "before training":
        rewrite(population, where)
        return do(population)
    train = group.engine.train

    def train_and_spoil(epochs: Sequence[int]) -> EpochResult:
        result = train(epochs)
        rewrite(population, where)
        return result

    group.engine.train = train_and_spoil  # type: ignore[method-assign]
    try:
        return do(population)
    finally:
        group.engine.train = train  # type: ignore[method-assign]


@pytest.fixture(scope="module", params=STRATEGIES)
def states(request: pytest.FixtureRequest) -> tuple[Strategy, dict[str, Any]]:
    """A strategy, and the snapshot of a grown population of it."""
    with populations(grown(request.param)) as (population,):
        return request.param, population.snapshot()


def revive(states: tuple[Strategy, dict[str, Any]]) -> Population:
    strategy, saved = states
    population = make_population([TinyImages], 4, strategy, precision="float64")
    population.restore(saved)
    return population


@pytest.mark.parametrize("when", ["before training", "before validation"])
@pytest.mark.parametrize(
    "where", ["host", "host momentum", "fossil", "seed", "seed momentum", "young seed"]
)
def test_a_row_that_is_not_finite_changes_no_other(
    states: tuple[Strategy, dict[str, Any]], where: str, when: str
) -> None:
    clean, spoiled = revive(states), revive(states)
    with populations(clean, spoiled):
        step_spoiled(clean, "nothing", when)
        signals = step_spoiled(spoiled, where, when)
        for row in OTHERS:
            assert same(row_tree(clean, row), row_tree(spoiled, row)), row
        hidden = where == "young seed" or ("momentum" in where and when == "before validation")
        assert signals.rolled_back.tolist() == [False, not hidden, False, False]
        for row in OTHERS:
            for name in ("val_loss", "val_score", "contribution", "grad_norm"):
                assert bool(torch.isfinite(getattr(signals, name)[row]).any()), name
        # Whatever became of the victim, the next epoch still leaves the others alone. Stacked, its
        # seeds have left their groups by now: the same numbers, summed in another order.
        do(clean)
        do(spoiled)
        if states[0] == "sequential":
            assert all(same(row_tree(clean, row), row_tree(spoiled, row)) for row in OTHERS)
        assert_rows_agree(clean, spoiled, 1e-9, {row: row for row in OTHERS})
        assert bool(torch.isfinite(spoiled.signals().val_loss).all())


def test_a_seed_in_training_cannot_spoil_its_own_host(
    states: tuple[Strategy, dict[str, Any]],
) -> None:
    clean, spoiled = revive(states), revive(states)
    with populations(clean, spoiled):
        step_spoiled(clean, "nothing", "before training")
        signals = step_spoiled(spoiled, "young seed", "before training")
        assert same(read_row(clean, VICTIM).host, read_row(spoiled, VICTIM).host)
        assert not bool(signals.rolled_back.any())
        check_that_the_young_seed_is_pruned(spoiled, signals)


def check_that_the_young_seed_is_pruned(population: Population, signals: Signals) -> None:
    """See that the victim's young seed is gone and all others, of all rows, are as they were."""
    stages = [SeedStage.FOSSILIZED, SeedStage.BLENDING, SeedStage.TRAINING]
    kept = [int(stage) for stage in stages]
    gone = [*kept[:YOUNG], int(SeedStage.PRUNED)]
    assert signals.stage.tolist() == [kept, gone, kept, kept]
    assert signals.slot_params[VICTIM, YOUNG] == 0
    assert read_row(population, VICTIM).seeds.keys() == {FOSSIL, LIVE}
    assert population.groups[0].non_finite_seeds.sum() == 1
    for _ in range(3):
        signals = do(population)
        assert not bool(population.groups[0].non_finite_seeds.any())
    assert bool(torch.isfinite(signals.val_loss).all())
    assert bool(do(population, {"op": 0}, germinate("norm", YOUNG)).last_success[VICTIM])


@pytest.mark.slow
def test_a_mad_seed_is_pruned_in_a_worker_too() -> None:
    with populations(grown("workers", workers=2)) as (population,):
        check_that_the_young_seed_is_pruned(
            population, step_spoiled(population, "young seed", "before training")
        )


def test_a_mad_seed_stays_where_nobody_governs(states: tuple[Strategy, dict[str, Any]]) -> None:
    off = GovernorConfig(is_on=False)
    with populations(grown(states[0], governor=off)) as (population,):
        signals = step_spoiled(population, "young seed", "before training")
        assert signals.stage[VICTIM, YOUNG] == int(SeedStage.TRAINING)
        assert bool(signals.exploding[VICTIM, YOUNG])
        assert float(signals.grad_health[VICTIM, YOUNG]) < 0.7
        # But its gate does not let it through.
        signals = do(population, {"op": 0}, advance(YOUNG))
        assert not bool(signals.last_success[VICTIM])


def test_a_rollback_brings_back_host_and_fossils_at_rest(
    states: tuple[Strategy, dict[str, Any]],
) -> None:
    with populations(revive(states)) as (population,):
        (group,) = population.groups
        safe = group._safe[VICTIM]
        germinations = read_row(population, VICTIM).germinations
        signals = step_spoiled(population, "host", "before training")
        row = read_row(population, VICTIM)
        assert same(row.host, safe.host)
        assert row.seeds.keys() == {FOSSIL}
        assert same(row.seeds[FOSSIL], safe.seeds[FOSSIL])
        assert row.germinations == germinations
        for moments in (row.host_moments, row.seed_moments[FOSSIL]):
            assert not any(bool(value.any()) for value in moments.momentum.values())
        assert signals.stage[VICTIM].tolist() == [
            SeedStage.FOSSILIZED,
            SeedStage.PRUNED,
            SeedStage.PRUNED,
        ]
        assert signals.alpha[VICTIM].tolist() == [1.0, 0.0, 0.0]
        assert int(signals.params[VICTIM]) == int(
            signals.host_params[VICTIM] + signals.slot_params[VICTIM, FOSSIL]
        )
        # What is seen is the network it went back to.
        assert bool(torch.isfinite(signals.val_loss[VICTIM]))
        assert bool(torch.isfinite(signals.best_loss[VICTIM]))
        assert bool(torch.isfinite(group.train_loss[list(OTHERS)]).all())
        everything = torch.ones((1, 3), dtype=torch.bool)
        empty = everything[:0]
        loss, _ = group.engine.measure([empty, everything, empty, empty])
        assert float(group.tracker.loss_history[VICTIM, -1]) == float(loss.double().mean())


def test_a_rollback_shows_in_one_step_alone_and_the_row_lives_on(
    states: tuple[Strategy, dict[str, Any]],
) -> None:
    with populations(revive(states)) as (population,):
        assert not bool(population.signals().rolled_back.any())
        assert step_spoiled(population, "seed", "before validation").rolled_back.tolist() == [
            False,
            True,
            False,
            False,
        ]
        stages = []
        for _ in range(3):
            signals = do(population)
            assert not bool(signals.rolled_back.any())
            stages.append(int(signals.stage[VICTIM, LIVE]))
        # The cooldown applies: embargo, reset, and free again.
        assert stages == [SeedStage.EMBARGOED, SeedStage.RESETTING, -1]
        signals = do(population, {"op": 0}, germinate("norm", LIVE))
        assert bool(signals.last_success[VICTIM])
        assert bool(torch.isfinite(signals.val_loss).all())


def test_a_rollback_leaves_the_others_to_the_bit(states: tuple[Strategy, dict[str, Any]]) -> None:
    with populations(revive(states)) as (population,):
        (group,) = population.groups
        before = [row_tree(population, row) for row in range(4)]
        bad = torch.tensor([False, True, False, False])
        group._roll_back(bad, measured_now(group))
        for row in OTHERS:
            assert same(row_tree(population, row), before[row])


def measured_now(group: TaskGroup) -> Any:
    from esper.kasmina.contribution import compare_rows

    members = torch.zeros_like(group.state.occupied)
    plans = [torch.ones((1, 3), dtype=torch.bool)] * group.rows
    loss, correct = group.engine.measure(plans)
    assert correct is not None
    return compare_rows(members, plans, loss, 100 * correct.double())()


def test_what_is_wrong_is_never_kept_as_safe() -> None:
    with populations(grown("sequential", governor=GovernorConfig(snapshot_every=1))) as (one,):
        (group,) = one.groups
        sound = group._safe[VICTIM]
        assert same(sound.host, read_row(one, VICTIM).host)
        step_spoiled(one, "host", "before validation")
        assert group._safe[VICTIM] is sound
        assert same(read_row(one, VICTIM).host, sound.host)
        do(one)
        assert group._safe[VICTIM] is not sound


def test_snapshots_are_taken_when_due_and_after_a_fossil() -> None:
    population = make_population([TinyImages], 1, governor=GovernorConfig(snapshot_every=4))
    with populations(population):
        population.reset()
        (group,) = population.groups
        taken = [group._safe[0]]
        steps: dict[int, Any] = {2: germinate("conv_light", 0, 0), 3: advance(), 5: advance()}
        steps |= {9: advance(), 10: {"op": LifecycleOp.FOSSILIZE, "slot": 0}}
        for epoch in range(2, 13):
            do(population, steps.get(epoch, {"op": 0}))
            taken.append(group._safe[0])
        changed = [n + 2 for n in range(len(taken) - 1) if taken[n + 1] is not taken[n]]
        assert changed == [4, 8, 10, 12]
        assert not taken[8].seeds
        assert taken[9].seeds.keys() == {0}


def test_a_governor_that_is_off_leaves_everything_alone() -> None:
    population = make_population([TinyImages], 4, governor=GovernorConfig(is_on=False))
    with populations(population):
        population.reset()
        (group,) = population.groups
        weights = group.engine.read(VICTIM)
        weights.host["blocks.0.0.weight"].fill_(torch.nan)
        group.engine.write(VICTIM, weights, group.state.select([VICTIM]))
        signals = do(population)
        assert not bool(signals.rolled_back.any())
        assert torch.isfinite(signals.val_loss).tolist() == [True, False, True, True]


def test_a_lobotomy_is_rolled_back_too() -> None:
    task = TinyImages(TinyImages.defaults.replace(baseline_loss=50.0, target_loss=0.1))
    population = make_population([task], 2)
    with populations(population):
        population.reset()
        for _ in range(MIN_SAMPLES):
            do(population)
        (group,) = population.groups
        measure = group.engine.measure
        calls = []

        def forgotten(plans: Sequence[torch.Tensor]) -> Any:
            loss, correct = measure(plans)
            if not calls:
                loss[0] = 50.0
            calls.append(len(loss))
            return loss, correct

        group.engine.measure = forgotten  # type: ignore[method-assign]
        signals = do(population)
        assert signals.rolled_back.tolist() == [True, False]
        assert calls == [2, 1]
        assert float(signals.val_loss[0]) < 10


ABSENT = {
    "stage": -1,
    "blueprint": -1,
    "alpha_mode": -1,
    "algorithm": -1,
    "epochs_in_stage": -1,
    "age": -1,
    "counterfactual_age": -1,
    "contribution": math.nan,
    "contribution_se": math.nan,
    "contribution_velocity": math.nan,
    "slot_topology": -1,
}


def test_a_slot_that_a_row_does_not_have_looks_like_an_empty_one_that_is_off() -> None:
    with populations(make_population(rows=6)) as (population,):
        signals = population.reset()
        do(population, *[germinate("norm", 0)] * 6)
        signals = do(population)
        assert (
            signals.enabled.tolist()
            == [[True] * 3] * 2 + [[True, True, False]] * 2 + [[True, False, False]] * 2
        )
        empty = ~signals.enabled
        for field in dataclasses.fields(Signals):
            tensor = getattr(signals, field.name)
            assert tensor.shape[0] == 6
            if tensor.dim() == 2 and tensor.shape[1] == 3 and field.name != "interaction":
                wanted = torch.full_like(tensor[empty], ABSENT.get(field.name, 0))
                assert same(tensor[empty], wanted), field.name
        for cost in (signals.seed_params, signals.seed_flops):
            assert bool((cost[empty] == -1).all())
            assert bool((cost[~empty] > 0).any())
        assert signals.interaction.shape == (6, 3, 3)
        parts = [group.signals() for group in population.groups]
        assert same(signals.val_loss, torch.cat([part.val_loss for part in parts]))
        assert signals.occupied[:, 0].all()


def test_one_part_that_needs_no_padding_is_itself() -> None:
    with populations(make_population(rows=3)) as (population,):
        population.reset()
        part = population.groups[0].signals()
        assert merge_signals([part], 3, torch.arange(1)) is part


def test_masks_never_allow_a_slot_a_row_does_not_have() -> None:
    with populations(make_population(rows=6)) as (population,):
        population.reset()
        for _ in range(2):
            masks = population.masks()
            enabled = population.signals().enabled
            assert not bool((masks.slot_by_op & ~enabled[:, None]).any())
            assert not bool(masks.blueprint_by_slot[~enabled].any())
            assert bool(masks.op[:, LifecycleOp.WAIT].all())
            do(population, *[germinate("norm", 0)] * 6)


def test_an_action_for_such_a_slot_is_illegal_and_changes_nothing() -> None:
    acting, waiting = make_population(rows=6), make_population(rows=6)
    with populations(acting, waiting):
        acting.reset()
        waiting.reset()
        wait = {"op": LifecycleOp.WAIT}
        there = [
            *[wait] * 2,
            germinate("norm", 2),
            {"op": LifecycleOp.PRUNE, "slot": 2},
            germinate("norm", 1),
            {"op": LifecycleOp.ADVANCE, "slot": 7},
        ]
        signals = do(acting, *there)
        do(waiting)
        assert signals.last_success.tolist() == [True, True, False, False, False, False]
        for row in range(6):
            one, other = row_tree(acting, row), row_tree(waiting, row)
            for tree in (one, other):
                del tree["state"]["last_op"], tree["state"]["last_success"]
            assert same(one, other)


def test_a_blueprint_of_another_topology_is_illegal() -> None:
    with populations(make_population(rows=3)) as (population,):
        population.reset()
        signals = do(population, germinate("lora"), germinate("conv_light"), germinate("attention"))
        assert signals.last_success.tolist() == [False, False, False]
        assert not bool(signals.occupied.any())


def test_views_of_rows_give_the_masks_of_rows() -> None:
    with populations(make_population(rows=3)) as (population,):
        population.reset()
        do(population, germinate("norm", 1))
        views = [group.table.view() for group in population.groups]
        rules = population.config.lifecycle.effective_rules
        merged = build_masks(merge_views(views, 3, torch.arange(3)), rules)
        for row, view in enumerate(views):
            alone = build_masks(view, rules)
            slots = view.stage.shape[1]
            assert torch.equal(merged.op[row], alone.op[0])
            assert torch.equal(merged.slot_by_op[row, :, :slots], alone.slot_by_op[0])
