from __future__ import annotations

import os
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

from esper.leyline.errors import CheckpointError
from esper.leyline.storage import save_tree
from esper.runs.checkpoint import GROWING, TRAINING, Checkpoints, read_manifest, resume_command
from esper.tamiyo.controllers import load_policy, make_controller, new_policy
from esper.tamiyo.controllers.policy_file import Policy, find_policy, save_policy
from esper.tamiyo.networks.config import PolicyConfig
from tests.tamiyo.controllers.scenes import CONTEXT


@pytest.fixture(scope="module")
def policy() -> Policy:
    return new_policy(PolicyConfig(lstm_hidden_dim=8), seed=4)


def save(checkpoints: Checkpoints, policy: Policy, *numbers: int) -> None:
    for number in numbers:
        state = {"number": number, "x": torch.full((3,), float(number))}
        checkpoints.save(state, {"round": number}, {"policy": partial(save_policy, policy=policy)})


def number_of(state: dict[str, Any] | None) -> int:
    assert state is not None
    return int(state["number"])


def test_a_run_without_checkpoints_has_none(tmp_path: Path) -> None:
    assert Checkpoints(tmp_path, TRAINING).load() is None


def test_the_latest_and_the_one_before_are_kept(tmp_path: Path, policy: Policy) -> None:
    checkpoints = Checkpoints(tmp_path, TRAINING)
    save(checkpoints, policy, 1, 2, 3)
    assert number_of(checkpoints.load()) == 3
    assert number_of(checkpoints.load("previous")) == 2
    assert sorted(os.listdir(checkpoints.folder)) == ["latest", "previous"]


def test_a_run_a_checkpoint_and_the_best_are_controllers(tmp_path: Path, policy: Policy) -> None:
    checkpoints = Checkpoints(tmp_path, TRAINING)
    save(checkpoints, policy, 1)
    assert find_policy(tmp_path) == checkpoints.latest / "policy"
    save_policy(checkpoints.best, policy, meta={"round": 7})
    assert find_policy(tmp_path) == checkpoints.best
    weights = policy.network.state_dict()
    for path in (tmp_path, checkpoints.latest, checkpoints.best):
        found = load_policy(path).network.state_dict()
        assert all(torch.equal(found[name], weights[name]) for name in weights)
        controller = make_controller(str(path), CONTEXT)
        controller.reset(2, "cpu")


@pytest.mark.parametrize("harm", ["flip", "cut", "empty", "foreign"])
def test_a_damaged_latest_offers_the_previous(tmp_path: Path, policy: Policy, harm: str) -> None:
    checkpoints = Checkpoints(tmp_path, TRAINING)
    save(checkpoints, policy, 1, 2)
    state = checkpoints.latest / "state"
    tensors = state / "tensors.safetensors"
    data = tensors.read_bytes()
    if harm == "flip":
        tensors.write_bytes(data[:-1] + bytes([data[-1] ^ 1]))
    elif harm == "cut":
        tensors.write_bytes(data[:-4])
    elif harm == "empty":
        for file in state.iterdir():
            file.unlink()
    else:
        for file in state.iterdir():
            file.unlink()
        state.rmdir()
        save_tree(state, {"a": 1}, kind="garden", version=1)
    with pytest.raises(CheckpointError) as caught:
        checkpoints.load()
    message = str(caught.value)
    assert "\n" not in message
    assert str(checkpoints.previous) in message
    assert message.endswith(resume_command(tmp_path, TRAINING, "previous"))
    assert number_of(checkpoints.load("previous")) == 1


def test_nothing_is_offered_where_nothing_is_whole(tmp_path: Path, policy: Policy) -> None:
    checkpoints = Checkpoints(tmp_path, TRAINING)
    save(checkpoints, policy, 1, 2)
    for place in (checkpoints.latest, checkpoints.previous):
        (place / "state" / "tree.json").write_text("{}")
    with pytest.raises(CheckpointError) as caught:
        checkpoints.load()
    assert "--from previous" not in str(caught.value)


class Killed(BaseException):
    """Stands for a signal that nobody can catch."""


@pytest.mark.parametrize("moment", range(12))
def test_a_kill_during_a_save_leaves_a_whole_checkpoint(
    tmp_path: Path, policy: Policy, monkeypatch: pytest.MonkeyPatch, moment: int
) -> None:
    checkpoints = Checkpoints(tmp_path, TRAINING)
    save(checkpoints, policy, 1, 2)
    calls = 0
    with monkeypatch.context() as patch:
        for name in ("rename", "fsync"):
            patch.setattr(os, name, _counting(getattr(os, name)))
        try:
            calls = _die_at(moment, lambda: save(checkpoints, policy, 3))
        except Killed:
            calls = -1
    assert number_of(Checkpoints(tmp_path, TRAINING).load()) in ((3,) if calls >= 0 else (2, 3))
    save(checkpoints, policy, 4)
    assert number_of(checkpoints.load()) == 4
    assert sorted(os.listdir(checkpoints.folder)) == ["latest", "previous"]


_left: list[int] = []


def _counting(real: Any) -> Any:
    def call(*arguments: Any, **named: Any) -> Any:
        if _left:
            _left[0] -= 1
            if _left[0] < 0:
                raise Killed
        return real(*arguments, **named)

    return call


def _die_at(moment: int, action: Any) -> int:
    _left[:] = [moment]
    try:
        action()
        return _left[0]
    finally:
        _left.clear()


def test_a_full_disk_is_named_and_changes_nothing(
    tmp_path: Path, policy: Policy, monkeypatch: pytest.MonkeyPatch
) -> None:
    checkpoints = Checkpoints(tmp_path, TRAINING)
    save(checkpoints, policy, 1)

    def refuse(*arguments: Any, **named: Any) -> None:
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr("esper.leyline.files._write_bytes", refuse)
        with pytest.raises(CheckpointError, match="No space left"):
            save(checkpoints, policy, 2)
    assert number_of(checkpoints.load()) == 1


def test_a_path_with_spaces_is_quoted() -> None:
    assert resume_command("my runs/a", TRAINING) == "esper train --resume --out 'my runs/a'"
    assert resume_command("r", GROWING, "previous") == "esper grow --resume --from previous --out r"
