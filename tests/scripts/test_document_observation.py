from pathlib import Path

import pytest

from esper.leyline.blueprints import NUM_BLUEPRINTS
from esper.scripts.document_observation import PAGES, main, render, render_travelling
from esper.tamiyo.policy.layout import BASE_FEATURES, FEEDBACK_FEATURES, SLOT_FEATURES
from esper.tamiyo.policy.observation import TravellingLayout

ROOT = Path(__file__).parents[2]


@pytest.mark.parametrize("name", PAGES)
def test_the_page_is_current(name: str) -> None:
    page = (ROOT / "docs" / name).read_text(encoding="utf-8")
    assert page == PAGES[name](), "run python -m esper.scripts.document_observation"


def test_every_feature_has_its_line() -> None:
    page = render()
    for index, spec in enumerate((*BASE_FEATURES, *FEEDBACK_FEATURES)):
        assert f"| {index} | `{spec.name}` | {spec.formula} |" in page
    for index, spec in enumerate(SLOT_FEATURES):
        assert f"| {index} | `{spec.name}` | {spec.formula} |" in page
        assert f"| `{spec.name}` | {31 + index} | {61 + index} | {91 + index} |" in page


def test_every_travelling_feature_has_its_line() -> None:
    page = render_travelling()
    for part in TravellingLayout(3, NUM_BLUEPRINTS).parts:
        for index, spec in enumerate(part.specs):
            assert f"| {index} | `{spec.name}` | {spec.formula} |" in page


def test_it_writes_and_checks(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = tmp_path / "docs"
    assert main(["--out", str(folder), "--check"]) == 1
    assert main(["--out", str(folder)]) == 0
    for name, page in PAGES.items():
        assert (folder / name).read_text(encoding="utf-8") == page()
    assert main(["--out", str(folder), "--check"]) == 0
    (folder / "observation.md").write_text("old", encoding="utf-8")
    assert main(["--out", str(folder), "--check"]) == 1
    printed = capsys.readouterr().out
    assert "out of date" in printed
    assert "is current" in printed
