"""What a saved state says of itself, read without its tensors and without PyTorch."""

from __future__ import annotations

import hashlib
import json
import os
import subprocess
import sys
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest
import torch

from esper._version import __version__
from esper.leyline.errors import CheckpointError
from esper.utils.manifest import (
    MANIFEST_FILE,
    TENSORS_FILE,
    TREE_FILE,
    manifest_checksum,
    read_manifest,
    restoring,
)
from esper.utils.storage import load_tree, save_tree


def save(folder: Path, **meta: object) -> None:
    save_tree(folder, {"x": torch.ones(5)}, kind="garden", version=3, meta=meta)


def test_everything_about_a_state_is_told(tmp_path: Path) -> None:
    save(tmp_path / "state", epoch=7, best=float("inf"))
    told = read_manifest(tmp_path / "state")
    assert (told.kind, told.version, told.epoch, told.round) == ("garden", 3, 7, None)
    assert told.meta == {"epoch": 7, "best": float("inf")}
    assert timedelta(0) <= datetime.now(UTC) - told.created < timedelta(minutes=5)
    assert told.software["esper"] == __version__
    assert told.software["torch"] == torch.__version__
    for name in (TENSORS_FILE, TREE_FILE):
        data = (tmp_path / "state" / name).read_bytes()
        assert told.sizes[name] == len(data)
        assert told.checksums[name] == hashlib.sha256(data).hexdigest()
    assert told.size == sum(told.sizes.values())
    plain = told.to_mapping()
    assert plain["epoch"] == 7
    assert plain["files"][TREE_FILE]["size"] == told.sizes[TREE_FILE]


def test_the_other_files_are_not_needed(tmp_path: Path) -> None:
    save(tmp_path / "state", round=2)
    (tmp_path / "state" / TENSORS_FILE).unlink()
    assert read_manifest(tmp_path / "state").round == 2


def test_a_manifest_that_was_changed_is_refused(tmp_path: Path) -> None:
    save(tmp_path / "state")
    path = tmp_path / "state" / MANIFEST_FILE
    content = json.loads(path.read_text())
    path.write_text(json.dumps({**content, "version": 4}))
    with pytest.raises(CheckpointError, match=r"damaged: manifest\.json does not match"):
        read_manifest(tmp_path / "state")


def test_pytorch_is_not_loaded(tmp_path: Path) -> None:
    save(tmp_path / "state", epoch=7)
    program = (
        "import sys; from esper.utils.manifest import read_manifest\n"
        "print(read_manifest(sys.argv[1]).epoch)\n"
        "assert not {'torch', 'numpy', 'safetensors'} & set(sys.modules)\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", program, tmp_path / "state"],
        capture_output=True,
        text=True,
        check=False,
    )
    assert (done.returncode, done.stdout) == (0, "7\n"), done.stderr


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("kind", 3),
        ("version", "3"),
        ("version", True),
        ("created", 12),
        ("created", "yesterday"),
        ("software", ["torch"]),
        ("software", {"torch": 2}),
        ("files", []),
        ("files", {"tree.json": 5}),
        ("files", {"tree.json": {"size": "5", "sha256": "x"}}),
        ("meta", []),
        ("meta", {"epoch": "seven"}),
        ("meta", {"$tensor": "x"}),
    ],
)
def test_a_manifest_of_another_shape_is_damaged_whatever_its_checksum(
    tmp_path: Path, name: str, value: object
) -> None:
    save(tmp_path / "state")
    path = tmp_path / "state" / MANIFEST_FILE
    manifest = {**json.loads(path.read_bytes()), name: value}
    manifest["checksum"] = manifest_checksum(manifest)
    path.write_text(json.dumps(manifest))
    with pytest.raises(CheckpointError, match=r"is damaged: manifest\.json cannot be read"):
        read_manifest(tmp_path / "state")


def test_a_file_larger_than_memory_is_one_line(tmp_path: Path) -> None:
    save(tmp_path / "state")
    tensors = tmp_path / "state" / TENSORS_FILE
    size = 2**45
    with tensors.open("r+b") as file:
        try:
            file.truncate(size)
        except OSError:
            pytest.skip("the file system has no files of that size")
    path = tmp_path / "state" / MANIFEST_FILE
    manifest = json.loads(path.read_bytes())
    manifest["files"][TENSORS_FILE]["size"] = size
    manifest["checksum"] = manifest_checksum(manifest)
    path.write_text(json.dumps(manifest))
    with pytest.raises(CheckpointError, match=r"has 32,768\.0 GiB, and .* of memory are free"):
        load_tree(tmp_path / "state", kind="garden", version=3)


def test_files_that_are_none_or_too_large_are_refused_without_reading(tmp_path: Path) -> None:
    save(tmp_path / "state")
    tensors = tmp_path / "state" / TENSORS_FILE
    tensors.unlink()
    tensors.symlink_to("/dev/zero")
    with pytest.raises(CheckpointError, match="has 0 bytes instead of"):
        load_tree(tmp_path / "state", kind="garden", version=3)
    manifest = tmp_path / "state" / MANIFEST_FILE
    manifest.unlink()
    os.mkfifo(manifest)
    with pytest.raises(CheckpointError, match="pipe or a device"):
        read_manifest(tmp_path / "state")
    manifest.unlink()
    with manifest.open("wb") as file:
        file.truncate(2**25)
    with pytest.raises(CheckpointError, match="is larger than 16 MiB"):
        read_manifest(tmp_path / "state")


@pytest.mark.parametrize("error", [KeyError("x"), TypeError("x"), RuntimeError("x\ny")])
def test_a_state_that_does_not_fit_is_one_line(tmp_path: Path, error: Exception) -> None:
    with (
        pytest.raises(CheckpointError, match=r"does not fit .*use another copy") as caught,
        restoring(tmp_path),
    ):
        raise error
    assert "\n" not in str(caught.value)


def test_the_root_is_no_saved_state() -> None:
    with pytest.raises(CheckpointError, match="is no saved state"):
        read_manifest(Path("/"))
