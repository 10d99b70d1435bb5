from __future__ import annotations

import json
import os
import subprocess
import sys
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

from esper.leyline.errors import CheckpointError
from esper.nissa.folder import GROWING, TRAINING, Checkpoints, read_manifest, resume_command
from esper.tamiyo.controllers import load_policy, make_controller, new_policy
from esper.tamiyo.controllers.policy_file import Policy, find_policy, save_policy
from esper.tamiyo.networks.config import PolicyConfig
from esper.utils.storage import save_tree
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
        patch.setattr("esper.utils.files._write_bytes", refuse)
        with pytest.raises(CheckpointError, match="No space left"):
            save(checkpoints, policy, 2)
    assert number_of(checkpoints.load()) == 1


# ---------------------------------------------------------------------------------- what they say


def test_a_run_its_checkpoints_and_its_best_say_what_they_are(
    tmp_path: Path, policy: Policy
) -> None:
    checkpoints = Checkpoints(tmp_path, TRAINING)
    save(checkpoints, policy, 1, 2)
    save_policy(checkpoints.best, policy, meta={"round": 1})
    for path, kind, number in (
        (tmp_path, "training run", 2),
        (checkpoints.latest, "training run", 2),
        (checkpoints.previous / "state", "training run", 1),
        (checkpoints.previous / "policy", "policy", None),
        (checkpoints.best, "policy", 1),
    ):
        told = read_manifest(path)
        assert (told.kind, told.round) == (kind, number)
        assert (told.path / "manifest.json").is_file()
    with pytest.raises(CheckpointError, match=r"manifest.json is missing"):
        read_manifest(checkpoints.folder)


def test_pytorch_is_not_loaded_to_read_a_manifest(tmp_path: Path, policy: Policy) -> None:
    save(Checkpoints(tmp_path, TRAINING), policy, 1)
    program = (
        "import sys, esper\n"
        "print(esper.read_manifest(sys.argv[1]).round)\n"
        "assert not {'torch', 'numpy', 'safetensors'} & set(sys.modules)\n"
    )
    command = [sys.executable, "-c", program, str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout) == (0, "1\n"), done.stderr


# ------------------------------------------------------------------------------------- old formats

OLD_MANIFEST = {
    "format": "esper-state",
    "layout": 1,
    "kind": "training run",
    "version": 1,
    "esper": "0.1.0",
    "created": "2026-01-01T00:00:00+00:00",
    "meta": {},
    "files": {},
    "checksum": "0" * 64,
}


@pytest.mark.parametrize("place", ["state", "."], ids=["training", "growing"])
def test_a_checkpoint_of_the_old_format_is_refused_in_one_line(tmp_path: Path, place: str) -> None:
    checkpoints = Checkpoints(tmp_path, TRAINING if place == "state" else GROWING)
    folder = checkpoints.latest / place
    folder.mkdir(parents=True)
    (folder / "manifest.json").write_text(json.dumps(OLD_MANIFEST))
    for attempt in (checkpoints.load, checkpoints.refuse_other_format):
        with pytest.raises(CheckpointError, match=r"saved by an older Esper \(layout 1.*0\.1\.0"):
            attempt()


@pytest.mark.parametrize(("kind", "version"), [("training run", 1), ("growing run", 3)])
def test_a_checkpoint_of_another_kind_or_version_is_refused(
    tmp_path: Path, kind: str, version: int
) -> None:
    checkpoints = Checkpoints(tmp_path, TRAINING)
    save_tree(checkpoints.latest / "state", {"a": 1}, kind=kind, version=version)
    with pytest.raises(
        CheckpointError, match=r"of version 1, but|where a 'training run' is needed"
    ):
        checkpoints.load()


def test_a_path_with_spaces_is_quoted() -> None:
    assert resume_command("my runs/a", TRAINING) == "esper train --resume --out 'my runs/a'"
    assert resume_command("r", GROWING, "previous") == "esper grow --resume --from previous --out r"
