"""Check a finished site for broken links and for anything loaded from other hosts.

`python -m tools.site.check FOLDER` prints one line per finding and exits with 1 when there is any.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Iterator
from html.parser import HTMLParser
from pathlib import Path
from urllib.parse import unquote, urlsplit

# What a browser fetches by itself, by element.
_FETCHED = {
    "script": "src", "img": "src", "iframe": "src", "source": "src", "video": "src",
    "audio": "src", "embed": "src", "object": "data", "link": "href", "use": "href",
    "image": "href", "input": "src", "track": "src",
}  # fmt: skip
# Said about a page, not fetched for it.
_TOLD = frozenset({"canonical", "next", "prev", "alternate", "author", "license", "edit"})
_IN_STYLE = re.compile(r"""(?:url\(|@import\s+(?:url\()?)\s*["']?([^"')\s;]+)""")


class _Page(HTMLParser):
    """What a page fetches, links to and can be linked at."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.fetched: list[str] = []
        self.links: list[str] = []
        self.anchors: set[str] = set()
        self._in_style = False
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        found = {name: value or "" for name, value in attrs}
        self.anchors.update(found[name] for name in ("id", "name") if name in found)
        self.fetched += _IN_STYLE.findall(found.get("style", ""))
        self._in_style = tag == "style"
        if tag == "a" and "href" in found:
            self.links.append(found["href"])
        if _TOLD & set(found.get("rel", "").split()):
            return
        address = found.get(_FETCHED.get(tag, ""), "")
        places = [each.split()[0] for each in found.get("srcset", "").split(",") if each.strip()]
        self.fetched += [each for each in (address, *places) if each]

    def handle_data(self, data: str) -> None:
        if self._in_style:
            self.fetched += _IN_STYLE.findall(data)

    def handle_endtag(self, tag: str) -> None:
        self._in_style = self._in_style and tag != "style"


def findings(site: Path) -> Iterator[str]:
    """Return one line for everything that is wrong with a site."""
    # The page for missing addresses is served anywhere, so its links start at the root.
    paths = [path for path in sorted(site.rglob("*.html")) if path.name != "404.html"]
    pages = {path: _Page(path.read_text(encoding="utf-8")) for path in paths}
    for path, page in pages.items():
        name = path.relative_to(site)
        for address in page.fetched:
            if _is_elsewhere(address):
                yield f"{name}: loads {address} from elsewhere"
            elif not _is_inline(address) and not _target(path, address).is_file():
                yield f"{name}: loads {address}, which does not exist"
        for address in dict.fromkeys(page.links):
            if urlsplit(address).scheme or _is_elsewhere(address):
                continue
            target, anchor = _target(path, address), unquote(urlsplit(address).fragment)
            if target not in pages and not target.is_file():
                yield f"{name}: links to {address}, which does not exist"
            elif anchor and target in pages and anchor not in pages[target].anchors:
                yield f"{name}: links to {address}, but there is no {anchor!r} there"
    for path in sorted(site.rglob("*.css")):
        for address in _IN_STYLE.findall(path.read_text(encoding="utf-8")):
            if _is_elsewhere(address):
                yield f"{path.relative_to(site)}: loads {address} from elsewhere"


def main(arguments: list[str]) -> int:
    site = Path(arguments[0])
    if not (site / "index.html").is_file():
        print(f"error: {site} is no site; build it with make docs", file=sys.stderr)
        return 2
    found = list(findings(site))
    for line in found:
        print(line)
    return 1 if found else 0


def _target(page: Path, address: str) -> Path:
    path = unquote(urlsplit(address).path)
    return (page.parent / path).resolve() if path else page


def _is_elsewhere(address: str) -> bool:
    return address.startswith("//") or urlsplit(address).scheme in ("http", "https", "ws", "wss")


def _is_inline(address: str) -> bool:
    return address.startswith(("data:", "#", "blob:"))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
