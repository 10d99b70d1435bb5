from __future__ import annotations

from pathlib import Path

import pytest

from esper.leyline.controller import Controller, ControllerContext
from esper.leyline.errors import UnknownNameError, UsageError
from esper.tamiyo import (
    CONTROLLERS,
    HeuristicController,
    RandomController,
    WaitController,
    make_controller,
    register_controller,
)
from tests.tamiyo.controllers.scenes import CONTEXT


def one_line(error: pytest.ExceptionInfo[BaseException]) -> str:
    text = str(error.value)
    assert "\n" not in text
    return text


def test_names() -> None:
    assert set(CONTROLLERS) >= {"wait", "random", "heuristic", "schedule"}
    assert isinstance(make_controller("wait", CONTEXT), WaitController)
    assert isinstance(make_controller("random", CONTEXT), RandomController)
    assert isinstance(make_controller("heuristic", CONTEXT), HeuristicController)


def test_an_object_passes_through() -> None:
    controller = WaitController()
    assert make_controller(controller, CONTEXT) is controller


@pytest.mark.parametrize("spec", [None, 3, object(), WaitController])
def test_anything_else_is_refused(spec: object) -> None:
    with pytest.raises(UsageError, match="must be a name or an object") as error:
        make_controller(spec, CONTEXT)
    one_line(error)


def test_unknown_name_suggests_the_nearest() -> None:
    with pytest.raises(UnknownNameError) as error:
        make_controller("heuristik", CONTEXT)
    text = one_line(error)
    assert "unknown controller 'heuristik', did you mean 'heuristic'?" in text
    assert "schedule" in text


@pytest.mark.parametrize("spec", ["pretrained", "pretrained:small"])
def test_pretrained_says_what_to_use(spec: str) -> None:
    with pytest.raises(UsageError) as error:
        make_controller(spec, CONTEXT)
    text = one_line(error)
    assert "no pretrained controller ships with this version" in text
    assert "'heuristic'" in text


@pytest.mark.parametrize("as_text", [True, False])
def test_a_path_says_that_learned_controllers_cannot_be_loaded(
    tmp_path: Path, as_text: bool
) -> None:
    with pytest.raises(UsageError, match="cannot load learned controllers") as error:
        make_controller(str(tmp_path) if as_text else tmp_path, CONTEXT)
    assert str(tmp_path) in one_line(error)


@pytest.mark.parametrize("spec", ["wait:1", "random:7", "heuristic:fast", "wait:"])
def test_an_argument_nobody_takes(spec: str) -> None:
    with pytest.raises(UsageError, match="takes no argument") as error:
        make_controller(spec, CONTEXT)
    one_line(error)


@pytest.mark.parametrize("spec", ["schedule", "schedule:"])
def test_schedule_needs_a_file(spec: str) -> None:
    with pytest.raises(UsageError, match="needs a file") as error:
        make_controller(spec, CONTEXT)
    one_line(error)


def test_register_and_build_with_an_argument() -> None:
    seen: list[tuple[str | None, ControllerContext]] = []

    @register_controller("test_registered")
    class Registered(WaitController):
        @classmethod
        def build(cls, argument: str | None, context: ControllerContext) -> Registered:
            seen.append((argument, context))
            return cls()

    try:
        assert isinstance(make_controller("test_registered:a:b", CONTEXT), Controller)
        make_controller("test_registered", CONTEXT)
        assert seen == [("a:b", CONTEXT), (None, CONTEXT)]
        with pytest.raises(UsageError, match="already registered"):
            register_controller("test_registered")(Registered)
    finally:
        CONTROLLERS.unregister("test_registered")


def test_register_refuses_what_is_no_controller() -> None:
    class NoBuild:
        def act(self) -> None: ...

    with pytest.raises(UsageError, match="missing build, reset, state_dict, load_state_dict"):
        register_controller("no_build")(NoBuild)
    assert "no_build" not in CONTROLLERS
