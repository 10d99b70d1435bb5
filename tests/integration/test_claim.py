"""What the pages of results and proof and the card say of the claim is what its results say."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
CAMPAIGN = ROOT / "research" / "campaign"
CARD = CAMPAIGN / "card.md"


@pytest.fixture(scope="module")
def audit() -> str:
    """Return what `research/campaign/audit.py` prints."""
    import contextlib
    import io

    sys.path.insert(0, str(CAMPAIGN))
    try:
        import audit

        with contextlib.redirect_stdout(io.StringIO()) as printed:
            audit.main()
    finally:
        sys.path.remove(str(CAMPAIGN))
        for name in ("audit", "beside"):
            sys.modules.pop(name, None)
    return printed.getvalue()


def words(path: Path) -> str:
    return " ".join(path.read_text(encoding="utf-8").split())


PAGES = {
    "results": ROOT / "docs" / "results.md",
    "card": CARD,
    "proof": ROOT / "docs" / "proof.md",
}

MEASURED = (
    # What the audit prints, and what each page says of it.
    ("| plain, two blocks (8) | 277 to 8,270 | +3.76 | 1.52 |", "277 to 8,270", PAGES),
    ("| plain, two blocks (8) | 277 to 8,270 | +3.76 | 1.52 |", "+3.76", PAGES),
    ("| residual, two blocks (4) | 1,182 to 4,514 | +0.58 | 1.46 |", "0.58", PAGES),
    ("| three wide blocks (6) | 37,270 to 288,746 | +0.01 | 1.18 |", "0.01", PAGES),
    ("above 0 in 15 of 24); plain hosts of two blocks carry 94%", "94 %", ("results", "card")),
    ("above 0 in 19 of 24); plain hosts of two blocks carry 78%", "78 %", ("results", "card")),
    ("after Holm: p from 0.430 to", "0.43", ("results", "card")),
    ("signs, after Holm: p from 0.040 to 0.128", "0.04 to 0.13 after Holm", ("card",)),
    ("uncorrected: p from 0.038 to 0.126", "0.04 to 0.13 without correction", ("card",)),
    ("185 of 192 networks have", "185 of 192", ("results", "card")),
    ("contextual schedule: -0.0037 (t p = 0.02,", "0.0037 (t, p = 0.02", ("card",)),
    ("by number of images: -0.0038 (t p = 0.013,", "0.0038 (p = 0.013)", ("card",)),
    ("hosts of two blocks: -0.0170 (t p = 1.5e-05", "by 0.017, p = 1.5e-5", ("card",)),
    ("8 new members +3.56 points, 4 of the arena before +0.99", "3.56 points", ("card",)),
    ("2 of 96 identical, rms 0.43 points, largest 1.8", "2 of 96 identical", ("proof",)),
    ("2 of 96 identical, rms 0.43 points, largest 1.8", "by 0.43 points", ("proof",)),
)


@pytest.mark.parametrize(("printed", "told", "pages"), MEASURED)
def test_pages_say_what_was_measured(
    audit: str, printed: str, told: str, pages: tuple[str, ...]
) -> None:
    assert printed in audit
    for page in pages:
        assert told in words(PAGES[page]), page


def test_pages_say_what_a_sceptic_asks_for() -> None:
    for page, path in PAGES.items():
        text = words(path)
        assert "one seed" in text, page
        assert "0013" in text, page
        assert "from scratch" in text, page
        assert "written rule" in text, page
        assert "million parameters" in text, page


def test_the_card_that_ships_is_the_campaigns() -> None:
    shipped = ROOT / "src" / "esper" / "tamiyo" / "weights" / "tamiyo" / "README.md"
    assert shipped.read_text(encoding="utf-8") == CARD.read_text(encoding="utf-8")
