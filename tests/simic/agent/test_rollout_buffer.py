from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from esper.leyline.actions import HEAD_NAMES, LifecycleOp
from esper.leyline.errors import CheckpointError, UsageError
from esper.simic.agent.rollout_buffer import TamiyoRolloutBuffer
from esper.tamiyo.networks.config import PolicyConfig
from esper.tamiyo.policy.action_masks import available_heads, causal_heads
from esper.utils.storage import load_tree, save_tree
from tests.simic.agent.rollouts import collect, situation, small_policy

BLUEPRINT = HEAD_NAMES.index("blueprint")


def decision(policy: Any, rows: int, active: Any = None, seed: int = 0) -> dict[str, Any]:
    draws = torch.Generator().manual_seed(seed)
    raw, blueprints, masks = situation(rows, policy, draws)
    state, cell = torch.randn(2, 1, rows, 32, generator=draws)
    hidden = (state, cell)
    step = policy.network.get_action(raw, masks, blueprints, hidden, generator=draws)
    waiting = torch.zeros(rows, 8, dtype=torch.int64)
    return {
        "raw_state": raw,
        "state": policy.normalizer.normalize(raw),
        "blueprint_indices": blueprints,
        "hidden": hidden,
        "step": step,
        "base_masks": policy.network.table.head_masks(masks, waiting),
        "available": available_heads(masks),
        "free": masks.op.sum(1) > 1,
        "active": torch.ones(rows, dtype=torch.bool) if active is None else active,
    }


def outcome(rows: int, **changes: Any) -> dict[str, Any]:
    nobody = torch.zeros(rows, dtype=torch.bool)
    given = {
        "reward": torch.arange(rows, dtype=torch.float32) + 1,
        "effective_op": torch.full((rows,), int(LifecycleOp.ADVANCE)),
        "terminated": nobody,
        "truncated": nobody,
    }
    return {**given, **changes}


def test_a_step_holds_what_was_seen_beside_what_was_done() -> None:
    policy = small_policy()
    buffer = TamiyoRolloutBuffer(5, 3, policy.network.config)
    given = [decision(policy, 5, seed=seed) for seed in range(3)]
    for each in given:
        buffer.add_decision(**each)
        buffer.add_outcome(**outcome(5))
    batch = buffer.batch()
    for at, each in enumerate(given):
        step = each["step"]
        assert torch.equal(batch.raw_states[:, at], each["raw_state"])
        assert torch.equal(batch.states[:, at], each["state"])
        assert torch.equal(batch.blueprint_indices[:, at], each["blueprint_indices"])
        assert torch.equal(batch.actions[:, at], step.actions)
        assert torch.equal(batch.log_probs[:, at], step.log_probs)
        assert torch.equal(batch.values[:, at], step.value)
        assert torch.equal(batch.op_values[:, at], step.op_values)
        assert torch.equal(batch.masks[:, at], step.masks)
        assert torch.equal(batch.base_masks[:, at], each["base_masks"])
        assert torch.equal(batch.hidden_state[:, at, 0], each["hidden"][0][0])
        assert torch.equal(batch.hidden_cell[:, at, 0], each["hidden"][1][0])
        assert torch.equal(batch.op[:, at], step.op)
    assert torch.equal(batch.rewards[:, 1], torch.arange(5) + 1.0)
    assert torch.equal(batch.effective_op, torch.full((5, 3), int(LifecycleOp.ADVANCE)))
    assert batch.valid.all()


def test_a_stored_step_does_not_change_with_the_tensors_it_came_from() -> None:
    policy = small_policy()
    buffer = TamiyoRolloutBuffer(4, 2, policy.network.config)
    each = decision(policy, 4)
    actions = each["step"].actions.clone()
    buffer.add_decision(**each)
    buffer.add_outcome(**outcome(4))
    each["step"].actions.zero_()
    each["state"].zero_()
    assert torch.equal(buffer.batch().actions[:, 0], actions)
    assert buffer.batch().states.abs().sum() > 0


def test_every_stored_action_is_legal_by_its_stored_mask() -> None:
    batch = collect(small_policy(), rows=16, steps=20).batch()
    legal = batch.masks.gather(-1, batch.actions.unsqueeze(-1)).squeeze(-1)
    causal = causal_heads(batch.op)
    assert legal[causal].all()
    # Log-probabilities are those of a choice where the head mattered, and exactly 0 elsewhere.
    assert torch.equal(batch.log_probs[~causal], torch.zeros_like(batch.log_probs[~causal]))
    assert (batch.log_probs <= 0).all()


def test_the_blueprint_is_the_placeholder_unless_a_seed_germinates() -> None:
    batch = collect(small_policy(), rows=32, steps=20).batch()
    germinates = batch.op == int(LifecycleOp.GERMINATE)
    assert germinates.any()
    assert (batch.actions[..., BLUEPRINT][~germinates] == 0).all()
    assert (batch.actions[..., BLUEPRINT][germinates] > 0).all()


def test_rows_that_ended_are_padding() -> None:
    batch = collect(small_policy(), rows=3, steps=6, lengths=[6, 2, 4]).batch()
    assert batch.valid.sum(1).tolist() == [6, 2, 4]
    padding = ~batch.valid
    assert (batch.masks.sum(-1)[padding] == 1).all()
    assert (batch.base_masks.sum(-1)[padding] == 1).all()
    legal = batch.masks.gather(-1, batch.actions.unsqueeze(-1)).squeeze(-1)
    assert legal[padding].all()
    for name in ("states", "raw_states", "log_probs", "values", "rewards", "hidden_state"):
        assert not getattr(batch, name)[padding].any(), name
    for name in ("free", "available", "terminated", "truncated"):
        assert not getattr(batch, name)[padding].any(), name
    assert (batch.blueprint_indices[padding] == -1).all()
    assert batch.terminated.nonzero().tolist() == [[0, 5], [1, 1], [2, 3]]


def test_what_a_finished_row_is_shown_never_gets_in() -> None:
    policy = small_policy()
    buffer = TamiyoRolloutBuffer(2, 1, policy.network.config)
    each = decision(policy, 2, active=torch.tensor([True, False]))
    each["state"][1] = torch.nan
    buffer.add_decision(**each)
    buffer.add_outcome(**outcome(2, reward=torch.tensor([1.0, torch.nan])))
    batch = buffer.batch()
    assert torch.isfinite(batch.states).all()
    assert batch.rewards.tolist() == [[1.0], [0.0]]


def test_the_next_value_is_the_next_steps_the_bootstrap_or_nothing() -> None:
    buffer = collect(small_policy(), rows=3, steps=4, lengths=[4, 2, 3], truncate=True)
    batch, found = buffer.batch(), buffer.next_values()
    for row, length in enumerate((4, 2, 3)):
        expected = [*batch.values[row, 1:length].tolist(), float(buffer.bootstrap[row])]
        assert found[row, :length].tolist() == pytest.approx(expected)
        assert not found[row, length:].any()
    buffer = collect(small_policy(), rows=3, steps=4, lengths=[4, 2, 3])
    assert [float(buffer.next_values()[row, last]) for row, last in enumerate((3, 1, 2))] == [
        0.0
    ] * 3


def test_bootstrap_rows_are_named_by_index_or_by_flag() -> None:
    buffer = collect(small_policy(), rows=3, steps=2, truncate=True)
    buffer.set_bootstrap(torch.tensor([2, 0]), torch.tensor([5.0, 7.0]))
    assert buffer.bootstrap[[0, 2]].tolist() == [7.0, 5.0]
    buffer.set_bootstrap(torch.tensor([False, True, False]), torch.tensor([9.0]))
    assert buffer.bootstrap.tolist() == [7.0, 9.0, 5.0]


def test_an_unfinished_row_is_refused() -> None:
    policy = small_policy()
    buffer = TamiyoRolloutBuffer(2, 3, policy.network.config)
    buffer.add_decision(**decision(policy, 2))
    buffer.add_outcome(**outcome(2, terminated=torch.tensor([True, False])))
    with pytest.raises(UsageError, match="row 1 neither terminated nor was truncated"):
        buffer.next_values()


def test_halves_of_a_step_come_in_turn() -> None:
    policy = small_policy()
    buffer = TamiyoRolloutBuffer(2, 1, policy.network.config)
    with pytest.raises(UsageError, match="add_decision first"):
        buffer.add_outcome(**outcome(2))
    buffer.add_decision(**decision(policy, 2))
    with pytest.raises(UsageError, match="add_outcome first"):
        buffer.add_decision(**decision(policy, 2))
    with pytest.raises(UsageError, match="half written"):
        buffer.state_dict()
    buffer.add_outcome(**outcome(2))
    with pytest.raises(UsageError, match="full"):
        buffer.add_decision(**decision(policy, 2))


def test_a_wrong_shape_is_named() -> None:
    policy = small_policy()
    buffer = TamiyoRolloutBuffer(2, 1, policy.network.config)
    each = decision(policy, 2)
    with pytest.raises(UsageError, match=r"states of a decision must be \[2, 121\], got \[2, 5\]"):
        buffer.add_decision(**{**each, "state": torch.zeros(2, 5)})


def test_it_is_saved_and_restored_in_the_middle_of_an_episode(tmp_path: Path) -> None:
    policy = small_policy()
    buffer = TamiyoRolloutBuffer(3, 5, policy.network.config)
    for seed in range(2):
        buffer.add_decision(**decision(policy, 3, seed=seed))
        buffer.add_outcome(**outcome(3))
    save_tree(tmp_path / "it", buffer.state_dict(), kind="buffer", version=1)
    state, _ = load_tree(tmp_path / "it", kind="buffer", version=1)
    assert state["tensors"]["states"].shape[1] == 2
    restored = collect(policy, rows=3, steps=5, seed=9)
    restored.load_state_dict(state)
    for one in (buffer, restored):
        one.add_decision(**decision(policy, 3, seed=5))
        one.add_outcome(**outcome(3, truncated=torch.ones(3, dtype=torch.bool)))
        one.set_bootstrap(torch.arange(3), torch.ones(3))
    assert restored.cursor == 3
    for name in state["tensors"]:
        assert torch.equal(getattr(buffer.batch(), name), getattr(restored.batch(), name)), name
    assert torch.equal(buffer.next_values(), restored.next_values())


def test_the_state_of_another_buffer_is_refused() -> None:
    state = TamiyoRolloutBuffer(2, 3, PolicyConfig(lstm_hidden_dim=32)).state_dict()
    with pytest.raises(CheckpointError, match="2 rows of 3 steps, this one 2 of 4"):
        TamiyoRolloutBuffer(2, 4, PolicyConfig(lstm_hidden_dim=32)).load_state_dict(state)
    with pytest.raises(CheckpointError, match="hidden_state"):
        TamiyoRolloutBuffer(2, 3, PolicyConfig(lstm_hidden_dim=16)).load_state_dict(state)


def test_a_new_round_forgets_the_old_one() -> None:
    policy = small_policy()
    used, fresh = collect(policy), TamiyoRolloutBuffer(6, 12, policy.network.config)
    used.start()
    assert used.cursor == 0
    for name in fresh.batch().__dataclass_fields__:
        assert torch.equal(getattr(used._all, name), getattr(fresh._all, name)), name
    assert not used.bootstrap.any()
