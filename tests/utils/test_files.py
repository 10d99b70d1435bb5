from __future__ import annotations

import os
from pathlib import Path

import pytest

from esper.leyline.errors import CheckpointError
from esper.utils.files import append_to, atomic_write_bytes, atomic_write_text, read_folder

pytestmark = pytest.mark.skipif(os.name == "nt", reason="links need rights on Windows")


@pytest.fixture
def precious(tmp_path: Path) -> Path:
    """A file of the user's outside the folder that is written to."""
    path = tmp_path / "bashrc"
    path.write_text("precious")
    (tmp_path / "run").mkdir()
    return path


@pytest.mark.parametrize("exists", [True, False], ids=["to a file", "to nothing"])
def test_nothing_is_written_through_a_link(tmp_path: Path, precious: Path, exists: bool) -> None:
    target = precious if exists else tmp_path / "new"
    link = tmp_path / "run" / "report.html"
    link.symlink_to(target)
    for write in (
        lambda: atomic_write_text(link, "x"),
        lambda: atomic_write_bytes(link, b"x"),
        lambda: append_to(link),
    ):
        with pytest.raises(CheckpointError, match=f"it is a link to {target}, and nothing"):
            write()
    assert precious.read_text() == "precious"
    assert not (tmp_path / "new").exists()
    assert os.listdir(tmp_path / "run") == ["report.html"]


def test_a_link_among_the_folders_before_is_the_users_own(tmp_path: Path, precious: Path) -> None:
    (tmp_path / "short").symlink_to("run")
    atomic_write_text(tmp_path / "short" / "a.txt", "one")
    with append_to(tmp_path / "short" / "a.txt") as file:
        assert file.tell() == 3
        file.write(b" two")
    assert (tmp_path / "run" / "a.txt").read_text() == "one two"


def test_nothing_is_added_to_a_file_that_has_another_name(tmp_path: Path, precious: Path) -> None:
    os.link(precious, tmp_path / "run" / "log.txt")
    with pytest.raises(CheckpointError, match="another name elsewhere"):
        append_to(tmp_path / "run" / "log.txt")
    # What is replaced as a whole leaves the other name alone.
    atomic_write_text(tmp_path / "run" / "log.txt", "x")
    assert precious.read_text() == "precious"


def test_a_pipe_keeps_no_writer_waiting(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "log.txt")
    with pytest.raises(OSError, match=r"No such device|not a file"):
        append_to(tmp_path / "log.txt")


def test_a_file_in_an_open_folder_is_found_wherever_the_folder_goes(tmp_path: Path) -> None:
    (tmp_path / "run").mkdir()
    handle = os.open(tmp_path / "run", os.O_RDONLY)
    try:
        os.rename(tmp_path / "run", tmp_path / "moved")
        (tmp_path / "run").mkdir()
        with append_to(tmp_path / "run" / "log.txt", folder=handle) as file:
            file.write(b"line")
    finally:
        os.close(handle)
    assert (tmp_path / "moved" / "log.txt").read_text() == "line"
    assert not (tmp_path / "run" / "log.txt").exists()


def test_a_name_that_cannot_be_is_one_line() -> None:
    with pytest.raises(CheckpointError, match="no name of a file or folder"):
        read_folder(Path("a\0b"), lambda place: place)
    with pytest.raises(CheckpointError, match="no name of a file or folder"):
        atomic_write_text(Path("a\0b") / "c", "x")
