"""Changing the settings of a run: by dotted keys, from a command line, when a run is continued.

Some settings make a run what it is and stay as they are; others can change between rounds, so that
a round in progress is played again from its beginning; all others take effect at once.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from esper.leyline.config import Config, flat_settings
from esper.leyline.errors import ConfigError, UsageError, nearest
from esper.population.engine import EXECUTION_SETTINGS
from esper.simic.training.config import TrainConfig

FIXED_SETTINGS = ("seed", "rows", "episode_length", "policy")
"""What a continued run keeps."""

CHANGEABLE_WITHIN = (
    "policy.floor",
    "policy.check",
    *(f"population.{name}" for name in sorted(EXECUTION_SETTINGS)),
)
"""What may change all the same, at any time."""

ROUND_SETTINGS = (
    "tasks",
    "data",
    "rows_per_seed",
    "seed_pool",
    "variants_per_round",
    "horizon",
    "curriculum",
    "reward",
    "population",
    "recorded_rows",
)
"""What a round is made of: it is played again when one of these changes."""

NAMES_ONLY = ("recipe",)
"""What has no effect at all."""


@dataclass(frozen=True, slots=True)
class SettingChanges:
    """What is different about a run that is continued."""

    settings: Mapping[str, tuple[Any, Any]]
    """By dotted key: the value before and the value now."""
    restarts_round: bool
    """Whether a round in progress must be played again."""

    def __bool__(self) -> bool:
        return bool(self.settings)

    def describe(self) -> str:
        """Return the changes in one line."""
        parts = [f"{key} {old!r} -> {new!r}" for key, (old, new) in self.settings.items()]
        return ", ".join(parts) or "nothing"


def change_settings(config: TrainConfig, settings: Mapping[str, Any]) -> TrainConfig:
    """Return a configuration with some settings changed.

    Args:
        config: what to start from.
        settings: values by dotted key, as in {'ppo.exploration.sparse_entropy': 0.05}; a mapping
            changes some of a nested configuration, as in {'ppo': {'clip': 0.1}}.
    """
    for key, value in settings.items():
        config = _set(config, key.split("."), value, key)
    return config


def parse_settings(settings: Sequence[str]) -> dict[str, Any]:
    """Return settings by dotted key from texts 'KEY=VALUE'; values are read as YAML."""
    found = {}
    for setting in settings:
        key, sign, text = setting.partition("=")
        if not sign or not key.strip():
            raise UsageError(f"a setting is KEY=VALUE, as in ppo.clip=0.1; got {setting!r}")
        found[key.strip()] = _parse(text, setting)
    return found


def compare_settings(old: TrainConfig, new: TrainConfig) -> SettingChanges:
    """Return what changed, or raise where a run cannot be continued with it."""
    before, after = flat_settings(old.to_mapping()), flat_settings(new.to_mapping())
    changed = {
        key: (before.get(key), after.get(key))
        for key in {**before, **after}
        if before.get(key) != after.get(key) and not _is_within(key, NAMES_ONLY)
    }
    for key, (was, now) in changed.items():
        if _is_within(key, FIXED_SETTINGS) and not _is_within(key, CHANGEABLE_WITHIN):
            raise ConfigError(
                f"{key} is {was!r} in this run and cannot become {now!r} when it is continued; "
                f"start a new run for that ({', '.join(FIXED_SETTINGS)} stay as they are)"
            )
    restarts = any(
        _is_within(key, ROUND_SETTINGS) and not _is_within(key, CHANGEABLE_WITHIN)
        for key in changed
    )
    return SettingChanges(changed, restarts)


def _set(config: Any, path: Sequence[str], value: Any, key: str) -> Any:
    """Return a nested configuration with one field replaced."""
    known = [field.name for field in dataclasses.fields(config)]
    name = path[0]
    if name not in known:
        raise ConfigError(
            f"there is no setting {key!r}: {type(config).__name__} has no key "
            f"{name!r}{nearest(name, known) or ';'} known: {', '.join(sorted(known))}"
        )
    inner = getattr(config, name)
    if isinstance(value, Mapping) and isinstance(inner, Config) and len(path) == 1:
        for part, one in value.items():
            config = _set(config, [name, *str(part).split(".")], one, f"{key}.{part}")
        return config
    if len(path) > 1:
        if not isinstance(inner, Config):
            raise ConfigError(f"there is no setting {key!r}: {name} has no parts of its own")
        value = _set(inner, path[1:], value, key)
    if key == "ppo.gamma" and isinstance(config, TrainConfig):
        # One discount: the learner's and the reward's are the same number.
        return config.replace(ppo=value, reward=config.reward.replace(gamma=value.gamma))
    return config.replace(**{name: value})


def _parse(text: str, setting: str) -> Any:
    import yaml

    try:
        return yaml.safe_load(text)
    except yaml.YAMLError:
        raise UsageError(f"the value of {setting!r} cannot be read; quote it as YAML") from None


def _is_within(key: str, names: Sequence[str]) -> bool:
    return any(key == name or key.startswith(f"{name}.") for name in names)
