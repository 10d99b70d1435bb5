from __future__ import annotations

from pathlib import Path

import pytest
import yaml

from esper.leyline.errors import UsageError
from esper.nissa.folder import RunFolder, dump_settings

CONFIG = {"task": "digits", "growth": {"epochs": 3, "note": "ü\n[x]"}}


def test_settings_and_log_are_written_and_read(tmp_path: Path) -> None:
    folder = RunFolder(tmp_path / "runs" / "one")
    folder.create(CONFIG, overwrite=False)
    folder.log("hello\nthere")
    assert folder.read_config() == CONFIG
    assert (folder.path / "checkpoints").is_dir()
    (line,) = (folder.path / "log.txt").read_text(encoding="utf-8").splitlines()
    assert line.endswith("Z hello\\x0athere")


def test_a_run_is_replaced_only_on_request_and_only_its_own_files(tmp_path: Path) -> None:
    folder = RunFolder(tmp_path / "one")
    folder.create(CONFIG, overwrite=False)
    (folder.path / "notes.txt").write_text("mine")
    with pytest.raises(UsageError, match="--resume"):
        folder.create({"task": "other"}, overwrite=False)
    folder.create({"task": "other"}, overwrite=True)
    assert folder.read_config() == {"task": "other"}
    assert (folder.path / "notes.txt").read_text() == "mine"


def test_settings_keep_their_order() -> None:
    assert list(yaml.safe_load(dump_settings(CONFIG))) == list(CONFIG)
