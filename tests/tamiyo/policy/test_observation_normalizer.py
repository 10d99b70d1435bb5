import copy
import math
from pathlib import Path

import pytest
import torch

from esper.lab.imagined import ImaginedHosts
from esper.leyline.errors import NonFiniteError, UsageError
from esper.leyline.slots import NUM_BLUEPRINTS, SlotConfig
from esper.tamiyo.policy.features import batch_obs_to_features
from esper.tamiyo.policy.layout import FEATURE_NAMES, feature_specs
from esper.tamiyo.policy.observation import DocumentsLayout, ObservationNormalizer, TravellingLayout
from esper.testing.controllers import random_signals
from esper.utils.storage import load_tree, save_tree

SLOTS = SlotConfig.default()
LAYOUT = DocumentsLayout(3)
CONTINUOUS = torch.tensor([spec.kind == "continuous" for spec in feature_specs(SLOTS)])


def batch(rows: int = 64, seed: int = 0, shift: float = 0.0) -> torch.Tensor:
    return shift + torch.randn(rows, 121, generator=torch.Generator().manual_seed(seed))


def test_it_starts_as_the_identity() -> None:
    normalizer = ObservationNormalizer(LAYOUT)
    observation = batch().clamp(-2, 2)
    assert torch.equal(normalizer.normalize(observation), observation)
    assert torch.equal(normalizer(observation), normalizer.normalize(observation))
    assert float(normalizer.moments("host").count) == 0


def test_statistics_are_those_of_everything_seen_until_they_are_good() -> None:
    normalizer = ObservationNormalizer(LAYOUT)
    rounds = [batch(50, seed, shift=float(seed)) for seed in range(5)]
    for rows in rounds:
        normalizer.update(rows)
    both = torch.cat(rounds)
    mean, var = both.mean(0), both.var(0, correction=0)
    torch.testing.assert_close(normalizer.mean[CONTINUOUS], mean[CONTINUOUS])
    torch.testing.assert_close(normalizer.moments("host").var[CONTINUOUS], var[CONTINUOUS])
    assert float(normalizer.moments("host").count) == 250
    observation = batch(8, 99)
    seen = normalizer.normalize(observation)
    torch.testing.assert_close(
        seen[:, CONTINUOUS], ((observation - mean) / var.sqrt())[:, CONTINUOUS]
    )


def test_then_they_follow_by_no_less_than_a_hundredth() -> None:
    normalizer = ObservationNormalizer(LAYOUT)
    normalizer.update(batch(100_000))
    before = normalizer.mean.clone()
    normalizer.update(batch(50, 1, shift=100.0))
    moved = (normalizer.mean - before)[CONTINUOUS]
    assert bool(((moved > 0.99) & (moved < 1.01)).all())


def test_what_has_not_varied_yet_passes_as_it_is() -> None:
    normalizer = ObservationNormalizer(LAYOUT)
    normalizer.update(torch.full((64, 121), 0.7))
    seen = normalizer.normalize(torch.full((1, 121), 0.9))
    torch.testing.assert_close(seen[0, CONTINUOUS], torch.full_like(seen[0, CONTINUOUS], 0.2))


def test_the_combined_variance_is_that_of_the_mixture() -> None:
    old, new = batch(990, 1), batch(10, 2, shift=3.0)
    normalizer = ObservationNormalizer(LAYOUT)
    moments = normalizer.moments("host")
    moments.mean.copy_(old.mean(0))
    moments.var.copy_(old.var(0, correction=0))
    moments.count.fill_(len(old))
    normalizer.update(new)
    both = torch.cat([old, new])
    mean, var = both.mean(0), both.var(0, correction=0)
    torch.testing.assert_close(normalizer.mean[CONTINUOUS], mean[CONTINUOUS], rtol=0, atol=1e-6)
    torch.testing.assert_close(
        normalizer.moments("host").var[CONTINUOUS], var[CONTINUOUS], rtol=1e-5, atol=0
    )


def test_only_continuous_features_are_touched() -> None:
    normalizer = ObservationNormalizer(LAYOUT)
    for seed in range(20):
        normalizer.update(batch(seed=seed, shift=5.0))
    observation = batch(seed=9).clamp(-2, 2)
    seen = normalizer.normalize(observation)
    assert torch.equal(seen[:, ~CONTINUOUS], observation[:, ~CONTINUOUS])
    assert bool((seen[:, CONTINUOUS] != observation[:, CONTINUOUS]).all())
    untouched = {name for name, moves in zip(FEATURE_NAMES, CONTINUOUS, strict=True) if not moves}
    assert {"host_stabilized", "last_action_op_wait", "r0c1.is_active"} <= untouched
    assert {"r0c2.stage_training", "r0c0.has_exploding", "r0c0.alpha_mode_norm"} <= untouched
    assert {"epoch_progress", "r0c0.alpha", "r0c2.counterfactual_fresh"}.isdisjoint(untouched)


def test_it_is_frozen_during_a_rollout() -> None:
    normalizer = ObservationNormalizer(LAYOUT)
    normalizer.update(batch())
    before = copy.deepcopy(normalizer.state_dict())
    normalizer.train()
    for seed in range(10):
        normalizer.normalize(batch(seed=seed, shift=100.0))
    for name, value in normalizer.state_dict().items():
        assert torch.equal(value, before[name])


def test_outliers_are_clipped() -> None:
    seen = ObservationNormalizer(LAYOUT).normalize(torch.full((2, 121), 1e6))
    assert float(seen.max()) == 10.0
    assert float(ObservationNormalizer(LAYOUT).normalize(torch.full((1, 121), -1e6)).min()) == -10.0


def test_it_converges_to_zero_mean_and_unit_variance() -> None:
    hosts = ImaginedHosts(32, seed=4)
    rounds = []
    for _ in range(40):
        rounds.append(batch_obs_to_features(hosts.signals(), SLOTS)[0])
        hosts.step(hosts.random_actions(prune_chance=0.2))
    everything = torch.stack(rounds)
    normalizer = ObservationNormalizer(LAYOUT, momentum=0.9)
    for _ in range(200):
        normalizer.update(everything)
    seen = normalizer.normalize(everything).flatten(0, 1)[:, CONTINUOUS]
    moving = everything.flatten(0, 1)[:, CONTINUOUS].var(0) > 0.01
    assert bool((seen.mean(0).abs() < 0.05).all())
    assert bool((seen.var(0)[moving] > 0.9).all())
    assert bool((seen.var(0) < 1.1).all())


def test_shapes_beyond_a_matrix_are_welcome() -> None:
    one, other = ObservationNormalizer(LAYOUT), ObservationNormalizer(LAYOUT)
    rows = batch(60)
    one.update(rows)
    other.update(rows.view(3, 20, 121))
    torch.testing.assert_close(one.mean, other.mean)
    assert one.normalize(rows.view(3, 20, 121)).shape == (3, 20, 121)
    assert one.normalize(rows[0]).shape == (121,)


def test_its_state_travels(tmp_path: Path) -> None:
    normalizer = ObservationNormalizer(LAYOUT, momentum=0.9)
    normalizer.update(batch())
    save_tree(tmp_path / "state", dict(normalizer.state_dict()), kind="normalizer", version=1)
    tree, _ = load_tree(tmp_path / "state", kind="normalizer", version=1)
    names = {"mean", "var", "count", "momentum"}
    assert set(tree) == {f"parts.host.{name}" for name in names}
    again = ObservationNormalizer(LAYOUT)
    again.load_state_dict(tree)
    observation = batch(seed=3)
    assert torch.equal(again.normalize(observation), normalizer.normalize(observation))
    normalizer.update(observation)
    again.update(observation)
    assert torch.equal(again.moments("host").var, normalizer.moments("host").var)
    copied = copy.deepcopy(normalizer)
    copied.update(batch(seed=4))
    assert not torch.equal(copied.mean, normalizer.mean)
    with pytest.raises(RuntimeError, match="size mismatch"):
        ObservationNormalizer(DocumentsLayout(5)).load_state_dict(tree)


def test_statistics_change_in_place() -> None:
    normalizer = ObservationNormalizer(LAYOUT)
    captured = (normalizer.mean, normalizer.scale)
    normalizer.update(batch())
    now = (normalizer.mean, normalizer.scale)
    assert all(one is other for one, other in zip(captured, now, strict=True))
    assert bool((captured[0] != 0).any())
    assert bool((captured[1] != 1).any())


def test_what_cannot_be_averaged_is_refused_and_leaves_no_trace() -> None:
    normalizer = ObservationNormalizer(LAYOUT)
    rows = batch(4)
    rows[2, 1] = math.nan
    with pytest.raises(NonFiniteError, match=r"feature 1 \(loss_norm\)"):
        normalizer.update(rows)
    with pytest.raises(UsageError, match=r"121 features, got \[4, 120\]"):
        normalizer.update(torch.zeros(4, 120))
    with pytest.raises(UsageError, match="one or more observations"):
        normalizer.update(torch.zeros(0, 121))
    with pytest.raises(UsageError, match=r"momentum must be .* got 1.0"):
        ObservationNormalizer(LAYOUT, momentum=1.0)
    assert torch.equal(normalizer.mean, torch.zeros(121))


def test_repeated_features_share_their_statistics_and_absent_ones_have_no_say() -> None:
    layout = TravellingLayout(3, NUM_BLUEPRINTS)
    numbers = torch.cat(
        [
            layout.observe(random_signals(200, 3, torch.Generator().manual_seed(seed))[0])[0]
            for seed in range(3)
        ]
    )
    normalizer = ObservationNormalizer(layout)
    normalizer.update(numbers)
    part = layout.parts[1]
    there = part.of(numbers)[..., part.presence] > 0
    assert not bool(there.all())
    measured = torch.tensor([spec.kind == "continuous" for spec in part.specs])
    own = part.of(numbers)[there]
    moments = normalizer.moments("slot")
    torch.testing.assert_close(moments.mean[measured], own.mean(0)[measured])
    torch.testing.assert_close(moments.var[measured], own.var(0, correction=0)[measured])
    assert float(moments.count) == len(own)
    spread = part.of(normalizer.mean)
    assert torch.equal(spread, moments.mean.expand_as(spread))
    seen = part.of(normalizer.normalize(numbers))
    assert torch.equal(seen[..., part.presence], part.of(numbers)[..., part.presence])


def test_statistics_fit_any_number_of_slots_and_blueprints() -> None:
    layout = TravellingLayout(2, NUM_BLUEPRINTS)
    normalizer = ObservationNormalizer(layout)
    normalizer.update(layout.observe(random_signals(50, 2, torch.Generator().manual_seed(0))[0])[0])
    wide = TravellingLayout(7, 20)
    other = ObservationNormalizer(wide)
    other.load_state_dict(normalizer.state_dict())
    for small, large in zip(layout.parts, wide.parts, strict=True):
        for name in ("mean", "scale"):
            few, many = small.of(getattr(normalizer, name)), large.of(getattr(other, name))
            assert torch.equal(many, few[:1].expand_as(many))


def test_a_round_in_which_nothing_fits_teaches_nothing_of_costs() -> None:
    layout = TravellingLayout(2, NUM_BLUEPRINTS)
    numbers = torch.rand(10, layout.size)
    pairs = layout.parts[2]
    numbers[:, pairs.start :] = 0.0
    normalizer = ObservationNormalizer(layout)
    normalizer.update(numbers)
    assert float(normalizer.moments("pair").count) == 0
