"""The modules behind the lifecycle: built, freed, frozen and aimed as the state says."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Iterator

import pytest
import torch
from torch import Tensor, nn

from esper.kasmina.blueprints.registry import BLUEPRINTS, register_blueprint
from esper.kasmina.garden import Garden
from esper.kasmina.slot import SlotMode
from esper.leyline.errors import EsperWarning, SlotError
from esper.leyline.stages import SeedStage
from tests.kasmina.gardens import LIVING, Stack, bring, quick_config, same_state, stack_garden, stir
from tests.plots import record_epoch

X = torch.randn(5, 4)


class Wrong(nn.Module):
    """A seed that breaks as it is told."""

    habit = "shape"

    def __init__(self, channels: int, topology: str) -> None:
        super().__init__()
        if self.habit == "constructor" and not torch.empty(0).is_meta:
            raise RuntimeError("broken constructor")
        self.weight = nn.Parameter(torch.zeros(channels))

    def forward(self, x: Tensor) -> Tensor | tuple[Tensor]:
        if self.habit == "shape":
            return x[..., :-1]
        return (x,) if self.habit == "tuple" else x


@pytest.fixture
def wrong() -> Iterator[type[Wrong]]:
    register_blueprint("wrong", topologies=("vector",))(Wrong)
    yield Wrong
    BLUEPRINTS.unregister("wrong")


@pytest.mark.parametrize(
    ("stage", "mode"),
    [
        (SeedStage.GERMINATED, SlotMode.PASS),
        (SeedStage.TRAINING, SlotMode.ISOLATE),
        (SeedStage.BLENDING, SlotMode.BLEND),
        (SeedStage.HOLDING, SlotMode.BLEND),
        (SeedStage.FOSSILIZED, SlotMode.BLEND),
    ],
)
def test_each_stage_has_its_mode(stage: SeedStage, mode: SlotMode) -> None:
    garden = stack_garden()
    bring(garden, "a", stage)
    assert garden.seedbed[0].mode == mode
    assert float(garden.seedbed[0].alpha) == garden.slots["a"].alpha


def test_a_seed_that_starts_to_blend_passes_until_its_amplitude_moves() -> None:
    garden = stack_garden()
    bring(garden, "a", SeedStage.TRAINING)
    garden.advance("a")
    assert garden.seedbed[0].mode == SlotMode.PASS
    garden.tick()
    assert garden.seedbed[0].mode == SlotMode.BLEND


def test_a_pruned_seed_and_its_gate_are_freed() -> None:
    garden = stack_garden()
    bring(garden, "a", SeedStage.HOLDING, style="gated_gate")
    record_epoch(garden, 1.0)
    gone = [weakref.ref(p) for p in garden.slot_parameters("a")]
    assert len(gone) == 8
    assert garden.prune("a")
    gc.collect()
    assert not any(reference() is not None for reference in gone)
    assert not list(garden.slot_parameters("a"))
    assert garden.slots["a"].parameters == 0


def test_the_gate_comes_and_goes_with_the_style() -> None:
    garden = stack_garden()
    bring(garden, "a", SeedStage.BLENDING)
    alone = garden.slots["a"].parameters
    seed = garden.seedbed[0].seed
    garden.set_alpha_target("a", 0.5, speed=0, style="gated_gate")
    assert garden.seedbed[0].gate is not None
    assert garden.slots["a"].parameters > alone
    garden.set_alpha_target("a", 0.5, speed=0, style="linear_multiply")
    assert garden.seedbed[0].gate is None
    assert garden.slots["a"].parameters == alone
    assert garden.seedbed[0].seed is seed


def test_a_style_that_is_not_named_stays() -> None:
    garden = stack_garden()
    bring(garden, "a", SeedStage.BLENDING, style="gated_gate")
    before = garden.seedbed[0].algorithm
    gate = garden.seedbed[0].gate
    garden.set_alpha_target("a", 0.5, speed=0)
    assert garden.seedbed[0].algorithm == before
    assert garden.seedbed[0].gate is gate


def trainable(garden: Garden, slot: str = "a") -> list[bool]:
    return [parameter.requires_grad for parameter in garden.slot_parameters(slot)]


@pytest.mark.parametrize("style", ["linear_add", "gated_gate"])
def test_a_seed_is_frozen_while_it_fades_and_its_host_still_learns(style: str) -> None:
    garden = stack_garden()
    bring(garden, "a", SeedStage.HOLDING, style=style)
    stir(garden, "a")
    garden(torch.randn(5, 4)).square().sum().backward()
    garden.set_alpha_target("a", 0.5, speed=2)
    assert not any(trainable(garden))
    assert all(parameter.grad is None for parameter in garden.slot_parameters("a"))
    garden.zero_grad()
    garden(torch.randn(5, 4)).square().sum().backward()
    assert all(parameter.grad is None for parameter in garden.slot_parameters("a"))
    assert all(bool(parameter.grad.any()) for parameter in garden.host_parameters())
    garden.tick()
    assert not any(trainable(garden))
    garden.tick()
    assert all(trainable(garden))


def test_what_was_not_trainable_before_is_not_afterwards() -> None:
    garden = stack_garden()
    bring(garden, "a", SeedStage.HOLDING)
    kept = next(iter(garden.slot_parameters("a")))
    kept.requires_grad_(False)
    garden.tick()
    assert trainable(garden) == [False, True, True, True]
    garden.set_alpha_target("a", 0.5, speed=1)
    assert not any(trainable(garden))
    garden.tick()
    assert trainable(garden) == [False, True, True, True]


def test_a_scheduled_prune_freezes_too() -> None:
    garden = stack_garden()
    bring(garden, "a", SeedStage.HOLDING)
    record_epoch(garden, 1.0)
    assert garden.prune("a", speed=2)
    assert not any(trainable(garden))
    garden.tick()
    garden.tick()
    assert not list(garden.slot_parameters("a"))


def test_initial_weights_depend_on_seed_slot_and_number_of_germinations_alone() -> None:
    def weights(seed: int = 0, slot: str = "a", *, again: bool = False) -> Tensor:
        torch.manual_seed(torch.randint(1000, ()).item())
        garden = stack_garden(seed=seed, lifecycle={"rules": {"min_prune_age": 0}})
        bring(garden, slot, SeedStage.GERMINATED)
        if again:
            assert garden.prune(slot)
            for _ in range(7):
                garden.tick()
            bring(garden, slot, SeedStage.GERMINATED)
        return next(iter(garden.slot_parameters(slot))).detach()

    assert torch.equal(weights(), weights())
    for other in (weights(1), weights(0, "b"), weights(again=True)):
        assert not torch.equal(weights(), other)


def test_germination_draws_nothing_from_the_global_stream() -> None:
    garden = stack_garden()
    before = torch.get_rng_state()
    bring(garden, "a", SeedStage.HOLDING, style="gated_gate")
    assert torch.equal(torch.get_rng_state(), before)


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
def test_a_seed_takes_over_precision_and_mode(dtype: torch.dtype) -> None:
    garden = stack_garden().to(dtype)
    garden.eval()
    bring(garden, "a", SeedStage.HOLDING, style="gated_gate")
    assert {parameter.dtype for parameter in garden.slot_parameters("a")} == {dtype}
    assert garden.seedbed[0].alpha.dtype == torch.float64
    assert not garden.seedbed[0].seed.training
    assert garden(torch.zeros(2, 4, dtype=dtype)).dtype == dtype


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
def test_a_cast_in_the_middle_of_a_ramp_keeps_the_amplitude_exact(dtype: torch.dtype) -> None:
    garden = stack_garden()
    bring(garden, "a", SeedStage.HOLDING)
    garden.set_alpha_target("a", 0.5, speed=3)
    garden.tick()
    garden.to(dtype)
    assert float(garden.seedbed[0].alpha) == garden.slots["a"].alpha == 1 - 0.5 / 3


def test_a_seed_and_its_amplitude_live_where_the_host_lives() -> None:
    host = Stack().to("meta")
    garden = Garden(host, ["a"], torch.empty(2, 4, device="meta"), config=quick_config())
    bring(garden, "a", SeedStage.HOLDING)
    assert {parameter.device.type for parameter in garden.slot_parameters("a")} == {"meta"}
    with garden.seedbed.configured(torch.tensor([[True], [False]]), samples=3):
        assert garden.seedbed[0].sample_alphas.device.type == "meta"
        assert garden(torch.empty(6, 4, device="meta")).shape == (6, 4)


@pytest.mark.parametrize(
    ("habit", "words"),
    [("shape", r"turns \[2, 4\] into \[2, 3\]"), ("tuple", r"turns \[2, 4\] into tuple")],
)
def test_a_seed_that_changes_shape_is_refused_and_leaves_nothing_behind(
    wrong: type[Wrong], monkeypatch: pytest.MonkeyPatch, habit: str, words: str
) -> None:
    monkeypatch.setattr(wrong, "habit", habit)
    garden = stack_garden()
    state, keys = garden.state, list(garden.state_dict())
    with pytest.raises(SlotError, match=words):
        garden.germinate("a", "wrong")
    assert same_state(garden.state, state)
    assert list(garden.state_dict()) == keys
    assert garden.seedbed.germinations == 0
    garden.tick()
    assert garden.germinate("a", "norm")


def test_a_seed_that_cannot_be_built_leaves_nothing_behind(
    wrong: type[Wrong], monkeypatch: pytest.MonkeyPatch
) -> None:
    garden = stack_garden()
    bring(garden, "b", SeedStage.HOLDING)
    # Sizes are known from now on, so that the constructor is next called for the seed itself.
    garden.table.masks()
    monkeypatch.setattr(wrong, "habit", "constructor")
    state = garden.state
    with pytest.raises(RuntimeError, match="broken constructor"):
        garden.germinate("a", "wrong")
    assert same_state(garden.state, state)
    garden.tick()
    assert garden.slots["b"].stage is SeedStage.HOLDING


def test_a_shadowed_garden_warns_about_a_seed_that_never_learned() -> None:
    garden = stack_garden(training_mode="shadow")
    bring(garden, "a", SeedStage.TRAINING)
    with pytest.warns(EsperWarning, match=r"slot 'a' was never trained.*garden\.training_loss"):
        garden.advance("a")


def test_a_shadowed_garden_does_not_warn_about_a_seed_that_learned() -> None:
    garden = stack_garden(training_mode="shadow")
    bring(garden, "a", SeedStage.TRAINING)
    garden.training_loss(lambda model: model(torch.ones(2, 4)).sum()).backward()
    assert garden.advance("a")


def test_a_shadowed_garden_does_not_warn_about_a_seed_whose_past_it_does_not_know() -> None:
    saved = stack_garden(training_mode="shadow")
    bring(saved, "a", SeedStage.TRAINING)
    saved.training_loss(lambda model: model(torch.ones(2, 4)).sum()).backward()
    fresh = stack_garden(training_mode="shadow")
    fresh.load_state_dict(saved.state_dict())
    assert fresh.advance("a")
    # Nor when a seed that trains is replaced by one that already blends.
    other = stack_garden(training_mode="shadow")
    bring(other, "a", SeedStage.TRAINING)
    other.load_state_dict(fresh.state_dict())
    assert other.slots["a"].stage is SeedStage.BLENDING


@pytest.mark.parametrize("stage", LIVING[:-1])
def test_cycles_leave_no_hook_no_parameter_and_no_listener_behind(stage: SeedStage) -> None:
    model = Stack()
    garden = stack_garden(model, lifecycle={"rules": {"min_prune_age": 0}})

    def hooks() -> int:
        return sum(
            len(module._forward_hooks)
            + len(module._forward_pre_hooks)
            + len(module._backward_hooks)
            for module in garden.modules()
        )

    before = hooks(), list(garden.state_dict()), len(list(garden.parameters()))
    assert before[0] == 3
    for _ in range(3):
        bring(garden, "b", stage, style="gated_gate")
        assert len(list(garden.parameters())) > before[2]
        assert garden.prune("b")
        assert (hooks(), list(garden.state_dict()), len(list(garden.parameters()))) == before
        for _ in range(7):
            garden.tick()


# -- on and off ----------------------------------------------------------------------------------


def test_configurations_run_side_by_side_in_one_batch() -> None:
    garden = stack_garden()
    for slot in ("a", "c"):
        bring(garden, slot, SeedStage.HOLDING, style="gated_gate")
        stir(garden, slot)
    garden.eval()
    plan = torch.tensor([[1, 1, 1], [0, 1, 1], [1, 1, 0], [0, 1, 0]]).bool()
    separate = []
    for row in plan:
        with garden.seedbed.configured(row[None], None):
            separate.append(garden(X))
    with garden.seedbed.configured(plan, len(X)):
        together = garden(X.repeat(4, 1))
    torch.testing.assert_close(together, torch.cat(separate))
    torch.testing.assert_close(separate[0], garden(X))
    bare = Stack()
    bare.load_state_dict(dict(garden.model.named_parameters()))
    assert torch.equal(separate[3], bare(X))


def test_a_configuration_does_not_outlive_its_block() -> None:
    garden = stack_garden()
    bring(garden, "a", SeedStage.HOLDING)
    stir(garden, "a")
    before = garden(X)
    with pytest.raises(KeyError), garden.seedbed.configured(torch.zeros(1, 3).bool(), None):
        raise KeyError
    assert torch.equal(garden(X), before)


def test_a_seed_in_training_is_not_touched_by_configurations() -> None:
    garden = stack_garden()
    bring(garden, "a", SeedStage.TRAINING)
    with garden.seedbed.configured(torch.zeros(1, 3).bool(), None):
        assert garden.seedbed[0].sample_alphas is None
