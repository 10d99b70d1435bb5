"""The stacked strategy against the plain one: it must be the same trajectory."""

from __future__ import annotations

import dataclasses
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from esper.kasmina.blueprints.registry import selectable
from esper.kasmina.contribution import (
    compare_rows,
    participating,
    plan_ablations,
    values_in_points,
)
from esper.kasmina.hosts import ResidualConfig
from esper.kasmina.state import GateConfig, blending_gate, is_healthy
from esper.lab.population import stacked, validation
from esper.lab.population.engine import StackStream, Strategy
from esper.lab.population.parameter_stack import StackCapacity
from esper.lab.population.seed_stacks import ABSENT, GATE
from esper.lab.population.slot_forward import EMPTY
from esper.lab.population.task_group import TaskGroup
from esper.lab.tasks import get_task
from esper.leyline.actions import LifecycleOp
from esper.leyline.errors import EsperWarning
from esper.leyline.stages import BlendStyle, SeedStage
from tests.lab.population.plugins import Deciding, OddSeed, odd_task, plugged_in
from tests.lab.population.tiny_tasks import (
    MIXED,
    QUICK,
    Explorer,
    TinyImages,
    TinyText,
    TinyValues,
    advance,
    assert_close,
    assert_rows_agree,
    do,
    explore,
    germinate,
    make_population,
    populations,
    read_row,
    row_state,
    row_tree,
)
from tests.plots import same

pytestmark = pytest.mark.usefixtures("kept_processes")

STEPS = 26
ROWS = (4, 5, 6)


def test_every_blueprint_and_style_gives_the_trajectory_of_rows_one_after_another() -> None:
    plain = make_population(rows=ROWS, precision="float64")
    together = make_population(rows=ROWS, strategy="stacked", precision="float64")
    with populations(plain, together):
        script = explore(plain, STEPS, seed=1)
        explorer = script.explorer
        assert explorer.lived == {
            (task().topology, index) for task in MIXED for index in selectable(task().topology)
        }
        assert explorer.styles == {int(style) for style in BlendStyle}
        assert explorer.ops == {int(op) for op in LifecycleOp}
        for here, there in zip(script.seen, script.replay(together), strict=True):
            for name in (
                "stage",
                "blueprint",
                "alpha",
                "alpha_mode",
                "last_success",
                "slot_params",
            ):
                assert torch.equal(getattr(here, name), getattr(there, name)), name
            for name in ("val_loss", "val_score", "contribution", "grad_norm", "interaction"):
                # Signals are single precision: what agrees to 1e-9 rounds to nearly the same.
                assert_close(getattr(here, name), getattr(there, name), 2e-7, name)
        assert_rows_agree(plain, together, 1e-9)


def test_in_single_precision_every_step_agrees_from_the_same_state() -> None:
    plain = make_population(rows=(3, 3, 2))
    together = make_population(rows=(3, 3, 2), strategy="stacked")
    with populations(plain, together):
        script = explore(plain, 8, seed=2)
        assert (plain.signals().stage == SeedStage.BLENDING).any()
        plain.reset()
        for actions in script.actions:
            together.restore(plain.snapshot())
            plain.step(actions)
            together.step(actions)
            assert_rows_agree(plain, together, 1e-4, least=1e-3)


def test_a_residual_host_gives_the_trajectory_of_rows_one_after_another() -> None:
    host = ResidualConfig(channels=(4, 8), in_channels=1, num_classes=3)
    task = TinyImages(TinyImages.defaults.replace(host="residual", host_options=host))
    plain = make_population([task], 5, precision="float64")
    together = make_population([task], 5, "stacked", precision="float64")
    with populations(plain, together):
        script = explore(plain, 16, seed=4)
        for here, there in zip(script.seen, script.replay(together), strict=True):
            assert torch.equal(here.stage, there.stage)
            assert_close(here.val_loss, there.val_loss, 2e-7, "val_loss")
            assert_close(here.contribution, there.contribution, 2e-7, "contribution")
        assert together.groups[0].engine.is_stacked
        assert_rows_agree(plain, together, 1e-9)


TRAININGS: dict[str, dict[str, Any]] = {
    "a rate that moves": {"schedule": "cosine", "warmup": 0.2},
    "a schedule for seeds": {
        "schedule": "cosine",
        "seed_rate": "own",
        "seed_warmup": 2,
        "seed_factor": 0.5,
    },
    "adamw": {"optimizer": "adamw", "learning_rate": 0.003, "weight_decay": 0.05},
    "adamw with a schedule for seeds": {
        "optimizer": "adamw",
        "learning_rate": 0.003,
        "schedule": "wsd",
        "decay": 0.4,
        "seed_rate": "own",
        "seed_warmup": 3,
    },
}


@pytest.mark.parametrize(
    ("strategy", "training"),
    [
        *(("stacked", training) for training in TRAININGS),
        # Processes run the plain strategy: one that uses everything is enough.
        ("workers", "adamw with a schedule for seeds"),
    ],
)
def test_rows_are_trained_alike_in_every_strategy(strategy: Strategy, training: str) -> None:
    tasks = [task(task.defaults.replace(**TRAININGS[training])) for task in MIXED]
    level = make_population(rows=3, precision="float64")
    plain = make_population(tasks, 3, precision="float64")
    other = make_population(tasks, 3, strategy, precision="float64")
    with populations(level, plain, other):
        script = explore(plain, 12, seed=4)
        for here, there in zip(script.seen, script.replay(other), strict=True):
            assert_close(here.val_loss, there.val_loss, 2e-7, "val_loss")
        assert_rows_agree(plain, other, 1e-9)
        assert not torch.allclose(level.reset().val_loss, script.seen[0].val_loss)


def test_a_seed_counts_its_own_steps() -> None:
    task = TinyValues(TinyValues.defaults.replace(optimizer="adamw", learning_rate=0.003))
    for strategy in ("sequential", "stacked"):
        with populations(make_population([task], 2, strategy)) as (population,):
            population.reset()
            do(population)
            do(population, germinate("mlp"))
            do(population, advance())
            do(population, advance())
            row, other = read_row(population, 0), read_row(population, 1)
            # Two batches an epoch; the seed learns from the fourth on.
            assert set(row.host_moments.steps.values()) == {10}
            assert set(row.seed_moments[0].steps.values()) == {4}
            assert set(other.host_moments.steps.values()) == {10}
            (group,) = population.groups
            assert group.state.learned.tolist() == [[2], [0]]
            assert group.state.age.tolist() == [[3], [0]]


@pytest.mark.parametrize("rows", [7, 64])
def test_a_row_does_not_depend_on_how_many_run_beside_it(rows: int) -> None:
    mine = 5
    life = [germinate("conv_heavy", 0, 3), advance(), {"op": LifecycleOp.WAIT}, advance()]
    alone = make_population([TinyImages], 1, "stacked", row_seeds=[mine], precision="float64")
    crowd = make_population([TinyImages], rows, "stacked", precision="float64")
    with populations(alone, crowd):
        alone.reset()
        crowd.reset()
        for number, choice in enumerate(life):
            do(alone, choice)
            # Neighbours try anything, legal or not.
            others = [germinate("norm", row % 3, row % 4) for row in range(rows)]
            if number:
                others = [advance(row % 3) for row in range(rows)]
            others[mine] = choice
            do(crowd, *others)
            assert_rows_agree(alone, crowd, 1e-9, {0: mine})
        assert int(row_state(alone, 0)["slot stage"][0]) == SeedStage.BLENDING
        stages = crowd.signals().stage
        assert len(stages.unique(dim=0)) > 2


def test_more_rows_than_fit_into_a_stack_are_several_stacks() -> None:
    whole = make_population(rows=(3, 2, 3), strategy="stacked", precision="float64")
    split = make_population(
        rows=(3, 2, 3), strategy="stacked", precision="float64", rows_per_stack=2
    )
    with populations(whole, split):
        script = explore(whole, 6, seed=4)
        script.replay(split)
        assert [group.rows for group in split.groups] == [2, 1, 2, 2, 1]
        assert_rows_agree(whole, split, 1e-9)


def test_what_a_user_registered_is_stacked_as_it_is() -> None:
    with plugged_in(odd=OddSeed), warnings.catch_warnings():
        warnings.simplefilter("error")
        plain = make_population([odd_task()], 3, precision="float64")
        together = make_population([odd_task()], 3, "stacked", precision="float64")
        with populations(plain, together):
            plain.reset()
            together.reset()
            before = read_row(together, 0).host
            life = [germinate("odd", 0, style) for style in (0, 1, 3)]
            for choices in (life, [advance()] * 3, [], [advance()] * 3, [], []):
                do(plain, *choices)
                do(together, *choices)
            assert together.groups[0].engine.is_stacked
            assert (together.signals().stage == SeedStage.BLENDING).all()
            assert_rows_agree(plain, together, 1e-9)
            after = read_row(together, 0)
            for name in ("fixed.weight", "spare.weight"):
                assert torch.equal(after.host[name], before[name])
            assert not torch.equal(after.host["body.0.weight"], before["body.0.weight"])
            assert torch.equal(after.seeds[0]["seed.spare"], torch.ones(3).double())
            assert {name for name in read_row(together, 2).seeds[0] if "gate" in name} == {
                "seed.gate.weight",
                "seed.gate.bias",
                "gate.hidden.weight",
                "gate.hidden.bias",
                "gate.out.weight",
                "gate.out.bias",
            }
            host = plain.signals().host_params
            assert torch.equal(host, together.signals().host_params)


def test_a_slot_may_stand_before_every_parameter() -> None:
    with plugged_in():
        plain = make_population([odd_task(slot="stem")], 2, precision="float64")
        together = make_population([odd_task(slot="stem")], 2, "stacked", precision="float64")
        with populations(plain, together):
            plain.reset()
            together.reset()
            for choices in ([germinate("mlp")], [advance()], [], [advance()], []):
                do(plain, *choices)
                do(together, *choices)
            assert float(together.signals().alpha[0, 0]) > 0
            assert_rows_agree(plain, together, 1e-9)


def test_attention_without_a_batching_rule_does_not_warn() -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        with populations(make_population(MIXED[1:2], 2, "stacked")) as (population,):
            population.reset()
            do(population, germinate("attention"), germinate("flex_attention"))
            do(population, advance(), advance())


# -- BF16 ------------------------------------------------------------------------------------------

LOSS_TOLERANCE = 0.02
"""BF16 against FP32: per-sample losses, relative to their scale."""

POINTS_TOLERANCE = 2.0
"""Contributions and interactions, in points: five of 256 samples."""

NORM_TOLERANCE = 0.1
"""Norms of seeds' gradients, relative."""


def ablate(group: TaskGroup) -> tuple[Tensor, Tensor, Tensor]:
    """Return losses of every configuration, contributions and interactions."""
    members = participating(group.state)
    plans = [plan_ablations(row) for row in members.tolist()]
    loss, correct = group.engine.measure(plans)
    measured = compare_rows(members, plans, loss, values_in_points(loss, correct))()
    return loss, measured.worth, measured.interaction


@pytest.mark.parametrize("strategy", ["sequential", "stacked"])
def test_ablations_and_gates_in_bf16_agree_with_fp32(strategy: str) -> None:
    task = get_task("digits", samples_per_step=128, validation_samples=256)
    grown = make_population([task], 3, strategy)  # type: ignore[arg-type]
    halves = make_population([task], 3, strategy, use_bf16=True)  # type: ignore[arg-type]
    with populations(grown, halves):
        grown.reset()
        for slot, style in ((0, 2), (1, 1), (2, 3)):
            names = ("conv_light", "depthwise", "conv_heavy")
            do(grown, *(germinate(name, slot, style) for name in names))
            do(grown, *[advance(slot)] * 3)
            do(grown)
            do(grown, *[advance(slot)] * 3)
            do(grown)
        assert (participating(grown.groups[0].state).sum(1) >= 2).any()
        halves.restore(grown.snapshot())
        (exact,), (rough,) = grown.groups, halves.groups
        for one, other, tolerance in zip(
            ablate(exact),
            ablate(rough),
            (LOSS_TOLERANCE, POINTS_TOLERANCE, POINTS_TOLERANCE),
            strict=True,
        ):
            scale = float(one.abs().max()) if tolerance == LOSS_TOLERANCE else 1.0
            assert_near(one, other, tolerance * scale)
        do(grown)
        do(halves)
        gates = GateConfig(min_training_epochs=1)
        for decide in (is_healthy, blending_gate):
            assert torch.equal(decide(exact.state, gates), decide(rough.state, gates))
        norm = exact.state.grad_norm
        assert_near(norm, rough.state.grad_norm, NORM_TOLERANCE * float(norm.max()))
        assert_near(exact.state.contribution, rough.state.contribution, 2 * POINTS_TOLERANCE)


def test_constants_of_a_users_modules_follow_into_bf16() -> None:
    with plugged_in(odd=OddSeed), warnings.catch_warnings():
        warnings.simplefilter("error")
        exact = make_population([odd_task()], 2, "stacked")
        rough = make_population([odd_task()], 2, "stacked", use_bf16=True)
        with populations(exact, rough):
            exact.reset()
            rough.reset()
            for choices in ([germinate("odd", 0, 3)], [advance()], [], [advance()], []):
                one, other = do(exact, *choices), do(rough, *choices)
            assert rough.groups[0].engine.is_stacked
            assert float(other.alpha[0, 0]) > 0
            assert_near(one.val_loss, other.val_loss, 0.05)


def assert_near(one: Tensor, other: Tensor, tolerance: float) -> None:
    assert torch.equal(torch.isnan(one), torch.isnan(other))
    assert float((one.double() - other.double()).nan_to_num().abs().max()) <= tolerance


class Eager:
    """Stands for a captured pass where there is nothing to capture it with."""

    def __init__(self, stream: StackStream) -> None:
        self.forgotten = self.runs = 0

    def forget(self) -> None:
        self.forgotten += 1

    def run(self, step: Callable[[], None]) -> None:
        self.runs += 1
        step()


def test_unused_entries_change_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    whole = make_population([TinyImages], 6, "stacked", precision="float64")
    with populations(whole):
        script = explore(whole, 8, seed=2)
        keep_spares(monkeypatch)
        spacious = make_population([TinyImages], 6, "stacked", precision="float64")
        with populations(spacious):
            script.replay(spacious)
            engine = spacious.groups[0].engine
            assert isinstance(engine, stacked.StackedEngine)
            assert any(ABSENT in stack.rows for stack in engine._seed_stacks.stacks)
            assert_rows_agree(whole, spacious, 1e-9)
            replay = engine._validation._replay
            assert isinstance(replay, Eager)
            # A pass has empty positions and entries, and some serve several times.
            assert replay.runs > replay.forgotten
            assert any(
                bool((g.index.state == EMPTY).any()) for g in engine._validation.forwards if g
            )


def with_spares(**sizes: Any) -> StackCapacity:
    return StackCapacity(**{**sizes, "has_spares": True})


def keep_spares(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let stacks and passes have entries to spare, as on a device."""
    monkeypatch.setattr(stacked, "StackCapacity", with_spares)
    monkeypatch.setattr(validation, "StackCapacity", with_spares)
    monkeypatch.setattr(validation, "GraphReplay", Eager)
    monkeypatch.setattr(validation, "_SAMPLES_CPU", 400)
    make, stream = validation.ValidationPass, StackStream(torch.device("cpu"))
    monkeypatch.setattr(
        stacked, "ValidationPass", lambda *parts, graph_stream: make(*parts, graph_stream=stream)
    )


def test_what_a_captured_step_works_on_stays_where_it_is(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stacked, "StackCapacity", with_spares)

    def addresses(engine: stacked.StackedEngine) -> set[int]:
        """Return the addresses of everything a step reads or writes besides what it makes."""
        step, seed_stacks = engine._step, engine._seed_stacks
        assert step is not None
        tensors = [step.loss, step._active, step._partner, engine._batch.x, engine._batch.y]
        for stack in (engine._hosts, *(stack.parameters for stack in seed_stacks.stacks)):
            tensors += [stack.flat, stack.momentum, stack.used, *stack.leaves.values()]
        for grown in engine._phase.forwards:
            if grown is not None:
                tensors += [getattr(grown.index, f.name) for f in dataclasses.fields(grown.index)]
        return {tensor.data_ptr() for tensor in tensors}

    with populations(make_population([TinyImages], 6, "stacked", use_bf16=True)) as (population,):
        explorer, signals = Explorer(2), population.reset()
        engine = population.groups[0].engine
        assert isinstance(engine, stacked.StackedEngine)
        kept = 0
        for _ in range(12):
            before, stages = addresses(engine), signals.stage
            version = engine._seed_stacks.layout_version
            signals = population.step(explorer.act(population, signals))
            is_same = engine._seed_stacks.layout_version == version
            if is_same and not torch.equal(signals.stage, stages):
                kept += 1
                assert addresses(engine) == before
        assert kept >= 3


@pytest.mark.parametrize("has_spares", [False, True])
def test_a_stack_that_begins_again_is_as_good_as_new(
    monkeypatch: pytest.MonkeyPatch, has_spares: bool
) -> None:
    if has_spares:
        keep_spares(monkeypatch)
    # Sixteen rows: on images this small entries are cheap, so that stacks stay.
    used, new = (
        make_population([TinyImages], 16, "stacked", precision="float64") for _ in range(2)
    )
    with populations(used, new):
        explore(used, 10, seed=3)
        engine = used.groups[0].engine
        assert isinstance(engine, stacked.StackedEngine)
        stacks = len(engine._seed_stacks.stacks)
        seeds = range(100, 116)
        used.reset(seeds)
        new.reset(seeds)
        assert used.groups[0].engine is engine
        assert len(engine._seed_stacks.stacks) == (stacks if has_spares else 0)
        explorer, signals = Explorer(4), used.signals()
        for _ in range(8):
            actions = explorer.act(used, signals)
            signals = used.step(actions)
            new.step(actions)
        if has_spares:
            assert_rows_agree(used, new, 1e-9)
        else:
            assert all(same(row_tree(used, row), row_tree(new, row)) for row in range(16))


def test_a_second_episode_moves_nothing_that_is_captured(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stacked, "StackCapacity", with_spares)
    with populations(make_population([TinyImages], 16, "stacked")) as (population,):
        script = explore(population, 10, seed=3)
        engine = population.groups[0].engine
        assert isinstance(engine, stacked.StackedEngine)
        script.replay(population)
        version, step = engine._seed_stacks.layout_version, engine._step
        script.replay(population)
        assert engine._seed_stacks.layout_version == version
        assert engine._step is step


def test_other_conditions_move_nothing_that_is_captured(monkeypatch: pytest.MonkeyPatch) -> None:
    keep_spares(monkeypatch)
    monkeypatch.setattr(stacked, "StackCapacity", with_spares)
    first = [TinyImages(TinyImages.defaults.replace(label_noise=x)) for x in (0.0, 0.5)]
    second = [
        TinyImages(TinyImages.defaults.replace(**changes))
        for changes in ({"train_size": 9}, {"learning_rate": 0.2}, {"augment": "none"})
    ]
    used = make_population(first, [8, 8], "stacked", precision="float64")
    new = make_population(second, [8, 4, 4], "stacked", precision="float64")
    with populations(used, new):
        script = explore(used, 8, seed=3)
        script.replay(used)
        engine = used.groups[0].engine
        assert isinstance(engine, stacked.StackedEngine)

        def captured() -> list[int]:
            kept = [engine._batch.x, engine._batch.y, *engine._hosts.leaves.values()]
            kept += [tensor for pair in engine._validation._samples for tensor in pair]
            return [tensor.data_ptr() for tensor in kept]

        version, step, places = engine._seed_stacks.layout_version, engine._step, captured()
        used.assign(second, [8, 4, 4])
        script.replay(used)
        assert used.groups[0].engine is engine
        assert engine._seed_stacks.layout_version == version
        assert engine._step is step
        assert captured() == places
        script.replay(new)
        assert_rows_agree(used, new, 1e-9)


def test_what_is_left_in_an_unused_entry_reaches_no_row(monkeypatch: pytest.MonkeyPatch) -> None:
    keep_spares(monkeypatch)
    clean, spoiled = (
        make_population([TinyImages], 16, "stacked", precision="float64") for _ in range(2)
    )
    with populations(clean, spoiled):
        script = explore(clean, 10, seed=3)
        script.replay(spoiled)
        for population in (clean, spoiled):
            population.reset(range(16))
        engine = spoiled.groups[0].engine
        assert isinstance(engine, stacked.StackedEngine)
        kinds = {stack.kind for stack in engine._seed_stacks.stacks}
        assert GATE in kinds
        for stack in engine._seed_stacks.stacks:
            stack.parameters.flat.fill_(torch.nan)
        for actions in script.actions:
            clean.step(actions)
            spoiled.step(actions)
        assert_rows_agree(clean, spoiled, 1e-9)
        assert bool(torch.isfinite(spoiled.signals().val_loss).all())


def test_several_stacks_of_several_tasks_begin_again() -> None:
    used, new = (
        make_population([TinyImages, TinyText], [5, 4], "stacked", rows_per_stack=3)
        for _ in range(2)
    )
    with populations(used, new):
        explore(used, 6, seed=1)
        engines = [group.engine for group in used.groups]
        assert len(engines) == 4
        used.reset(range(50, 59))
        script = Explorer(2)
        signals = new.reset(range(50, 59))
        assert [group.engine for group in used.groups] == engines
        for _ in range(6):
            actions = script.act(new, signals)
            signals = new.step(actions)
            used.step(actions)
        assert all(same(row_tree(used, row), row_tree(new, row)) for row in range(9))


def test_a_stack_that_an_error_broke_off_is_not_used_again(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    with populations(make_population([TinyImages], 3, "stacked")) as (population,):
        population.reset()
        engine = population.groups[0].engine
        with monkeypatch.context() as broken:
            broken.setattr(stacked.StackedEngine, "measure", interrupt)
            with pytest.raises(KeyboardInterrupt):
                do(population)
        population.reset()
        assert population.groups[0].engine is not engine
        engine = population.groups[0].engine
        do(population)
        population.reset()
        assert population.groups[0].engine is engine


def interrupt(*anything: object) -> None:
    raise KeyboardInterrupt


def test_what_is_registered_between_two_episodes_is_checked() -> None:
    with populations(make_population([TinyValues], 3, "stacked")) as (population,):
        population.reset()
        with plugged_in(deciding=Deciding), pytest.warns(EsperWarning, match="cannot be stacked"):
            population.reset()
        assert not population.groups[0].engine.is_stacked


def test_a_measurement_of_nothing_is_empty() -> None:
    with populations(make_population([TinyImages], 2, "stacked")) as (population,):
        population.reset()
        nothing = torch.ones((0, 3), dtype=torch.bool)
        loss, correct = population.groups[0].engine.measure([nothing, nothing])
        assert loss.shape == (0, 12)
        assert correct is None


def test_seeds_at_full_amplitude_from_the_first_step_are_the_same_in_a_stack() -> None:
    life = QUICK.replace(immediate="all")
    tasks = (TinyText, TinyValues)
    plain = make_population(tasks, (2, 2), precision="float64", lifecycle=life)
    together = make_population(tasks, (2, 2), "stacked", precision="float64", lifecycle=life)
    steps = [germinate("lora"), {"op": 0}, advance(), {"op": 0}, {"op": 4, "slot": 0}, {"op": 0}]
    with populations(plain, together):
        plain.reset()
        together.reset()
        for number, step in enumerate(steps):
            # One row of each task has another seed, and begins later.
            other = {"op": 0} if number == 0 else germinate("mlp", 0)
            for population in (plain, together):
                signals = do(population, step, other if number < 2 else step, step, step)
                if number == 0:
                    assert signals.alpha[0, 0] == signals.alpha[2, 0] == 1.0
                    assert signals.alpha[1, 0] == 0.0
            assert_rows_agree(plain, together, 1e-9, least=1e-3)
        assert plain.signals().stage[0, 0] == SeedStage.FOSSILIZED
