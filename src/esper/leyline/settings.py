"""Settings as people write them: texts 'KEY=VALUE' whose values are YAML."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from esper.leyline.errors import UsageError


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


def _parse(text: str, setting: str) -> Any:
    import yaml

    try:
        return yaml.safe_load(text)
    except yaml.YAMLError:
        raise UsageError(f"the value of {setting!r} cannot be read; quote it as YAML") from None
