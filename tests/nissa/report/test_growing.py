from __future__ import annotations

import re
from dataclasses import replace
from html.parser import HTMLParser
from pathlib import Path

import pytest

from esper.leyline.errors import CheckpointError
from esper.leyline.records import EpochRecord, RunSummary
from esper.nissa.report.growing import render_report
from esper.nissa.report.page import write_report
from tests.nissa.report.runs import (
    COMMAND,
    CONFIG,
    VERSIONS,
    growing_run,
    make_decision,
    make_epoch,
    make_slot,
    summary_of,
)

HOSTILE = "<img src=x onerror=alert(1)>\"'&\x07\u202e\udcff" + "W" * 500


class Reader(HTMLParser):
    """Checks that elements nest, and keeps the text of everything but styles."""

    VOID = frozenset({"meta", "br", "img", "link"})

    def __init__(self) -> None:
        super().__init__(convert_charrefs=True)
        self.open: list[str] = []
        self.elements: list[tuple[str, dict[str, str | None]]] = []
        self.text = ""

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.elements.append((tag, dict(attrs)))
        if tag not in self.VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.elements.append((tag, dict(attrs)))

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        if self.open and self.open[-1] != "style":
            self.text += data

    def count(self, tag: str) -> int:
        return sum(name == tag for name, _ in self.elements)


def read(page: str) -> Reader:
    reader = Reader()
    reader.feed(page)
    reader.close()
    assert reader.open == []
    return reader


def render(history: list[EpochRecord], summary: RunSummary | None) -> str:
    return render_report(history, summary, config=CONFIG, command=COMMAND, versions=VERSIONS)


@pytest.fixture
def history() -> list[EpochRecord]:
    return growing_run()


def test_page_has_all_its_sections(history: list[EpochRecord]) -> None:
    reader = read(render(history, summary_of(history)))
    for tag in ("main", "header", "h1", "figure", "figcaption", "svg"):
        assert reader.count(tag) == 1
    for text in ("Seeds", "Decisions", "Configuration", "Command", "Versions", COMMAND):
        assert text in reader.text
    for text in ("optimizer.weight_decay", "none", "r0c0, r0c1, r0c2", "2.13.0", "1 min 14 s"):
        assert text in reader.text
    assert "digits: a grown network" in reader.text
    assert "4,210 → 6,020" in reader.text


def test_seeds_and_decisions_are_told_in_full(history: list[EpochRecord]) -> None:
    page = render(history, summary_of(history))
    assert "+1.87 ± 0.42" in page
    assert "blueprint norm, style linear_add, tempo 5, alpha target 0.70" in page
    assert "gate failed" in page
    assert "another slot is cooling down" in page
    decisions = page[page.index("<h2>Decisions") : page.index("<h2>How to repeat")]
    assert decisions.count("<tr>") == 1 + 11
    assert "wait" not in decisions.lower().replace("decisions other than wait", "")


def test_nothing_is_fetched_and_nothing_runs(history: list[EpochRecord]) -> None:
    page = render(history, summary_of(history))
    assert not re.search(r"https?://|\bsrc=|\bhref=|url\(|@import|<script|<link", page)
    assert "default-src 'none'" in page


def test_hostile_values_stay_text(history: list[EpochRecord]) -> None:
    hostile = [
        replace(
            record,
            slots=tuple(replace(slot, name=HOSTILE) for slot in record.slots[1:2]),
            decision=make_decision(
                "GERMINATE", HOSTILE, blueprint=HOSTILE, style=HOSTILE, reason=HOSTILE
            ),
        )
        for record in history
    ]
    page = render_report(
        hostile,
        summary_of(hostile, task=HOSTILE, controller=HOSTILE),
        config={HOSTILE: HOSTILE, "nested": {HOSTILE: [{HOSTILE: HOSTILE}]}},
        command=HOSTILE,
        versions={HOSTILE: HOSTILE},
    )
    page.encode()
    reader = read(page)
    assert reader.count("img") == 0
    assert "\x07" not in page
    assert "\u202e" not in page
    assert r"\x07\u202e\udcff" in reader.text


def test_gain_is_told_only_with_a_twin(history: list[EpochRecord]) -> None:
    with_twin = read(render(history, summary_of(history, val_score=96.2, twin_val_score=95.0)))
    assert "+1.20 points" in with_twin.text
    assert "1.20 more than its twin" in with_twin.text
    alone = growing_run(with_twin=False)
    assert "twin" not in read(render(alone, summary_of(alone))).text


def test_measured_and_unmeasured_contributions_differ() -> None:
    slots = (make_slot("a", stage="TRAINING", blueprint="norm", parameters=8),)
    history = [make_epoch(epoch, 50.0 + epoch, slots=slots) for epoch in (1, 2)]
    page = render(history, None)
    assert "not measured" in page
    assert "± 0" not in page
    assert ">0.00<" not in page


def test_an_empty_history_gives_a_clear_page() -> None:
    reader = read(render([], None))
    assert "No epochs were recorded" in reader.text
    assert reader.count("svg") == 0
    assert COMMAND in reader.text


def test_a_summary_without_epochs_is_told(history: list[EpochRecord]) -> None:
    reader = read(render([], summary_of(history)))
    assert "the epochs are missing" in reader.text
    assert "conv_light" in reader.text


def test_a_run_before_its_end_is_told_from_its_epochs(history: list[EpochRecord]) -> None:
    reader = read(render(history[:30], None))
    assert "not yet at its end" in reader.text
    assert "Written after epoch 30" in reader.text
    assert "1 was still growing" in reader.text


def test_decisions_table_is_bounded() -> None:
    history = [
        make_epoch(epoch, 50.0, decision=make_decision("ADVANCE", "r0c0"))
        for epoch in range(1, 801)
    ]
    page = render(history, None)
    decisions = page[page.index("<h2>Decisions") : page.index("<h2>How to repeat")]
    assert decisions.count("<tr>") == 1 + 500
    assert "And 300 more decisions not shown here." in decisions


def test_same_run_gives_the_same_page(history: list[EpochRecord]) -> None:
    assert render(history, summary_of(history)) == render(growing_run(), summary_of(history))


def test_report_is_written_whole_or_not_at_all(tmp_path: Path, history: list[EpochRecord]) -> None:
    path = tmp_path / "run" / "report.html"
    page = render(history, summary_of(history))
    write_report(path, page)
    assert path.read_text(encoding="utf-8") == page
    with pytest.raises(CheckpointError, match="cannot save"):
        write_report(path / "below" / "a-file.html", page)
