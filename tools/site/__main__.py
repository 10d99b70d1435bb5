"""Builds the site into build/site: `python -m tools.site`, which `make docs` runs.

Warnings of the generator and findings of our own are errors.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import yaml

from tools.pages import PAGES
from tools.site.check import findings
from tools.site.pages import DECISIONS, DOCS, OUTSIDE, gather
from tools.site.pictures import put_in
from tools.site.terms import PAGE, link_terms, mark_rows, read_terms

ROOT = Path(__file__).parents[2]
RECORDS_WEIGHT = 0.1
"""Weight of decisions, logs and code in the search; other pages have 1."""


def build(site: Path) -> list[str]:
    """Build the site and return what is wrong with it."""
    pages = site.with_name(site.name + "-pages")
    settings = yaml.safe_load((ROOT / "mkdocs.yml").read_text(encoding="utf-8"))
    made = {name: render() for name, render in PAGES.items()}
    settings["nav"] = gather(ROOT, pages, settings["nav"], made)
    settings |= {"docs_dir": pages.name, "site_dir": site.name}
    source = settings["plugins"][1]["mkdocstrings"]["handlers"]["python"]
    source["paths"] = [str(ROOT / path) for path in source["paths"]]
    config = site.with_name(site.name + ".yml")
    config.write_text(yaml.safe_dump(settings, sort_keys=False), encoding="utf-8")
    made = subprocess.run(
        [sys.executable, "-m", "mkdocs", "build", "--strict", "--quiet", "-f", str(config)],
        # We weigh its makers' advice to move on ourselves (docs/decisions, 0010).
        env={**os.environ, "NO_MKDOCS_2_WARNING": "1"},
        check=False,
    )
    if made.returncode:
        return ["mkdocs found the problems above"]
    _finish(site)
    return list(findings(site.resolve()))


def _finish(site: Path) -> None:
    """Link the words of the glossary, put the pictures in, and make the search ready."""
    _finish_search(site / "search" / "search_index.json")
    terms = read_terms(ROOT / DOCS / f"{PAGE}.md")
    home = site / f"{PAGE}.html"
    for path in site.rglob("*.html"):
        page = put_in(path.read_text(encoding="utf-8"), path.parent)
        if path == home:
            page = mark_rows(page, terms)
        elif path.name != "404.html":
            page = link_terms(page, terms, os.path.relpath(home, path.parent))
        path.write_text(page, encoding="utf-8")


def _finish_search(index: Path) -> None:
    """Rank records behind pages for users, and let the search work from files."""
    found = json.loads(index.read_text(encoding="utf-8"))
    for part in found["docs"]:
        if part["location"].startswith((DECISIONS, f"{OUTSIDE}/")):
            part["boost"] = RECORDS_WEIGHT
    text = json.dumps(found, ensure_ascii=False, separators=(",", ":"))
    index.write_text(text, encoding="utf-8")
    # A page that was opened from a file may load a script beside it, but read no data.
    index.with_suffix(".js").write_text(f"var __index = {text}", encoding="utf-8")


def main() -> int:
    """Build the site where it belongs."""
    site = ROOT / "build" / "site"
    site.parent.mkdir(exist_ok=True)
    problems = build(site)
    for problem in problems:
        print(f"error: {problem}", file=sys.stderr)
    if not problems:
        print(f"open {site.relative_to(ROOT)}/index.html in a browser")
    return 1 if problems else 0


if __name__ == "__main__":
    sys.exit(main())
