"""The environments of Gymnasium: their contract, their masks, and that they are our own rounds."""

from __future__ import annotations

from typing import Any

import gymnasium
import numpy as np
import pytest
import torch
from gymnasium.utils.env_checker import check_env
from gymnasium.vector import AutoresetMode
from stable_baselines3.common.env_checker import check_env as check_for_stable_baselines

from esper.lab.envs import (
    ENV_ID,
    CompoundActions,
    GrowEnv,
    GrowVectorEnv,
    LegalActions,
    LegalVectorActions,
)
from esper.lab.envs.grow import SHAPES
from esper.lab.envs.rows import union_mask, waiting_masks
from esper.lab.imagined import middle_aged_hosts
from esper.leyline.actions import HEAD_NAMES, HEAD_SIZES, PLACEHOLDERS, LifecycleOp, decode_actions
from esper.leyline.errors import UsageError
from esper.leyline.rules import Masks, RulesConfig, allows, build_masks
from esper.simic.training.config import get_recipe
from esper.simic.training.vectorized import Trainer
from esper.tamiyo.policy.action_masks import rule_view

pytestmark = pytest.mark.integrations

SHORT: dict[str, Any] = {"episode_length": 3, "device": "cpu", "strategy": "sequential"}
SIZES = [HEAD_SIZES[head] for head in HEAD_NAMES]


def imagined_masks(rows: int = 64) -> Masks:
    """Masks of rows in all sorts of states."""
    signals = middle_aged_hosts(rows).signals()
    fits = torch.rand(rows, 3, HEAD_SIZES["blueprint"]) < 0.5
    return build_masks(rule_view(signals, fits), RulesConfig())


# ------------------------------------------------------------------------------------ the contract


def test_gymnasium_and_stable_baselines_find_nothing_wrong() -> None:
    env = gymnasium.make(ENV_ID, recipe="smoke", settings=SHORT)
    check_env(env.unwrapped, skip_render_check=True)
    check_for_stable_baselines(LegalActions(env, pinned=SHAPES))


def test_masks_are_flat_and_also_in_the_info() -> None:
    env = gymnasium.make(ENV_ID, recipe="smoke", settings=SHORT)
    _, info = env.reset(seed=3)
    flat = env.get_wrapper_attr("action_masks")()
    assert flat.dtype == np.bool_
    assert flat.shape == (sum(SIZES),)
    assert info["action_mask"].dtype == np.int8
    assert np.array_equal(info["action_mask"], flat)
    heads = tuple(np.split(info["action_mask"], np.cumsum(SIZES)[:-1]))
    assert env.action_space.contains(env.action_space.sample(mask=heads))


def test_unknown_settings_and_drawing_are_refused_in_one_line() -> None:
    with pytest.raises(UsageError, match="rounds_per_day"):
        GrowVectorEnv(2, "smoke", {"rounds_per_day": 3})
    with pytest.raises(UsageError, match="render_mode"):
        GrowEnv("smoke", render_mode="human")
    with pytest.raises(UsageError, match=r"call reset\(\) first"):
        GrowVectorEnv(2, "smoke").action_masks()


# ---------------------------------------------------------------------------------- vectors of rows


def test_rows_end_together_and_begin_again_in_the_same_step() -> None:
    envs = gymnasium.make_vec(ENV_ID, num_envs=2, recipe="smoke", settings=SHORT)
    assert envs.metadata["autoreset_mode"] is AutoresetMode.SAME_STEP
    first, infos = envs.reset(seed=5)
    for number in range(3):
        seen, _, ends, cuts, infos = envs.step(envs.action_space.sample())
        assert ends.all() == (number == 2)
        assert not cuts.any()
    assert infos["_final_obs"].all()
    assert infos["final_obs"][0].shape == first[0].shape
    assert not infos["final_info"]["active"].any()
    assert infos["active"].all()
    assert not np.array_equal(seen, first), "another round has other seeds"
    again, _ = envs.reset(seed=5)
    assert np.array_equal(again, first), "a seed is the same episodes"
    with pytest.raises(UsageError, match="start together"):
        envs.reset(options={"reset_mask": np.array([True, False])})
    envs.close()


def test_an_episode_pays_what_our_own_trainer_pays() -> None:
    config = get_recipe("smoke").replace(strategy="sequential", device="cpu", recorded_rows=4)
    trainer = Trainer(config)
    outcome = next(iter(trainer.run(1))).outcome
    trainer.close()
    envs = GrowVectorEnv(recipe=config)
    envs.reset()
    paid = []
    for step in range(config.episode_length):
        paid.append(envs.step(outcome.recorded_decisions["actions"][:, step].numpy())[1])
    envs.close()
    rewards = torch.as_tensor(np.stack(paid, axis=1))
    assert torch.equal(rewards.float(), outcome.decisions["reward"])
    assert bool(rewards.any()), "otherwise nothing is compared"


def test_a_row_that_has_ended_may_only_wait() -> None:
    masks = imagined_masks()
    active = torch.arange(64) % 2 == 0
    waiting = waiting_masks(masks, active)
    assert torch.equal(waiting.op[active], masks.op[active])
    assert waiting.op[~active].sum(1).tolist() == [1] * 32
    assert bool(waiting.op[:, LifecycleOp.WAIT].all())
    legal = CompoundActions(SIZES).legal(waiting)
    assert legal[~active].sum(1).tolist() == [1] * 32


# -------------------------------------------------------------------------------------------- masks


def test_compound_masks_are_exactly_what_the_rules_allow() -> None:
    masks, actions = imagined_masks(), CompoundActions(SIZES)
    legal = actions.legal(masks)
    assert len(actions) == 2083
    for number in range(0, len(actions), 7):
        command = decode_actions(
            {head: actions.table[number, i].repeat(64) for i, head in enumerate(HEAD_NAMES)}
        )
        expected = allows(masks, command.op, command.slot, command.blueprint)
        assert torch.equal(legal[:, number], expected), actions.table[number]
    assert bool(legal[:, 0].all()), "WAIT is the first"
    assert bool((legal.sum(1) > 1).any())


def test_no_two_compound_actions_are_the_same() -> None:
    for pinned in ((), SHAPES, ("tempo", "alpha_curve")):
        table = CompoundActions(SIZES, pinned).table
        assert len(table.unique(dim=0)) == len(table)
        for head in pinned:
            assert set(table[:, HEAD_NAMES.index(head)].tolist()) == {int(PLACEHOLDERS[head])}
    assert len(CompoundActions(SIZES, SHAPES)) == 46
    with pytest.raises(UsageError, match="'op'"):
        CompoundActions(SIZES, ("op",))


def test_factored_masks_hold_every_legal_action_and_leave_no_head_empty() -> None:
    masks, actions = imagined_masks(), CompoundActions(SIZES)
    flat = union_mask(masks)
    legal = actions.legal(masks)
    start = 0
    for index, size in enumerate(SIZES):
        head = flat[:, start : start + size]
        assert bool(head.any(1).all())
        taken = actions.table[:, index]
        # A head that the op does not use is at its placeholder, which stands for nothing.
        placeholder = int(PLACEHOLDERS[HEAD_NAMES[index]])
        missing = legal & ~head[:, taken] & (taken != placeholder)
        assert not bool(missing.any()), HEAD_NAMES[index]
        start += size


def test_legal_actions_of_rows_are_carried_out() -> None:
    envs = LegalVectorActions(GrowVectorEnv(2, "smoke", SHORT), pinned=SHAPES)
    _, infos = envs.reset(seed=1)
    assert np.array_equal(infos["action_mask"], envs.action_masks())
    planting = np.flatnonzero(envs.action_masks()[0])[1]
    envs.step(np.array([planting, 0]))
    stages = envs.unwrapped.rows._playing.signals.stage
    assert bool((stages[0] >= 0).any())
    assert bool((stages[1] < 0).all())
    envs.close()
