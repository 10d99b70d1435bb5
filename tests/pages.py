"""Read the claims of documentation pages, for tests."""

from __future__ import annotations

import re

ONE_RUN = "one run; yours will differ in the decimals"
"""Text beside the output of a single run: its last digits depend on the processor."""

_RANGE = r"between ([+−]?\d+(?:\.\d+)?) and ([+−]?\d+(?:\.\d+)?) points"


def section(page: str, heading: str) -> str:
    """Return the text below a heading, up to the next."""
    found = re.search(rf"^##+ {re.escape(heading)}\n(.*?)(?=^##+ |\Z)", page, re.DOTALL | re.M)
    assert found is not None, f"the page has no heading {heading!r}"
    return found[1]


def claimed_range(text: str, about: str = "") -> tuple[float, float]:
    """Return the first range of a gain in points that `text` claims after `about`."""
    found = re.search(f"{re.escape(about)}.*?{_RANGE}", " ".join(text.split()))
    assert found is not None, f"no 'between +1 and +2 points' after {about!r}"
    least, most = (float(number.replace("−", "-")) for number in found.groups())
    return least, most
