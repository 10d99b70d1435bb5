from __future__ import annotations

import torch

from esper.leyline.slots import SlotConfig
from esper.simic.agent.clamps import ClampCounter
from esper.tamiyo.policy.layout import BASE_INDEX, feature_names, feature_specs

SLOTS = SlotConfig.of(1)
MEASURED = sum(spec.kind == "continuous" for spec in feature_specs(SLOTS))
BOTH = torch.tensor([True, True])


def observation() -> torch.Tensor:
    return torch.full((2, len(feature_names(SLOTS))), 0.5)


def test_what_is_within_its_range_is_not_counted() -> None:
    counter = ClampCounter(SLOTS, "cpu")
    counter.count(observation(), torch.zeros_like(observation()), BOTH)
    assert counter.share == 0.0
    assert counter.worst() == {}


def test_a_measurement_at_its_bound_is_counted() -> None:
    counter, raw = ClampCounter(SLOTS, "cpu"), observation()
    raw[0, BASE_INDEX["loss_delta_norm"]] = -1.0
    raw[:, BASE_INDEX["plateau_norm"]] = 1.0
    counter.count(raw, torch.zeros_like(raw), BOTH)
    assert counter.share == 3 / (2 * MEASURED)
    assert counter.worst(1) == {"plateau_norm": 1.0}


def test_flags_and_natural_zeros_are_no_clamps() -> None:
    counter, raw = ClampCounter(SLOTS, "cpu"), observation()
    raw[:, BASE_INDEX["host_stabilized"]] = 1.0
    raw[:, BASE_INDEX["plateau_norm"]] = 0.0
    counter.count(raw, torch.zeros_like(raw), BOTH)
    assert counter.share == 0.0


def test_the_normalisers_clip_counts_and_ended_rows_do_not() -> None:
    counter, raw = ClampCounter(SLOTS, "cpu"), observation()
    far = torch.zeros_like(raw)
    far[:, BASE_INDEX["accuracy_norm"]] = 10.0
    counter.count(raw, far, torch.tensor([True, False]))
    assert counter.share == 1 / MEASURED


def test_counts_go_on_from_their_state() -> None:
    one, other, raw = ClampCounter(SLOTS, "cpu"), ClampCounter(SLOTS, "cpu"), observation()
    raw[:, BASE_INDEX["plateau_norm"]] = 1.0
    one.count(raw, raw, BOTH)
    other.load_state_dict(one.state_dict())
    assert other.share == one.share > 0
    other.start()
    assert other.share == 0.0
