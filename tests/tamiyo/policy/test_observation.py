from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch.nn import functional as F

from esper.leyline.actions import LifecycleOp
from esper.leyline.errors import NonFiniteError, UsageError
from esper.leyline.signals import Signals
from esper.leyline.slots import BUILTIN_BLUEPRINTS, NUM_BLUEPRINTS, SlotConfig
from esper.tamiyo.policy.features import batch_obs_to_features
from esper.tamiyo.policy.layout import FEATURE_NAMES
from esper.tamiyo.policy.observation import (
    DocumentsLayout,
    ObservationLayout,
    TravellingLayout,
    make_layout,
)
from esper.testing.controllers import random_signals

RATIOS = TravellingLayout(3, NUM_BLUEPRINTS, "ratios")
LAYOUTS: list[ObservationLayout] = [
    DocumentsLayout(3),
    TravellingLayout(3, NUM_BLUEPRINTS),
    RATIOS,
]


def some(slots: int = 3, seed: int = 0) -> Signals:
    return random_signals(20, slots, torch.Generator().manual_seed(seed))[0]


@pytest.mark.parametrize("layout", LAYOUTS)
def test_names_specs_and_numbers_are_of_one_size(layout: ObservationLayout) -> None:
    numbers, blueprints = layout.observe(some())
    assert numbers.shape == (20, layout.size)
    assert (numbers.dtype, blueprints.dtype) == (torch.float32, torch.int64)
    assert len(layout.specs) == len(layout.names) == layout.size
    assert len(set(layout.names)) == layout.size
    assert sum(part.size for part in layout.parts) == layout.size


def test_the_documents_layout_is_observation_v3() -> None:
    layout, signals = DocumentsLayout(3), some()
    numbers, blueprints = layout.observe(signals, "cpu")
    wanted = batch_obs_to_features(signals, SlotConfig.default(), "cpu")
    assert torch.equal(numbers, wanted[0])
    assert torch.equal(blueprints, wanted[1])
    assert layout.names == layout.signature == FEATURE_NAMES
    assert layout.size == 121


@pytest.mark.parametrize("layout", LAYOUTS)
def test_feedback_is_where_the_layout_says(layout: ObservationLayout) -> None:
    signals = some()
    feedback = layout.observe(signals)[0][:, layout.feedback]
    assert torch.equal(feedback[:, 0].bool(), signals.last_success)
    assert torch.equal(feedback[:, 1:].argmax(1), signals.last_op)
    assert feedback.shape[1] == 1 + len(LifecycleOp)


def test_parts_are_stretches_of_the_same_features() -> None:
    layout, signals = TravellingLayout(3, NUM_BLUEPRINTS), some()
    numbers, _ = layout.observe(signals)
    host, slots, pairs = layout.parts
    assert host.of(numbers).shape == (20, 1, len(host.specs))
    assert torch.equal(slots.of(numbers)[..., slots.presence] > 0, signals.enabled)
    assert pairs.of(numbers).shape == (20, 39, len(pairs.specs))
    names = layout.names
    assert names[slots.start] == "r0c0.exists"
    assert names[slots.start + len(slots.specs)] == "r0c1.exists"
    assert names[pairs.start + len(pairs.specs)] == "r0c0.1.fits"


def test_what_a_policy_must_agree_with_counts_no_slots() -> None:
    one, other = TravellingLayout(1, NUM_BLUEPRINTS), TravellingLayout(16, 20)
    assert one.signature == other.signature
    assert len(set(one.signature)) == len(one.signature)
    assert DocumentsLayout(1).signature != DocumentsLayout(2).signature


def test_slots_that_are_missing_do_not_exist() -> None:
    signals = some(2)
    narrow, wide = TravellingLayout(2, NUM_BLUEPRINTS), TravellingLayout(5, NUM_BLUEPRINTS)
    few, many = narrow.observe(signals), wide.observe(signals)
    for small, large in zip(narrow.parts[:2], wide.parts[:2], strict=True):
        found = large.of(many[0])
        assert torch.equal(found[:, : small.repeats], small.of(few[0]))
        assert not found[:, small.repeats :].any()
    assert torch.equal(many[1], F.pad(few[1], (0, 3), value=-1))


def test_another_world_is_refused() -> None:
    with pytest.raises(UsageError, match=r"3 slots and .* blueprints, .* laid out for 2 and "):
        TravellingLayout(2, NUM_BLUEPRINTS).observe(some())
    with pytest.raises(UsageError, match="laid out for 3 and 15"):
        TravellingLayout(3, 15).observe(some())


@pytest.mark.parametrize("layout", LAYOUTS)
def test_labels_name_slots_and_say_which_are_unused(layout: ObservationLayout) -> None:
    labels = layout.labels(["stem", "body"], BUILTIN_BLUEPRINTS)
    assert len(labels) == layout.size
    assert "stem.alpha" in labels
    assert "(unused slot 2).alpha" in labels
    if isinstance(layout, TravellingLayout):
        assert "body.conv_heavy.flops" in labels


def test_debugging_names_a_feature_that_is_not_finite(monkeypatch: pytest.MonkeyPatch) -> None:
    signals = some()
    broken = replace(signals, grad_norm=torch.full_like(signals.grad_norm, torch.nan))
    monkeypatch.setenv("ESPER_DEBUG", "1")
    with pytest.raises(NonFiniteError, match=r"r0c\d\.grad_norm"):
        TravellingLayout(3, NUM_BLUEPRINTS).observe(broken)


def test_layouts_are_made_by_name() -> None:
    assert make_layout("documents", 4, NUM_BLUEPRINTS) == DocumentsLayout(4)
    assert make_layout("travelling", 4, NUM_BLUEPRINTS) == TravellingLayout(4, NUM_BLUEPRINTS)


def test_ratios_do_not_change_with_the_size_of_anything() -> None:
    signals = some()
    sizes = ("params", "host_params", "budget", "flops", "host_flops", "slot_params", "slot_flops")
    limits = ("param_limit", "flop_limit", "seed_params", "seed_flops")
    times = ("epoch", "max_epochs", "plateau_epochs", "epochs_in_stage", "age", "time_to_target")
    whole = {name: getattr(signals, name) for name in (*sizes, *limits, *times)}
    scaled = {
        name: torch.where(value > 0, 4 * value, value).to(value.dtype)
        for name, value in whole.items()
    }
    other = replace(
        signals,
        **scaled,
        train_samples=7 * signals.train_samples,
        samples_per_epoch=3 * signals.samples_per_epoch,
        slot_channels=2 * signals.slot_channels,
        slot_positions=2 * signals.slot_positions,
        learning_rate=0.1 * signals.learning_rate,
        compute_budget=torch.where(signals.compute_budget > 0, 4 * signals.compute_budget, -1),
        compute_spent=4 * signals.compute_spent,
        grad_norm=10 * signals.grad_norm,
    )
    torch.testing.assert_close(RATIOS.observe(other)[0], RATIOS.observe(signals)[0])
    assert not torch.equal(LAYOUTS[1].observe(other)[0], LAYOUTS[1].observe(signals)[0])


def test_ratios_tell_what_is_left_and_what_a_step_would_cost() -> None:
    signals = replace(
        some(),
        compute_budget=torch.tensor([1000, -1] * 10),
        compute_spent=torch.tensor([250, 0] * 10),
    )
    numbers, names = RATIOS.observe(signals)[0], list(RATIOS.names)
    left = numbers[:, names.index("budget_left")]
    assert left[::2].tolist() == [0.75] * 10
    torch.testing.assert_close(left[1::2], 1 - signals.epoch[1::2] / signals.max_epochs[1::2])
    assert numbers[:, names.index("budget_known")].tolist() == [1.0, 0.0] * 10
    pairs = RATIOS.parts[2].of(numbers).unflatten(1, (3, NUM_BLUEPRINTS))
    fits = pairs[..., RATIOS.features.index("pair", "fits")] > 0
    costs = torch.log1p(signals.seed_flops / signals.flops[:, None, None]).clamp(max=3)
    found = pairs[..., RATIOS.features.index("pair", "step_cost")]
    torch.testing.assert_close(found[fits], costs[fits])
