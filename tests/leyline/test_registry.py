import importlib.metadata
import sys
from collections.abc import Callable
from types import ModuleType

import pytest

from esper.leyline import registry as module
from esper.leyline.errors import EsperWarning, UnknownNameError, UsageError
from esper.leyline.registry import Registry, find_in


class Point:
    """Stands in for an installed entry point."""

    def __init__(self, name: str, load: Callable[[], object]) -> None:
        self.name = name
        self.value = f"package.{name}"
        self.load = load


@pytest.fixture
def installed(monkeypatch: pytest.MonkeyPatch) -> dict[str, list[Point]]:
    """Entry points by group; whatever is really installed is hidden."""
    points: dict[str, list[Point]] = {}
    monkeypatch.setattr(module, "entry_points", lambda group: points.get(group, []))
    return points


def test_items_come_back_under_their_names_in_order(installed: dict[str, list[Point]]) -> None:
    things: Registry[int] = Registry("thing")
    assert things.register("zebra", 1) == 1
    things.register("ant_2", 2)
    assert things.get("zebra") == 1
    assert things.names() == ("zebra", "ant_2")
    assert list(things) == ["zebra", "ant_2"]
    assert len(things) == 2
    assert "ant_2" in things
    assert "bee" not in things


def test_unknown_name_suggests_the_nearest(installed: dict[str, list[Point]]) -> None:
    things: Registry[int] = Registry("blueprint")
    things.register("conv_light", 1)
    with pytest.raises(UnknownNameError) as caught:
        things.get("conv_ligth")
    assert str(caught.value) == (
        "unknown blueprint 'conv_ligth', did you mean 'conv_light'? known: conv_light; "
        "one of your own is known once its module is imported (--import FILE)"
    )


@pytest.mark.parametrize("name", ["", "Conv", "conv-light", "2conv", "conv light", "conv\n", None])
def test_bad_names_are_refused(name: str, installed: dict[str, list[Point]]) -> None:
    things: Registry[int] = Registry("thing")
    with pytest.raises(UsageError, match="thing name must be lower_snake"):
        things.register(name, 1)
    assert len(things) == 0


def test_a_taken_name_is_refused_and_keeps_its_item(installed: dict[str, list[Point]]) -> None:
    things: Registry[int] = Registry("thing")
    things.register("a", 1)
    with pytest.raises(UsageError, match="'a' is already registered"):
        things.register("a", 2)
    assert things.get("a") == 1


def test_unregister_frees_the_name(installed: dict[str, list[Point]]) -> None:
    things: Registry[int] = Registry("thing")
    things.register("a", 1)
    things.unregister("a")
    things.register("a", 2)
    assert things.get("a") == 2
    with pytest.raises(UnknownNameError, match="unknown thing 'b'"):
        things.unregister("b")


def test_plug_ins_are_discovered_once_and_only_when_needed(
    installed: dict[str, list[Point]],
) -> None:
    things: Registry[int] = Registry("big thing", "esper.big_things")
    loads: list[str] = []

    def load() -> None:
        loads.append("b")
        things.register("b", 2)

    installed["esper.big_things"] = [Point("b", load)]
    things.register("a", 1)
    assert things.get("a") == 1
    assert loads == []
    assert things.get("b") == 2
    assert things.names() == ("a", "b")
    assert "c" not in things
    assert loads == ["b"]


def test_a_broken_plug_in_is_named_and_the_others_still_load(
    installed: dict[str, list[Point]],
) -> None:
    things: Registry[int] = Registry("thing")

    def fail() -> None:
        raise ImportError("no module named moon")

    installed["esper.things"] = [
        Point("broken", fail),
        Point("good", lambda: things.register("good", 1)),
    ]
    with pytest.warns(EsperWarning, match=r"'broken' \(package.broken\).*no module named moon"):
        assert things.get("good") == 1


def test_groups_are_those_of_real_entry_points() -> None:
    assert module.entry_points is importlib.metadata.entry_points


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
