from __future__ import annotations

from pathlib import Path

import pytest

from esper.scripts.document_arena import PAGE, main, render
from esper.tasks import get_family

ROOT = Path(__file__).parents[2]


def test_the_page_is_current() -> None:
    page = (ROOT / PAGE).read_text(encoding="utf-8")
    assert page == render(), "run python -m esper.scripts.document_arena"


def test_every_claim_member_is_on_the_page() -> None:
    page = render()
    for member in get_family("image16_family").members("claim"):
        assert f"| {member.label} |" in page


def test_the_page_is_written_and_checked(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "arena.md"
    assert main(["--check", "--out", str(out)]) == 1
    assert main(["--out", str(out)]) == 0
    assert main(["--check", "--out", str(out)]) == 0
    assert "is current" in capsys.readouterr().out
