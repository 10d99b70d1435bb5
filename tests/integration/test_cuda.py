"""What only a CUDA device can show: the same growth, FlexAttention, BF16 and captured steps."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

import esper
from esper.kasmina.blueprints import BLUEPRINTS, blueprint_names
from esper.kasmina.contribution import participating
from esper.kasmina.garden import Garden
from esper.kasmina.lifecycle import GardenConfig, LifecycleConfig
from esper.kasmina.row_group import measure_by_ablation
from esper.kasmina.state import GateConfig
from esper.lab.bench.engine import Case, PhaseClock, grown_population, measured_task, random_data
from esper.lab.population.engine import PopulationConfig
from esper.lab.tasks import get_task
from esper.leyline.actions import placeholder_actions
from esper.leyline.stages import BlendStyle
from esper.tamiyo.controllers import RandomController
from tests.devices import busy_device
from tests.plots import (
    GROW_ONE,
    SLOTS,
    Script,
    growth_config,
    make_batches,
    make_net,
    record_epoch,
)

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]

FAST = LifecycleConfig(gates=GateConfig(min_training_epochs=0))
SHAPES = {"cnn": (6, 32, 8, 8), "sequence": (6, 16, 64), "vector": (6, 64)}
AXES = {"cnn": "BCHW", "sequence": "BTC", "vector": "BC"}


class CausalMean(nn.Module):
    """The mean over this position and all before it: attention is not offered where none mix."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x.cumsum(1) / torch.arange(1, x.shape[1] + 1, device=x.device)[:, None]


class Residual(nn.Module):
    """A block that can be copied: `kin` needs one."""

    def __init__(self, body: nn.Module) -> None:
        super().__init__()
        self.body = body

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = x + self.body(x)
        return out


def host(topology: str) -> tuple[nn.Module, torch.Tensor]:
    torch.manual_seed(0)
    x = torch.randn(SHAPES[topology])
    if topology == "cnn":
        body = Residual(nn.Conv2d(32, 32, 3, padding=1))
        return nn.Sequential(
            body, nn.ReLU(), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(32, 4)
        ), x
    mix = CausalMean() if topology == "sequence" else nn.Identity()
    return nn.Sequential(Residual(nn.Linear(64, 64)), mix, nn.ReLU(), nn.Linear(64, 4)), x


CASES = [
    (name, topology)
    for name in blueprint_names()
    if name != "noop"
    for topology in BLUEPRINTS.get(name).topologies
]


@pytest.mark.parametrize(("blueprint", "topology"), CASES)
def test_a_seed_lives_on_the_device_as_on_the_cpu(blueprint: str, topology: str) -> None:
    outputs = []
    for device in ("cpu", "cuda"):
        model, x = host(topology)
        # FlexAttention has no float64.
        dtype = torch.float32 if blueprint == "flex_attention" else torch.float64
        model, x = model.to(device, dtype), x.to(device, dtype)
        garden = Garden(model, ["0"], x, axes=AXES[topology], config=GardenConfig(lifecycle=FAST))
        gardener = esper.Gardener(garden, "wait", 50)
        optimizer = gardener.optimizer(torch.optim.SGD, lr=0.05, momentum=0.9)
        assert garden.germinate(
            "0", blueprint, style=BlendStyle.GATED_GATE, tempo=1, immediate=False
        )
        for _ in range(10):
            # The gate may ask for another batch or two: at first not every gradient is there.
            if garden.slots["0"].stage.name in ("GERMINATED", "TRAINING"):
                garden.advance("0")
            garden.tick()
            garden.train()
            optimizer.zero_grad()
            garden(x).square().mean().backward()
            optimizer.step()
            record_epoch(garden, 50.0)
            assert gardener.carried is not None
            gardener.carried.start_epoch()
        assert garden.slots["0"].alpha == 1.0
        outputs.append(garden(x).detach().cpu())
    # FlexAttention computes in its own order, so it is held to a float32-like bound.
    tolerance = 1e-3 if blueprint == "flex_attention" else 1e-8
    assert torch.allclose(outputs[0], outputs[1], rtol=tolerance, atol=tolerance)


TRAININGS: dict[str, dict[str, Any]] = {
    "sgd": {},
    "adamw": {
        "optimizer": "adamw",
        "learning_rate": 0.003,
        "schedule": "cosine",
        "seed_rate": "own",
        "seed_warmup": 2,
    },
}


@pytest.mark.parametrize("training", TRAININGS)
@pytest.mark.parametrize("use_graphs", [False, True])
def test_stacked_rows_equal_rows_one_after_another(use_graphs: bool, training: str) -> None:
    task = get_task(
        "digits",
        samples_per_step=128,
        batch_size=16,
        validation_samples=64,
        **TRAININGS[training],
    )
    config = PopulationConfig(
        precision="float64",
        use_graphs=use_graphs,
        lifecycle=LifecycleConfig(gates=GateConfig(min_training_epochs=1)),
    )
    seen = []
    for strategy in ("sequential", "stacked"):
        population = esper.Population(
            task, 6, seed=3, device="cuda", strategy=strategy, horizon=100, config=config
        )
        controller = RandomController(5)
        controller.reset(6, "cuda")
        signals = population.reset()
        history = [signals]
        for _ in range(20):
            signals = population.step(controller.act(signals, population.masks()))
            history.append(signals)
        seen.append(history)
        population.close()
    for plain, stacked in zip(*seen, strict=True):
        for field in dataclasses.fields(plain):
            a, b = getattr(plain, field.name), getattr(stacked, field.name)
            if a.is_floating_point():
                assert torch.allclose(a, b, rtol=1e-5, atol=1e-6, equal_nan=True), field.name
            else:
                assert torch.equal(a, b), field.name


def test_growing_a_task_works_on_the_device() -> None:
    from esper.lab.tasks.request import task_config, task_run

    task = get_task("digits")
    # Eight epochs are too few for the default controller, and it would warn.
    config = task_config(task, epochs=8)
    run = task_run(task, task.load(device="cuda"), config=config, controller="heuristic")
    scores = [record.val_score for record in run.epochs()]
    assert scores[-1] > scores[0]
    assert run.finish().summary.test_score is not None


def test_a_garden_grows_under_bf16_autocast() -> None:
    model, x = host("cnn")
    garden = Garden(model.cuda(), ["0"], x.cuda(), config=GardenConfig(lifecycle=FAST))
    gardener = esper.Gardener(garden, "wait", 50)
    optimizer = gardener.optimizer(torch.optim.SGD, lr=0.05)
    garden.germinate("0", "conv_light", tempo=1)
    for _ in range(4):
        if garden.slots["0"].stage.name in ("GERMINATED", "TRAINING"):
            garden.advance("0")
        garden.tick()
        optimizer.zero_grad()
        with torch.autocast("cuda", dtype=torch.bfloat16):
            loss = garden(x.cuda()).float().square().mean()
        loss.backward()
        optimizer.step()
        record_epoch(garden, 50.0)
    assert torch.isfinite(loss)
    assert garden.slots["0"].alpha == 1.0


def small_digits(rows: int = 6, training: str = "sgd", **config: object) -> esper.Population:
    task = get_task(
        "digits",
        samples_per_step=128,
        batch_size=16,
        validation_samples=64,
        **TRAININGS[training],
    )
    settings = PopulationConfig(
        lifecycle=LifecycleConfig(gates=GateConfig(min_training_epochs=1)),
        **config,  # type: ignore[arg-type]
    )
    return esper.Population(
        task, rows, seed=3, device="cuda", strategy="stacked", horizon=100, config=settings
    )


@pytest.mark.parametrize("training", TRAININGS)
@pytest.mark.parametrize(("use_bf16", "tolerance"), [(False, 2e-3), (True, 0.08)])
def test_kernels_give_the_trajectory_of_plain_pytorch(
    use_bf16: bool, tolerance: float, training: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    if training.startswith("adamw"):
        # Where gradients are small, a division by the root of their squares enlarges rounding.
        tolerance *= 4
    fast = small_digits(training=training, use_bf16=use_bf16)
    with monkeypatch.context() as without:
        for name in ("vmap_rules", "slot_forward", "batches", "train_step", "stacked"):
            without.setattr(f"esper.lab.population.{name}.has_kernels", lambda x: False)
        plain = small_digits(training=training, use_bf16=use_bf16, use_graphs=False)
        plain.reset()
    controller = RandomController(5)
    controller.reset(6, "cuda")
    signals = fast.restore(plain.snapshot())
    for _ in range(10):
        actions = controller.act(signals, fast.masks())
        # From the same state, step by step: rounding must not pile up.
        with monkeypatch.context() as without:
            for name in ("vmap_rules", "slot_forward", "batches", "train_step", "stacked"):
                without.setattr(f"esper.lab.population.{name}.has_kernels", lambda x: False)
            plain.restore(fast.snapshot())
            expected = plain.step(actions)
        signals = fast.step(actions)
        assert torch.equal(signals.stage, expected.stage)
        assert torch.allclose(signals.val_loss, expected.val_loss, atol=tolerance, rtol=tolerance)
        norm = float(expected.grad_norm.max())
        assert torch.allclose(signals.grad_norm, expected.grad_norm, atol=tolerance * (1 + norm))
    assert fast.groups[0].engine.captures > 0  # type: ignore[attr-defined]
    fast.close()
    plain.close()


def test_other_conditions_need_no_new_capture() -> None:
    def tasks(**changes: Any) -> list[Any]:
        shared = {"samples_per_step": 256, "validation_samples": 64, "horizon": 100}
        return [
            get_task("digits", **shared, learning_rate=rate, **changes) for rate in (0.005, 0.05)
        ]

    def make(given: list[Any]) -> Any:
        return esper.Population(given, 64, seed=3, device="cuda", strategy="stacked")

    def live(population: Any) -> Any:
        signals = population.reset()
        for _ in range(6):
            signals = population.step(placeholder_actions(64))
        return signals

    used, second = make(tasks()), tasks(train_size=200, label_noise=0.3)
    live(used)
    (group,) = used.groups
    engine = group.engine
    captures, passes = engine.captures, engine._validation._replay.captures
    assert (captures, passes) == (1, 1)
    used.assign(second)
    found = live(used)
    assert used.groups[0].engine is engine
    assert (engine.captures, engine._validation._replay.captures) == (captures, passes)
    new = make(second)
    expected = live(new)
    assert torch.allclose(found.val_loss, expected.val_loss, rtol=1e-3, atol=1e-3)
    assert torch.allclose(used.test_scores(), new.test_scores(), atol=1.0)
    used.close()
    new.close()


def test_test_scores_of_a_stack_are_those_of_rows_one_after_another() -> None:
    stack = small_digits(6)
    stack.reset()
    plain = esper.Population(
        stack.tasks, 6, seed=3, device="cuda", strategy="sequential", config=stack.config
    )
    plain.restore(stack.snapshot())
    assert torch.allclose(stack.test_scores(), plain.test_scores(), atol=0.6)
    stack.close()
    plain.close()


def test_a_captured_step_serves_while_seeds_come_and_go() -> None:
    population = small_digits(64)
    controller = RandomController(5)
    controller.reset(64, "cuda")
    signals = population.reset()
    topologies = set()
    for _ in range(30):
        signals = population.step(controller.act(signals, population.masks()))
        topologies.add(str(signals.blueprint.tolist()))
    captures = population.groups[0].engine.captures  # type: ignore[attr-defined]
    assert len(topologies) > 20
    assert captures <= 12
    # A second episode finds the places of the first, and what was captured to work on them.
    signals = population.reset(range(100, 164))
    controller.reset(64, "cuda")
    for _ in range(30):
        signals = population.step(controller.act(signals, population.masks()))
    assert population.groups[0].engine.captures <= captures + 4  # type: ignore[attr-defined]
    population.close()


def test_a_row_that_is_not_finite_changes_no_other_in_captured_steps() -> None:
    seen: list[list[torch.Tensor]] = []
    script: list[dict[str, torch.Tensor]] = []
    for is_spoiled in (False, True):
        population = small_digits(8)
        controller = RandomController(2)
        controller.reset(8, "cuda")
        signals = population.reset()
        for step in range(6):
            if not is_spoiled:
                script.append(controller.act(signals, population.masks()))
            signals = population.step(script[step])
            if is_spoiled and step == 2:
                engine = population.groups[0].engine
                weights = engine.read(3)
                weights.host = {k: v * torch.nan for k, v in weights.host.items()}
                engine.write(3, weights, population.groups[0].state.select([3]))
        others = [row for row in range(8) if row != 3]
        seen.append([signals.val_loss[others], signals.grad_norm[others], signals.stage[others]])
        population.close()
    for one, other in zip(*seen, strict=True):
        assert torch.equal(one, other)


def image_population() -> esper.Population:
    """Return networks too large for captured validation, with seeds in half of their slots."""
    case = Case(
        task="cifar_baseline", strategy="stacked", rows=8, use_bf16=True, batch_size=32, samples=160
    )
    task = measured_task(case.task, case.batch_size, case.samples)
    return grown_population(task, random_data(task, 4000), case, "cuda")


def small_population() -> esper.Population:
    """Return small networks without seeds, whose training and validation are captured."""
    population = small_digits(16)
    population.reset()
    return population


@pytest.mark.parametrize("make", [small_population, image_population])
def test_an_epoch_and_its_measurement_are_given_to_the_device_without_waiting(
    make: Callable[[], esper.Population],
) -> None:
    population = make()
    for _ in range(4):
        population.step(placeholder_actions(population.rows))
    (group,) = population.groups
    # The host has two seconds, which it needs by far not.
    with busy_device(4_000_000_000) as end:
        group.begin()
        measuring = measure_by_ablation(group.engine, participating(group.state), None)
        assert not end.query()
    assert bool(torch.isfinite(measuring().loss).all())
    group.live()
    population.close()


@pytest.mark.parametrize("kind", ["captured", "eager", "stacks"])
def test_nothing_depends_on_whether_the_device_is_waited_for(kind: str) -> None:
    script: list[dict[str, torch.Tensor]] = []
    seen: list[list[list[torch.Tensor]]] = []
    for is_waited_for in (False, True):
        population = small_digits(8, use_graphs=kind != "eager")
        if kind == "stacks":
            shared = {"samples_per_step": 128, "batch_size": 16, "validation_samples": 64}
            tasks = [get_task(name, **shared) for name in ("digits", "digits_mlp")]
            population.assign(tasks, 8)
        controller = RandomController(7)
        controller.reset(8, "cuda")
        signals, history = population.reset(), []
        if is_waited_for:
            for group in population.groups:
                PhaseClock(group.engine, population.device)
        for step in range(12):
            if not is_waited_for:
                script.append(controller.act(signals, population.masks()))
            signals = population.step(script[step])
            history.append([signals.val_loss, signals.grad_norm, signals.contribution])
        seen.append(history)
        population.close()
    for one, other in zip(*seen, strict=True):
        for a, b in zip(one, other, strict=True):
            assert torch.equal(a.nan_to_num(), b.nan_to_num())


@pytest.mark.filterwarnings("ignore:A static network of the same size")
def test_the_first_weights_wait_in_main_memory_for_a_static_network() -> None:
    model = make_net().cuda()
    grown = esper.grow(
        model,
        SLOTS,
        train=make_batches(),
        val=make_batches(2, 32, seed=9),
        epochs=9,
        controller=Script(GROW_ONE),
        config=growth_config(1),
        optimizer=torch.optim.SGD(model.parameters(), lr=0.1),
    )
    assert grown.recipe is not None
    first = grown.recipe.request.model
    assert {parameter.device.type for parameter in first.parameters()} == {"cpu"}
    found = grown.compare_static()
    assert {parameter.device.type for parameter in found.model.parameters()} == {"cuda"}
    assert found.static.val_score > 50
