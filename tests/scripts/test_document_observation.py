from pathlib import Path

import pytest

from esper.scripts.document_observation import PAGE, main, render
from esper.tamiyo.policy.layout import BASE_FEATURES, FEEDBACK_FEATURES, SLOT_FEATURES

ROOT = Path(__file__).parents[2]


def test_the_page_is_current() -> None:
    page = (ROOT / PAGE).read_text(encoding="utf-8")
    assert page == render(), "run python -m esper.scripts.document_observation"


def test_every_feature_has_its_line() -> None:
    page = render()
    for index, spec in enumerate((*BASE_FEATURES, *FEEDBACK_FEATURES)):
        assert f"| {index} | `{spec.name}` | {spec.formula} |" in page
    for index, spec in enumerate(SLOT_FEATURES):
        assert f"| {index} | `{spec.name}` | {spec.formula} |" in page
        assert f"| `{spec.name}` | {31 + index} | {61 + index} | {91 + index} |" in page


def test_it_writes_and_checks(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    page = tmp_path / "docs" / "page.md"
    assert main(["--out", str(page), "--check"]) == 1
    assert main(["--out", str(page)]) == 0
    assert page.read_text(encoding="utf-8") == render()
    assert main(["--out", str(page), "--check"]) == 0
    page.write_text("old", encoding="utf-8")
    assert main(["--out", str(page), "--check"]) == 1
    printed = capsys.readouterr().out
    assert "out of date" in printed
    assert "is current" in printed
