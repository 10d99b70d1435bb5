"""Typed, frozen, validated configurations: the only place where defaults are written.

A configuration is a frozen keyword-only dataclass that derives from `Config`. Each field is
declared by `option(default, "one sentence", ...)`. The constructor checks types and ranges;
`from_mapping` also refuses unknown keys. Every error is one line with the field, the value and what
is allowed.
"""

from __future__ import annotations

import contextlib
import dataclasses
import math
import os
import types
import typing
from collections.abc import Mapping
from typing import Any, Literal, Self, TypeVar

from esper.leyline.errors import ConfigError, instead, nearest

C = TypeVar("C", bound="Config")

_LONGEST = 80
"""Most characters of a user's values that are shown in an error."""


def option(
    default: Any = dataclasses.MISSING,
    help: str = "",
    *,
    minimum: float | None = None,
    maximum: float | None = None,
    above: float | None = None,
) -> Any:
    """Declare a field: its default, one sentence about it, and the range it may take."""
    metadata = {"help": help, "minimum": minimum, "maximum": maximum, "above": above}
    if isinstance(default, type) and issubclass(default, Config):
        return dataclasses.field(default_factory=default, metadata=metadata)
    if default is dataclasses.MISSING:
        return dataclasses.field(metadata=metadata)
    return dataclasses.field(default=default, metadata=metadata)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Config:
    """Base of every configuration; subclasses are frozen keyword-only dataclasses too."""

    def __post_init__(self) -> None:
        """Check every field against its declared type and range."""
        hints = typing.get_type_hints(type(self))
        for field in dataclasses.fields(self):
            where = f"{type(self).__name__}.{field.name}"
            value = _check(where, getattr(self, field.name), hints[field.name])
            _check_range(where, value, field.metadata)
            object.__setattr__(self, field.name, value)

    @classmethod
    def from_mapping(cls: type[C], mapping: Mapping[str, Any]) -> C:
        """Build the configuration from plain data; refuse keys it does not have."""
        if not isinstance(mapping, Mapping):
            raise ConfigError(
                f"{cls.__name__} must be a mapping of keys to values, got {mapping!r}"
            )
        _refuse_unknown(cls, mapping)
        missing = [
            field.name
            for field in dataclasses.fields(cls)
            if field.default is dataclasses.MISSING
            and field.default_factory is dataclasses.MISSING
            and field.name not in mapping
        ]
        if missing:
            raise ConfigError(f"{cls.__name__} needs {', '.join(missing)}")
        return cls(**mapping)

    def to_mapping(self) -> dict[str, Any]:
        """Return plain data (numbers, strings, lists, dicts) that `from_mapping` reads back."""
        return {
            field.name: plain_value(getattr(self, field.name)) for field in dataclasses.fields(self)
        }

    def replace(self: C, **changes: Any) -> C:
        """Return a copy with some fields changed, checked like any other."""
        _refuse_unknown(type(self), changes)
        return dataclasses.replace(self, **changes)

    def changed(self, **changes: Any) -> Self:
        """Return a copy with some fields changed; a subclass may change dependent fields too."""
        return self.replace(**changes)

    @classmethod
    def describe(cls) -> dict[str, str]:
        """Return the sentence of every field, for help texts and documents."""
        return {field.name: field.metadata.get("help", "") for field in dataclasses.fields(cls)}


def check_value(name: str, value: Any, kind: type, **limits: float) -> None:
    """Check one argument of a function as if it were a field.

    Args:
        name: the argument, for the message.
        value: what was given.
        kind: its type.
        limits: `minimum`, `maximum` or `above`, as in `option`.
    """
    _check_range(name, _check(name, value, kind), limits)


def check_config(config: object, kind: type[C]) -> C:
    """Return a configuration, or that of all defaults for None; refuse anything else."""
    if isinstance(config, kind):
        return config
    if config is None:
        return kind()
    given = ""
    if isinstance(config, Mapping):
        given = ", ".join(f"{name}={value!r}" for name, value in config.items())
    shown = given if given and len(given) <= _LONGEST else "..."
    raise ConfigError(
        f"config must be a {kind.__name__}, got {type(config).__name__}; write "
        f"config={kind.__name__}({shown})"
    )


def is_debugging() -> bool:
    """Return whether `ESPER_DEBUG=1` is set now."""
    return os.environ.get("ESPER_DEBUG") == "1"


def is_checking_stages() -> bool:
    """Return whether signals are checked at every step: `ESPER_DEBUG_STAGE=1`, or debugging."""
    return os.environ.get("ESPER_DEBUG_STAGE") == "1" or is_debugging()


def _refuse_unknown(config: type[Config], mapping: Mapping[str, Any]) -> None:
    known = [field.name for field in dataclasses.fields(config)]
    for key in mapping:
        if key not in known:
            raise ConfigError(f"{config.__name__} has no key {key!r}{instead(key, sorted(known))}")


def _is_config(hint: Any) -> bool:
    return isinstance(hint, type) and issubclass(hint, Config)


def plain_value(value: Any) -> Any:
    """Return the value of a field as plain data."""
    if isinstance(value, Config):
        return value.to_mapping()
    if isinstance(value, tuple):
        return [plain_value(item) for item in value]
    return value


def describe_type(hint: Any, limits: Mapping[str, Any]) -> str:
    """Return the type and the range of a field in words."""
    allowed = _range_words(limits)
    return f"{_words(hint)}, {allowed}" if allowed else _words(hint)


def _check(where: str, value: Any, hint: Any) -> Any:
    """Return `value` in its declared type, or raise.

    Lists become tuples, whole numbers become floats, mappings become configurations.
    """
    origin = typing.get_origin(hint)
    if origin is Literal:
        return _check_literal(where, value, hint)
    if origin in (typing.Union, types.UnionType):
        return _check_union(where, value, hint)
    if origin is tuple:
        return _check_tuple(where, value, hint)
    if _is_config(hint) and isinstance(value, Mapping):
        return hint.from_mapping(value)
    if hint is type(None):
        wrong = value is not None
    elif hint is float:
        wrong = isinstance(value, bool) or not isinstance(value, int | float)
        try:
            value = value if wrong else float(value)
        except OverflowError:
            wrong = True
    elif hint is int:
        wrong = isinstance(value, bool) or not isinstance(value, int)
        value = value if wrong else int(value)
        if not wrong and value.bit_length() > 63:
            # The number itself is not in the message: Python cannot print thousands of digits.
            raise ConfigError(f"{where} must be a whole number of at most 64 bits")
    else:
        wrong = not isinstance(value, hint)
    if wrong:
        raise ConfigError(f"{where} must be {_words(hint)}, got {value!r}")
    return value


def _check_literal(where: str, value: Any, hint: Any) -> Any:
    allowed = typing.get_args(hint)
    # The type must be the same too, because True equals 1.
    if not any(type(value) is type(member) and value == member for member in allowed):
        raise ConfigError(
            f"{where} must be one of {', '.join(map(repr, allowed))}, got {value!r}"
            f"{nearest(str(value), map(str, allowed))}"
        )
    return value


def _check_union(where: str, value: Any, hint: Any) -> Any:
    members = [member for member in typing.get_args(hint) if member is not type(None)]
    if value is None and len(members) < len(typing.get_args(hint)):
        return None
    configs = [member for member in members if _is_config(member)]
    if len(configs) == 1 and isinstance(value, Mapping):
        return _check(where, value, configs[0])
    # The error about a single list or choice is better than the one about the union.
    if len(members) == 1 and typing.get_origin(members[0]) is not None:
        return _check(where, value, members[0])
    for member in members:
        with contextlib.suppress(ConfigError):
            return _check(where, value, member)
    raise ConfigError(f"{where} must be {_words(hint)}, got {value!r}")


def _check_tuple(where: str, value: Any, hint: Any) -> Any:
    members = typing.get_args(hint)
    if isinstance(value, str) or not isinstance(value, list | tuple):
        raise ConfigError(f"{where} must be a list, got {value!r}")
    if len(members) == 2 and members[1] is Ellipsis:
        members = (members[0],) * len(value)
    if len(members) != len(value):
        raise ConfigError(f"{where} must have {len(members)} entries, got {len(value)}")
    return tuple(
        _check(f"{where}[{index}]", item, member)
        for index, (item, member) in enumerate(zip(value, members, strict=True))
    )


def _check_range(where: str, value: Any, limits: Mapping[str, Any]) -> None:
    if isinstance(value, tuple):
        for index, item in enumerate(value):
            _check_range(f"{where}[{index}]", item, limits)
        return
    if isinstance(value, bool) or not isinstance(value, int | float):
        return
    low, high, above = limits.get("minimum"), limits.get("maximum"), limits.get("above")
    finite = isinstance(value, int) or math.isfinite(value)
    bad = (
        not finite
        or (low is not None and value < low)
        or (high is not None and value > high)
        or (above is not None and value <= above)
    )
    if bad:
        parts = ("" if finite else "finite", _range_words(limits))
        allowed = " and ".join(part for part in parts if part)
        raise ConfigError(f"{where} must be {allowed}, got {value!r}")


def _range_words(limits: Mapping[str, Any]) -> str:
    parts = (("at least", "minimum"), ("above", "above"), ("at most", "maximum"))
    return " and ".join(
        f"{word} {limits[name]}" for word, name in parts if limits.get(name) is not None
    )


def _words(hint: Any) -> str:
    names = {int: "a whole number", float: "a number", bool: "true or false", str: "text"}
    if typing.get_origin(hint) in (typing.Union, types.UnionType):
        return " or ".join(_words(member) for member in typing.get_args(hint))
    if hint is type(None):
        return "nothing"
    if typing.get_origin(hint) is Literal:
        return f"one of {', '.join(map(repr, typing.get_args(hint)))}"
    if typing.get_origin(hint) is tuple:
        return "a list"
    if _is_config(hint):
        return f"a mapping with the keys of {hint.__name__}"
    return names.get(hint, getattr(hint, "__name__", str(hint)))
