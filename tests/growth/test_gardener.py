from __future__ import annotations

import dataclasses
import math
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.optim import SGD, AdamW

from esper.growth.config import GardenerConfig
from esper.growth.gardener import MEMORY, Gardener
from esper.kasmina.blueprints.registry import blueprint_by_id
from esper.kasmina.costs import gate_flops, seed_flops
from esper.kasmina.garden import Garden
from esper.kasmina.lifecycle import Outcome
from esper.kasmina.signals import GovernorConfig
from esper.kasmina.slot_table import OperationResult, describe_decision, slot_records
from esper.kasmina.slots.probe import map_tensors
from esper.leyline.actions import CAUSAL_HEADS, LifecycleOp, placeholder_actions
from esper.leyline.controller import Controller, GrowthLimits
from esper.leyline.errors import ConfigError, EsperWarning, NonFiniteError, UsageError
from esper.leyline.records import EpochRecord
from esper.leyline.signals import Signals
from esper.leyline.stages import SeedStage
from esper.utils.storage import load_tree, save_tree
from tests.plots import (
    CLASSES,
    EAGER,
    GROW_ONE,
    SLOTS,
    Script,
    TinyConv,
    advance,
    fossilize,
    frozen,
    germinate,
    make_batches,
    make_evaluator,
    make_garden,
    plain_history,
    raise_seed,
    record_epoch,
    same,
    train,
)

pytestmark = pytest.mark.filterwarnings("ignore:.*too few to grow in")


class Cautious(Script):
    """Learned to grow within twice the parameters and three times the operations."""

    limits = GrowthLimits(parameters=2.0, flops=3.0)


def test_limits_a_controller_learned_under_hold_where_the_owner_sets_none() -> None:
    garden = make_garden()
    parameters, flops = garden.count_host_parameters(), garden.host_flops
    Gardener(garden, Cautious({}), 10)
    assert (garden.param_limit, garden.flop_limit) == (2 * parameters, 3 * flops)

    own = make_garden()
    gardener = Gardener(own, Cautious({}), 10, max_parameters=parameters + 7)
    assert (own.param_limit, own.flop_limit) == (parameters + 7, 3 * flops)
    assert int(gardener.signals().param_limit) == parameters + 7

    free = make_garden()
    Gardener(free, "heuristic", 10)
    assert (free.config.max_parameters, free.config.max_added_flops) == (0, 0)


def test_a_frozen_host_has_no_parameters_to_be_a_multiple_of() -> None:
    garden = make_garden()
    garden.model.requires_grad_(False)
    Gardener(garden, Cautious({}), 10)
    assert garden.config.max_parameters == 0
    assert garden.flop_limit == 3 * garden.host_flops


def constant(model: nn.Module) -> tuple[Tensor, Tensor]:
    """An evaluation that costs nothing: every sample has loss 1 and half of them are right."""
    return torch.ones(4), torch.tensor([1.0, 0.0, 1.0, 0.0])


def drive(
    controller: str | Controller,
    epochs: int,
    *,
    seed: int = 0,
    horizon: int | None = None,
    **options: Any,
) -> tuple[Gardener, list[list[float]]]:
    """Train and step for some epochs; returns the training losses too."""
    gardener = Gardener(make_garden(), controller, horizon or epochs, seed=seed, **options)
    optimizer = gardener.optimizer(SGD, lr=0.1, momentum=0.9)
    return gardener, proceed(gardener, optimizer, epochs)


def proceed(gardener: Gardener, optimizer: Any, epochs: int) -> list[list[float]]:
    losses = []
    for _ in range(epochs):
        losses.append(train(gardener.garden, optimizer, make_batches()))
        gardener.step(make_evaluator(), train_loss=losses[-1][-1])
    return losses


# --------------------------------------------------------------------------------- order of a step


def test_a_step_measures_then_decides_then_acts_then_ticks() -> None:
    events: list[str] = []

    class Noting(Script):
        def act(self, signals: Any, masks: Any) -> dict[str, Tensor]:
            events.append("decide")
            assert int(signals.epoch[0]) == gardener.epoch, "the epoch is recorded by now"
            return super().act(signals, masks)

    gardener = Gardener(make_garden(), Noting({1: germinate()}), 3)
    gardener.optimizer(SGD, lr=0.1)

    def evaluate(model: nn.Module) -> tuple[Tensor, None]:
        events.append("evaluate")
        return torch.ones(3), None

    def fork() -> None:
        events.append("fork")
        assert gardener.garden.slots["stem"].stage is SeedStage.DORMANT, "nothing is done yet"

    gardener.step(evaluate, before_action=fork)
    assert events == ["evaluate", "decide", "fork"]
    assert gardener.garden.slots["stem"].stage is SeedStage.GERMINATED
    events.clear()
    gardener.step(evaluate, before_action=fork)
    assert events == ["evaluate", "decide"]
    events.clear()
    gardener.step(evaluate)
    assert events == ["evaluate"]


def test_a_decision_is_recorded_with_the_epoch_it_followed() -> None:
    gardener, _ = drive(Script(GROW_ONE), 9)
    history = gardener.history
    assert [record.epoch for record in history] == list(range(1, 10))
    ops = [record.decision.op if record.decision else None for record in history]
    assert ops == ["WAIT", "GERMINATE", "ADVANCE", "ADVANCE", *["WAIT"] * 4, None]
    stages = [record.slots[0].stage for record in history]
    assert stages == ["DORMANT"] * 2 + ["GERMINATED", "TRAINING"] + ["BLENDING"] * 5
    # The tick that ends the decision to blend already moves the amplitude: three to the target.
    alphas = [record.slots[0].alpha for record in history]
    assert alphas == pytest.approx([0, 0, 0, 0, 1 / 3, 2 / 3, 1, 1, 1])
    decision = history[1].decision
    assert decision is not None
    assert (decision.slot, decision.blueprint, decision.style) == (
        "stem",
        "mlp_small",
        "LINEAR_ADD",
    )
    assert (decision.tempo, decision.alpha_target, decision.alpha_speed) == (3, 1.0, None)
    assert (decision.outcome, decision.reason) == ("done", "")
    grown = [record.parameters > history[0].parameters for record in history]
    assert grown == [False] * 2 + [True] * 7
    # A contribution is measured in the first epoch that trains with the seed blended.
    measured = [record.slots[0].contribution is not None for record in history]
    assert measured == [False] * 4 + [True] * 5


def test_a_refused_action_is_recorded_with_its_reason() -> None:
    gardener, _ = drive(Script({1: advance(1), 2: germinate(), 3: germinate(1)}), 4)
    decisions = [record.decision for record in gardener.history]
    assert decisions[0] is not None
    assert (decisions[0].op, decisions[0].outcome) == ("ADVANCE", "illegal")
    assert "holds no seed" in decisions[0].reason
    assert decisions[2] is not None
    assert decisions[2].outcome == "illegal"
    assert gardener.garden.slots["body"].stage.name == "DORMANT"


def test_a_gate_that_fails_is_recorded_as_such() -> None:
    garden = Garden(make_garden().model, SLOTS, torch.zeros(2, 4))
    script = Script({1: germinate(), 2: advance(), 3: advance()})
    gardener = Gardener(garden, script, 4, config=GardenerConfig(fits_horizon=False))
    gardener.optimizer(SGD, lr=0.1)
    for _ in range(4):
        gardener.step(constant)
    decision = gardener.history[2].decision
    assert decision is not None
    assert decision.outcome == "gate_failed"
    assert decision.reason
    assert garden.slots["stem"].stage.name == "TRAINING"


def test_the_first_decision_sees_the_first_epoch() -> None:
    script = Script({1: germinate()})
    gardener, _ = drive(script, 3)
    first, second = script.seen
    assert int(first.epoch) == 1
    assert int(first.max_epochs) == 3
    assert float(first.val_score) == pytest.approx(gardener.history[0].val_score)
    assert float(first.val_loss) == pytest.approx(gardener.history[0].val_loss)
    assert (int(first.last_op), bool(first.last_success)) == (0, True)
    assert int(second.last_op) == 1
    assert int(second.params) > int(second.host_params) == int(first.params)
    # After the last epoch the controller is not asked.
    assert len(script.seen) == 2
    assert gardener.history[-1].decision is None


def test_an_epoch_without_seeds_to_ablate_forgets_old_interactions() -> None:
    gardener, _ = drive("wait", 1, horizon=9)
    state = gardener.garden.state
    known = dataclasses.replace(state, interaction=torch.ones_like(state.interaction))
    gardener.garden.sync(known)
    gardener.step(make_evaluator())
    assert not gardener.signals().interaction.any()


def test_nothing_moves_after_the_last_epoch() -> None:
    gardener, _ = drive(Script({**GROW_ONE}), 5)
    assert gardener.garden.slots["stem"].alpha == pytest.approx(1 / 3)
    assert gardener.history[-1].slots[0].alpha == pytest.approx(1 / 3)


def test_a_gardener_says_why_nothing_grew() -> None:
    gardener = Gardener(make_garden(), "heuristic", 3)
    for _ in range(3):
        gardener.step(constant)
    assert gardener.why[0].startswith("Nothing grew: the controller waited in 2 of 2 decisions: ")
    assert drive(Script(GROW_ONE), 9)[0].why == ()
    assert "still being blended in" in drive(Script(GROW_ONE), 6)[0].why[0]


@pytest.mark.parametrize(
    ("controller", "horizon", "told"),
    [
        ("heuristic", 4, "4 epochs are too few to grow in"),
        ("tamiyo", 11, "11 epochs may be too few to grow in"),
        ("tamiyo", 12, None),
        ("heuristic", 8, None),
        ("wait", 1, None),
    ],
)
def test_a_gardener_says_at_its_start_that_a_run_is_too_short(
    controller: str, horizon: int, told: str | None
) -> None:
    with warnings.catch_warnings(record=True) as found:
        warnings.simplefilter("always")
        Gardener(make_garden(), controller, horizon)
    assert [str(one.message).startswith(told or "") for one in found] == [True] * bool(told)


@pytest.mark.filterwarnings("ignore:the new seed in 'body' is in no optimizer")
def test_a_learned_controller_is_not_trusted_with_a_host_that_does_not_train() -> None:
    garden = make_garden()
    garden.model.requires_grad_(False)
    gardener = Gardener(garden, "tamiyo", 60)
    with pytest.warns(EsperWarning, match=r"\(0 parameters of its host train\), so a rule decides"):
        gardener.step(constant)
    assert "chance of germinating" not in gardener.history[-1].decision.reason


def test_a_horizon_is_kept() -> None:
    gardener = Gardener(make_garden(), "wait", 2)
    gardener.step(constant)
    gardener.step(constant)
    assert gardener.epoch == 2
    with pytest.raises(UsageError, match="the horizon of 2 epochs is reached"):
        gardener.step(constant)
    assert len(gardener.history) == 2
    with pytest.raises(UsageError, match="horizon must be at least 1, got 0"):
        Gardener(make_garden(), "wait", 0)


def test_a_model_without_slots_has_no_gardener() -> None:
    with pytest.raises(UsageError, match=r"needs a Garden, got TinyConv; write esper\.Garden"):
        Gardener(TinyConv(), "wait", 2)  # type: ignore[arg-type]


def test_an_evaluation_that_fails_changes_nothing() -> None:
    gardener, _ = drive(Script(GROW_ONE), 5, horizon=9)
    before = frozen(gardener.state_dict())
    with pytest.raises(UsageError):
        gardener.step(lambda model: torch.ones(3))  # type: ignore[arg-type, return-value]
    assert same(gardener.state_dict(), before)


# ------------------------------------------------------------------------------------ the governor


def poison(garden: nn.Module) -> None:
    """Do to a network what an optimizer step with an infinite gradient does."""
    with torch.no_grad():
        for parameter in garden.parameters():
            parameter.fill_(math.nan)


def test_a_network_that_is_not_finite_goes_back_to_its_last_safe_state_and_goes_on() -> None:
    gardener, _ = drive(Script(GROW_ONE), 7, horizon=30)
    assert gardener.carried is not None
    optimizer, garden = gardener.carried.optimizer, gardener.garden
    host = {name: value.clone() for name, value in garden.model.named_parameters()}
    # A copy is taken every five epochs: after the fifth, when the seed was blending already.
    assert garden.slots["stem"].stage is SeedStage.BLENDING
    poison(garden)
    with pytest.warns(EsperWarning, match=r"not finite; the network was rolled back to epoch 5"):
        record = gardener.step(make_evaluator())
    assert record.rollback == "not_finite"
    assert math.isfinite(record.val_loss), "the record is of the network that goes on"
    assert gardener.history[-1] is record
    assert bool(gardener.signals().rolled_back[0])
    now = dict(garden.model.named_parameters())
    assert all(bool(value.isfinite().all()) for value in now.values())
    assert any(bool((now[name] != host[name]).any()) for name in host), "it is an earlier network"
    assert garden.slots["stem"].stage in (SeedStage.PRUNED, SeedStage.EMBARGOED, SeedStage.DORMANT)
    assert garden.count_parameters() == garden.count_host_parameters()
    assert all(not optimizer.state.get(parameter) for parameter in now.values()), "at rest"
    after = proceed(gardener, optimizer, 3)
    assert all(math.isfinite(loss) for losses in after for loss in losses)
    assert [one.rollback for one in gardener.history[-3:]] == [None] * 3
    assert not bool(gardener.signals().rolled_back[0])


def test_before_the_first_copy_a_network_goes_back_to_its_start() -> None:
    gardener = Gardener(make_garden(), "wait", 9)
    start = {name: value.clone() for name, value in gardener.garden.named_parameters()}
    poison(gardener.garden)
    with pytest.warns(EsperWarning, match="rolled back to its first weights"):
        gardener.step(make_evaluator())
    for name, value in gardener.garden.named_parameters():
        assert torch.equal(value, start[name]), name


def test_weights_loaded_before_the_optimizer_is_made_are_the_start() -> None:
    gardener = Gardener(make_garden(seed=0), "wait", 9)
    loaded = make_garden(seed=1)
    gardener.garden.load_state_dict(loaded.state_dict())
    gardener.optimizer(SGD, lr=0.1)
    poison(gardener.garden)
    with pytest.warns(EsperWarning, match="not finite"):
        gardener.step(make_evaluator())
    for name, value in loaded.named_parameters():
        assert torch.equal(dict(gardener.garden.named_parameters())[name], value), name


def test_the_controllers_memory_is_cleared_and_the_run_can_be_resumed() -> None:
    class Counting(Script):
        resets = 0

        def reset(self, rows: int, device: Any) -> None:
            self.resets += 1
            super().reset(rows, device)

    controller = Counting({})
    gardener = Gardener(make_garden(), controller, 9)
    gardener.optimizer(SGD, lr=0.1, momentum=0.9)
    assert controller.resets == 1
    poison(gardener.garden)
    with pytest.warns(EsperWarning, match="not finite"):
        gardener.step(make_evaluator())
    assert controller.resets == 2
    other = Gardener(make_garden(seed=3), Counting({}), 9)
    other.optimizer(SGD, lr=0.1, momentum=0.9)
    other.load_state_dict(gardener.state_dict())
    assert same(other.state_dict(), gardener.state_dict())
    assert other.history[-1].rollback == "not_finite"


def test_rollbacks_that_do_not_help_end_in_an_error() -> None:
    gardener = Gardener(make_garden(), "wait", 9)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", EsperWarning)
        for _ in range(2):
            poison(gardener.garden)
            gardener.step(make_evaluator())
        poison(gardener.garden)
        with pytest.raises(NonFiniteError, match=r"in 3 epochs in a row.*lower the learning rate"):
            gardener.step(make_evaluator())


def test_a_loss_that_falls_back_to_guessing_is_noticed_where_guessing_is_known() -> None:
    gardener = Gardener(make_garden(), "wait", 30, config=GardenerConfig(chance_loss=1.0))
    for _ in range(12):
        gardener.step(lambda model: (torch.full((4,), 0.2), None))
    with pytest.warns(EsperWarning, match="fell back to the loss of guessing"):
        record = gardener.step(lambda model: (torch.full((4,), 1.01), None))
    assert record.rollback == "lobotomy"


def test_without_a_governor_a_loss_that_is_not_finite_is_an_error() -> None:
    config = GardenerConfig(governor=GovernorConfig(is_on=False))
    gardener = Gardener(make_garden(), "wait", 9, config=config)
    with pytest.raises(NonFiniteError, match="the validation loss is not finite; lower the"):
        gardener.step(lambda model: (torch.tensor([math.nan]), None))


# --------------------------------------------------------------------------------- what it is told


def test_the_twins_score_reaches_signals_and_records() -> None:
    script = Script({})
    gardener = Gardener(make_garden(), script, 4)
    gardener.step(constant, twin_score=61.5)
    gardener.step(constant)
    gardener.step(constant, is_own_twin=True)
    assert [float(signals.twin_score) for signals in script.seen[::2]] == [61.5, 50.0]
    assert math.isnan(float(script.seen[1].twin_score))
    assert [record.twin_score for record in gardener.history] == [61.5, None, 50.0]


def test_training_losses_are_written_down_as_given() -> None:
    gardener = Gardener(make_garden(), "wait", 2)
    assert gardener.step(constant).train_loss is None
    assert gardener.step(constant, train_loss=0.25).train_loss == 0.25
    assert gardener.history[1].val_score == 50.0
    assert gardener.history[1].val_loss == 1.0


def test_settings_reach_the_controller() -> None:
    script = Script({})
    config = GardenerConfig(param_budget=1234)
    gardener = Gardener(make_garden(), script, 2, config=config)
    gardener.step(constant)
    assert int(script.seen[0].budget) == 1234
    assert isinstance(script.seen[0], Signals)


def test_signals_say_what_is_known_of_data_and_limits() -> None:
    script = Script({})
    config = GardenerConfig(train_samples=900, samples_per_epoch=300, num_classes=3)
    garden = make_garden()
    gardener = Gardener(garden, script, 2, max_parameters=400, max_added_flops=50, config=config)
    gardener.step(constant, train_loss=0.75)
    seen = script.seen[0]
    assert int(seen.train_samples) == 900
    assert int(seen.samples_per_epoch) == 300
    assert int(seen.num_classes) == 3
    assert float(seen.chance_loss) == pytest.approx(math.log(3))
    assert float(seen.train_loss) == 0.75
    assert int(seen.param_limit) == 400
    assert int(seen.flop_limit) == garden.host_flops + 50
    assert int(seen.flops) == int(seen.host_flops) == garden.host_flops > 0


def test_signals_say_the_rate_that_the_optimizer_has() -> None:
    gardener = Gardener(make_garden(), "wait", 9)
    gardener.step(constant)
    assert float(gardener.signals().rate_factor) == 1.0
    assert math.isnan(float(gardener.signals().learning_rate))
    optimizer = gardener.optimizer(SGD, lr=0.2)
    assert float(gardener.signals().learning_rate) == pytest.approx(0.2)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda epoch: 1 / (1 + epoch))
    optimizer.step()
    schedule.step()
    assert float(gardener.signals().rate_factor) == pytest.approx(0.5)
    assert float(gardener.signals().learning_rate) == pytest.approx(0.1)


def test_the_peak_of_a_rate_that_first_rises_is_where_it_rises_to() -> None:
    gardener = Gardener(make_garden(), "wait", 9)
    optimizer = gardener.optimizer(SGD, lr=0.2)
    torch.optim.lr_scheduler.OneCycleLR(optimizer, max_lr=0.4, total_steps=10, div_factor=8)
    assert float(gardener.signals().rate_factor) == pytest.approx(1 / 8)


def test_a_controller_may_be_any_object_with_the_protocol() -> None:
    script = Script({})
    assert isinstance(script, Controller)
    assert Gardener(make_garden(), script, 2).controller is script
    with pytest.raises(UsageError, match="a controller must be a name or an object with reset"):
        Gardener(make_garden(), object(), 2)  # type: ignore[arg-type]
    with pytest.raises(UsageError, match="unknown controller 'heuristics', did you mean"):
        Gardener(make_garden(), "heuristics", 2)


# -------------------------------------------------------------------------------- limits of growth


def added_flops(garden: Garden) -> int:
    blueprints = garden.state.blueprint[0].tolist()
    return sum(
        seed_flops(blueprint_by_id(blueprint), slot.topology, slot.shape)
        + (0 if slot.gate is None else gate_flops(slot.topology, slot.shape))
        for blueprint, slot in zip(blueprints, garden.seedbed, strict=True)
        if slot.seed is not None
    )


@pytest.mark.filterwarnings("ignore:The validation loss did not fall")
@pytest.mark.parametrize(
    "limits",
    [
        {"max_seeds": 1},
        {"max_seeds": 2},
        {"max_parameters": 300},
        {"max_added_flops": 200},
        {"max_seeds": 2, "max_parameters": 400, "max_added_flops": 400},
        {},
    ],
    ids=lambda limits: "+".join(limits) or "none",
)
def test_limits_hold_under_a_random_controller(limits: dict[str, int]) -> None:
    most = {"seeds": 0, "parameters": 0, "flops": 0}
    pruned = 0
    gardener = Gardener(make_garden(), "random", 80, **limits)  # type: ignore[arg-type]
    gardener.optimizer(SGD, lr=0.1)
    garden = gardener.garden
    for _ in range(gardener.horizon):
        record = gardener.step(constant)
        seeds = sum(slot.seed is not None for slot in garden.seedbed)
        counted = sum(p.numel() for p in garden.parameters())
        most["seeds"] = max(most["seeds"], seeds)
        most["parameters"] = max(most["parameters"], counted)
        most["flops"] = max(most["flops"], added_flops(garden))
        assert garden.count_parameters() == counted
        assert garden.count_flops() == garden.host_flops + added_flops(garden)
        assert record.decision is None or record.decision.outcome != "illegal"
        pruned += record.decision is not None and record.decision.op == "PRUNE"
    fossilized = sum(slot.stage == "FOSSILIZED" for slot in record.slots)
    assert pruned + fossilized > 2
    assert most["seeds"] <= limits.get("max_seeds", 3)
    assert most["parameters"] <= limits.get("max_parameters", 10**9)
    assert most["flops"] <= limits.get("max_added_flops", 10**9)
    # Without limits the run goes beyond each of them, so they are what held it back.
    if not limits:
        assert most["seeds"] > 2
        assert most["parameters"] > 400
        assert most["flops"] > 400


def test_limits_are_refused_when_they_make_no_sense() -> None:
    with pytest.raises(ConfigError, match="max_seeds must be at least 0, got -1"):
        Gardener(make_garden(), "wait", 2, max_seeds=-1)
    with pytest.raises(ConfigError, match="max_parameters must be at least 0"):
        Gardener(make_garden(), "wait", 2, max_parameters=-1)
    with pytest.raises(ConfigError, match="ablate_every must be at least 1"):
        Gardener(make_garden(), "wait", 2, ablate_every=0)


def test_limits_the_garden_has_stay_unless_others_are_given() -> None:
    config = EAGER.replace(max_parameters=77)
    assert Gardener(make_garden(config=config), "wait", 2).garden.config.max_parameters == 77
    other = Gardener(make_garden(config=config), "wait", 2, max_parameters=88)
    assert other.garden.config.max_parameters == 88


# -------------------------------------------------------------------------------------- ablations


@pytest.mark.parametrize("every", [1, 3])
def test_ablations_are_made_at_every_so_many_epochs(every: int) -> None:
    garden = make_garden()
    gardener = Gardener(garden, "wait", 7, ablate_every=every)
    raise_seed(garden, "stem")
    calls, ages = [], []
    for _ in range(7):
        count = 0

        def evaluate(model: nn.Module) -> tuple[Tensor, None]:
            nonlocal count
            count += 1
            return model(torch.ones(5, 4)).sum(1).square(), None

        gardener.step(evaluate)
        calls.append(count)
        ages.append(int(garden.state.counterfactual_age[0, 0]))
    if every == 1:
        assert calls == [2] * 7
        assert ages == [0] * 7
    else:
        assert calls == [2, 1, 1, 2, 1, 1, 2]
        assert ages == [0, 1, 2, 0, 1, 2, 0]
    assert garden.slots["stem"].contribution is not None


def test_the_score_does_not_depend_on_ablations() -> None:
    scores = []
    for every in (1, 5):
        gardener, _ = drive(Script(GROW_ONE), 7, ablate_every=every)
        scores.append([(record.val_score, record.val_loss) for record in gardener.history])
    for one, other in zip(*scores, strict=True):
        assert one == pytest.approx(other, rel=1e-6)


# ------------------------------------------------------------------------------ other kinds of host


def batch_norm_gardener(**options: Any) -> tuple[Gardener, list[tuple[Tensor, Tensor]]]:
    """A gardener whose seed is blended in from epoch 4 on, and batches for it."""
    torch.manual_seed(0)
    garden = Garden(TinyConv(norm=True), ["first", "second"], torch.zeros(2, 1, 8, 8), config=EAGER)
    script = Script({1: germinate(0, "conv_light"), 2: advance(), 3: advance()})
    batches = [(torch.randn(8, 1, 8, 8), torch.randint(10, (8,))) for _ in range(3)]
    return Gardener(garden, script, 6, **options), batches


def statistics(garden: Garden) -> Tensor:
    norm = garden.model.norm
    assert isinstance(norm, nn.BatchNorm2d)
    assert norm.running_mean is not None
    return norm.running_mean.clone()


@pytest.mark.parametrize("given", ["pairs", "inputs"])
def test_statistics_are_taken_anew_in_a_loop_of_ones_own(given: str) -> None:
    gardener, batches = batch_norm_gardener(config=GardenerConfig(statistics_samples=23))
    garden = gardener.garden
    optimizer = gardener.optimizer(AdamW, lr=0.05)
    for _ in range(6):
        train(garden, optimizer, batches)
        trained = statistics(garden)
        told = [x for x, _ in batches] if given == "inputs" else batches
        assert gardener.recalibrate(told) == 16
        anew = statistics(garden)
        assert not torch.allclose(anew, trained)
        gardener.step(make_evaluator(batches))
        # Ablations have statistics of their own, and put these back.
        assert torch.equal(statistics(garden), anew)
        wanted = torch.stack([garden.model.first(x).mean((0, 2, 3)) for x, _ in batches[:2]])  # type: ignore[operator, union-attr]
        if garden.slots["first"].alpha == 0:
            torch.testing.assert_close(anew, wanted.mean(0), rtol=1e-4, atol=1e-5)
    assert [record.statistics_samples for record in gardener.history] == [16] * 6
    assert garden.slots["first"].contribution is not None


def test_a_loop_that_leaves_statistics_behind_is_told_once_where() -> None:
    gardener, batches = batch_norm_gardener()
    optimizer = gardener.optimizer(AdamW, lr=0.01)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for _ in range(6):
            train(gardener.garden, optimizer, batches)
            trained = statistics(gardener.garden)
            gardener.step(make_evaluator(batches))
            # Measuring runs in eval mode and so leaves the statistics alone.
            assert torch.equal(statistics(gardener.garden), trained)
    (told,) = [str(one.message) for one in caught if "statistics" in str(one.message)]
    assert told.startswith("epoch 4: the seeds at first changed, but the running statistics")
    assert "call gardener.recalibrate(train_batches)" in told
    assert [record.statistics_samples for record in gardener.history] == [0] * 6


def test_a_network_that_goes_back_has_statistics_that_fit_it() -> None:
    gardener, batches = batch_norm_gardener()
    garden = gardener.garden
    optimizer = gardener.optimizer(AdamW, lr=0.01)
    for epoch in range(1, 7):
        train(garden, optimizer, batches)
        if epoch == 6:
            poison(garden)
        gardener.recalibrate(batches)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", EsperWarning)
            record = gardener.step(make_evaluator(batches))
    assert record.rollback is not None
    assert garden.slots["first"].stage.name == "PRUNED"
    kept = statistics(garden)
    gardener.recalibrate(batches)
    assert torch.equal(statistics(garden), kept)


def test_a_model_without_statistics_needs_no_batches() -> None:
    class Unread:
        def __iter__(self) -> Iterator[Any]:
            raise AssertionError

    gardener, _ = drive("wait", 1)
    assert gardener.recalibrate(Unread()) == 0


def test_a_loss_without_labels_is_scored_by_its_negative() -> None:
    """An autoencoder in the user's own loop."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 3), nn.Tanh(), nn.Linear(3, 4))
    garden = Garden(model, ["0"], torch.zeros(2, 4), config=EAGER)
    gardener = Gardener(garden, Script({1: germinate(), 2: advance(), 3: advance()}), 8)
    optimizer = gardener.optimizer(SGD, lr=0.1)
    x = make_batches(1, 32)[0][0]

    def evaluate(model: nn.Module) -> tuple[Tensor, None]:
        return (model(x) - x).square().mean(1), None

    for _ in range(8):
        optimizer.zero_grad()
        F.mse_loss(garden(x), x).backward()
        optimizer.step()
        gardener.step(evaluate)
    for record in gardener.history:
        assert record.val_score == pytest.approx(-record.val_loss)
    assert gardener.history[-1].val_loss < gardener.history[0].val_loss
    worth = gardener.history[-1].slots[0].contribution
    assert worth is not None
    # In the unit of the loss: a seed is not worth a hundred times what can be lost.
    assert abs(worth) < 1


# -------------------------------------------------------------------------------------- restoring


@pytest.mark.parametrize("controller", ["random", "heuristic", "wait"])
@pytest.mark.parametrize("stop", [1, 6, 13])
def test_a_run_that_is_restored_goes_on_identically(
    controller: str, stop: int, tmp_path: Path
) -> None:
    whole, losses = drive(controller, 18, seed=4)
    first, before = drive(controller, stop, seed=4, horizon=18)
    save_tree(tmp_path / "state", first.state_dict(), kind="test", version=1)

    second = Gardener(make_garden(seed=77), controller, 18, seed=4)
    optimizer = second.optimizer(SGD, lr=0.1, momentum=0.9)
    second.load_state_dict(load_tree(tmp_path / "state", kind="test", version=1)[0])
    assert second.epoch == stop
    assert before + proceed(second, optimizer, 18 - stop) == losses
    assert plain_history(second.history) == plain_history(whole.history)
    assert same(second.garden.state_dict(), whole.garden.state_dict())
    if controller == "random":
        ops = {record.decision.op for record in whole.history if record.decision}
        assert {"GERMINATE", "ADVANCE", "PRUNE"} <= ops


def test_garden_and_optimizer_are_all_that_a_trainer_has_to_save(tmp_path: Path) -> None:
    whole, losses = drive("random", 14, seed=4)
    first, before = drive("random", 6, seed=4, horizon=14)
    assert first.carried is not None
    state = {
        "model": first.garden.state_dict(),
        "optimizer": first.carried.optimizer.state_dict(),
    }
    torch.save(state, tmp_path / "state.pt")

    saved = torch.load(tmp_path / "state.pt", weights_only=True)
    second = Gardener(make_garden(seed=77), "random", 14, seed=4)
    second.garden.load_state_dict(saved["model"])
    optimizer = second.optimizer(SGD, lr=0.1, momentum=0.9)
    optimizer.load_state_dict(saved["optimizer"])
    assert second.epoch == 6
    assert before + proceed(second, optimizer, 8) == losses
    assert plain_history(second.history) == plain_history(whole.history)
    assert same(second.garden.state_dict(), whole.garden.state_dict())


@pytest.mark.parametrize("controller", ["trial", "heuristic", "tamiyo", "plateau", "slope"])
def test_a_controllers_memory_comes_back_from_the_optimizer_as_it_was(controller: str) -> None:
    gardener, _ = drive(controller, 3, horizon=14)
    assert gardener.carried is not None
    memory = gardener.controller.state_dict()
    for row in memory.get("rows") or memory.get("rule", {}).get("rows", ()):
        if "pruned" in row:
            row["pruned"].append([1, 7])
    gardener.controller.load_state_dict(memory)
    optimizer = gardener.carried.optimizer
    # Accelerate does this with every optimizer before training begins.
    optimizer.load_state_dict(optimizer.state_dict())
    found = gardener.controller.state_dict()
    assert repr(found) == repr(memory)
    assert controller != "trial" or "[[1, 7]]" in repr(found)


@pytest.mark.gpu
def test_trainers_may_move_all_of_a_saved_optimizer_to_their_device() -> None:
    gardener, _ = drive("random", 6, seed=4, horizon=14)
    assert gardener.carried is not None
    state = gardener.carried.optimizer.state_dict()
    seen = gardener.signals(55.0)
    state[MEMORY] = map_tensors(state[MEMORY], Tensor.cuda)
    fresh = Gardener(make_garden(seed=77), "random", 14, seed=4)
    fresh.garden.load_state_dict(gardener.garden.state_dict())
    fresh.optimizer(SGD, lr=0.1, momentum=0.9).load_state_dict(state)
    for field in dataclasses.fields(Signals):
        assert same(getattr(fresh.signals(55.0), field.name), getattr(seen, field.name))


def test_what_the_controller_sees_is_restored() -> None:
    """The last action had no effect; a restored gardener still says so."""
    for script in (Script({3: advance(1)}), Script({**GROW_ONE, 3: advance()})):
        gardener, _ = drive(script, 3, horizon=9)
        fresh = Gardener(make_garden(), Script({}), 9)
        fresh.optimizer(SGD, lr=0.1)
        fresh.load_state_dict(frozen(gardener.state_dict()))
        for field in dataclasses.fields(Signals):
            seen = [getattr(one.signals(55.0), field.name) for one in (gardener, fresh)]
            assert same(*seen), field.name
        assert bool(fresh.signals().last_success) == (2 in script.choices)


def test_a_state_is_restored_only_into_a_gardener_with_its_optimizer() -> None:
    gardener, _ = drive("wait", 1, horizon=3)
    state = gardener.state_dict()
    with pytest.raises(UsageError, match=r"call gardener.optimizer\(...\) before"):
        Gardener(make_garden(), "wait", 3).load_state_dict(state)


def test_a_gardener_works_without_an_optimizer_and_says_that_it_has_none() -> None:
    gardener = Gardener(make_garden(), Script(GROW_ONE), 6)
    gardener.step(constant)
    with pytest.warns(EsperWarning, match=r"'stem' is in no optimizer; write optimizer = gardener"):
        gardener.step(constant)
    for _ in range(2):
        gardener.step(constant)
    state = frozen(gardener.state_dict())
    assert state["optimizer"] is None
    fresh = Gardener(make_garden(seed=5), Script(GROW_ONE), 6)
    fresh.load_state_dict(state)
    for one in (gardener, fresh):
        one.step(constant)
    assert plain_history(gardener.history) == plain_history(fresh.history)


def test_an_optimizer_of_ones_own_that_leaves_a_seed_out_is_noticed_by_hand() -> None:
    """A seed germinated by hand; the owner's optimizer was made of the host."""
    garden, batches = make_garden(), make_batches()
    optimizer = torch.optim.SGD(garden.parameters(), lr=0.05)
    raise_seed(garden, "stem", "TRAINING")
    train(garden, optimizer, batches)
    with pytest.warns(EsperWarning, match=r"nothing trains the seed in slot 'stem'.*optimizer"):
        garden.tick()
    # Once is enough.
    train(garden, optimizer, batches)
    garden.tick()
    assert garden.advance("stem")
    for _ in range(3):
        garden.tick()
    assert garden.advance("stem")
    here = torch.tensor([[name == "stem" for name in garden.slot_names]])
    garden.sync(garden.state.where(here, contribution=2.0, contribution_se=0.5))
    result = garden.fossilize("stem")
    assert not result
    assert "nothing has trained" in result.reason
    # With it in the optimizer it is trained, and may stay.
    optimizer.add_param_group({"params": list(garden.slot_parameters("stem"))})
    train(garden, optimizer, batches)
    assert garden.fossilize("stem")


def test_a_seed_in_an_optimizer_of_ones_own_is_nobodys_business() -> None:
    garden, batches = make_garden(), make_batches()
    raise_seed(garden, "stem", "TRAINING")
    # Two optimizers, neither of them the gardener's.
    for parameters in (garden.host_parameters(), garden.slot_parameters("stem")):
        train(garden, torch.optim.SGD(parameters, lr=0.05), batches)
    garden.tick()
    assert garden.advance("stem")


def test_a_frozen_host_tells_by_its_seeds_gradients_that_nothing_trains_them() -> None:
    garden = make_garden()
    for parameter in garden.host_parameters():
        parameter.requires_grad_(False)
    raise_seed(garden, "stem", "TRAINING")
    garden.tick()
    garden(make_batches()[0][0]).sum().backward()
    with pytest.warns(EsperWarning, match="nothing trains the seed"):
        garden.tick()


def test_a_controller_cannot_fossilize_what_the_owners_optimizer_leaves_out() -> None:
    script = {1: germinate(), 2: advance(), 3: advance(), 7: advance(), 8: fossilize()}
    gardener = Gardener(make_garden(), Script(script), 10)
    optimizer = torch.optim.SGD(gardener.garden.parameters(), lr=0.05)

    def live() -> None:
        for _ in range(10):
            train(gardener.garden, optimizer, make_batches())
            gardener.step(make_evaluator())

    # At once, because the gardener made no optimizer, and when nothing did train the seed.
    with pytest.warns(EsperWarning, match=r"in no optimizer|nothing trains the seed"):
        live()
    decisions = {record.epoch: record.decision for record in gardener.history}
    assert decisions[8] is not None
    assert decisions[8].outcome == "gate_failed"
    assert "nothing has trained" in decisions[8].reason
    assert gardener.garden.drop_inert() == ("stem",)


def test_a_network_that_does_not_learn_is_named_at_the_end() -> None:
    batches = make_batches()
    gardener = Gardener(
        make_garden(), "wait", 10, config=GardenerConfig(chance_loss=math.log(CLASSES))
    )
    dead = gardener.garden.model.get_submodule("head")
    with torch.no_grad():
        for parameter in dead.parameters():
            parameter.zero_()
    optimizer = gardener.optimizer(torch.optim.SGD, lr=0.0)
    train(gardener.garden, optimizer, batches)
    for _ in range(9):
        gardener.step(make_evaluator())
    with pytest.warns(EsperWarning, match=r"did not learn: its best validation loss in 10 epochs"):
        gardener.step(make_evaluator())
    assert gardener.why[0].startswith("The network did not learn")


def test_time_is_counted_per_epoch() -> None:
    gardener = Gardener(make_garden(), "wait", 2)
    records: list[EpochRecord] = [gardener.step(constant) for _ in range(2)]
    assert all(0 <= record.seconds < 60 for record in records)


def test_a_decision_shows_the_arguments_its_op_uses_and_no_others() -> None:
    fields = {
        "slot": "slot",
        "blueprint": "blueprint",
        "style": "style",
        "tempo": "tempo",
        "alpha_target": "alpha_target",
        "alpha_speed": "alpha_speed",
        "alpha_curve": "alpha_curve",
    }
    for op in LifecycleOp:
        actions = {**placeholder_actions(1), "op": torch.tensor([int(op)])}
        result = OperationResult(op, "body", Outcome.DONE, "")
        record = describe_decision(actions, result, ["body"])
        assert record.op == op.name
        assert record.outcome == "done"
        for head, field in fields.items():
            assert (getattr(record, field) is not None) == (head in CAUSAL_HEADS[op]), (op, head)


def test_indices_become_names_and_values() -> None:
    actions = {
        **placeholder_actions(1),
        "op": torch.tensor([int(LifecycleOp.GERMINATE)]),
        "blueprint": torch.tensor([1]),
        "style": torch.tensor([3]),
        "tempo": torch.tensor([2]),
        "alpha_target": torch.tensor([0]),
    }
    result = OperationResult(LifecycleOp.GERMINATE, "stem", Outcome.ILLEGAL, "because")
    record = describe_decision(actions, result, ["stem"])
    assert (record.slot, record.blueprint, record.style) == ("stem", "conv_light", "GATED_GATE")
    assert (record.tempo, record.alpha_target) == (8, 0.5)
    assert (record.outcome, record.reason) == ("illegal", "because")


def test_slots_are_recorded_as_they_are() -> None:
    garden = make_garden()
    raise_seed(garden, "body", "BLENDING", ticks=1, style="linear_add")
    record_epoch(garden, 50.0)
    empty, grown, _ = slot_records(garden.slots)
    assert (empty.name, empty.stage, empty.blueprint, empty.parameters) == (
        "stem",
        "DORMANT",
        None,
        0,
    )
    assert (empty.contribution, empty.contribution_se) == (None, None)
    assert (grown.stage, grown.blueprint, grown.age) == ("BLENDING", "mlp_small", 1)
    assert abs(grown.alpha - 1 / 3) < 1e-9
    assert grown.alpha_target == 1.0
    assert grown.parameters == sum(p.numel() for p in garden.slot_parameters("body"))


def test_a_gardener_is_told_what_its_loop_knows() -> None:
    gardener = Gardener(make_garden(), "wait", 5, config=GardenerConfig(train_samples=7))
    assert math.isnan(float(gardener.signals().chance_loss))
    gardener.tell(num_classes=10, train_samples=50, samples_per_epoch=25)
    signals = gardener.signals()
    assert float(signals.chance_loss) == pytest.approx(math.log(10))
    assert (int(signals.num_classes), int(signals.samples_per_epoch)) == (10, 25)
    # What the settings say is not told otherwise.
    assert int(signals.train_samples) == 7
    with pytest.raises(UsageError, match="num_classes"):
        gardener.tell(classes=10)
