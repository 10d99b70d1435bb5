from __future__ import annotations

from pathlib import Path

import pytest

from tools.site.terms import EVERYDAY, Term, link_terms, mark_rows, read_terms

GLOSSARY = Path(__file__).parents[3] / "docs" / "glossary.md"
TERMS = [
    Term("slot", "A named place."),
    Term("seed", 'A "small" module.'),
    Term("alpha", "The amplitude."),
    Term("alpha target", "Where alpha goes."),
    Term("family", "Tasks of one kind."),
    Term("TRAINING", "The seed learns."),
    Term("operation (op)", "The verb."),
    Term("fossilize", "To make permanent."),
    Term("gate", "A condition."),
    Term("row", "One network."),
]


def linked(prose: str) -> str:
    return link_terms(f"<nav>slot</nav><article>{prose}</article>", TERMS, "../glossary.html")


def words(prose: str) -> list[str]:
    """The texts of the links in prose."""
    return [part.split("</a>")[0].split(">", 1)[1] for part in linked(prose).split("<a class")[1:]]


def test_the_first_use_is_linked_with_its_meaning() -> None:
    assert linked("<p>A seed, and a seed.</p>") == (
        '<nav>slot</nav><article><p>A <a class="term" href="../glossary.html#term-seed" '
        'title="A &quot;small&quot; module.">seed</a>, and a seed.</p></article>'
    )


@pytest.mark.parametrize(
    ("prose", "found"),
    [
        ("Slots and seeds, families", ["Slots", "seeds", "families"]),
        ("the alpha target and alpha", ["alpha target", "alpha"]),
        ("training, TRAINING", ["TRAINING"]),
        ("an operation, an op", ["op"]),
        ("it was fossilized, a gated unit", ["fossilized"]),
        ("slotted, reseed, unseeded", []),
        ("seed 4 of a random seed, six seeds, 10 seeds, a seed", ["seed"]),
        ("Four seeds; paired seeds over seeds, with its seeds, a seed", ["seed"]),
        ("Seed of the whole run; a new seed", ["seed"]),
        ("<code>slot</code> <a href='x'>seed</a> <pre><b>slot</b></pre> slot", ["slot"]),
        ("<h2>alpha</h2><table><th>seed</th><td>slot</td></table>", ["slot"]),
        ("a row", []),
        ("one slot<br/>and a <b>seed</b>", ["slot", "seed"]),
    ],
)  # fmt: skip
def test_what_counts_as_a_use(prose: str, found: list[str]) -> None:
    assert words(prose) == found


def test_the_glossary_is_read_whole() -> None:
    terms = read_terms(GLOSSARY)
    names = [term.word for term in terms]
    text = GLOSSARY.read_text(encoding="utf-8")
    rows = text.count("\n| ") - text.count("\n| word | meaning |\n")
    assert len(names) == len(set(names)) == rows <= 30
    assert {form for term in terms for form in term.forms} >= EVERYDAY
    assert len({term.anchor for term in terms}) == len(terms)
    assert {"Kasmina", "slot", "twin", "operation (op)"} <= set(names)


def test_every_row_of_the_glossary_can_be_linked_to() -> None:
    page = mark_rows("<td>slot</td><td>A named place.</td>", TERMS[:1])
    assert page == '<td id="term-slot">slot</td><td>A named place.</td>'
    with pytest.raises(AssertionError, match="seed is not once"):
        mark_rows("<td>slot</td>", TERMS[:2])
