from __future__ import annotations

from pathlib import Path

import pytest

from esper.leyline.controller import Controller, ControllerContext
from esper.leyline.errors import CheckpointError, UnknownNameError, UsageError
from esper.tamiyo.controllers import (
    CONTROLLERS,
    HeuristicController,
    LearnedController,
    RandomController,
    WaitController,
    make_controller,
    new_policy,
    register_controller,
    save_policy,
)
from esper.tamiyo.controllers.heuristic import HeuristicConfig
from esper.tamiyo.networks.config import PolicyConfig
from esper.utils.storage import save_tree
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


@pytest.mark.parametrize("as_text", [True, False])
def test_a_path_is_the_folder_of_a_policy(tmp_path: Path, as_text: bool) -> None:
    save_policy(tmp_path / "policy", new_policy(PolicyConfig(lstm_hidden_dim=16)))
    path = tmp_path / "policy"
    controller = make_controller(str(path) if as_text else path, CONTEXT)
    assert isinstance(controller, LearnedController)
    assert not controller.greedy
    greedy = make_controller(f"greedy:{path}", CONTEXT)
    assert isinstance(greedy, LearnedController)
    assert greedy.greedy


def test_a_path_without_a_policy_says_so(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="is no saved state") as error:
        make_controller(tmp_path, CONTEXT)
    assert str(tmp_path) in one_line(error)
    with pytest.raises(UsageError, match="there is no saved state at") as error:
        make_controller(str(tmp_path / "nowhere"), CONTEXT)
    one_line(error)
    save_tree(tmp_path / "garden", {}, kind="garden", version=1)
    with pytest.raises(CheckpointError, match="where a 'policy' is needed") as error:
        make_controller(tmp_path / "garden", CONTEXT)
    one_line(error)


@pytest.mark.parametrize("spec", ["learned", "learned:", "greedy"])
def test_a_learned_controller_needs_a_folder(spec: str) -> None:
    with pytest.raises(UsageError, match="needs the folder of a policy") as error:
        make_controller(spec, CONTEXT)
    one_line(error)


@pytest.mark.parametrize("spec", ["wait:1", "random:7", "wait:"])
def test_an_argument_nobody_takes(spec: str) -> None:
    with pytest.raises(UsageError, match="takes no argument") as error:
        make_controller(spec, CONTEXT)
    one_line(error)


def test_settings_follow_the_colon() -> None:
    controller = make_controller("heuristic:plateau_epochs=7,rotation=[norm, lora]", CONTEXT)
    assert isinstance(controller, HeuristicController)
    assert controller.config == HeuristicConfig(plateau_epochs=7, rotation=("norm", "lora"))


@pytest.mark.parametrize(
    ("name", "text"),
    [("tuned.json", '{"plateau_epochs": 7}'), ("tuned.yaml", "plateau_epochs: 7\n")],
)
def test_settings_may_lie_in_a_file(tmp_path: Path, name: str, text: str) -> None:
    (tmp_path / name).write_text(text)
    controller = make_controller(f"heuristic:{tmp_path / name}", CONTEXT)
    assert isinstance(controller, HeuristicController)
    assert controller.config.plateau_epochs == 7


@pytest.mark.parametrize(
    ("spec", "words"),
    [
        ("heuristic:fast", "takes settings or a file of them, got 'fast'"),
        ("heuristic:", "takes settings or a file of them"),
        ("heuristic:plateau=3", "has no key 'plateau', did you mean 'plateau_epochs'?"),
        ("heuristic:plateau_epochs=soon", "plateau_epochs must be a whole number"),
        ("periodic:every=0", "every must be at least 1"),
        ("plateau:patience=5,", "a setting is KEY=VALUE"),
    ],
)
def test_settings_that_are_wrong(spec: str, words: str) -> None:
    with pytest.raises(UsageError, match=words) as error:
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
