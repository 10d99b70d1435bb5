"""Draw what arms of a proof brought on every member, as a picture for the README.

python research/campaign/picture.py results/claim_1.json --out docs/claim.svg
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from esper.lab.tasks import get_family
from esper.nissa.report.markup import Scale, element, label

HERE = Path(__file__).parent
MARKS = {"schedule": "best single schedule", "heuristic": "tuned heuristic"}
"""The arms beside the one that is judged, and what they are called."""
COLORS = {"schedule": "#c75300", "heuristic": "#00805c"}
OWN = "#0a62b4"
ROW, LEFT, RIGHT, TOP, GROUP = 19, 300, 700, 62, 26
"""Height of a row, where the axis begins and ends, where rows begin, and a group's heading."""
STYLE = (
    "text{font:12px system-ui,sans-serif;fill:#19212a}.muted{fill:#56616d}.strong{font-weight:650}"
)


def draw(found: Mapping[str, Any], name: str) -> str:
    """Return the picture: a row for every member, a mark for every arm."""
    by_member, subject = found["by_member"], found["subject"]
    purposes: dict[str, list[str]] = {}
    for purpose, members in get_family(found["family"]).claims.items():
        purposes[purpose] = [member.label for member in members if member.label in by_member]
    arms = [subject, *MARKS]
    values = [row[arm]["log_ratio_over_wait"] for row in by_member.values() for arm in arms]
    x = Scale(min(values) - 0.01, max(values) + 0.01, LEFT, RIGHT)
    parts, y = [], float(TOP)
    for purpose, members in purposes.items():
        y += GROUP
        parts.append(label(purpose, class_="strong", x=16, y=y - 6))
        for member in members:
            told = member.removesuffix(", 60 epochs").replace(" pooled", "")
            parts.append(label(told, class_="muted", x=16, y=y + 13))
            row = by_member[member]
            ends = [x(row[arm]["log_ratio_over_wait"]) for arm in arms]
            parts.append(
                element("line", x1=min(ends), x2=max(ends), y1=y + 9, y2=y + 9, stroke="#dde2e8")
            )
            for arm, at in zip(arms[1:], ends[1:], strict=True):
                circle = {"cx": at, "cy": y + 9, "r": 3.5, "fill": "#fff", "stroke_width": 1.6}
                parts.append(element("circle", stroke=COLORS[arm], **circle))
            parts.append(element("circle", cx=ends[0], cy=y + 9, r=4.5, fill=OWN))
            y += ROW
    grid = []
    for tick in range(-10, 20, 5):
        value = tick / 100
        if x.low <= value <= x.high:
            line = {"x1": x(value), "x2": x(value), "y1": TOP + 6, "y2": y + 4}
            grid.append(element("line", **line, stroke="#9aa4ae" if value == 0 else "#eef1f4"))
            text = "waiting" if value == 0 else f"{-100 * value:+.0f} %"
            grid.append(label(text, class_="muted", x=x(value), y=TOP, text_anchor="middle"))
    legend, at = [], 16
    for arm in arms:
        color, text = COLORS.get(arm, OWN), MARKS.get(arm, name)
        fill = OWN if arm == subject else "#fff"
        legend.append(element("circle", cx=at + 5, cy=18, r=4.5, fill=fill, stroke=color))
        legend.append(label(text, x=at + 15, y=22))
        at += 40 + 7 * len(text)
    told = "test errors, about, against the same network that waits"
    legend.append(label(told, class_="muted", x=16, y=44))
    page = [element("style", STYLE), element("rect", width="100%", height="100%", fill="#fff")]
    size = {"width": RIGHT + 20, "height": y + 16}
    return element("svg", *page, *grid, *parts, *legend, xmlns="http://www.w3.org/2000/svg", **size)


def main() -> None:
    """Write the picture."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("results", type=Path, help="results.json of `esper prove`")
    parser.add_argument("--name", default="tamiyo", help="what the first arm is called")
    parser.add_argument("--out", type=Path, default=Path("docs/claim.svg"))
    options = parser.parse_args()
    path = options.results if options.results.exists() else HERE / options.results
    found = json.loads(path.read_text(encoding="utf-8"))
    options.out.write_text(draw(found, options.name) + "\n", encoding="utf-8")
    print(options.out)


if __name__ == "__main__":
    main()
