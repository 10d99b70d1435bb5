"""Modules of users, named as Python names them or by their files."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from esper.leyline.errors import UsageError
from esper.utils.process import find_module, is_file_name


@pytest.fixture(autouse=True)
def own_path(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))


def test_a_file_is_imported_from_its_folder_and_a_name_from_the_current_one(tmp_path: Path) -> None:
    (tmp_path / "nets").mkdir()
    (tmp_path / "nets" / "net_in_a_file.py").touch()
    assert find_module("nets/net_in_a_file.py") == "net_in_a_file"
    assert sys.path[0] == str(tmp_path / "nets")
    assert find_module("some.module") == "some.module"
    assert sys.path[0] == str(tmp_path)
    assert all(map(is_file_name, ("a.py", "a/b")))
    assert not any(map(is_file_name, ("a.b", "a")))


@pytest.mark.parametrize(
    ("name", "problem"),
    [
        ("gone.py", "there is no such file"),
        ("two words.py", "'two words' cannot be the name of a module"),
        ("json.py", r"a module 'json' exists already \(.*\); rename the file"),
    ],
)
def test_a_file_that_cannot_be_imported_is_refused(tmp_path: Path, name: str, problem: str) -> None:
    if name != "gone.py":
        (tmp_path / name).touch()
    with pytest.raises(UsageError, match=problem):
        find_module(str(tmp_path / name))
