"""The record of slots: plain data that never changes in place."""

from __future__ import annotations

import dataclasses

import pytest
import torch

from esper.kasmina.state import EMPTY, SlotState, check_state, empty_state
from esper.leyline.errors import CheckpointError
from esper.leyline.stages import MODULE_STAGES, SeedStage
from tests.kasmina.gardens import one_slot, same_state


def full_state() -> SlotState:
    """Two rows of three slots, every field different everywhere it can be."""
    state = empty_state(2, 3)
    everywhere = torch.ones(2, 3, dtype=torch.bool)
    count = torch.arange(6).reshape(2, 3)
    values = {
        name: count % 2 == 0 if isinstance(value, bool) else count + index
        for index, (name, value) in enumerate(EMPTY.items())
    }
    state = state.where(everywhere, **values)
    return dataclasses.replace(
        state, interaction=torch.arange(18, dtype=torch.float64).reshape(2, 3, 3)
    )


def test_an_empty_state_has_every_field_with_its_type() -> None:
    state = empty_state(2, 3)
    assert (state.rows, state.num_slots) == (2, 3)
    kinds = {bool: torch.bool, int: torch.int64, float: torch.float64}
    for name, value in EMPTY.items():
        tensor = getattr(state, name)
        assert tensor.shape == (2, 3)
        assert tensor.dtype == kinds[type(value)]
    assert state.interaction.shape == (2, 3, 3)
    assert {*EMPTY, "interaction"} == {field.name for field in dataclasses.fields(SlotState)}
    assert not bool(state.occupied.any())
    assert not bool(state.has_module.any())


@pytest.mark.parametrize("stage", list(SeedStage))
def test_a_record_occupies_its_slot_but_only_some_stages_hold_a_module(stage: SeedStage) -> None:
    state = one_slot(stage)
    assert bool(state.has_module) == (stage in MODULE_STAGES)
    assert bool(state.occupied) == (stage not in (SeedStage.UNKNOWN, SeedStage.DORMANT))


def test_where_changes_a_copy_under_the_mask_alone() -> None:
    before = empty_state(1, 2)
    after = before.where(torch.tensor([[True, False]]), alpha=0.5, stage=4, vanishing=True)
    assert after.alpha.tolist() == [[0.5, 0.0]]
    assert after.stage.tolist() == [[4, 1]]
    assert after.vanishing.tolist() == [[True, False]]
    assert before.alpha.tolist() == [[0.0, 0.0]]
    assert (after.alpha.dtype, after.stage.dtype) == (torch.float64, torch.int64)


def test_clear_empties_a_slot_and_every_interaction_with_it() -> None:
    mask = torch.tensor([[False, True, False], [False, False, False]])
    before = full_state()
    after = before.clear(mask)
    for name, value in EMPTY.items():
        wanted = torch.tensor(value, dtype=getattr(after, name).dtype)
        assert torch.equal(getattr(after, name)[0, 1].nan_to_num(-9), wanted.nan_to_num(-9))
        assert torch.equal(getattr(after, name)[~mask], getattr(before, name)[~mask])
    assert after.interaction[0].tolist() == [[0, 0, 2], [0, 0, 0], [6, 0, 8]]
    assert torch.equal(after.interaction[1], before.interaction[1])


def test_rows_can_be_chosen_and_repeated() -> None:
    state = full_state()
    chosen = state.select([1, 0, 1])
    assert chosen.rows == 3
    for name, value in state.state_dict().items():
        assert torch.equal(chosen.state_dict()[name], value[[1, 0, 1]])


def test_state_dict_and_device_moves_keep_everything() -> None:
    state = full_state()
    assert same_state(SlotState.from_state_dict(state.state_dict()), state)
    assert same_state(state.to("cpu"), state)
    assert state.to("meta").alpha.device.type == "meta"


def test_improvements_are_differences_of_scores() -> None:
    state = one_slot(SeedStage.BLENDING, score_stage=45.0, score_now=47.5)
    assert float(state.stage_improvement) == 2.5
    assert bool(one_slot(SeedStage.TRAINING).stage_improvement.isnan())


@pytest.mark.parametrize(
    ("name", "value", "said"),
    [
        ("stage", 5, "no SeedStage"),
        ("previous_stage", -1, "no SeedStage"),
        ("algorithm", 9, "no AlphaAlgorithm"),
        ("alpha_curve", 9, "no AlphaCurve"),
        ("alpha_mode", 3, "no AlphaMode"),
        ("blueprint", 13, "state.blueprint has values outside of -1 to 12"),
        ("alpha", 1.5, "state.alpha has values outside of 0 to 1"),
        ("alpha_target", float("nan"), "state.alpha_target has values outside of 0 to 1"),
        ("age", -1, "state.age has values outside"),
        ("counterfactual_age", -2, "state.counterfactual_age has values outside"),
    ],
)
def test_a_saved_state_that_no_life_leads_to_is_refused(name: str, value: float, said: str) -> None:
    state, first = empty_state(2, 3), torch.zeros(2, 3, dtype=torch.bool)
    first[1, 2] = True
    assert same_state(check_state(state.state_dict(), state, 13), state)
    with pytest.raises(CheckpointError, match=said):
        check_state(state.where(first, **{name: value}).state_dict(), state, 13)
    with pytest.raises(CheckpointError, match=f"state.{name} is of shape"):
        check_state({**state.state_dict(), name: torch.zeros(2, 2)}, state, 13)


def test_a_seed_without_a_blueprint_is_refused() -> None:
    state = empty_state(1, 1)
    alive = state.where(torch.ones(1, 1, dtype=torch.bool), stage=int(SeedStage.TRAINING))
    with pytest.raises(CheckpointError, match="blueprint of a seed has values outside of 0 to 12"):
        check_state(alive.state_dict(), state, 13)
