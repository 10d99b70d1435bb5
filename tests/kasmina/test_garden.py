"""A garden: any module with slots, and still an ordinary module in every stage."""

from __future__ import annotations

import copy
import gc
import io
import math
import shutil
import warnings
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from esper.kasmina.contribution import Contributions, Estimate
from esper.kasmina.garden import Garden
from esper.kasmina.lifecycle import GardenConfig
from esper.kasmina.optimizer import CarriedOptimizer
from esper.kasmina.training import clip_gradients
from esper.leyline.actions import LifecycleOp, placeholder_actions
from esper.leyline.errors import (
    ConfigError,
    SlotError,
    UnknownNameError,
    UsageError,
)
from esper.leyline.stages import SeedStage
from tests.kasmina.gardens import (
    LIVING,
    MODES,
    STYLES,
    Residual,
    Stack,
    bring,
    measure,
    pretend_trained,
    quick_config,
    same_state,
    stack_garden,
    stages,
    stir,
)
from tests.plots import carry_out, record_contributions, record_epoch

X = torch.randn(5, 4)
IMAGES = torch.randn(4, 3, 6, 6)
CLASSES = torch.tensor([0, 1, 2, 0])


def image_loss(model: nn.Module) -> Tensor:
    return F.cross_entropy(model(IMAGES), CLASSES)


# -- an ordinary module ---------------------------------------------------------------------------


def test_an_ungrown_garden_is_its_model() -> None:
    model = Stack()
    garden = Garden(model, ["a", "b"], X)
    assert garden.model is model
    assert torch.equal(garden(X), model(X))
    assert list(garden.parameters()) == list(model.parameters())
    assert garden.count_parameters() == garden.count_host_parameters() == 60
    assert set(stages(garden)) == {SeedStage.DORMANT}


@pytest.mark.parametrize("slot", ["stem", "conv"])
@pytest.mark.parametrize("style", STYLES)
@pytest.mark.parametrize("mode", MODES)
def test_a_host_that_works_in_place_grows_in_every_stage(slot: str, style: str, mode: str) -> None:
    torch.manual_seed(1)
    host = Residual()
    alone = copy.deepcopy(host)
    image_loss(alone).backward()
    garden = Garden(host, [slot], IMAGES, config=quick_config(training_mode=mode))
    garden.germinate(slot, "conv_light", style=style, tempo=1)
    for stage in LIVING:
        assert garden.slots[slot].stage is stage
        garden.zero_grad()
        value = garden.training_loss(image_loss)
        value.backward()
        assert bool(value.isfinite())
        if stage in (SeedStage.GERMINATED, SeedStage.TRAINING):
            assert torch.equal(value, image_loss(alone))
            for inside, outside in zip(host.parameters(), alone.parameters(), strict=True):
                assert torch.equal(inside.grad, outside.grad)
        else:
            assert all(bool(p.grad.any()) for p in garden.slot_parameters(slot))
        measure(garden, slot)
        if stage is SeedStage.HOLDING:
            pretend_trained(garden, slot)
            garden.fossilize(slot)
        else:
            garden.advance(slot)
            garden.tick()


def test_train_and_eval_reach_the_seeds() -> None:
    garden = stack_garden()
    bring(garden, "a", SeedStage.TRAINING)
    garden.eval()
    assert not garden.seedbed[0].seed.training
    assert torch.equal(garden(X), garden.model(X))
    assert garden.train().seedbed[0].seed.training


@pytest.mark.parametrize("stage", LIVING)
def test_float64_in_every_stage(stage: SeedStage) -> None:
    garden = stack_garden()
    bring(garden, "b", stage, style="gated_gate")
    garden.to(torch.float64)
    assert {p.dtype for p in garden.parameters()} == {torch.float64}
    out = garden(X.double())
    assert out.dtype == torch.float64
    out.sum().backward()
    torch.testing.assert_close(out.float(), garden.float()(X))


@pytest.mark.parametrize("stage", LIVING)
@pytest.mark.parametrize("mode", MODES)
def test_autocast_in_every_stage(stage: SeedStage, mode: str) -> None:
    torch.manual_seed(1)
    garden = Garden(Residual(), ["stem"], IMAGES, config=quick_config(training_mode=mode))
    bring(garden, "stem", stage, "conv_light", style="gated_gate")
    with torch.autocast("cpu", torch.bfloat16):
        garden.training_loss(image_loss).backward()
    assert all(bool(p.grad.isfinite().all()) for p in garden.host_parameters())


@pytest.mark.parametrize("stage", [*LIVING, SeedStage.PRUNED])
def test_a_deepcopy_is_independent(stage: SeedStage) -> None:
    garden = stack_garden(lifecycle={"rules": {"min_prune_age": 0}})
    if stage is SeedStage.PRUNED:
        bring(garden, "b", SeedStage.BLENDING)
        garden.prune("b")
    else:
        bring(garden, "b", stage, style="gated_gate")
        stir(garden, "b")
    copied = copy.deepcopy(garden)
    before, state = garden(X).detach(), garden.state
    assert torch.equal(copied(X), before)
    with torch.no_grad():
        for parameter in copied.parameters():
            parameter.add_(1.0)
    for _ in range(9):
        copied.tick()
    copied.advance("b")
    copied.germinate("a", "norm")
    assert torch.equal(garden(X), before)
    assert same_state(garden.state, state)
    # And what the copy grows is its own.
    copied.load_state_dict(garden.state_dict())
    assert torch.equal(copied(X), before)
    assert same_state(copied.state, garden.state)


def test_a_garden_can_be_pickled() -> None:
    garden = stack_garden()
    bring(garden, "b", SeedStage.HOLDING)
    file = io.BytesIO()
    torch.save(garden, file)
    file.seek(0)
    loaded = torch.load(file, weights_only=False)
    assert torch.equal(loaded(X), garden(X))
    loaded.load_state_dict(garden.state_dict())
    assert loaded.set_alpha_target("b", 0.5, speed=0)
    assert garden.slots["b"].alpha == 1.0


@pytest.mark.parametrize("stage", LIVING)
def test_a_state_dict_grows_another_garden_to_the_same_topology(stage: SeedStage) -> None:
    garden = stack_garden()
    bring(garden, "b", stage, style="gated_gate")
    stir(garden, "b")
    other = stack_garden()
    bring(other, "a", SeedStage.HOLDING, "lora")
    other.load_state_dict(garden.state_dict())
    assert torch.equal(other(X), garden(X))
    assert same_state(other.state, garden.state)
    assert list(other.state_dict()) == list(garden.state_dict())


def test_optimizers_hear_of_every_change_of_parameters_and_of_nothing_else() -> None:
    class Ear(CarriedOptimizer):
        count = -1

        def reconcile(self) -> None:
            self.count += 1
            super().reconcile()

    garden = stack_garden(lifecycle={"rules": {"min_prune_age": 0}})
    ear, gone = (Ear(garden, torch.optim.SGD(garden.parameters(), lr=0.1)) for _ in range(2))
    del gone
    gc.collect()
    assert len(garden.ties.optimizers) == 1
    garden.germinate("a", "norm", tempo=1)
    assert ear.count == 1
    garden.advance("a")
    garden.advance("a")
    garden.tick()
    assert ear.count == 1
    garden.set_alpha_target("a", 0.5, speed=0, style="gated_gate")
    assert ear.count == 2
    garden.prune("a")
    assert ear.count == 3
    garden.tick()
    assert ear.count == 3
    garden.load_state_dict(stack_garden().state_dict())
    assert ear.count == 4


def test_a_batch_norm_host_works() -> None:
    host = nn.Sequential(nn.Conv2d(3, 4, 1), nn.BatchNorm2d(4), nn.ReLU(inplace=True))
    garden = Garden(host, ["1"], IMAGES, config=quick_config())
    bring(garden, "1", SeedStage.TRAINING, "conv_light")
    garden(IMAGES).sum().backward()
    assert int(host[1].num_batches_tracked) == 1
    garden.advance("1")
    garden.tick()
    garden(IMAGES).sum().backward()
    assert all(bool(p.grad.any()) for p in garden.slot_parameters("1"))


def test_a_host_that_recomputes_its_activations_is_isolated_too() -> None:
    class Frugal(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = Stack()

        def forward(self, x: Tensor) -> Tensor:
            out: Tensor = checkpoint(self.inner, x, use_reentrant=False)
            return out

    host = Frugal()
    alone = copy.deepcopy(host)
    garden = Garden(host, ["inner.b"], X, config=quick_config())
    bring(garden, "inner.b", SeedStage.TRAINING)
    stir(garden, "inner.b")
    for model in (garden, alone):
        model(X).square().sum().backward()
    assert all(bool(p.grad.any()) for p in garden.slot_parameters("inner.b"))
    for inside, outside in zip(host.parameters(), alone.parameters(), strict=True):
        assert torch.equal(inside.grad, outside.grad)


@pytest.mark.parametrize("style", STYLES)
def test_a_host_in_channels_last_order_grows(style: str) -> None:
    torch.manual_seed(1)
    images = IMAGES.to(memory_format=torch.channels_last)
    host = Residual().to(memory_format=torch.channels_last)
    garden = Garden(host, ["stem"], images, config=quick_config())
    bring(garden, "stem", SeedStage.HOLDING, "conv_light", style=style)
    stir(garden, "stem")
    torch.testing.assert_close(garden(images), garden(IMAGES))
    garden(images).sum().backward()
    assert all(bool(p.grad.isfinite().all()) for p in garden.parameters())


def test_inputs_may_be_keywords_and_outputs_anything() -> None:
    class Wordy(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(4, 4)

        def forward(self, *, x: Tensor, scale: float = 1.0) -> dict[str, Tensor]:
            return {"out": scale * self.layer(x)}

    garden = Garden(Wordy(), ["layer"], {"x": X}, config=quick_config())
    bring(garden, "layer", SeedStage.HOLDING)
    assert garden(x=X, scale=2.0)["out"].shape == (5, 4)


# -- compile and export ---------------------------------------------------------------------------


@pytest.fixture
def fresh_compiler() -> Any:
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


@pytest.mark.usefixtures("fresh_compiler")
@pytest.mark.filterwarnings("ignore:.*should not be instantiated:DeprecationWarning")
@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
def test_a_compiled_garden_sees_every_change(backend: str) -> None:
    garden = stack_garden()
    compiled = torch.compile(garden, backend=backend)
    assert torch.equal(compiled(X), garden(X))
    plain = garden(X).detach()
    garden.germinate("b", "mlp_small", tempo=2, style="linear_add")
    garden.advance("b")
    stir(garden, "b")

    out = compiled(X)
    assert torch.equal(out, plain)
    out.square().sum().backward()
    learned = [p.grad.clone() for p in garden.slot_parameters("b")]
    garden.zero_grad()
    garden(X).square().sum().backward()
    for one, parameter in zip(learned, garden.slot_parameters("b"), strict=True):
        torch.testing.assert_close(one, parameter.grad)

    garden.advance("b")
    for alpha in (0.5, 1.0):
        garden.tick()
        assert garden.slots["b"].alpha == alpha
        torch.testing.assert_close(compiled(X), garden(X))
        assert not torch.allclose(compiled(X), plain)
    record_epoch(garden, 1.0)
    garden.prune("b")
    torch.testing.assert_close(compiled(X), plain)


@pytest.mark.usefixtures("fresh_compiler")
def test_a_moving_amplitude_does_not_compile_anew() -> None:
    from torch._dynamo.testing import CompileCounter

    counter = CompileCounter()
    garden = stack_garden()
    bring(garden, "b", SeedStage.TRAINING)
    garden.advance("b")
    garden.tick()
    garden.set_alpha_target("b", 0.2, speed=5)
    compiled = torch.compile(garden, backend=counter)
    garden.tick()
    compiled(X)
    frames = counter.frame_count
    for _ in range(3):
        garden.tick()
        torch.testing.assert_close(compiled(X), garden(X))
    assert counter.frame_count == frames


@pytest.mark.usefixtures("fresh_compiler")
@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning")
@pytest.mark.skipif(shutil.which("g++") is None, reason="the default compiler needs a C++ compiler")
def test_the_default_compiler_agrees_with_eager() -> None:
    garden = stack_garden()
    bring(garden, "b", SeedStage.HOLDING, style="gated_gate")
    stir(garden, "b")
    compiled = torch.compile(garden)
    # Without a backward pass, whose kernels take as long again to compile.
    with torch.no_grad():
        torch.testing.assert_close(compiled(X), garden(X))


def test_a_grown_garden_can_be_exported() -> None:
    torch.manual_seed(1)
    garden = Garden(Residual(), ["stem", "conv"], IMAGES, config=quick_config())
    bring(garden, "stem", SeedStage.FOSSILIZED, "conv_light", style="gated_gate")
    bring(garden, "conv", SeedStage.HOLDING, "attention", style="linear_multiply")
    stir(garden, "stem")
    garden.eval()
    program = torch.export.export(garden, (IMAGES,))
    torch.testing.assert_close(program.module()(IMAGES), garden(IMAGES))


# -- operations -----------------------------------------------------------------------------------


def test_a_whole_life_by_hand() -> None:
    garden = stack_garden()
    assert garden.germinate("a", "lora", style="gated_gate", tempo=2, alpha_target=0.5)
    assert garden.advance("a")
    assert garden.advance("a")
    garden.tick()
    assert garden.slots["a"].alpha == 0.25
    garden.tick()
    refused = garden.advance("a")
    assert not refused
    assert "gate" in refused.reason
    assert garden.set_alpha_target("a", 1.0, speed=0, style="linear_add")
    assert garden.advance("a")
    assert not garden.fossilize("a")
    measure(garden, "a")
    refused = garden.fossilize("a")
    assert not refused
    assert "nothing has trained" in refused.reason
    stir(garden, "a")
    assert garden.fossilize("a")
    assert garden.slots["a"].stage is SeedStage.FOSSILIZED
    assert "fossilized and stays" in garden.prune("a").reason


def test_a_refused_operation_changes_nothing_at_all() -> None:
    garden = stack_garden()
    bring(garden, "a", SeedStage.TRAINING)
    state, keys = garden.state, list(garden.state_dict())
    for result in (
        garden.germinate("b", "norm"),
        garden.germinate("a", "norm"),
        garden.advance("b"),
        garden.set_alpha_target("a", 0.5),
        garden.prune("a"),
        garden.fossilize("a"),
        garden.germinate("b", "conv_light"),
    ):
        assert not result
        assert result.reason
    assert same_state(garden.state, state)
    assert list(garden.state_dict()) == keys


@pytest.mark.parametrize(
    ("call", "error", "words"),
    [
        (lambda g: g.advance("aa"), SlotError, "no slot is called 'aa', did you mean 'a'?"),
        (lambda g: g.germinate("a", "lorra"), UnknownNameError, "did you mean 'lora'"),
        (lambda g: g.germinate("a", "lora", style="add"), UnknownNameError, "unknown style"),
        (lambda g: g.germinate("a", "lora", tempo=0), UsageError, "tempo must be"),
        (lambda g: g.germinate("a", "lora", tempo=2.5), UsageError, "tempo must be a whole"),
        (lambda g: g.germinate("a", "lora", immediate="yes"), UsageError, "immediate must be true"),
        (lambda g: g.germinate("a", "lora", alpha_target=0), UsageError, "must be above 0"),
        (lambda g: g.germinate("a", "lora", alpha_target=1.5), UsageError, "at most 1, got 1.5"),
        (lambda g: g.set_alpha_target("a", 0.0), UsageError, "target must be above 0"),
        (lambda g: g.set_alpha_target("a", 0.5, speed=-1), UsageError, "speed must be"),
        (lambda g: g.set_alpha_target("a", 0.5, speed=math.inf), UsageError, "speed must be"),
        (lambda g: g.set_alpha_target("a", 0.5, curve="bent"), UnknownNameError, "unknown curve"),
        (lambda g: g.prune("a", speed=1.5), UsageError, "speed must be a whole number"),
        (lambda g: g.slot_parameters("z"), SlotError, "slots: a, b, c"),
    ],
)
def test_a_wrong_request_is_one_line(call: Any, error: type[Exception], words: str) -> None:
    garden = stack_garden()
    state = garden.state
    with pytest.raises(error) as raised:
        call(garden)
    assert words in str(raised.value)
    assert "\n" not in str(raised.value)
    assert same_state(garden.state, state)


def test_actions_of_a_controller_are_carried_out() -> None:
    garden = stack_garden()
    actions = placeholder_actions(1)
    assert carry_out(garden, actions)
    actions["op"] = torch.tensor([int(LifecycleOp.GERMINATE)])
    actions["slot"] = torch.tensor([1])
    actions["blueprint"] = torch.tensor([3])
    result = carry_out(garden, actions)
    assert (result.op, result.slot) == (LifecycleOp.GERMINATE, "b")
    assert garden.slots["b"].blueprint == "norm"
    actions["slot"] = torch.tensor([7])
    assert not carry_out(garden, actions)


def test_the_configuration_refuses_unknown_keys() -> None:
    with pytest.raises(ConfigError, match="did you mean 'training_mode'"):
        GardenConfig.from_mapping({"trainingmode": "shadow"})
    with pytest.raises(ConfigError, match="straight_through"):
        GardenConfig.from_mapping({"training_mode": "both"})


# -- measurements ---------------------------------------------------------------------------------


def test_gradients_are_measured_for_training_and_blending_seeds_and_recorded_with_the_epoch() -> (
    None
):
    garden = stack_garden()
    bring(garden, "a", SeedStage.HOLDING)
    bring(garden, "b", SeedStage.TRAINING)
    stir(garden, "b")
    garden(X).square().sum().backward()
    garden.measure_gradients()
    assert float(garden.state.grad_norm[0, 1]) == 0.0
    record_epoch(garden, 1.0)
    norm = torch.stack([p.grad.double().norm() for p in garden.slot_parameters("b")]).norm()
    assert float(garden.state.grad_norm[0, 1]) == pytest.approx(float(norm))
    assert float(garden.state.grad_ratio[0, 1]) > 0
    assert bool(garden.state.grad_ratio[0, 0].isnan())
    assert not garden._samples


def test_measuring_nothing_costs_nothing() -> None:
    garden = stack_garden()
    garden.measure_gradients()
    record_epoch(garden, 1.0)
    assert same_state(garden.state, stack_garden().state)


def test_clipping_is_separate_for_the_host_and_every_seed() -> None:
    garden = stack_garden()
    bring(garden, "a", SeedStage.HOLDING)
    bring(garden, "b", SeedStage.TRAINING)
    for parameter in garden.parameters():
        parameter.grad = torch.ones_like(parameter)
    next(iter(garden.slot_parameters("b"))).grad = None
    clip_gradients(garden, 1.0)
    for group in (
        garden.host_parameters(),
        garden.slot_parameters("a"),
        garden.slot_parameters("b"),
    ):
        total = torch.stack([p.grad.norm() for p in group if p.grad is not None]).norm()
        assert float(total) == pytest.approx(1.0, abs=1e-4)


def test_contributions_are_recorded_for_the_seeds_that_are_there() -> None:
    garden = stack_garden()
    bring(garden, "a", SeedStage.HOLDING)
    two = Estimate(2.0, 0.5)
    record_contributions(
        garden,
        Contributions(
            score=two,
            all_off=two,
            leave_one_out={"a": two, "b": two},
            solo_on={},
            pairs={},
            interactions={("a", "b"): Estimate(0.75, 0.1)},
        ),
    )
    assert garden.slots["a"].contribution == 2.0
    assert garden.slots["a"].contribution_se == 0.5
    assert garden.slots["b"].contribution is None
    assert garden.state.interaction[0, 0, 1] == garden.state.interaction[0, 1, 0] == 0.75


def test_parameters_count_seeds_gates_and_fading_ones() -> None:
    garden = stack_garden()
    bring(garden, "a", SeedStage.HOLDING, style="gated_gate")
    grown = garden.count_parameters()
    assert grown == sum(p.numel() for p in garden.parameters())
    assert garden.count_host_parameters() == 60
    garden.set_alpha_target("a", 0.5, speed=3)
    assert garden.count_parameters() == grown


def test_masks_and_operations_agree_on_a_fresh_garden() -> None:
    masks = stack_garden().table.masks()
    assert masks.op[0].tolist() == [True, True, False, False, False, False]
    assert masks.slot_by_op[0, LifecycleOp.GERMINATE].tolist() == [True, True, True]


def test_growing_leaves_no_warning_behind() -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        garden = stack_garden()
        bring(garden, "a", SeedStage.FOSSILIZED)
        garden(X).sum().backward()
