"""Reading a finished picture back, the way a browser would."""

from __future__ import annotations

import xml.etree.ElementTree as ElementTree
from collections.abc import Iterator
from xml.etree.ElementTree import Element

SVG = "{http://www.w3.org/2000/svg}"


def parse(picture: str) -> Element:
    return ElementTree.fromstring(picture)


def having(root: Element, *classes: str) -> list[Element]:
    """Every element that has all these classes."""
    return [one for one in root.iter() if set(classes) <= set(one.get("class", "").split())]


def written(root: Element) -> list[str]:
    """Every text that is drawn, without tooltips."""
    return [_drawn(one) for one in root.iter(f"{SVG}text")]


def told(root: Element) -> list[str]:
    """Every tooltip."""
    return [one.text or "" for one in root.iter(f"{SVG}title")]


def _drawn(text: Element) -> str:
    return " ".join(part for part in _parts(text) if part)


def _parts(element: Element) -> Iterator[str]:
    if element.tag == f"{SVG}title":
        return
    yield element.text or ""
    for child in element:
        yield from _parts(child)
        yield child.tail or ""
