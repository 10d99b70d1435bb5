from __future__ import annotations

from pathlib import Path

import pytest

from tools.pages.__main__ import DOCS, PAGES, main


@pytest.mark.parametrize("name", PAGES)
def test_the_page_is_current(name: str) -> None:
    assert (DOCS / name).read_text(encoding="utf-8") == PAGES[name](), "run: make pages"


def test_pages_are_written_and_checked(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--check", "--out", str(tmp_path)]) == 1
    assert not any(tmp_path.iterdir())
    assert main(["--out", str(tmp_path)]) == 0
    assert {path.name for path in tmp_path.iterdir()} == set(PAGES)
    capsys.readouterr()
    (tmp_path / "arena.md").write_text("old", encoding="utf-8")
    assert main(["--check", "--out", str(tmp_path)]) == 1
    assert capsys.readouterr().out == f"{tmp_path / 'arena.md'} is out of date\n"
    assert main(["--out", str(tmp_path)]) == 0
    assert main(["--check", "--out", str(tmp_path)]) == 0
