"""Settings by dotted key, as in `ppo.clip=0.1`: read, applied, and compared.

What a run was started with is a nested configuration; a person changes one value of it, by `--set`
or in the file. Both commands that can be continued use these functions.
"""

from __future__ import annotations

import dataclasses
import typing
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias, TypeVar

from esper.leyline.config import Config, describe_type, plain_value
from esper.leyline.documents import parse_document
from esper.leyline.errors import ConfigError, UsageError, instead

C = TypeVar("C", bound=Config)


@dataclass(frozen=True, slots=True)
class SettingChanges:
    """What is different about a run that is continued."""

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
    """Return settings by dotted key from texts 'KEY=VALUE'; values are read as YAML.

    `example` is shown where a text is none.
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
    """Return the settings of a text that separates them by commas outside of brackets."""
    parts, depth = [""], 0
    for character in text:
        depth += (character in "[{(") - (character in "]})")
        if character == "," and depth == 0:
            parts.append("")
        else:
            parts[-1] += character
    return parts


def change_settings(config: C, settings: Mapping[str, Any]) -> C:
    """Return a configuration with some settings changed, all at once: their order is nobody's.

    Args:
        config: what to start from.
        settings: values by dotted key, as in {'ppo.exploration.sparse_entropy': 0.05}; a mapping
            changes some of a nested configuration, as in {'ppo': {'clip': 0.1}}.
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
    """Return what is not the same in two nested settings: by dotted key, both values."""
    old, new = flat_settings(before), flat_settings(now)
    return {
        key: (old.get(key), new.get(key)) for key in {**old, **new} if old.get(key) != new.get(key)
    }


@dataclass(frozen=True, slots=True, kw_only=True)
class SettingInfo:
    """What there is to know of one setting before it is set."""

    key: str
    """Dotted, as `--set` takes it."""
    type: str
    """What it may be, in words."""
    default: Any
    """Plain data; `dataclasses.MISSING` where it must be given."""
    help: str
    """One sentence."""


def list_settings(config: type[Config], default: Config | None = None) -> Iterator[SettingInfo]:
    """Return every setting of a configuration and of those within it, in their order.

    Args:
        config: the configuration.
        default: where the values come from; the declared ones where there is none.
    """
    hints = typing.get_type_hints(config)
    for field in dataclasses.fields(config):
        value = field.default
        if default is not None:
            value = getattr(default, field.name)
        elif field.default_factory is not dataclasses.MISSING:
            value = field.default_factory()
        if isinstance(value, Config):
            for inner in list_settings(type(value), value):
                yield dataclasses.replace(inner, key=f"{field.name}.{inner.key}")
            continue
        yield SettingInfo(
            key=field.name,
            type=describe_type(hints[field.name], field.metadata),
            default=plain_value(value),
            help=field.metadata.get("help", ""),
        )


def is_within(key: str, names: Sequence[str]) -> bool:
    """Return whether a dotted key is one of these, or a part of one."""
    return any(key == name or key.startswith(f"{name}.") for name in names)


_Change: TypeAlias = tuple[Sequence[str], Any, str]
"""The names from a configuration down to a field, its value, and the whole key for messages."""


def _change(config: C, changes: Sequence[_Change]) -> C:
    """Return a configuration with fields of it, and of those within it, replaced."""
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
