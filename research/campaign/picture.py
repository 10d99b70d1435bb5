"""Draw the test errors of the arms of a proof on every member: docs/claim.svg.

python research/campaign/picture.py results/claim_1.json --out docs/claim.svg
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from esper.lab.tasks import get_family
from esper.nissa.report.markup import Scale, element, label, text_width
from esper.nissa.report.page import FONT, MARGIN, ROW, WIDTH, draw_svg

HERE = Path(__file__).parent
MARKS = {"schedule": "best single schedule", "heuristic": "tuned heuristic"}
"""Names of the arms that are drawn beside the judged one."""
FILLS = {"schedule": "germinated", "heuristic": "fossilized"}
"""CSS class of the colour of an arm; the judged one has `end grown`."""
LEFT, RIGHT, TOP = 475.0, WIDTH - 20.0, 4.5 * ROW
"""Where the axis begins and ends, and where rows begin."""


def draw(found: Mapping[str, Any], name: str) -> str:
    """Return the picture: a row for every member, a mark for every arm."""
    by_member, subject = found["by_member"], found["subject"]
    purposes: dict[str, list[str]] = {}
    for purpose, members in get_family(found["family"]).claims.items():
        purposes[purpose] = [member.label for member in members if member.label in by_member]
    arms = [subject, *MARKS]
    values = [row[arm]["log_ratio_over_wait"] for row in by_member.values() for arm in arms]
    x = Scale(min(values) - 0.01, max(values) + 0.01, LEFT, RIGHT)
    parts, y = [], TOP
    for purpose, members in purposes.items():
        y += 1.5 * ROW
        parts.append(label(purpose, class_="strong", x=MARGIN, y=y - ROW / 2))
        for member in members:
            middle = y + ROW / 2
            at = {"x": LEFT - 12, "y": middle, "dy": ".35em", "text_anchor": "end"}
            parts.append(label(_short(member), class_="muted", **at))
            row = by_member[member]
            ends = [x(row[arm]["log_ratio_over_wait"]) for arm in arms]
            line = {"x1": min(ends), "x2": max(ends), "y1": middle, "y2": middle}
            parts.append(element("line", class_="grid", **line))
            for arm, end in zip(arms[1:], ends[1:], strict=True):
                parts.append(element("circle", class_=FILLS[arm], cx=end, cy=middle, r=4.5))
            parts.append(element("circle", class_="end grown", cx=ends[0], cy=middle, r=5))
            y += ROW
    grid = []
    for tick in range(-10, 20, 5):
        value = tick / 100
        if x.low <= value <= x.high:
            line = {"x1": x(value), "x2": x(value), "y1": TOP + 6, "y2": y + 4}
            grid.append(element("line", class_="grid" if value else "axis", **line))
            if tick % 10 == 0:
                text = f"−{tick} %" if value else "waiting"
                grid.append(label(text, class_="muted", x=x(value), y=TOP, text_anchor="middle"))
    legend, left = [], MARGIN
    for arm in arms:
        text = MARKS.get(arm, name)
        fill = FILLS.get(arm, "end grown")
        legend.append(element("circle", class_=fill, cx=left + 5, cy=ROW - 6, r=5))
        legend.append(label(text, x=left + 16, y=ROW))
        left += 40 + text_width(text, FONT)
    notes = (
        "test errors against the same network without growth",
        "rows: data, host, width x blocks, training images",
    )
    for row, note in enumerate(notes, 2):
        legend.append(label(note, class_="muted", x=MARGIN, y=row * ROW))
    title = f"Test errors of {name} and two controls on {len(by_member)} networks"
    told = "A row for each network; a mark further right is an arm with fewer test errors."
    return draw_svg(title, told, [*grid, *parts, *legend], y + ROW, is_file=True)


def _short(member: str) -> str:
    """Return the label of a member without what all of them share."""
    for long, short in (
        (", 60 epochs", ""),
        (" pooled", ""),
        (" images", ""),
        ("cifar16", "cifar"),
    ):
        member = member.replace(long, short)
    return member.replace("fashion14", "fashion")


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
