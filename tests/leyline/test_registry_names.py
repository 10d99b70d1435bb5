import sys
from types import ModuleType

import pytest

from esper.leyline.registry import find_in


def test_a_name_is_looked_up_once_and_then_part_of_the_package(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    package = ModuleType("some_package")
    monkeypatch.setitem(sys.modules, "some_package", package)
    find = find_in("some_package", {"math": ("pi",)})
    assert not hasattr(package, "pi")
    assert find("pi") == pytest.approx(3.14159, abs=1e-5)
    assert package.pi == find("pi")


def test_an_unknown_name_is_refused_as_python_does() -> None:
    with pytest.raises(AttributeError, match="module 'esper' has no attribute 'nothing'"):
        find_in("esper", {})("nothing")
