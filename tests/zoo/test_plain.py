"""Well-known networks in plain PyTorch grow, and what comes of it stands on the page."""

from __future__ import annotations

import pytest

from tests.zoo.page import PAGE, refusals, row
from tests.zoo.plain import PLAIN, QUICK
from tests.zoo.specimen import Specimen, examine


@pytest.mark.parametrize("specimen", QUICK, ids=lambda one: one.name)
def test_the_first_five_grow_and_stay_what_they_are(specimen: Specimen) -> None:
    found = examine(specimen, steps=("suggest", "grow", "bake", "save"))
    assert found.refusals == {}
    # Exports, which take long, are on the page too; the rest of the line must be as it is now.
    (line,) = [line for line in _page() if line.startswith(f"| {specimen.name} |")]
    assert line == row(specimen.name, found)


@pytest.mark.integrations
@pytest.mark.parametrize("specimen", PLAIN, ids=lambda one: one.name)
def test_the_page_says_what_becomes_of_each(specimen: Specimen) -> None:
    found = examine(specimen)
    for line in (row(specimen.name, found), *refusals(specimen.name, found)):
        assert line in _page()


def _page() -> list[str]:
    return PAGE.read_text(encoding="utf-8").partition("## transformers")[0].splitlines()
