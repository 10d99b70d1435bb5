"""Known architectures in plain PyTorch grow with the results that `docs/zoo.md` shows."""

from __future__ import annotations

import pytest

from tests.zoo.page import PAGE, refusals, row
from tests.zoo.plain import PLAIN, QUICK
from tests.zoo.specimen import Specimen, examine


@pytest.mark.parametrize("specimen", QUICK, ids=lambda one: one.name)
def test_the_first_five_keep_their_outputs_when_baked_or_loaded(specimen: Specimen) -> None:
    found = examine(specimen, steps=("suggest", "grow", "bake", "save"))
    assert found.refusals == {}
    # The page was written with exports, which are slow; none of these five refuses one.
    (line,) = [line for line in _page() if line.startswith(f"| {specimen.name} |")]
    assert line == row(specimen.name, found)


@pytest.mark.integrations
@pytest.mark.parametrize("specimen", PLAIN, ids=lambda one: one.name)
def test_results_are_those_on_the_page(specimen: Specimen) -> None:
    found = examine(specimen)
    for line in (row(specimen.name, found), *refusals(specimen.name, found)):
        assert line in _page()


def _page() -> list[str]:
    return PAGE.read_text(encoding="utf-8").partition("## transformers")[0].splitlines()
