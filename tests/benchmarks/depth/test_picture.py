"""The picture of a cell: static depths as curves, networks grown by copies as labelled points."""

from __future__ import annotations

from xml.etree import ElementTree

from benchmarks.depth.cells import CELLS, Job, grown, static
from benchmarks.depth.picture import draw_front

CELL = CELLS["python-short"]


def record(job: Job, flops: float, loss: float, steps: int) -> dict[str, object]:
    return {**job.as_record(), "flops": flops, "loss": loss, "steps": steps, "seconds": 1.0}


def test_static_depths_and_grown_networks_are_drawn() -> None:
    records = [
        record(static(CELL, 12, length=0.5), 2e15, 0.8, 1_000),
        record(static(CELL, 12), 4e15, 0.75, 2_000),
        record(static(CELL, 6, compute=0.75), 3e15, 0.76, 3_000),
        record(grown(CELL), 3e15, 0.74, 2_000),
        record(grown(CELL, start="fresh"), 3e15, 0.85, 2_000),
    ]
    root = ElementTree.fromstring(draw_front(records, "python-short"))
    space = "{http://www.w3.org/2000/svg}"
    texts = [element.text for element in root.iter(f"{space}text")]
    assert {"12", "6", "3→6→12", "3e15"} <= set(texts)
    circles = list(root.iter(f"{space}circle"))
    assert sum(circle.get("class") == "end grown" for circle in circles) == 1
    assert len(circles) == 4
    root = ElementTree.fromstring(draw_front(records, "python-short", [12]))
    assert "6" not in {element.text for element in root.iter(f"{space}text")}
