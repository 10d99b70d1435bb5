from __future__ import annotations

from pathlib import Path

import pytest

from tools.pages import PAGES
from tools.pages.__main__ import main

DOCS = Path(__file__).parents[3] / "docs"


def test_every_page_is_written(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "new" / "pages"
    assert main(["--out", str(out)]) == 0
    assert {path.name for path in out.iterdir()} == set(PAGES)
    assert all(path.read_text(encoding="utf-8").startswith("# ") for path in out.iterdir())
    assert capsys.readouterr().out.splitlines() == [str(out / name) for name in PAGES]


@pytest.mark.parametrize("name", PAGES)
def test_made_pages_are_not_kept_in_the_tree(name: str) -> None:
    assert not (DOCS / name).exists()
