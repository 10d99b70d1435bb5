"""Recipes: complete training runs by name, each a value of `TrainConfig`.

What the learner itself needs (`LEARNER`) is the same in all of our own; they differ in tasks, size
and length. `documents-000` and `documents-001` are what the design documents describe, choices that
our experiments reject included, and `documents-v1` is the policy they set out to replace, so that
they can be compared.
"""

from __future__ import annotations

from esper.kasmina.gates import GateConfig
from esper.kasmina.lifecycle import LifecycleConfig
from esper.leyline.actions import HEAD_NAMES
from esper.leyline.errors import unknown_name
from esper.population.engine import PopulationConfig
from esper.simic.agent.config import ExplorationConfig, ImitationConfig, PerHead, PPOConfig
from esper.simic.rewards.config import RewardConfig, TwinConfig
from esper.simic.training.config import TrainConfig
from esper.tamiyo.networks.config import PolicyConfig
from esper.tamiyo.policy.distribution import FloorConfig

LEARNER = PPOConfig(
    gamma=0.999,
    learning_rate=3e-3,
    learning_rate_end=0.1,
    minibatches=4,
    epochs=6,
    clip=0.5,
    target_kl=0.015,
    entropy_coef=0.01,
    entropy_coef_end=0.001,
)
"""The learner's settings: those that learn the problems whose optimum is known."""

_REWARD = RewardConfig(gamma=LEARNER.gamma, twin=TwinConfig(flop_rent_points=0.25))
"""Operations cost half of what parameters do: enough to prefer the cheaper of two equal seeds."""

_POLICY = PolicyConfig(
    lstm_hidden_dim=128,
    floor=FloorConfig().replace(**{**dict.fromkeys(HEAD_NAMES, 0.02), "op": 0.01}),
)
"""Floors below the documents': theirs draw every second blueprint at random, for ever."""

_TRAVELLER = _POLICY.replace(layout="travelling")
"""Where tasks differ, and on images, where it learns faster than the documents' (docs/log.md)."""

LIFE = LifecycleConfig(gates=GateConfig(min_training_epochs=3))
"""Seeds train alone for a twentieth of 60 epochs: with the documents' ten, growing on images brings
a third of what it brings with three (docs/log.md)."""

_DOCUMENTS_LEARNER = PPOConfig(
    epochs=1,
    ratio="joint",
    head_weights="equal",
    exploration_kl=0.0,
    exploration=ExplorationConfig(op_curiosity=0.0, sparse_entropy=0.0, sparse_curiosity=0.0),
    imitation=ImitationConfig(weight=0.0),
)
"""One pass per update, the product of the heads' ratios clipped, and nothing against collapse but
entropy and floors."""

_DOCUMENTS_POLICY = PolicyConfig(
    lstm_hidden_dim=512,
    critic="op_sampled",
    initial_op_bias=(0.0,) * 6,
    floor=FloorConfig(kind="clamp"),
)

_DOCUMENTS_000 = TrainConfig(
    recipe="documents-000",
    tasks=("digits",),
    rounds=200,
    rows=4,
    rows_per_seed=1,
    episode_length=150,
    horizon="bootstrap",
    evaluate_every=20,
    policy=_DOCUMENTS_POLICY,
    ppo=_DOCUMENTS_LEARNER,
    reward=RewardConfig(mode="shaped"),
)

_OURS = TrainConfig(recipe="ours", policy=_POLICY, ppo=LEARNER, reward=_REWARD)

_IMAGES = _OURS.replace(
    episode_length=59,
    evaluation_seeds=16,
    policy=_TRAVELLER,
    population=PopulationConfig(lifecycle=LIFE, use_bf16=True),
)
"""What recipes for real images share."""

RECIPES: dict[str, TrainConfig] = {
    recipe.recipe: recipe
    for recipe in (
        _OURS.replace(
            recipe="smoke",
            rounds=2,
            rows=4,
            episode_length=6,
            policy=_POLICY.replace(lstm_hidden_dim=32),
        ),
        _OURS.replace(
            recipe="digits",
            rounds=24,
            rows=256,
            episode_length=60,
            evaluate_every=6,
            evaluation_seeds=16,
            population=PopulationConfig(rows_per_stack=256),
        ),
        _OURS.replace(
            recipe="family",
            tasks=("digits_family",),
            rounds=100,
            rows=32,
            architectures_per_round=2,
            episode_length=59,
            evaluate_every=10,
            evaluation_seeds=16,
            population=PopulationConfig(lifecycle=LIFE),
        ),
        _IMAGES.replace(
            recipe="cifar16", tasks=("cifar16",), rounds=12, rows=128, evaluate_every=6
        ),
        _IMAGES.replace(
            recipe="arena",
            tasks=("image16_family",),
            rounds=60,
            rows=256,
            architectures_per_round=4,
            evaluate_every=10,
            evaluation_seeds=32,
        ),
        _IMAGES.replace(
            recipe="cifar",
            tasks=("cifar_baseline",),
            rounds=20,
            rows=64,
            episode_length=60,
            evaluate_every=10,
        ),
        _OURS.replace(
            recipe="stories",
            tasks=("stories",),
            rounds=100,
            rows=32,
            episode_length=60,
            evaluate_every=10,
            population=PopulationConfig(use_bf16=True),
        ),
        _DOCUMENTS_000.replace(
            recipe="documents-001",
            policy=_DOCUMENTS_POLICY.replace(
                lstm_hidden_dim=256, critic="op_soft", floor=FloorConfig(kind="off")
            ),
            ppo=_DOCUMENTS_LEARNER.replace(
                entropy_multipliers=PerHead.same(1.0).replace(
                    **dict.fromkeys(("blueprint", "tempo"), 1.5),
                    **dict.fromkeys(("style", "alpha_target"), 1.2),
                    **dict.fromkeys(("alpha_speed", "alpha_curve"), 1.3),
                ),
            ),
        ),
        _DOCUMENTS_000,
        _DOCUMENTS_000.replace(
            recipe="documents-v1",
            policy=_DOCUMENTS_POLICY.replace(
                lstm_hidden_dim=128,
                blueprint_layers=2,
                critic="state",
                floor=FloorConfig(kind="off"),
            ),
            ppo=_DOCUMENTS_LEARNER.replace(entropy_multipliers=PerHead.same(1.0)),
        ),
    )
}
"""Every recipe by name."""

_LINES = {
    "smoke": "digits, 2 rounds of 4 short episodes: does it run here? Seconds.",
    "digits": "digits, 60 decisions, 256 networks side by side; minutes on a GPU",
    "family": "digits with hosts of several sizes, few images, wrong labels; fits two cores",
    "cifar16": "CIFAR-10 at 16x16, 128 networks side by side; 4 minutes on a GPU",
    "arena": "CIFAR-10 at 16x16, hosts, sizes, noise and rates that differ from round to round",
    "cifar": "CIFAR-10 with the reference conv host",
    "stories": "TinyStories, or any text, with a small transformer",
    "documents-001": "document 001: 256 hidden, its entropy multipliers, its soft baseline",
    "documents-000": "document 000: 512 hidden, 150 decisions, its constants and its baseline",
    "documents-v1": "what 000 replaced: 128 hidden, heads of two layers, a critic of states",
}
assert set(_LINES) == set(RECIPES)


def get_recipe(name: str) -> TrainConfig:
    """Return the recipe with a name, or raise with the nearest known one."""
    if name not in RECIPES:
        raise unknown_name("recipe", name, RECIPES)
    return RECIPES[name]


def describe_recipes() -> dict[str, str]:
    """Return one line about every recipe."""
    return dict(_LINES)
