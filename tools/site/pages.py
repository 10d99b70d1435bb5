"""Gathers the pages of the site: docs/, and what they link to elsewhere in the repository.

A page may link to any file of the repository, as it must to be right in a checkout. In the site a
Markdown file from outside docs/ is a page below source/, a file of code is shown on one, a folder
is a list. So every link leads somewhere without an address of the repository being known.
"""

from __future__ import annotations

import os
import re
import shutil
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path, PurePosixPath
from typing import Any

DOCS = PurePosixPath("docs")
OUTSIDE = PurePosixPath("source")
DECISIONS = "decisions/"
"""This entry of the navigation stands for a list of all decisions."""

_FENCE = re.compile(r"^(`{3,}|~{3,}).*?^\1[`~]*[ \t]*$", re.MULTILINE | re.DOTALL)
_CODE = re.compile(r"(`+)(?!`).+?(?<!`)\1(?!`)", re.DOTALL)
_LINK = re.compile(r"(!?\[(?:[^\[\]]|\[[^\[\]]*\])*\]\()([^()\s]+)(\))")
_ADDRESS = re.compile(r"[a-z][a-z0-9+.-]*:|//|#", re.IGNORECASE)
_LANGUAGES = {".py": "python", ".toml": "toml", ".yml": "yaml", ".yaml": "yaml", ".json": "json"}

_DECISIONS_PAGE = """\
# Design decisions

Why Esper is as it is: every choice that had an alternative, with what spoke for it and what it
costs. The parts and how they work together are in [architecture](../architecture.md).

"""


def place(path: PurePosixPath, is_folder: bool = False) -> PurePosixPath:
    """Return where a path of the repository is among the pages of the site."""
    inside = path.is_relative_to(DOCS)
    new = path.relative_to(DOCS) if inside else OUTSIDE / path
    if is_folder:
        return new / "index.md"
    return new if inside or path.suffix == ".md" else new.with_name(new.name + ".md")


def gather(
    root: Path, into: Path, navigation: list[Any], made: Mapping[str, str] | None = None
) -> list[Any]:
    """Write all pages into a folder, and return the navigation with every decision in it.

    Args:
        root: folder of the repository.
        into: where the pages go; emptied first.
        navigation: as in mkdocs.yml; paths are relative to docs/.
        made: text of pages that docs/ does not have, by their names there.
    """
    shutil.rmtree(into, ignore_errors=True)
    shutil.copytree(root / DOCS, into)
    texts = {DOCS / name: text for name, text in (made or {}).items()}
    decisions = sorted((root / DOCS / DECISIONS).glob("*.md"))
    listed = [f"- [{title(each)}]({each.name})\n" for each in decisions]
    (into / DECISIONS / "index.md").write_text(_DECISIONS_PAGE + "".join(listed), encoding="utf-8")
    named = [normal(DOCS / path) for path in entries(navigation) if path != DECISIONS]
    pages = [*(_relative(path, root) for path in (root / DOCS).rglob("*.md")), *texts]
    _write(root, into, [*pages, *(each for each in named if each not in pages)], texts)

    def placed(path: str) -> Any:
        if path == DECISIONS:
            return [f"{DECISIONS}{name}" for name in ("index.md", *(d.name for d in decisions))]
        return str(place(normal(DOCS / path)))

    return _replaced(navigation, placed)


def entries(navigation: Any) -> Iterator[str]:
    """Return the path of every page that a navigation names."""
    if isinstance(navigation, str):
        yield navigation
    else:
        values = navigation.values() if isinstance(navigation, dict) else navigation
        for each in values:
            yield from entries(each)


def title(page: Path) -> str:
    """Return the first heading of a page."""
    found = re.search(r"^# (.+)$", page.read_text(encoding="utf-8"), re.MULTILINE)
    if found is None:
        raise SystemExit(f"error: {page} has no title; begin it with a line `# Title`")
    return found[1]


def rewritten(text: str, change: Callable[[str], str]) -> str:
    """Return Markdown with every target of a link changed, outside of code."""
    whole: list[str] = []
    for part, is_code in _parts(text):
        whole.append(part if is_code else _LINK.sub(lambda m: m[1] + change(m[2]) + m[3], part))
    return "".join(whole)


def normal(path: PurePosixPath) -> PurePosixPath:
    """Return a path without `..` in it."""
    return PurePosixPath(os.path.normpath(path))


def _write(
    root: Path, into: Path, waiting: list[PurePosixPath], texts: Mapping[PurePosixPath, str]
) -> None:
    """Write pages, and in turn those that they link to; some have their text given."""
    seen = set(waiting)
    while waiting:
        path = waiting.pop()
        source = root / path
        page = place(path, source.is_dir())

        def moved(target: str, path: PurePosixPath = path, page: PurePosixPath = page) -> str:
            if _ADDRESS.match(target):
                return target
            name, mark, anchor = target.partition("#")
            meant = normal(path.parent / name)
            there = root / meant
            if meant.parts[0] == ".." or not (meant in texts or there.exists()):
                raise SystemExit(f"error: {path} links to {target}, which does not exist")
            if not meant.is_relative_to(DOCS) and meant not in seen:
                seen.add(meant)
                waiting.append(meant)
            return os.path.relpath(place(meant, there.is_dir()), page.parent) + mark + anchor

        written = into / page
        written.parent.mkdir(parents=True, exist_ok=True)
        text = texts[path] if path in texts else _page(source, path)
        written.write_text(rewritten(text, moved), encoding="utf-8")


def _page(source: Path, path: PurePosixPath) -> str:
    """Return a file as Markdown whose links are relative to where the file is."""
    if source.is_dir():
        found = sorted(
            (each.name, each.is_dir())
            for each in source.iterdir()
            if not each.name.startswith((".", "__pycache__"))
        )
        lines = [f"- [{name}{'/' * is_folder}]({path.name}/{name})" for name, is_folder in found]
        return f"# {path}\n\n" + "\n".join(lines) + "\n"
    text = source.read_text(encoding="utf-8")
    if path.suffix == ".md":
        return text
    return f"# {path}\n\n~~~~~{_LANGUAGES.get(path.suffix, 'text')}\n{text.rstrip()}\n~~~~~\n"


def _parts(text: str) -> Iterator[tuple[str, bool]]:
    """Return Markdown in pieces, each with whether it is code."""
    for part, is_fence in _split(text, _FENCE):
        if is_fence:
            yield part, True
        else:
            yield from _split(part, _CODE)


def _split(text: str, pattern: re.Pattern[str]) -> Iterator[tuple[str, bool]]:
    end = 0
    for found in pattern.finditer(text):
        yield text[end : found.start()], False
        yield found[0], True
        end = found.end()
    yield text[end:], False


def _replaced(navigation: Any, placed: Callable[[str], Any]) -> Any:
    if isinstance(navigation, str):
        return placed(navigation)
    if isinstance(navigation, dict):
        return {name: _replaced(each, placed) for name, each in navigation.items()}
    return [_replaced(each, placed) for each in navigation]


def _relative(path: Path, root: Path) -> PurePosixPath:
    return PurePosixPath(path.relative_to(root).as_posix())
