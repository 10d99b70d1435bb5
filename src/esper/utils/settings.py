"""Settings files, and settings by dotted key, as in `ppo.clip=0.1`.

A run is started with a nested configuration, of which a user changes single values by `--set` or in
the file. `esper train --resume` and `esper grow --resume` both use these functions.
"""

from __future__ import annotations

import dataclasses
import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any, Literal, TypeAlias, TypeVar

from esper.leyline.config import Config
from esper.leyline.errors import ConfigError, UsageError, instead, reason_of
from esper.utils.files import read_regular

# ---- Plain data from YAML and JSON that users write: settings, recipes, schedules, `--set`


MOST_BYTES = 2**18
MOST_ENTRIES = 100_000
MOST_LEVELS = 50

_LEAST_INT, _MOST_INT = -(2**63), 2**63 - 1
_LONGEST_REASON = 300
_TRUTH = "tag:yaml.org,2002:bool"


def read_document(path: Path) -> Any:
    """Return the plain data in a file: JSON if its name ends so, else YAML.

    Raises:
        OSError: It cannot be read, or is no regular file.
        ConfigError: It is not valid, or larger than the limits above.
    """
    data = read_regular(path, MOST_BYTES + 1)
    if len(data) > MOST_BYTES:
        raise ConfigError(f"it is larger than {MOST_BYTES // 2**10} KiB")
    try:
        text = data.decode("utf-8")
    except UnicodeDecodeError as error:
        raise ConfigError(f"it is not UTF-8 text: {error.reason} at byte {error.start}") from None
    return parse_document(text, "json" if path.suffix.lower() == ".json" else "yaml")


def read_named(path: str | Path, what: str) -> Any:
    """Return the plain data in a file that the user named; `what` it holds is for messages.

    Raises:
        UsageError: It cannot be read.
    """
    try:
        return read_document(Path(path))
    except FileNotFoundError:
        raise UsageError(f"{path}: there is no such {what} file") from None
    except (OSError, ConfigError) as error:
        reason = error.strerror if isinstance(error, OSError) else error
        raise UsageError(f"{path}: cannot read the {what}: {reason}") from None


def parse_document(text: str, form: Literal["yaml", "json"] = "yaml") -> Any:
    """Return the plain data in a text.

    Raises:
        ConfigError: It is not valid, too large, or not plain data.
    """
    try:
        data = json.loads(text) if form == "json" else _parse_yaml(text)
    # Bad dates, numbers and tags raise KeyError, IndexError, AttributeError, ValueError or
    # RecursionError in the parsers, not only their own errors.
    except Exception as error:
        deep = isinstance(error, RecursionError)
        reason = "it is nested too deeply" if deep else reason_of(error)[:_LONGEST_REASON]
        raise ConfigError(f"not valid {form.upper()}: {reason}") from None
    _check_plain(data)
    return data


def _parse_yaml(text: str) -> Any:
    import yaml

    return yaml.load(text, _loader())


@cache
def _loader() -> Any:
    """Return PyYAML's safe loader with the booleans of YAML 1.2: only true and false.

    In YAML 1.1 on, off, yes and no are booleans too, and `off` is the value of some settings here.
    """
    import yaml

    class Loader(yaml.SafeLoader):
        pass

    Loader.yaml_implicit_resolvers = {
        first: [(tag, pattern) for tag, pattern in resolvers if tag != _TRUTH]
        for first, resolvers in yaml.SafeLoader.yaml_implicit_resolvers.items()
    }
    truth = re.compile("^(?:true|True|TRUE|false|False|FALSE)$")
    Loader.add_implicit_resolver(_TRUTH, truth, list("tTfF"))
    return Loader


def _check_plain(data: Any) -> None:
    """Raise if data is not plain, or too large or too deep once YAML references are followed."""
    entries = 0
    waiting = [(data, 0)]
    while waiting:
        value, level = waiting.pop()
        entries += 1
        if entries > MOST_ENTRIES:
            raise ConfigError(f"it has more than {MOST_ENTRIES:,} entries")
        if level > MOST_LEVELS:
            raise ConfigError(f"it is nested more than {MOST_LEVELS} levels deep")
        if isinstance(value, dict):
            for key, item in value.items():
                if not isinstance(key, str | int | float | bool | None):
                    raise ConfigError(f"a key is a {type(key).__name__}; keys are text")
                waiting += ((key, level + 1), (item, level + 1))
        elif isinstance(value, list):
            waiting += ((item, level + 1) for item in value)
        elif isinstance(value, int):
            if not _LEAST_INT <= value <= _MOST_INT:
                # Not the number itself: Python refuses to write out one of thousands of digits.
                raise ConfigError("it has a whole number beyond 64 bits")
        elif not isinstance(value, str | float | bool | None):
            raise ConfigError(
                f"it has a {type(value).__name__}; use text, numbers, lists, mappings"
            )


C = TypeVar("C", bound=Config)


@dataclass(frozen=True, slots=True)
class SettingChanges:
    """Changes of settings between a saved run and its continuation."""

    settings: Mapping[str, tuple[Any, Any]] = dataclasses.field(default_factory=dict)
    """By dotted key: the value before and the value now."""
    restarts_round: bool = False
    """Whether a round in progress must be played again."""

    def __bool__(self) -> bool:
        return bool(self.settings)

    def describe(self) -> str:
        """Return the changes in one line."""
        parts = [f"{key} {old!r} -> {new!r}" for key, (old, new) in self.settings.items()]
        return ", ".join(parts) or "nothing"


def parse_settings(settings: Sequence[str], example: str = "ppo.clip=0.1") -> dict[str, Any]:
    """Return settings by dotted key from texts 'KEY=VALUE'; values are parsed as YAML.

    `example` is part of the error message.
    """
    found = {}
    for setting in settings:
        key, sign, text = setting.partition("=")
        if not sign or not key.strip():
            raise UsageError(f"a setting is KEY=VALUE, as in {example}; got {setting!r}")
        try:
            found[key.strip()] = parse_document(text)
        except ConfigError as error:
            raise UsageError(
                f"the value of {setting!r} cannot be read ({error}); quote it as YAML"
            ) from None
    return found


def split_settings(text: str) -> list[str]:
    """Split a text at commas outside of brackets."""
    parts, depth = [""], 0
    for character in text:
        depth += (character in "[{(") - (character in "]})")
        if character == "," and depth == 0:
            parts.append("")
        else:
            parts[-1] += character
    return parts


def change_settings(config: C, settings: Mapping[str, Any]) -> C:
    """Return a configuration with some settings changed, all at once.

    Args:
        config: what to start from.
        settings: values by dotted key, as in {'ppo.exploration.sparse_entropy': 0.05}; a mapping
            changes some fields of a nested configuration, as in {'ppo': {'clip': 0.1}}.
    """
    changed: C = _change(config, [(key.split("."), value, key) for key, value in settings.items()])
    return changed


def flat_settings(mapping: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """Return nested plain settings by dotted key."""
    found: dict[str, Any] = {}
    for name, value in mapping.items():
        if isinstance(value, Mapping):
            found |= flat_settings(value, f"{prefix}{name}.")
        else:
            found[f"{prefix}{name}"] = value
    return found


def changed_settings(
    before: Mapping[str, Any], now: Mapping[str, Any]
) -> dict[str, tuple[Any, Any]]:
    """Return the differences of two nested settings: both values by dotted key."""
    old, new = flat_settings(before), flat_settings(now)
    return {
        key: (old.get(key), new.get(key)) for key in {**old, **new} if old.get(key) != new.get(key)
    }


def is_within(key: str, names: Sequence[str]) -> bool:
    """Return whether a dotted key is one of `names`, or lies within one."""
    return any(key == name or key.startswith(f"{name}.") for name in names)


_Change: TypeAlias = tuple[Sequence[str], Any, str]
"""The names from a configuration down to a field, its value, and the whole key for messages."""


def _change(config: C, changes: Sequence[_Change]) -> C:
    """Return a configuration with some of its fields, also nested ones, replaced."""
    fields: dict[str, Any] = {}
    within: dict[str, list[_Change]] = {}
    for path, value, key in changes:
        name, *rest = path
        _refuse_unknown(config, path, key)
        inner = getattr(config, name)
        if rest and not isinstance(inner, Config):
            raise ConfigError(f"there is no setting {key!r}: {name} has no parts of its own")
        parts = within.setdefault(name, [])
        if rest:
            parts.append((rest, value, key))
        elif isinstance(value, Mapping) and isinstance(inner, Config):
            parts += [(str(part).split("."), one, f"{key}.{part}") for part, one in value.items()]
        else:
            fields[name] = value
    for name, parts in within.items():
        if parts:
            fields[name] = _change(getattr(config, name), parts)
    return config.changed(**fields)


def _refuse_unknown(config: Config, path: Sequence[str], key: str) -> None:
    known = [field.name for field in dataclasses.fields(config)]
    if path[0] in known:
        return
    rest = ".".join(path)
    within = [one for one in flat_settings(config.to_mapping()) if one.endswith(f".{rest}")]
    if within:
        whole = " or ".join(f"{key.removesuffix(rest)}{one}" for one in within[:3])
        raise ConfigError(f"there is no setting {key!r}; its whole name is {whole}")
    raise ConfigError(
        f"there is no setting {key!r}: {type(config).__name__} has no key "
        f"{path[0]!r}{instead(path[0], sorted(known))}"
    )
