"""The programs of docs/short-examples.md run as printed and beat their twins."""

from __future__ import annotations

import re

import pytest

from benchmarks.short_examples import FIRST_SEED, PAGE, SNIPPETS, run_snippet, snippet
from tests.pages import ONE_RUN, section

TEXT = PAGE.read_text(encoding="utf-8")


@pytest.mark.parametrize("name", SNIPPETS)
def test_an_example_has_at_most_ten_lines(name: str) -> None:
    assert sum(bool(line.strip()) for line in snippet(name).splitlines()) <= 10
    assert f"manual_seed({FIRST_SEED})" in snippet(name)


def shown(name: str) -> str:
    """Return the output of one run on the page, and check that the page calls it one run."""
    text = section(TEXT, SNIPPETS[name])
    found = re.search(r"`(Grown\(.*?\))`", text, re.DOTALL)
    assert found is not None
    assert ONE_RUN in " ".join(text.split())
    return found[1]


def form(printed: str) -> str:
    """Replace numbers and the grown modules, which depend on the processor."""
    return re.sub(r"[\d.,]*\d", "#", re.sub(r"grew .*\)", "grew #)", " ".join(printed.split())))


def test_the_lines_run_as_printed_and_beat_their_twin() -> None:
    names, said = run_snippet("digits", FIRST_SEED)
    summary = names["grown"].summary
    assert summary.parameters_before == 170
    # The first line; below it is the best score of every size.
    assert form(said.splitlines()[0]) == form(shown("digits"))
    # Five seeds under three instruction sets gained 24 points at least.
    assert summary.test_score - summary.twin_test_score > 10.0


@pytest.mark.filterwarnings("ignore:.*too few to grow in")
def test_the_lines_for_text_run() -> None:
    names, said = run_snippet("text", FIRST_SEED, epochs=2)
    assert said.startswith("Grown(TransformerHost: validation score ")
    assert len(names["grown"].history) == 2
