from __future__ import annotations

import dataclasses
import math
from types import ModuleType
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.nn import functional as F

from esper.growth.gardener import Gardener
from esper.kasmina.garden import Garden
from esper.kasmina.lifecycle import GardenConfig
from esper.kasmina.training import per_sample_classification
from esper.lab.imagined import ImaginedHosts
from esper.lab.tasks import get_task
from esper.leyline.actions import LifecycleOp
from esper.leyline.errors import NonFiniteError, UsageError
from esper.leyline.signals import Signals
from esper.leyline.slots import SlotConfig
from esper.leyline.stages import STAGE_INDEX, SeedStage
from esper.tamiyo.policy import features as features_module
from esper.tamiyo.policy.features import (
    FEATURE_NAMES,
    RawSignals,
    Workbench,
    batch_obs_to_features,
    feature_names,
    get_feature_size,
    make_workbench,
    workbench,
)
from esper.tamiyo.policy.layout import SLOT_INDEX, feature_specs
from esper.tamiyo.policy.reference import plain_reports
from esper.testing.controllers import random_signals
from tests.tamiyo.policy.story import Plan, Story

DEFAULT = SlotConfig.default()


@pytest.fixture(params=["numpy", "torch"])
def library(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """Compute with either library; on a CPU the features use NumPy by themselves."""
    if request.param == "torch":
        monkeypatch.setattr(
            features_module,
            "workbench",
            lambda slots, device: make_workbench(slots, device, torch),
        )
    return str(request.param)


def draw(rows: int, slots: int, seed: int) -> Signals:
    return random_signals(rows, slots, torch.Generator().manual_seed(seed))[0]


def observe(signals: Signals, config: SlotConfig = DEFAULT, row: int = 0) -> dict[str, float]:
    features, _ = batch_obs_to_features(signals, config)
    return dict(zip(feature_names(config), features[row].tolist(), strict=True))


def change(signals: Signals, **fields: Any) -> Signals:
    return dataclasses.replace(
        signals, **{name: torch.as_tensor(value) for name, value in fields.items()}
    )


def in_range(features: torch.Tensor, config: SlotConfig) -> bool:
    specs = feature_specs(config)
    low = torch.tensor([spec.low for spec in specs])
    high = torch.tensor([spec.high for spec in specs])
    return bool(((features >= low) & (features <= high)).all())


# ------------------------------------------------------------------------- against the reference


@settings(max_examples=60)
@given(st.integers(0, 40), st.integers(1, 6), st.integers(0, 2), st.integers(0, 10**6))
def test_signals_and_plain_records_give_the_same_numbers(
    rows: int, slots: int, spare: int, seed: int
) -> None:
    signals, config = draw(rows, slots, seed), SlotConfig.of(slots + spare)
    features, blueprints = batch_obs_to_features(signals, config, "cpu")
    hosts, reports = plain_reports(signals, config)
    expected, expected_blueprints = batch_obs_to_features(hosts, reports, config, "cpu")
    if rows:
        torch.testing.assert_close(features, expected, rtol=0, atol=2e-6)
        assert torch.equal(blueprints, expected_blueprints)
    assert features.shape == (rows, get_feature_size(config))
    assert (features.dtype, blueprints.dtype) == (torch.float32, torch.int64)
    assert in_range(features, config)


def test_lives_of_hosts_give_the_same_numbers(library: str) -> None:
    enabled = torch.ones(24, 4, dtype=torch.bool)
    enabled[:8, 3] = enabled[4:12, 0] = False
    hosts = ImaginedHosts(24, 4, seed=3, enabled=enabled)
    config = SlotConfig.of(4)
    for _ in range(40):
        signals = hosts.signals()
        features, blueprints = batch_obs_to_features(signals, config, "cpu")
        expected, indices = batch_obs_to_features(*plain_reports(signals, config), config)
        torch.testing.assert_close(features, expected, rtol=0, atol=2e-6)
        assert torch.equal(blueprints, indices)
        assert in_range(features, config)
        hosts.step(hosts.random_actions(prune_chance=0.2))


def test_both_libraries_give_the_same_numbers(monkeypatch: pytest.MonkeyPatch) -> None:
    signals, config = draw(64, 3, 5), SlotConfig.of(5)
    with_numpy = batch_obs_to_features(signals, config)
    monkeypatch.setattr(
        features_module, "workbench", lambda slots, device: make_workbench(slots, device, torch)
    )
    with_torch = batch_obs_to_features(signals, config)
    torch.testing.assert_close(with_numpy[0], with_torch[0], rtol=0, atol=1e-6)
    assert torch.equal(with_numpy[1], with_torch[1])


def test_rows_do_not_influence_each_other(library: str) -> None:
    signals = draw(10, 3, 2)
    together, _ = batch_obs_to_features(signals, DEFAULT)
    for row in range(10):
        fields = dataclasses.fields(signals)
        alone = Signals(**{f.name: getattr(signals, f.name)[row : row + 1] for f in fields})
        torch.testing.assert_close(batch_obs_to_features(alone, DEFAULT)[0][0], together[row])


# ------------------------------------------------------------------------------------- call shapes


def test_both_call_shapes_work_with_names_too() -> None:
    signals = draw(4, 3, 1)
    hosts, reports = plain_reports(signals, DEFAULT)
    positional = batch_obs_to_features(signals, DEFAULT, "cpu")
    named = batch_obs_to_features(signals=signals, slot_config=DEFAULT, device="cpu")
    records = batch_obs_to_features(
        batch_signals=hosts, batch_slot_reports=reports, slot_config=DEFAULT, device="cpu"
    )
    for other in (named, records):
        torch.testing.assert_close(positional[0], other[0], rtol=0, atol=2e-6)
        assert torch.equal(positional[1], other[1])


def test_an_observation_can_be_learned_from_and_signals_stay_as_they_are() -> None:
    signals = draw(6, 3, 4)
    before = {f.name: getattr(signals, f.name).clone() for f in dataclasses.fields(signals)}
    with torch.inference_mode():
        batch_obs_to_features(signals, SlotConfig.of(7))
    features, _ = batch_obs_to_features(signals, SlotConfig.of(7))
    layer = torch.nn.Linear(features.shape[1], 2)
    layer(features).sum().backward()
    features.zero_()
    for name, value in before.items():
        assert torch.equal(getattr(signals, name).nan_to_num(-7.0), value.nan_to_num(-7.0)), name


def test_more_slots_than_the_layout_are_refused() -> None:
    with pytest.raises(UsageError, match=r"4 slots.*laid out for 3; use SlotConfig.of\(4\)"):
        batch_obs_to_features(draw(2, 4, 0), DEFAULT)


# -------------------------------------------------------------------------------- clamps and guards


def test_the_first_epoch_has_no_past(library: str) -> None:
    story = Story()
    seen = story.epoch(2.3, 11.0)
    assert seen["loss_delta_norm"] == 1.0
    assert seen["accuracy_delta_norm"] == 1.0
    assert [seen[f"loss_history_{i}"] for i in range(4)] == [0.0] * 4
    assert [seen[f"acc_history_{i}"] for i in range(4)] == [0.0] * 4
    assert seen["loss_history_4"] == seen["loss_norm"] == seen["best_loss_norm"]
    assert seen["acc_history_4"] == pytest.approx(0.11)
    assert story.epoch(2.3, 5.0)["accuracy_delta_norm"] == pytest.approx(-0.6)
    fresh = Story().epoch(2.3, 4.0)
    assert fresh["accuracy_delta_norm"] == pytest.approx(0.4)


def test_extremes_are_clamped(library: str) -> None:
    signals = draw(1, 3, 8)
    wild = change(
        signals,
        epoch=[70],
        val_loss=[1e6],
        best_loss=[math.inf],
        val_score=[100.0],
        best_score=[100.0],
        loss_history=[[1e30, 5.0, 5.0, 5.0, 1e6]],
        score_history=[[0.0, 0.0, 0.0, 0.0, 100.0]],
        plateau_epochs=[99],
        params=[30_000_000],
        enabled=[[True] * 3],
        occupied=[[True] * 3],
        stage=[[4, 4, 4]],
        blueprint=[[1, 2, 3]],
        alpha=[[1.0, 1.0, 1.0]],
        alpha_target=[[1.0, 1.0, 1.0]],
        alpha_mode=[[2, 2, 2]],
        algorithm=[[2, 2, 2]],
        alpha_velocity=[[-3.0, 3.0, 0.0]],
        time_to_target=[[500.0, 1.0, 0.0]],
        contribution=[[99.0, -99.0, 3.0]],
        contribution_velocity=[[99.0, -99.0, 3.0]],
        counterfactual_age=[[0, 5, 10_000]],
        epochs_in_stage=[[400, 1, 1]],
        grad_norm=[[math.inf, 11.0, 1.0]],
        interaction=[[[0.0, 9.0, 9.0], [9.0, 0.0, -20.0], [9.0, -20.0, 0.0]]],
    )
    seen = observe(wild)
    for name in ("loss_norm", "best_loss_norm", "loss_history_0"):
        assert seen[name] == 2.0
    assert seen["loss_delta_norm"] == -1.0
    assert seen["accuracy_delta_norm"] == 1.0
    assert seen["plateau_norm"] == seen["params_utilization"] == seen["epoch_progress"] == 1.0
    assert [seen[f"r0c{i}.alpha_velocity"] for i in range(3)] == [-1.0, 1.0, 0.0]
    assert seen["r0c0.time_to_target_norm"] == seen["r0c0.epochs_in_stage_norm"] == 1.0
    assert [seen[f"r0c{i}.contribution_norm"] for i in range(2)] == [1.0, -1.0]
    assert [seen[f"r0c{i}.contribution_velocity_norm"] for i in range(2)] == [1.0, -1.0]
    assert seen["r0c0.gradient_norm_norm"] == seen["r0c1.gradient_norm_norm"] == 1.0
    assert seen["r0c0.interaction_sum_norm"] == seen["r0c0.boost_received_norm"] == 1.0
    assert seen["r0c1.interaction_sum_norm"] == 0.0
    assert seen["r0c1.boost_received_norm"] == 1.0
    assert seen["r0c1.upstream_alpha_norm"] == pytest.approx(1 / 3)
    assert seen["r0c0.downstream_alpha_norm"] == pytest.approx(2 / 3)
    assert seen["r0c2.counterfactual_fresh"] == pytest.approx(0.0, abs=1e-6)
    assert all(-2.0 <= value <= 2.0 for value in seen.values())


def test_a_score_without_accuracy_keeps_range_and_direction(library: str) -> None:
    story = Story()
    losses = [4.0, 2.0, 1.0, 1.5, 0.5, 0.0625]
    seen = [story.epoch(loss, -loss) for loss in losses]
    for at, loss in enumerate(losses):
        assert seen[at]["accuracy_norm"] == pytest.approx(math.exp(-loss))
        assert seen[at]["best_accuracy_norm"] == pytest.approx(math.exp(-min(losses[: at + 1])))
    for at in range(1, len(losses)):
        rise = 100 * (math.exp(-losses[at]) - math.exp(-losses[at - 1]))
        clamped = max(-1.0, min(1.0, rise / 10))
        assert seen[at]["accuracy_delta_norm"] == pytest.approx(clamped, abs=1e-5)
    assert seen[2]["acc_history_1"] == 0.0
    assert seen[2]["acc_history_2"] == pytest.approx(math.exp(-4.0))


def test_a_negative_loss_reads_as_none(library: str) -> None:
    seen = observe(
        change(draw(1, 3, 0), val_loss=[-5.0], best_loss=[-5.0], val_score=[5.0], best_score=[5.0])
    )
    assert seen["loss_norm"] == seen["best_loss_norm"] == 0.0
    assert seen["accuracy_norm"] == pytest.approx(0.05)


# ------------------------------------------------------------------------------------------- slots


def test_an_empty_slot_is_zero_and_a_cooling_one_is_not(library: str) -> None:
    story = Story()
    story.act(LifecycleOp.GERMINATE, 1, blueprint=4)
    story.epoch(2.0, 20.0)
    story.act(LifecycleOp.PRUNE, 1)
    seen = story.epoch(2.0, 20.0)
    for slot in ("r0c0", "r0c2"):
        assert all(value == 0.0 for name, value in seen.items() if name.startswith(slot))
    assert seen["r0c1.is_active"] == seen["r0c1.stage_embargoed"] == 1.0
    assert seen["slot_utilization"] == pytest.approx(1 / 3)
    for _ in range(3):
        story.act(LifecycleOp.WAIT)
        seen = story.epoch(2.0, 20.0)
    assert seen["r0c1.is_active"] == seen["slot_utilization"] == 0.0


def test_shares_divide_by_enabled_slots_and_the_others_are_zero(library: str) -> None:
    signals = draw(30, 4, 9)
    config = SlotConfig.of(4)
    features, blueprints = batch_obs_to_features(signals, config)
    active = signals.occupied & signals.enabled
    count = signals.enabled.sum(1)
    torch.testing.assert_close(features[:, 20], active.sum(1) / count)
    training = (signals.stage == int(SeedStage.TRAINING)) & active
    torch.testing.assert_close(features[:, 21], training.sum(1) / count)
    slots = features[:, 31:].view(30, 4, 30)
    assert bool((slots[~active] == 0).all())
    assert bool((blueprints[~active] == -1).all())
    assert torch.equal(blueprints[active], signals.blueprint[active])


def test_a_record_in_a_slot_that_is_off_is_not_seen(library: str) -> None:
    story = Story()
    story.act(LifecycleOp.GERMINATE, 0, blueprint=1)
    story.epoch(2.0, 20.0, worth={0: 3.0})
    signals = change(story.signals(), enabled=[[False, True, True]])
    seen = observe(signals)
    assert all(value == 0.0 for name, value in seen.items() if name.startswith("r0c0"))
    assert seen["slot_utilization"] == seen["r0c1.upstream_alpha_norm"] == 0.0
    assert batch_obs_to_features(signals, DEFAULT)[1].tolist() == [[-1, -1, -1]]


@pytest.mark.parametrize("stage", list(SeedStage))
def test_every_stage_has_its_own_bit(stage: SeedStage, library: str) -> None:
    story = Story()
    story.act(LifecycleOp.GERMINATE, 2, blueprint=1)
    story.epoch(2.0, 20.0)
    told = change(story.signals(), stage=[[-1, -1, int(stage)]])
    features, _ = batch_obs_to_features(told, DEFAULT)
    bits = features[0, 92:102]
    assert bits.tolist() == [float(i == STAGE_INDEX[stage]) for i in range(10)]


def test_a_registered_blueprint_passes_through(library: str) -> None:
    story = Story()
    story.act(LifecycleOp.GERMINATE, 0, blueprint=7)
    story.epoch(2.0, 20.0)
    told = change(story.signals(), blueprint=[[40, -1, -1]])
    assert batch_obs_to_features(told, DEFAULT)[1].tolist() == [[40, -1, -1]]


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"stage": [[5, -1, -1]]}, "row 0, slot 0: .* value 5 .5 is retired"),
        ({"stage": [[11, -1, -1]]}, "row 0, slot 0: .* value 11"),
        ({"stage": [[99, -1, -1]]}, "row 0, slot 0: .* value 99"),
        ({"stage": [[-1, -1, -1]]}, "row 0, slot 0: .* value -1"),
        ({"stage": [[-2, -1, -1]]}, "row 0, slot 0: .* value -2"),
        ({"blueprint": [[-1, -1, -1]]}, "row 0, slot 0: .*GERMINATED has the blueprint -1"),
        ({"last_op": [6]}, "row 0: last_op must be 0 to 5, got 6"),
        ({"last_op": [-1]}, "row 0: last_op must be 0 to 5, got -1"),
        ({"last_op": [60]}, "row 0: last_op must be 0 to 5, got 60"),
    ],
)
def test_what_does_not_exist_raises_always(
    fields: dict[str, Any], message: str, library: str
) -> None:
    story = Story()
    story.act(LifecycleOp.GERMINATE, 0, blueprint=7)
    story.epoch(2.0, 20.0)
    with pytest.raises(UsageError, match=message):
        batch_obs_to_features(change(story.signals(), **fields), DEFAULT)


@pytest.mark.parametrize("switch", ["ESPER_DEBUG", "ESPER_DEBUG_STAGE"])
def test_debugging_looks_closer(monkeypatch: pytest.MonkeyPatch, library: str, switch: str) -> None:
    story = Story()
    story.act(LifecycleOp.GERMINATE, 0, blueprint=7)
    story.epoch(2.0, 20.0)
    lost = change(story.signals(), val_loss=[math.nan])
    monkeypatch.delenv("ESPER_DEBUG", raising=False)
    assert math.isnan(observe(lost)["loss_norm"])
    monkeypatch.setenv(switch, "1")
    observe(story.signals())
    with pytest.raises(NonFiniteError, match=r"row 0: feature 1 \(loss_norm\) is nan"):
        observe(lost)
    with pytest.raises(UsageError, match="row 0, slot 0: alpha_mode must be 0 to 2, got 3"):
        observe(change(story.signals(), alpha_mode=[[3, -1, -1]]))


# ------------------------------------------------------------------------------- a scripted episode

NEVER_SET = {f"r0c{slot}.stage_{stage}" for slot in range(3) for stage in ("unknown", "dormant")}
"""A record is never UNKNOWN or DORMANT: such a slot is empty."""

NOTHING_THERE = {"r0c0.upstream_alpha_norm", "r0c2.downstream_alpha_norm"}
"""Nothing comes before the first slot or after the last."""


def raise_seed(story: Story, slot: int, tempo: int = 0) -> list[dict[str, float]]:
    """Bring a seed from nothing to full amplitude, while others may live beside it."""
    seen = []
    story.act(LifecycleOp.GERMINATE, slot, blueprint=1 + slot, style=(1, 1, 3)[slot], tempo=tempo)
    seen.append(story.epoch(1.5, 30.0))
    assert story.act(LifecycleOp.ADVANCE, slot)
    seen.append(story.epoch(1.4, 31.0, gradients={slot: {"norm": 3.0}}))
    assert story.act(LifecycleOp.ADVANCE, slot)
    seen.append(story.epoch(1.3, 32.0, gradients={slot: {"norm": 2.0, "health": 0.8}}))
    return seen


def test_a_seed_that_stays_is_seen_through_its_whole_life(library: str) -> None:
    story = Story()
    assert story.epoch(2.0, 10.0)["last_action_op_wait"] == 1.0
    germinated, training, blending = raise_seed(story, 0, tempo=0)

    assert germinated["last_action_op_germinate"] == germinated["r0c0.stage_germinated"] == 1.0
    assert germinated["r0c0.gradient_norm_norm"] == 0.0
    assert germinated["r0c0.gradient_health"] == germinated["r0c0.gradient_health_prev"] == 1.0
    assert germinated["r0c0.counterfactual_fresh"] == germinated["r0c0.contribution_norm"] == 0.0
    assert germinated["params_utilization"] > story.told[0]["params_utilization"]
    assert germinated["num_training"] == germinated["num_blending"] == 0.0

    assert training["last_action_op_advance"] == training["r0c0.stage_training"] == 1.0
    assert training["num_training"] == pytest.approx(1 / 3)
    assert training["r0c0.gradient_norm_norm"] == pytest.approx(0.3)
    assert training["r0c0.alpha"] == training["r0c0.alpha_target"] == 0.0

    # The ramp of three ticks has begun; the algorithm of the style is MULTIPLY.
    assert blending["num_blending"] == pytest.approx(1 / 3)
    assert 0.0 < blending["r0c0.alpha"] < 1.0
    assert blending["r0c0.alpha_target"] == 1.0
    assert blending["r0c0.alpha_mode_norm"] == 0.5
    assert blending["r0c0.alpha_velocity"] == pytest.approx(1 / 3)
    assert blending["r0c0.time_to_target_norm"] == pytest.approx(2 / 100)
    assert blending["r0c0.alpha_algorithm_norm"] == 0.5
    assert blending["r0c0.gradient_health"] == pytest.approx(0.8)
    assert blending["r0c0.gradient_health_prev"] == 1.0

    story.act(LifecycleOp.WAIT)
    measured = story.epoch(1.2, 33.0, worth={0: 4.0})
    assert measured["r0c0.contribution_norm"] == pytest.approx(0.4)
    assert measured["r0c0.counterfactual_fresh"] == 1.0
    assert measured["r0c0.contribution_velocity_norm"] == 0.0
    assert measured["r0c0.gradient_health_prev"] == pytest.approx(0.8)
    assert not story.act(LifecycleOp.ADVANCE)
    reached = story.epoch(1.2, 33.0, worth={0: 6.0})
    assert reached["last_action_success"] == 0.0
    assert reached["r0c0.alpha"] == 1.0
    assert reached["r0c0.alpha_mode_norm"] == reached["r0c0.alpha_velocity"] == 0.0
    assert reached["r0c0.contribution_velocity_norm"] == pytest.approx(0.3 * 2.0 / 10)

    assert story.act(LifecycleOp.ADVANCE)
    holding = story.epoch(1.1, 34.0)
    assert holding["r0c0.stage_holding"] == holding["last_action_success"] == 1.0
    assert holding["num_holding"] == pytest.approx(1 / 3)
    assert holding["r0c0.counterfactual_fresh"] == pytest.approx(0.995)
    assert story.act(LifecycleOp.FOSSILIZE)
    fossil = story.epoch(1.0, 40.0)
    assert fossil["last_action_op_fossilize"] == fossil["r0c0.stage_fossilized"] == 1.0
    assert fossil["num_holding"] == 0.0
    assert fossil["r0c0.epochs_in_stage_norm"] == pytest.approx(1 / 150)
    assert fossil["r0c0.counterfactual_fresh"] == pytest.approx(0.995**2)


def test_a_seed_that_goes_is_seen_until_its_slot_is_free(library: str) -> None:
    story = Story()
    story.epoch(2.0, 10.0)
    raise_seed(story, 2, tempo=0)
    for _ in range(2):
        story.act(LifecycleOp.WAIT)
        story.epoch(1.2, 33.0, worth={2: -2.0})
    told = story.told[-1]
    assert told["r0c2.contribution_norm"] == pytest.approx(-0.2)
    assert told["r0c2.alpha_algorithm_norm"] == 1.0
    story.act(LifecycleOp.SET_ALPHA_TARGET, 2, alpha_target=0, alpha_speed=2, style=0)
    lowering = story.epoch(1.2, 33.0, worth={2: -2.0})
    assert lowering["last_action_op_set_alpha_target"] == 1.0
    assert lowering["r0c2.alpha_mode_norm"] == 1.0
    assert lowering["r0c2.alpha_velocity"] == pytest.approx(-0.1)
    assert lowering["r0c2.alpha_target"] == 0.5
    assert lowering["r0c2.alpha_algorithm_norm"] == 0.0
    for _ in range(4):
        story.act(LifecycleOp.WAIT)
        story.epoch(1.2, 33.0)
    story.act(LifecycleOp.PRUNE, 2, alpha_speed=1)
    seen = [story.epoch(1.2, 33.0)]
    for _ in range(7):
        story.act(LifecycleOp.WAIT)
        seen.append(story.epoch(1.2, 33.0))
    stages = [
        next((name for name, value in each.items() if "r0c2.stage" in name and value), "")
        for each in seen
    ]
    assert [stage.removeprefix("r0c2.stage_") for stage in stages] == [
        "blending",
        "blending",
        "pruned",
        "embargoed",
        "embargoed",
        "resetting",
        "",
        "",
    ]
    assert seen[2]["r0c2.alpha"] == seen[2]["r0c2.counterfactual_fresh"] == 0.0
    assert seen[2]["params_utilization"] < seen[1]["params_utilization"]


def test_each_of_the_121_features_moves_and_stays_in_range(library: str) -> None:
    """Three seeds live side by side, then one after the other goes; all is told as it happens."""
    story = Story()
    story.epoch(3.0, 5.0)
    for slot in range(3):
        raise_seed(story, slot)
        for _ in range(2):
            story.act(LifecycleOp.WAIT)
            story.epoch(
                1.1,
                35.0,
                worth={other: 1.0 + other for other in range(slot + 1)},
                together={(0, 1): 1.0, (0, 2): 2.0, (1, 2): 3.0} if slot else None,
                gradients={slot: {"vanishing": True, "exploding": True, "health": 0.0}},
            )
        assert story.act(LifecycleOp.ADVANCE, slot)
        story.epoch(1.0, 36.0, gradients={slot: {}}, worth={slot: 9.0})
    both = story.epoch(
        1.0, 36.0, worth={0: 1.0, 1: 2.0, 2: 3.0}, together={(0, 1): 1.0, (0, 2): 2.0}
    )
    assert both["r0c0.interaction_sum_norm"] == pytest.approx(0.3)
    assert both["r0c0.boost_received_norm"] == pytest.approx(0.4)
    assert both["r0c1.upstream_alpha_norm"] == both["r0c1.downstream_alpha_norm"]
    assert both["r0c0.downstream_alpha_norm"] == pytest.approx(2 / 3)
    for slot in range(3):
        story.act(LifecycleOp.SET_ALPHA_TARGET, slot, alpha_target=1, alpha_speed=1, style=2)
        story.epoch(0.9, 37.0)
    for _ in range(3):
        story.act(LifecycleOp.WAIT)
        story.epoch(0.9, 37.0)
    for slot in range(3):
        story.act(LifecycleOp.PRUNE, slot, alpha_speed=1)
        story.epoch(1.5, 30.0)
    for _ in range(12):
        story.act(LifecycleOp.WAIT)
        story.epoch(0.8, 38.0)
    for slot in range(3):
        raise_seed(story, slot)
        for _ in range(2):
            # Its alpha is still on its way, so the gate refuses.
            assert not story.act(LifecycleOp.ADVANCE, slot)
            story.epoch(0.7, 40.0, worth={slot: 2.0})
        story.act(LifecycleOp.ADVANCE, slot)
        story.epoch(0.7, 40.0, gradients={slot: {}})
        assert story.act(LifecycleOp.FOSSILIZE, slot)
        story.epoch(0.7, 40.0)

    values = {name: {each[name] for each in story.told} for name in FEATURE_NAMES}
    still = {name for name, seen in values.items() if len(seen) == 1}
    assert still == NEVER_SET | NOTHING_THERE
    bounds = dict(zip(FEATURE_NAMES, feature_specs(DEFAULT), strict=True))
    for name, seen in values.items():
        assert all(bounds[name].low <= value <= bounds[name].high for value in seen), name
        if bounds[name].kind in ("flag", "one_hot") and name not in NEVER_SET:
            assert seen == {0.0, 1.0}, name


def test_a_gardener_on_the_digits_gives_every_kind_of_signal() -> None:
    """Two real seeds are grown beside each other; what is measured really reaches the features."""
    task = get_task("digits", validation_samples=128)
    data = task.load()
    lifecycle = {"gates": {"min_training_epochs": 1}}
    garden = Garden(
        task.build_host(0),
        task.slot_paths,
        task.example_input(),
        config=GardenConfig.from_mapping({"lifecycle": lifecycle}),
    )
    plan: dict[int, dict[str, int]] = {}
    for start, slot in ((2, 2), (8, 1)):
        plan[start] = {"op": 1, "slot": slot, "blueprint": 1, "style": 0, "tempo": 0}
        plan[start + 1] = plan[start + 3] = {"op": 5, "slot": slot}
    script = Plan(plan)
    gardener = Gardener(garden, script, horizon=16)
    optimizer = gardener.optimizer(torch.optim.SGD, lr=0.05)
    held_out, truth = data.batch("val", data.subset)

    def evaluate(model: torch.nn.Module) -> tuple[torch.Tensor, torch.Tensor | None]:
        return per_sample_classification(model(held_out), truth)

    for epoch in range(16):
        for chosen in data.order(0, epoch)[:256].split(64):
            images, labels = data.batch("train", chosen)
            optimizer.zero_grad()
            F.cross_entropy(garden(images), labels).backward()
            garden.measure_gradients()
            optimizer.step()
        gardener.step(evaluate)

    config = SlotConfig(garden.slot_names)
    told = torch.cat([batch_obs_to_features(signals, config)[0] for signals in script.seen])
    assert in_range(told, config)
    assert bool(torch.isfinite(told).all())
    slots = told[:, 31:].view(len(told), 3, 30)
    assert bool((slots[:, 0] == 0).all())
    for name in (
        "alpha",
        "contribution_norm",
        "contribution_velocity_norm",
        "gradient_norm_norm",
        "counterfactual_fresh",
        "epochs_in_stage_norm",
        "alpha_mode_norm",
    ):
        assert len(slots[:, 2, SLOT_INDEX[name]].unique()) > 1, name
    assert float(slots[-1, 1, SLOT_INDEX["downstream_alpha_norm"]]) == pytest.approx(1 / 3)
    assert float(slots[-1, 2, SLOT_INDEX["upstream_alpha_norm"]]) > 0
    interaction = script.seen[-1].interaction[0, 1, 2]
    assert float(slots[-1, 1, SLOT_INDEX["boost_received_norm"]]) == pytest.approx(
        min(max(float(interaction), 0.0), 5.0) / 5, abs=1e-6
    )
    assert len(told[:, 1].unique()) > 10


# ---------------------------------------------------------------------------------- on a device


@pytest.mark.gpu
@pytest.mark.filterwarnings("ignore:Synchronization debug mode is a prototype")
def test_a_device_gives_the_same_numbers_without_being_waited_for() -> None:
    hosts = ImaginedHosts(64, seed=6)
    for _ in range(30):
        hosts.step(hosts.random_actions(prune_chance=0.1))
    on_cpu, config = hosts.signals(), SlotConfig.of(4)
    on_gpu = on_cpu.to("cuda")
    expected, indices = batch_obs_to_features(on_cpu, config)
    batch_obs_to_features(on_gpu, config, "cuda")  # tables go to the device once, and wait for it
    torch.use_deterministic_algorithms(True)
    torch.cuda.set_sync_debug_mode("error")
    try:
        features, blueprints = batch_obs_to_features(on_gpu, config, "cuda")
        captured = torch.cuda.CUDAGraph()
        with torch.cuda.graph(captured):
            replayed, _ = batch_obs_to_features(on_gpu, config)
        captured.replay()
    finally:
        torch.cuda.set_sync_debug_mode("default")
        torch.use_deterministic_algorithms(False)
    torch.testing.assert_close(features.cpu(), expected, rtol=0, atol=1e-6)
    torch.testing.assert_close(replayed.cpu(), expected, rtol=0, atol=1e-6)
    assert torch.equal(blueprints.cpu(), indices)
    assert batch_obs_to_features(on_cpu, config, "cuda")[0].is_cuda


CPU = torch.device("cpu")


@pytest.fixture(params=[np, torch], ids=["numpy", "torch"])
def bench(request: pytest.FixtureRequest) -> Workbench:
    return make_workbench(4, CPU, request.param)


def array(bench: Workbench, values: torch.Tensor) -> Any:
    return values.numpy() if bench.is_numpy else values


def test_the_cpu_uses_numpy_and_keeps_its_tables() -> None:
    assert workbench(3, CPU).xp is np
    assert workbench(3, CPU) is workbench(3, CPU)
    assert workbench(3, CPU) is not workbench(4, CPU)


def test_every_raw_signal_is_a_signal() -> None:
    names = {field.name for field in dataclasses.fields(Signals)}
    assert set(RawSignals._fields) <= names
    assert "twin_score" not in RawSignals._fields


def test_signals_are_read_without_a_copy(bench: Workbench) -> None:
    signals, _ = random_signals(5, 4, torch.Generator().manual_seed(0))
    raw = bench.read(signals)
    assert isinstance(raw.alpha, np.ndarray if bench.is_numpy else torch.Tensor)
    raw.alpha[0, 0] = 0.25
    assert float(signals.alpha[0, 0]) == 0.25


def test_stage_bits_are_activity_and_one_hot(bench: Workbench) -> None:
    values = torch.tensor([[int(stage) for stage in SeedStage]])
    bits = bench.tensor(bench.look_up(bench.stage_bits, array(bench, values)))
    assert bool((bits[0, :, 0] == 1).all())
    for place, stage in enumerate(SeedStage):
        assert bits[0, place, 1:].tolist() == [float(i == STAGE_INDEX[stage]) for i in range(10)]
    nothing = array(bench, torch.tensor([-1, 5, 11]))
    assert not bool(bench.tensor(bench.look_up(bench.stage_bits, nothing)).any())
    with pytest.raises(IndexError):
        bench.look_up(bench.stage_bits, array(bench, torch.tensor([12])))


def test_op_bits_are_a_one_hot(bench: Workbench) -> None:
    bits = bench.tensor(bench.look_up(bench.op_bits, array(bench, torch.arange(6))))
    assert torch.equal(bits, torch.eye(6))
    assert not bool(
        bench.tensor(bench.look_up(bench.op_bits, array(bench, torch.tensor([-1])))).any()
    )


def test_sums_over_neighbours(bench: Workbench) -> None:
    weight = torch.rand(6, 3)
    around = bench.tensor(bench.around(array(bench, weight)))
    for slot in range(3):
        torch.testing.assert_close(around[:, slot, 0], weight[:, :slot].sum(1))
        torch.testing.assert_close(around[:, slot, 1], weight[:, slot + 1 :].sum(1))
    pairs = torch.randn(6, 3, 3)
    total, most = bench.sum_and_most(array(bench, pairs))
    torch.testing.assert_close(bench.tensor(total), pairs.sum(-1))
    torch.testing.assert_close(bench.tensor(most), pairs.amax(-1))


def test_a_blank_observation_is_zero(bench: Workbench) -> None:
    blank = bench.tensor(bench.blank(3))
    assert (blank.shape, blank.dtype) == ((3, 151), torch.float32)
    assert not bool(blank.any())


@pytest.mark.parametrize("library", [np, torch], ids=["numpy", "torch"])
def test_tables_made_while_inferring_are_ordinary(library: ModuleType) -> None:
    with torch.inference_mode():
        bench = make_workbench(2, CPU, library)
    assert not bench.tensor(bench.units).is_inference()


def test_document_002_finds_its_names() -> None:
    from esper.leyline import SlotConfig as DocumentedSlotConfig
    from esper.tamiyo.policy.features import batch_obs_to_features_v3, get_feature_size_v3

    config = DocumentedSlotConfig.default()
    assert get_feature_size_v3(config) == 121
    assert get_feature_size_v3(config) + 4 * config.num_slots == 133
    assert batch_obs_to_features_v3 is batch_obs_to_features
