"""Models of the `transformers` library grow with the results that `docs/zoo.md` shows."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from tests.zoo.page import PAGE, refusals, row
from tests.zoo.specimen import examine

if TYPE_CHECKING:
    from tests.zoo.specimen import Specimen

pytest.importorskip("transformers", reason="needs the extra esper-grow[transformers]")
pytestmark = pytest.mark.integrations

from tests.zoo.hugging_face import HUGGING_FACE  # noqa: E402


@pytest.mark.parametrize("specimen", HUGGING_FACE, ids=lambda one: one.name)
def test_results_are_those_on_the_page(specimen: Specimen) -> None:
    found = examine(specimen)
    page = PAGE.read_text(encoding="utf-8").partition("## transformers")[2].splitlines()
    for line in (row(specimen.name, found), *refusals(specimen.name, found)):
        assert line in page


def test_the_page_holds_no_other() -> None:
    from tests.zoo.plain import PLAIN

    lines = PAGE.read_text(encoding="utf-8").splitlines()
    named = [line.split(" | ")[0].removeprefix("| ") for line in lines if line[:2] == "| "]
    expected = ["network", *(one.name for one in PLAIN)]
    expected += ["network", *(one.name for one in HUGGING_FACE)]
    assert named == expected
