"""Words of the glossary: on every page the first use of each leads to its sentence.

docs/glossary.md is their one source: the left column of its tables has the words, the right one
what they mean. Links are made in the finished HTML, where it is certain what is prose.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from html import escape
from pathlib import Path
from typing import NamedTuple

PAGE = "glossary"

EVERYDAY = frozenset({"head", "operation", "row", "signals"})
"""Words that pages also use as everybody does; a link on those would mislead."""

_ROW = re.compile(r"^\| (?!word \|)([^|]+?) \| ([^|]+?) \|$", re.MULTILINE)
_TOKEN = re.compile(r"(<!--.*?-->|<[^>]*>)", re.DOTALL)
_TAG = re.compile(r"<(/?)([a-zA-Z][a-zA-Z0-9]*)")
_NO_PROSE = frozenset(
    {*("a", "button", "code", "kbd", "label", "nav", "pre", "script", "style", "svg", "th"),
     *("h1", "h2", "h3", "h4", "h5", "h6")}
)  # fmt: skip
# `seed 4`, `six seeds`, `environment seed` and `seed of the run` are about random numbers.
_BEFORE_A_RANDOM_SEED = (
    *("all", "command,", "environment", "fresh", "half of the", "has", "keyed by", "member and"),
    *(
        "members,",
        "members and",
        "noise of",
        "other",
        "over",
        "own",
        "paired",
        "random",
        "recipe's",
    ),
    *("recipe&#39;s", "run's", "run&#39;s", "runs and", "same", "several", "tasks and", "their"),
    *("this", "training", "whatever its", "with its", r"\d"),
    *("one", "two", "three", "four", "five", "six", "seven", "eight", "nine", "ten"),
)
_RANDOM_SEED = (
    "".join(rf"(?<!(?i:{word})\s)" for word in _BEFORE_A_RANDOM_SEED) + "(?<!_)",
    r"(?!s?\s+\d)(?!\s+of\s+the\s+(?:whole\s+)?run)",
)
_ARTICLE = re.compile(r"(<article\b[^>]*>)(.*)(</article>)", re.DOTALL)


class Term(NamedTuple):
    """A word with its sentence."""

    word: str
    meaning: str

    @property
    def anchor(self) -> str:
        """Where its row is on the page."""
        return "term-" + re.sub(r"[^a-z0-9]+", "-", self.word.lower()).strip("-")

    @property
    def is_verb(self) -> bool:
        """Whether it says what is done."""
        return self.meaning.startswith("To ")

    @property
    def forms(self) -> Iterator[str]:
        """How the word is written: `operation (op)` has two names."""
        name, _, other = self.word.partition(" (")
        yield name
        if other:
            yield other.rstrip(")")


def read_terms(glossary: Path) -> list[Term]:
    """Return the words of the glossary."""
    found = [Term(*row) for row in _ROW.findall(glossary.read_text(encoding="utf-8"))]
    return [term for term in found if set(term.word) != {"-"}]


def mark_rows(page: str, terms: list[Term]) -> str:
    """Return the HTML of the glossary with an anchor for every word."""
    for term in terms:
        cell = f"<td>{escape(term.word, quote=False)}</td>"
        assert page.count(cell) == 1, f"{term.word} is not once in the glossary's tables"
        page = page.replace(cell, f'<td id="{term.anchor}">{cell[4:]}')
    return page


def link_terms(page: str, terms: list[Term], glossary: str) -> str:
    """Return the HTML of a page with the first use of each word linked to the glossary.

    Args:
        page: the whole page; only its article is changed.
        terms: words to link.
        glossary: address of the glossary, as seen from the page.
    """
    patterns = {
        _pattern(form, term.is_verb): term
        for term in terms
        for form in term.forms
        if form not in EVERYDAY
    }
    every = re.compile("|".join(f"({each})" for each in _longest_first(patterns)))
    by_group = [patterns[each] for each in _longest_first(patterns)]
    used: set[str] = set()

    def link(found: re.Match[str]) -> str:
        term = by_group[(found.lastindex or 1) - 1]
        if term.word in used:
            return found[0]
        used.add(term.word)
        meaning = escape(re.sub(r"[`*]", "", term.meaning))
        address = f"{glossary}#{term.anchor}"
        return f'<a class="term" href="{address}" title="{meaning}">{found[0]}</a>'

    def article(found: re.Match[str]) -> str:
        return found[1] + "".join(_in_prose(found[2], every, link)) + found[3]

    return _ARTICLE.sub(article, page, count=1)


def _in_prose(body: str, every: re.Pattern[str], link: object) -> Iterator[str]:
    inside: list[str] = []
    for token in _TOKEN.split(body):
        tag = _TAG.match(token)
        if tag is None:
            prose = not inside and not token.startswith("<")
            yield every.sub(link, token) if prose else token  # type: ignore[call-overload]
            continue
        name = tag[2].lower()
        if name in _NO_PROSE and not token.endswith("/>"):
            if not tag[1]:
                inside.append(name)
            elif name in inside:
                inside.remove(name)
        yield token


def _pattern(word: str, is_verb: bool) -> str:
    """Return a pattern for a word and its plainest inflections."""
    written = re.escape(escape(word, quote=False)).replace(r"\ ", r"\s+")
    if word[-1].isupper() or word[-1].isdigit():
        return rf"\b{written}\b"
    if word[0].islower():
        written = f"[{word[0].upper()}{word[0]}]{written[1:]}"
    before, after = _RANDOM_SEED if word == "seed" else ("", "")
    if word.endswith("y") and word[-2] not in "aeiou":
        written = rf"{written[:-1]}(?:y|ies)"
    else:
        written += "(?:s|d)?" if is_verb else "s?"
    return rf"\b{before}{written}\b{after}"


def _longest_first(patterns: dict[str, Term]) -> list[str]:
    return sorted(patterns, key=len, reverse=True)
