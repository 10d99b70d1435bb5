from __future__ import annotations

import errno
import os
from pathlib import Path
from typing import Any

import pytest
import yaml

from esper.leyline.errors import CheckpointError, UsageError
from esper.nissa.folder import RunFolder

CONFIG = {"task": "digits", "slots": ["r0c0"], "growth": {"epochs": 3, "note": "ü\n[x]"}}


def create(folder: RunFolder, config: dict[str, Any], *, overwrite: bool) -> None:
    """Make a run folder, and let it go."""
    with folder.claim_new(config, overwrite=overwrite) as lock:
        lock.release()


def make_folder(path: Path) -> RunFolder:
    folder = RunFolder(path)
    create(folder, CONFIG, overwrite=False)
    return folder


# ---------------------------------------------------------------------------------------- creating


def test_a_new_folder_holds_the_settings(tmp_path: Path) -> None:
    folder = make_folder(tmp_path / "runs" / "first")
    assert folder.read_config() == CONFIG
    text = (folder.path / "config.yaml").read_text(encoding="utf-8")
    assert list(yaml.safe_load(text)) == list(CONFIG)
    left = sorted(entry.name for entry in folder.path.iterdir())
    assert left == ["config.yaml", "run.db.lock"]


def test_an_empty_folder_may_be_used(tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    assert make_folder(tmp_path / "empty").read_config() == CONFIG


def test_a_folder_in_use_is_refused_and_left_alone(tmp_path: Path) -> None:
    folder = make_folder(tmp_path / "run")
    (folder.path / "checkpoints" / "latest").mkdir(parents=True)
    (folder.path / "config.yaml").write_text("task: other\n")
    with pytest.raises(UsageError, match="not empty; continue it with resume=True, replace"):
        create(folder, CONFIG, overwrite=False)
    assert folder.read_config() == {"task": "other"}
    assert (folder.path / "checkpoints" / "latest").exists()


@pytest.mark.parametrize("overwrite", [False, True])
def test_somebody_elses_folder_is_never_touched(tmp_path: Path, overwrite: bool) -> None:
    (tmp_path / "thesis").mkdir()
    (tmp_path / "thesis" / "chapter.tex").write_text("words")
    with pytest.raises(UsageError, match=r"is not empty|is not a run folder"):
        create(RunFolder(tmp_path / "thesis"), CONFIG, overwrite=overwrite)
    assert [entry.name for entry in (tmp_path / "thesis").iterdir()] == ["chapter.tex"]


def test_overwriting_removes_what_a_run_writes_and_nothing_else(tmp_path: Path) -> None:
    folder = make_folder(tmp_path / "run")
    (folder.path / "checkpoints" / "latest").mkdir(parents=True)
    folder.log("hello")
    own = ("report.html", "summary.json", "grown.onnx", "grown.pt2")
    for name in (*own, "notes.md"):
        (folder.path / name).write_text("old")
    (folder.path / "grown").mkdir()
    (folder.path / "grown" / "manifest.json").write_text("old")
    (folder.path / "mine").mkdir()
    other = RunFolder(folder.path)
    create(other, {"task": "new"}, overwrite=True)
    assert sorted(entry.name for entry in folder.path.iterdir()) == [
        "config.yaml",
        "mine",
        "notes.md",
        "run.db.lock",
    ]
    assert other.read_config() == {"task": "new"}


def test_a_link_is_removed_but_not_what_it_points_to(tmp_path: Path) -> None:
    precious = tmp_path / "precious"
    precious.mkdir()
    (precious / "file").write_text("keep")
    folder = make_folder(tmp_path / "run")
    (folder.path / "grown").symlink_to(precious)
    create(RunFolder(folder.path), CONFIG, overwrite=True)
    assert (precious / "file").read_text() == "keep"
    assert not (folder.path / "grown").exists()


def test_a_file_in_the_way_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("words")
    for path in (tmp_path / "file", tmp_path / "file" / "run"):
        for overwrite in (False, True):
            with pytest.raises(UsageError, match=r"file|folder") as caught:
                create(RunFolder(path), CONFIG, overwrite=overwrite)
            assert "out=..." in str(caught.value)
    assert (tmp_path / "file").read_text() == "words"


@pytest.mark.parametrize("name", ["x" * 300, "a\0b"], ids=["too long", "zero byte"])
def test_a_path_that_cannot_be_is_refused(tmp_path: Path, name: str) -> None:
    with pytest.raises(UsageError, match="cannot create the run folder"):
        create(RunFolder(tmp_path / name), CONFIG, overwrite=False)


def test_a_place_that_is_read_only_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: Any, **__: Any) -> None:
        raise OSError(errno.EROFS, os.strerror(errno.EROFS))

    monkeypatch.setattr(Path, "mkdir", refuse)
    with pytest.raises(UsageError, match="Read-only file system; give a folder you may write to"):
        create(RunFolder(tmp_path / "run"), CONFIG, overwrite=False)


def test_a_folder_that_cannot_be_listed_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: Any) -> None:
        raise PermissionError(errno.EACCES, os.strerror(errno.EACCES))

    monkeypatch.setattr(Path, "iterdir", refuse)
    with pytest.raises(UsageError, match="Permission denied; give a folder you may write to"):
        create(RunFolder(tmp_path), CONFIG, overwrite=False)


# ---------------------------------------------------------------------------------------- settings


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"task: [unclosed", r"config\.yaml cannot be read: "),
        (b"\xff\xfe\x00", r"config\.yaml cannot be read: "),
        (b"- just\n- a list\n", r"config\.yaml is not a mapping of settings"),
        (b"", r"config\.yaml is not a mapping of settings"),
        (b"!!python/object/apply:os.system ['true']", r"config\.yaml cannot be read: "),
    ],
)
def test_damaged_settings_are_named_in_one_line(
    tmp_path: Path, content: bytes, message: str
) -> None:
    folder = make_folder(tmp_path / "run")
    (folder.path / "config.yaml").write_bytes(content)
    with pytest.raises(CheckpointError, match=message) as caught:
        folder.read_config()
    assert "\n" not in str(caught.value)


def test_what_is_no_run_cannot_be_read(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    (tmp_path / "empty").mkdir()
    with pytest.raises(UsageError, match=r"is not a run folder \(it has no config\.yaml\)"):
        RunFolder(tmp_path / "empty").read_config()
    for name in ("missing", "x" * 300):
        with pytest.raises(UsageError, match=r"is not there, so it is not a run folder"):
            RunFolder(tmp_path / name).read_config()
    with pytest.raises(UsageError, match=r"is a file, not a run folder"):
        RunFolder(tmp_path / "file").read_config()


def test_what_was_interrupted_while_it_was_created_can_be_replaced(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "run"

    def die(*_: Any) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr("esper.nissa.folder.atomic_write_text", die)
        with pytest.raises(KeyboardInterrupt):
            create(RunFolder(path), CONFIG, overwrite=False)
    assert make_folder(path).read_config() == CONFIG


def test_a_run_whose_replacement_was_interrupted_can_be_replaced(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = make_folder(tmp_path / "run")
    (folder.path / "checkpoints" / "latest").mkdir(parents=True)
    folder.log("hello")

    def die(*_: Any) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr("esper.nissa.folder.shutil.rmtree", die)
        with pytest.raises(KeyboardInterrupt):
            create(folder, CONFIG, overwrite=True)
    create(folder, {"task": "new"}, overwrite=True)
    assert folder.read_config() == {"task": "new"}


# --------------------------------------------------------------------------------------------- log


def test_the_log_has_one_line_per_entry_with_the_time(tmp_path: Path) -> None:
    folder = make_folder(tmp_path / "run")
    folder.log("first ü")
    folder.log("two\nlines \x1b[31m")
    lines = (folder.path / "log.txt").read_text(encoding="utf-8").splitlines()
    assert len(lines) == 2
    assert lines[0].endswith("Z first ü")
    assert lines[0][:4].isdigit()
    assert "\x1b" not in lines[1]


def test_a_log_that_cannot_be_written_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = make_folder(tmp_path / "run")

    def refuse(*_: Any, **__: Any) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, "open", refuse)
    with pytest.raises(CheckpointError, match=r"cannot write .*log\.txt: No space left on device"):
        folder.log("x")


# ------------------------------------------------------------------------------------------- links


@pytest.mark.skipif(os.name == "nt", reason="links need rights on Windows")
@pytest.mark.parametrize(
    "name",
    [
        *("log.txt", "summary.json", "report.html", "run.db", "run.db-wal", "run.db.lock"),
        *("config.yaml", "tb", "checkpoints", "grown", "tb/events", "checkpoints/latest/state"),
    ],
)
def test_a_run_with_a_link_in_it_is_not_continued(tmp_path: Path, name: str) -> None:
    precious = tmp_path / "precious"
    precious.write_text("task: digits")
    folder = make_folder(tmp_path / "run")
    link = folder.path / name
    link.parent.mkdir(parents=True, exist_ok=True)
    link.unlink(missing_ok=True)
    link.symlink_to(precious)
    refusal = pytest.raises(CheckpointError, match=f"{link}: it is a link to {precious}")
    with refusal, folder.claim_run():
        pass
    assert precious.read_text() == "task: digits"


@pytest.mark.skipif(os.name == "nt", reason="a folder in use cannot be moved there")
def test_the_log_of_another_folder_under_the_same_name_is_left_alone(tmp_path: Path) -> None:
    folder = make_folder(tmp_path / "run")
    with folder.claim() as lock:
        os.rename(folder.path, tmp_path / "moved")
        (tmp_path / "run").mkdir()
        (tmp_path / "run" / "log.txt").write_text("another\n")
        folder.log("mine")
        lock.release()
    assert (tmp_path / "run" / "log.txt").read_text() == "another\n"
    assert (tmp_path / "moved" / "log.txt").read_text().endswith(" mine\n")
