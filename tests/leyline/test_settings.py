from __future__ import annotations

from dataclasses import dataclass

import pytest

from esper.leyline.config import Config, option
from esper.leyline.errors import ConfigError, UsageError
from esper.leyline.settings import parse_settings, split_settings, with_settings


def test_values_are_yaml() -> None:
    found = parse_settings(["a.b=0.1", "c=[x, y]", " d = true", "e="])
    assert found == {"a.b": 0.1, "c": ["x", "y"], "d": True, "e": None}


@pytest.mark.parametrize("setting", ["nothing", "=1", " =1"])
def test_what_is_no_setting_shows_an_example(setting: str) -> None:
    with pytest.raises(UsageError, match=r"as in ppo\.clip=0\.1; got"):
        parse_settings([setting])


def test_a_value_that_cannot_be_read() -> None:
    with pytest.raises(UsageError, match=r"the value of 'a=\[1' cannot be read"):
        parse_settings(["a=[1"])


def test_commas_in_brackets_do_not_separate() -> None:
    assert split_settings("a=1,b=[x,{y: 1,z: 2}],c=3") == ["a=1", "b=[x,{y: 1,z: 2}]", "c=3"]


@dataclass(frozen=True, kw_only=True)
class Inner(Config):
    size: int = option(1, "A size.", minimum=1)


@dataclass(frozen=True, kw_only=True)
class Outer(Config):
    inner: Inner = option(Inner, "What is inside.")
    names: tuple[str, ...] = option((), "Names.")


def test_settings_reach_into_a_configuration() -> None:
    changed = with_settings(Outer(), {"inner.size": 3, "names": ["a"]})
    assert changed == Outer(inner=Inner(size=3), names=("a",))


@pytest.mark.parametrize(
    ("key", "words"),
    [
        ("inner.sise", "there is no setting 'inner.sise', did you mean 'inner.size'"),
        ("inner.size.more", "there is no setting"),
        ("other.size", "there is no setting"),
    ],
)
def test_a_setting_that_is_not_there(key: str, words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        with_settings(Outer(), {key: 1})


def test_a_changed_setting_is_checked() -> None:
    with pytest.raises(ConfigError, match="at least 1"):
        with_settings(Outer(), {"inner.size": 0})
