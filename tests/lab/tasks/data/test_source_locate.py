"""Where data is looked for, and what is said when it is not there."""

from __future__ import annotations

from pathlib import Path

import pytest

from esper.lab.tasks.data.source import DataSet, Found, Layout, Source, data_roots, existing, search
from esper.leyline.errors import DataError

PAIR = Layout("pair files", (("a.bin", "a.dat"), ("b.bin",)), ("pair",))
VAGUE = Layout("vague files", (("a.bin",),), ("vague",), is_telling=False)


def pairs(name: str, how_to_get: str) -> DataSet:
    def read(found: Found) -> Source:
        raise AssertionError("nothing is read while it is looked for")

    return DataSet(name, (PAIR,), how_to_get, read)


def fill(folder: Path, *names: str) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    for name in names:
        (folder / name).touch()
    return folder


def test_the_environment_comes_first(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("ESPER_DATA", raising=False)
    assert data_roots()[:3] == (
        tmp_path / "data",
        tmp_path / "shared" / "data",
        tmp_path.parent / "shared" / "data",
    )
    monkeypatch.setenv("ESPER_DATA", str(tmp_path / "mine"))
    assert data_roots()[0] == tmp_path / "mine"


def test_roots_are_searched_in_order(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("ESPER_DATA", raising=False)
    beside = fill(tmp_path / "shared" / "data" / "pair", "a.bin", "b.bin")
    assert pairs("pair", "get it").find().folder == beside
    near = fill(tmp_path / "data", "a.dat", "b.bin")
    assert pairs("pair", "get it").find().files == (near / "a.dat", near / "b.bin")
    mine = fill(tmp_path / "mine", "a.bin", "b.bin")
    monkeypatch.setenv("ESPER_DATA", str(mine))
    assert pairs("pair", "get it").find().folder == mine


def test_an_explicit_path_is_the_only_place(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("ESPER_DATA", str(fill(tmp_path / "elsewhere", "a.bin", "b.bin")))
    empty = fill(tmp_path / "empty")
    with pytest.raises(DataError, match="was not found") as caught:
        pairs("pair", "get it").find(empty)
    assert str(empty) in str(caught.value)
    assert "elsewhere" not in str(caught.value)


def test_a_file_stands_for_its_folder(tmp_path: Path) -> None:
    folder = fill(tmp_path / "x", "a.bin", "b.bin")
    assert pairs("pair", "get it").find(folder / "b.bin").folder == folder


def test_missing_says_what_where_and_how(no_data: Path) -> None:
    with pytest.raises(DataError) as caught:
        pairs("Pairs", "get it from the shop").find()
    message = str(caught.value)
    assert "\n" not in message
    for part in ("Pairs was not found", "a.bin … b.bin", str(no_data), "from the shop", "--data"):
        assert part in message


def test_incomplete_names_the_missing_file(tmp_path: Path) -> None:
    folder = fill(tmp_path / "pair", "a.bin")
    with pytest.raises(DataError, match=r"lack b\.bin") as caught:
        pairs("Pairs", "get it").find(tmp_path)
    assert str(folder) in str(caught.value)


def test_vague_names_need_the_right_folder_or_the_user(tmp_path: Path) -> None:
    fill(tmp_path, "a.bin")
    assert search((VAGUE,), tmp_path, is_explicit=False)[0] == []
    assert search((VAGUE,), tmp_path, is_explicit=True)[0][0].folder == tmp_path
    named = fill(tmp_path / "vague", "a.bin")
    assert search((VAGUE,), named, is_explicit=False)[0][0].folder == named
    assert search((VAGUE,), tmp_path, is_explicit=False)[0][0].folder == named


def test_existing(tmp_path: Path) -> None:
    assert existing(str(tmp_path)) == tmp_path
    with pytest.raises(DataError, match="does not exist"):
        existing(tmp_path / "nowhere")


def test_an_unreadable_path(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = fill(tmp_path / "pair", "a.bin", "b.bin")
    monkeypatch.setattr("os.access", lambda path, mode: Path(path).name != "b.bin")
    with pytest.raises(DataError, match=r"b\.bin may not be read by this user"):
        pairs("pair", "get it").find(folder)
