from __future__ import annotations

import pytest

from esper.lab.tasks import get_family
from esper.leyline.errors import UsageError
from esper.simic.rewards import make_reward
from esper.simic.training.config import LEARNER, RECIPES, TrainConfig, describe_recipes, get_recipe
from esper.simic.training.row_source import TaskRows

OURS = ("smoke", "digits", "family", "cifar16", "arena", "depth", "cifar", "stories")
DOCUMENTS = ("documents-001", "documents-000", "documents-v1")


def test_every_promised_recipe_is_there() -> None:
    assert set(RECIPES) == {*OURS, *DOCUMENTS} == set(describe_recipes())


@pytest.mark.parametrize("name", RECIPES)
def test_a_recipe_is_complete(name: str) -> None:
    recipe = get_recipe(name)
    assert recipe.recipe == name
    assert TrainConfig.from_mapping(recipe.to_mapping()) == recipe
    make_reward(recipe.reward)
    assert TaskRows(recipe.replace(device="cpu")).num_slots <= recipe.policy.num_slots


@pytest.mark.parametrize("name", OURS)
def test_our_recipes_share_one_learner(name: str) -> None:
    recipe = get_recipe(name)
    assert recipe.ppo == LEARNER
    assert recipe.reward.mode == "twin"
    assert recipe.horizon == "terminate"


def test_digits_is_what_the_learning_tests_use() -> None:
    recipe = get_recipe("digits")
    assert (recipe.policy.lstm_hidden_dim, recipe.episode_length) == (128, 60)


@pytest.mark.parametrize("name", ["family", "arena"])
def test_an_episode_is_as_long_as_the_longest_member(name: str) -> None:
    recipe = get_recipe(name)
    (family,) = recipe.tasks
    assert max(get_family(family).train.horizon) == recipe.epochs


def test_the_recipe_of_depth_sees_ratios_alone_and_may_copy() -> None:
    recipe = get_recipe("depth")
    (family,) = recipe.tasks
    assert {member.horizon for member in get_family(family).members("train")} == {recipe.epochs}
    assert recipe.policy.layout == "ratios"
    assert recipe.population.copies


def test_document_000_is_to_the_letter() -> None:
    recipe = get_recipe("documents-000")
    assert (recipe.policy.lstm_hidden_dim, recipe.episode_length) == (512, 150)
    assert (recipe.policy.critic, recipe.policy.floor.kind) == ("op_sampled", "clamp")
    # Section 5.4: the joint ratio, the product over heads, respects the clip range.
    assert (recipe.ppo.ratio, recipe.horizon, recipe.reward.mode) == (
        "joint",
        "bootstrap",
        "shaped",
    )


def test_document_001_has_its_width_and_multipliers() -> None:
    recipe = get_recipe("documents-001")
    assert (recipe.policy.lstm_hidden_dim, recipe.policy.critic) == (256, "op_soft")
    assert recipe.ppo.entropy_multipliers.blueprint == recipe.ppo.entropy_multipliers.tempo == 1.5
    assert recipe.ppo.entropy_multipliers.alpha_speed == 1.3


def test_v1_is_what_document_000_replaced() -> None:
    recipe, later = get_recipe("documents-v1"), get_recipe("documents-000")
    policy = recipe.policy
    assert (policy.lstm_hidden_dim, policy.blueprint_layers, policy.critic) == (128, 2, "state")
    # The rest is the same, so that a comparison is one of policies.
    assert recipe.ppo.replace(entropy_multipliers=later.ppo.entropy_multipliers) == later.ppo
    assert recipe.replace(recipe="", policy=later.policy, ppo=later.ppo) == later.replace(recipe="")


def test_an_unknown_recipe_names_the_nearest() -> None:
    with pytest.raises(UsageError, match="unknown recipe 'digit', did you mean 'digits'"):
        get_recipe("digit")
