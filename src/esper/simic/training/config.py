"""TrainConfig: the settings of a training run, which of them may change, and the recipes."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal, Self

from esper.kasmina.lifecycle import LifecycleConfig
from esper.kasmina.state import GateConfig
from esper.lab.population.engine import EXECUTION_SETTINGS, PopulationConfig, Strategy
from esper.leyline.actions import HEAD_NAMES
from esper.leyline.config import Config, option
from esper.leyline.controller import DEFAULT_EPISODE_LENGTH
from esper.leyline.errors import ConfigError, unknown_name
from esper.simic.agent.config import ExplorationConfig, ImitationConfig, PerHead, PPOConfig
from esper.simic.rewards.modes import RewardConfig, TwinConfig, check_gamma
from esper.tamiyo.networks.config import PolicyConfig
from esper.tamiyo.policy.distribution import FloorConfig
from esper.utils.settings import SettingChanges, changed_settings, is_within

Horizon = Literal["terminate", "bootstrap"]
"""At the horizon an episode terminates, or it is truncated and the critic's value is added."""


@dataclass(frozen=True, kw_only=True)
class StageConfig(Config):
    """One stage of a curriculum; it ends by `rounds` or `paid_off`, whichever comes first."""

    tasks: tuple[str, ...] = option(help="Tasks and families of the stage.")
    rounds: int = option(0, "Rounds after which the stage ends; 0 is no limit.", minimum=0)
    paid_off: float = option(
        0.0,
        "The stage ends when this running share of episodes pays off; 0 is no limit.",
        minimum=0,
        maximum=1,
    )

    def __post_init__(self) -> None:
        """Refuse a stage without rows."""
        super().__post_init__()
        if not self.tasks:
            raise ConfigError("StageConfig.tasks must name at least one task or family")


@dataclass(frozen=True, kw_only=True)
class TrainConfig(Config):
    """Settings of one training run; every recipe is one."""

    recipe: str = option("custom", "Name of the recipe it started from.")
    tasks: tuple[str, ...] = option(
        ("digits",), "Tasks and families that the rows are split among."
    )
    data: str | None = option(None, "File or folder of the data; empty for the usual places.")
    rounds: int = option(100, "Rounds: episodes of all rows, then one update.", minimum=1)
    rows: int = option(64, "Episodes in parallel.", minimum=1)
    episode_length: int = option(DEFAULT_EPISODE_LENGTH, "Decisions of an episode.", minimum=1)
    seed: int = option(0, "Seed of the whole run.", minimum=0)
    device: Literal["auto", "cpu", "cuda"] = option("auto", "Where the rows and the policy are.")
    strategy: Strategy = option("auto", "How the rows are executed.")

    rows_per_seed: int = option(4, "Rows that share an environment seed, and so a twin.", minimum=1)
    seed_pool: int = option(
        0, "Number of environment seeds to draw from; with 0 every round has new ones.", minimum=0
    )
    architectures_per_round: int = option(
        4,
        "Architectures of a family that are drawn for every round, each with as many conditions as "
        "it has environment seeds.",
        minimum=1,
    )
    twin_rounds: int = option(
        0,
        "Rounds whose twins are trained together in advance; 0 chooses as many as fill a GPU.",
        minimum=0,
    )
    horizon: Horizon = option(
        "terminate",
        "terminate: the episode ends at its horizon; bootstrap: it is truncated there, and the "
        "critic's value is added.",
    )
    curriculum: tuple[StageConfig, ...] = option(
        (), "Stages of tasks, one after another; empty for the same tasks throughout."
    )

    start: str | None = option(
        None, "Policy to start from, a folder as of `esper clone`; empty to start from nothing."
    )
    policy: PolicyConfig = option(PolicyConfig, "The network.")
    ppo: PPOConfig = option(PPOConfig, "The learner.")
    reward: RewardConfig = option(RewardConfig, "The reward.")
    population: PopulationConfig = option(PopulationConfig, "How rows train and grow.")

    recorded_rows: int = option(
        2, "Rows of which every step is stored; of the others, their episodes.", minimum=0
    )
    evaluate_every: int = option(
        0,
        "Rounds between greedy evaluations, which choose the best policy; the last round has one "
        "too. With 0 there is none, and the newest policy is the best.",
        minimum=0,
    )
    evaluation_seeds: int = option(8, "Episodes of such an evaluation.", minimum=1)
    checkpoint_every: int = option(1, "Rounds between checkpoints.", minimum=1)
    checkpoint_seconds: float = option(
        60.0, "Most seconds between checkpoints, also within an episode.", above=0.0
    )

    def __post_init__(self) -> None:
        """Check rules that span several fields."""
        super().__post_init__()
        if not self.tasks:
            raise ConfigError("TrainConfig.tasks must name at least one task or family")
        check_gamma(self.reward, self.ppo.gamma)
        if self.ppo.anchor_kl and not self.start:
            raise ConfigError("ppo.anchor_kl needs a policy to stay near; set start=FOLDER too")
        open_ended = [not (stage.rounds or stage.paid_off) for stage in self.curriculum]
        if any(open_ended[:-1]):
            number = open_ended.index(True)
            raise ConfigError(
                f"TrainConfig.curriculum[{number}] never ends, so later stages are never reached; "
                "set its rounds or paid_off"
            )

    def changed(self, **changes: Any) -> Self:
        """Return a copy with some fields changed; `reward.gamma` follows `ppo.gamma`."""
        ppo, reward = changes.get("ppo", self.ppo), changes.get("reward", self.reward)
        if isinstance(ppo, PPOConfig) and ppo.gamma != self.ppo.gamma == reward.gamma:
            changes["reward"] = reward.replace(gamma=ppo.gamma)
        return super().changed(**changes)

    @property
    def stages(self) -> tuple[StageConfig, ...]:
        """The stages of the run; one without a curriculum."""
        return self.curriculum or (StageConfig(tasks=self.tasks),)

    @property
    def epochs(self) -> int:
        """Epochs of an episode: one before the first decision, and one after each."""
        return self.episode_length + 1


FIXED_SETTINGS = ("seed", "rows", "episode_length", "policy", "start")
"""Settings that cannot change when a run is continued."""

CHANGEABLE_WITHIN = (
    "policy.floor",
    "policy.check",
    *(f"population.{name}" for name in sorted(EXECUTION_SETTINGS)),
)
"""Settings within those that may change at any time."""

ROUND_SETTINGS = (
    "tasks",
    "data",
    "rows_per_seed",
    "seed_pool",
    "architectures_per_round",
    "horizon",
    "curriculum",
    "reward",
    "population",
    "recorded_rows",
)
"""Settings of a round: when one of these changes, the round starts again."""

NAMES_ONLY = ("recipe",)
"""Settings without any effect."""


def compare_settings(old: TrainConfig, new: TrainConfig) -> SettingChanges:
    """Return the changes, or raise if a run cannot be continued with them."""
    changed = {
        key: values
        for key, values in changed_settings(old.to_mapping(), new.to_mapping()).items()
        if not is_within(key, NAMES_ONLY)
    }
    for key, (was, now) in changed.items():
        if is_within(key, FIXED_SETTINGS) and not is_within(key, CHANGEABLE_WITHIN):
            raise ConfigError(
                f"{key} is {was!r} in this run and cannot become {now!r} when it is continued; "
                f"start a new run for that ({', '.join(FIXED_SETTINGS)} stay as they are)"
            )
    restarts = any(
        is_within(key, ROUND_SETTINGS) and not is_within(key, CHANGEABLE_WITHIN) for key in changed
    )
    return SettingChanges(changed, restarts)


# ---- Recipes: complete training runs by name, each a value of `TrainConfig`


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
"""Settings of the learner that solve the problems with a known optimum."""

_REWARD = RewardConfig(gamma=LEARNER.gamma, twin=TwinConfig(flop_rent_points=0.25))
"""FLOPs cost half as much as parameters: enough to prefer the cheaper of two equal seeds."""

_POLICY = PolicyConfig(
    lstm_hidden_dim=128,
    floor=FloorConfig().replace(**{**dict.fromkeys(HEAD_NAMES, 0.02), "op": 0.01}),
)
"""Floors below the documents': with theirs every second blueprint is drawn at random, forever."""

_TRAVELLER = _POLICY.replace(layout="travelling")
"""Task-relative observations, for families and for images: they learn faster (research/log.md)."""

LIFE = LifecycleConfig(gates=GateConfig(min_training_epochs=3))
"""Seeds train alone for 3 of 60 epochs. With the documents' 10, growing on images gains a third of
what it gains with 3 (research/log.md)."""

_DOCUMENTS_LEARNER = PPOConfig(
    epochs=1,
    ratio="joint",
    head_weights="equal",
    exploration_kl=0.0,
    exploration=ExplorationConfig(op_curiosity=0.0, sparse_entropy=0.0, sparse_curiosity=0.0),
    imitation=ImitationConfig(weight=0.0),
)
"""One pass per update, the joint ratio clipped, and only entropy and floors against collapse."""

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
"""Shared settings of the recipes for real images."""

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
        _OURS.replace(
            recipe="depth",
            tasks=("depth_small",),
            rounds=24,
            rows=60,
            rows_per_seed=2,
            architectures_per_round=2,
            episode_length=59,
            evaluate_every=6,
            evaluation_seeds=30,
            reward=_REWARD.replace(twin=TwinConfig(rent_points=0.0)),
            policy=_POLICY.replace(layout="ratios"),
            population=PopulationConfig(lifecycle=LIFE, copies=True, ablate_every=20),
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
    "depth": "text networks of one block that copies deepen, under a budget of compute; two cores",
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
