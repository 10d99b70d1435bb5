from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Self

import pytest

from esper.leyline.config import Config, option
from esper.leyline.errors import ConfigError, UsageError
from esper.utils.settings import (
    SettingChanges,
    change_settings,
    changed_settings,
    flat_settings,
    is_within,
    parse_settings,
    split_settings,
)


@dataclass(frozen=True, kw_only=True)
class Inner(Config):
    rate: float = option(0.1, "A rate.")
    names: tuple[str, ...] = option((), "Names.")


@dataclass(frozen=True, kw_only=True)
class Outer(Config):
    inner: Inner = option(Inner, "Parts.")
    size: int = option(1, "A size.")
    double: int = option(2, "Twice the size, always.")

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.double != 2 * self.size:
            raise ConfigError("double is twice the size")

    def changed(self, **changes: Any) -> Self:
        if "size" in changes:
            changes.setdefault("double", 2 * changes["size"])
        return super().changed(**changes)


def test_a_setting_is_changed_by_its_dotted_key_or_by_a_mapping() -> None:
    changed = change_settings(Outer(), {"inner.rate": 0.5, "inner": {"names": ["a"]}})
    assert changed == Outer(inner=Inner(rate=0.5, names=("a",)))


def test_what_must_agree_changes_with_it() -> None:
    assert change_settings(Outer(), {"size": 3}).double == 6


def test_settings_that_agree_only_together_may_come_in_any_order() -> None:
    for settings in ({"double": 6, "size": 3}, {"size": 3, "double": 6}):
        assert change_settings(Outer(), settings) == Outer(size=3, double=6)
    with pytest.raises(ConfigError, match="double is twice the size"):
        change_settings(Outer(), {"double": 6})


def test_commas_in_brackets_do_not_separate() -> None:
    assert split_settings("a=1,b=[x,{y: 1,z: 2}],c=3") == ["a=1", "b=[x,{y: 1,z: 2}]", "c=3"]


def test_a_changed_setting_is_checked() -> None:
    with pytest.raises(ConfigError, match=r"Outer.size must be a whole number"):
        change_settings(Outer(), {"size": "large"})


def test_settings_are_read_as_yaml() -> None:
    assert parse_settings(["a.b=[1, x]", " c =", "d=a=b"]) == {
        "a.b": [1, "x"],
        "c": None,
        "d": "a=b",
    }


@pytest.mark.parametrize(
    "text", ["a", "=1", "a=[", "a=2024-99-99", "a=!!int ''", f"a={'9' * 5000}", "a=&x [*x]"]
)
def test_a_setting_that_cannot_be_read_is_one_line(text: str) -> None:
    with pytest.raises(UsageError, match=r"KEY=VALUE|cannot be read"):
        parse_settings([text])


@pytest.mark.parametrize(
    ("key", "why"),
    [("innr.rate", "did you mean 'inner'"), ("inner.rat", "'rate'"), ("size.x", "no parts")],
)
def test_an_unknown_key_names_the_nearest(key: str, why: str) -> None:
    with pytest.raises(ConfigError, match=why):
        change_settings(Outer(), {key: 1})


def test_two_settings_are_compared_key_by_key() -> None:
    before = {"a": {"b": 1, "c": [1]}, "d": 2}
    assert flat_settings(before) == {"a.b": 1, "a.c": [1], "d": 2}
    assert changed_settings(before, {"a": {"b": 1, "c": [2]}, "e": 3}) == {
        "a.c": ([1], [2]),
        "d": (2, None),
        "e": (None, 3),
    }
    assert SettingChanges({"d": (2, None)}).describe() == "d 2 -> None"
    assert not SettingChanges()


def test_a_key_lies_within_itself_and_its_parents() -> None:
    assert is_within("a.b", ("a",))
    assert is_within("a", ("a",))
    assert not is_within("ab", ("a",))
