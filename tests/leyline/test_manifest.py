"""What a saved state says of itself, read without its tensors and without PyTorch."""

from __future__ import annotations

import hashlib
import json
import subprocess
import sys
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest
import torch

from esper._version import __version__
from esper.leyline.errors import CheckpointError
from esper.leyline.manifest import MANIFEST_FILE, TENSORS_FILE, TREE_FILE, read_manifest
from esper.leyline.storage import save_tree


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
        "import sys; from esper.leyline.manifest import read_manifest\n"
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
