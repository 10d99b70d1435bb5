"""SVG images become part of the page that shows them.

An image file only knows what the system prefers; a part of the page follows the page's own switch
between light and dark.
"""

from __future__ import annotations

import re
from html import escape, unescape
from pathlib import Path

_IMAGE = re.compile(r'<img alt="([^"]*)" src="([^":]+\.svg)" ?/?>')
_DARK = re.compile(r"@media ?\(prefers-color-scheme: ?dark\) ?\{(.*?\})\s*\}", re.DOTALL)
_SWITCH = '[data-md-color-scheme="slate"] '


def put_in(page: str, folder: Path) -> str:
    """Return the HTML of a page with its SVG images in it.

    Args:
        page: the whole page.
        folder: where the page is, from which its images are found.
    """

    def drawn(found: re.Match[str]) -> str:
        text = (folder / found[2]).read_text(encoding="utf-8")
        text = text[text.index("<svg") :].strip()
        text = _DARK.sub(lambda dark: _SWITCH + dark[1].strip(), text)
        # The words of the page describe the picture there; a title would pop up over all of it.
        text = re.sub(r"<title>.*?</title>", "", text, flags=re.DOTALL)
        said = " ".join(unescape(found[1]).split())
        head, tag, rest = text.partition(">")
        head = re.sub(r' (?:role|aria-label)="[^"]*"', "", head)
        return f'{head} role="img" aria-label="{escape(said)}"{tag}{rest}'

    return _IMAGE.sub(drawn, page)
