from __future__ import annotations

import pytest

from esper.leyline.errors import UsageError
from esper.leyline.settings import parse_settings, split_settings


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
