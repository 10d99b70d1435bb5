"""Settings as people write them: texts 'KEY=VALUE' whose values are YAML."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, TypeVar

from esper.leyline.config import Config, flat_settings
from esper.leyline.errors import ConfigError, UsageError, nearest

C = TypeVar("C", bound=Config)


def parse_settings(settings: Sequence[str], example: str = "ppo.clip=0.1") -> dict[str, Any]:
    """Return settings by dotted key; `example` is shown where one cannot be read."""
    found = {}
    for setting in settings:
        key, sign, text = setting.partition("=")
        if not sign or not key.strip():
            raise UsageError(f"a setting is KEY=VALUE, as in {example}; got {setting!r}")
        found[key.strip()] = _parse(text, setting)
    return found


def split_settings(text: str) -> list[str]:
    """Return the settings of a text that separates them by commas outside of brackets."""
    parts, depth = [""], 0
    for character in text:
        depth += (character in "[{(") - (character in "]})")
        if character == "," and depth == 0:
            parts.append("")
        else:
            parts[-1] += character
    return parts


def with_settings(config: C, settings: Mapping[str, Any]) -> C:
    """Return a configuration with some settings changed, each named by its dotted key."""
    plain = config.to_mapping()
    for key, value in settings.items():
        *path, last = key.split(".")
        place: Any = plain
        for part in path:
            place = place.get(part) if isinstance(place, dict) else None
        if not isinstance(place, dict) or last not in place:
            known = list(flat_settings(plain))
            raise ConfigError(f"there is no setting {key!r}{nearest(key, known)}")
        place[last] = value
    return type(config).from_mapping(plain)


def _parse(text: str, setting: str) -> Any:
    import yaml

    try:
        return yaml.safe_load(text)
    except yaml.YAMLError:
        raise UsageError(f"the value of {setting!r} cannot be read; quote it as YAML") from None
