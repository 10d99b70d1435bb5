"""Commands on pages, in help and in README can be typed: their names and options exist.

`esper ...` is read by the program's own parser, without running it. Of `python -m benchmarks ...`
and `make ...` the names are checked, and of benchmarks the options too.
"""

from __future__ import annotations

import contextlib
import importlib
import io
import re
import shlex
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest

from benchmarks.__main__ import names
from esper.leyline.errors import EsperError
from esper.scripts.cli.main import VERBS, build_parser

ROOT = Path(__file__).parents[2]
PAGES = sorted(
    path
    for path in (
        *ROOT.glob("*.md"),
        *(ROOT / "docs").rglob("*.md"),
        *(ROOT / "research").rglob("*.md"),
        *(ROOT / ".github").rglob("*.md"),
    )
    # The log quotes commands as they were on the day.
    if path.name != "log.md"
)
PLACEHOLDER = re.compile(r"\.\.\.|…|\[|\bCOMMAND\b|\bFORMAT\b")


def code(text: str) -> Iterator[str]:
    """Yield each line of code on a page, with continued lines joined, and each span in prose."""
    fence = re.compile(r"^```(\w*)\n(.*?)^```", re.DOTALL | re.MULTILINE)
    for language, block in fence.findall(text):
        if language != "python":
            yield from block.replace("\\\n", " ").splitlines()
    for span in re.findall(r"`([^`]+)`", fence.sub("", text)):
        yield " ".join(span.split())


def commands(text: str, program: str) -> Iterator[list[str]]:
    """Yield the words of each command of a program, without prompt, comment and pipe."""
    for line in code(text):
        line = re.sub(r"^(?:\w+\$ |\$ )", "", line.strip())
        if line.startswith(program + " ") and not PLACEHOLDER.search(line):
            plain = re.split(r"\s+#|\s+\|\s|\s>\s|\s&&\s|\s&$", line.removeprefix(program))[0]
            with contextlib.suppress(ValueError):
                yield shlex.split(plain)


def parse(words: list[str]) -> None:
    """Read the arguments of `esper` as the program does; fail with its message.

    `--import` is taken out first, as `main` does. `esper grow --controller` in prose names an
    option without its value.
    """
    if "--import" in words:
        at = words.index("--import")
        words = words[:at] + words[at + 2 :]
    said = io.StringIO()
    try:
        with contextlib.redirect_stderr(said), contextlib.redirect_stdout(said):
            build_parser(words).parse_args(words)
    except SystemExit as stop:
        is_name = words[-1].startswith("--") and "expected one argument" in said.getvalue()
        if stop.code and not is_name:
            pytest.fail(said.getvalue())
    except EsperError as error:
        pytest.fail(f"esper {shlex.join(words)}: {error}")


@pytest.mark.parametrize("page", PAGES, ids=lambda path: str(path.relative_to(ROOT)))
def test_commands_of_esper_can_be_read(page: Path) -> None:
    for words in commands(page.read_text(encoding="utf-8"), "esper"):
        # `esper grow` in a sentence is a name, not a command line.
        if len(words) > 1:
            parse(words)
        elif words and not words[0].startswith("-"):
            assert words[0] in VERBS, words


def test_pages_have_many_commands() -> None:
    found = [
        words for page in PAGES for words in commands(page.read_text(encoding="utf-8"), "esper")
    ]
    assert sum(len(words) > 1 for words in found) > 70
    assert {words[0] for words in found if words} >= set(VERBS)


@pytest.mark.parametrize("verb", VERBS)
def test_examples_in_help_can_be_read(verb: str) -> None:
    said = io.StringIO()
    with contextlib.redirect_stdout(said), contextlib.suppress(SystemExit):
        build_parser([verb]).parse_args([verb, "--help"])
    examples = said.getvalue().partition("examples:\n")[2]
    assert examples
    lines = [re.sub(r"\s{2,}[^-\s].*$", "", line.strip()) for line in examples.splitlines()]
    text = "```\n" + "\n".join(lines) + "\n```\n"
    read = [words for words in commands(text, "esper") if words[:1] == [verb]]
    assert read
    for words in read:
        parse(words)


@cache
def help_of(*words: str) -> str:
    """Return the help of a benchmark, or of one of its subcommands."""
    name, *rest = words
    said = io.StringIO()
    with contextlib.redirect_stdout(said), contextlib.redirect_stderr(said):
        try:
            importlib.import_module(f"benchmarks.{name}").main([*rest, "--help"])
        except SystemExit as stop:
            if stop.code:
                return ""
    return said.getvalue()


def test_benchmarks_on_pages_exist_with_their_options() -> None:
    found = 0
    for page in PAGES:
        for words in commands(page.read_text(encoding="utf-8"), "python -m benchmarks"):
            if not words or not re.fullmatch(r"[a-z_]+", words[0]):
                continue
            found += 1
            name, *rest = words
            assert name in names(), (page.name, words)
            told = help_of(name) + (help_of(name, rest[0]) if rest else "")
            for option in (word.split("=")[0] for word in rest if word.startswith("--")):
                assert re.search(rf"{option}\b", told), (page.name, words)
    assert found > 60


def test_targets_of_make_on_pages_exist() -> None:
    makefile = (ROOT / "Makefile").read_text(encoding="utf-8")
    targets = set(re.findall(r"^([a-z-]+):", makefile, re.MULTILINE))
    for page in PAGES:
        for words in commands(page.read_text(encoding="utf-8"), "make"):
            for word in words:
                assert "=" in word or word in targets, (page.name, words)
